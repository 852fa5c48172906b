"""Load or compute: which part of a hit is worth loading."""

from __future__ import annotations

import math

import numpy as np
import pytest

from saria_vllm.policy.cost import (
    AVERAGE_TOKENS,
    CONTEXT_MAX,
    DEADLINE_SHARE,
    GAIN_MIN,
    GAIN_MIN_S,
    LEARNT_TOKENS,
    STEP_TOKENS_MIN,
    LoadOrCompute,
    PrefillTime,
)

MB = 1_000_000


def steps(end: int, step: int, per_token: float, per_attended: float) -> list[tuple[int, int, float]]:
    """A prefill of `end` tokens in steps, by the formula."""
    made = []
    for first in range(0, end, step):
        attended = step * first + step * step // 2
        made.append((step, attended, per_token * step + per_attended * attended))
    return made


def learned(per_token: float, per_attended: float = 0.0, end: int = 65_536) -> PrefillTime:
    prefill = PrefillTime()
    for step in steps(end, 2048, per_token, per_attended):
        prefill.learn(*step)
    return prefill


def seconds(prefill: PrefillTime, begin: int, end: int) -> float:
    return float(prefill.seconds(np.array([float(begin)]), end)[0])


@pytest.mark.parametrize("per_attended", [0.0, 2e-8])
def test_a_prefill_takes_what_steps_took(per_attended: float) -> None:
    prefill = learned(1e-3, per_attended)
    expected = 1e-3 * 30_000 + per_attended * (40_000**2 - 10_000**2) / 2
    assert seconds(prefill, 10_000, 40_000) == pytest.approx(expected, rel=1e-3)
    assert prefill.tokens_s == pytest.approx(1000, rel=0.01)


