"""The io_uring SSD engine."""

from __future__ import annotations

from collections.abc import Callable

from saria_vllm._native import Uring
from saria_vllm.engine.ssd_engine import check_transfer

_READ, _WRITE = 0, 1

FILES_MAX = 512
"""Files that a ring keeps open for itself; transfers through others work as well."""


class UringEngine:
    """An `SsdEngine` over raw io_uring system calls.

    Args:
        polled: a thread of the kernel takes what is submitted, without a system call while it is busy (SQPOLL).

    Raises:
        OSError: the kernel or a seccomp filter does not allow io_uring; EOPNOTSUPP where `polled` needs Linux 5.11.
    """

    def __init__(self, depth: int, polled: bool = False) -> None:
        self.name = "io_uring_sqpoll" if polled else "io_uring"
        self.depth = depth
        self._ring = Uring(depth, polled)

    @property
    def in_flight(self) -> int:
        """Transfers submitted and not yet returned by `reap`."""
        return self._ring.in_flight

    def register_memory(self, addr: int, nbytes: int, device: int = -1) -> bool:
        """See `SsdEngine`. Needs as much locked memory as RLIMIT_MEMLOCK allows, or CAP_IPC_LOCK."""
        try:
            self._ring.register_memory(addr, nbytes)
        except OSError:
            return False
        return True

    def register_files(self) -> Callable[[int], None] | None:
        """See `SsdEngine`. None where RLIMIT_NOFILE is below `FILES_MAX`."""
        try:
            self._ring.register_files(FILES_MAX)
        except OSError:
            return None
        return self._ring.forget_file

    def submit_read(self, fd: int, addr: int, nbytes: int, offset: int, tag: int) -> None:
        """See `SsdEngine`."""
        check_transfer(fd, nbytes, offset)
        self._ring.submit(_READ, fd, addr, nbytes, offset, tag)

    def submit_write(self, fd: int, addr: int, nbytes: int, offset: int, tag: int) -> None:
        """See `SsdEngine`."""
        check_transfer(fd, nbytes, offset)
        self._ring.submit(_WRITE, fd, addr, nbytes, offset, tag)

    def reap(self, timeout_s: float) -> list[tuple[int, int]]:
        """See `SsdEngine`."""
        return self._ring.reap(timeout_s)

    def close(self) -> None:
        """See `SsdEngine`."""
        self._ring.close()
