"""Other engines' sealed segments: what is found and read of them, what never is, and what their owner changes."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from doubles import MakeRig, Rig, from_ssd
from saria_vllm.errors import StorageError
from saria_vllm.storage import foreign
from saria_vllm.storage import format as fmt
from saria_vllm.storage.drives import read_aligned
from saria_vllm.storage.foreign import OthersFiles
from saria_vllm.storage.namespace import EngineDirectory, namespace_name, store_id
from saria_vllm.storage.recovery import data_name, journal_name
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import Extent, OpenSsd
from store_bench import SEGMENT_BYTES, SHAPES, checksum, fill, is_right, payload, write

PARTS = {"model": "a"}
NAME = namespace_name(PARTS)
RECORDS = 4


class Engine:
    """An engine as far as it is on disk: its directory, and a store for each rank."""

    def __init__(self, paths: tuple[str, ...], ranks: int = 1, namespace: str = NAME) -> None:
        self.directory = EngineDirectory.claim(paths, namespace, PARTS, 0)
        self.index = self.directory.index
        self.files = OthersFiles(paths, namespace, self.index, ranks, SHAPES)
        self.stores = []
        for rank in range(ranks):
            opened = OpenSsd(self.directory.directories, self.directory.generation, SEGMENT_BYTES, 8)
            self.stores.append(SegmentStore(opened, rank, SHAPES, store_id(namespace, self.index, rank)))
            self.found = self.stores[-1].recover()

    @property
    def store(self) -> SegmentStore:
        return self.stores[0]

    def look(self) -> dict[bytes, Extent]:
        found, _, more = self.files.look()
        assert not more
        return {chunk.key: chunk.extent for chunk in found}

    def end(self) -> None:
        """Die: nothing is sealed."""
        self.directory.release()


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # No power is lost here.
    return (str(tmp_path / "a"), str(tmp_path / "b"))


Make = Callable[..., Engine]


@pytest.fixture
def make(paths: tuple[str, ...]) -> Iterator[Make]:
    engines: list[Engine] = []

    def make(ranks: int = 1, namespace: str = NAME) -> Engine:
        engines.append(Engine(paths, ranks, namespace))
        return engines[-1]

    yield make
    for engine in engines:
        for store in engine.stores:
            assert not store.reading
            store.close()
        engine.directory.release()


def open_files(root: str) -> list[str]:
    files = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return [file for file in files if file.startswith(root) and ".data" in file]


def test_what_another_sealed_is_found_once_and_read_right(make: Make, paths: tuple[str, ...]) -> None:
    ours, theirs = make(), make()
    assert (ours.index, theirs.index) == (0, 1)
    keys = fill(theirs.store, 3) + fill(theirs.store, 4, drive=1)
    fill(theirs.store, 5, count=RECORDS - 1)  # stays open
    fill(ours.store, 3)
    found = ours.look()
    assert found == {key: Extent(4 + (i // 4), 3 + i // 4, i % 4) for i, key in enumerate(keys)}
    assert all(is_right(ours.store, 0, extent, key) for key, extent in found.items())
    assert len(open_files(paths[0] + f"/saria/{NAME}/e1")) == 1 + 1, "only by its owner: a sealed and an open one"
    assert ours.look() == {}
    write(theirs.store, 0, Extent(0, 5, RECORDS - 1), b"last")
    assert set(ours.look()) == {b"0-5-0", b"0-5-1", b"0-5-2", b"last"}
    assert set(theirs.look()) == {b"0-3-0", b"0-3-1", b"0-3-2", b"0-3-3"}


def test_both_groups_and_parents_are_found(make: Make) -> None:
    ours, theirs = make(), make()
    fill(theirs.store)
    records = theirs.store.records_max(1)
    for record in range(records):
        write(theirs.store, 1, Extent(1, 9, record), b"g%d" % record, b"parent")
    found, _, _ = ours.files.look()
    assert {(chunk.group, chunk.parent) for chunk in found} >= {(1, b"parent"), (0, b""), (0, b"0-0-0")}
    for chunk in found:
        assert is_right(ours.store, chunk.group, chunk.extent, chunk.key)
    with pytest.raises(StorageError):
        ours.store.read_target(0, Extent(5, 9, 0))


def test_a_segment_that_its_owner_retires_is_read_to_the_end_and_then_gone(make: Make) -> None:
    ours, theirs = make(), make()
    (first, second, *_), found = fill(theirs.store), ours.look()
    fd, offset, expected = ours.store.read_target(0, found[first])
    theirs.store.retire(0, 0)
    data = read_aligned(fd, SHAPES[0].record_bytes, offset)
    assert data == payload(first, len(data)) and checksum(data, ours.store.seed(found[first], first)) == expected
    with pytest.raises(StorageError, match="gone"):
        ours.store.read_target(0, found[second])
    ours.store.release(fd)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(fd)
    assert ours.files.look() == ([], [(4, 0)], False)
    assert ours.files.look() == ([], [], False)


def test_a_reader_never_changes_what_is_anothers(make: Make, paths: tuple[str, ...]) -> None:
    ours, theirs = make(), make()
    keys, found = fill(theirs.store), ours.look()
    files = sorted(Path(paths[0], "saria", NAME, "e1", "r0").iterdir())
    before = [(file.name, file.read_bytes()) for file in files]
    ours.store.forget(found[keys[0]])
    ours.store.retire(4, 0)
    ours.store.abandon(0, found[keys[1]])
    with pytest.raises(StorageError):
        ours.store.write_target(0, found[keys[2]])
    ours.store.seal(4, 0)
    assert [(file.name, file.read_bytes()) for file in sorted(files[0].parent.iterdir())] == before
    assert is_right(ours.store, 0, found[keys[3]], keys[3])


def test_a_dropped_record_is_not_found_by_others(make: Make) -> None:
    ours, theirs = make(), make()
    keys = fill(theirs.store)
    theirs.store.forget(Extent(0, 0, 1))
    assert set(ours.look()) == {keys[0], keys[2], keys[3]}
    with pytest.raises(StorageError):
        ours.store.read_target(0, Extent(4, 0, 1))


def test_what_was_written_after_a_reset_is_never_anothers(make: Make) -> None:
    """It belongs to weights that were replaced in place."""
    ours, theirs = make(), make()
    keys, found = fill(theirs.store), ours.look()
    theirs.store.set_generation(theirs.directory.bump_generation())
    fill(theirs.store, 7)
    assert ours.files.look() == ([], [(4, 0)], False)
    for extent in (found[keys[0]], Extent(4, 7, 0)):
        with pytest.raises(StorageError):
            ours.store.read_target(0, extent)


def test_records_of_a_reset_whose_mark_was_lost_are_not_used(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = make(), make()

    def fails(*args: object, **more: object) -> None:
        raise StorageError("read-only")

    monkeypatch.setattr(theirs.directory, "_write_generation", fails)
    keys = fill(theirs.store)
    with pytest.raises(StorageError):
        theirs.directory.bump_generation()
    theirs.store.set_generation(theirs.directory.generation)
    fill(theirs.store, 7)
    assert set(ours.look()) == set(keys), "of before the reset, when the weights were those on disk"
    with pytest.raises(StorageError):
        ours.store.read_target(0, Extent(4, 7, 0))


def test_another_generation_of_the_same_owner_replaces_the_one_before(make: Make) -> None:
    ours, theirs = make(), make()
    fill(theirs.store)
    ours.look()
    theirs.directory.bump_generation()
    theirs.end()
    again = make()
    assert again.index == 1
    fill(again.store)
    found, gone, _ = ours.files.look()
    assert (found, gone) == ([], [(4, 0)]), "those who know the segment by its old records forget it first"
    found = ours.look()
    assert all(is_right(ours.store, 0, extent, key) for key, extent in found.items()) and len(found) == RECORDS


def test_a_segment_id_that_comes_back_is_read_by_its_new_index(make: Make) -> None:
    ours, theirs = make(), make()
    (key, *_), found = fill(theirs.store), ours.look()
    assert is_right(ours.store, 0, found[key], key)
    theirs.store.retire(0, 0)
    theirs.end()
    again = make()
    for record in range(RECORDS):
        write(again.store, 0, Extent(0, 0, record), b"new%d" % record)
    assert is_right(ours.store, 0, found[key], key) is False, "a mismatch, which is a miss"
    assert is_right(ours.store, 0, found[key], b"new0")


def test_a_chunk_is_there_when_all_ranks_have_it(make: Make) -> None:
    ours, theirs = make(2), make(2)
    keys = fill(theirs.stores[0])
    assert ours.look() == {}
    for record, key in enumerate([keys[0], b"other", keys[2]]):
        write(theirs.stores[1], 0, Extent(0, 0, record), key)
    assert ours.look() == {}, "sealed on one rank only"
    theirs.stores[1].abandon(0, Extent(0, 0, 3))
    assert set(ours.look()) == {keys[0], keys[2]}
    for rank in range(2):
        assert is_right(ours.stores[rank], 0, Extent(4, 0, 0), keys[0])
    theirs.stores[1].retire(0, 0)
    assert ours.files.look() == ([], [(4, 0)], False), "one rank's retirement is enough"


def test_a_segment_that_ranks_use_for_different_groups_has_no_chunks(make: Make) -> None:
    ours, theirs = make(2), make(2)
    for record in range(RECORDS):
        write(theirs.stores[0], 0, Extent(0, 0, record), b"k%d" % record)
    for record in range(theirs.stores[1].records_max(1)):
        write(theirs.stores[1], 1, Extent(0, 0, record), b"k%d" % record)
    assert ours.look() == {}


def test_a_journal_that_a_seal_left_behind_takes_nothing_away(make: Make, paths: tuple[str, ...]) -> None:
    """A crash between the two: it has all that the index has, and drops that came later."""
    ours, theirs = make(), make()
    fill(theirs.store, count=RECORDS - 1)
    journal = Path(paths[0], "saria", NAME, "e1", "r0", journal_name(0))
    before = journal.read_bytes()
    write(theirs.store, 0, Extent(0, 0, RECORDS - 1), b"last")
    theirs.store.forget(Extent(0, 0, 1))
    journal.write_bytes(before + journal.read_bytes())
    found = ours.look()
    assert set(found) == {b"0-0-0", b"0-0-2", b"last"}
    assert all(is_right(ours.store, 0, extent, key) for key, extent in found.items())


def test_a_record_of_a_segment_that_was_forgotten_meanwhile_is_a_mismatch(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More segments were read at once than a worker remembers."""
    monkeypatch.setattr(foreign, "KNOWN_MAX", 1)
    ours, theirs = make(), make()
    (key, *_), (other, *_) = fill(theirs.store), fill(theirs.store, 1)
    found = ours.look()
    fd, offset, expected = ours.store.read_target(0, found[key])
    data = read_aligned(fd, SHAPES[0].record_bytes, offset)
    assert checksum(data, ours.store.seed(found[key], key)) == expected
    assert is_right(ours.store, 0, found[other], other)
    assert checksum(data, ours.store.seed(found[key], key)) != expected
    ours.store.release(fd)
    assert is_right(ours.store, 0, found[key], key)


