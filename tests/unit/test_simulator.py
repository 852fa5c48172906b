"""The simulator on traces small enough to follow by hand, and against the policy that it must run."""

import random
from pathlib import Path

import numpy as np
import pytest

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy import admission as admission_module
from saria_vllm.policy.tiers import Tiers
from saria_vllm.sim.arrivals import arrivals_with_ids
from saria_vllm.sim.formats import Trace, read_trace
from saria_vllm.sim.lru_extents import LruExtents
from saria_vllm.sim.oracle import Oracle
from saria_vllm.sim.simulator import SimConfig, Simulator, id_of, key_of
from saria_vllm.sim.trace import Request, Session, id_runs
from saria_vllm.types import Extent

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
A, B, C, D = (list(range(first, first + 4)) for first in (10, 20, 30, 40))


def made(*prompts, extra_tokens=0):
    """A trace of one request per second, each a session of its own, of prompts given as ids of 64-token blocks."""
    sessions = []
    for number, ids in enumerate(prompts):
        tokens = 64 * len(ids) + extra_tokens
        request = Request(f"s{number}", 0, float(number), tokens, 1, "unknown", tuple(id_runs(ids)))
        sessions.append(Session(f"s{number}", 64, 0, 0, "", (request,)))
    return Trace(sessions, "compact", True, 0)


def simulate(trace, policy="saria", *, dram=4, ssd=100, chunk_tokens=64, promotion=1.0, ssd_eviction="lru", **keys):
    """Sizes are chunks. Returns the totals, and (DRAM, SSD) chunks of each request's hit."""
    admission = AdmissionConfig(policy="saria" if policy == "oracle" else policy, **keys)
    config = SimConfig(chunk_tokens, dram * chunk_tokens, ssd * chunk_tokens, admission, promotion, ssd_eviction)

    def stream():
        return arrivals_with_ids(trace, [], chunk_tokens)

    simulator = Simulator(config, Oracle(stream()) if policy == "oracle" else None)
    served = list(simulator.run(stream()))
    simulator.tiers.check()
    hits = [(each.dram_tokens // chunk_tokens, each.ssd_tokens // chunk_tokens) for each in served]
    return simulator.result, hits


MISS, DRAM, SSD = (0, 0), (4, 0), (0, 4)


@pytest.mark.parametrize(
    ("policy", "expected", "written"),
    [
        ("dram_only", [MISS, MISS, MISS, MISS, MISS], 0),
        ("full_duplicate", [MISS, MISS, SSD, SSD, SSD], 8),
        ("saria", [MISS, MISS, MISS, MISS, SSD], 8),  # A on its second eviction, B when the promoted A pushes it out
        ("oracle", [MISS, MISS, SSD, SSD, SSD], 8),
    ],
)
@pytest.mark.parametrize("ssd_eviction", ["lru", "segment"])
def test_two_prompts_take_turns_in_a_dram_that_holds_one(policy, expected, written, ssd_eviction):
    result, hits = simulate(made(A, B, A, B, A), policy, ssd_eviction=ssd_eviction)
    assert hits == expected
    assert result.ssd_write_tokens == written * 64
    assert result.ssd_hit_tokens == sum(ssd for _, ssd in hits) * 64
    assert result.dram_evicted_tokens == 4 * 4 * 64
    assert (result.requests, result.prompt_tokens) == (5, 5 * 256)


def test_a_dram_that_holds_all_serves_all():
    result, hits = simulate(made(A, B, A, B), dram=8)
    assert hits == [MISS, MISS, DRAM, DRAM]
    assert (result.dram_evicted_tokens, result.ssd_write_tokens) == (0, 0)
    assert result.rates()["dram_only_request_fraction"] == 1.0


def test_k_evictions_are_k_evictions():
    assert simulate(made(A, B, A), evictions=1)[1] == [MISS, MISS, SSD]
    assert simulate(made(A, B, A, B, A), evictions=3)[1] == [MISS] * 5
    assert simulate(made(A, A, B, A), reuses=1)[1] == [MISS, DRAM, MISS, SSD]


def test_the_oracle_writes_only_what_comes_again():
    result, hits = simulate(made(A, C, A, D), "oracle")
    assert hits == [MISS, MISS, SSD, MISS]
    assert result.ssd_write_tokens == 4 * 64
    assert result.rates()["ssd_writes_never_read_fraction"] == 0.0


def test_writes_never_read_and_requests_of_dram_only():
    result, hits = simulate(made(A, B, A, A), "full_duplicate")
    assert hits == [MISS, MISS, SSD, DRAM]
    rates = result.rates()
    assert rates["ssd_writes_never_read_fraction"] == 0.5
    assert rates["dram_only_request_fraction"] == 0.5
    assert rates["hit_rate"] == 0.5
    assert rates["dram_hit_rate"] == rates["ssd_hit_rate"] == 0.25


@pytest.mark.parametrize(("promotion", "promoted"), [(0.0, 0), (0.25, 1), (0.5, 2), (0.6, 3), (1.0, 4)])
def test_promotion_puts_a_share_of_the_hit_in_dram(promotion, promoted):
    result, hits = simulate(made(A, B, A, A), "full_duplicate", promotion=promotion)
    assert hits == [MISS, MISS, SSD, (promoted, 4 - promoted)]
    assert result.dram_evicted_tokens == (4 + promoted) * 64


def counted(mode, prompts, dram=4):
    """The (used, evicted) chunks that promotion was told of."""
    config = SimConfig(64, dram * 64, 100 * 64, AdmissionConfig(policy="full_duplicate"), mode)
    simulator, told = Simulator(config), [0, 0]
    promotion = simulator.tiers.promotion
    promotion.used = lambda chunks, now: told.__setitem__(0, told[0] + chunks)
    promotion.evicted = lambda chunks, now: told.__setitem__(1, told[1] + chunks)
    list(simulator.run(arrivals_with_ids(made(*prompts), [], 64)))
    return tuple(told)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([A, B], (0, 0)),  # Nothing was promoted.
        ([A, B, A], (0, 0)),  # 2 of A are in DRAM again, and nobody knows yet.
        ([A, B, A, A], (2, 0)),
        ([A, B, A, A, A], (2, 0)),  # Counted once.
        ([A, B, A, C], (0, 2)),
        ([A, B, A, A, C], (2, 0)),
        ([A, B, A, C, A, A], (2, 2)),
    ],
)
def test_promotion_learns_which_copies_were_used(prompts, expected):
    assert counted(0.5, prompts) == counted("auto", prompts) == expected


