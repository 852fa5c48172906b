"""What the checksum adds to the pass that copies a record from staging to its pages: `python e2e/bench_checksum.py`.

64 MiB of 1 MiB records in 64 KiB pages, 15 interleaved rounds on one thread: scatter alone, scatter that verifies, and
the checksum alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from saria_vllm import _native

RECORD_BYTES = 1 << 20
PAGE_BYTES = 1 << 16
RECORDS = 64
LAYERS = RECORD_BYTES // PAGE_BYTES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    staging, pages = aligned(RECORDS * RECORD_BYTES), aligned(RECORDS * RECORD_BYTES)
    staging[:] = rng.integers(0, 256, RECORDS * RECORD_BYTES, np.uint8)
    layer_bytes = RECORDS * PAGE_BYTES
    bases = [pages.ctypes.data + layer * layer_bytes for layer in range(LAYERS)]
    pages_of = _native.PageMap(bases, [PAGE_BYTES] * LAYERS, [PAGE_BYTES] * LAYERS, RECORDS)
    sources = [staging.ctypes.data + record * RECORD_BYTES for record in range(RECORDS)]
    order = rng.permutation(RECORDS).tolist()
    ways: dict[str, Callable[[int, int], object]] = {
        "scatter": lambda source, block: pages_of.scatter(source, [block]),
        "scatter and verify": lambda source, block: pages_of.scatter_verify(source, RECORD_BYTES, block, [block]),
        "checksum alone": lambda source, block: _native.checksum(source, RECORD_BYTES, block),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(arguments.rounds + 1):
        for way, call in ways.items():
            began = time.perf_counter()
            for source, block in zip(sources, order, strict=True):
                call(source, block)
            if turn:  # The first one touches the memory.
                seconds[way].append(time.perf_counter() - began)
    for way, values in seconds.items():
        speed = RECORDS * RECORD_BYTES / statistics.median(values) / 1e9
        print(f"{way:20} median {speed:.1f} GB/s  n {len(values)}")
    ratios = [plain / both for both, plain in zip(seconds["scatter and verify"], seconds["scatter"], strict=True)]
    print(
        f"rate of scatter and verify over scatter: median {statistics.median(ratios):.2f} (min {min(ratios):.2f}, "
        f"max {max(ratios):.2f})"
    )
    return 0


def aligned(nbytes: int) -> np.ndarray:
    """Zeroed bytes at a multiple of 4096, as staging and KV pages are."""
    memory = np.zeros(nbytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + nbytes]


if __name__ == "__main__":
    sys.exit(main())
