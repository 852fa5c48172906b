"""SSD engines move bytes between files and memory, asynchronously. One engine belongs to one thread."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Protocol

from saria_vllm.config import SsdEngineName
from saria_vllm.errors import ConfigError

_PROBE_BYTES = 4096


class SsdEngine(Protocol):
    """Up to `depth` transfers in flight between files and memory that the caller keeps valid until they are reaped.

    Every submitted transfer is returned by `reap` exactly once, in any order, as (tag, bytes moved) or (tag, -errno).
    Short transfers are continued inside, so fewer bytes than asked mean that a read met the end of the file.
    `close` waits for what is in flight and drops what was not reaped.
    """

    name: str
    depth: int

    @property
    def in_flight(self) -> int:
        """Transfers submitted and not yet returned by `reap`."""

    def register_memory(self, addr: int, nbytes: int, device: int = -1) -> bool:
        """Ask once, before the first transfer, that transfers within this memory cost less; it must stay until `close`.
        `device` is the number of the GPU whose memory it is, -1 for the host's. Where this is False, all transfers with
        memory of the host work as well; of a GPU's memory they do not.
        """

    def register_files(self) -> Callable[[int], None] | None:
        """Ask once, before the first transfer, that transfers through files that stay open cost less. Where that is
        granted, the function that comes back must be called with each descriptor before it is closed, when nothing is
        in flight with it, by any thread, also after `close`: or its number stands for the closed file.
        """

    def submit_read(self, fd: int, addr: int, nbytes: int, offset: int, tag: int) -> None:
        """Start reading `nbytes` > 0 at byte `offset` of the file into memory at `addr`; `tag` is unsigned 64-bit.

        Raises:
            RuntimeError: `depth` transfers are in flight already.
            ValueError: `fd` or `offset` is negative, or `nbytes` is not above zero.
            OSError: the engine is closed or the kernel refuses.
        """

    def submit_write(self, fd: int, addr: int, nbytes: int, offset: int, tag: int) -> None:
        """Start writing, as `submit_read`."""

    def reap(self, timeout_s: float) -> list[tuple[int, int]]:
        """What has ended; waits up to `timeout_s` >= 0 seconds for the first. May return early with nothing.

        Raises:
            ValueError: `timeout_s` is negative.
            OSError: the engine is closed or the kernel refuses.
        """

    def close(self) -> None:
        """Wait for what is in flight and stop. May be called twice."""


def open_engine(name: SsdEngineName, depth: int) -> tuple[SsdEngine, str]:
    """An engine, and one line that says which and why. "auto" takes io_uring where a probe read through it works, else
    posix, and never nixl or kvikio.

    Raises:
        ConfigError: io_uring, io_uring_sqpoll, nixl or kvikio was asked for by name and does not work here.
    """
    from saria_vllm.engine.io_uring import UringEngine
    from saria_vllm.engine.posix import PosixEngine

    if name == "posix":
        return PosixEngine(depth), "ssd engine posix: configured"
    if name == "nixl":
        from saria_vllm.engine.nixl import NixlEngine

        nixl = NixlEngine(depth)
        return nixl, f"ssd engine nixl: configured ({nixl.backend})"
    if name == "kvikio":
        from saria_vllm.engine.kvikio import KvikioEngine

        kvikio = KvikioEngine(depth)
        return kvikio, f"ssd engine kvikio: configured ({kvikio.mode})"
    try:
        engine = UringEngine(depth, polled=name == "io_uring_sqpoll")
    except OSError as error:
        reason = f"io_uring is not available: {_describe(error)}"
    else:
        reason = _probe(engine)
        if not reason:
            return engine, f"ssd engine {engine.name}: {'its probe read worked' if name == 'auto' else 'configured'}"
        engine.close()
    if name != "auto":
        raise ConfigError(f'ssd_engine: "{name}": {reason}; accepted here: "auto", which takes what works')
    return PosixEngine(depth), f"ssd engine posix: {reason}"


def _probe(engine: SsdEngine) -> str:
    """Read a block of a temporary file through `engine`; empty when it came back right, or what went wrong."""
    block = os.urandom(_PROBE_BYTES)
    memory = mmap.mmap(-1, _PROBE_BYTES)
    try:
        with tempfile.TemporaryFile() as file:
            file.write(block)
            file.flush()
            addr = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            engine.submit_read(file.fileno(), addr, _PROBE_BYTES, 0, 0)
            done: list[tuple[int, int]] = []
            while engine.in_flight:
                done += engine.reap(1.0)
    except OSError as error:
        return f"io_uring probe failed: {_describe(error)}"
    moved = done[0][1]
    if moved < 0:
        return f"io_uring probe failed: {_describe(OSError(-moved, os.strerror(-moved)))}"
    return "" if memory[:] == block else "io_uring probe read wrong bytes"


def _describe(error: OSError) -> str:
    return f"{os.strerror(error.errno or 0)} ({errno.errorcode.get(error.errno or 0, error.errno)})"


def check_transfer(fd: int, nbytes: int, offset: int) -> None:
    """The ValueErrors of `SsdEngine.submit_read`."""
    if fd < 0 or nbytes <= 0 or offset < 0:
        raise ValueError(f"cannot transfer {nbytes} bytes at offset {offset} of descriptor {fd}")
