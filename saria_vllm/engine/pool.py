"""The DRAM pool: one file in /dev/shm per node, one region of it per local rank, without a name once all ranks have it.

Life of the file, which is what makes a crash leak nothing:

- It is created 0600 in /dev/shm. A rank that uses it holds a shared flock until it closes the pool or dies.
- Its last page is the header: world, region size, and a bit for every rank that has mapped its region. Header and name
  are only changed under an fcntl lock of the file (the guard), by who has seen that the name still means this file.
- The rank that sets the last bit unlinks the file. Before that, an exclusive flock can be had only when no rank lives:
  then the file is the remains of a killed engine and is unlinked, by the next pool of any name.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from saria_vllm.config import format_bytes
from saria_vllm.errors import ConfigError
from saria_vllm.types import RECORD_ALIGN_BYTES, Slot

SHM_DIRECTORY = "/dev/shm"
FILE_PREFIX = "saria-pool-"

_WORLD_MAX = 64
_HEADER = struct.Struct("<QQQ")  # world, region_bytes, bits of the ranks that have mapped
_HEADER_BYTES = 4096
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_TOO_SMALL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)

_process_guard = threading.Lock()  # fcntl locks do not exclude threads of one process


class DramPool:
    """This rank's region of the node's pool, mapped and with all its memory allocated, so that it never faults later.

    Args:
        name: the engine's id, the same on all its ranks and on no other live engine: letters, digits, `._-`.
        capacity_bytes: for the node; each of `world` ranks gets an equal share, rounded down to whole slabs.
        rank: local rank, 0..world-1.
        slab_bytes: a multiple of 4096.

    Raises:
        ConfigError: the share is less than one slab, /dev/shm cannot hold it, or a live engine has that name.
    """

    def __init__(self, name: str, capacity_bytes: int, rank: int, world: int, slab_bytes: int) -> None:
        if not _NAME.fullmatch(name) or not 0 <= rank < world <= _WORLD_MAX:
            raise ValueError(f"pool {name!r}, rank {rank} of {world}: not a name, or not a rank of 1..{_WORLD_MAX}")
        if slab_bytes <= 0 or slab_bytes % RECORD_ALIGN_BYTES:
            raise ValueError(f"slab_bytes {slab_bytes} is not a multiple of {RECORD_ALIGN_BYTES}")
        self.slab_bytes = slab_bytes
        self.slabs = capacity_bytes // world // slab_bytes
        self.region_bytes = self.slabs * slab_bytes
        if not self.slabs:
            raise ConfigError(
                f"dram_capacity: {format_bytes(capacity_bytes)} over {world} ranks is less than a slab each; "
                f"accepted: at least {format_bytes(world * slab_bytes)}"
            )
        if os.path.isdir(SHM_DIRECTORY):
            _sweep(SHM_DIRECTORY)
            self._file: _PoolFile | None = _PoolFile.join(
                os.path.join(SHM_DIRECTORY, FILE_PREFIX + name), rank, world, self.region_bytes
            )
            self._map = self._file.map_region(rank)
        elif world == 1:
            self._file = None
            self._map = _map_memfd(name, self.region_bytes)
        else:
            raise ConfigError(f"dram_capacity: {world} ranks need a shared {SHM_DIRECTORY}, which does not exist")
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        """Address of this rank's region, page aligned."""

    def address(self, slot: Slot, record_bytes: int) -> int:
        """Address of a slot whose slab is cut in cells of `record_bytes`.

        Raises:
            IndexError: the cell does not lie within its slab, or the slab within the region.
        """
        slab, cell = slot
        at = cell * record_bytes
        if not (0 <= slab < self.slabs and at >= 0 and 0 < record_bytes <= self.slab_bytes - at):
            raise IndexError(f"{slot} with cells of {record_bytes} bytes is outside {self.slabs} slabs")
        return self.base + slab * self.slab_bytes + at

    def close(self) -> None:
        """Unmap. Nothing may use the region any more. May be called twice."""
        self._map.close()
        if self._file is not None:
            self._file.leave()
            self._file = None


