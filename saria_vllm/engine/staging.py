"""Memory that SSD reads land in."""

from __future__ import annotations

import ctypes
import mmap

from saria_vllm.engine.ssd_engine import SsdEngine


class Staging:
    """`engine.depth` buffers of `buffer_bytes` each, in huge pages where there are some, and registered with the
    engine: finding and pinning small pages one by one is most of what a read costs in CPU. It must outlive what is in
    flight."""

    def __init__(self, engine: SsdEngine, buffer_bytes: int) -> None:
        nbytes = buffer_bytes * engine.depth
        self._buffer_bytes = buffer_bytes
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):  # A fork would copy what is pinned.
            try:
                self._memory.madvise(advice)
            except OSError:
                pass  # A kernel without it.
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.registered = engine.register_memory(self._start, nbytes)

    def address(self, buffer: int) -> int:
        """Where a buffer begins."""
        return self._start + buffer * self._buffer_bytes
