"""The NIXL SSD engine. NIXL is imported when it is opened; decision 21 says what its parts are there for."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from saria_vllm.engine.polled import PAUSE_S, PolledEngine
from saria_vllm.engine.posix import Transfer
from saria_vllm.errors import ConfigError

VERSION_MIN = (1, 5, 0)

PLUGINS = ("GDS_MT", "GDS", "POSIX")
"""NIXL's plugins, the best first."""

PROBE_S = 10.0

KEPT_MAX = 256
"""Handles of failed transfers, kept in case that their failure was another's. The oldest are released for new ones."""

_DEVICE_PROBE = (
    "import ctypes, sys; cuda, n = ctypes.CDLL('libcuda.so.1'), ctypes.c_int(); "
    "sys.exit(bool(cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(n)) or n.value < 1))"
)

_FILE_END = 2**62
_MEMORY_END = 2**62
_TEST_BYTES = 4096

_numbers = itertools.count()
_stuck: list[Any] = []
"""What must not be released, since a transfer of a test has not ended."""


@dataclass(slots=True)
class _Flight:
    transfer: Transfer
    handle: Any = None
    failed: bool = False
    held: list[tuple[str, tuple[int, int, int]]] = field(default_factory=list)
    """What was registered for it."""


class NixlEngine(PolledEngine[_Flight]):
    """An `SsdEngine` over a NIXL agent: GDS_MT or GDS where a GPU answers (never tried on one), else POSIX.

    A test at its start made sure that NIXL calls a short read failed.
    A handle is released when its transfer has ended and never before: NIXL would free what the kernel still uses.

    Raises:
        ConfigError: NIXL is not installed or too old, or none of its backends works here.
    """

    name = "nixl"

    def __init__(self, depth: int, plugins: Sequence[str] = PLUGINS) -> None:
        super().__init__(depth)
        self._backend, self.backend = _open_backend(depth, plugins)

    def register_memory(self, addr: int, nbytes: int, device: int = -1) -> bool:
        """See `SsdEngine`. GDS needs it for memory of a GPU; POSIX cannot reach that."""
        return not self._closed and self._backend.register(addr, nbytes, device)

    def _begin(self, transfer: Transfer) -> _Flight:
        return self._backend.start(transfer)

    def _end(self, flight: _Flight) -> bool | None:
        state = self._backend.state(flight)
        if state == "PROC":
            return None
        self._backend.end(flight)
        return state == "DONE"

    def _release(self) -> None:
        self._backend.close()


