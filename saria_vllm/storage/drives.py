"""One drive: how segment files are opened, allocated and kept out of the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable

from saria_vllm.errors import NO_ROOM, StorageError
from saria_vllm.storage.directories import open_regular
from saria_vllm.types import RECORD_ALIGN_BYTES

PROBE_NAME = "probe"

_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_ALLOCATE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class Drive:
    """A directory on one SSD, probed with a real aligned write and read when it is made.

    `direct` says whether files bypass the page cache (O_DIRECT); where the filesystem refuses that, files are buffered
    and `note` says so, in one line for the log. So does a drive without room for the probe: what is there can be read.

    Raises:
        OSError: the directory is missing, read-only or the device fails.
        StorageError: what was written did not come back.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.direct = True
        self.note = ""
        try:
            try:
                self._probe()
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                self._go_buffered(error)
                self._probe()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self.note = f"{directory}: {error.strerror}; what is there is read, nothing written until there is room"

    def open_segment_file(self, path: str, create: bool = False, size: int = 0, writable: bool = False) -> int:
        """Open a file of this drive and return its descriptor: read-only, or for reading and writing with `create`
        or `writable`. `create` makes it new, 0600, with `size` bytes allocated, or not at all.

        Raises:
            OSError: as from `open_regular` or fallocate(2); ENOSPC when the drive is full, EEXIST when it was there.
        """
        flags = os.O_RDWR if create or writable else os.O_RDONLY
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        fd = self._open(path, flags)
        if create and size:
            try:
                allocate(fd, size)
            except OSError:
                os.close(fd)
                os.unlink(path)
                raise
        return fd

    def drop_cache(self, fd: int) -> None:
        """Let the page cache forget a buffered file; nothing to do where `direct`."""
        if not self.direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _open(self, path: str, flags: int) -> int:
        if self.direct:
            try:
                return open_regular(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                if flags & os.O_CREAT and os.path.lexists(path):
                    os.unlink(path)  # Linux makes the file before it refuses O_DIRECT
                self._go_buffered(error)
        return open_regular(path, flags)

    def _go_buffered(self, error: OSError) -> None:
        self.direct = False
        self.note = f"{self.directory}: no O_DIRECT here ({error.strerror}); using buffered I/O"

    def _probe(self) -> None:
        path = os.path.join(self.directory, PROBE_NAME)
        if os.path.lexists(path):
            os.unlink(path)
        fd = self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            pattern = os.urandom(RECORD_ALIGN_BYTES)
            write_aligned(fd, pattern, 0)
            if read_aligned(fd, RECORD_ALIGN_BYTES, 0) != pattern:
                raise StorageError(f"{self.directory}: a probe read back other bytes than were written")
        finally:
            os.close(fd)
            os.unlink(path)


class Descriptors:
    """Closes files once nobody uses them: a number that somebody is still to read or write through must not become
    another file's. Knows only the descriptors that are in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[int, int] = {}
        self._unwanted: set[int] = set()
        self._watchers: list[Callable[[int], None]] = []

    def before_close(self, tell: Callable[[int], None]) -> None:
        """Have each descriptor told before it is closed, by the thread that does."""
        self._watchers.append(tell)

    @property
    def in_use(self) -> int:
        """Open files with at least one user."""
        return len(self._uses)

    def use(self, fd: int) -> None:
        """One user more; `release` must follow."""
        with self._lock:
            self._uses[fd] = self._uses.get(fd, 0) + 1

    def release(self, fd: int) -> None:
        """One user less: the last one closes what is unwanted."""
        with self._lock:
            self._uses[fd] -= 1
            if self._uses[fd]:
                return
            del self._uses[fd]
            unwanted = fd in self._unwanted
            self._unwanted.discard(fd)
        if unwanted:
            self._close(fd)

    def close(self, fd: int) -> None:
        """Close a file now, or with its last release; nobody begins to use it any more. -1 is a no-op."""
        with self._lock:
            if fd in self._uses:
                self._unwanted.add(fd)
                return
        if fd >= 0:
            self._close(fd)

    def close_all(self) -> None:
        """Close what is unwanted although somebody has not released it. Nothing may be moving any more."""
        with self._lock:
            unwanted, self._unwanted = self._unwanted, set()
            self._uses.clear()
        for fd in unwanted:
            self._close(fd)

    def _close(self, fd: int) -> None:
        for tell in self._watchers:
            tell(fd)
        os.close(fd)


def allocate(fd: int, size: int) -> None:
    """Give a new file its full size, with blocks where the filesystem can.

    Raises:
        OSError: ENOSPC and the like.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _NO_ALLOCATE:
            raise
        os.ftruncate(fd, size)


def write_aligned(fd: int, data: bytes, offset: int) -> None:
    """Write whole 4 KiB units through a page-aligned buffer, as O_DIRECT demands.

    Raises:
        OSError: as from pwrite(2); EIO when fewer bytes were written than asked for.
    """
    with mmap.mmap(-1, len(data)) as buffer:
        buffer[:] = data
        write_whole(fd, buffer, offset)


def read_aligned(fd: int, nbytes: int, offset: int) -> bytes:
    """Read whole 4 KiB units through a page-aligned buffer; fewer bytes at the end of the file.

    Raises:
        OSError: as from preadv(2).
    """
    with mmap.mmap(-1, nbytes) as buffer:
        return buffer[: os.preadv(fd, [buffer], offset)]


def write_whole(fd: int, data: bytes | mmap.mmap, offset: int) -> None:
    """One pwrite of all of `data`.

    Raises:
        OSError: as from pwrite(2); EIO when fewer bytes were written than asked for.
    """
    written = os.pwrite(fd, data, offset)
    if written != len(data):
        raise OSError(errno.EIO, f"wrote {written} of {len(data)} bytes")


def sync_directory(path: str) -> None:
    """Make names made in a directory durable.

    Raises:
        OSError: as from open(2) or fsync(2).
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
