"""Admission thresholds and their reasons."""

from __future__ import annotations

import pytest

from saria_vllm.config import AdmissionConfig
from saria_vllm.metrics import COUNTERS
from saria_vllm.policy.admission import Decision, make_admission


@pytest.mark.parametrize("k", [1, 2, 3, 255])
def test_saria_persists_on_the_kth_eviction(k: int) -> None:
    admission = make_admission(AdmissionConfig(evictions=k))
    assert admission.evicted(k, 0) == Decision(True, "eviction_count")
    assert admission.evicted(k - 1, 9) == Decision(False, "not_yet")
    assert admission.stored(k, 9) == Decision(False, "not_yet"), "only an eviction is counted"
    assert admission.reused(k, 9) == Decision(False, "not_yet")


@pytest.mark.parametrize("n", [1, 2, 65535])
def test_saria_persists_once_reused_n_times(n: int) -> None:
    admission = make_admission(AdmissionConfig(evictions=5, reuses=n))
    for moment in (admission.stored, admission.reused, admission.evicted):
        assert moment(1, n) == Decision(True, "reuse_count")
        assert moment(1, n - 1) == Decision(False, "not_yet")


def test_reuse_threshold_zero_is_off() -> None:
    admission = make_admission(AdmissionConfig(evictions=2, reuses=0))
    assert not admission.reused(0, 65535).admit


def test_the_default_is_saria_on_the_second_eviction() -> None:
    admission = make_admission(AdmissionConfig())
    assert [admission.evicted(evictions, 0).admit for evictions in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize(
    ("policy", "decision"), [("full_duplicate", Decision(True, "every_chunk")), ("dram_only", Decision(False, "never"))]
)
def test_the_baselines_decide_alike_at_every_moment(policy: str, decision: Decision) -> None:
    admission = make_admission(AdmissionConfig(policy=policy))  # type: ignore[arg-type]
    for moment in (admission.stored, admission.reused, admission.evicted):
        assert moment(0, 0) == moment(255, 65535) == decision


def test_every_reason_is_a_label_of_the_counter() -> None:
    reasons = set(COUNTERS["admission"].values)
    for policy in ("saria", "full_duplicate", "dram_only"):
        admission = make_admission(AdmissionConfig(policy=policy, reuses=3))  # type: ignore[arg-type]
        for moment in (admission.stored, admission.reused, admission.evicted):
            assert {moment(e, r).reason for e in (0, 1, 2) for r in (0, 3)} <= reasons
