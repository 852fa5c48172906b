"""The governor in the simulator: a week of more demand than budget, and a load that triples."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.endurance import DAY_S
from saria_vllm.sim.arrivals import arrivals_with_ids, repeated, starts, with_ids
from saria_vllm.sim.formats import Trace
from saria_vllm.sim.simulator import SimConfig, SimResult, Simulator
from saria_vllm.sim.trace import Request, Session

COPIES = [1, 1, 1, 3, 3, 3, 3]
SESSIONS = 240
"""Of a day: one every 6 minutes, so that there is no hour without demand."""


def sessions(rng: random.Random) -> list[Session]:
    """Agents whose prompts grow, with pauses that are longer than DRAM keeps anything; half stop early."""
    made = []
    for number in range(SESSIONS):
        blocks, time_s, requests = rng.randint(6, 14), 0.0, []
        for _ in range(rng.choice([1, 2, 4])):
            runs = ((number << 32, blocks),)
            requests.append(Request(f"s{number}", 0, time_s, blocks * 64, 1, "unknown", runs))
            blocks += rng.randint(1, 4)
            time_s += rng.uniform(300, 2400)
        made.append(Session(f"s{number}", 64, 0, 0, "", tuple(requests)))
    return made


def days(copies: list[int], policy: str, budget_tokens: float = 0.0) -> SimResult:
    trace = Trace(sessions(random.Random(7)), "compact", False, 0)
    config = SimConfig(
        64, 64 * 64, 1 << 24, AdmissionConfig(policy=policy, threshold=0.1),
        write_budget_tokens_day=budget_tokens, write_cap_tokens_day=4 / 3 * budget_tokens,
    )  # fmt: skip
    stream = repeated(trace, copies, lambda copy: starts(SESSIONS, DAY_S, [1, copy]))
    simulator = Simulator(config)
    for _ in simulator.run(with_ids(trace, stream, 64)):
        pass
    simulator.tiers.check()
    result = simulator.result
    assert sum(result.ssd_write_tokens_by_day) == result.ssd_write_tokens
    assert max(result.ssd_write_tokens_by_day) <= result.ssd_write_tokens_24h_max
    return result


@pytest.mark.parametrize("policy", ["return", "saria"])
def test_seven_days_of_more_demand_than_budget_and_a_load_step_of_three(policy: str) -> None:
    free = days([1, 1, 1], policy)
    budget = min(free.ssd_write_tokens_by_day[:3]) / 1.6
    held = days(COPIES, policy, budget)
    shares = [tokens / budget for tokens in held.ssd_write_tokens_by_day[:7]]
    assert all(0.95 <= share <= 1.05 for share in shares[1:]), shares
    assert held.ssd_write_tokens_24h_max <= 4 / 3 * budget
    if policy == "return":
        assert held.counts.get("dropped_chunks:over_budget", 0) < held.counts["admission:return_unlikely"], (
            "the threshold chooses, the end of the budget does not"
        )


def test_a_budget_that_is_ample_costs_nothing() -> None:
    free, held = days([1], "return"), days([1], "return", 1e12)
    assert (held.ssd_write_tokens, held.ssd_hit_tokens) == (free.ssd_write_tokens, free.ssd_hit_tokens)


def test_the_hard_cap_holds_where_carried_budget_would_pass_it() -> None:
    trace = Trace(sessions(random.Random(7)), "compact", False, 0)
    config = SimConfig(64, 64 * 64, 1 << 24, AdmissionConfig(policy="full_duplicate"),
        write_budget_tokens_day=64 * 100, write_cap_tokens_day=64 * 120)  # fmt: skip
    stream = repeated(trace, [1, 0, 0, 3], lambda copy: starts(SESSIONS, DAY_S, [1, copy]))
    simulator = Simulator(config)
    for _ in simulator.run(with_ids(trace, stream, 64)):
        pass
    assert 64 * 110 < simulator.result.ssd_write_tokens_24h_max <= 64 * 120


def test_the_trace_again_is_in_order_and_shares_no_id() -> None:
    trace = Trace(sessions(random.Random(3))[:20], "compact", False, 0)
    stream = list(with_ids(trace, repeated(trace, [1, 2], lambda copy: starts(20, DAY_S, [2, copy])), 64))
    assert len(stream) == 3 * sum(len(session.requests) for session in trace.sessions)
    assert all(before[0] <= after[0] for before, after in pairwise(stream))
    ids: list[set[int]] = [set(), set(), set()]
    first_s: dict[int, float] = {}
    for time_s, number, _, chunks in stream:
        ids[number // 20].update(chunks)
        first_s.setdefault(number, time_s)
    assert not ids[0] & ids[1] and not ids[0] & ids[2] and not ids[1] & ids[2]
    assert len({len(each) for each in ids}) == 1
    expected = starts(20, DAY_S, [2, 0]) + [DAY_S + s for copy in (1, 2) for s in starts(20, DAY_S, [2, copy])]
    assert [first_s[number] for number in range(60)] == expected


def test_one_copy_is_the_trace() -> None:
    trace = Trace(sessions(random.Random(3))[:20], "compact", False, 0)
    once = with_ids(trace, repeated(trace, [1], lambda _: [0.0] * 20), 64)
    plain = arrivals_with_ids(trace, [0.0] * 20, 64)
    assert [(each[0], each[1], list(each[3])) for each in once] == [(each[0], each[1], list(each[3])) for each in plain]
