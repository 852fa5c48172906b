"""SegmentStore over real files: life of a record, limits, modes, errors, reopening."""

from __future__ import annotations

import errno
import mmap
import os
import random
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from saria_vllm.errors import StorageError
from saria_vllm.storage import format as fmt
from saria_vllm.storage import segments as segments_module
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import Extent, FoundChunk, OpenSsd
from store_bench import SEGMENT_BYTES, SHAPES, STORE_ID, Bench, checksum, fill, is_right, payload, write


def test_a_record_lives(bench: Bench) -> None:
    store, found = bench.reopen()
    assert (found, store.next_segment_id, store.records_max(0)) == ([], 0, 4)
    extent = Extent(1, 5, 2)
    write(store, 0, extent, b"key", b"parent")
    assert is_right(store, 0, extent, b"key")
    assert not is_right(store, 0, extent, b"kez")
    assert store.next_segment_id == 6
    assert bench.files(1) == ["seg-0000000000000005.data", "seg-0000000000000005.journal"]
    assert bench.files(0) == []


def test_full_segments_are_sealed_and_found(bench: Bench) -> None:
    store, _ = bench.reopen()
    keys = fill(store)
    assert bench.files() == ["seg-0000000000000000.data"]
    assert all(is_right(store, 0, Extent(0, 0, record), key) for record, key in enumerate(keys))
    store.close()
    again, found = bench.reopen()
    parents = [b"", *keys[:3]]
    assert found == [FoundChunk(0, keys[i], parents[i], Extent(0, 0, i)) for i in range(4)]
    assert all(is_right(again, 0, chunk.extent, chunk.key) for chunk in found)
    assert again.next_segment_id == 1


def test_open_segments_are_found_by_journal_sealed_and_not_appended_to(bench: Bench) -> None:
    store, _ = bench.reopen()
    keys = fill(store, count=2)
    again, found = bench.reopen()  # the first one was "killed"
    assert [chunk.key for chunk in found] == keys
    assert bench.files() == ["seg-0000000000000000.data"]
    with pytest.raises(StorageError):
        again.write_target(0, Extent(0, 0, 2))
    assert [chunk.key for chunk in bench.reopen()[1]] == keys


def test_groups_have_their_own_segments_and_record_sizes(bench: Bench) -> None:
    store, _ = bench.reopen()
    write(store, 0, Extent(0, 0, 0), b"a")
    write(store, 1, Extent(0, 1, 0), b"a")
    assert store.records_max(1) < store.records_max(0)
    for group, extent in [(1, Extent(0, 0, 1)), (0, Extent(0, 1, 1)), (7, Extent(0, 2, 0))]:
        with pytest.raises(StorageError):
            store.write_target(group, extent)
    _, found = bench.reopen()
    assert [(chunk.group, chunk.key) for chunk in found] == [(0, b"a"), (1, b"a")]


@pytest.mark.parametrize("extent", [(0, 0, 4), (0, 0, -1), (2, 0, 0), (-1, 0, 0), (0, -1, 0), (0, 2**31 - 2**20, 0)])
def test_impossible_extents_are_refused_everywhere(bench: Bench, extent: tuple[int, int, int]) -> None:
    extent = Extent(*extent)
    store, _ = bench.reopen()
    fill(store, count=1)
    with pytest.raises(StorageError):
        store.write_target(0, extent)
    with pytest.raises(StorageError):
        store.commit(0, extent, b"k", b"", 1)
    with pytest.raises(StorageError):
        store.read_target(0, extent)
    store.abandon(0, extent)
    store.forget(extent)
    assert is_right(store, 0, Extent(0, 0, 0), b"0-0-0")


def test_a_record_is_written_once(bench: Bench) -> None:
    store, _ = bench.reopen()
    fill(store, count=1)
    for _ in range(2):
        with pytest.raises(StorageError):
            store.write_target(0, Extent(0, 0, 0))
    with pytest.raises(StorageError):
        store.commit(0, Extent(0, 0, 1), b"k", b"", 1)
    store.write_target(0, Extent(0, 0, 1))
    store.abandon(0, Extent(0, 0, 1))
    for call in (store.write_target, store.read_target):
        with pytest.raises(StorageError):
            call(0, Extent(0, 0, 1))


