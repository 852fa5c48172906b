"""Damage to a store's files: flipped bits, records and files in wrong places, lengths that lie. All of it is misses."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from disk_states import (
    RECORD_BYTES,
    RECORDS,
    SEGMENT_BYTES,
    SHAPES,
    STORE_ID,
    Files,
    opened,
    put_files,
    read_files,
    right_keys,
    write,
)
from saria_vllm.storage import format as fmt
from saria_vllm.storage.recovery import Expected, data_name, journal_name, scan_directory
from saria_vllm.types import Extent

KEYS = {b"%d.%d" % (segment, record) for segment in range(3) for record in range(RECORDS - (segment == 2))}


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory."""
    directory = Path(tempfile.mkdtemp(prefix="saria-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


def make(directory: Path, payloads: int = 1, **other: object) -> Files:
    """Two sealed segments, an open one, and one whose only record was dropped after its seal."""
    directory.mkdir(exist_ok=True)
    with opened(directory, **other) as store:
        for key in sorted(KEYS):
            segment, record = map(int, key.split(b"."))
            write(store, Extent(0, segment, record), key, payloads)
        write(store, Extent(0, 3, 0), b"gone")
        store.seal(0, 3)
        store.forget(Extent(0, 3, 0))
    return read_files(directory / f"r{other.get('rank', 0)}")


def flip(files: Files, rng: random.Random) -> Files:
    """Some bits, half of them outside of payloads."""
    damaged = {name: bytearray(content) for name, content in files.items()}
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        name = rng.choice(sorted(damaged))
        content = damaged[name]
        at = rng.randrange(len(content))
        if name.endswith(".data") and rng.random() < 0.5:
            index = fmt.record_offset(RECORD_BYTES, RECORDS)
            entries = range(index, index + RECORDS * fmt.ENTRY_BYTES)
            area = range(index, index + 4096)
            at = rng.choice([rng.randrange(64), rng.randrange(4096), rng.choice(entries), rng.choice(area)])
        content[at] ^= 1 << rng.randrange(8)
    return {name: bytes(content) for name, content in damaged.items()}


def check_flips(memory: Path, seeds: range) -> int:
    """How many trials lost something. A wrong byte or an exception ends the test, and its seed is in the message."""
    files = make(memory / "made")
    lost = 0
    for seed in seeds:
        put_files(memory / "damaged" / "r0", flip(files, random.Random(seed)))
        try:
            found = right_keys(memory / "damaged")
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        assert found <= KEYS | {b"gone"}, seed  # Its drop is in the journal that may be damaged.
        lost += not found >= KEYS
    return lost


def test_flipped_bits_are_misses(memory: Path) -> None:
    assert check_flips(memory, range(500)) > 150


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_thousand_flipped_bits_are_misses(memory: Path) -> None:
    assert check_flips(memory, range(100_000)) > 30_000


def test_two_swapped_records_are_misses(memory: Path) -> None:
    for other in (0, 1):  # of the same segment, of another one
        files = make(memory / "made")
        one, two = (bytearray(files[data_name(segment)]) for segment in (0, other))
        two = one if other == 0 else two
        starts = [fmt.record_offset(RECORD_BYTES, record) for record in (0, 2)]
        first, second = (slice(start, start + RECORD_BYTES) for start in starts)
        one[first], two[second] = two[second], one[first]
        put_files(memory / "swapped" / "r0", {**files, data_name(0): bytes(one), data_name(other): bytes(two)})
        assert right_keys(memory / "swapped") == KEYS - {b"0.0", b"%d.2" % other}
        shutil.rmtree(memory / "made")


OTHERS = [{"rank": 1, "store_id": b"of another rank."}, {"store_id": b"another engine's"}, {"generation": 2}]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("what", ["records", "index", "journal", "file"])
def test_what_belongs_elsewhere_is_a_miss(memory: Path, other: dict[str, object], what: str) -> None:
    """Of another rank, engine or generation: records, an index, a journal, whole files, in ours."""
    ours, theirs = make(memory / "ours"), make(memory / "theirs", payloads=9, **other)
    sealed, left_open = data_name(0), data_name(2)
    index = fmt.record_offset(RECORD_BYTES, RECORDS)
    misses = {b"0.0", b"0.1", b"0.2"}
    files = dict(ours)
    if what == "records":
        files[sealed] = ours[sealed][:4096] + theirs[sealed][4096:index] + ours[sealed][index:]
    elif what == "index":
        files[sealed] = ours[sealed][:index] + theirs[sealed][index:]
    elif what == "file":
        files[sealed] = theirs[sealed]
    else:
        files[journal_name(2)] = theirs[journal_name(2)]
        misses = {b"2.0", b"2.1"}
    assert files != ours
    assert left_open in files
    put_files(memory / "mixed" / "r0", files)
    assert right_keys(memory / "mixed") == KEYS - misses


def test_swapped_files_are_misses(memory: Path) -> None:
    files = make(memory / "made")
    files[data_name(0)], files[data_name(1)] = files[data_name(1)], files[data_name(0)]
    put_files(memory / "swapped" / "r0", files)
    assert right_keys(memory / "swapped") == {b"2.0", b"2.1"}


LIES = [
    {"records_max": 2**32 - 1},
    {"record_bytes": 2**63},
    {"records_max": 2**31, "record_bytes": 4096},
    {"records_max": 2**22},
    {"group": 7},
]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_header_that_lies_costs_no_memory(memory: Path, lie: dict[str, int]) -> None:
    """Valid but for what it says; a sparse file has the size that it asks for, where a file can."""
    header = fmt.Header(STORE_ID, 0, 3, 0, RECORD_BYTES, RECORDS)._replace(**lie)
    path = memory / data_name(3)
    path.write_bytes(fmt.pack_header(header))
    size = fmt.data_file_bytes(header.record_bytes, header.records_max)
    if size < 2**45:
        os.truncate(path, size)
    journal = memory / journal_name(3)
    journal.touch()
    os.truncate(journal, 2**40)
    tracemalloc.start()
    try:
        scan = scan_directory(str(memory), Expected(STORE_ID, 0, SHAPES, 1, SEGMENT_BYTES), 8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert scan.segments == {}
    assert len(scan.notes) == 1 and data_name(3) in scan.notes[0] and "header" in scan.notes[0]
    assert os.listdir(memory) == []


def test_a_huge_journal_is_read_as_far_as_ours_can_be(memory: Path) -> None:
    files = make(memory / "made")
    put_files(memory / "huge" / "r0", files)
    os.truncate(memory / "huge" / "r0" / journal_name(2), 2**40)
    tracemalloc.start()
    try:
        assert right_keys(memory / "huge") == KEYS
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_directory_of_an_older_format_is_dropped_and_said(memory: Path) -> None:
    files = make(memory / "made")
    content = bytearray(files[data_name(0)])
    content[8:12] = (fmt.FORMAT_VERSION + 1).to_bytes(4, "little")
    content[4092:4096] = fmt.zlib.crc32(content[:4092]).to_bytes(4, "little")
    files[data_name(0)] = bytes(content)
    put_files(memory / "other" / "r0", files)
    with opened(memory / "other") as store:
        assert {chunk.key for chunk in store.recover().items} == KEYS - {b"0.0", b"0.1", b"0.2"}
        assert any(f"format version {fmt.FORMAT_VERSION + 1}, not {fmt.FORMAT_VERSION}" in note for note in store.notes)
    assert data_name(0) not in read_files(memory / "other" / "r0")


def test_nothing_outside_the_directory_is_touched(memory: Path) -> None:
    """Symlinks in the place of segment files, journals, the probe and the rank directory."""
    outside = memory / "outside"
    outside.mkdir()
    target = make(memory / "made")[data_name(0)]
    (outside / data_name(0)).write_bytes(target)
    (outside / "journal").write_bytes(b"precious")
    rank = memory / "engine" / "r0"
    rank.mkdir(parents=True)
    (rank / data_name(0)).symlink_to(outside / data_name(0))
    (rank / data_name(1)).write_bytes(make(memory / "again")[data_name(1)])
    (rank / journal_name(1)).symlink_to(outside / "journal")
    (rank / "probe").symlink_to(outside / "journal")
    (rank / "seg-0000000000000002.data").symlink_to(outside)
    assert right_keys(memory / "engine") == {b"1.0", b"1.1", b"1.2"}
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {
        data_name(0): target,
        "journal": b"precious",
    }
    assert not any(path.is_symlink() for path in rank.iterdir() if path.suffix == ".data")
    (memory / "linked").mkdir()
    (memory / "linked" / "r0").symlink_to(rank)
    with pytest.raises(Exception, match="symlink"), opened(memory / "linked"):
        pass