def test_auto_promotes_less_while_its_copies_are_evicted_unused():
    prompts = [list(range(1000 * number, 1000 * number + 200)) for number in range(3)] * 40
    (fixed, _), (auto, _) = (
        simulate(made(*prompts), "full_duplicate", dram=200, ssd=1000, promotion=mode) for mode in (0.5, "auto")
    )
    assert fixed.dram_hit_tokens == 0 < auto.dram_hit_tokens  # What is not pushed out is there when it is used.
    assert auto.dram_evicted_tokens < 0.7 * fixed.dram_evicted_tokens
    assert auto.counts["promoted_chunks"] < fixed.counts["promoted_chunks"]


def test_less_promotion_evicts_less():
    evicted = [simulate(made(*[A, B] * 4), "full_duplicate", promotion=p)[0].dram_evicted_tokens for p in (0, 0.5, 1)]
    assert evicted == sorted(evicted)
    assert evicted[0] < evicted[-1]


def test_lru_keeps_what_was_read_and_segments_retire_what_is_oldest():
    prompts = made([1], [2], [3], [1], [4], [1])  # 4 pushes 3 to the SSD, which is full with 1 and 2
    sizes = {"dram": 1, "ssd": 2, "promotion": 0.0, "evictions": 1}
    lru, lru_hits = simulate(prompts, ssd_eviction="lru", **sizes)
    segment, segment_hits = simulate(prompts, ssd_eviction="segment", second_chance=0.0, **sizes)
    assert lru_hits == [(0, 0), (0, 0), (0, 0), (0, 1), (0, 0), (0, 1)]
    assert segment_hits == [(0, 0), (0, 0), (0, 0), (0, 1), (0, 0), (0, 0)]
    assert lru.counts["retired_chunks"] < segment.counts["retired_chunks"]