def test_abandoned_records_count_towards_the_seal(bench: Bench) -> None:
    store, _ = bench.reopen()
    fill(store, count=2)
    store.abandon(0, Extent(0, 0, 2))
    store.write_target(0, Extent(0, 0, 3))
    assert len(bench.files()) == 2
    store.abandon(0, Extent(0, 0, 3))
    store.abandon(0, Extent(0, 0, 3))
    assert len(bench.files()) == 1
    assert len(bench.reopen()[1]) == 2


def test_a_segment_whose_file_could_not_be_made_at_first_is_sealed_when_it_is_full(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = bench.reopen()
    drive = store.drives[0]
    assert drive is not None

    def fails(path: str, **how: object) -> int:
        raise OSError(errno.EMFILE, "too many")

    with monkeypatch.context() as patch:
        patch.setattr(drive, "open_segment_file", fails)
        with pytest.raises(OSError, match="too many"):
            store.write_target(0, Extent(0, 0, 0))
    store.abandon(0, Extent(0, 0, 0))
    assert bench.files() == []
    with pytest.raises(StorageError):
        store.write_target(0, Extent(0, 0, 0))
    for record in (1, 2, 3):
        write(store, 0, Extent(0, 0, record), b"%d" % record)
    assert bench.files() == ["seg-0000000000000000.data"]
    assert [chunk.key for chunk in bench.reopen()[1]] == [b"1", b"2", b"3"]


def test_seal_ends_a_segment_early(bench: Bench) -> None:
    store, _ = bench.reopen()
    fill(store, count=2)
    store.write_target(0, Extent(0, 0, 2))
    store.seal(0, 0)
    store.seal(0, 0)
    store.seal(1, 9)
    assert len(bench.files()) == 1
    with pytest.raises(StorageError):
        store.commit(0, Extent(0, 0, 2), b"late", b"", 1)
    assert is_right(store, 0, Extent(0, 0, 0), b"0-0-0")


def test_generations_hide_what_is_older(bench: Bench) -> None:
    store, _ = bench.reopen()
    fill(store, count=2)
    store.write_target(0, Extent(0, 0, 2))
    store.set_generation(2)
    with pytest.raises(StorageError):
        store.read_target(0, Extent(0, 0, 0))
    with pytest.raises(StorageError):
        store.commit(0, Extent(0, 0, 2), b"late", b"", 1)
    store.abandon(0, Extent(0, 0, 2))
    write(store, 0, Extent(0, 0, 3), b"new")
    assert is_right(store, 0, Extent(0, 0, 3), b"new")
    assert [chunk.key for chunk in bench.reopen(2)[1]] == [b"new"]
    assert bench.reopen(3)[1] == []
    assert bench.files() == []


def test_segments_from_before_a_reset_are_said_in_one_line(bench: Bench) -> None:
    store, _ = bench.reopen()
    for segment in range(6):
        fill(store, segment)
    store, found = bench.reopen(2)
    assert (found, bench.files()) == ([], [])
    assert store.notes == [
        f"{bench.directories[0]}/r0: 6 segment(s) with nothing to use, as of before a reset, removed"
    ]


def test_what_stands_in_the_place_of_a_rank_directory_is_named(bench: Bench) -> None:
    Path(bench.directories[1], "r0").write_text("")
    store = bench.open()
    assert store.drives[1] is None
    assert store.notes == [f"drive left out: {bench.directories[1]}/r0: no directory"]


@pytest.mark.parametrize("count", [2, 4])
def test_forgotten_records_stay_forgotten(bench: Bench, count: int) -> None:
    store, _ = bench.reopen()
    keys = fill(store, count=count)
    store.forget(Extent(0, 0, 1))
    store.forget(Extent(0, 0, 1))
    store.forget(Extent(0, 0, 99))
    store.forget(Extent(0, 5, 0))
    with pytest.raises(StorageError):
        store.read_target(0, Extent(0, 0, 1))
    expected = [key for key in keys if key != keys[1]]
    for _ in range(3):
        again, found = bench.reopen()
        assert [chunk.key for chunk in found] == expected
    again.forget(Extent(0, 0, 0))
    assert [chunk.key for chunk in bench.reopen()[1]] == expected[1:]


def test_retire_unlinks_and_late_users_have_the_file_to_themselves(bench: Bench) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store, _ = bench.reopen()
    fill(store, count=2)
    fd, offset, _ = store.read_target(0, Extent(0, 0, 0))
    late_fd, late_offset = store.write_target(0, Extent(0, 0, 2))
    store.retire(0, 0)
    store.retire(0, 0)
    store.retire(7, 7)
    assert bench.files() == []
    other = os.open(bench.directories[0], os.O_RDONLY)  # would get a number that was given back too early
    with mmap.mmap(-1, 4096) as buffer:
        assert os.preadv(fd, [buffer], offset) == 4096
        assert buffer[:] == payload(b"0-0-0", 4096)
        assert os.pwrite(late_fd, buffer, late_offset) == 4096
    store.release(fd)
    store.release(late_fd)
    os.close(other)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(StorageError):
        store.commit(0, Extent(0, 0, 2), b"late", b"", 1)
    store.abandon(0, Extent(0, 0, 2))
    with pytest.raises(StorageError):
        store.read_target(0, Extent(0, 0, 0))


def test_newest_of_two_records_with_one_key_wins(bench: Bench) -> None:
    store, _ = bench.reopen()
    write(store, 0, Extent(1, 0, 0), b"twin")
    write(store, 0, Extent(1, 0, 1), b"other")
    write(store, 0, Extent(0, 1, 0), b"twin")
    again, found = bench.reopen()
    assert [(chunk.key, chunk.extent) for chunk in found] == [(b"twin", Extent(0, 1, 0)), (b"other", Extent(1, 0, 1))]
    with pytest.raises(StorageError):
        again.read_target(0, Extent(1, 0, 0))
    write(again, 0, Extent(1, 2, 0), b"other")
    _, found = bench.reopen()
    assert [(chunk.key, chunk.extent) for chunk in found] == [(b"twin", Extent(0, 1, 0)), (b"other", Extent(1, 2, 0))]
    assert bench.files(1) == ["seg-0000000000000002.data"]


def test_one_segment_id_on_two_drives(bench: Bench) -> None:
    store, _ = bench.reopen()
    write(store, 0, Extent(0, 3, 0), b"a")
    write(store, 0, Extent(1, 3, 0), b"b")
    store, found = bench.reopen()
    assert [(chunk.key, chunk.extent) for chunk in found] == [(b"a", Extent(0, 3, 0)), (b"b", Extent(1, 3, 0))]
    assert is_right(store, 0, Extent(1, 3, 0), b"b")


def test_the_cap_holds_while_writing_and_when_reopened(bench: Bench) -> None:
    store, _ = bench.reopen(segments_max=3)
    for segment in range(3):
        fill(store, segment)
    with pytest.raises(StorageError, match="3 segments"):
        store.write_target(0, Extent(0, 3, 0))
    fill(store, 3, drive=1)
    for directory in bench.directories:
        used = int(subprocess.check_output(["du", "-sB1", os.path.join(directory, "r0")]).split()[0])
        assert used - 4096 <= 3 * SEGMENT_BYTES
    store.close()
    store, found = bench.reopen(segments_max=2)
    assert {chunk.extent[:2] for chunk in found} == {(0, 1), (0, 2), (1, 3)}
    assert len(bench.files()) == 2
    assert store.next_segment_id == 4
    store.close()
    assert bench.reopen(segment_bytes=SEGMENT_BYTES - 1)[1] == []


@pytest.mark.parametrize("count", [1, 4])
def test_du_of_segments_with_every_record_forgotten(bench: Bench, count: int) -> None:
    store, _ = bench.reopen()
    for record, _ in enumerate(fill(store, count=count)):
        store.forget(Extent(0, 0, record))
    status = [os.stat(bench.path(name)) for name in bench.files()]
    assert sum(item.st_blocks * 512 for item in status) <= SEGMENT_BYTES


@pytest.mark.parametrize("other", [{"store_id": b"x" * 16}, {"generation": 2}])
def test_files_of_another_store_or_generation_are_dropped(bench: Bench, other: dict[str, object]) -> None:
    store, _ = bench.reopen()
    fill(store)
    store.close()
    assert bench.reopen(**other)[1] == []  # type: ignore[arg-type]
    assert bench.files() == []


def test_ranks_do_not_mix(bench: Bench) -> None:
    store, _ = bench.reopen()
    fill(store)
    _, found = bench.reopen(rank=1)
    assert found == []
    name = "seg-0000000000000000.data"
    os.rename(bench.path(name), os.path.join(bench.directories[0], "r1", name))
    assert bench.reopen(rank=1)[1] == []
    assert bench.files(rank=1) == []


def test_names_that_are_not_ours_are_left_alone(bench: Bench, tmp_path: Path) -> None:
    bench.open().close()
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    for name in ("seg-00000000000000zz.data", "seg-1.data", "notes.txt", "SEG-0000000000000000.data"):
        Path(bench.path(name)).write_bytes(b"?")
    os.mkdir(bench.path("seg-0000000000000009.data"))
    os.symlink(outside, bench.path("elsewhere"))
    os.symlink(outside, bench.path("seg-0000000000000001.data"))
    os.mkfifo(bench.path("seg-0000000000000002.data"))
    Path(bench.path("seg-0000000000000003.data")).write_bytes(b"")
    Path(bench.path("seg-ffffffffffffffff.data")).write_bytes(b"")
    Path(bench.path("seg-0000000000000004.journal")).write_bytes(b"")
    store, found = bench.reopen()
    assert found == []
    assert outside.read_bytes() == b"precious"
    kept = ["SEG-0000000000000000.data", "elsewhere", "notes.txt", "seg-0000000000000009.data"]
    assert bench.files() == [*kept, "seg-00000000000000zz.data", "seg-1.data", "seg-ffffffffffffffff.data"]
    assert store.next_segment_id == 5
    assert len(store.notes) == 5


@pytest.mark.parametrize("number", [2**31 - 2**20, 2**31, 2**63 - 1])
def test_segments_are_numbered_on_beside_a_file_with_a_number_that_is_none(bench: Bench, number: int) -> None:
    store, _ = bench.reopen()
    fill(store, 3)
    store.close()
    foreign = [f"seg-{number:016x}.{kind}" for kind in ("data", "journal")]
    for name in foreign:
        Path(bench.path(name)).write_bytes(os.urandom(5000))
    store, found = bench.reopen()
    assert (len(found), store.next_segment_id) == (4, 4)
    assert all(any(note.startswith(name) for note in store.notes) for name in foreign)
    fill(store, 4)
    assert set(foreign) < set(bench.files())


def test_symlinked_directories_and_journals_are_not_followed(bench: Bench, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.symlink(elsewhere, os.path.join(bench.directories[1], "r0"))
    store, _ = bench.reopen()
    assert store.drives[1] is None
    with pytest.raises(StorageError):
        store.write_target(0, Extent(1, 0, 0))
    os.symlink(tmp_path / "target", bench.path("seg-0000000000000000.journal"))
    with pytest.raises(OSError):
        store.write_target(0, Extent(0, 0, 0))
    assert list(elsewhere.iterdir()) == []
    assert not (tmp_path / "target").exists()


def test_modes(bench: Bench) -> None:
    old = os.umask(0)
    try:
        store, _ = bench.reopen()
        fill(store, count=1)
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(bench.path("")).st_mode) == 0o700
    assert {stat.S_IMODE(os.stat(bench.path(name)).st_mode) for name in bench.files()} == {0o600}


def test_missing_directories_make_the_tier_smaller_then_off(bench: Bench) -> None:
    os.rmdir(bench.directories[1])
    store, found = bench.reopen()
    assert found == []
    assert "left out" in store.notes[0]
    write(store, 0, Extent(0, 0, 0), b"a")
    with pytest.raises(StorageError):
        store.write_target(0, Extent(1, 1, 0))
    store.close()
    os.rename(bench.directories[0], bench.directories[0] + "-gone")
    with pytest.raises(StorageError, match="left out"):
        bench.open()


def test_a_directory_that_vanishes_is_an_error_not_a_crash(bench: Bench) -> None:
    store, _ = bench.reopen()
    fill(store, count=1)
    os.rename(bench.directories[0], bench.directories[0] + "-gone")
    with pytest.raises(OSError):
        store.write_target(0, Extent(0, 1, 0))
    with pytest.raises(StorageError):
        store.read_target(0, Extent(0, 1, 0))
    assert is_right(store, 0, Extent(0, 0, 0), b"0-0-0")  # its file is still open
    store.forget(Extent(0, 0, 0))
    store.close()
    assert any("sealed" in note for note in store.notes)


def test_errors_while_a_segment_is_made_leave_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = bench.reopen()

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    for name in ("posix_fallocate", "pwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            with pytest.raises(OSError, match="full"):
                store.write_target(0, Extent(0, 0, 0))
        assert bench.files() == []
    fill(store)
    assert is_right(store, 0, Extent(0, 0, 3), b"0-0-3")


def test_a_failed_commit_is_not_visible_and_spoils_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = bench.reopen()
    fill(store, count=1)
    real = os.pwrite
    extent = Extent(0, 0, 1)
    store.write_target(0, extent)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:50], offset))
        with pytest.raises(OSError, match="wrote 50 of 128"):
            store.commit(0, extent, b"torn", b"", 1)
    with pytest.raises(StorageError):
        store.read_target(0, extent)
    store.abandon(0, extent)
    assert os.path.getsize(bench.path("seg-0000000000000000.journal")) == 178
    write(store, 0, Extent(0, 0, 2), b"next")
    assert [chunk.key for chunk in bench.reopen()[1]] == [b"0-0-0", b"next"]


