"""Answers after a reload are those of an engine without us: from DRAM, SSD, both, after a restart, with bad bytes.

Scheduler and worker halves run in separate processes here. fp32, one request at a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from models import ensure_model
from reloading import (
    KINDS,
    Kind,
    Right,
    connector,
    counters,
    data_files,
    flip_a_bit,
    make_prompt,
    records,
    reload,
    said,
    whole_prefixes,
)
from saria_vllm.storage.format import HEADER_BYTES, index_offset, parse_header, record_offset
from server import Server

pytestmark = pytest.mark.vllm

PROMPTS = 5
LONGER_CHUNKS = 3
ANSWER_TOKENS = 16


class Rig:
    """One model, its right answers, and a directory that outlives servers."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self.folder, self.ssd = kind, folder, folder / "ssd"
        self.model = ensure_model(kind.model)
        self.ssd.mkdir()
        tokens = kind.prefix_chunks * kind.chunk_tokens
        longer = LONGER_CHUNKS * kind.chunk_tokens
        # Five tokens more than whole chunks: a local hit and ours then end at the same token.
        self.prompts = [make_prompt(seed, tokens + 5) for seed in range(PROMPTS)]
        self.prompts.append(self.prompts[0] + make_prompt(99, longer))
        self.right: list[Right] = []
        """Answers to a request that hits; where the kernels are the same, those of a cold one, too."""
        self.cold: list[Right] = []
        self.behind_half: list[Right] = []
        """Answers to a request whose first half of the chunks hits."""
        self.dram_hit_tokens = tokens
        self.half_chunks = kind.prefix_chunks // 2

    def server(self, with_connector: bool, promotion: float | str = 0) -> Server:
        """Without promotion, so that what is asked for again comes from SSD again."""
        extra = {
            "dram_capacity": self.kind.dram_capacity,
            "ssd_paths": [str(self.ssd)],
            "ssd_capacity": "1GiB",
            "chunk_tokens": self.kind.chunk_tokens,
            "admission": "full_duplicate",
            "promotion": promotion,
        }
        return Server(
            self.model,
            ["--max-model-len", "2048", "--max-num-seqs", "4", *self.kind.arguments],
            log=self.folder / "server.log",
            connector=connector(extra) if with_connector else None,
            launcher=self.kind.launcher,
        )

    def learn(self) -> None:
        with self.server(with_connector=False) as server:
            for prompt in self.prompts:
                server.reset_prefix_cache()
                if prompt is self.prompts[PROMPTS]:  # Ours, too, computes its end behind a hit.
                    server.complete(self.prompts[0], 1)
                answer = server.complete(prompt, ANSWER_TOKENS)
                self.cold.append(said(answer))
                # Over a long prefix low bits of attention may hang on how many tokens are computed at once: ours
                # computes the last five only, and so must what it is compared with.
                if self.kind.compare_with_local_hit or prompt is self.prompts[PROMPTS]:
                    answer = server.complete(prompt, ANSWER_TOKENS)
                    assert answer.cached_tokens == len(prompt) - 5
                self.right.append(said(answer))
                half_tokens = self.half_chunks * self.kind.chunk_tokens
                server.reset_prefix_cache()
                server.complete(prompt[: half_tokens + 5], 1)
                answer = server.complete(prompt, ANSWER_TOKENS)
                assert answer.cached_tokens == half_tokens
                self.behind_half.append(said(answer))
        assert len(set(self.right)) == len(self.prompts), "answers do not tell prompts apart"


SLOW = ("mla",)


@pytest.fixture(scope="module", params=[pytest.param(k, marks=pytest.mark.slow if k in SLOW else ()) for k in KINDS])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    rig = Rig(KINDS[request.param], tmp_path_factory.mktemp(request.param))
    rig.learn()
    return rig


@pytest.fixture(scope="module")
def first_server(rig: Rig) -> Iterator[Server]:
    """Has seen every prompt but the longer one once; DRAM holds the last few only."""
    with rig.server(with_connector=True) as server:
        for prompt in rig.prompts[:PROMPTS]:
            server.complete(prompt, ANSWER_TOKENS)
        yield server