def test_nothing_is_said_before_enough_was_seen() -> None:
    prefill = PrefillTime()
    prefill.learn(LEARNT_TOKENS - 1, (LEARNT_TOKENS - 1) ** 2 // 2, 1.0)
    assert prefill.tokens_s == 0
    assert seconds(prefill, 0, 100) == math.inf and seconds(prefill, 100, 100) == 0
    prefill.learn(STEP_TOKENS_MIN, STEP_TOKENS_MIN**2 // 2, 0.1)
    assert prefill.tokens_s > 0 and seconds(prefill, 0, 100) < math.inf


def test_small_steps_and_times_of_nothing_say_nothing() -> None:
    prefill = PrefillTime()
    for _ in range(1000):
        prefill.learn(STEP_TOKENS_MIN - 1, 10**6, 5.0)
        prefill.learn(2048, 2048**2 // 2, 0.0)
    assert prefill.tokens_s == 0


def test_nothing_is_said_of_contexts_far_beyond_those_seen() -> None:
    prefill = learned(1e-3, end=4096)
    longest = int(CONTEXT_MAX * (2048 + 1024))
    assert seconds(prefill, 0, longest) < math.inf
    assert seconds(prefill, 0, longest + 1) == math.inf


def test_what_is_learned_follows_a_change() -> None:
    prefill = learned(1e-3)
    for _ in range(4):
        for step in steps(AVERAGE_TOKENS, 2048, 3e-3, 0.0):
            prefill.learn(*step)
    assert prefill.tokens_s == pytest.approx(1 / 3e-3, rel=0.1)


@pytest.mark.parametrize(("first", "second"), [(2.0, 1.0), (0.1, 4.0)])
def test_no_part_of_the_time_is_negative(first: float, second: float) -> None:
    """A longer context that took less, and one that took far more: noise, or another load."""
    prefill = PrefillTime()
    prefill.learn(2048, 2048 * 1024, first)
    prefill.learn(2048, 2048 * 9216, second)
    begin = np.arange(0.0, 8192, 128)
    times = prefill.seconds(begin, 8192)
    assert (np.diff(times) < 0).all() and times[-1] > 0


def test_steps_all_alike_say_what_a_token_takes() -> None:
    prefill = PrefillTime()
    for _ in range(5):
        prefill.learn(1024, 1024 * 512, 1.0)
    assert prefill.tokens_s == pytest.approx(1024)


# Cutting. Chunks of 1 MB and 100 tokens.


def cost(tokens_s: float, ssd: float, ingress: float, deadline_s: float = 30.0) -> LoadOrCompute:
    made = LoadOrCompute(deadline_s)
    if tokens_s:
        made.prefill = learned(1 / tokens_s)
    made.measured(ssd, ingress)
    return made


def cut(made: LoadOrCompute, dram: int, ssd: int, now: float = 0.0) -> tuple[int, str]:
    """Of a hit whose first chunks are in DRAM, the others on SSD."""
    ssd_bytes = np.repeat([0.0, MB], [dram, ssd])
    return made.cut(ssd_bytes, MB, np.arange(dram + ssd + 1) * 100.0, now)


def test_what_loads_faster_than_it_computes_is_loaded() -> None:
    assert cut(cost(1000, 100 * MB, 200 * MB), 50, 50) == (100, "")


def test_of_a_slow_drive_no_more_is_read_than_while_dram_is_copied() -> None:
    assert cut(cost(10_000, 10 * MB, 200 * MB), 50, 50) == (52, "cheaper")
    assert cut(cost(10_000, 10 * MB, 1e12), 50, 50) == (50, "cheaper")


def test_a_hit_is_cut_at_the_best_boundary_beside_loads_in_flight() -> None:
    """Prefill takes 20 ms per chunk, the drive 10 ms, and it is busy for 3 s: only a long load is worth that wait."""
    made = cost(5000, 100 * MB, 1000 * MB)
    made.begun(300 * MB, 300 * MB, 0.0)
    assert cut(made, 0, 100) == (0, "cheaper")
    assert cut(made, 20, 100) == (20, "cheaper")
    assert cut(made, 0, 600) == (600, "")
    assert cut(made, 0, 100, now=2.9) == (100, ""), "by then the drive is nearly free"
    made.ended(300 * MB, 300 * MB)
    assert cut(made, 0, 100) == (100, "")


def test_loads_from_dram_wait_for_those_before_them_too() -> None:
    made = cost(10_000, 100 * MB, 100 * MB)
    made.begun(0, 1000 * MB, 5.0)
    assert cut(made, 100, 0, now=5.0) == (0, "cheaper")
    assert cut(made, 100, 0, now=15.0) == (100, "")


def test_loads_that_follow_each_other_add_up() -> None:
    made = cost(5000, 100 * MB, 1000 * MB)
    for _ in range(3):
        made.begun(100 * MB, 100 * MB, 0.0)
    assert cut(made, 0, 100) == (0, "cheaper")


@pytest.mark.parametrize(("tokens_s", "ssd"), [(0, 10 * MB), (10_000, 0.0)])
def test_what_is_not_known_counts_for_loading(tokens_s: float, ssd: float) -> None:
    assert cut(cost(tokens_s, ssd, 200 * MB), 50, 50) == (100, "")


def test_an_ingress_that_is_not_known_takes_no_time() -> None:
    made = cost(10_000, 10 * MB, 0.0)
    made.begun(0, 1000 * MB, 0.0)
    assert cut(made, 50, 50) == (50, "cheaper")


def test_a_small_gain_is_not_worth_a_cut() -> None:
    """Of 60 chunks on SSD at the end, loading takes a little longer than computing."""
    drive = 100 * MB
    for slower, expected in ((1.05, (100, "")), (1.5, (40, "cheaper"))):
        tokens_s = 10_000 * slower  # A chunk takes 10 ms to load, 10 / slower ms to compute.
        assert cut(cost(tokens_s, drive, 1e12), 40, 60) == expected
    assert GAIN_MIN == 0.1 and GAIN_MIN_S == 0.05


def test_a_short_load_is_never_cut() -> None:
    assert cut(cost(10**6, 100 * MB, 1e12), 0, 4) == (4, "")
    assert cut(cost(10**6, 100 * MB, 1e12), 0, 6) == (0, "cheaper")


def test_no_load_is_planned_that_would_miss_its_deadline() -> None:
    made = cost(0, 100 * MB, 1000 * MB, deadline_s=1.0)
    chunks, reason = cut(made, 50, 200)
    assert reason == "deadline" and chunks == 50 + int(100 * DEADLINE_SHARE)
    made.begun(100 * MB, 100 * MB, 0.0)
    assert cut(made, 50, 200) == (50, "deadline"), "behind another load only DRAM comes in time"


def test_of_what_comes_in_time_the_best_is_taken() -> None:
    assert cut(cost(10_000, 10 * MB, 1000 * MB, deadline_s=2.0), 50, 50) == (50, "cheaper")
    assert cut(cost(100, 100 * MB, 1000 * MB, deadline_s=1.0), 0, 200) == (90, "deadline")


def test_while_the_gpu_is_busy_a_load_costs_nothing() -> None:
    """A crowd that all found the drive busy would else all compute, one behind the other."""
    made = cost(5000, 100 * MB, 1000 * MB)
    made.begun(300 * MB, 300 * MB, 0.0)
    answers = []
    for _ in range(8):
        chunks, _ = cut(made, 0, 100)
        answers.append(chunks)
        made.computing(100 * chunks, 10_000, 0.0)
        made.begun(chunks * MB, chunks * MB, 0.0)
    assert answers[0] == 0, "the drive is busy for 3 s, and the prefill takes 2"
    assert 100 in answers, "and then those before it compute for longer than it loads"
    made.gpu_idle()
    assert cut(made, 0, 100)[0] == 0, "the drive is still busy"


def test_a_prefill_of_unknown_length_keeps_nobody_waiting() -> None:
    made = cost(0, 100 * MB, 1000 * MB)
    made.computing(0, 10_000, 0.0)
    made.prefill = learned(1 / 5000)
    made.begun(300 * MB, 300 * MB, 0.0)
    assert cut(made, 0, 100) == (0, "cheaper")


def test_what_was_predicted_too_long_is_bounded_by_what_is_in_flight() -> None:
    """Loads that never pause, and are twice as fast as predicted: their errors must not add up."""
    made = cost(5000, 100 * MB, 1000 * MB)
    for second in range(100):
        made.begun(200 * MB, 200 * MB, float(second))
        if second:
            made.ended(200 * MB, 200 * MB)
    assert cut(made, 0, 200, now=100.0) == (200, ""), (
        "2 s of reads are in flight, and it takes 2 s itself; prefill takes 4"
    )
