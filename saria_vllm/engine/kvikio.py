"""The KvikIO SSD engine, for memory of a GPU. KvikIO is imported when it is opened. No GPU has run it yet."""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass
from typing import Any

from saria_vllm.engine.nixl import has_device
from saria_vllm.engine.polled import PolledEngine
from saria_vllm.engine.posix import Transfer
from saria_vllm.errors import ConfigError

THREADS_MAX = 16
"""Of KvikIO's pool, which is the process's. One of them works on a transfer until it has ended."""


class _Memory:
    """Memory at an address, of the host or of a GPU: KvikIO asks CUDA which it is."""

    def __init__(self, addr: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (addr, False), "strides": None, "version": 3,
        }  # fmt: skip


@dataclass(slots=True)
class _File:
    handle: Any
    in_flight: int = 0


@dataclass(slots=True)
class _Flight:
    transfer: Transfer
    memory: _Memory
    future: Any = None
    """None: refused."""


class KvikioEngine(PolledEngine[_Flight]):
    """An `SsdEngine` over KvikIO: GPUDirect Storage where that works, else KvikIO's own copies through the host.

    KvikIO opens files by path: the descriptor's own path in /proc, while transfers of it are in flight and no longer,
    for a number means another file after a close. A transfer is one task, since the others of one that failed would
    still be writing when its end is known. A future says once how it ended, by a number of bytes or a RuntimeError;
    what was not whole is done again by plain system calls inside `reap`, which say why (for memory of a GPU: EFAULT).

    Raises:
        ConfigError: KvikIO is not installed, or no GPU answers.
    """

    name = "kvikio"

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self._files: dict[tuple[int, bool], _File] = {}
        self._registered: _Memory | None = None
        self._api, self.mode = load(min(depth, THREADS_MAX))

    def register_memory(self, addr: int, nbytes: int, device: int = -1) -> bool:
        """See `SsdEngine`. KvikIO registers memory of a GPU only, and all of its allocation."""
        if self._closed or self._registered is not None:
            return False
        memory = _Memory(addr, nbytes)
        try:
            self._api.memory_register(memory)
        except RuntimeError:
            return False
        self._registered = memory
        return True

    def _begin(self, transfer: Transfer) -> _Flight:
        flight = _Flight(transfer, _Memory(transfer.addr, transfer.nbytes))
        try:
            file = self._open(transfer.fd, transfer.write).handle
            start = file.pwrite if transfer.write else file.pread
            flight.future = start(flight.memory, transfer.nbytes, transfer.offset, transfer.nbytes)
        except (OSError, RuntimeError):
            pass  # `move` will say why.
        else:
            self._files[transfer.fd, transfer.write].in_flight += 1
        return flight

    def _open(self, fd: int, write: bool) -> _File:
        """Raises OSError or RuntimeError. A descriptor must allow what a new one by its path would."""
        file = self._files.get((fd, write))
        if file is None:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == (os.O_RDONLY if write else os.O_WRONLY):
                raise OSError(errno.EBADF, "the descriptor does not allow it")
            file = _File(self._api.CuFile(f"/proc/self/fd/{fd}", "r+" if write else "r"))
            self._files[fd, write] = file
        return file

    def _end(self, flight: _Flight) -> bool | None:
        if flight.future is None:
            self._close_idle()
            return False
        if not flight.future.done():
            return None
        self._files[flight.transfer.fd, flight.transfer.write].in_flight -= 1
        try:
            return bool(flight.future.get() == flight.transfer.nbytes)
        except RuntimeError:
            return False
        finally:
            self._close_idle()

    def _release(self) -> None:
        if self._registered is not None:
            try:
                self._api.memory_deregister(self._registered)
            except RuntimeError:
                pass  # The driver is going down, and its registrations with it.
            self._registered = None

    def _close_idle(self) -> None:
        for key, file in list(self._files.items()):
            if not file.in_flight:
                del self._files[key]
                file.handle.close()


def load(threads: int) -> tuple[Any, str]:
    """KvikIO with at least `threads` threads, and one phrase that says what it is and whether it has GDS.

    Raises:
        ConfigError: it is not installed, or no GPU answers.
    """
    if not has_device():  # Asked first: its libraries may spin for ever where libcuda is missing.
        raise _refusal("no GPU answers here")
    try:
        import kvikio
        import kvikio.defaults
    except Exception as error:  # Its loaders of libraries raise their own.
        raise _refusal(f"KvikIO cannot be imported ({error}): pip install kvikio-cu13") from error
    if kvikio.defaults.get("num_threads") < threads:
        kvikio.defaults.set({"num_threads": threads})
    gds = "without GDS" if kvikio.defaults.is_compat_mode_preferred() else "GDS"
    return kvikio, f"KvikIO {kvikio.__version__}, {gds}"


def _refusal(problem: str) -> ConfigError:
    return ConfigError(f'ssd_engine: "kvikio": {problem}; accepted here: "auto", which takes what works')