def test_an_orphan_is_read_like_any_other(make: Make) -> None:
    ours, theirs = make(), make()
    keys = fill(theirs.store)
    theirs.end()
    found = ours.look()
    assert set(found) == set(keys) and all(is_right(ours.store, 0, extent, key) for key, extent in found.items())


def test_of_another_namespace_nothing_is_found(make: Make) -> None:
    ours, theirs = make(), make(namespace=namespace_name({"model": "b"}))
    fill(theirs.store)
    assert theirs.index == 0
    assert ours.look() == {}


def test_a_look_ends_after_so_many_chunks_and_goes_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = make(), make()
    for segment in range(3):
        fill(theirs.store, segment)
    monkeypatch.setattr(foreign, "FOUND_MAX", RECORDS)
    looks = [ours.files.look() for _ in range(3)]
    assert [[chunk.extent.segment for chunk in found] for found, _, _ in looks] == [[0] * 4, [1] * 4, [2] * 4]
    assert [(gone, more) for _, gone, more in looks] == [([], True), ([], True), ([], False)]


def test_a_worker_remembers_so_many_segments_and_reads_all(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "KNOWN_MAX", 2)
    ours, theirs = make(), make()
    for segment in range(4):
        fill(theirs.store, segment)
    found = ours.look()
    assert all(is_right(ours.store, 0, extent, key) for _ in range(2) for key, extent in found.items())
    assert len(ours.store._others._known) == 2
    with pytest.raises(StorageError):
        ours.store.read_target(0, Extent(4, 0, RECORDS))


