"""Admission thresholds and their reasons."""

from __future__ import annotations

import numpy as np
import pytest

from saria_vllm.config import AdmissionConfig
from saria_vllm.metrics import COUNTERS
from saria_vllm.policy.admission import ADMITS, REASONS, Admission, Budget, make_admission
from saria_vllm.policy.index import ChunkIndex


def decide(admission: Admission, moment: str, evictions: int, reuses: int) -> str:
    """The reason for one chunk with this history; of an eviction, `evictions` counts it."""
    index = ChunkIndex(1)
    rows = index.add(0, [b"k"], [b""])
    index.reuses[rows] = reuses
    if moment == "evicted":
        index.evictions[rows] = evictions - 1
        return REASONS[int(admission.evicted(index, rows, 0.0, None)[0])].name
    index.evictions[rows] = evictions
    reasons = admission.kept(index, rows)
    return "nothing" if reasons is None else REASONS[int(reasons[0])].name


@pytest.mark.parametrize("k", [1, 2, 3, 255])
def test_saria_persists_on_the_kth_eviction(k: int) -> None:
    admission = make_admission(AdmissionConfig(policy="saria", evictions=k), 16)
    assert decide(admission, "evicted", k, 0) == "eviction_count"
    if k > 1:
        assert decide(admission, "evicted", k - 1, 9) == "not_yet"
    assert decide(admission, "kept", k, 9) == "nothing", "only an eviction is counted"


@pytest.mark.parametrize("n", [1, 2, 65535])
def test_saria_persists_once_reused_n_times(n: int) -> None:
    admission = make_admission(AdmissionConfig(policy="saria", evictions=5, reuses=n), 16)
    for moment in ("kept", "evicted"):
        assert decide(admission, moment, 1, n) == "reuse_count"
        assert decide(admission, moment, 1, n - 1) == "not_yet"


def test_many_chunks_are_decided_each_by_its_own_history() -> None:
    index = ChunkIndex(1)
    rows = index.add(0, [b"a", b"b", b"c"], [b"", b"", b""])
    index.evictions[rows] = [0, 1, 0]
    index.reuses[rows] = [0, 0, 4]
    reasons = make_admission(AdmissionConfig(policy="saria", reuses=3), 16).evicted(index, rows, 0.0, None)
    assert [REASONS[reason].name for reason in reasons] == ["not_yet", "eviction_count", "reuse_count"]


@pytest.mark.parametrize(("policy", "reason"), [("full_duplicate", "every_chunk"), ("dram_only", "never")])
def test_the_baselines_decide_alike_at_every_eviction(policy: str, reason: str) -> None:
    admission = make_admission(AdmissionConfig(policy=policy), 16)  # type: ignore[arg-type]
    assert decide(admission, "evicted", 1, 0) == decide(admission, "evicted", 255, 65535) == reason
    assert decide(admission, "kept", 0, 0) == ("nothing" if policy == "dram_only" else reason)


def test_an_eviction_of_what_is_on_ssd_already_teaches_score_nothing() -> None:
    """Nobody is asked about, and what is decided next is as if it had not been."""
    index = ChunkIndex(1)
    rows = index.add(0, [b"a", b"b"], [b"", b""])
    index.reuses[rows], index.entered[rows], index.touched[rows] = [5, 1], [0.0, 90.0], [82.0, 95.0]
    asked, fresh = (make_admission(AdmissionConfig(policy="score", threshold=0.1), 16) for _ in range(2))
    assert asked.evicted(index, rows[:0], 100.0, None).tolist() == []
    reasons = asked.evicted(index, rows, 100.0, None)
    assert reasons.tolist() == fresh.evicted(index, rows, 100.0, None).tolist()
    assert [REASONS[reason].name for reason in reasons] == ["score_high", "score_low"]


@pytest.mark.parametrize(
    ("strictness", "admitted"), [(None, True), (0.0, True), (0.01, True), (0.011, False), (1.0, False)]
)
def test_a_tight_budget_raises_the_threshold_of_score(strictness: float | None, admitted: bool) -> None:
    """To 8 when it is spent: the score here is 10 / 20 x exp(-1) = 0.184."""
    index = ChunkIndex(1)
    rows = index.add(0, [b"k"], [b""])
    index.reuses[rows], index.entered[rows], index.touched[rows] = 1, 80.0, 90.0
    budget = None if strictness is None else Budget(strictness, 9)
    reasons = make_admission(AdmissionConfig(policy="score", threshold=0.1), 16).evicted(index, rows, 100.0, budget)
    assert ADMITS[reasons].tolist() == [admitted]


def test_only_these_reasons_admit_and_all_are_labels_of_the_counter() -> None:
    assert {reason.name for reason in REASONS if reason.admit} == {
        "every_chunk",
        "eviction_count",
        "reuse_count",
        "score_high",
        "return_likely",
    }
    assert {reason.name for reason in REASONS} <= set(COUNTERS["admission"].values)
    assert np.uint8(len(REASONS)) == len(REASONS)