@pytest.mark.parametrize(
    ("promotion", "ssd", "ids", "again"),
    [
        (1.0, 8, [*range(1, 10), 2, 10, 11, 2], 1),
        (0.0, 8, [*range(1, 10), 2, 10, 11, 2], 1),
        (0.0, 3, [1, 2, 3, 4, 1, 5, 6, 1], 0),  # Its segment goes while it is in DRAM.
    ],
)
def test_a_second_chance_keeps_what_was_read_and_is_reported(promotion, ssd, ids, again):
    sizes = {"dram": 1, "ssd": ssd, "promotion": promotion, "evictions": 1, "ssd_eviction": "segment"}
    without, hits = simulate(made(*([number] for number in ids)), second_chance=0.0, **sizes)
    assert hits[-1] == (0, 0)
    assert (without.rates()["ssd_second_chance_tokens"], without.rates()["ssd_write_amplification"]) == (0, 1.0)
    result, hits = simulate(made(*([number] for number in ids)), second_chance=1.0, **sizes)
    assert hits[-1] == (0, 1)
    rates, written = result.rates(), result.ssd_write_tokens
    assert written == result.counts["persisted_chunks"] * 64
    assert rates["ssd_second_chance_tokens"] == again * 64
    assert rates["ssd_write_amplification"] == written / (written - again * 64)


def test_full_duplicate_refreshes_the_ssd_copy_of_what_dram_serves():
    # 3 takes the place of 2; without the refresh it would take that of 1, which its next use would write again.
    result, hits = simulate(made([1], [2], [1], [3], [1]), "full_duplicate", dram=3, ssd=2)
    assert hits == [(0, 0), (0, 0), (1, 0), (0, 0), (1, 0)]
    assert result.ssd_write_tokens == 3 * 64


def test_chunks_of_several_blocks():
    result, hits = simulate(made([1, 2, 3, 4, 5], [1, 2, 3, 4, 6]), chunk_tokens=128)
    assert hits == [(0, 0), (2, 0)]
    assert (result.dram_hit_tokens, result.chunk_accesses) == (256, 4)
    assert simulate(made([1, 2, 3], [1, 2, 9, 9]), chunk_tokens=128)[1] == [(0, 0), (1, 0)]


def test_chunks_smaller_than_a_block():
    result, hits = simulate(made([1, 2], [1, 3], extra_tokens=33), chunk_tokens=32, dram=100)
    assert hits == [(0, 0), (2, 0)]
    assert result.prompt_tokens == 2 * (128 + 33)


def test_a_prefix_counts_and_nothing_after_a_gap():
    assert simulate(made(A, [10, 11, 99, 13], [10, 11, 12, 13]), dram=100)[1] == [MISS, (2, 0), DRAM]
    assert simulate(made(A, [11, 12], A[1:]), dram=100)[1] == [MISS, (2, 0), (3, 0)], "ids name chunks, not positions"


def test_a_prompt_larger_than_dram_keeps_its_beginning():
    result, hits = simulate(made([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]), "dram_only")
    assert hits == [(0, 0), (4, 0)]
    assert result.dram_evicted_tokens == 4 * 64


def test_no_ssd_tokens_are_no_ssd():
    for policy in ("saria", "full_duplicate"):
        result, hits = simulate(made(A, B, A, B, A), policy, ssd=0)
        assert hits == [MISS] * 5
        assert result.ssd_write_tokens == 0


def test_an_ssd_that_is_too_small_never_serves_more_than_it_holds():
    for ssd_eviction in ("lru", "segment"):
        result, hits = simulate(made(*[A, B, C] * 3), "full_duplicate", ssd=3, ssd_eviction=ssd_eviction)
        assert all(ssd <= 3 for _, ssd in hits)
        assert result.counts["retired_chunks"] > 0


@pytest.mark.parametrize("policy", ["saria", "full_duplicate", "dram_only"])
def test_it_counts_what_the_connector_would(policy):
    result, _ = simulate(made(A, B, A, B, A), policy, ssd_eviction="segment")
    assert result.counts.get("hit_tokens:ssd", 0) == result.ssd_hit_tokens
    assert result.counts.get("persisted_chunks", 0) * 64 == result.ssd_write_tokens