class _PoolFile:
    """The named file while ranks meet. Holds a shared flock from `join` to `leave`."""

    def __init__(self, path: str, fd: int, world: int, region_bytes: int) -> None:
        self._path = path
        self._fd = fd
        self._world = world
        self._region_bytes = region_bytes

    @classmethod
    def join(cls, path: str, rank: int, world: int, region_bytes: int) -> _PoolFile:
        """Create the file or open the one that the other ranks of this engine use."""
        while True:
            fd = _open_own(path, os.O_CREAT)
            file, entered = cls(path, fd, world, region_bytes), False
            try:
                with _guard(fd):
                    entered = _is_named(path, fd) and file._enter(rank)
            finally:
                if not entered:  # an error, or the name was taken away before we had the guard: start over
                    os.close(fd)
            if entered:
                return file

    def _enter(self, rank: int) -> bool:
        """Take the shared flock; under the guard. False when the file was a killed engine's and is gone now."""
        size = self._world * self._region_bytes + _HEADER_BYTES
        if _unused(self._fd):
            if os.fstat(self._fd).st_size:
                os.unlink(self._path)
                return False
            try:
                os.ftruncate(self._fd, size)
                self._write_header(0)
            except OSError as error:
                os.unlink(self._path)
                raise _explain(error, self._path, size) from None
        elif os.fstat(self._fd).st_size != size or self._read_header() >> rank & 1:
            raise ConfigError(f"dram_capacity: {self._path} is in use by another live engine of this name")
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        return True

    def map_region(self, rank: int) -> mmap.mmap:
        """Allocate and map this rank's region; the last rank to do so takes the name away."""
        try:
            mapping = _allocate_and_map(self._fd, rank * self._region_bytes, self._region_bytes, self._path)
        except (ConfigError, OSError):
            self.leave()
            raise
        with _guard(self._fd):
            mapped = self._read_header() | 1 << rank
            self._write_header(mapped)
            if mapped == (1 << self._world) - 1:
                self._unlink()
        return mapping

    def leave(self) -> None:
        """Let go of the file; one that not all ranks have mapped is unlinked."""
        with _guard(self._fd):
            self._unlink()
        os.close(self._fd)

    def _unlink(self) -> None:
        if _is_named(self._path, self._fd):
            os.unlink(self._path)

    def _read_header(self) -> int:
        """The bits of the mapped ranks; all of them when the file is not laid out like ours."""
        raw = os.pread(self._fd, _HEADER.size, self._world * self._region_bytes)
        world, region_bytes, mapped = _HEADER.unpack(raw)
        return mapped if (world, region_bytes) == (self._world, self._region_bytes) else -1

    def _write_header(self, mapped: int) -> None:
        raw = _HEADER.pack(self._world, self._region_bytes, mapped)
        os.pwrite(self._fd, raw, self._world * self._region_bytes)


def _allocate_and_map(fd: int, offset: int, nbytes: int, path: str) -> mmap.mmap:
    """Raises ConfigError when the memory is not there; what was allocated on the way is given back by the kernel."""
    try:
        available = os.fstatvfs(fd)
        if nbytes > available.f_bavail * available.f_frsize > 0:  # a memfd reports no size
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, offset, nbytes)
        return mmap.mmap(fd, nbytes, offset=offset)
    except OSError as error:
        raise _explain(error, path, nbytes) from None


def _explain(error: OSError, path: str, nbytes: int) -> Exception:
    """The ConfigError for an allocation that failed for want of room or by a limit; any other error as it is."""
    if error.errno == errno.EFBIG:
        return ConfigError(
            f"dram_capacity: this rank's share of {format_bytes(nbytes)} is more than this process may give a file, "
            f"{path}; accepted: less, or a higher limit (ulimit -f, RLIMIT_FSIZE)"
        )
    if error.errno not in _TOO_SMALL:
        return error
    directory = os.path.dirname(path)
    stats = os.statvfs(directory if os.path.isdir(directory) else "/")
    available = stats.f_bavail * stats.f_frsize if os.path.isdir(directory) else _free_memory_bytes()
    return ConfigError(
        f"dram_capacity: this rank's share of {format_bytes(nbytes)} does not fit in {path}: "
        f"{format_bytes(available)} available; accepted: less, or a larger {directory or 'memory'} "
        f"(containers: --shm-size or an emptyDir of medium Memory)"
    )


def _free_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _map_memfd(name: str, nbytes: int) -> mmap.mmap:
    fd = os.memfd_create(FILE_PREFIX + name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return _allocate_and_map(fd, 0, nbytes, f"memfd:{name}")
    finally:
        os.close(fd)  # the mapping has a duplicate


def _sweep(directory: str) -> None:
    """Unlink the pools of killed engines, whatever their name."""
    with os.scandir(directory) as entries:
        paths = [entry.path for entry in entries if entry.name.startswith(FILE_PREFIX)]
    for path in paths:
        try:
            fd = _open_own(path, 0)
        except (FileNotFoundError, ConfigError):
            continue  # gone meanwhile, or not ours
        try:
            with _guard(fd):
                if _is_named(path, fd) and _unused(fd):
                    os.unlink(path)
        finally:
            os.close(fd)


def _open_own(path: str, flags: int) -> int:
    """Open a regular file of this user, never through a link.

    Raises:
        ConfigError: the name is taken by something else.
        FileNotFoundError: there is no such file and `flags` do not create it.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | flags, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:  # a symbolic link (ELOOP), a directory, another user's file
        raise ConfigError(f"dram_capacity: {path} is in the way of the pool: {error.strerror}") from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise ConfigError(f"dram_capacity: {path} is in the way of the pool: not a file of this user")
    return fd


@contextmanager
def _guard(fd: int) -> Iterator[None]:
    with _process_guard:
        fcntl.lockf(fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(fd, fcntl.LOCK_UN)


def _is_named(path: str, fd: int) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _unused(fd: int) -> bool:
    """True when no other open of the file holds a flock; then this one holds it exclusively."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
