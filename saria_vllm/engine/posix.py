"""The portable SSD engine: preadv and pwritev in a few threads."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import deque
from typing import NamedTuple

from saria_vllm.engine.ssd_engine import check_transfer


class Transfer(NamedTuple):
    """The arguments of a `submit`."""

    write: bool
    fd: int
    addr: int
    nbytes: int
    offset: int
    tag: int


class PosixEngine:
    """An `SsdEngine` that needs nothing of the kernel. Its threads are daemons and are joined by `close`."""

    name = "posix"

    def __init__(self, depth: int, threads: int = 2) -> None:
        if depth < 1 or threads < 1:
            raise ValueError(f"depth {depth} and threads {threads} must be above zero")
        self.depth = depth
        self.in_flight = 0
        self._lock = threading.Lock()
        self._queued = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._queue: deque[Transfer] = deque()
        self._results: list[tuple[int, int]] = []
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"saria-posix-{i}", daemon=True) for i in range(min(threads, depth))
        ]
        for thread in self._threads:
            thread.start()

    def register_memory(self, addr: int, nbytes: int, device: int = -1) -> bool:
        """See `SsdEngine`."""
        return False

    def register_files(self) -> None:
        """See `SsdEngine`."""

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
        with self._lock:
            self._check_open()
            if self.in_flight and not self._results and timeout_s:
                self._ended.wait(min(timeout_s, threading.TIMEOUT_MAX))
            results, self._results = self._results, []
            self.in_flight -= len(results)
        return results

    def close(self) -> None:
        """See `SsdEngine`."""
        with self._lock:
            self._closing = True
            self._queued.notify_all()
        for thread in self._threads:
            thread.join()
        self._results.clear()
        self.in_flight = 0

    def _submit(self, transfer: Transfer) -> None:
        check_transfer(transfer.fd, transfer.nbytes, transfer.offset)
        with self._lock:
            self._check_open()
            if self.in_flight == self.depth:
                raise RuntimeError("more than depth transfers in flight")
            self.in_flight += 1
            self._queue.append(transfer)
            self._queued.notify()

    def _check_open(self) -> None:
        if self._closing:
            raise OSError(errno.EBADF, "the engine is closed")

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._closing:
                    self._queued.wait()
                if not self._queue:
                    return
                transfer = self._queue.popleft()
            result = move(transfer)
            with self._lock:
                self._results.append((transfer.tag, result))
                self._ended.notify()


def move(transfer: Transfer) -> int:
    """Do it here and now: bytes moved, or -errno."""
    memory = memoryview((ctypes.c_char * transfer.nbytes).from_address(transfer.addr))
    call = os.pwritev if transfer.write else os.preadv
    done = 0
    while done < transfer.nbytes:
        try:
            moved = call(transfer.fd, [memory[done:]], transfer.offset + done)
        except OSError as error:
            return -(error.errno or errno.EIO)
        except Exception:  # A thread that dies would lose the end of this transfer and of all that follow.
            return -errno.EIO
        if moved == 0:
            break
        done += moved
    return done
