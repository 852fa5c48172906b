"""What is on disk after a crash or a fault: recovery may lose records, a reader must never accept a wrong byte.

Payload is a function of the key, so that every wrong byte names itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from saria_vllm.errors import StorageError
from saria_vllm.storage import format as fmt
from saria_vllm.storage.namespace import RESETS_MAX, EngineDirectory, namespace_name, store_id
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import Extent, FoundChunk, GroupShape, OpenSsd

RECORD_BYTES = 8192
SHAPES = {0: GroupShape(0, 16, 2, 4096)}
STORE_ID = b"0123456789abcdef"
RECORDS = 3
SEGMENT_BYTES = fmt.segment_cost_bytes(RECORD_BYTES, RECORDS)
DATA, JOURNAL = "seg-{:016x}.data", "seg-{:016x}.journal"


def checksum(data: bytes, seed: int) -> int:
    """Stands in for the native one."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=seed.to_bytes(8, "little")).digest(), "little")


def payload(key: bytes) -> bytes:
    return random.Random(key).randbytes(RECORD_BYTES)


@contextlib.contextmanager
def opened(*directories: Path, generation: int = 1, segments_max: int = 8) -> Iterator[SegmentStore]:
    opening = OpenSsd(tuple(map(str, directories)), generation, SEGMENT_BYTES, segments_max)
    store = SegmentStore(opening, 0, SHAPES, STORE_ID)
    try:
        yield store
    finally:
        store.close()


def write(store: SegmentStore, extent: Extent, key: bytes) -> None:
    fd, offset = store.write_target(0, extent)
    with mmap.mmap(-1, RECORD_BYTES) as buffer:
        buffer[:] = payload(key)
        assert os.pwrite(fd, buffer, offset) == RECORD_BYTES
    store.release(fd)
    store.commit(0, extent, key, b"", checksum(payload(key), store.seed(extent, key)))


def is_right(store: SegmentStore, chunk: FoundChunk) -> bool:
    """False for a mismatch, which is a miss. Bytes that match but are wrong end the test."""
    fd, offset, expected = store.read_target(0, chunk.extent)
    with mmap.mmap(-1, RECORD_BYTES) as buffer:
        data = buffer[: os.preadv(fd, [buffer], offset)]
    store.release(fd)
    if checksum(data, store.seed(chunk.extent, chunk.key)) != expected:
        return False
    assert data == payload(chunk.key), f"wrong bytes accepted for {chunk}"
    return True


def right_keys(*directories: Path, generation: int = 1) -> set[bytes]:
    """Reopen, read everything, and return the keys that came back right."""
    with opened(*directories, generation=generation) as store:
        return {chunk.key for chunk in store.recover().items if is_right(store, chunk)}


class Write(NamedTuple):
    """A file operation that may not have reached the disk."""

    name: str
    offset: int
    data: bytes


def history(keys: list[bytes], segment: int = 0, generation: int = 1) -> tuple[dict[str, Write], dict[str, int]]:
    """What a store writes for these records, and the sizes of the files, from the format alone."""
    header = fmt.Header(STORE_ID, 0, segment, 0, RECORD_BYTES, RECORDS)
    data, journal = DATA.format(segment), JOURNAL.format(segment)
    operations = {"header": Write(data, 0, fmt.pack_header(header))}
    entries = []
    for record, key in enumerate(keys):
        seed = fmt.seed_of(STORE_ID, key, generation, segment, record)
        entry = fmt.Entry(record, generation, checksum(payload(key), seed), record + 1, key, b"")
        entries.append(entry)
        operations[f"data {record}"] = Write(data, fmt.record_offset(RECORD_BYTES, record), payload(key))
        packed = fmt.pack_entry(entry, fmt.salt_of(header))
        operations[f"journal {record}"] = Write(journal, record * fmt.ENTRY_BYTES, packed)
    operations["index"] = Write(data, fmt.index_offset(header), fmt.pack_index(entries, header))
    return operations, {data: fmt.data_file_bytes(RECORD_BYTES, RECORDS), journal: 0}