def damage_index(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)


def damage_header(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[9] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def longer(file: Path) -> None:
    os.truncate(file, file.stat().st_size + 4096)


def of_a_group_that_is_not_ours(file: Path) -> None:
    change_header(file, group=7)


def of_a_group_of_other_sizes(file: Path) -> None:
    change_header(file, group=1)


def change_header(file: Path, **fields: int) -> None:
    data = file.read_bytes()
    header = fmt.parse_header(data[: fmt.HEADER_BYTES])._replace(**fields)
    file.write_bytes(fmt.pack_header(header) + data[fmt.HEADER_BYTES :])


def a_link(file: Path) -> None:
    file.rename(file.with_name("kept"))
    file.symlink_to("kept")


def a_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def of_another_engine(file: Path) -> None:
    other = EngineDirectory.claim((str(file.parents[4]),), NAME, PARTS, 5)
    opened = OpenSsd(other.directories, 1, SEGMENT_BYTES, 8)
    store = SegmentStore(opened, 0, SHAPES, store_id(NAME, 5, 0))
    fill(store)
    store.close()
    file.write_bytes(Path(other.directories[0], "r0", data_name(0)).read_bytes())
    shutil.rmtree(other.directories[0])
    other.release()


@pytest.mark.parametrize(
    "harm",
    [
        damage_index, damage_header, cut, longer, a_link, a_fifo, of_another_engine, of_a_group_that_is_not_ours,
        of_a_group_of_other_sizes,
    ],
)  # fmt: skip
def test_a_file_that_is_not_what_it_should_be_is_neither_found_nor_read(
    make: Make, paths: tuple[str, ...], harm: Callable[[Path], None]
) -> None:
    ours, theirs = make(), make()
    fill(theirs.store)
    fill(theirs.store, 1)
    harm(Path(paths[0], "saria", NAME, "e1", "r0", data_name(0)))
    assert {extent.segment for extent in ours.look().values()} == {1}
    with pytest.raises((StorageError, OSError)):
        ours.store.read_target(0, Extent(4, 0, 0))


@pytest.mark.parametrize("at", ["e1", "e1/r0", "e1/generation"])
def test_links_in_the_place_of_anothers_are_not_followed(make: Make, paths: tuple[str, ...], at: str) -> None:
    ours, theirs = make(), make()
    fill(theirs.store)
    place = Path(paths[0], "saria", NAME, at)
    place.rename(place.with_name("elsewhere"))
    place.symlink_to("elsewhere")
    assert ours.look() == {}
    with pytest.raises((StorageError, OSError)):
        ours.store.read_target(0, Extent(4, 0, 0))


def test_a_flipped_byte_of_a_payload_is_a_mismatch(make: Make, paths: tuple[str, ...]) -> None:
    ours, theirs = make(), make()
    keys, found = fill(theirs.store), ours.look()
    file = Path(paths[0], "saria", NAME, "e1", "r0", data_name(0))
    data = bytearray(file.read_bytes())
    data[fmt.record_offset(4096, 2) + 7] ^= 1
    file.write_bytes(data)
    assert [is_right(ours.store, 0, found[key], key) for key in keys] == [True, True, False, True]


def test_engines_beyond_what_a_claim_tries_are_left_alone(make: Make, paths: tuple[str, ...]) -> None:
    ours = make()
    theirs = EngineDirectory.claim(paths, NAME, PARTS, foreign.ENGINES_MAX)
    Path(theirs.directories[0], "r0").mkdir()
    assert ours.files.look() == ([], [], False)
    theirs.release()


def test_a_path_that_went_is_no_others(make: Make, paths: tuple[str, ...]) -> None:
    ours, theirs = make(), make()
    fill(theirs.store)
    found = ours.look()
    os.rename(paths[0], paths[0] + "-gone")
    assert ours.files.look() == ([], [(4, 0)], False)
    with pytest.raises(StorageError):
        ours.store.read_target(0, found[b"0-0-0"])
    os.rename(paths[0] + "-gone", paths[0])
    assert len(ours.look()) == RECORDS


@pytest.mark.parametrize("engine", ["posix", "io_uring"])
def test_the_executor_loads_what_another_persisted(make_rig: MakeRig, tmp_path: Path, engine: str) -> None:
    rigs: list[Rig] = []
    directories = [EngineDirectory.claim((str(tmp_path),), NAME, PARTS, 0) for _ in range(2)]
    for directory in directories:
        rig = make_rig(engine=engine)
        cost = fmt.segment_cost_bytes(rig.shapes[0].record_bytes, RECORDS)
        rig.executor.set_generation(directory.generation)
        opened = OpenSsd(directory.directories, directory.generation, cost, 10)
        rig.executor.open_ssd(opened, 0, store_id(NAME, directory.index, 0))
        rigs.append(rig)
    theirs, ours = rigs
    for rig in rigs:
        while (result := rig.executor.take_opened()) is None:
            time.sleep(0.001)
        assert not result.problem
    keys = [b"k%d" % record for record in range(RECORDS)]
    for record, key in enumerate(keys):
        assert not theirs.put_on_ssd(0, key, Extent(0, 0, record)).failed
    shapes = {shape.group: shape for shape in ours.shapes}
    found = OthersFiles((str(tmp_path),), NAME, 1, 1, shapes).look()[0]
    assert [chunk.key for chunk in found] == keys
    blocks = [[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3][: ours.shapes[0].blocks_per_chunk] for i in range(RECORDS)]
    items = [from_ssd(0, blocks[i], chunk.extent, chunk.key) for i, chunk in enumerate(found)]
    assert not ours.loaded(ours.load(*items)).failed
    assert all(ours.is_at(0, key, blocks[i]) for i, key in enumerate(keys))
    assert ours.loaded(ours.load(items[0]._replace(key=b"another"))).reason == "checksum"
    theirs.executor.retire(0, 0)
    rank_directory = tmp_path / "saria" / NAME / "e0" / "r0"
    while list(rank_directory.iterdir()):
        time.sleep(0.001)
    assert ours.loaded(ours.load(items[1])).reason == "not_found"
    assert theirs.loaded(theirs.load(from_ssd(0, blocks[0], Extent(0, 0, 0), keys[0]))).failed
    for directory in directories:
        directory.release()
