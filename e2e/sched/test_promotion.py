"""Promotion: what was loaded from SSD goes back to DRAM, lazily, and never at the cost of a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import Engine, prompt
from on_ssd import TOKENS, fill, in_tiers
from saria_connector import promoting as promoting_module
from saria_vllm.policy.index import Prefix
from saria_vllm.types import Moved

pytestmark = pytest.mark.vllm
Make = Callable[..., Engine]


def until_promoting(engine: Engine, name: str = "again", answer: int = 40) -> int:
    """A request for TOKENS is served until its promotion is in flight, which does not end by itself."""
    engine.worker.auto_promotions = False
    engine.add(name, TOKENS, answer)
    for _ in range(20):
        engine.step()
        if jobs := engine.begun("promote"):
            return int(jobs[-1].job_id)
    raise AssertionError("nothing is promoted")


@pytest.mark.parametrize(("promotion", "chunks"), [(0, 0), (0.25, 3), (0.5, 5), (1, 10), ("auto", 5)])
@pytest.mark.parametrize("answer", [1, 20])
def test_the_leading_part_of_what_ssd_gave_is_in_dram_afterwards(
    make_ssd: Make, promotion: object, chunks: int, answer: int
) -> None:
    """While the request runs, or at its end, when it ends in its first step."""
    engine = make_ssd(promotion=promotion)
    engine.serve("again", TOKENS, answer)
    assert engine.counted("promoted_chunks") == chunks == sum(job.chunks for job in engine.begun("promote"))
    assert in_tiers(engine) == (chunks * 16, 160 - chunks * 16)
    engine.flush_hbm()
    assert engine.serve("third", TOKENS, answer) == engine.outputs["again"]
    assert engine.counted("promoted_chunks") == chunks, "it is enough now"


def test_nothing_is_promoted_in_the_step_that_starts_the_prefill(make_ssd: Make) -> None:
    engine = make_ssd(batched_tokens=64, promotion=1)
    engine.worker.auto_loads = False
    engine.add("again", TOKENS + prompt(300, seed=9), 9)
    engine.steps_of(4)
    engine.worker.end_load("again")
    begun, end = 0, engine.steps + 12
    while not engine.begun("promote"):
        engine.step()
        begun = begun or ("again" in engine.worker.computed and engine.steps)
        assert engine.steps < end
    assert 0 < begun < engine.steps
    assert not engine.outputs["again"], "it need not wait for the end of the prefill"


def test_a_request_that_loads_from_dram_only_promotes_nothing(make_ssd: Make) -> None:
    engine = make_ssd(promotion=1)
    engine.serve("again", prompt(81, seed=8))
    assert engine.begun("load") and not engine.begun("promote")


def test_no_store_is_no_promotion(make_ssd: Make) -> None:
    engine = make_ssd(promotion=1)
    engine.serve("again", TOKENS, params={"saria": {"no_store": True}})
    assert engine.begun("load") and not engine.begun("promote")


def test_auto_goes_by_what_drives_and_ingress_were_seen_to_give(make_ssd: Make) -> None:
    engine = make_ssd(promotion="auto")
    engine.worker.ingress_bytes_s = 400e6
    engine.worker.moved = [Moved(0, 100_000_000, 1.0, 0, 0.0)]
    engine.serve("again", prompt(81, seed=8))  # Its results bring the rates.
    engine.flush_hbm()
    before = engine.counted("promoted_chunks")
    engine.serve("third", TOKENS)
    assert engine.counted("promoted_chunks") - before == 8, "three quarters of ten"


@pytest.mark.parametrize("how", ["finish", "abort", "preempt"])
def test_blocks_stay_as_they_are_until_the_copy_has_ended(make_ssd: Make, how: str) -> None:
    """The worker checks at every step that the bytes under a copy do not change."""
    engine = make_ssd(blocks=40)
    job = until_promoting(engine)
    held = [block for item in engine.begun("promote")[0].items for block in item.blocks]
    if how == "abort":
        engine.abort("again")
    elif how == "preempt":
        engine.preempt_all()
    else:
        while "again" not in engine.finished:
            engine.step()
    engine.serve_some("other", prompt(400, seed=7))
    assert all(engine.pool.blocks[block].ref_cnt > 0 for block in held)
    assert engine.connector.has_pending_block_frees()
    engine.worker.end_store(job)
    engine.run()
    assert not engine.side._held and engine.counted("promoted_chunks") == 5
    assert in_tiers(engine) == (80, 80)


@pytest.mark.parametrize("reason", ["other", "too_late"])
def test_a_promotion_that_fails_gives_back_slots_and_blocks_and_loses_nothing(make_ssd: Make, reason: str) -> None:
    engine = make_ssd()
    used = engine.side.tiers.chunks.slots.used[0]
    job = until_promoting(engine)
    engine.worker.end_store(job, failed=True, reason=reason)
    engine.run()
    assert engine.counted(f"unpromoted_chunks:{reason}") == 5 and not engine.counted("promoted_chunks")
    assert not engine.counted("errors:other")
    assert engine.side.tiers.chunks.slots.used[0] <= used and not engine.side._held
    assert in_tiers(engine) == (0, 160)


def test_a_reset_while_it_promotes_forgets_it(make_ssd: Make) -> None:
    engine = make_ssd()
    job = until_promoting(engine)
    assert engine.connector.reset_cache()
    engine.worker.end_store(job)
    engine.run()
    assert engine.side.tiers.chunks.slots.used == [0]
    assert not engine.counted("promoted_chunks") and engine.stored_chunks("cold") == 0


def test_two_requests_promote_a_chunk_once(make_ssd: Make) -> None:
    engine = make_ssd(prefix_caching=False)
    engine.worker.auto_loads = False
    engine.add("one", TOKENS, 9)
    engine.add("two", TOKENS, 9)
    engine.steps_of(3)
    assert set(engine.worker.loads) == {"one", "two"}
    engine.worker.auto_loads = True
    engine.worker.end_all()
    engine.run()
    assert engine.counted("promoted_chunks") == 5 == sum(job.chunks for job in engine.begun("promote"))


def test_a_chunk_whose_segment_goes_meanwhile_is_promoted_all_the_same(make_ssd: Make) -> None:
    engine = make_ssd()
    engine.worker.auto_loads = False
    engine.add("again", TOKENS)
    engine.steps_of(3)
    engine.worker.end_load("again")
    tiers = engine.side.tiers
    keys = engine.keys(engine.requests["cold"])[:10]

    def lose(request: Any, block_ids: Any, finished: Any = engine.side.request_finished) -> None:
        rows = tiers.chunks.index.locate(Prefix(keys), 0, 2)[0]
        tiers.chunks.clear_ssd(rows)
        tiers.chunks.settle(rows)
        finished(request, block_ids)

    engine.side.request_finished = lose  # type: ignore[method-assign]
    engine.worker.auto_loads = True
    engine.run()
    assert in_tiers(engine) == (80, 80)


# Room.


@pytest.fixture
def waiting(make_ssd: Make) -> Engine:
    """A promotion of 10 chunks waits for slots, which writes in flight are to free; its request has ended."""
    engine = make_ssd(admission={"policy": "saria", "evictions": 1}, promotion=1)
    engine.worker.auto_persists = False
    engine.serve_some("again", TOKENS)
    engine.steps_of(3)
    assert engine.side._promoting.held_blocks == 10 and engine.worker.persists
    assert promoted(engine) < 10 and engine.side.tiers.chunks.slots.free(0) >= 8, "the headroom is for stores"
    assert engine.connector.has_pending_block_frees(), "else an idle engine would hold the blocks for ever"
    return engine


def promoted(engine: Engine) -> int:
    """Chunks whose promotion was begun."""
    return sum(job.chunks for job in engine.begun("promote"))


def test_a_promotion_waits_for_writes_that_free_its_slots(waiting: Engine) -> None:
    waiting.worker.auto_persists = True
    waiting.worker.end_all()
    waiting.run()
    assert promoted(waiting) == 10 and in_tiers(waiting) == (160, 0)


def test_a_promotion_that_gets_no_slots_is_given_up(waiting: Engine) -> None:
    before = promoted(waiting)
    waiting.now += promoting_module.WAIT_S
    waiting.steps_of(3)
    assert not waiting.connector.has_pending_block_frees() and promoted(waiting) == before
    assert waiting.counted("unpromoted_chunks:no_slot") == 10 - before
    assert in_tiers(waiting) == (16 * before, 160 - 16 * before)


def test_stores_come_before_a_promotion_that_waits(waiting: Engine) -> None:
    before = promoted(waiting)
    waiting.serve_some("new", prompt(113, seed=20))
    waiting.steps_of(3)
    assert waiting.stored_chunks("new") == 7 and promoted(waiting) == before
    waiting.worker.auto_persists = True
    waiting.worker.end_all()
    waiting.run()
    assert promoted(waiting) == 10


@pytest.mark.parametrize("how", ["reset", "fault"])
def test_nothing_waits_after_a_reset_or_a_fault_of_ours(waiting: Engine, how: str) -> None:
    before = promoted(waiting)
    if how == "reset":
        assert waiting.connector.reset_cache()
    else:
        waiting.side.turn_off()
    assert not waiting.side._promoting.waiting and not waiting.side._promoting.held_blocks
    waiting.worker.end_all()
    waiting.run()
    assert promoted(waiting) == before
    waiting.close(allow_off=how == "fault")


def test_promotions_hold_half_of_what_may_be_held(make_ssd: Make) -> None:
    """A request that goes on hands on the rest later; one that ends drops it."""
    engine = make_ssd(blocks=24, promotion=1)
    job = until_promoting(engine, answer=30)
    assert engine.side._held_blocks == 3 == engine.begun("promote")[0].chunks
    engine.worker.auto_promotions = True
    engine.worker.end_store(job)
    engine.run()
    assert promoted(engine) == 10
    fill(engine, "more")
    before = promoted(engine)
    engine.serve("ends at once", TOKENS)
    assert promoted(engine) - before == 3 and engine.counted("unpromoted_chunks:hold_limit") == 7


def test_no_more_is_promoted_than_dram_has_room_for_beside_the_rest_of_the_prefix(make_ssd: Make) -> None:
    engine = make_ssd(promotion=1, blocks=100)
    tokens = TOKENS + prompt(20 * 16, seed=5)
    engine.serve("longer", tokens, 6)
    assert engine.counted("promoted_chunks") == 24 - 20
    keys = engine.keys(engine.requests["longer"])
    assert engine.side.tiers.tier_tokens(Prefix(keys), 10, 30) == (20 * 16, 0)


# Scenarios.


def test_b25_promotions_are_for_those_that_run_and_leave_room_to_stores(make: Make, tmp_path: Path) -> None:
    """50 queued requests with 40 SSD-resident chunks each, 100 slots, 4 that run at a time."""
    engine = make(
        block_bytes=512 << 10, dram_capacity="50MiB", ssd_paths=[f"{tmp_path}/ssd"], ssd_capacity="2GiB",
        admission="full_duplicate", blocks=400, requests_max=4, batched_tokens=128, promotion=1,
    )  # fmt: skip
    for number in range(25):
        engine.serve(f"cold {number}", prompt(641, seed=number))
    engine.flush_hbm()
    side, (headroom,) = engine.side, engine.side.tiers.evictor.headroom
    assert headroom == 25
    times: Counter[bytes] = Counter()
    plan = side.tiers.plan_promote

    def plan_promote(prefix: Prefix, *more: Any) -> Any:
        job, went_on = plan(prefix, *more)
        if job is not None:
            slots = {slot for slab in job.parts[0].slots.tolist() for slot in [tuple(slab)]}
            index = side.tiers.chunks.index
            rows = index.locate(prefix, 0, len(prefix.keys))[0]
            times.update(prefix.keys[i] for i, row in enumerate(rows) if tuple(index.slot[row].tolist()) in slots)
            loaded = {job.items[0].key for job in engine.begun("load")}
            assert prefix.keys[0] in loaded, "promoted for one that was not served"
            assert side.tiers.chunks.slots.free(0) >= headroom, "the reserve for stores was touched"
        return job, went_on

    side.tiers.plan_promote = plan_promote  # type: ignore[method-assign]
    for number in range(50):
        engine.add(f"again {number}", prompt(641, seed=number % 25), 3)
    engine.run()
    reads = engine.worker.reads
    assert times and all(n <= reads[key] for key, n in times.items()), "promoted again without a use"
    assert sum(times.values()) == engine.counted("promoted_chunks")
    loaded = sum(item.slot is None for job in engine.begun("load") for item in job.items)
    assert 0 < engine.counted("promoted_chunks") <= loaded
    assert not engine.counted("dropped_chunks:no_slot")
    assert all(engine.outputs[f"again {n}"][:1] == engine.outputs[f"cold {n % 25}"] for n in range(50))


def test_b52_nothing_is_read_or_promoted_behind_a_gap(make_ssd: Make) -> None:
    engine = make_ssd(promotion=1)
    keys = engine.keys(engine.requests["cold"])[:10]
    engine.worker.fail_items = {keys[4]}
    engine.serve("finds a bad one", TOKENS, params={"saria": {"no_store": True}})
    engine.flush_hbm()
    engine.worker.fail_items, engine.worker.reads = set(), {}
    before = engine.counted("hit_tokens:ssd")
    engine.serve("again", TOKENS)
    assert engine.worker.reads == dict.fromkeys(keys[:4], 1)
    assert engine.counted("hit_tokens:ssd") - before == 4 * 16
    assert engine.counted("promoted_chunks") == 4, "what is behind the gap was computed, and stored"


def test_b52_a_request_that_is_never_admitted_reads_and_promotes_nothing(make_ssd: Make) -> None:
    engine = make_ssd(promotion=1, blocks=24)
    engine.add("runs", prompt(280, seed=20), 20)
    engine.steps_of(4)
    engine.add("again", TOKENS)
    engine.steps_of(4)
    assert engine.offered("again")[-1] == 160
    engine.abort("again")
    engine.run()
    assert not engine.begun("load") and not engine.begun("promote") and not engine.worker.reads