def stage(directory: Path, files: dict[str, bytearray]) -> None:
    rank = directory / "r0"
    rank.mkdir(parents=True, exist_ok=True)
    for old in rank.iterdir():
        old.unlink()
    for name, content in files.items():
        (rank / name).write_bytes(content)


def apply(content: bytearray, write: Write, part: float) -> None:
    data = write.data[: int(len(write.data) * part)]
    if len(content) < write.offset + len(data):
        content.extend(bytes(write.offset + len(data) - len(content)))
    content[write.offset : write.offset + len(data)] = data


def test_the_history_is_what_a_store_writes(tmp_path: Path) -> None:
    keys = [b"k0", b"k1", b"k2"]
    operations, sizes = history(keys)
    (tmp_path / "e").mkdir()
    with opened(tmp_path / "e") as store:
        store.recover()
        for record, key in enumerate(keys[:2]):
            write(store, Extent(0, 0, record), key)
        journal = (tmp_path / "e" / "r0" / JOURNAL.format(0)).read_bytes()
        assert journal == operations["journal 0"].data + operations["journal 1"].data
        write(store, Extent(0, 0, 2), keys[2])
    content = bytearray(sizes[DATA.format(0)])
    for operation in operations.values():
        if operation.name == DATA.format(0):
            apply(content, operation, 1.0)
    assert (tmp_path / "e" / "r0" / DATA.format(0)).read_bytes() == content


@pytest.mark.parametrize("before", ["zeros", "older generation", "other key"])
def test_every_subset_of_pending_operations(tmp_path: Path, before: str) -> None:
    """Each write dropped, torn or whole, in any combination, with the journal unlinked or not."""
    keys = [b"k0", b"k1"]
    rng = random.Random(before)
    operations, sizes = history(keys)
    old_keys = {"zeros": [], "older generation": keys, "other key": [b"k1", b"k0"]}[before]
    old, _ = history(old_keys, generation=1 if before == "other key" else 7)
    pending = len(operations) - 1
    states = [(1.0, *parts) for parts in itertools.product((0.0, 0.5, 1.0), repeat=pending)]
    states += [(header, *[1.0] * pending) for header in (0.0, 0.5)]
    for number, parts in enumerate(states):
        files = {name: bytearray(size) for name, size in sizes.items()}
        for label, operation in old.items():
            if label.startswith("data"):
                apply(files[operation.name], operation, 1.0)
        landed = {}
        for (label, operation), part in zip(operations.items(), parts, strict=True):
            landed[label] = part == 1.0
            apply(files[operation.name], operation, rng.uniform(0.01, 0.99) if part == 0.5 else part)
        for unlinked in (False, True):
            if unlinked:
                del files[JOURNAL.format(0)]
            stage(tmp_path, files)
            expected = set()
            for record, key in enumerate(keys):
                journaled = not unlinked and all(landed[f"journal {at}"] for at in range(record + 1))
                if landed["header"] and landed[f"data {record}"] and (landed["index"] or journaled):
                    expected.add(key)
            found = right_keys(tmp_path)
            assert found >= expected, landed  # more when what was torn off was zeros
            if number % 10 == 0:
                assert right_keys(tmp_path) == found


def test_every_state_of_a_retire(tmp_path: Path) -> None:
    operations, sizes = history([b"k0", b"k1"])
    files = {name: bytearray(size) for name, size in sizes.items()}
    for operation in operations.values():
        apply(files[operation.name], operation, 1.0)
    for kept in ([], [DATA.format(0)], [JOURNAL.format(0)], list(files)):
        stage(tmp_path, {name: files[name] for name in kept})
        assert right_keys(tmp_path) == ({b"k0", b"k1"} if DATA.format(0) in kept else set())
        assert len(os.listdir(tmp_path / "r0")) == (DATA.format(0) in kept) + (len(kept) == 2)


def full_store(directory: Path, segments: int = 2) -> list[bytes]:
    directory.mkdir(exist_ok=True)
    keys = []
    with opened(directory) as store:
        store.recover()
        for segment, record in itertools.product(range(segments), range(RECORDS)):
            keys.append(b"%d.%d" % (segment, record))
            write(store, Extent(0, segment, record), keys[-1])
    return keys


