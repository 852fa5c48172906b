"""Predicting returns: what is learned from whom, what is remembered, and what admission makes of it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy import returns as returns_module
from saria_vllm.policy.admission import REASONS, THRESHOLD_LOWEST, Budget, Return, make_admission
from saria_vllm.policy.endurance import DAY_S, Governor
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.returns import FEATURES, NO_RETURN_S, LogisticModel, Returns
from tier_steps import blocks, end, evict_all, keys_of, make_tiers

HOUR = 3600.0


def probability(returns: Returns, visit: int, now: float) -> float:
    """As if chunks of the visit were evicted."""
    return float(returns.model.probability(returns._features(visit, False, False, now)))


def test_the_prior_says_soon_yes_and_late_no() -> None:
    returns = Returns(64)
    visit = returns.visit(chunks=500, known=0, last_visit=0, returned={}, now=0.0)
    ages = [10.0, 60.0, 600.0, HOUR, 24 * HOUR]
    predicted = [probability(returns, visit, age) for age in ages]
    assert predicted == sorted(predicted, reverse=True)
    assert predicted[0] > 0.9
    assert predicted[-1] < 0.1


def test_the_model_learns_a_rule_from_few_examples() -> None:
    rng = random.Random(1)
    model = LogisticModel()
    for _ in range(300):
        features = np.zeros(FEATURES)
        features[0], features[7] = 1, rng.random() < 0.5
        model.learn(features, bool(features[7]), 16_384)
    one, other = np.zeros(FEATURES), np.zeros(FEATURES)
    one[0] = other[0] = one[7] = 1
    assert model.probability(one) > 0.75
    assert model.probability(other) < 0.6, "the prior said 0.88"


def test_prompts_of_a_length_that_never_return_are_told_from_others() -> None:
    """Sub-agents ask once, with a short prompt; sessions come back every ten minutes with a long one."""
    returns = Returns(64)
    now, session, pending = 0.0, 0, {}
    for turn in range(60):
        now += 600.0
        session = returns.visit(1000, 1000 if turn else 0, session, pending, now)
        once = returns.visit(40, 0, 0, {}, now)
        _, burst = returns.evicted(session, False, turn > 0, 900, now + 300)
        returns.evicted(once, False, False, 40, now + 300)
        pending = {burst: 900}
    assert probability(returns, session, now + 300) > 0.9
    assert probability(returns, once, now + 300) < 0.5, "the prior said 0.7"


def test_a_late_return_takes_back_what_was_learned_from_silence() -> None:
    def learned(come_back: bool) -> float:
        returns, now, visit = Returns(64), 0.0, 0
        for _ in range(30):
            visit = returns.visit(500, 0, 0, {}, now)
            _, burst = returns.evicted(visit, False, False, 500, now + 60)
            now += 2 * NO_RETURN_S
            returns.visit(3, 0, 0, {}, now)
            if come_back:
                returns.visit(500, 500, visit, {burst: 500}, now + 1)
        return probability(returns, visit, returns._visits[visit].time + 60)

    fresh = Returns(64)
    prior = probability(fresh, fresh.visit(500, 0, 0, {}, 0.0), 60.0)
    assert learned(come_back=False) < prior - 0.2
    assert learned(come_back=True) > learned(come_back=False) + 0.1


def test_a_request_that_takes_another_path_leaves_the_branch_behind_the_fork() -> None:
    returns = Returns(64)
    first = returns.visit(100, 0, 0, {}, 0.0)
    assert returns.left_at(first) == -1
    returns.visit(120, 60, first, {}, 10.0)
    assert returns.left_at(first) == 60
    returns.visit(80, 70, first, {}, 20.0)
    assert returns.left_at(first) == 60, "a fork behind the first changes nothing"
    returns.visit(90, 30, first, {}, 30.0)
    assert returns.left_at(first) == 30
    second = returns.visit(50, 0, 0, {}, 40.0)
    returns.visit(70, 50, second, {}, 50.0)
    assert returns.left_at(second) == -1, "one that goes on leaves nothing"
    assert returns.left_at(12345) == -2


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns_module, "VISITS_MAX", 10)
    monkeypatch.setattr(returns_module, "BURSTS_MAX", 5)
    returns = Returns(64)
    for number in range(100):
        visit = returns.visit(50, 0, 0, {number: 3}, float(number))
        returns.evicted(visit, False, False, 50, float(number))
    assert len(returns._visits) == 10
    assert len(returns._bursts) == 5
    assert len(returns._unanswered) <= 5
    assert returns.left_at(1) == -2


# The policy.


def turn(tiers: object, keys: list[bytes], now: float) -> None:
    """A request computes and stores its chunks."""
    from saria_vllm.policy.tiers import Tiers

    assert isinstance(tiers, Tiers)
    prefix = Prefix(keys)
    tiers.arrived(prefix, 0, now)
    job, _ = tiers.plan_store(prefix, 0, len(keys), blocks(0, len(keys)), now)
    if job is not None:
        end(tiers, job)


def reasons(tiers: object) -> dict[str, int]:
    counts = tiers.chunks.counts  # type: ignore[attr-defined]
    return {r.name: counts[f"admission:{r.name}"] for r in REASONS if f"admission:{r.name}" in counts}


def test_what_was_just_used_is_written_and_what_is_long_idle_is_not() -> None:
    tiers = make_tiers(admission=AdmissionConfig())
    turn(tiers, [b"a", b"b"], 0.0)
    assert len(keys_of(evict_all(tiers, now=30.0))) == 2
    turn(tiers, [b"x", b"y"], 100.0)
    assert evict_all(tiers, now=100.0 + 5 * HOUR) == []
    assert reasons(tiers) == {"return_likely": 2, "return_unlikely": 2}


@pytest.mark.parametrize("later", [0.0, 9.0])
def test_what_is_asked_about_again_counts_once(later: float) -> None:
    """It did not leave DRAM the first time, for the bound of writes in flight or a retired segment was in the way."""
    tiers = make_tiers(admission=AdmissionConfig())
    turn(tiers, [b"a", b"b", b"c"], 0.0)
    admission, index = tiers._admission, tiers.chunks.index
    assert isinstance(admission, Return)
    rows = index.find_each(0, [b"a", b"b", b"c"])
    admission.evicted(index, rows, 30.0, None)
    admission.evicted(index, rows[1:], 30.0 + later, None)
    bursts = admission.returns._bursts
    assert sum(burst.chunks for burst in bursts.values()) == 3
    assert [bursts[number].chunks for number in index.burst[rows].tolist()] == ([1, 2, 2] if later else [3, 3, 3])


def test_a_branch_that_was_left_is_refused_sooner_and_counted() -> None:
    tiers = make_tiers(12, admission=AdmissionConfig())
    turn(tiers, [b"a", b"b", b"c", b"d"], 0.0)
    turn(tiers, [b"a", b"b", b"e", b"f"], 1.0)
    evict_all(tiers, now=4 * HOUR)
    assert reasons(tiers)["branch_left"] == 2, "c and d"


def test_the_write_budget_moves_the_threshold() -> None:
    def written(level: float) -> int:
        tiers = make_tiers(admission=AdmissionConfig(threshold=1.0))
        governor = Governor(10**9, 10**10, now=0.0)
        tiers.evictor.governors = [governor]
        noon = DAY_S / 2
        governor.ask(10**12, noon)
        governor.spend(int(governor.room(noon) * (1 - level)), noon)
        turn(tiers, [b"a", b"b"], noon)
        return len(keys_of(evict_all(tiers, now=noon + 60.0)))

    assert written(level=1.0) == 2
    assert written(level=0.01) == 0
    assert 0 < THRESHOLD_LOWEST < 1


def test_under_a_budget_no_prefix_is_begun_that_cannot_be_finished() -> None:
    """Chunks leave DRAM the last ones first: written alone, they would be behind a hole."""
    tiers = make_tiers(12, admission=AdmissionConfig())
    nbytes, noon = tiers.shapes[0].record_bytes, DAY_S / 2
    governor = Governor(100 * nbytes, 1000 * nbytes, now=0.0)
    tiers.evictor.governors = [governor]
    governor.ask(10**12, noon)
    governor.spend(governor.room(noon) - 3 * nbytes, noon)
    turn(tiers, [b"a", b"b", b"c", b"d"], noon)
    written = keys_of(evict_all(tiers, now=noon + 1.0))
    assert set(written) == {b"a", b"b", b"c"}, "four chunks, and room for three"
    assert governor.room(noon + 1.0) < nbytes


def room_of(governor: Governor, nbytes: int, now: float) -> Governor:
    """Under more demand than budget, with so many bytes of room."""
    governor.ask(10**12, now)
    governor.spend(governor.room(now) - nbytes, now)
    return governor


@pytest.mark.parametrize(
    ("on_ssd", "in_dram", "room", "expected"), [(2, 0, 2, b"cd"), (1, 1, 1, b"b"), (1, 1, 3, b"bcd")]
)
def test_what_is_on_ssd_needs_no_room(on_ssd: int, in_dram: int, room: int, expected: bytes) -> None:
    tiers = make_tiers(12, admission=AdmissionConfig())
    nbytes, noon, keys = tiers.shapes[0].record_bytes, DAY_S / 2, [b"a", b"b", b"c", b"d"]
    turn(tiers, keys[:on_ssd], noon - 9)
    end(tiers, *evict_all(tiers, now=noon - 9))
    turn(tiers, keys[: on_ssd + in_dram], noon - 8)
    tiers.evictor.governors = [room_of(Governor(100 * nbytes, 1000 * nbytes, 0.0), room * nbytes, noon)]
    turn(tiers, keys, noon)
    assert b"".join(sorted(keys_of(evict_all(tiers, now=noon + 1)))) == expected


def test_a_budget_has_room_for_chunks_with_all_groups_and_ranks_and_for_whole_ones_on_each_drive() -> None:
    tiers = make_tiers(record_bytes=(4096, 8192), ranks=2, drives=2)
    assert tiers.evictor._budget(0.0) is None, "no governors"
    noon, chunk = DAY_S / 2, 2 * (4096 + 8192)
    tiers.evictor.governors = [room_of(Governor(10**9, 10**10, 0.0), nbytes, noon) for nbytes in (3 * chunk - 1, chunk)]
    budget = tiers.evictor._budget(noon)
    assert budget is not None and budget.chunks == 2 + 1


@pytest.mark.parametrize("policy", ["full_duplicate", "return"])
def test_drives_share_the_demand_by_their_budgets(policy: str) -> None:
    """Each of two equal drives that was asked for everything would think the demand twice too large for it."""
    tiers = make_tiers(12, drives=2, admission=AdmissionConfig(policy=policy))
    nbytes = tiers.shapes[0].record_bytes
    governors = tiers.evictor.governors = [Governor(share * 100 * nbytes, 1000 * nbytes, 0.0) for share in (1, 3)]

    def asked() -> list[float]:
        return [sum(governor.state(0.0, 0.0).asked_bytes) / nbytes for governor in governors]

    extents = tiers.chunks.extents
    assert extents is not None
    turn(tiers, [b"a", b"b", b"c", b"d"], 0.0)
    end(tiers, *evict_all(tiers))
    assert asked() == pytest.approx([1, 3])
    extents.striping.leave_out(0)
    turn(tiers, [b"e", b"f"], 0.0)
    end(tiers, *evict_all(tiers))
    assert asked() == pytest.approx([1, 3 + 2]), "what is never written to is planned for by the others"


def test_what_was_begun_is_finished_however_strict_the_budget_becomes() -> None:
    admission = Return(0.74, 64)
    visit, other, long = (admission.returns.visit(8, 0, 0, {}, 0.0) for _ in range(3))

    def admitted(visit: int, depths: list[int], probability: float, strictness: float, room: int) -> int:
        found = admission._admitted(visit, np.array(depths), probability, Budget(strictness, room))
        return int(np.broadcast_to(found, len(depths)).sum())

    assert admitted(visit, [7], 0.9, 0.95, 100) == 0, "not sure enough to begin"
    assert admitted(visit, [7], 0.9, 0.5, 7) == 0, "no room"
    assert admitted(visit, [7], 0.9, 0.5, 8) == 1
    assert admitted(visit, [6, 5], 0.2, 1.0, 0) == 2
    assert admitted(visit, [4], 0.05, 0.0, 100) == 0, "surely useless"
    assert admitted(visit, [3], 0.9, 0.5, 0) == 1, "no room asked for again"
    assert admitted(visit, [2], 0.2, 1.0, 0) == 1, "nor forgotten"
    assert admitted(visit, [7], 0.2, 1.0, 0) == 1, "the other group of what was begun"
    assert admitted(visit, [9, 8], 0.2, 0.95, 100) == 0, "behind it"
    assert admitted(other, [7], 0.9, 1.0, 0) == 0
    assert admitted(long, [7, 6, 5, 4, 3], 0.9, 0.5, 5) == 2, "as much of its beginning as there is room for"
    follows = admission.returns.visit(10, 8, long, {}, 1.0, on_ssd=8)
    assert admitted(follows, [9, 8], 0.9, 0.5, 2) == 2, "what is on SSD needs no room"


def test_score_survives_an_eviction_of_nothing_new() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="score", threshold=0.01))
    for now in (0.0, 1.0):
        turn(tiers, [b"a", b"b"], now)
    end(tiers, *evict_all(tiers, now=60.0))
    score = tiers.evictor._admission
    lifetime = score._lifetime_s
    assert not len(score.evicted(tiers.chunks.index, np.empty(0, np.int32), 61.0, None))
    assert score._lifetime_s == lifetime > 0


def test_score_wants_reuse_that_outlives_dram() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="score", threshold=0.3))
    turn(tiers, [b"a", b"b"], 0.0)
    index = tiers.chunks.index
    index.reuses[index.find(0, [b"a"])] = 1
    assert keys_of(evict_all(tiers, now=100.0)) == []
    turn(tiers, [b"a", b"b"], 200.0)
    index.touched[index.find(0, [b"a"])] = 290.0
    assert keys_of(evict_all(tiers, now=300.0)) == [b"a"], "two reuses in 300 s, and DRAM keeps it for 100"
    assert reasons(tiers) == {"score_low": 3, "score_high": 1}


def test_score_counts_a_comeback_after_an_eviction_as_a_reuse() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="score", threshold=0.001))
    for now in (0.0, 1000.0):
        turn(tiers, [b"a"], now)
        found = keys_of(evict_all(tiers, now=now + 100.0))
    assert found == [b"a"], "asked for every 1000 s, and DRAM keeps it for 100"


def test_an_eviction_of_what_is_on_ssd_teaches_score_nothing() -> None:
    """All victims may have their SSD copy; a mean of no idle times once made every later score a NaN, refused."""
    admission = make_admission(AdmissionConfig(policy="score", threshold=0.001), 64)
    tiers = make_tiers(admission=AdmissionConfig(policy="score"))
    turn(tiers, [b"a"], 0.0)
    index = tiers.chunks.index
    row = index.find(0, [b"a"])
    index.evictions[row] = 1
    assert admission.evicted(index, np.empty(0, np.int32), 50.0, None).size == 0
    assert REASONS[int(admission.evicted(index, row, 100.0, None)[0])].name == "score_low", "100 s are the lifetime"
    index.touched[row] = 880.0
    assert REASONS[int(admission.evicted(index, row, 900.0, None)[0])].name == "score_high"


def test_the_default_is_return() -> None:
    admission = make_admission(AdmissionConfig(), 64)
    assert isinstance(admission, Return)


def test_of_a_request_that_is_not_remembered_any_more_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns_module, "VISITS_MAX", 1)
    tiers = make_tiers(admission=AdmissionConfig(policy="return"))
    for key in (b"forgotten", b"known"):
        prefix = Prefix([key])
        tiers.arrived(prefix, 0, 0.0)
        job, _ = tiers.plan_store(prefix, 0, 1, blocks(0, 1), 0.0)
        assert job is not None
        end(tiers, job)
    assert keys_of(evict_all(tiers, 10.0)) == [b"known"]
    counts = tiers.take_counts()
    assert (counts["admission:return_likely"], counts["admission:return_unlikely"]) == (1, 1)
