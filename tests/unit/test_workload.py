"""Seeded sessions: repeatable, well formed, and statistically like the real ones."""

import itertools
import random
import statistics as stats

import pytest

from saria_vllm.sim.workload import draw, statistics, synthetic_sessions


def some(seed, count, **limits):
    return list(itertools.islice(synthetic_sessions(random.Random(seed), **limits), count))


def test_the_seed_decides():
    assert some(1, 20) == some(1, 20)
    assert some(1, 20) != some(2, 20)


def test_sessions_are_well_formed():
    seen: dict[int, str] = {}
    for session in some(3, 100):
        head = (session.tool_tokens + session.system_tokens) // session.block_tokens
        assert 6 <= len(session.requests) <= 60
        times = [request.time_s for request in session.requests]
        assert times == sorted(times)
        before: list[int] = []
        for request in session.requests:
            blocks = request.blocks()
            assert request.input_tokens <= 131_072
            assert len(blocks) == request.input_tokens // session.block_tokens
            assert len(set(blocks)) == len(blocks)
            kept = next((i for i, (a, b) in enumerate(zip(before, blocks, strict=False)) if a != b), len(before))
            assert kept >= min(head, len(before))
            for block in blocks[head:]:
                assert seen.setdefault(block, session.session) == session.session
            before = blocks


def test_some_sessions_share_tools_and_system_prompt():
    heads = [session.requests[0].blocks()[0] for session in some(4, 30)]
    assert 2 <= len(set(heads)) < 20


def test_statistics_are_those_of_the_real_sessions():
    sessions = some(5, 300, requests_min=1, requests_max=10_000, input_tokens_max=10_000_000)
    real = statistics()
    assert stats.median(len(session.requests) for session in sessions) == pytest.approx(44, rel=0.25)
    firsts = [session.requests[0].input_tokens for session in sessions]
    assert stats.median(firsts) == pytest.approx(real["first_input_tokens"]["p50"], rel=0.3)
    steps = [
        late.input_tokens - early.input_tokens
        for session in sessions
        for early, late in itertools.pairwise(session.requests)
    ]
    growth = [step for step in steps if step > 0]
    assert stats.median(growth) == pytest.approx(real["append_tokens_per_turn(no pullback)"]["p50"], rel=0.1)
    assert 0.01 < sum(step <= 0 for step in steps) / len(steps) < 0.03


def test_draw_reproduces_quantiles():
    rng = random.Random(0)
    values = sorted(draw(rng, {"p10": 1.0, "p50": 2.0, "p90": 10.0, "mean": 99.0}) for _ in range(20_000))
    assert values[0] == 1.0
    assert values[-1] == 10.0
    assert values[10_000] == pytest.approx(2.0, rel=0.05)
    assert values[14_000] == pytest.approx(6.0, rel=0.05)


def test_impossible_limits_are_refused():
    with pytest.raises(ValueError, match="no session fits"):
        some(0, 1, requests_min=50, requests_max=50, input_tokens_max=1000)