class _Backend:
    """An agent with one backend, and what is registered with it: only what is in flight, since a descriptor's number
    and a memory range may mean something else afterwards. POSIX registers nothing with anybody, and NIXL cannot look up
    ranges that overlap: all memory is registered with it once."""

    def __init__(self, api: Any, plugin: str, params: dict[str, str]) -> None:
        self._name, self._plugins = f"saria-{os.getpid()}-{next(_numbers)}", [plugin]
        self._agent = api.nixl_agent(self._name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._agent.create_backend(plugin, params)
        self._held: dict[tuple[str, tuple[int, int, int]], list[Any]] = {}
        """By kind and range: the registration, and how many transfers use it."""
        self._kept: deque[Any] = deque(maxlen=KEPT_MAX)
        self._registered: tuple[str, int, int, int] | None = None
        """Of `register`: kind, address, bytes, GPU."""
        self._all_memory = plugin == "POSIX"
        if self._all_memory:
            self._hold(_Flight(Transfer(False, 0, 0, 0, 0, 0)), "DRAM", (0, _MEMORY_END, 0))

    def register(self, addr: int, nbytes: int, device: int) -> bool:
        """Register memory for good."""
        if self._all_memory or self._registered is not None:
            return False
        kind = "VRAM" if device >= 0 else "DRAM"
        try:
            self._hold(_Flight(Transfer(False, 0, 0, 0, 0, 0)), kind, (addr, nbytes, max(device, 0)))
        except Exception:  # NIXL's exceptions have no other base.
            return False
        self._registered = kind, addr, nbytes, max(device, 0)
        return True

    def _memory(self, flight: _Flight, addr: int, nbytes: int) -> tuple[str, int]:
        """Kind and GPU of a transfer's memory, which is registered afterwards."""
        if self._registered is not None:
            kind, start, size, device = self._registered
            if start <= addr and addr + nbytes <= start + size:
                return kind, device
        if not self._all_memory:
            self._hold(flight, "DRAM", (addr, nbytes, 0))
        return "DRAM", 0

    def start(self, transfer: Transfer) -> _Flight:
        """Begin; what NIXL refuses is a flight that has failed."""
        _, fd, addr, nbytes, offset, _ = transfer
        flight = _Flight(transfer)
        try:
            self._hold(flight, "FILE", (0, _FILE_END, fd))
            kind, device = self._memory(flight, addr, nbytes)
            flight.handle = self._agent.initialize_xfer(
                "WRITE" if transfer.write else "READ",
                self._agent.get_xfer_descs([(addr, nbytes, device)], kind),
                self._agent.get_xfer_descs([(offset, nbytes, fd)], "FILE"),
                self._name,
                backends=self._plugins,
            )
            self._agent.transfer(flight.handle)
        except Exception:  # NIXL's exceptions have no other base.
            flight.failed = True
        return flight

    def state(self, flight: _Flight) -> str:
        """ "PROC" while in flight, "DONE" when all bytes were moved, else "ERR"."""
        if not flight.failed:
            try:
                return str(self._agent.check_xfer_state(flight.handle))
            except Exception:  # As above.
                flight.failed = True
        return "ERR"

    def end(self, flight: _Flight) -> None:
        """Let go of what has ended. What failed may be in a queue of NIXL's all the same: its handle stays a while."""
        try:
            if flight.failed:
                self._kept.append(flight.handle)
            else:
                self._agent.release_xfer_handle(flight.handle)
            for key in flight.held:
                registration = self._held[key]
                registration[1] -= 1
                if not registration[1]:
                    del self._held[key]
                    self._agent.deregister_memory(registration[0], self._plugins)
        except Exception:  # As above.
            self._kept.append(flight.handle)

    def close(self) -> None:
        """End the agent, when nothing is in flight."""
        self._held.clear()
        del self._agent
        self._kept.clear()

    def _hold(self, flight: _Flight, kind: str, where: tuple[int, int, int]) -> None:
        registration = self._held.get((kind, where))
        if registration is None:
            start, nbytes, device = where
            new = self._agent.register_memory([(start, nbytes, device, "")], kind, self._plugins)
            registration = self._held[kind, where] = [new, 0]
        registration[1] += 1
        flight.held.append((kind, where))


def load() -> tuple[Any, str]:
    """NIXL's Python API and its version.

    Raises:
        ConfigError: it is not installed or too old.
    """
    try:
        from nixl import _api
    except ImportError as error:
        raise _refusal(f"NIXL cannot be imported ({error}): pip install 'nixl>=1.5'") from error
    try:
        version = metadata.version(_api.__name__.partition(".")[0])
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    if tuple(int(number) for number in re.findall(r"\d+", version)[:3]) < VERSION_MIN:
        needed = ".".join(map(str, VERSION_MIN))
        raise _refusal(f"NIXL {version} is installed, {needed} or newer is needed: pip install 'nixl>=1.5'")
    return _api, version


@functools.cache
def has_device() -> bool:
    """Whether a GPU answers. Asked in another process, since NIXL's GDS spins for ever where libcuda is missing, and a
    broken driver may not answer."""
    command = [sys.executable, "-I", "-S", "-c", _DEVICE_PROBE]
    try:
        ended = subprocess.run(command, timeout=PROBE_S, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0


def _open_backend(depth: int, plugins: Sequence[str]) -> tuple[_Backend, str]:
    """The first backend of these plugins that passes its test, and its name."""
    api, version = load()
    queues = {"ios_pool_size": str(max(depth, 64)), "kernel_queue_size": str(max(depth, 16))}
    choices: list[tuple[str, str, dict[str, str]]] = [
        ("POSIX over io_uring", "POSIX", {"use_uring": "true", **queues}),
        ("POSIX over libaio", "POSIX", {"use_aio": "true", **queues}),
    ]
    if has_device():
        choices = [("GDS_MT", "GDS_MT", {}), ("GDS", "GDS", {}), *choices]
    problems = []
    for name, plugin, params in (choice for choice in choices if choice[1] in plugins):
        try:
            backend = _Backend(api, plugin, params)
        except Exception as error:  # NIXL's exceptions have no other base.
            problems.append(f"{name}: {error}")
            continue
        problem = _test(backend)
        if not problem:
            return backend, f"{name}, NIXL {version}"
        backend.close()
        problems.append(f"{name}: {problem}")
    raise _refusal(f"NIXL {version} does not work here ({'; '.join(problems)})")


def _test(backend: _Backend) -> str:
    """Read a short file: empty when all is as it should be, or what went wrong."""
    data = os.urandom(2 * _TEST_BYTES - 1)
    memory = mmap.mmap(-1, 2 * _TEST_BYTES)
    addr = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()

        def transfer(write: bool, nbytes: int, offset: int) -> bool:
            flight = backend.start(Transfer(write, file.fileno(), addr, nbytes, offset, 0))
            deadline = time.monotonic() + PROBE_S
            while (state := backend.state(flight)) == "PROC":
                time.sleep(PAUSE_S[0])
                if time.monotonic() > deadline:
                    _stuck.append((backend, flight, memory))
                    raise _refusal("a transfer of its test does not end")
            backend.end(flight)
            return state == "DONE"

        if not transfer(False, _TEST_BYTES, 0) or memory[:_TEST_BYTES] != data[:_TEST_BYTES]:
            return "a read failed"
        if transfer(False, 2 * _TEST_BYTES, 0) or transfer(False, _TEST_BYTES, 1 << 20):
            return "it says that a read past the end of a file was whole"
        memory[:_TEST_BYTES] = data[-_TEST_BYTES:]
        if not transfer(True, _TEST_BYTES, 0) or os.pread(file.fileno(), _TEST_BYTES, 0) != data[-_TEST_BYTES:]:
            return "a transfer after a failed one failed"
    return ""


def _refusal(problem: str) -> ConfigError:
    return ConfigError(f'ssd_engine: "nixl": {problem}; accepted here: "auto", which takes what works')
