"""What planning costs the engine's thread, with a million chunks indexed: `python e2e/bench_plan.py`.

The part without vLLM is `saria_vllm.policy.Tiers` alone. Where vLLM is installed, its scheduler runs with our scheduler
half, 64 requests decoding and nothing to move: what every engine step pays.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.admission import make_admission
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.policy.tiers import Tiers
from saria_vllm.types import Extent, FoundChunk, FoundChunks, GroupShape, JobResult

BLOCKS = 4
"""Blocks of a chunk."""
SHAPE = GroupShape(0, 16, BLOCKS, 1 << 18)
PREFIX_CHUNKS = 8192
TURN_CHUNKS = 32
"""Sessions come in turns, one after the other: a prefix does not lie in a row."""
HITS = (512, PREFIX_CHUNKS)
BATCH = 64
SLAB_SLOTS = 32
FOUND_CHUNKS = 100_000
REQUESTS = 64

now: Callable[[], float] = time.monotonic


def keys(prefix: int, first: int, end: int) -> list[bytes]:
    return [hashlib.sha256(b"%d %d" % (prefix, place)).digest() for place in range(first, end)]


def blocks(chunks: int) -> list[Any]:
    return [np.zeros((chunks, BLOCKS), np.int32)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def show(what: str, seconds: Sequence[float], unit: str = "ms") -> None:
    scale = {"ms": 1e3, "us": 1e6}[unit]
    low, high = min(seconds) * scale, max(seconds) * scale
    print(
        f"{what:58} median {statistics.median(seconds) * scale:.3f} {unit}  min {low:.3f}  max {high:.3f}  "
        f"n {len(seconds)}",
        flush=True,
    )


def make_tiers(slots: int, headroom: int) -> Tiers:
    assert slots % SLAB_SLOTS == 0
    admission = make_admission(AdmissionConfig(), SHAPE.block_tokens * BLOCKS)
    return Tiers(
        [SHAPE], SlotAllocator(slots // SLAB_SLOTS, [SLAB_SLOTS]), None, admission,
        ghosts_max=1_000_000, headroom=[headroom], persist_bytes_max=1 << 28,
    )  # fmt: skip


def store(tiers: Tiers, prefix: Prefix, first: int, end: int) -> float:
    """Seconds that the plan took."""
    began = time.perf_counter()
    job, stop = tiers.plan_store(prefix, first, end, blocks(end - first), now())
    seconds = time.perf_counter() - began
    assert job is not None and stop == end
    tiers.finished([JobResult(job.job_id)], now())
    return seconds


def planning(chunks: int, rounds: int) -> None:
    """Hits in a full index, then stores and the evictions that make room for them."""
    prefixes = chunks // PREFIX_CHUNKS
    chunks = prefixes * PREFIX_CHUNKS
    tiers = make_tiers(chunks + BATCH, BATCH)
    before, key_bytes = resident_bytes(), 0
    sessions = [Prefix() for _ in range(prefixes)]
    for first in range(0, PREFIX_CHUNKS, TURN_CHUNKS):
        for number, prefix in enumerate(sessions):
            end = first + TURN_CHUNKS
            prefix.keys += keys(number, first, end)
            key_bytes += sum(map(sys.getsizeof, prefix.keys[first:]))
            store(tiers, prefix, first, end)
    assert not tiers.make_room(now())
    del sessions, prefix
    held = resident_bytes() - before
    ctypes.CDLL(None).malloc_trim(0)
    size = resident_bytes() - before
    print(
        f"{chunks:,} chunks indexed: {size / chunks:.0f} bytes each, {key_bytes / chunks:.0f} of them the key; "
        f"{held / chunks:.0f} with what malloc keeps of what was freed while it grew"
    )
    for hit in HITS:
        matched, planned = [], []
        for number in range(rounds):
            prefix = Prefix(keys(number * 7 % prefixes, 0, hit))
            began = time.perf_counter()
            end = tiers.match(prefix, 0, hit, now())
            matched.append(time.perf_counter() - began)
            assert end == hit
            began = time.perf_counter()
            tiers.arrived(prefix, hit, now())
            tiers.tier_tokens(prefix, 0, hit)
            job = tiers.plan_load("request", prefix, 0, hit, blocks(hit), 0.0)
            planned.append(time.perf_counter() - began)
            tiers.finished([JobResult(job.job_id)], now())
        show(f"lookup of a hit of {hit:,} chunks, keys new", matched)
        show(f"plan of its load ({hit:,} chunks)", planned)
    stored, evicted = [], []
    for number in range(rounds):
        stored.append(store(tiers, Prefix(keys(-1 - number, 0, BATCH)), 0, BATCH))
        began = time.perf_counter()
        tiers.make_room(now())
        evicted.append(time.perf_counter() - began)
    assert tiers.chunks.slots.total(0) == chunks + BATCH
    show(f"plan of a store of {BATCH} chunks", stored)
    show(f"eviction of {BATCH} chunks", evicted)


def opening(chunks: int) -> None:
    """What was found on SSD, indexed once when the tier opens."""
    tiers = make_tiers(chunks, 1)
    names = [b"", *keys(0, 0, chunks)]
    found = FoundChunks.of(
        [
            FoundChunk(0, key, parent, Extent(0, place // 1000, place % 1000))
            for place, (parent, key) in enumerate(itertools.pairwise(names))
        ]
    )
    began = time.perf_counter()
    tiers.open_ssd(ExtentAllocator(1, chunks // 1000 + 10, [1000]), found, chunks // 1000 + 1)
    seconds = time.perf_counter() - began
    show(f"indexing one of {chunks:,} chunks found on SSD", [seconds / chunks], "us")


def steps(rounds: int) -> None:
    """vLLM's scheduler with our half: 64 requests decode and have nothing to store."""
    sys.path.insert(0, str(Path(__file__).parent / "sched"))
    from harness import Engine, write_model
    from timed_connector import SCHEDULER

    spent = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal spent
            began = time.perf_counter()
            try:
                return method(*args, **more)
            finally:
                spent += time.perf_counter() - began

        return call

    with tempfile.TemporaryDirectory(prefix="saria-bench-") as folder:
        engine = Engine(
            write_model(Path(folder) / "llama"), asynchronous=False, blocks=REQUESTS * 40, chunk_blocks=16,
            requests_max=REQUESTS, batched_tokens=8192,
        )  # fmt: skip
        for number in range(REQUESTS):
            engine.add(f"r{number}", [3 + (number * 31 + place) % 500 for place in range(300 + 4 * number)], 10_000)
        engine.steps_of(10)
        for name in SCHEDULER:
            setattr(engine.saria, name, timed(getattr(engine.saria, name)))
        seconds = []
        for _ in range(rounds):
            spent = 0.0
            jobs = len(engine.begun("store"))
            engine.steps_of(1)
            if len(engine.begun("store")) == jobs:
                seconds.append(spent)
        assert len(engine.scheduler.running) == REQUESTS
        show(f"one step with {REQUESTS} running requests and nothing to move", seconds)
        engine.abort(*engine.requests)
        engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    planning(arguments.chunks, arguments.rounds)
    opening(min(FOUND_CHUNKS, arguments.chunks))
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here: no engine step measured")
    else:
        steps(arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
