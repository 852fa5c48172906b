"""The simulator counts what the connector counts: the same requests through both, every counter of the policy equal."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import Engine, prompt
from saria_connector import wear
from saria_vllm.config import SariaConfig
from saria_vllm.policy.admission import make_admission
from saria_vllm.policy.endurance import Governor
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.hints import NO_HINTS, Hints
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.promotion import Promotion
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.policy.tiers import Tiers
from saria_vllm.sim.simulator import SimConfig, Simulator
from saria_vllm.storage.format import records_per_segment

pytestmark = pytest.mark.vllm
Make = Callable[..., Engine]

COMPARED = (
    "hit_tokens:dram", "hit_tokens:ssd", "loads:loaded", "stored_chunks", "promoted_chunks", "evicted_chunks:persisted",
    "evicted_chunks:already_on_ssd", "evicted_chunks:dropped", "admission:not_yet", "admission:eviction_count",
    "admission:every_chunk", "admission:never", "admission:return_likely", "admission:return_unlikely",
    "admission:branch_left", "admission:session_ended", "persisted_chunks", "retired_chunks",
    "dropped_chunks:not_admitted", "admission:second_chance", "second_chance_bytes",
    "admission:score_high", "admission:score_low", "admission:reuse_count", "dropped_chunks:budget",
)  # fmt: skip


def simulator_like(engine: Engine, config: SariaConfig) -> Simulator:
    """With tiers of the engine's sizes."""
    side, sizing, admission = engine.side, engine.side.sizing, config.admission
    simulator = Simulator(
        SimConfig(engine.chunk_tokens, engine.chunk_tokens, 0, admission, config.promotion, ssd_eviction="segment")
    )
    assert side.tiers.chunks.extents is not None
    records = [records_per_segment(shape.record_bytes, sizing.segment_bytes) for shape in sizing.shapes]
    simulator.tiers = Tiers(
        sizing.shapes,
        SlotAllocator(sizing.slabs, [sizing.slab_bytes // shape.record_bytes for shape in sizing.shapes]),
        ExtentAllocator(1, sizing.segments_max, records),
        make_admission(admission, engine.chunk_tokens),
        ghosts_max=admission.ghosts_max,
        headroom=side.tiers.evictor.headroom,
        persist_bytes_max=1 << 60,
        promotion=Promotion(config.promotion),
        second_chance=admission.second_chance,
    )
    simulator._begun_s = engine.now
    return simulator


def agents(seed: int, turns: int, choices: list[int], longest: int) -> list[tuple[list[int], Hints]]:
    """Prompts of agents that take turns, grow, branch off now and then, and start again as another session; and what
    they say of them. Agents are drawn from `choices`."""
    rng = random.Random(seed)
    prompts, sessions, contexts = (
        [],
        [chr(97 + agent) for agent in range(max(choices) + 1)],
        {agent: prompt(rng.randrange(40, 200), seed=agent) for agent in range(max(choices) + 1)},
    )
    for turn in range(turns):
        agent = rng.choice(choices)
        context = contexts[agent]
        if rng.random() < 0.15:
            context = context[: len(context) // 2]
        context = context + prompt(rng.randrange(10, 90), seed=100 + turn)
        ends = len(context) > longest
        contexts[agent] = prompt(50, seed=agent) if ends else context
        prompts.append((context[: len(context) - (len(context) % 16 == 0)], Hints(sessions[agent], ends)))
        sessions[agent] += "'" * ends
    return prompts


@pytest.mark.parametrize(
    "policy",
    [
        "saria",
        "full_duplicate",
        "dram_only",
        "return",
        "return with hints",
        "saria with second chances",
        "return with second chances",
        "score",
        "return with a budget",
        "saria with a budget",
        "saria with promotion 0",
        "return with promotion 0.5",
        "saria with promotion 1",
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_simulator_and_connector_count_the_same(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, seed: int
) -> None:
    """Promotion is "auto" where nothing else is said, and 0 where a budget is asked in batches as they leave DRAM, or
    where too little would be left for second chances."""
    policy, _, extra = policy.partition(" with ")
    hinted, again = extra == "hints", extra == "second chances"
    budget = extra == "a budget"
    # The hour says how much of a day's budget is due.
    monkeypatch.setattr(wear, "time", SimpleNamespace(time=lambda: 6 * 3600.0, monotonic=time.monotonic))
    promotion: Any = float(extra.split()[1]) if extra.startswith("promotion") else "auto"
    if policy == "return" and (budget or again):
        promotion = 0.0
    settings = {"policy": policy, "second_chance": 0.5 if again else 0.1}
    config = SariaConfig.from_extra({"dram_capacity": "1GiB", "admission": settings, "promotion": promotion})
    engine = make(
        blocks=400,
        batched_tokens=64,
        block_bytes=65536,
        dram_capacity="4MiB",
        ssd_paths=[str(tmp_path)],
        # Writing everything again and again to a full SSD, what is lost depends on when a write ends.
        ssd_capacity="64MiB" if policy == "full_duplicate" else "8MiB",
        admission=settings,
        promotion=promotion,
        endurance={"rated_capacity": "16MiB"} if budget else "off",
    )
    engine.serve("opens the SSD tier", prompt(8))
    simulator = simulator_like(engine, config)
    load = (250, [0, 0, 1, 1, 2, 3, 4, 5, 6], 300) if again else (60, [0, 0, 0, 1, 1, 2, 3], 700)
    if budget:
        (theirs,) = engine.side.tiers.evictor.governors
        governor = Governor(theirs.budget_bytes_day, theirs.cap_bytes_day, engine.now, theirs._day_began)
        simulator.tiers.evictor.governors = [governor]
    for number, (tokens, hints) in enumerate(agents(seed, *load)):
        engine.now += 900.0 if budget else 30.0
        engine.flush_hbm()
        hints = hints if hinted else NO_HINTS
        answer = 1 if budget else min(3, 16 - len(tokens) % 16)  # It completes no chunk.
        engine.serve(f"r{number}", tokens, answer, params={"saria": hints._asdict()} if hinted else None)
        engine.run()
        engine._report_rest()
        keys = engine.keys(engine.requests[f"r{number}"])[: len(tokens) // engine.chunk_tokens]
        simulator._serve(engine.now, Prefix(keys), len(tokens), hints)
        assert not engine.counted("dropped_chunks:no_slot") and not engine.counted("dropped_chunks:hold_limit")
        assert not engine.counted("unpromoted_chunks:no_slot") and not engine.counted("unpromoted_chunks:hold_limit")
        counts = simulator.tiers.chunks.counts
        ours = {name: engine.counted(name) for name in COMPARED}
        assert ours == {name: counts.get(name, 0) for name in COMPARED}, f"after request {number}"
    assert (ours["admission:session_ended"] > 0) == hinted
    assert ours["admission:second_chance"] > 0 or not again
    if budget:
        assert governor.strictest > 0.1, "the budget never mattered"
    if policy != "dram_only":
        assert ours["hit_tokens:ssd"] > 0
        assert ours["persisted_chunks"] > 0
        assert (ours["promoted_chunks"] > 0) == (promotion != 0)
    assert ours["hit_tokens:dram"] > 0
    assert sum(ours[f"evicted_chunks:{how}"] for how in ("persisted", "already_on_ssd", "dropped")) > 100