@pytest.mark.parametrize("step", ["fdatasync", "unlink", "pwrite"])
def test_a_failed_seal_keeps_the_journal(bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    store, _ = bench.reopen()
    keys = fill(store, count=3)
    real = os.pwrite

    def refuse(*args: object) -> int:
        if step == "pwrite" and len(args[1]) == 128:  # type: ignore[arg-type]
            return real(*args)  # type: ignore[arg-type]
        raise OSError(errno.EIO, "broken")

    store.write_target(0, Extent(0, 0, 3))
    with monkeypatch.context() as patch:
        patch.setattr(os, step, refuse)
        store.commit(0, Extent(0, 0, 3), b"last", b"", 5)
    assert "broken" in store.notes[-1]
    assert len(bench.files()) == 2
    assert is_right(store, 0, Extent(0, 0, 0), keys[0])
    store.forget(Extent(0, 0, 3))
    store.close()
    assert [chunk.key for chunk in bench.reopen()[1]] == keys


def test_lack_of_descriptors_does_not_cost_the_cache(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = bench.reopen()
    keys = fill(store)
    store.close()
    again = bench.open()
    real = os.open

    def fake(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if str(path).endswith(".data"):
            raise OSError(errno.EMFILE, "too many")
        return real(path, flags, mode, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fake)
        assert len(again.recover()) == 0
    assert "too many" in again.notes[0]
    assert [chunk.key for chunk in bench.reopen()[1]] == keys


def test_descriptors_are_bounded_and_flat(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "READ_FDS_MAX", 2)

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    store, _ = bench.reopen(segments_max=300)
    for segment in range(150):
        write(store, 0, Extent(0, segment, 0), b"%d" % segment)
        store.seal(0, segment)
        assert count() <= before + 2
    for segment in range(150):
        assert is_right(store, 0, Extent(0, segment, 0), b"%d" % segment)
    assert count() <= before + 2
    for segment in range(150):
        store.retire(0, segment)
    store.close()
    store.close()
    assert count() == before
    with pytest.raises(StorageError):
        store.write_target(0, Extent(0, 0, 0))


@pytest.mark.parametrize("read_fds_max", [0, 1, 3])
def test_what_is_being_read_stays_open_however_many_there_are(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, read_fds_max: int
) -> None:
    monkeypatch.setattr(segments_module, "READ_FDS_MAX", read_fds_max)
    before = len(os.listdir("/proc/self/fd"))
    store, _ = bench.reopen(segments_max=20)
    for segment in range(20):
        fill(store, segment)
    reads = [(n % 20, n // 20, store.read_target(0, Extent(0, n % 20, n // 20))) for n in range(80)]
    random.Random(read_fds_max).shuffle(reads)
    for segment, record, (fd, offset, expected) in reads:
        assert store.reading
        with mmap.mmap(-1, 4096) as buffer:
            assert os.preadv(fd, [buffer], offset) == 4096
            key = b"0-%d-%d" % (segment, record)
            assert checksum(buffer[:], store.seed(Extent(0, segment, record), key)) == expected
        store.release(fd)
    assert not store.reading
    assert len(os.listdir("/proc/self/fd")) == before + read_fds_max


def test_threads_write_read_and_retire_together(bench: Bench) -> None:
    store, _ = bench.reopen(segments_max=1000)
    errors: list[BaseException] = []

    half = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            for step in range(40):
                if step == 20:
                    half.wait()
                extent = Extent(number % 2, step, number // 2)
                key = b"%d/%d" % (number, step)
                write(store, 0, extent, key)
                assert is_right(store, 0, extent, key)
                if number == 0 and step >= 20:
                    store.retire(1, step - 20)
        except BaseException as error:
            half.abort()
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    store.close()
    store, found = bench.reopen(segments_max=1000)
    kept = {(0, segment) for segment in range(40)} | {(1, segment) for segment in range(20, 40)}
    assert {chunk.extent for chunk in found} == {Extent(*place, record) for place in kept for record in range(4)}
    assert all(is_right(store, 0, chunk.extent, chunk.key) for chunk in found)


def free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_bsize


def test_a_drive_that_is_really_full(tmp_path: Path) -> None:
    mount = tmp_path / "tiny"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"tmpfs cannot be mounted: {done.stderr.decode().strip()}")
    try:
        store = SegmentStore(OpenSsd((str(mount),), 1, SEGMENT_BYTES, 100), 0, SHAPES, STORE_ID)
        written = 0
        while written < 100 and free_bytes(mount) >= fmt.data_file_bytes(4096, 4) + 8192:
            fill(store, written)
            written += 1
        with pytest.raises(OSError) as caught:
            fill(store, written)
        assert caught.value.errno == errno.ENOSPC
        assert written > 1
        files = os.listdir(mount / "r0")
        assert [name for name in files if int(name[4:20], 16) >= written] == []
        assert is_right(store, 0, Extent(0, 0, 0), b"0-0-0")
        store.close()
        (mount / "junk").write_bytes(bytes(free_bytes(mount)))
        store = SegmentStore(OpenSsd((str(mount),), 1, SEGMENT_BYTES, 100), 0, SHAPES, STORE_ID)
        assert len(store.recover()) == 4 * written
        assert "No space left" in store.notes[0]
        assert is_right(store, 0, Extent(0, 0, 0), b"0-0-0")
        with pytest.raises(OSError) as caught:
            fill(store, 200, count=1)
        assert caught.value.errno == errno.ENOSPC
        for segment in (0, 1):
            store.retire(0, segment)
        fill(store, 200, count=1)
        store.close()
    finally:
        subprocess.run(["umount", str(mount)], check=True)