def test_swapped_records_do_not_match(tmp_path: Path) -> None:
    full_store(tmp_path, 1)
    path = tmp_path / "r0" / DATA.format(0)
    content = bytearray(path.read_bytes())
    a, b = (slice(fmt.record_offset(RECORD_BYTES, at), fmt.record_offset(RECORD_BYTES, at + 1)) for at in (0, 2))
    content[a], content[b] = content[b], content[a]
    path.write_bytes(content)
    assert right_keys(tmp_path) == {b"0.1"}


def test_swapped_files_are_dropped(tmp_path: Path) -> None:
    full_store(tmp_path)
    a, b = (tmp_path / "r0" / DATA.format(segment) for segment in (0, 1))
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    assert right_keys(tmp_path) == set()
    assert os.listdir(tmp_path / "r0") == []


def test_payloads_of_another_segment_do_not_match(tmp_path: Path) -> None:
    full_store(tmp_path)
    a, b = (tmp_path / "r0" / DATA.format(segment) for segment in (0, 1))
    records = slice(fmt.HEADER_BYTES, fmt.record_offset(RECORD_BYTES, RECORDS))
    content = bytearray(a.read_bytes())
    content[records] = b.read_bytes()[records]
    a.write_bytes(content)
    assert right_keys(tmp_path) == {b"1.0", b"1.1", b"1.2"}


def test_swapped_journals_are_not_believed(tmp_path: Path) -> None:
    files: dict[str, bytearray] = {}
    for segment in (0, 1):
        operations, sizes = history([b"%d.0" % segment], segment)
        files |= {name: bytearray(size) for name, size in sizes.items()}
        for label, operation in operations.items():
            apply(files[operation.name], operation, float(label != "index"))
    a, b = JOURNAL.format(0), JOURNAL.format(1)
    stage(tmp_path, files)
    assert right_keys(tmp_path) == {b"0.0", b"1.0"}
    files[a], files[b] = files[b], files[a]
    stage(tmp_path, files)
    assert right_keys(tmp_path) == set()


@pytest.mark.parametrize("with_journal", [False, True])
def test_cut_files_are_dropped(tmp_path: Path, with_journal: bool) -> None:
    operations, sizes = history([b"k0", b"k1"])
    whole = {name: bytearray(size) for name, size in sizes.items()}
    for operation in operations.values():
        apply(whole[operation.name], operation, 1.0)
    if not with_journal:
        del whole[JOURNAL.format(0)]
    for cut in (1, 2, 16, 100, 511, 512, 4000, 4095, 4096):
        stage(tmp_path, {**whole, DATA.format(0): whole[DATA.format(0)][:-cut]})
        assert right_keys(tmp_path) == set()


def test_seeded_damage_is_never_accepted(tmp_path: Path) -> None:
    """Bits flipped and ranges overwritten anywhere in data file and journal."""
    operations, sizes = history([b"k0", b"k1", b"k2"])
    whole = {name: bytearray(size) for name, size in sizes.items()}
    for operation in operations.values():
        apply(whole[operation.name], operation, 1.0)
    lost = 0
    for seed in range(300):
        rng = random.Random(seed)
        files = {name: bytearray(content) for name, content in whole.items()}
        for _ in range(rng.randrange(1, 4)):
            content = files[rng.choice(list(files))]
            if rng.random() < 0.5:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            else:
                at = rng.randrange(0, len(content), 64)
                content[at : at + 4096] = rng.randbytes(len(content[at : at + 4096]))
        stage(tmp_path, files)
        found = right_keys(tmp_path)
        assert found <= {b"k0", b"k1", b"k2"}
        lost += len(found) < 3
    assert lost > 100


def test_another_engines_directory_copied_here_is_dropped(tmp_path: Path) -> None:
    full_store(tmp_path)
    opening = OpenSsd((str(tmp_path),), 1, SEGMENT_BYTES, 8)
    store = SegmentStore(opening, 0, SHAPES, store_id("0" * 32, 1, 0))
    assert len(store.recover()) == 0
    store.close()


