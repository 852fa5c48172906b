"""The io_uring SSD engine."""

from __future__ import annotations

from saria_vllm._native import Uring
from saria_vllm.engine.ssd_engine import check_transfer

_READ, _WRITE = 0, 1


class UringEngine:
    """An `SsdEngine` over raw io_uring system calls.

    Raises:
        OSError: the kernel or a seccomp filter does not allow io_uring.
    """

    name = "io_uring"

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._ring = Uring(depth)

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
