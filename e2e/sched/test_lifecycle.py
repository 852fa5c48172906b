"""Aborts, preemption, idling: every request ends, whatever the order, and nothing of it is left."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.v1.request import Request, RequestStatus

from harness import Engine, prompt
from saria_vllm.types import JobResult

pytestmark = pytest.mark.vllm
Make = Callable[..., Engine]


@pytest.mark.parametrize("order", ["recv send", "send recv", "both in one step"])
def test_b22_abort_with_a_load_in_flight_and_a_store_pending(make: Make, order: str) -> None:
    """The store is of an earlier life of the request: it was preempted, and came back with a hit."""
    engine = make(blocks=40)
    engine.serve("cold", prompt(160))
    engine.flush_hbm()
    engine.worker.auto_loads = engine.worker.auto_stores = False
    engine.add("both", prompt(160) + prompt(40, seed=1), 50)
    engine.steps_of(2)
    engine.worker.end_load("both")
    engine.steps_of(8)
    assert len(engine.worker.stores) == 1
    engine.preempt_all()
    engine.evict_hbm("both", 0)
    engine.steps_of(3)
    assert list(engine.worker.loads) == ["both"]
    (store,) = engine.worker.stores
    engine.abort("both")
    engine.steps_of(2)
    assert "both" in engine.scheduler.requests and "both" not in engine.side._requests
    for what in {"recv send": "r.s", "send recv": "s.r", "both in one step": "rs"}[order]:
        if what == "r":
            engine.worker.end_load("both")
        elif what == "s":
            engine.worker.end_store(store)
        else:
            engine.steps_of(3)
    engine.run()
    assert "both" not in engine.scheduler.requests


def test_b22_a_completion_for_a_request_that_was_freed_long_ago(make: Make) -> None:
    engine = make()
    engine.worker.auto_stores = False
    engine.add("gone", prompt(100))
    engine.steps_of(4)
    assert "gone" not in engine.scheduler.requests and engine.worker.stores
    engine.worker.auto_stores = True
    for number in range(20):
        engine.serve_some(f"{number}", prompt(50, seed=number + 1))
    engine.worker.end_all()
    engine.run()
    assert engine.stored_chunks("gone") == 6


def test_b28_an_idle_engine_steps_until_the_stores_have_ended(make: Make) -> None:
    engine = make()
    engine.worker.auto_stores = False
    engine.add("last", prompt(100))
    engine.steps_of(30)
    assert engine.scheduler.has_requests() and engine.connector.has_pending_push_work()
    engine.add("next", prompt(50, seed=1))
    start = engine.steps
    engine.steps_of(3)
    assert engine.first_token["next"] - start == (2 if engine.asynchronous else 1), "stores do not delay a request"
    engine.worker.auto_stores = True
    engine.worker.end_all()
    engine.run(10)
    assert not engine.scheduler.has_requests()
    assert engine.stored_chunks("last") == 6 and engine.stored_chunks("next") == 3


def test_b33_abort_before_the_first_schedule(make: Make) -> None:
    engine = make()
    engine.add("never", prompt(100))
    engine.abort("never")
    engine.abort("never")
    engine.abort("no such request")
    engine.run()


def test_b33_abort_after_a_lookup_but_before_allocation(make: Make) -> None:
    engine = make(blocks=24, batched_tokens=512)
    engine.serve("cold", prompt(160))
    engine.flush_hbm()
    engine.add("runs", prompt(280, seed=2), 20)
    engine.steps_of(4)
    engine.add("asked", prompt(160))
    engine.steps_of(3)
    assert engine.offered("asked") and not engine.begun("load")
    engine.abort("asked")
    assert "asked" not in engine.side._requests
    engine.run()


def test_b33_abort_while_told_to_ask_again(make: Make) -> None:
    engine = make()
    engine.serve("cold", prompt(100))
    engine.flush_hbm()
    engine.worker.auto_loads = False
    engine.add("loads", prompt(100))
    engine.add("waits", prompt(100))
    engine.steps_of(4)
    assert engine.offered("waits")[-1] is None
    engine.abort("waits", "loads")
    engine.abort("loads")
    engine.worker.end_all()
    engine.run()


def test_b33_request_finished_with_empty_blocks_or_unknown(make: Make) -> None:
    engine = make()
    request = engine.add("known", prompt(100))
    stranger = engine.add("stranger", prompt(100))
    engine.abort("stranger")
    for blocks in ((), ([],)):
        assert engine.connector.request_finished_all_groups(request, blocks) == (False, None)
        assert engine.connector.request_finished_all_groups(stranger, blocks) == (False, None)
    assert engine.connector.request_finished(stranger, []) == (False, None)
    assert not engine.side._requests
    engine.run()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_b34_a_preempted_request_comes_back_while_its_stores_are_in_flight(make: Make, order: tuple[int, ...]) -> None:
    engine = make(blocks=100, batched_tokens=64)
    engine.worker.auto_stores = False
    engine.add("one", prompt(150), 60)
    engine.steps_of(20)
    stores = sorted(engine.worker.stores)
    assert len(stores) >= 3
    engine.preempt_all()
    engine.evict_hbm("one", 3)
    engine.worker.end_store(stores.pop(0))
    engine.worker.auto_loads = False
    engine.steps_of(3)
    for place in order:
        if place < len(stores):
            engine.worker.end_store(stores[place])
        engine.steps_of(2)
        if engine.worker.loads:
            engine.worker.end_load("one")
    engine.worker.auto_stores = engine.worker.auto_loads = True
    engine.worker.end_all()
    engine.run()
    assert len(engine.outputs["one"]) == 60


def test_b34_memory_pressure_waits_for_held_blocks_and_then_preempts(make: Make) -> None:
    engine = make(blocks=30, batched_tokens=256)
    engine.worker.auto_stores = False
    engine.add("one", prompt(150), 100)
    engine.add("two", prompt(150, seed=1), 100)
    for _ in range(200):
        engine.step()
        if engine.pool.get_num_free_blocks() == 0 and engine.side._held:
            break
    engine.steps_of(20)
    assert not any(request.num_preemptions for request in engine.requests.values())
    engine.worker.auto_stores = True
    engine.worker.end_all()
    engine.run()
    assert any(request.num_preemptions for request in engine.requests.values())
    assert [len(tokens) for tokens in engine.outputs.values()] == [100, 100]


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_abort_of_a_load_that_another_request_found_bad_stores_nothing_unread(
    make: Make, tier: str, tmp_path: Path
) -> None:
    """vLLM counts the tokens of a load in flight as computed. Storing them would keep bytes that were never loaded."""
    more = {"ssd_paths": [f"{tmp_path}/ssd"], "ssd_capacity": "64MiB", "admission": "full_duplicate"}
    engine = make(block_bytes=512 << 10, dram_capacity="8MiB", **(more if tier == "ssd" else {}))
    engine.serve("cold", prompt(100))
    if tier == "ssd":
        engine.serve("filler 1", prompt(256, seed=1))
        engine.serve("filler 2", prompt(256, seed=2))
    engine.flush_hbm()
    engine.worker.auto_loads = False
    engine.add("one", prompt(100))
    engine.steps_of(3)
    engine.add("two", prompt(100))
    engine.steps_of(3)
    engine.now += 60
    engine.steps_of(3)
    assert sorted(engine.worker.loads) == ["one", "two"]
    engine.worker.end_load("one", failed=range(6))
    engine.steps_of(1 + engine.asynchronous)
    engine.abort("two")
    engine.steps_of(2)
    engine.worker.auto_loads = True
    engine.worker.end_all()
    engine.run()
    assert engine.outputs["one"] == engine.outputs["cold"]


def test_b27_a_failed_load_does_not_stop_those_that_have_landed(make: Make) -> None:
    """Found by the soak: vLLM asks the failed request first, and its own old reservation leaves it no room to load."""
    engine = make(blocks=40)
    prefixes = [prompt(96), prompt(176, seed=1), prompt(32, seed=2)]
    for number, prefix in enumerate(prefixes):
        engine.serve(f"cold {number}", prefix)
    engine.flush_hbm()
    engine.worker.auto_loads = False
    for number, more in enumerate([49, 26, 152]):
        engine.add(f"{number}", prefixes[number] + prompt(more, seed=9), 3)
    engine.steps_of(4)
    assert len(engine.worker.loads) == 3
    engine.worker.end_load("0", failed=[5])
    engine.worker.auto_loads = True
    engine.worker.end_all()
    engine.run(60)
    assert engine.offered("0") == [96, 80, 0]


@pytest.mark.parametrize("head_waits", [False, True], ids=["", "the first is told to ask again"])
def test_b27_requests_that_fill_hbm_and_all_reuse_end_one_after_the_other(make: Make, head_waits: bool) -> None:
    """100, 255 and 10 of 270 blocks, submitted together."""
    engine = make(blocks=271, batched_tokens=512)
    sizes = [100, 255, 10]
    prefixes = [prompt(size * 16 - 40, seed=size) for size in sizes]
    for size, prefix in zip(sizes, prefixes, strict=True):
        engine.serve(f"cold {size}", prefix)
        engine.flush_hbm()
    ask, refusals = engine.connector.get_num_new_matched_tokens, 20 if head_waits else 0

    def matched(request: Request, computed: int) -> tuple[int | None, bool]:
        nonlocal refusals
        if request.request_id == "100" and refusals:
            refusals -= 1
            return None, False
        return ask(request, computed)

    engine.connector.get_num_new_matched_tokens = matched
    for size, prefix in zip(sizes, prefixes, strict=True):
        engine.add(f"{size}", prefix, 20)
    tokens, quiet, steps = 0, 0, 0
    while len(engine.finished) < 6:
        engine.step()
        now = sum(map(len, engine.outputs.values()))
        quiet, tokens, steps = 0 if now > tokens else quiet + 1, now, steps + 1
        assert quiet < 50 and steps < 200, f"waits: {list(engine.scheduler.requests)}"
    assert not refusals and all(engine.outputs[f"{size}"][:1] == engine.outputs[f"cold {size}"] for size in sizes)
    assert len(engine.begun("load")) == 3


@pytest.mark.parametrize("finish", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_abort_in_the_middle_of_a_chunked_prefill_stores_what_was_computed(make: Make, finish: RequestStatus) -> None:
    engine = make(batched_tokens=64)
    engine.add("long", prompt(500), 5)
    engine.steps_of(3)
    engine.scheduler.finish_requests("long", finish)
    engine.run()
    assert engine.stored_chunks("long") >= 8


def test_two_ranks_end_a_job_only_together(make: Make) -> None:
    engine = make(ranks=2)
    engine.worker.auto_stores = False
    engine.add("cold", prompt(100))
    engine.steps_of(4)
    for job_id in list(engine.worker.stores):
        engine.worker.end_store(job_id, rank=1)
    engine.steps_of(3)
    assert engine.stored_chunks("cold") == 0 and engine.side._held_blocks == 6
    for job_id in list(engine.worker.stores):
        engine.worker.end_store(job_id, rank=0)
    engine.run()
    assert engine.stored_chunks("cold") == 6 and not engine.side._held
    engine.flush_hbm()
    engine.worker.auto_loads, engine.worker.auto_stores = False, True
    engine.add("again", prompt(100))
    engine.steps_of(3)
    engine.worker.end_load("again", rank=0, failed=[2])
    engine.steps_of(3)
    assert not engine.outputs["again"]
    engine.worker.end_load("again", rank=1)
    engine.steps_of(3)
    assert len(engine.begun("load")) == 2 and len(engine.begun("load")[1].items) == 2


def test_a_result_of_a_job_that_is_not_known_turns_the_tier_off_not_the_engine(make: Make) -> None:
    engine = make()
    engine.serve("cold", prompt(100))
    engine.worker._results.append(JobResult(12345))
    engine.serve("next", prompt(100, seed=1))
    engine.close(allow_off=True)
