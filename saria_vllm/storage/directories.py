"""Directories and small files of ours, opened step by step so that no symlink is ever followed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from saria_vllm.errors import StorageError

TOP_NAME = "saria"
LEASE_NAME = "lease"
SHARING_NAME = "sharing"
GENERATION_NAME = "generation"
PARTS_NAME = "namespace.json"
NAMESPACE_NAME = re.compile(r"[0-9a-f]{32}")
ENGINE_NAME = re.compile(r"e(?:0|[1-9][0-9]{0,5})")
RANK_NAME = re.compile(r"r(?:0|[1-9][0-9]{0,5})")
SMALL_FILE_BYTES_MAX = 65536

NEW = ".new"
"""At the end of a name while the file that will have it is written."""

_RETRY_S = 0.005
_LOCK_WAIT_S = 2.0

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def open_path(path: str, names: tuple[str, ...] = (), create: bool = False) -> Iterator[int]:
    """Descriptor of `path`/`names`..., where only `path` itself may lead over symlinks.

    Raises:
        StorageError: one of `names` is a symlink, no directory, or another user's.
        OSError: missing (ENOENT) and not to be created, or as from mkdir(2) and open(2).

    Both name the whole path, and so does what is raised while the descriptor is in use.
    """
    if create:
        os.makedirs(path, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        at = path
        for name in names:
            try:
                child = open_directory(fd, name, create)
            except StorageError as error:
                raise StorageError(f"{at}/{error}") from None
            at = f"{at}/{name}"
            os.close(fd)
            fd = child
        yield fd
    except OSError as error:
        # A call by descriptor knows a name in it at most, and says the descriptor's number else.
        name = error.filename2 or error.filename
        error.filename, error.filename2 = os.path.join(at, name) if isinstance(name, str) else at, None
        raise
    finally:
        os.close(fd)


def open_directory(parent_fd: int, name: str, create: bool = False) -> int:
    """Descriptor of a sub-directory, made 0700.

    Raises:
        StorageError: a symlink, no directory, or another user's.
        OSError: as from mkdir(2) and open(2).
    """
    if create:
        try:
            os.mkdir(name, 0o700, dir_fd=parent_fd)
        except FileExistsError:
            pass
    try:
        fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise StorageError(f"{name}: a symlink or no directory; symlinks are not followed") from None
        raise
    try:
        status = os.fstat(fd)
        if os.geteuid() not in (0, status.st_uid):
            raise StorageError(f"{name}: belongs to user {status.st_uid}")
        if create and stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(fd, 0o700)
    except (OSError, StorageError):
        os.close(fd)
        raise
    return fd


def open_regular(path: str, flags: int, dir_fd: int | None = None) -> int:
    """Descriptor of a regular file of ours, 0600 when it is made. No symlink is followed, and nothing else that has
    the name, such as a FIFO, is waited for.

    Raises:
        OSError: as from open(2); ELOOP for a symlink, ENXIO for anything else that is no regular file.
    """
    # Not left on the descriptor: where a filesystem cannot tell at once, io_uring would answer with EAGAIN.
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.ENXIO, "not a regular file", path)
        os.set_blocking(fd, True)
    except OSError:
        os.close(fd)
        raise
    return fd


def names_in(directory_fd: int, pattern: re.Pattern[str]) -> list[str]:
    """Names in a directory that match, sorted."""
    return sorted(name for name in os.listdir(directory_fd) if pattern.fullmatch(name))


def try_lease(directory_fd: int, name: str = LEASE_NAME) -> int | None:
    """Descriptor that holds a lease, of an engine directory or of what `name` says, None while another holds it or
    removes it.

    The lease ends when the descriptor, and every copy that a fork made of it, is closed.

    Raises:
        OSError: as from `open_regular` or flock(2).
    """
    try:
        fd = open_regular(name, os.O_RDWR | os.O_CREAT, directory_fd)
    except FileNotFoundError:
        return None  # the directory itself went
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        current = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
        if os.path.samestat(current, os.fstat(fd)):
            os.utime(fd)
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass  # another's, or it was unlinked under us with its directory
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return None


def is_leased(directory_fd: int, name: str = LEASE_NAME) -> bool:
    """Whether somebody living holds the lease. Asking takes a shared lock for an instant: who wants the lease just then
    tries again.

    Raises:
        OSError: the lease cannot be opened, but for its being missing or no regular file: nobody can hold that.
    """
    try:
        fd = open_regular(name, os.O_RDONLY, directory_fd)
    except PermissionError:
        raise
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def lease_holders(engine_fd: int, proc: str = "/proc") -> list[int]:
    """Process ids that the kernel names for a lease: none where it does not know them, as those of another container.

    Raises:
        OSError: the lease or the list of locks cannot be read.
    """
    status = os.stat(LEASE_NAME, dir_fd=engine_fd, follow_symlinks=False)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    found = []
    with open(f"{proc}/locks", encoding="ascii") as lines:
        for line in lines:
            words = line.split()
            if len(words) >= 6 and words[1] == "FLOCK" and words[5] == file and words[4].isdecimal():
                found.append(int(words[4]))
    return sorted({pid for pid in found if pid > 0})


@contextmanager
def sharing_lock(paths: Iterable[str]) -> Iterator[None]:
    """Keeps all others out who divide what they share under any of these paths that have been claimed.

    Raises:
        StorageError: somebody else has it, and does not give it back.
        OSError: as from `open_path` and `open_regular`.
    """
    with ExitStack() as stack:
        for path in sorted(paths):  # One order for all.
            with open_path(path, (TOP_NAME,)) as top_fd:
                fd = open_regular(SHARING_NAME, os.O_RDWR | os.O_CREAT, top_fd)
            stack.callback(os.close, fd)
            give_up = time.monotonic() + _LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > give_up:
                        raise StorageError(f"{path}/{TOP_NAME}/{SHARING_NAME}: another process holds it") from None
                    time.sleep(_RETRY_S)
        yield


def write_durably(directory_fd: int, name: str, text: str) -> None:
    """Replace a small file: whole or not at all, on disk before this returns.

    Raises:
        OSError: ENOSPC, EIO and the like; the old file is still there.
    """
    temporary = f"{name}{NEW}"
    remove(directory_fd, temporary)
    fd = open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, directory_fd)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.rename(temporary, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
    except OSError:
        with suppress(OSError):
            remove(directory_fd, temporary)
        raise
    os.fsync(directory_fd)


def overwrite(directory_fd: int, name: str, text: str) -> None:
    """Write a small file that is there in its place, which needs no room. A crash on the way leaves a mixture.

    Raises:
        OSError: as from `open_regular` and pwrite(2); what the file holds is not known.
    """
    fd = open_regular(name, os.O_WRONLY, directory_fd)
    try:
        os.ftruncate(fd, os.pwrite(fd, text.encode("ascii"), 0))
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(directory_fd: int, name: str) -> None:
    """Unlink a file, if it is there.

    Raises:
        OSError: as from unlink(2), but ENOENT.
    """
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory_fd)


def read_small(directory_fd: int, name: str) -> bytes | None:
    """A small regular file, None when it is missing. Anything else with that name reads as empty.

    Raises:
        OSError: as from open(2) or read(2).
    """
    try:
        fd = open_regular(name, os.O_RDONLY, directory_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return b""
        raise
    try:
        return os.read(fd, SMALL_FILE_BYTES_MAX)
    finally:
        os.close(fd)
