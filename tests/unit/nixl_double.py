"""A double of what we use of NIXL's Python API. Where that is installed, `test_nixl.py` compares the two."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Range = tuple[int, int, int]
"""Start, bytes, device: of a file the offset and the descriptor."""


class NixlError(Exception):
    pass


@dataclass
class Request:
    write: bool
    addr: int
    nbytes: int
    offset: int
    fd: int
    state: str = "INIT"


class Handle:
    """Is released when the last reference goes, in flight or not, as a NIXL handle is."""

    def __init__(self, double: NixlDouble, request: Request) -> None:
        self._double, self.request = double, request
        self._released = False
        self.thread: threading.Thread | None = None

    def release(self) -> None:
        assert not self._released
        self._released = True
        self._double.released += 1
        if self.request.state == "PROC":
            self._double.released_in_flight += 1

    def __del__(self) -> None:
        if not self._released:
            self.release()


@dataclass(eq=False)
class NixlDouble:
    """In the place of NIXL's module `_api`."""

    plugins: tuple[str, ...] = ("POSIX",)
    """Whose backends can be created."""
    queues: tuple[str, ...] = ("use_uring", "use_aio")
    """I/O queues of POSIX that work."""
    short_is_whole: bool = False
    """As before 1.5.0."""
    failure_stays: bool = False
    """All transfers after a failed one fail, as with NIXL's POSIXAIO queue."""
    wrong_bytes: bool = False
    refuses: bool = False
    """`transfer` raises."""
    released: int = 0
    """Handles."""
    released_in_flight: int = 0
    agents: list[AgentState] = field(default_factory=list)
    """All that were made."""
    kinds: list[str] = field(default_factory=list)
    """Of the memory of each transfer."""
    ended: int = 0
    """How many of them were destroyed."""

    def nixl_agent_config(self, enable_prog_thread: bool, backends: list[str]) -> None:
        assert not enable_prog_thread and not backends

    def nixl_agent(self, name: str, config: None) -> Agent:
        state = AgentState(self, name)
        self.agents.append(state)
        return Agent(state)


@dataclass(eq=False)
class AgentState:
    double: NixlDouble
    name: str
    plugin: str = ""
    registered: dict[str, list[Range]] = field(default_factory=lambda: {"DRAM": [], "VRAM": [], "FILE": []})
    failed: bool = False


class Agent:
    def __init__(self, state: AgentState) -> None:
        self._state, self._double = state, state.double

    def __del__(self) -> None:
        self._double.ended += 1

    def create_backend(self, plugin: str, params: dict[str, str]) -> None:
        usable = plugin != "POSIX" or any(params.get(queue) == "true" for queue in self._double.queues)
        if plugin not in self._double.plugins or not usable:
            raise NixlError("NIXL_ERR_BACKEND")
        self._state.plugin = plugin

    def register_memory(
        self, ranges: Iterable[tuple[int, int, int, str]], kind: str, backends: list[str]
    ) -> tuple[str, list[Range]]:
        assert backends == [self._state.plugin]
        new = [(start, nbytes, device) for start, nbytes, device, _ in ranges]
        self._state.registered[kind] += new
        return kind, new

    def deregister_memory(self, registration: tuple[str, list[Range]], backends: list[str]) -> None:
        kind, ranges = registration
        for where in ranges:
            self._state.registered[kind].remove(where)

    def get_xfer_descs(self, ranges: list[Range], kind: str) -> tuple[str, list[Range]]:
        return kind, ranges

    def initialize_xfer(self, operation: str, local: Any, remote: Any, agent: str, *, backends: list[str]) -> Handle:
        assert agent == self._state.name
        for kind, ranges in (local, remote):
            (where,) = ranges
            if not any(_covers(known, where) for known in self._state.registered[kind]):
                raise NixlError("NIXL_ERR_NOT_FOUND")
        (addr, nbytes, _), (offset, _, fd) = local[1][0], remote[1][0]
        self._double.kinds.append(local[0])
        return Handle(self._double, Request(operation == "WRITE", addr, nbytes, offset, fd))

    def transfer(self, handle: Handle) -> str:
        if self._double.refuses:
            raise NixlError("NIXL_ERR_BACKEND")
        handle.request.state = "PROC"
        handle.thread = threading.Thread(target=self._run, args=(handle.request,), daemon=True)
        handle.thread.start()
        return "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        state = handle.request.state
        if state in ("DONE", "ERR"):
            assert handle.thread is not None
            handle.thread.join()
        if state == "INIT":
            raise NixlError("NIXL_ERR_NOT_POSTED")
        if state == "ERR":
            raise NixlError("NIXL_ERR_BACKEND")
        return state

    def release_xfer_handle(self, handle: Handle) -> None:
        handle.release()

    def _run(self, request: Request) -> None:
        memory = memoryview((ctypes.c_char * request.nbytes).from_address(request.addr))
        try:
            if request.write:
                moved = os.pwritev(request.fd, [memory], request.offset)
            else:
                moved = _read(request.fd, memory, request.offset)
        except OSError:
            moved = -1
        if self._double.wrong_bytes and moved > 0:
            ctypes.memset(request.addr, 0, 1)
        whole = moved == request.nbytes or (self._double.short_is_whole and moved >= 0)
        failed = not whole or (self._double.failure_stays and self._state.failed)
        self._state.failed |= failed
        request.state = "ERR" if failed else "DONE"


def _read(fd: int, memory: memoryview, offset: int) -> int:
    try:
        return os.preadv(fd, [memory], offset)
    except OSError as error:
        if error.errno != errno.ESPIPE:
            raise
    return os.readv(fd, [memory])


def _covers(known: Range, where: Range) -> bool:
    return known[2] == where[2] and known[0] <= where[0] and where[0] + where[1] <= known[0] + known[1]