def test_dram_ssd_and_mixed_hits_answer_as_without_us(rig: Rig, first_server: Server) -> None:
    last = PROMPTS - 1
    hit = reload(first_server, rig.prompts[last])
    assert hit.answer.cached_tokens == rig.dram_hit_tokens
    assert said(hit.answer) == rig.right[last]
    assert hit.bytes_from("dram") > 0
    assert hit.bytes_from("ssd") == 0

    hit = reload(first_server, rig.prompts[0])
    assert said(hit.answer) == rig.right[0]
    assert hit.answer.cached_tokens == rig.dram_hit_tokens
    assert hit.bytes_from("ssd") > 0
    assert hit.bytes_from("dram") == 0

    longer = rig.prompts[PROMPTS]
    first_server.complete(longer, ANSWER_TOKENS)
    hit = reload(first_server, longer)
    assert said(hit.answer) == rig.right[PROMPTS]
    assert hit.answer.cached_tokens == len(longer) - 5
    assert hit.bytes_from("dram") > 0
    assert hit.bytes_from("ssd") > 0
    assert counters(first_server).get('loads{result="failed"}', 0) == 0


def test_reset_of_our_cache_forgets_both_tiers(rig: Rig, first_server: Server) -> None:
    """Runs before the restart test: what comes after a reset in a running engine is not kept over a restart."""
    if rig.kind is not KINDS["llama"]:
        pytest.skip("one model is enough for the reset; it is independent of the KV's kind")
    first_server.reset_prefix_cache(external=True)
    hit = reload(first_server, rig.prompts[0])
    assert said(hit.answer) == rig.right[0]
    assert hit.answer.cached_tokens == 0
    hit = reload(first_server, rig.prompts[0])
    assert said(hit.answer) == rig.right[0]
    assert hit.answer.cached_tokens == rig.dram_hit_tokens


@pytest.fixture(scope="module")
def restarted(rig: Rig, first_server: Server) -> Iterator[Server]:
    """A second server on the directory of a first one that was stopped."""
    if rig.kind is KINDS["llama"]:
        first_server.reset_prefix_cache(external=True)  # Also where the test of the reset was not chosen to run.
    first_server.stop()
    if rig.kind is KINDS["llama"]:  # After the reset above nothing on SSD may be used again; fill it anew.
        with rig.server(with_connector=True) as server:
            assert reload(server, rig.prompts[0]).answer.cached_tokens == 0
            for prompt in rig.prompts:
                server.complete(prompt, ANSWER_TOKENS)
            counters(server)
    with rig.server(with_connector=True) as server:
        yield server


def test_restart_finds_the_ssd_tier(rig: Rig, restarted: Server) -> None:
    hit = reload(restarted, rig.prompts[1])
    assert said(hit.answer) == rig.right[1]
    assert hit.answer.cached_tokens == rig.dram_hit_tokens
    assert hit.bytes_from("ssd") > 0
    assert hit.bytes_from("dram") == 0
    assert counters(restarted)["recovered_chunks"] >= PROMPTS * rig.kind.prefix_chunks


def test_b24_after_one_corrupted_record_the_prefix_before_it_is_used(rig: Rig, restarted: Server) -> None:
    if rig.kind is not KINDS["llama"]:
        pytest.skip("MLA's bits depend on the batch that computed the KV; with all records corrupted it is compared")
    good, all_chunks = rig.half_chunks, rig.kind.prefix_chunks
    record_bytes = corrupt_chunk_of_one_prompt(rig, good)
    hits = {position: reload(restarted, rig.prompts[position]) for position in range(PROMPTS)}
    for position, hit in hits.items():
        right = rig.behind_half if hit.errors("checksum") else rig.right
        assert said(hit.answer) == right[position]
    (bad,) = (position for position, hit in hits.items() if hit.errors("checksum"))
    hit = hits[bad]
    assert hit.errors("checksum") == 1
    assert hit.moved['loads{result="failed"}'] == hit.moved['loads{result="loaded"}'] == 1
    assert hit.moved['hit_tokens{tier="ssd"}'] == good * rig.kind.chunk_tokens, "what comes after it is recomputed"
    assert hit.moved["stored_chunks"] == 1, "all but the bad one are on SSD still"
    again = reload(restarted, rig.prompts[bad])
    assert said(again.answer) == rig.right[bad]
    assert again.errors("checksum") == 0
    assert again.answer.cached_tokens == rig.dram_hit_tokens
    assert again.bytes_from("dram") == record_bytes
    assert again.bytes_from("ssd") == (all_chunks - 1) * record_bytes


