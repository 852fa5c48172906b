"""What those SSD engines share whose library is asked what has ended."""

from __future__ import annotations

import errno
import time
from typing import Generic, Protocol, TypeVar

from saria_vllm.engine.posix import Transfer, move
from saria_vllm.engine.ssd_engine import check_transfer

PAUSE_S = (50e-6, 200e-6)
"""Between two polls of what is in flight: at first, and after some that found nothing."""


class Flight(Protocol):
    """A transfer in flight, with what a library gave for it."""

    transfer: Transfer


F = TypeVar("F", bound=Flight)


class PolledEngine(Generic[F]):
    """An `SsdEngine` but for `name`, `register_memory`, `_begin`, `_end` and `_release`.

    Its library says whether a transfer was whole, and neither how much was moved nor why it failed. What was not whole
    is done again by plain system calls inside `reap`, which say both.
    """

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth {depth} must be above zero")
        self.depth = depth
        self._flights: list[F] = []
        self._closed = False

    def _begin(self, transfer: Transfer) -> F:
        """Hand it to the library. What that refuses is a flight that ends at once, and not whole."""
        raise NotImplementedError

    def _end(self, flight: F) -> bool | None:
        """None while it is in flight; else, once, whether it was whole."""
        raise NotImplementedError

    def _release(self) -> None:
        """Let go of the library, once, with nothing in flight."""
        raise NotImplementedError

    @property
    def in_flight(self) -> int:
        """Transfers submitted and not yet returned by `reap`."""
        return len(self._flights)

    def register_files(self) -> None:
        """See `SsdEngine`. The library registers files as it needs."""

    def submit_read(self, fd: int, addr: int, nbytes: int, offset: int, tag: int) -> None:
        """See `SsdEngine`."""
        self._submit(Transfer(False, fd, addr, nbytes, offset, tag))

    def submit_write(self, fd: int, addr: int, nbytes: int, offset: int, tag: int) -> None:
        """See `SsdEngine`."""
        self._submit(Transfer(True, fd, addr, nbytes, offset, tag))

    def reap(self, timeout_s: float) -> list[tuple[int, int]]:
        """See `SsdEngine`."""
        if timeout_s < 0:
            raise ValueError(f"timeout_s {timeout_s} is negative")
        self._check_open()
        deadline = time.monotonic() + timeout_s
        pause, pause_max = PAUSE_S
        while True:
            ended = self._take_ended()
            left = deadline - time.monotonic()
            if ended or not self._flights or left <= 0:
                return [(transfer.tag, transfer.nbytes if whole else move(transfer)) for transfer, whole in ended]
            time.sleep(min(pause, left))
            pause = min(2 * pause, pause_max)

    def close(self) -> None:
        """See `SsdEngine`."""
        while self._flights:
            if not self._take_ended():
                time.sleep(PAUSE_S[1])
        if not self._closed:
            self._closed = True
            self._release()

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the engine is closed")

    def _submit(self, transfer: Transfer) -> None:
        check_transfer(transfer.fd, transfer.nbytes, transfer.offset)
        self._check_open()
        if len(self._flights) == self.depth:
            raise RuntimeError("more than depth transfers in flight")
        self._flights.append(self._begin(transfer))

    def _take_ended(self) -> list[tuple[Transfer, bool]]:
        """What has ended, and whether it was whole."""
        ended, going = [], []
        for flight in self._flights:
            whole = self._end(flight)
            if whole is None:
                going.append(flight)
            else:
                ended.append((flight.transfer, whole))
        self._flights = going
        return ended
