"""Stores: which tokens are stored, and when. The engine checks every store against what its key stands for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness import Engine, prompt
from saria_connector.compat import confirmed_tokens

pytestmark = pytest.mark.vllm
Make = Callable[..., Engine]


@pytest.mark.parametrize("generated", [43, 44, 45, 50])
@pytest.mark.parametrize("chunk_blocks", [1, 3])
def test_b55_generated_tokens_are_stored_but_not_the_last_sampled_one(
    make: Make, generated: int, chunk_blocks: int
) -> None:
    engine = make(chunk_blocks=chunk_blocks, blocks=100)
    answer = engine.serve("turn 1", prompt(100), generated)
    engine.flush_hbm()
    engine.serve("turn 2", prompt(100) + answer + prompt(50, seed=1), 5)
    computed = 100 + generated - 1
    assert engine.offered("turn 2") == [computed // engine.chunk_tokens * engine.chunk_tokens]


@pytest.mark.parametrize("generated", [27, 28, 29])
def test_b55_a_stop_token_that_fills_a_chunk_is_not_claimed(make: Make, generated: int) -> None:
    """Under asynchronous scheduling the step that computes it is in flight when the request ends."""
    answer = make().serve("probe", prompt(100), 60)
    assert answer.index(answer[generated - 1]) == generated - 1
    engine = make()
    stopped = engine.serve("turn 1", prompt(100), 60, sampling={"stop_token_ids": [answer[generated - 1]]})
    assert len(stopped) == generated
    assert engine.stored_chunks("turn 1") == (100 + generated - 1) // 16


@pytest.mark.parametrize("right", [[], [3] * 40, [3, 0, 2, 1] * 20, [0, 3] * 30, [1] * 60], ids=str)
@pytest.mark.parametrize("max_tokens", [61, 64])
def test_drafts_are_stored_only_once_they_are_confirmed(make: Make, right: list[int], max_tokens: int) -> None:
    engine = make(drafts=3, blocks=100)
    engine.worker.right_drafts = list(right)
    answer = engine.serve("turn 1", prompt(40), max_tokens)
    assert len(answer) == max_tokens
    engine.flush_hbm()
    engine.worker.right_drafts = list(right)
    engine.serve("turn 2", prompt(40) + answer + prompt(20, seed=1), 20)
    (offered,) = engine.offered("turn 2")
    assert offered in ((39 + max_tokens) // 16 * 16, (40 + max_tokens) // 16 * 16)


def test_drafts_of_several_requests_with_aborts(make: Make) -> None:
    engine = make(drafts=3, blocks=120)
    engine.worker.right_drafts = [3, 1, 0, 2, 3, 3, 0] * 30
    for number in range(4):
        engine.add(f"{number}", prompt(30 + 7 * number, seed=number), 60)
    engine.steps_of(9)
    engine.abort("1", "2")
    engine.run()
    engine.flush_hbm()
    for number in range(4):
        engine.serve(f"again {number}", prompt(30 + 7 * number, seed=number) + engine.outputs[f"{number}"], 5)


def test_kv_from_a_remote_prefill_is_not_stored(make: Make) -> None:
    engine = make()
    engine.serve("remote", prompt(100), 30, params={"do_remote_prefill": True})
    assert not engine.begun("store") and engine.stored_chunks("remote") == 0


def test_a_failed_store_is_a_miss_and_can_be_stored_again(make: Make) -> None:
    engine = make()
    engine.worker.auto_stores = False
    engine.add("cold", prompt(100))
    engine.steps_of(4)
    for job_id in list(engine.worker.stores):
        engine.worker.end_store(job_id, failed=True)
    engine.run()
    assert engine.stored_chunks("cold") == 0
    engine.worker.auto_stores = True
    engine.flush_hbm()
    engine.serve("again", prompt(100))
    assert engine.offered("again") == [0] and engine.stored_chunks("again") == 6


def test_held_blocks_are_bounded_and_what_is_left_out_is_counted(make: Make) -> None:
    engine = make(blocks=40, batched_tokens=512)
    engine.worker.auto_stores = False
    engine.add("long", prompt(320))
    engine.steps_of(4)
    assert engine.side._held_blocks == 10
    assert engine.counted("dropped_chunks:hold_limit") == 10
    engine.add("next", prompt(100, seed=1))
    engine.steps_of(4)
    assert engine.outputs["next"] and engine.side._held_blocks == 10


def test_a_full_dram_tier_stores_less_and_goes_on(make: Make) -> None:
    engine = make(block_bytes=512 << 10, dram_capacity="8MiB", blocks=100, batched_tokens=512)
    for number in range(30):
        engine.serve(f"{number}", prompt(100 + 13 * number, seed=number), 3)
        engine.side.tiers.check()
    engine.flush_hbm()
    engine.serve("again", prompt(100 + 13 * 29, seed=29), 3)
    assert engine.offered("again")[0]


def test_requests_in_company_store_and_load_right(make: Make) -> None:
    """Long mixed traffic through a small HBM and a small DRAM tier, with transfers that end late."""
    engine = make(block_bytes=512 << 10, dram_capacity="64MiB", blocks=40, batched_tokens=128, chunk_blocks=2)
    engine.worker.auto_loads = engine.worker.auto_stores = False
    for number in range(60):
        shared = prompt(32 * (number % 5), seed=number % 3)
        engine.add(f"{number}", shared + prompt(20 + number, seed=100 + number % 20), 5 + number % 9)
        for _ in range(4):
            engine.step()
            if engine.steps % 3 == 0:
                for request_id in list(engine.worker.loads)[:1]:
                    engine.worker.end_load(request_id, failed=[0] if engine.steps % 4 == 0 else [])
            if engine.steps % 2 == 0:
                for job_id in list(engine.worker.stores)[-1:]:
                    engine.worker.end_store(job_id, failed=engine.steps % 10 == 0)
        if number % 11 == 10:
            engine.abort(f"{number - 1}", f"{number - 5}")
        if number % 13 == 12:
            engine.preempt_all()
    engine.worker.auto_loads = engine.worker.auto_stores = True
    engine.worker.end_all()
    engine.run()
    assert engine.begun("load")


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("batched_tokens", [12, 100])
def test_a_chunk_is_stored_in_the_first_step_that_can(make: Make, drafts: int, batched_tokens: int) -> None:
    """Though most steps look at no request: prefills in parts, decodes out of step, arrivals, preemptions, aborts,
    requests that are left out of a step."""
    engine = make(blocks=300, chunk_blocks=2, batched_tokens=batched_tokens, drafts=drafts, dram_capacity="256MiB")
    engine.worker.right_drafts = [3, 1, 0, 2, 3, 3, 0] * 300
    side, plan, allocate = engine.side, engine.side._plan_stores, engine.side.allocated
    looked, late, begun = list[bool](), list[Any](), set[str]()

    def plan_stores(output: Any) -> None:
        scheduled = dict(output.num_scheduled_tokens)
        if engine.steps % 5 == 0 and len(scheduled) > 1:
            del scheduled[next(iter(scheduled))]
        seen = [side._requests[name] for name in scheduled if name in begun]
        begun.update(scheduled)
        total, tables = sum(scheduled.values()), output.kv_connector_block_state
        plan(SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=total, kv_connector_block_state=tables
        ))  # fmt: skip
        late.extend(state for state in seen if state.stored < confirmed_tokens(state.request) // engine.chunk_tokens)
        looked.append(side._quiet_tokens <= 0)

    def allocated(request: Any, blocks: Any, external: int) -> bool:
        begun.discard(request.request_id)
        return allocate(request, blocks, external)

    side._plan_stores, side.allocated = plan_stores, allocated  # type: ignore[method-assign]
    for number in range(40):
        engine.add(f"{number}", prompt(20 + 37 * number % 90, seed=number), 20 + 17 * number % 70)
        engine.steps_of(1 + number % 9)
        if number % 3 == 2:
            engine.preempt_all()
        if number % 13 == 12:
            engine.abort(f"{number - 1}")
    engine.run()
    assert not late
    assert len(engine.finished) > 30 and any(looked) and not all(looked)
