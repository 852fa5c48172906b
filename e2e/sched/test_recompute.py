"""Load or compute: a hit is cut where loading stops paying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness import Engine, prompt
from on_ssd import TOKENS, fill, in_tiers
from saria_vllm.types import Moved, Prefill

pytestmark = pytest.mark.vllm
Make = Callable[..., Engine]

RECORD_BYTES = 512 << 10


def learn(engine: Engine, ssd_chunks_s: float, token_s: float) -> None:
    """A request that hits nothing of interest, after which the rates are known; it leaves `TOKENS` on SSD only."""
    nbytes = 400 * RECORD_BYTES
    engine.worker.ingress_bytes_s = 1e12
    engine.worker.moved = [Moved(0, nbytes, nbytes / RECORD_BYTES / ssd_chunks_s, 0, 0.0)]
    engine.worker.token_s = token_s
    for number in range(3):
        engine.serve(f"learn {number}", prompt(401, seed=90 + number))
    fill(engine, "again filler", seed=20)


@pytest.fixture
def slow(make_ssd: Make) -> Engine:
    """A drive takes 1 s for a chunk, a prefill 0.16 s."""
    engine = make_ssd(promotion=0)
    learn(engine, ssd_chunks_s=1.0, token_s=0.01)
    return engine


def loaded(engine: Engine, request_id: str) -> list[Any]:
    return [job for job in engine.begun("load") if job.request_id == request_id]


def test_what_computes_faster_is_computed(slow: Engine) -> None:
    slow.serve("again", TOKENS)
    assert not loaded(slow, "again") and slow.offered("again")[-1] == 0
    assert slow.outputs["again"] == slow.outputs["cold"][:1]
    assert slow.counted("recomputed_tokens:cheaper") == 160
    assert in_tiers(slow)[0] >= 128, "what was computed is in DRAM, so the next time is a hit"


def test_what_loads_faster_is_loaded(make_ssd: Make) -> None:
    engine = make_ssd(promotion=0)
    learn(engine, ssd_chunks_s=100.0, token_s=0.01)
    engine.serve("again", TOKENS)
    assert engine.offered("again")[-1] == 160
    assert not engine.counted("recomputed_tokens:cheaper")


def test_what_dram_has_is_loaded_and_the_rest_computed(slow: Engine) -> None:
    slow.serve("again", TOKENS)
    for number in range(3):  # Newer, but not so much that all of it leaves DRAM: children go first.
        slow.serve(f"other {number}", prompt(81, seed=40 + number))
    slow.flush_hbm()
    dram, ssd = in_tiers(slow)
    assert dram and ssd
    before = slow.counted("recomputed_tokens:cheaper")
    slow.serve("third", TOKENS)
    assert slow.offered("third")[-1] == dram
    assert slow.counted("recomputed_tokens:cheaper") - before == ssd
    assert slow.outputs["third"] == slow.outputs["again"]


def test_a_hit_that_is_asked_about_again_and_again_is_counted_once(slow: Engine) -> None:
    slow.add("runs", prompt(330, seed=70), 40)
    slow.steps_of(4)
    slow.now += 10  # Its prefill is done.
    blocked = slow.pool.get_new_blocks(slow.pool.get_num_free_blocks() - 4)
    slow.add("again", TOKENS)
    slow.steps_of(10)
    assert len(slow.offered("again")) > 5 and not slow.counted("recomputed_tokens:cheaper")
    slow.pool.free_blocks(blocked)
    slow.run()
    assert slow.counted("recomputed_tokens:cheaper") == 160


def test_no_load_is_begun_that_would_miss_its_deadline(make_ssd: Make) -> None:
    engine = make_ssd(promotion=0, load_deadline="5s")
    learn(engine, ssd_chunks_s=1.0, token_s=0.0)
    engine.serve("again", TOKENS)
    assert engine.offered("again")[-1] == 4 * 16
    assert engine.counted("recomputed_tokens:deadline") == 6 * 16


def test_loads_of_others_are_waited_for_and_make_computing_worth_it(make_ssd: Make) -> None:
    """A chunk takes a drive 0.1 s and a prefill 0.16 s, and another's load of ten has been begun."""
    engine = make_ssd(promotion=0)
    other = prompt(161, seed=77)
    engine.serve("other cold", other, 12)
    learn(engine, ssd_chunks_s=10.0, token_s=0.01)
    engine.worker.auto_loads = False
    engine.add("other", other)
    engine.steps_of(3)
    assert list(engine.worker.loads) == ["other"]
    engine.add("again", TOKENS)
    engine.steps_of(3)
    assert engine.offered("again")[-1] == 0 and engine.counted("recomputed_tokens:cheaper") == 160
    engine.worker.auto_loads = True
    engine.worker.end_all()
    engine.run()
    fill(engine, "third filler", seed=60)
    engine.serve("third", TOKENS)
    assert engine.offered("third")[-1] == 160, "nothing is in flight now"


@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_say_what_of_them_is_prefill(make: Make, drafts: int) -> None:
    engine = make(batched_tokens=256, drafts=drafts)
    said: list[Prefill | None] = []
    take = engine.side.take_metadata

    def noted() -> Any:
        metadata = take()
        said.append(metadata.prefill)
        return metadata

    engine.side.take_metadata = noted  # type: ignore[method-assign]
    engine.serve("a", prompt(400), 5)
    large = [prefill for prefill in said if prefill and prefill.tokens > 1 + drafts]
    assert large == [Prefill(256, 256 * 128), Prefill(144, 144 * 256 + 144 * 72)]
    assert drafts or len([prefill for prefill in said if prefill]) == 2, "a step that only decodes has none"


def test_while_prefills_of_others_are_queued_a_load_costs_nothing(slow: Engine) -> None:
    slow.add("computes", prompt(390, seed=70), 3)
    slow.steps_of(1)
    slow.add("again", TOKENS)
    slow.run()
    assert 3 * 16 <= slow.offered("again")[-1] <= 4 * 16, "a chunk takes a second, and the GPU is busy for nearly four"
    slow.flush_hbm()
    fill(slow, "third filler", seed=60)
    slow.serve("third", TOKENS)
    assert slow.offered("third")[-1] == 0
