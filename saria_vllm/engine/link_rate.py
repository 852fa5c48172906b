"""How fast chunks get from DRAM into HBM when nothing else is under way."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from ctypes import addressof, c_char

from saria_vllm import _native
from saria_vllm.engine.pacer import PIECE_BYTES_MAX
from saria_vllm.engine.pool import DramPool
from saria_vllm.types import GroupShape, Slot

MEMORY_BYTES = 256 << 20
"""Of `measure_memory`, on each side."""

LINK_S = 0.2
"""How long it is measured."""

PIECES_MIN = 4


def measure_link(
    pool: DramPool, pages: _native.PageMap, shape: GroupShape, num_blocks: int, seconds: float = LINK_S
) -> float:
    """Bytes per second of the copies that loads make, from all over the pool into all blocks in turn.

    Overwrites blocks: to be called before the first request. The first half of the pieces, which touch memory for the
    first time, do not count.
    """
    cells = pool.slab_bytes // shape.record_bytes
    step = max(1, min(PIECE_BYTES_MAX // shape.record_bytes, pool.slabs * cells))
    rates: list[float] = []
    record, until = 0, time.perf_counter() + seconds
    while len(rates) < PIECES_MIN or time.perf_counter() < until:
        records = range(record, record + step)
        record += step
        sources = [
            pool.address(Slot(number // cells % pool.slabs, number % cells), shape.record_bytes) for number in records
        ]
        blocks = [
            [(number * shape.blocks_per_chunk + at) % num_blocks for at in range(shape.blocks_per_chunk)]
            for number in records
        ]
        began = time.perf_counter()
        pages.scatter_many(sources, blocks)
        rates.append(step * shape.record_bytes / max(1e-9, time.perf_counter() - began))
    return statistics.median(rates[len(rates) // 2 :])


def measure_memory() -> float:
    """The same on a machine that does not serve, between memory of our own: a DRAM pool, and pages as of 32 layers.

    Raises:
        ConfigError: no room for the pool.
    """
    layers, page, num_blocks = 32, 32 << 10, MEMORY_BYTES >> 20
    hbm = mmap.mmap(-1, MEMORY_BYTES)
    start = addressof(c_char.from_buffer(hbm))
    bases = [start + layer * num_blocks * page for layer in range(layers)]
    pages = _native.PageMap(bases, [page] * layers, [page] * layers, num_blocks)
    pool = DramPool(f"link-{os.getpid()}", MEMORY_BYTES, 0, 1, 2 << 20)
    try:
        return measure_link(pool, pages, GroupShape(0, 16, 1, layers * page), num_blocks)
    finally:
        pool.close()
