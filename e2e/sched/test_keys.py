"""Keys: what may share KV and what may not. The engine checks that no key ever stands for two different contents."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from harness import Engine, prompt

pytestmark = pytest.mark.vllm
Make = Callable[..., Engine]

ADAPTERS = {
    "base": None,
    "A": LoRARequest("A", 1, "/adapters/a"),
    "B": LoRARequest("B", 2, "/adapters/b"),
    "A elsewhere": LoRARequest("A", 3, "/adapters/other"),
}


def test_b18_hits_stay_within_one_adapter(make: Make) -> None:
    engine = make(blocks=100, requests_max=4)
    for number, order in enumerate(itertools.permutations(ADAPTERS)):
        tokens = prompt(70, seed=number)
        for turn in ("first", "again"):
            for name in order:
                engine.flush_hbm()
                request_id = f"{number} {name} {turn}"
                engine.serve(request_id, tokens, 3, lora_request=ADAPTERS[name])
                assert engine.offered(request_id) == [64 if turn == "again" else 0]
                assert engine.outputs[request_id] == engine.outputs[f"{number} {name} first"]


def test_a_salt_keeps_its_own_kv(make: Make) -> None:
    engine = make()
    for salt, offered in ((None, 0), ("one", 0), ("two", 0), ("one", 64), (None, 64)):
        engine.flush_hbm()
        engine.add(f"{salt} {offered}", prompt(70), cache_salt=salt)
        engine.run()
        assert engine.offered(f"{salt} {offered}") == [offered]


def image(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=length))


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ([image("a" * 60 + "beef", 32, 16)], [image("b" * 60 + "beef", 32, 16)], 32),
        ([image("one", 40, 20)], [image("two", 40, 20)], 32),
        ([image("one", 16, 16), image("two", 64, 16)], [image("two", 16, 16), image("one", 64, 16)], 16),
        ([image("one", 0, 16)], [], 0),
        ([image("one", 48, 32)], [image("one", 48, 32)], 112),
    ],
    ids=["same last digits", "mid-block", "swapped", "image or text", "same image"],
)
def test_b19_hits_stay_within_one_image(make: Make, first: list[Any], second: list[Any], shared: int) -> None:
    engine = make()
    engine.allow_images()
    tokens = prompt(120)
    engine.serve("first", tokens, mm_features=first)
    engine.flush_hbm()
    engine.serve("second", tokens, mm_features=second)
    assert engine.offered("second") == [shared]
    assert all(len(key) == 32 for key in engine.keys(engine.requests["first"]))


def test_keys_follow_a_session_that_drops_tokens(make: Make) -> None:
    """vLLM cuts a streaming session's hashes back when it drops tokens that it had counted."""
    engine = make()
    request = engine.add("session", prompt(100), 30, resumable=True)
    engine.run()
    state = engine.side._requests["session"]
    assert engine.side._prefix(state).keys == engine.keys(request) and state.stored >= 7
    del request._all_token_ids[70:]
    del request.block_hashes[4:]
    request._all_token_ids.extend(prompt(60, seed=5))
    request.update_block_hashes()
    request.num_computed_tokens = 64
    assert engine.side._prefix(state).keys == engine.keys(request)
    assert state.stored == state.hit_end == 0
    engine.abort("session")


def test_a_streaming_session_stores_what_it_keeps(make: Make) -> None:
    engine = make()
    engine.add("session", prompt(43), 5, resumable=True)
    engine.run()
    for turn in range(3):
        engine.add_to_session("session", prompt(37, seed=turn + 1), 5)
        engine.run()
    kept = list(engine.requests["session"]._all_token_ids)
    engine.abort("session")
    engine.flush_hbm()
    engine.serve("again", kept)
    assert engine.offered("again") == [(len(kept) - 1) // 16 * 16]
