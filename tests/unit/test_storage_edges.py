"""Storage where calls fail or race in ways that real files rarely show."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from doubles import failing
from saria_vllm.errors import FormatError, StorageError
from saria_vllm.storage import directories, namespace, reclaim, segments, wear
from saria_vllm.storage import format as fmt
from saria_vllm.storage.directories import open_directory, open_path, read_small, try_lease
from saria_vllm.storage.namespace import EngineDirectory, namespace_name
from saria_vllm.storage.reclaim import share_capacity
from saria_vllm.storage.recovery import data_name, journal_name
from saria_vllm.types import Extent
from store_bench import Bench, fill, is_right, write

NAME = namespace_name({"model": "m"})


def test_another_users_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    parent = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(StorageError, match="belongs to user"):
        open_directory(parent, "theirs")
    os.close(parent)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_whose_rights_cannot_be_set_is_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a drive that became read-only: engines look there every few seconds."""
    (tmp_path / "saria").mkdir(mode=0o755)
    monkeypatch.setattr(directories.os, "fchmod", failing(errno.EROFS, os.fchmod))
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(OSError, match="Read-only"), open_path(str(tmp_path), ("saria",), create=True):
            pass
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_lease_in_a_directory_that_went_is_none(tmp_path: Path) -> None:
    (tmp_path / "e0").mkdir()
    fd = os.open(tmp_path / "e0", os.O_RDONLY)
    (tmp_path / "e0").rmdir()
    assert try_lease(fd) is None
    os.close(fd)


@pytest.mark.parametrize("kind", ["replaced", "unlinked", "no locks"])
def test_a_lease_that_is_lost_while_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))

    def flock(_fd: int, _how: int) -> None:
        if kind == "no locks":
            raise OSError(errno.ENOLCK, "no locks")
        (tmp_path / "lease").unlink()
        if kind == "replaced":
            (tmp_path / "lease").touch()

    monkeypatch.setattr(fcntl, "flock", flock)
    if kind == "no locks":
        with pytest.raises(OSError, match="no locks"):
            try_lease(fd)
    else:
        assert try_lease(fd) is None
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)


def test_a_small_file_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(directories, "open_regular", failing(errno.EIO, None))
    with pytest.raises(OSError, match="Input/output"):
        read_small(fd, "generation")
    os.close(fd)
    (tmp_path / "saria").mkdir()
    monkeypatch.setattr(wear, "read_small", failing(errno.EIO, None))
    with pytest.raises(StorageError, match="Input/output"):
        wear.read_state(str(tmp_path), 0)


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_small_file_that_cannot_be_replaced_stays_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    directories.write_durably(fd, "generation", "old")
    monkeypatch.setattr(os, call, failing(errno.ENOSPC, getattr(os, call), lambda *_args: True))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        directories.write_durably(fd, "generation", "new")
    os.close(fd)
    assert os.listdir(tmp_path) == ["generation"]
    assert (tmp_path / "generation").read_text() == "old"


@pytest.mark.parametrize("magic", [b"SARIASEG", b"OTHERSEG"])
def test_headers_that_cannot_be_are_refused_although_their_crc_is_right(magic: bytes) -> None:
    body = struct.pack("<8sII16sQIIQ", magic, 1, 0, bytes(16), 0, 0, 0, 4096).ljust(4092, b"\0")
    with pytest.raises(FormatError, match="0 records" if magic == b"SARIASEG" else "not a segment file"):
        fmt.parse_header(body + struct.pack("<I", zlib.crc32(body)))


def test_no_free_engine_directory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "ENGINES_MAX", 2)
    held = [EngineDirectory.claim([str(tmp_path)], NAME, {}, 0) for _ in range(2)]
    with pytest.raises(StorageError, match="no free engine directory"):
        EngineDirectory.claim([str(tmp_path)], NAME, {}, 0)
    for engine in held:
        engine.release()


def test_two_engines_that_make_a_namespace_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        namespace,
        "write_durably",
        failing(errno.EEXIST, directories.write_durably, lambda _fd, name, _text: name == directories.PARTS_NAME),
    )
    EngineDirectory.claim([str(tmp_path)], NAME, {}, 0).release()


def test_directories_that_cannot_be_looked_at_count_as_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = EngineDirectory.claim([str(tmp_path)], namespace_name({"model": "old"}), {}, 0)
    other.release()
    ours = EngineDirectory.claim([str(tmp_path)], NAME, {}, 0)
    found = reclaim._survey(str(tmp_path))[1]
    monkeypatch.setattr(reclaim, "read_small", failing(errno.EIO, None))
    assert not any(map(reclaim._process_only, found))
    monkeypatch.setattr(os, "stat", failing(errno.EIO, os.stat, lambda name, *_: name == directories.LEASE_NAME))
    assert share_capacity([str(tmp_path)], ours, 1 << 30)[1] == []
    ours.release()


def test_a_bad_file_that_cannot_be_unlinked_is_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.open().close()
    Path(bench.path(data_name(3))).write_bytes(b"?")
    monkeypatch.setattr(os, "unlink", failing(errno.EROFS, os.unlink, lambda path, *_: "seg-" in str(path)))
    store, found = bench.reopen()
    assert (found, store.next_segment_id) == ([], 4)
    assert any("cannot be unlinked: Read-only" in note for note in store.notes)