def test_a_reset_survives_a_kill(tmp_path: Path) -> None:
    """Old entries are not found by the next claim, nor those of the process that reset, nor lost for those after."""
    paths = [str(tmp_path)]
    name = namespace_name({"model": "m"})
    script = (
        "import os, signal, sys; from saria_vllm.storage.namespace import EngineDirectory\n"
        "EngineDirectory.claim([sys.argv[1]], sys.argv[2], {}, 0).bump_generation()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    engine = EngineDirectory.claim(paths, name, {}, 0)
    directory = Path(engine.directories[0])
    full_store(directory, 1)
    engine.release()
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), name], check=False)
    assert done.returncode == -signal.SIGKILL
    with opened(directory, generation=2) as store:  # as the killed process might have written
        store.recover()
        write(store, Extent(0, store.next_segment_id, 0), b"in place")
    engine = EngineDirectory.claim(paths, name, {}, 0)
    assert (engine.index, engine.generation) == (0, 2 + RESETS_MAX)
    assert right_keys(directory, generation=engine.generation) == set()
    engine.release()


def writer(directories: list[str], seed: int) -> None:
    """Write until killed, reporting each commit after it returned and each retire before it begins."""
    rng = random.Random(seed)
    with opened(*map(Path, directories), segments_max=12) as store:
        found = store.recover().items
        segments = sorted({chunk.extent[:2] for chunk in found})
        number = store.next_segment_id
        while True:
            drive = rng.randrange(len(directories))
            for record in range(RECORDS):
                extent = Extent(drive, number, record)
                if rng.random() < 0.1:
                    store.abandon(0, extent)
                    continue
                key = b"%d:%d:%d" % (seed, number, record)
                write(store, extent, key)
                print("commit", *extent, key.decode(), flush=True)
            segments.append((drive, number))
            number += 1
            if len(segments) > 8:
                print("retire", *segments[0], 0, "-", flush=True)
                store.retire(*segments.pop(0))


def run_and_kill(directories: list[Path], seed: int, after_s: float) -> list[list[str]]:
    command = [sys.executable, __file__, str(seed), *map(str, directories)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    lines = [first, *process.stdout.read().splitlines()]
    process.stdout.close()
    process.wait()
    return [line.split() for line in lines if len(line.split()) == 5]


def test_kill_at_random_points_loses_nothing_committed(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    rng = random.Random(11)
    committed: dict[Extent, bytes] = {}
    retired: set[tuple[int, int]] = set()
    seed = commits = 0
    while seed < 10 or commits <= 30:  # A busy machine commits little before it is killed.
        seed += 1
        assert seed < 100
        for what, drive, segment, record, key in run_and_kill(directories, seed, rng.uniform(0, 0.05)):
            if what == "commit":
                committed[Extent(int(drive), int(segment), int(record))] = key.encode()
                commits += 1
            else:
                retired.add((int(drive), int(segment)))
        expected = {key for extent, key in committed.items() if extent[:2] not in retired}
        with opened(*directories, segments_max=12) as store:
            found = store.recover().items
            assert all(is_right(store, chunk) for chunk in found)
            keys = {chunk.key for chunk in found}
            assert keys >= expected
            assert len(keys) <= len(expected) + 1 + RECORDS  # a commit not yet reported, a retire not yet done
            assert len(keys) == len(found)
            for directory in directories:
                used = sum(os.stat(file).st_blocks * 512 for file in (directory / "r0").iterdir())
                assert used <= 12 * SEGMENT_BYTES
        # What was not reported or not done stays as it is: the next run must find it, too.
        committed, retired = {chunk.extent: chunk.key for chunk in found}, set()


def test_writers_and_readers_of_one_store_are_told_apart(tmp_path: Path) -> None:
    """A record is not readable between its write and its commit."""
    with opened(tmp_path) as store:
        store.recover()
        store.write_target(0, Extent(0, 0, 0))
        with pytest.raises(StorageError):
            store.read_target(0, Extent(0, 0, 0))
    assert right_keys(tmp_path) == set()


if __name__ == "__main__":
    writer(sys.argv[2:], int(sys.argv[1]))