def corrupt_chunk_of_one_prompt(rig: Rig, place: int) -> int:
    """Flip one bit in chunk `place` of a prompt that shares no chunk with another; bytes of a record."""
    path, header, entry = whole_prefixes(records(rig.ssd), rig.kind.prefix_chunks)[0][place]
    with path.open("r+b") as file:
        flip_a_bit(file, record_offset(header.record_bytes, entry.record) + 1000)
        os.fsync(file.fileno())
    return header.record_bytes


def test_b24_a_corrupted_record_is_recomputed_and_never_offered_again(rig: Rig, restarted: Server) -> None:
    flip_a_bit_in_every_record(rig)
    hit = reload(restarted, rig.prompts[2])
    assert said(hit.answer) == rig.cold[2]
    bad = hit.errors("checksum")
    assert 1 <= bad <= rig.kind.prefix_chunks, "each bad record is read once"
    hit = reload(restarted, rig.prompts[2])
    assert said(hit.answer) == rig.right[2]
    assert hit.errors("checksum") == 0
    assert hit.answer.cached_tokens == rig.dram_hit_tokens, "the recomputed chunks were stored again"


def flip_a_bit_in_every_record(rig: Rig) -> None:
    """One bit in every 64 KiB of the data: every record has at least one bad byte."""
    for path in data_files(rig.ssd):
        with path.open("r+b") as file:
            for offset in range(HEADER_BYTES + 1000, os.path.getsize(path), 65536):
                flip_a_bit(file, offset)
            os.fsync(file.fileno())


def test_every_data_byte_overwritten_between_two_servers(rig: Rig, restarted: Server) -> None:
    restarted.stop()
    paths = data_files(rig.ssd)
    assert paths
    for path in paths:
        with path.open("r+b") as file:
            end = index_offset(parse_header(file.read(HEADER_BYTES)))
            file.seek(HEADER_BYTES)
            file.write(os.urandom(end - HEADER_BYTES))
    with rig.server(with_connector=True) as server:
        for position in range(PROMPTS):
            server.reset_prefix_cache()
            assert said(server.complete(rig.prompts[position], ANSWER_TOKENS)) == rig.cold[position]
        after = counters(server)
        assert after.get('hit_tokens{tier="ssd"}', 0) == 0
        assert after['errors{reason="checksum"}'] > 0, "the index survived: the bytes were read and refused"


def test_what_came_from_ssd_is_partly_promoted_and_both_tiers_serve_it_next(rig: Rig, restarted: Server) -> None:
    restarted.stop()
    with rig.server(with_connector=True, promotion=0.5) as server:
        for prompt in rig.prompts[:PROMPTS]:
            server.complete(prompt, ANSWER_TOKENS)
        for _ in range(2):
            hit = reload(server, rig.prompts[0])
            assert said(hit.answer) == rig.right[0]
        assert hit.answer.cached_tokens == rig.dram_hit_tokens
        assert counters(server)["promoted_chunks"] > 0
        assert hit.bytes_from("ssd") > 0 and hit.bytes_from("dram") > 0


def test_b24_b39_files_cut_short_and_removed_under_a_live_engine(rig: Rig) -> None:
    if rig.kind is not KINDS["llama"]:
        pytest.skip("one model is enough for files that go; it is independent of the KV's kind")
    with rig.server(with_connector=True) as server:
        hit = reload(server, rig.prompts[0])
        assert said(hit.answer) == rig.right[0]
        assert hit.bytes_from("ssd") > 0, "what the server before stored is there"
        for path in data_files(rig.ssd):
            os.truncate(path, HEADER_BYTES)
        hit = reload(server, rig.prompts[1])
        assert said(hit.answer) == rig.cold[1]
        assert hit.errors("read_failed") > 0
        hit = reload(server, rig.prompts[1])
        assert said(hit.answer) == rig.right[1]
        assert hit.errors("read_failed") == 0
        shutil.rmtree(rig.ssd)
        for position in (2, 3, 4, 0, 1, 2):
            assert said(reload(server, rig.prompts[position]).answer) in (rig.cold[position], rig.right[position])
