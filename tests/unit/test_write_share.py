"""What is written to SSD of prompts that never come back, and of a session that grows (B54)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from saria_vllm.config import AdmissionConfig
from saria_vllm.sim.simulator import Arrival, SimConfig, SimResult, Simulator, id_of
from saria_vllm.sim.trace import Request

CHUNK_TOKENS = 64
HOUR_S = 3600.0
ONE_SHOT_CHUNKS, TURN_CHUNKS, FIRST_CHUNKS = 40, 4, 30
SESSION_IDS, ONE_SHOT = 1_000_000, 10_000
"""Ids that a session may have; sessions from that number on ask once."""


def arrival(time_s: float, session: int, turn: int, chunks: int) -> Arrival:
    ids = list(range(session * SESSION_IDS, session * SESSION_IDS + chunks))
    request = Request(f"s{session}", turn, time_s, chunks * CHUNK_TOKENS, 1, "unknown", ())
    return time_s, session, request, ids


def mixed(hours: float = 4.0, seed: int = 1) -> Iterator[Arrival]:
    """A request every 5 s. Of five, four are prompts of their own; one is the next turn of one of 30 sessions, which
    comes back after 12 minutes or so, when DRAM has forgotten it."""
    rng = random.Random(seed)
    turns: dict[int, int] = {}
    order: list[int] = []
    one_shot, time_s = ONE_SHOT - 1, 0.0
    session = 0
    while time_s < hours * HOUR_S:
        time_s += 5 * rng.uniform(0.5, 1.5)
        if rng.random() < 0.8:
            one_shot += 1
            yield arrival(time_s, one_shot, 0, ONE_SHOT_CHUNKS)
            continue
        if len(order) < 30:
            session += 1
            order.append(session)
        returning = order.pop(rng.randrange(min(5, len(order))))
        turn = turns[returning] = turns.get(returning, -1) + 1
        yield arrival(time_s, returning, turn, FIRST_CHUNKS + TURN_CHUNKS * turn)
        if turn < 25:
            order.append(returning)


def run(
    stream: Iterator[Arrival], policy: Any, dram_chunks: int = 2000, **more: float
) -> tuple[SimResult, Counter[str]]:
    """Totals, and the tokens on SSD, which loses nothing: of one-shot prompts and of others."""
    admission = AdmissionConfig(policy=policy)
    sizes = CHUNK_TOKENS, dram_chunks * CHUNK_TOKENS, 1_000_000 * CHUNK_TOKENS
    simulator = Simulator(SimConfig(*sizes, admission, **more))  # type: ignore[arg-type]
    for _ in simulator.run(stream):
        pass
    index, on_ssd = simulator.tiers.chunks.index, Counter[str]()
    for key, row in index.rows[0].items():
        on_ssd["one-shot" if id_of(key) >= ONE_SHOT * SESSION_IDS else "returning"] += int(
            index.ssd[row] and CHUNK_TOKENS
        )
    assert simulator.result.ssd_write_tokens == on_ssd.total(), "nothing is written twice"
    return simulator.result, on_ssd


@pytest.mark.parametrize(
    ("policy", "share_min", "share_max", "reads_min"),
    [("return", 0.0, 0.15, 2.0), ("saria", 0.0, 0.01, 5.0), ("full_duplicate", 0.99, 1.0, 0.0)],
)
def test_b54_prompts_that_never_come_back_are_mostly_not_written(
    policy: str, share_min: float, share_max: float, reads_min: float
) -> None:
    requests = list(mixed())
    result, written = run(iter(requests), policy)
    one_shot = sum(len(ids) for _, session, _, ids in requests if session >= ONE_SHOT) * CHUNK_TOKENS
    assert share_min <= written["one-shot"] / one_shot <= share_max
    assert written["returning"] > 0
    read = result.counts["hit_tokens:ssd"]
    assert read == result.ssd_hit_tokens > reads_min * result.ssd_write_tokens


@pytest.mark.parametrize("policy", ["return", "saria", "full_duplicate"])
def test_b54_a_session_that_grows_writes_what_is_new(policy: str) -> None:
    """A hundred turns, and others between them that push it out of DRAM."""

    def growing() -> Iterator[Arrival]:
        for turn in range(100):
            yield arrival(turn * 1000.0, 1, turn, FIRST_CHUNKS + TURN_CHUNKS * turn)
            for other in range(16):
                number = ONE_SHOT + 100 * turn + other
                yield arrival(turn * 1000.0 + 50 * (other + 1), number, 0, ONE_SHOT_CHUNKS)

    result, written = run(growing(), policy, dram_chunks=500)
    longest = (FIRST_CHUNKS + 99 * TURN_CHUNKS) * CHUNK_TOKENS
    assert 0.9 * longest <= written["returning"] <= longest
    assert result.ssd_hit_tokens > 30 * longest


def test_b54_the_write_rate_is_held() -> None:
    budget, hours = 300_000.0, 6.0
    free, _ = run(mixed(hours), "return")
    assert free.ssd_write_tokens > 1.5 * budget
    held, _ = run(mixed(hours), "return", write_budget_tokens_day=budget, write_cap_tokens_day=1.2 * budget)
    assert 0 < held.ssd_write_tokens == held.ssd_write_tokens_24h_max <= 1.2 * budget
    assert held.ssd_write_tokens < 0.8 * free.ssd_write_tokens