def test_a_journal_that_cannot_be_opened_now_does_not_cost_its_segment(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EMFILE: the drive is left out this time. EIO: the journal is lost."""
    store, _ = bench.reopen()
    fill(store, 0)
    fill(store, 1, count=2)
    real = os.open
    for error, left in [(errno.EMFILE, False), (errno.EIO, True)]:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", failing(error, real, lambda path, *_: str(path).endswith(".journal")))
            store, found = bench.reopen()
        assert len(found) == (4 if left else 0)
        assert (store.drives[0] is not None) == left


def test_segments_that_cannot_be_sealed_or_removed_when_reopened(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a crash left open on a drive that takes no writes; one of which every record is older than another."""

    def to_write(path: str, flags: int, *_: int) -> bool:
        return "seg-" in str(path) and bool(flags & os.O_ACCMODE)

    monkeypatch.setattr(segments, "NOTES_MAX", 1)
    store, _ = bench.reopen()
    write(store, 0, Extent(0, 0, 0), b"twin")
    write(store, 0, Extent(0, 1, 0), b"twin")
    write(store, 0, Extent(0, 1, 1), b"other")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing(errno.EROFS, os.unlink, lambda path, *_: "seg-" in str(path)))
        patch.setattr(os, "open", failing(errno.EROFS, os.open, to_write))
        again, found = bench.reopen()
    assert [chunk.key for chunk in found] == [b"twin", b"other"]
    assert "cannot be" in again.notes[-1]
    assert is_right(again, 0, Extent(0, 1, 1), b"other")
    with pytest.raises(StorageError):
        again.read_target(0, Extent(0, 0, 0))
    assert os.path.exists(bench.path(journal_name(1)))
    assert [chunk.key for chunk in bench.reopen()[1]] == [b"twin", b"other"]


def test_a_drop_that_cannot_be_written_holds_here(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = bench.reopen()
    fill(store, count=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(errno.ENOSPC, os.pwrite))
        store.forget(Extent(0, 0, 0))
    with pytest.raises(StorageError):
        store.read_target(0, Extent(0, 0, 0))
    assert len(bench.reopen()[1]) == 2


def test_retired_meanwhile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, between a look-up and what follows."""
    store, _ = bench.reopen()
    for segment in range(3):
        fill(store, segment)
    monkeypatch.setattr(segments, "READ_FDS_MAX", 0)
    store.close()
    store, _ = bench.reopen()
    found = store._lookup(Extent(0, 0, 0))
    store.retire(0, 0)
    monkeypatch.setattr(store, "_lookup", lambda _extent: found)
    store.retire(0, 0)
    monkeypatch.undo()
    drive = store.drives[0]
    assert drive is not None
    real = drive.open_segment_file

    def retired_under_us(path: str, **how: Any) -> int:
        fd = real(path, **how)
        store.retire(0, 1)
        return fd

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(drive, "open_segment_file", retired_under_us)
    with pytest.raises(StorageError, match="was retired"):
        store.read_target(0, Extent(0, 1, 0))
    assert len(os.listdir("/proc/self/fd")) == before

    def opened_under_us(path: str, **how: Any) -> int:
        monkeypatch.setattr(drive, "open_segment_file", real)
        store.release(store.read_target(0, Extent(0, 2, 0))[0])
        return real(path, **how)

    monkeypatch.setattr(drive, "open_segment_file", opened_under_us)
    assert is_right(store, 0, Extent(0, 2, 1), b"0-2-1")
    assert len(os.listdir("/proc/self/fd")) == before + 1


def test_the_seed_of_what_is_nowhere_is_of_the_current_generation(bench: Bench) -> None:
    store, _ = bench.reopen(generation=5)
    assert store.seed(Extent(0, 9, 1), b"k") == fmt.seed_of(b"0123456789abcdef", b"k", 5, 9, 1)


def test_a_lease_that_cannot_be_asked_about_is_neither_counted_as_living_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an engine of another user, say."""
    theirs = EngineDirectory.claim([str(tmp_path)], namespace_name({"model": "old"}), {}, 0)
    theirs.grant(1 << 29)
    ours = EngineDirectory.claim([str(tmp_path)], NAME, {}, 0)
    assert share_capacity([str(tmp_path)], ours, 1 << 30)[0] <= 1 << 29
    monkeypatch.setattr(directories, "open_regular", failing(errno.EACCES, directories.open_regular, read_only_lease))
    share, removed = share_capacity([str(tmp_path)], ours, 1 << 30)
    assert share > 1 << 29 and removed == []
    assert share_capacity([str(tmp_path)], ours, 0)[1] == []
    assert os.path.isdir(theirs.directories[0])
    for engine in (ours, theirs):
        engine.release()


def read_only_lease(name: str, flags: int, _fd: int) -> bool:
    return name == directories.LEASE_NAME and not flags & os.O_ACCMODE


def test_a_namespace_that_is_not_there_to_be_removed_is_not_gone(tmp_path: Path) -> None:
    assert not reclaim.remove_namespace(str(tmp_path), NAME)
    EngineDirectory.claim([str(tmp_path)], NAME, {}, 0).release()
    (tmp_path / "saria" / NAME).rename(tmp_path / "elsewhere")
    (tmp_path / "saria" / NAME).symlink_to(tmp_path / "elsewhere")
    assert not reclaim.remove_namespace(str(tmp_path), NAME)
    assert (tmp_path / "elsewhere" / "e0" / "lease").exists()


def test_no_free_state_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wear, "ENGINES_MAX", 2)
    leases = [wear.lease_state(str(tmp_path), 0)[1] for _ in range(2)]
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match="2 engines write here"):
        wear.lease_state(str(tmp_path), 0)
    assert len(os.listdir("/proc/self/fd")) == before
    for lease in leases:
        os.close(lease)
