"""Lengths that break other tiers: whole blocks, chunked prefill, generated tokens. Block = chunk = 32 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from models import ensure_model
from reloading import connector, make_prompt, reload
from server import Server

pytestmark = pytest.mark.vllm

BLOCK = 32
BATCH = 64
OPTIONS = [
    "--max-model-len", "2048", "--max-num-seqs", "4", "--block-size", str(BLOCK),
    "--max-num-batched-tokens", str(BATCH),
]  # fmt: skip


class Pair:
    """Right answers from an engine without us, asked before ours starts: one engine at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = ensure_model("llama-small")
        self.right: dict[tuple[int, ...], list[int]] = {}
        whole = [make_prompt(100 + k, k * BLOCK) for k in range(1, 7)]
        chunked = [make_prompt(200 + n, n) for n in (60, 65, 200, 1000)]
        self.turn1 = make_prompt(300, 100)
        with Server(self.model, OPTIONS, log=folder / "plain.log") as server:
            for prompt in [*whole, *chunked]:
                self.right[tuple(prompt)] = server.complete(prompt).token_ids
            self.answer1 = server.complete(self.turn1, 50).token_ids
            self.turn2 = [*self.turn1, *self.answer1, *make_prompt(301, 50)]
            self.right[tuple(self.turn2)] = server.complete(self.turn2).token_ids
        self.whole, self.chunked = whole, chunked


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def server(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ours")
    config = connector({"dram_capacity": "64MiB", "chunk_tokens": BLOCK})
    with Server(pair.model, OPTIONS, log=folder / "server.log", connector=config) as server:
        yield server


def check_hit(pair: Pair, server: Server, prompt: list[int]) -> None:
    hit = reload(server, prompt)
    assert hit.answer.token_ids == pair.right[tuple(prompt)]
    assert hit.answer.cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
    assert (hit.bytes_from("dram") > 0) == (len(prompt) > BLOCK)


def test_b08_prompts_of_whole_blocks(pair: Pair, server: Server) -> None:
    for prompt in pair.whole:
        assert server.complete(prompt).token_ids == pair.right[tuple(prompt)]
        check_hit(pair, server, prompt)
    longest = pair.whole[-1]
    # HBM holds half, we hold all: together they cover the whole prompt.
    server.reset_prefix_cache()
    server.complete(longest[: 3 * BLOCK], 1)
    answer = server.complete(longest)
    assert answer.token_ids == pair.right[tuple(longest)]
    assert answer.cached_tokens == len(longest) - BLOCK


@pytest.mark.parametrize("interleaved", [False, True])
def test_b09_every_step_of_a_chunked_prefill_is_stored(pair: Pair, server: Server, interleaved: bool) -> None:
    server.reset_prefix_cache(external=True)
    for number, prompt in enumerate(pair.chunked):
        others = [make_prompt(5000 + 10 * number + other, 300) for other in range(2 * interleaved)]
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(server.complete, [prompt, *others]))
        assert answers[0].cached_tokens == 0
        check_hit(pair, server, prompt)


def test_b55_generated_tokens_hit_in_the_next_turn(pair: Pair, server: Server) -> None:
    assert server.complete(pair.turn1, 50).token_ids == pair.answer1
    hit = reload(server, pair.turn2)
    assert hit.answer.token_ids == pair.right[tuple(pair.turn2)]
    # The last of turn 1's 150 tokens was sampled but never computed.
    assert hit.answer.cached_tokens == 149 // BLOCK * BLOCK
    assert hit.bytes_from("dram") > 0
