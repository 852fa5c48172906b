"""Loads: what is offered, what is loaded, and what happens when a load fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Engine, prompt, tokens_in
from saria_connector import scheduler as scheduler_half
from saria_vllm.config import LOAD_DEADLINE_S
from saria_vllm.policy.index import Prefix
from saria_vllm.types import NULL_BLOCK

pytestmark = pytest.mark.vllm
Make = Callable[..., Engine]


@pytest.mark.parametrize("block_tokens", [16, 32])
@pytest.mark.parametrize("chunk_blocks", [1, 2, 4])
def test_b07_a_hit_that_ends_inside_a_block_is_not_rounded_up(make: Make, block_tokens: int, chunk_blocks: int) -> None:
    engine = make(block_tokens=block_tokens, chunk_blocks=chunk_blocks, blocks=128, batched_tokens=1024)
    chunk = chunk_blocks * block_tokens
    edges = {n * unit + more for unit in (chunk, block_tokens) for n in range(4) for more in (-1, 0, 1)}
    for stored in sorted(edges):
        if not 0 < stored <= 3 * chunk:
            continue
        prefix = prompt(stored, seed=stored)
        engine.serve(f"store {stored}", prefix)
        for more in (1, block_tokens - 1, block_tokens):
            engine.flush_hbm()
            name = f"{stored} + {more}"
            engine.serve(name, prefix + prompt(more, seed=1000 + more))
            assert engine.offered(name)[0] == stored // chunk * chunk


@pytest.mark.parametrize("chunk_blocks", [1, 3])
def test_b08_a_whole_prompt_in_the_cache_leaves_a_token_to_compute(make: Make, chunk_blocks: int) -> None:
    engine = make(chunk_blocks=chunk_blocks)
    for blocks in range(1, 7):
        tokens = prompt(blocks * 16, seed=blocks)
        first = engine.serve(f"cold {blocks}", tokens, 4)
        engine.flush_hbm()
        again = engine.add(f"again {blocks}", tokens, 4)
        engine.run()
        assert engine.outputs[f"again {blocks}"] == first
        stored = (blocks * 16 + 3) // engine.chunk_tokens * engine.chunk_tokens
        assert engine.offered(f"again {blocks}") == [min(stored, (blocks - 1) * 16)]
        assert again.num_computed_tokens >= again.num_prompt_tokens


@pytest.mark.parametrize("chunk_blocks", [1, 2, 4])
def test_b08_hbm_and_tier_together_cover_the_whole_prompt(make: Make, chunk_blocks: int) -> None:
    engine = make(chunk_blocks=chunk_blocks)
    for local in range(8):
        tokens = prompt(128, seed=local)
        first = engine.serve(f"cold {local}", tokens, 17)
        engine.evict_hbm(f"cold {local}", local)
        assert engine.serve(f"again {local}", tokens, 17) == first
        assert engine.answers[-1][1:] == (local * 16, 112 - local * 16)


@pytest.mark.parametrize("chunk_blocks", [2, 4])
def test_a_load_leaves_the_blocks_of_its_first_chunk_that_hbm_has(make: Make, chunk_blocks: int) -> None:
    engine = make(chunk_blocks=chunk_blocks, blocks=40)
    tokens = prompt(161)
    engine.serve("cold", tokens)
    for local in range(1, 8):
        engine.evict_hbm("cold", local)
        engine.serve(f"local {local}", tokens)
        assert engine.offered(f"local {local}") == [160 // engine.chunk_tokens * engine.chunk_tokens - local * 16]
        job = engine.begun("load")[-1]
        assert [block == NULL_BLOCK for block in job.items[0].blocks[: local % chunk_blocks]] == [True] * (
            local % chunk_blocks
        )
        assert tokens_in([job], 16) == engine.offered(f"local {local}")[0]


@pytest.mark.parametrize("length", [60, 65, 200, 1000])
@pytest.mark.parametrize("company", [False, True], ids=["alone", "interleaved"])
def test_b09_chunked_prefill_is_stored_over_all_its_steps(make: Make, length: int, company: bool) -> None:
    engine = make(batched_tokens=64, blocks=400)
    engine.add("long", prompt(length), 2)
    if company:
        engine.add("other 1", prompt(150, seed=1), 9)
        engine.add("other 2", prompt(333, seed=2), 9)
    engine.flush_hbm()
    engine.serve("again", prompt(length), 2)
    assert engine.offered("again") == [(length - 1) // 16 * 16]


def test_b09_a_long_prefix_that_is_stored_does_not_use_up_the_bound_on_held_blocks(make: Make) -> None:
    """The bound counts blocks that are held, not chunks that are looked at."""
    engine = make(blocks=100, batched_tokens=2048)
    tokens = prompt(20 * 16)
    for turn in range(4):
        engine.serve(f"turn {turn}", tokens)
        tokens += prompt(16 * 16, seed=turn + 1)
    assert engine.stored_chunks("turn 3") == len(engine.keys(engine.requests["turn 3"]))


@pytest.mark.parametrize("bad", ["first", "middle", "last", "all"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_b06_a_failed_load_is_recomputed_or_fails_the_request(make: Make, bad: str, policy: str) -> None:
    """The engine checks at every step that attention reads no byte that the load should have written."""
    engine = make(policy=policy)
    first = engine.serve("cold", prompt(100), 8)
    engine.flush_hbm()
    keys = engine.keys(engine.requests["cold"])[:6]
    engine.worker.fail_items = set({"first": keys[:1], "middle": keys[2:3], "last": keys[-1:], "all": keys}[bad])
    engine.add("again", prompt(100), 8)
    engine.run(60)
    if policy == "fail":
        assert engine.finished["again"] == "error" and not engine.outputs["again"]
    else:
        assert engine.outputs["again"] == first
    assert engine.counted("loads:failed") == 1
    assert engine.counted("errors:checksum") == len(engine.worker.fail_items)


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_b24_a_bad_record_is_read_once_and_the_request_ends(make: Make, tier: str, tmp_path: Path) -> None:
    more = {"ssd_paths": [f"{tmp_path}/ssd"], "ssd_capacity": "64MiB", "admission": "full_duplicate"}
    engine = make(block_bytes=512 << 10, dram_capacity="8MiB", **(more if tier == "ssd" else {}))
    first = engine.serve("cold", prompt(100), 4)
    if tier == "ssd":
        engine.serve("filler 1", prompt(256, seed=1))
        engine.serve("filler 2", prompt(256, seed=2))
    engine.flush_hbm()
    keys = engine.keys(engine.requests["cold"])
    engine.worker.fail_items = {keys[3]}
    engine.add("again", prompt(100), 4)
    engine.run(40)
    assert engine.outputs["again"] == first
    assert engine.worker.reads[keys[3]] == 1
    loads = [job for job in engine.begun("load") if job.request_id == "again"]
    assert [len(job.items) for job in loads] == [6, 3]
    assert all((item.extent is not None) == (tier == "ssd") for item in loads[0].items)
    engine.worker.fail_items = set()
    engine.flush_hbm()
    assert engine.serve("later", prompt(100), 4) == first
    assert engine.offered("later") == [96], "the bad chunk was stored again"


def test_b24_a_request_whose_every_load_fails_ends_by_recompute(make: Make) -> None:
    engine = make()
    engine.serve("cold", prompt(200))
    engine.flush_hbm()
    keys = engine.keys(engine.requests["cold"])
    engine.worker.fail_items = set(keys)

    class Failing(set):  # type: ignore[type-arg]
        def __contains__(self, key: object) -> bool:
            offered = (k for k in reversed(keys) if engine.side.tiers.match(Prefix([k]), 0, 1, engine.now))
            return key == next(offered, None)

    engine.worker.fail_items = Failing()
    engine.add("again", prompt(200))
    engine.run(60)
    assert len(engine.begun("load")) == scheduler_half.LOAD_FAILURES_MAX
    assert engine.outputs["again"] == engine.outputs["cold"]


@pytest.mark.parametrize("count", [50])
def test_b50_requests_that_share_a_prefix_in_hbm_never_wait(make: Make, count: int) -> None:
    engine = make(blocks=400, batched_tokens=4096, requests_max=64)
    shared = prompt(64 * 16)
    engine.serve("first", shared)
    engine.worker.auto_stores = False
    for number in range(count):
        engine.add(f"{number}", shared + prompt(20, seed=number + 1))
    start = engine.steps
    engine.steps_of(3)
    assert {engine.first_token[f"{number}"] - start for number in range(count)} == {2 if engine.asynchronous else 1}
    assert not engine.begun("load") and engine.counted("load_waits") == 0


def test_b50_requests_that_share_an_evicted_prefix_start_with_one_load(make: Make) -> None:
    engine = make(blocks=400, batched_tokens=4096, requests_max=64)
    shared = prompt(64 * 16)
    engine.serve("first", shared)
    engine.flush_hbm()
    engine.worker.auto_loads = False
    for number in range(50):
        engine.add(f"{number}", shared + prompt(20, seed=number + 1))
    engine.steps_of(10)
    assert list(engine.worker.loads) == ["0"]
    engine.worker.end_load("0")
    landed = engine.steps + 1
    engine.run()
    assert len(engine.begun("load")) == 1
    steps = {engine.first_token[f"{number}"] - landed for number in range(50)}
    assert steps <= ({1, 2} if engine.asynchronous else {1}), steps


def test_b50_without_prefix_caching_in_hbm_nobody_waits_for_a_load_that_cannot_help(make: Make) -> None:
    engine = make(blocks=400, batched_tokens=4096, requests_max=64, prefix_caching=False)
    shared = prompt(10 * 16)
    engine.serve("first", shared)
    engine.worker.auto_loads = False
    for number in range(10):
        engine.add(f"{number}", shared + prompt(20, seed=number + 1))
    engine.steps_of(4)
    assert len(engine.worker.loads) == 10
    engine.worker.end_all()
    engine.run()


def test_b50_nobody_waits_for_ever_for_a_load_that_hangs(make: Make) -> None:
    engine = make(blocks=100)
    engine.serve("first", prompt(100))
    engine.flush_hbm()
    engine.worker.auto_loads = False
    engine.add("hangs", prompt(100))
    engine.steps_of(3)
    engine.add("waits", prompt(100))
    engine.steps_of(3)
    assert list(engine.worker.loads) == ["hangs"] and engine.offered("waits")[-1] is None
    engine.now += LOAD_DEADLINE_S
    engine.steps_of(3)
    engine.worker.end_load("waits")
    engine.steps_of(4)
    assert engine.outputs["waits"] and not engine.outputs["hangs"]


def test_b50_a_request_that_waited_its_time_does_not_wait_again_when_its_load_does_not_fit(make: Make) -> None:
    engine = make(blocks=30, batched_tokens=512)
    engine.serve("first", prompt(160))
    engine.flush_hbm()
    engine.worker.auto_loads = False
    engine.add("hangs", prompt(160))
    engine.steps_of(3)
    engine.add("runs", prompt(200, seed=2), 60)
    engine.add("waits", prompt(160))
    engine.steps_of(3)
    engine.now += LOAD_DEADLINE_S
    engine.steps_of(5)
    assert engine.offered("waits")[-1] and "waits" not in engine.worker.loads
    while "runs" not in engine.finished:
        engine.step()
    engine.steps_of(3)
    assert "waits" in engine.worker.loads


def test_b25_loads_of_queued_requests_leave_dram_to_stores(make: Make, tmp_path: Path) -> None:
    """SSD chunks go straight into HBM: a queued request takes no slot, and reads what it reads once."""
    engine = make(
        block_bytes=512 << 10, dram_capacity="16MiB", ssd_paths=[f"{tmp_path}/ssd"], ssd_capacity="512MiB",
        admission="full_duplicate", blocks=200, requests_max=4, batched_tokens=512,
    )  # fmt: skip
    for number in range(20):
        engine.serve(f"cold {number}", prompt(320, seed=number))
    engine.flush_hbm()
    used = engine.side.tiers.chunks.slots.used[0]
    engine.worker.auto_loads = engine.worker.auto_stores = False
    for number in range(20):
        engine.add(f"again {number}", prompt(320, seed=number))
    engine.steps_of(5)
    assert len(engine.worker.loads) >= 4 and engine.side.tiers.chunks.slots.used[0] <= used
    engine.worker.auto_loads = engine.worker.auto_stores = True
    engine.worker.end_all()
    engine.run()
    assert max(engine.worker.reads.values()) == 1
    assert all(engine.outputs[f"again {number}"] == engine.outputs[f"cold {number}"] for number in range(20))
    engine.serve("new", prompt(130, seed=50))
    assert engine.stored_chunks("new") == 8


def test_a_load_that_does_not_fit_is_offered_again_and_planned_once(make: Make) -> None:
    engine = make(blocks=24, batched_tokens=512)
    first = engine.serve("cold", prompt(160))
    engine.flush_hbm()
    engine.add("runs", prompt(280, seed=2), 20)
    engine.steps_of(4)
    engine.add("again", prompt(160))
    engine.steps_of(5)
    assert len(engine.offered("again")) > 1 and not engine.begun("load")
    engine.run()
    assert engine.outputs["again"] == first
    assert [job.request_id for job in engine.begun("load")] == ["again"]


def test_prompt_logprobs_reads_no_tier_but_is_stored(make: Make) -> None:
    engine = make()
    engine.serve("cold", prompt(100), sampling={"prompt_logprobs": 1})
    engine.flush_hbm()
    engine.serve("again", prompt(100), sampling={"prompt_logprobs": 1})
    assert engine.requests["again"].skip_reading_prefix_cache and not engine.begun("load")
    engine.flush_hbm()
    engine.serve("normal", prompt(100))
    assert engine.offered("normal") == [96] and len(engine.begun("load")) == 1
