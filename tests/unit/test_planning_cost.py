"""What planning takes of the engine's thread does not grow with the cache, whatever is pinned and whoever else runs."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.admission import make_admission
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.policy.tiers import Tiers
from saria_vllm.types import GroupShape, JobResult

SHAPE = GroupShape(0, 16, 1, 4096)
SESSION_CHUNKS = 500
PINNED = 0.9
BATCH = 8
"""Chunks that a step stores, and evicts for it."""

LOOKUP_CHUNKS = 3600
IO_THREADS = 8
STEPS = 200


def session(number: int, chunks: int) -> Prefix:
    return Prefix([b"%d/%d" % (number, place) for place in range(chunks)])


def blocks(chunks: int) -> list[np.ndarray]:
    return [np.zeros((chunks, 1), np.int32)]


class Cache:
    """A full DRAM tier whose oldest entries are pinned: eviction must find its way past them."""

    def __init__(self, chunks: int) -> None:
        self.tiers = Tiers(
            [SHAPE], SlotAllocator(-(-(chunks + BATCH) // 1000), [1000]), None,
            make_admission(AdmissionConfig(policy="dram_only"), 16),
            ghosts_max=chunks, headroom=[BATCH], persist_bytes_max=1 << 20,
        )  # fmt: skip
        self.number = chunks // SESSION_CHUNKS
        for number in range(self.number):
            self.store(session(number, SESSION_CHUNKS))
        for number in range(int(PINNED * self.number)):
            prefix = session(number, SESSION_CHUNKS)
            assert self.tiers.match(prefix, 0, SESSION_CHUNKS, 1.0) == SESSION_CHUNKS
            self.tiers.plan_load(f"pins {number}", prefix, 0, SESSION_CHUNKS, blocks(SESSION_CHUNKS), 1.0)
        self.tiers.make_room(1.0)

    def store(self, prefix: Prefix) -> None:
        job, end = self.tiers.plan_store(prefix, 0, len(prefix.keys), blocks(len(prefix.keys)), 0.0)
        assert job is not None and end == len(prefix.keys)
        self.tiers.finished([JobResult(job.job_id)], 0.0)

    def step(self) -> None:
        """Something new is stored, and as much evicted."""
        self.number += 1
        self.store(session(self.number, BATCH))
        self.tiers.make_room(2.0)

    def times(self) -> tuple[float, float]:
        """Processor seconds of this thread: p99 of a step, and the median of a lookup of new keys."""
        steps, lookups = [], []
        for _ in range(STEPS):
            began = time.thread_time()
            self.step()
            steps.append(time.thread_time() - began)
        long = Prefix([key for number in range(LOOKUP_CHUNKS // SESSION_CHUNKS) for key in session(number, 500).keys])
        for _ in range(20):
            asked = Prefix(list(long.keys))
            began = time.thread_time()
            assert self.tiers.match(asked, 0, len(asked.keys), 2.0) == len(asked.keys)
            lookups.append(time.thread_time() - began)
        return sorted(steps)[int(0.99 * STEPS)], sorted(lookups)[10]


@contextmanager
def busy_io_threads() -> Iterator[None]:
    """Threads that read into buffers of their own, and hold the interpreter in short bursts between, as ours do."""
    stop = threading.Event()

    def work(fd: int) -> None:
        buffer, ended = bytearray(1 << 20), []
        while not stop.is_set():
            ended.append((os.preadv(fd, [buffer], 0), buffer[0]))
            del ended[:-16]

    with tempfile.TemporaryFile() as file:
        file.write(bytes(1 << 20))
        file.flush()
        threads = [threading.Thread(target=work, args=(file.fileno(),)) for _ in range(IO_THREADS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize("chunks", [200_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_b51_a_step_costs_what_it_costs_with_a_small_cache(chunks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone for what it takes; beside threads that fill both cores and the memory's bandwidth for how it grows."""
    small, large = Cache(20_000), Cache(chunks)
    for cache in (small, large):
        cache.step()  # Meets what is pinned, once.
    alone = min(large.times() for _ in range(3))
    with busy_io_threads():
        pairs = [(small.times(), large.times()) for _ in range(2)]
    growth, lookup_growth = (min(large[at] / small[at] for small, large in pairs) for at in (0, 1))
    with capsys.disabled():
        print(
            f"\n{chunks:,} chunks, 90 % pinned: step p99 {alone[0] * 1e3:.3f} ms, lookup of {LOOKUP_CHUNKS:,} keys "
            f"{alone[1] * 1e3:.3f} ms; beside {IO_THREADS} busy threads {growth:.2f} and {lookup_growth:.2f} of what "
            "20,000 chunks take",
            file=sys.stderr,
        )
    assert alone[0] < 1e-3
    assert growth < 3, "memory is slower than caches; a scan would be ten times as much"
    assert lookup_growth < 5
