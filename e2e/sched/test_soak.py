"""Everything at once, from a seed: traffic with shared prefixes, aborts, preemption, failures and resets."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import Engine, prompt

pytestmark = pytest.mark.vllm
Make = Callable[..., Engine]

SEEDS = int(os.environ.get("SARIA_SOAK_SEEDS", "3"))

KINDS: dict[str, dict[str, Any]] = {
    "dram": {"dram_capacity": "16MiB"},
    "ssd": {"dram_capacity": "8MiB", "ssd_capacity": "24MiB", "admission": "full_duplicate"},
    "large chunks": {"dram_capacity": "32MiB", "chunk_blocks": 3},
    "second eviction": {"dram_capacity": "8MiB", "ssd_capacity": "64MiB"},
    "drafts": {"dram_capacity": "16MiB", "drafts": 2},
    "two ranks": {"dram_capacity": "32MiB", "ranks": 2, "ssd_capacity": "48MiB", "admission": "full_duplicate"},
    "no prefix caching": {"dram_capacity": "32MiB", "prefix_caching": False},
}


def act(engine: Engine, rng: random.Random, number: int) -> None:
    """One random event beside the steps."""
    worker, living = engine.worker, list(engine.scheduler.requests)
    match rng.choices(
        ["add", "load", "store", "persist", "abort", "preempt", "reset", "evict", "pressure"],
        [4, 6, 7, 4, 0.7, 0.2, 0.06, 2.5, 0.3],
    )[0]:
        case "add":
            tokens = prompt(rng.randrange(1, 200), seed=rng.randrange(4))
            engine.add(f"{number}", tokens + prompt(rng.randrange(0, 60), seed=rng.randrange(9)), rng.randrange(1, 40))
        case "load" if worker.loads:
            request_id = rng.choice(list(worker.loads))
            flight = worker.loads[request_id]
            failed = [i for i in range(len(flight.job.items)) if rng.random() < 0.03]
            worker.end_load(request_id, failed=failed, rank=rng.choice(sorted(flight.ranks_left)))
        case "store" if worker.stores:
            job_id = rng.choice(list(worker.stores))
            worker.end_store(job_id, rng.random() < 0.1, rank=rng.choice(sorted(worker.stores[job_id].ranks_left)))
        case "persist" if worker.persists:
            job_id = rng.choice(list(worker.persists))
            flight = worker.persists[job_id]
            failed = [position for position in range(flight.job.chunks) if rng.random() < 0.1]
            worker.end_persist(job_id, failed, rank=rng.choice(sorted(flight.ranks_left)))
        case "abort" if living:
            engine.abort(rng.choice(living))
        case "preempt":
            engine.preempt_all()
        case "reset":
            assert engine.connector.reset_cache() is True
        case "evict" if living:
            for request_id in rng.sample(list(engine.requests), min(9, len(engine.requests))):
                engine.evict_hbm(request_id, rng.randrange(6))
        case "pressure":
            engine.now += rng.choice([0.1, 11])


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_soak(make: Make, tmp_path: Path, kind: str, seed: int) -> None:
    more = dict(KINDS[kind])
    if "ssd_capacity" in more:
        more["ssd_paths"] = [f"{tmp_path}/ssd"]
    rng = random.Random(f"{kind} {seed}")
    engine = make(block_bytes=512 << 10, blocks=rng.choice([40, 64, 100]), batched_tokens=rng.choice([64, 200]), **more)
    worker = engine.worker
    worker.auto_loads = worker.auto_stores = worker.auto_promotions = worker.auto_persists = False
    worker.right_drafts = [rng.randrange(3) for _ in range(5000)]
    for number in range(600):
        act(engine, rng, number)
        if rng.random() < 0.7:
            engine.step()
        if number % 20 == 0:
            engine.side.tiers.check()
    worker.auto_loads = worker.auto_stores = worker.auto_promotions = worker.auto_persists = True
    worker.end_all()
    engine.run()
    assert all(request.is_finished() for request in engine.requests.values())
    assert engine.begun("store")