# The code that serves is the code that is simulated.


def test_a_patched_admission_changes_the_result(monkeypatch):
    trace = made(A, B, A, B, A)
    assert simulate(trace)[0].ssd_write_tokens == 8 * 64

    def never(self, index, rows, *_):
        return np.full(len(rows), admission_module.NEVER, np.uint8)

    monkeypatch.setattr("saria_vllm.policy.admission.Saria.evicted", never)
    result, hits = simulate(trace)
    assert (hits, result.ssd_write_tokens) == ([MISS] * 5, 0)


def test_a_patched_match_changes_the_result(monkeypatch):
    match = Tiers.match
    monkeypatch.setattr(Tiers, "match", lambda self, *arguments: min(1, match(self, *arguments)))
    assert simulate(made(A, A, B, A), dram=8)[1] == [MISS, (1, 0), MISS, (1, 0)]


def test_hits_are_planned_as_loads(monkeypatch):
    calls = []
    plan_load = Tiers.plan_load

    def noted(self, *arguments, **named):
        calls.append(arguments)
        return plan_load(self, *arguments, **named)

    monkeypatch.setattr(Tiers, "plan_load", noted)
    simulate(made(A, A, A), dram=8)
    assert len(calls) == 2


def test_keys_stand_for_ids():
    for number in (0, 1, 7 << 32, (2 << 60) + 5, (1 << 90) + 1, 1 << 114):
        assert id_of(key_of(number)) == number


@pytest.mark.parametrize("seed", range(20))
def test_lru_extents_are_a_naive_lru(seed):
    rng = random.Random(seed)
    records = rng.randrange(1, 12)
    extents, naive = LruExtents(records), []
    """Rows on SSD, the least recent first."""
    where = {}
    next_row = 0
    for _ in range(200):
        match rng.randrange(4):
            case 0 | 1:
                count = rng.randrange(1, records + 3)
                places, lost = extents.take(0, count, [count], 0.0)
                expected = naive[: max(0, count - (records - len(naive)))]
                assert lost.tolist() == expected
                naive = naive[len(expected) :]
                assert len(places) == min(count, records)
                rows = np.arange(next_row, next_row + len(places), dtype=np.int32)
                next_row += len(places)
                extents.filled(places, rows)
                naive += rows.tolist()
                where.update(zip(rows.tolist(), places.tolist(), strict=True))
            case 2 if naive:
                read = rng.sample(naive, rng.randrange(1, len(naive) + 1))
                places = np.array([where[row] for row in read], np.int32)
                extents.hold(places)
                extents.release(places)
                naive = [row for row in naive if row not in read] + read[::-1]
            case 3 if naive:
                row = naive.pop(rng.randrange(len(naive)))
                extents.forget(Extent(*where[row]))
        in_use = [where[row][1] for row in naive]
        assert len(set(in_use)) == len(in_use) <= records


@pytest.mark.skipif(not (SHARED / "weka_small_48.jsonl.gz").exists(), reason="../shared/traces is not here")
def test_48_real_sessions_are_served_as_before():
    from saria_vllm.sim.arrivals import starts

    trace = read_trace(SHARED / "weka_small_48.jsonl.gz")
    start_s = starts(len(trace.sessions), 3600.0, 1)
    simulator = Simulator(SimConfig(64, 500_000, 8_000_000, AdmissionConfig(policy="saria")))
    assert sum(1 for _ in simulator.run(arrivals_with_ids(trace, start_s, 64))) == 1397
    rates = simulator.result.rates()
    assert rates["prompt_tokens"] == 85_527_198
    assert rates["hit_rate"] == pytest.approx(0.9101, abs=0.001)
    assert rates["dram_hit_rate"] == pytest.approx(0.8018, abs=0.001)
    assert rates["ssd_write_tokens"] == pytest.approx(2_902_592, rel=0.005)
    assert rates["dram_evicted_tokens"] == pytest.approx(16_437_312, rel=0.005)
    assert rates["ssd_writes_never_read_fraction"] == pytest.approx(0.193, abs=0.005)
