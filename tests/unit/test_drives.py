"""Opening segment files: O_DIRECT or its fallback, allocation, modes, and files in use."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from saria_vllm.errors import StorageError
from saria_vllm.storage import drives
from saria_vllm.storage.drives import Descriptors, Drive, read_aligned, write_aligned


def test_probe_leaves_nothing_and_files_round_trip(tmp_path: Path) -> None:
    drive = Drive(str(tmp_path))
    assert os.listdir(tmp_path) == []
    assert drive.direct == (drive.note == "")
    path = str(tmp_path / "file")
    fd = drive.open_segment_file(path, create=True, size=16384)
    write_aligned(fd, b"x" * 4096, 8192)
    assert read_aligned(fd, 8192, 4096) == bytes(4096) + b"x" * 4096
    status = os.fstat(fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == 16384
    assert not os.get_inheritable(fd)
    drive.drop_cache(fd)
    os.close(fd)


def test_existing_files_and_symlinks_are_not_opened_for_creation(tmp_path: Path) -> None:
    drive = Drive(str(tmp_path))
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    (tmp_path / "link").symlink_to(target)
    for name in ("target", "link"):
        with pytest.raises(FileExistsError):
            drive.open_segment_file(str(tmp_path / name), create=True, size=4096)
    with pytest.raises(OSError) as caught:
        drive.open_segment_file(str(tmp_path / "link"))
    assert caught.value.errno == errno.ELOOP
    assert target.read_bytes() == b"mine"


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    drive, path = Drive(str(tmp_path)), str(tmp_path / "name")
    with socket.socket(socket.AF_UNIX) as unix:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            os.mkdir(path)
        else:
            unix.bind(path)
        before = len(os.listdir("/proc/self/fd"))
        for writable in (False, True):
            with pytest.raises(OSError) as caught:
                drive.open_segment_file(path, writable=writable)
            assert caught.value.errno in (errno.ENXIO, errno.EISDIR)
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_transfers_of_an_open_file_may_wait(tmp_path: Path) -> None:
    fd = Drive(str(tmp_path)).open_segment_file(str(tmp_path / "file"), create=True, size=4096)
    assert os.get_blocking(fd)
    os.close(fd)


def test_reading_descriptors_cannot_write(tmp_path: Path) -> None:
    drive = Drive(str(tmp_path))
    path = str(tmp_path / "file")
    os.close(drive.open_segment_file(path, create=True, size=4096))
    fd = drive.open_segment_file(path)
    with pytest.raises(OSError):
        write_aligned(fd, bytes(4096), 0)
    os.close(fd)


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("where", ["open", "pwrite"])
def test_without_o_direct_files_are_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int, where: str
) -> None:
    real_open, real_pwrite = os.open, os.pwrite
    direct: set[int] = set()

    def fake_open(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd = real_open(path, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd)
        if flags & os.O_DIRECT:
            if where == "open":
                os.close(fd)  # as Linux does: the file is there already
                raise OSError(refusal, "refused")
            direct.add(fd)
        else:
            direct.discard(fd)
        return fd

    def fake_pwrite(fd: int, data: bytes, offset: int) -> int:
        if fd in direct:
            raise OSError(refusal, "refused")
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(os, "open", fake_open)
    monkeypatch.setattr(os, "pwrite", fake_pwrite)
    drive = Drive(str(tmp_path))
    assert not drive.direct
    assert "buffered" in drive.note
    fd = drive.open_segment_file(str(tmp_path / "file"), create=True, size=4096)
    write_aligned(fd, b"y" * 4096, 0)
    assert read_aligned(fd, 4096, 0) == b"y" * 4096
    drive.drop_cache(fd)
    os.close(fd)


def test_allocation_falls_back_and_a_full_drive_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(str(tmp_path))
    error = errno.EOPNOTSUPP

    def fake(fd: int, offset: int, size: int) -> None:
        raise OSError(error, "refused")

    monkeypatch.setattr(os, "posix_fallocate", fake)
    fd = drive.open_segment_file(str(tmp_path / "a"), create=True, size=8192)
    assert os.fstat(fd).st_size == 8192
    os.close(fd)
    error = errno.ENOSPC
    with pytest.raises(OSError, match="refused"):
        drive.open_segment_file(str(tmp_path / "b"), create=True, size=8192)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("step", ["open", "pwrite"])
def test_a_drive_without_room_for_the_probe_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, step: str
) -> None:
    (tmp_path / "file").write_bytes(b"z" * 4096)
    real_open = os.open

    def refuse(path: str | int, flags: int | bytes, mode: int = 0o777, **_: object) -> int:
        if step == "open" and not int(flags) & os.O_CREAT:
            return real_open(str(path), int(flags), mode)
        raise OSError(code, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, refuse)
        drive = Drive(str(tmp_path))
        assert "no room; what is there is read" in drive.note
        assert os.listdir(tmp_path) == ["file"]
        with pytest.raises(OSError, match="no room"):
            write_aligned(drive.open_segment_file(str(tmp_path / "new"), create=True), bytes(4096), 0)
        fd = drive.open_segment_file(str(tmp_path / "file"))
        assert read_aligned(fd, 4096, 0) == b"z" * 4096
        os.close(fd)


def test_lying_and_missing_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        Drive(str(tmp_path / "missing"))
    monkeypatch.setattr(drives, "read_aligned", lambda fd, nbytes, offset: bytes(nbytes))
    with pytest.raises(StorageError, match="probe"):
        Drive(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_short_writes_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 1)
    with pytest.raises(OSError, match="wrote 1 of 4096"):
        write_aligned(0, bytes(4096), 0)


def test_a_file_in_use_is_closed_by_its_last_user(tmp_path: Path) -> None:
    descriptors, told = Descriptors(), list[tuple[int, bool]]()
    descriptors.before_close(lambda fd: told.append((fd, is_open(fd))))
    fds = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in "abc"]
    for fd in (fds[0], fds[0], fds[1]):
        descriptors.use(fd)
    for fd in (*fds, -1):
        descriptors.close(fd)
    assert (is_open(fds[0]), is_open(fds[1]), is_open(fds[2])) == (True, True, False)
    descriptors.release(fds[0])
    assert is_open(fds[0])
    descriptors.release(fds[0])
    assert not is_open(fds[0])
    assert descriptors.in_use == 1
    descriptors.close_all()
    assert not is_open(fds[1])
    assert descriptors.in_use == 0
    assert told == [(fds[2], True), (fds[0], True), (fds[1], True)]


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
