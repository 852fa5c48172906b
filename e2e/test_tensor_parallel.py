"""A real engine of two ranks: capacities are totals of the node, and what not every rank has is a miss."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from models import ensure_model
from reloading import (
    Record,
    Right,
    connector,
    counters,
    flip_a_bit,
    make_prompt,
    pool_bytes,
    records,
    reload,
    said,
    watched,
    whole_prefixes,
)
from saria_vllm.config import parse_bytes
from saria_vllm.storage.format import record_offset
from server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

RANKS = 2
CHUNK_TOKENS = 128
RECORD_BYTES = 128 << 10
"""Of one rank."""
CHUNKS = 5
PROMPTS = 6
FILLERS = 10
FILLER_CHUNKS = 12
ANSWER_TOKENS = 8
DRAM_CAPACITY = "8MiB"
"""Six prompts, not seven."""
SSD_CAPACITY = "25MiB"
"""32 segments of three chunks on each rank; the fillers have more."""


def serve(folder: Path, name: str) -> Server:
    extra = {
        "dram_capacity": DRAM_CAPACITY,
        "ssd_paths": [str(folder / "ssd")],
        "ssd_capacity": SSD_CAPACITY,
        "chunk_tokens": CHUNK_TOKENS,
        "admission": "full_duplicate",
    }
    arguments = ["--max-model-len", "2048", "--max-num-seqs", "4", "--tensor-parallel-size", str(RANKS)]
    cores = sorted(os.sched_getaffinity(0))
    return Server(
        ensure_model("llama-small"),
        arguments,
        log=folder / f"{name}.log",
        connector=connector(extra),
        cpus="|".join(str(cores[rank % len(cores)]) for rank in range(RANKS)),
    )


def prompt_of(seed: int) -> list[int]:
    return make_prompt(seed, CHUNKS * CHUNK_TOKENS + 5)


def test_b46_two_ranks_stay_within_totals_and_agree_on_what_is_there(tmp_path: Path) -> None:
    """Point 4 of the SSD tier, too: a chunk is found only if every rank has it."""
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    with watched(ssd) as samples:
        with serve(tmp_path, "first") as server:
            check_start(server)
            right = fill_and_learn(server)
            check_hits_of_both_tiers(server, right)
        bad = damage(ssd)
        with serve(tmp_path, "second") as server:
            check_after_damage(server, right, bad)
    capacity_bytes = parse_bytes(SSD_CAPACITY, "ssd_capacity")
    assert 0.95 * capacity_bytes < max(samples) <= capacity_bytes


def check_start(server: Server) -> None:
    assert pool_bytes(server) == pytest.approx(parse_bytes(DRAM_CAPACITY, "dram_capacity"), rel=0.01)
    (start,) = re.findall("SARIA: dram_capacity=8.00MiB ssd_capacity=25.00MiB .*", server.log.read_text())
    assert "this engine: 8.00MiB DRAM, 4.00MiB for each of 2 rank(s)" in start
    assert "SSD 12.50MiB for each rank" in start


def fill_and_learn(server: Server) -> list[Right]:
    """More than the SSD tier holds, then the prompts that are checked; their right answers."""
    for seed in range(FILLERS):
        server.complete(make_prompt(100 + seed, FILLER_CHUNKS * CHUNK_TOKENS + 5), 1)
    right = []
    for seed in range(PROMPTS):
        answer = server.complete(prompt_of(seed), ANSWER_TOKENS)
        assert answer.cached_tokens == 0
        right.append(said(answer))
    assert len(set(right)) == PROMPTS
    assert counters(server)["retired_chunks"] > 0, "the cap was reached"
    return right


def check_hits_of_both_tiers(server: Server, right: list[Right]) -> None:
    hits = [reload(server, prompt_of(seed), ANSWER_TOKENS) for seed in reversed(range(PROMPTS))]
    assert [said(hit.answer) for hit in hits] == right[::-1]
    assert {hit.answer.cached_tokens for hit in hits} == {CHUNKS * CHUNK_TOKENS}
    assert hits[0].bytes_from("dram") == hits[-1].bytes_from("ssd") == CHUNKS * RANKS * RECORD_BYTES
    assert hits[0].bytes_from("ssd") == hits[-1].bytes_from("dram") == 0


def damage(ssd: Path) -> list[int]:
    """On one rank each: a segment gone, a header overwritten, one bit of a record flipped. How many chunks are good
    before the first bad one, of each prompt in no order."""
    ranks = [records_of(ssd, rank) for rank in range(RANKS)]
    prefixes = [whole_prefixes(found, CHUNKS) for found in ranks]
    assert [len(found) for found in prefixes] == [PROMPTS] * RANKS
    gone = prefixes[1][0][2][0]
    gone.unlink()
    torn = next(prefix[1][0] for prefix in prefixes[0] if not {gone.name} & {path.name for path, _, _ in prefix})
    with torn.open("r+b") as file:
        file.write(os.urandom(64))
    lost = {gone.name, torn.name}
    depths = [next((at for at, chunk in enumerate(prefix) if chunk[0].name in lost), CHUNKS) for prefix in prefixes[0]]
    assert 0 < sum(depth < CHUNKS for depth in depths) < PROMPTS - 1
    whole = depths.index(CHUNKS)
    depths[whole] = 3
    path, header, entry = prefixes[0][whole][depths[whole]]
    with path.open("r+b") as file:
        flip_a_bit(file, record_offset(header.record_bytes, entry.record))
    return depths


def records_of(ssd: Path, rank: int) -> dict[bytes, Record]:
    (folder,) = ssd.glob(f"saria/*/e0/r{rank}")
    return records(folder)


def check_after_damage(server: Server, right: list[Right], depths: list[int]) -> None:
    hits = [reload(server, prompt_of(seed), ANSWER_TOKENS) for seed in range(PROMPTS)]
    for hit, (tokens, logprobs) in zip(hits, right, strict=True):
        assert hit.answer.token_ids == list(tokens)
        assert hit.answer.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert sorted(hit.answer.cached_tokens // CHUNK_TOKENS for hit in hits) == sorted(depths)
    failed = [hit.moved['loads{result="failed"}'] for hit in hits]
    assert failed == [hit.errors("checksum") for hit in hits], "what a rank lacks is not even asked for"
    assert sum(failed) == 1
    again = [reload(server, prompt_of(seed), ANSWER_TOKENS) for seed in range(PROMPTS)]
    assert [said(hit.answer) for hit in again] == right
    assert {hit.answer.cached_tokens for hit in again} == {CHUNKS * CHUNK_TOKENS}
    assert not any(hit.errors("checksum") for hit in again)
