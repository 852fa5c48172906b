"""Two real servers on one SSD directory: each reads what the other wrote, `kill -9` of one harms nobody, and both stay
within one capacity. fp32; each server has a core of its own.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from models import ensure_model
from reloading import (
    Right,
    connector,
    counters,
    killed_while_asked,
    make_prompt,
    pool_bytes,
    reload,
    said,
    watched,
)
from saria_connector.sharing import LOOK_S
from saria_vllm.config import parse_bytes
from server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

CHUNK_TOKENS = 128
RECORD_BYTES = 256 << 10
CHUNKS = 5
ANSWER_TOKENS = 8
DRAM_CAPACITY = "8MiB"
SSD_CAPACITY = "50MiB"
"""32 segments of six chunks: two servers have 15 each, 18 prompts."""
PROMPTS = 10
WRITING_S = 0.3


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder, self.ssd = folder, folder / "ssd"
        self.ssd.mkdir()
        self.model = ensure_model("llama-small")
        self.right: dict[int, Right] = {}
        """By prompt's seed: what a server said that had not seen it, nor found it."""

    def server(self, name: str, core: int) -> Server:
        extra = {
            "dram_capacity": DRAM_CAPACITY,
            "ssd_paths": [str(self.ssd)],
            "ssd_capacity": SSD_CAPACITY,
            "chunk_tokens": CHUNK_TOKENS,
            "admission": "full_duplicate",
        }
        cores = sorted(os.sched_getaffinity(0))
        return Server(
            self.model,
            ["--max-model-len", "2048", "--max-num-seqs", "4"],
            log=self.folder / f"{name}.log",
            connector=connector(extra),
            cpus=str(cores[core % len(cores)]),
        )

    def ask_first(self, server: Server, seeds: range) -> None:
        """Ask prompts that no server has seen."""
        for seed in seeds:
            answer = server.complete(prompt_of(seed), ANSWER_TOKENS)
            assert answer.cached_tokens == 0
            self.right[seed] = said(answer)

    def engine(self, server: Server) -> Path:
        """The engine directory that a server says it uses."""
        (found,) = re.findall(rf"for each rank, in ({self.ssd}/saria/\w+/e\d+)\n", server.log.read_text())
        return Path(found)


def prompt_of(seed: int) -> list[int]:
    return make_prompt(seed, CHUNKS * CHUNK_TOKENS + 5)


def few_new_prompts(seed: int) -> Iterator[list[int]]:
    """Again and again: more of them would take the room of those that are looked for later."""
    return itertools.cycle([prompt_of(seed + number) for number in range(7)])


def leased(engine: Path) -> bool:
    with (engine / "lease").open("rb") as lease:
        try:
            fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_servers_share_one_directory_and_survive_each_other(tmp_path: Path) -> None:
    """Leases, sealed segments of others, kill -9, orphans, one capacity. B46: sizes are totals."""
    rig = Rig(tmp_path)
    first, second = rig.server("first", 0), rig.server("second", 1)
    capacity_bytes = parse_bytes(SSD_CAPACITY, "ssd_capacity")
    with watched(rig.ssd) as samples:
        try:
            first.start()
            assert pool_bytes(first) == pytest.approx(parse_bytes(DRAM_CAPACITY, "dram_capacity"), rel=0.01)
            rig.ask_first(first, range(PROMPTS))
            second.start()
            engines = rig.engine(first), rig.engine(second)
            assert [engine.name for engine in engines] == ["e0", "e1"]
            assert leased(engines[0]) and leased(engines[1])
            check_that_what_the_other_sealed_is_used(rig, second)

            with killed_while_asked(first, few_new_prompts(1000)):
                time.sleep(WRITING_S)
            assert not leased(engines[0]) and leased(engines[1])
            check_that_an_orphan_is_read(rig, second)

            first = rig.server("first again", 0)
            first.start()
            assert rig.engine(first) == engines[0]
            check_that_its_own_is_found_again(rig, first)

            check_that_both_have_their_part(rig, first, second)
            with killed_while_asked(second, few_new_prompts(2000)):
                time.sleep(WRITING_S)
            first.kill()
            assert not leased(engines[0]) and not leased(engines[1])
            second = rig.server("second again", 1)
            second.start()
            assert rig.engine(second) == engines[0], "whoever comes first takes the first that is free"
            check_that_the_heir_has_both(rig, second)
        finally:
            first.stop()
            second.stop()
    assert capacity_bytes * 0.85 < max(samples) <= capacity_bytes


def check_that_what_the_other_sealed_is_used(rig: Rig, second: Server) -> None:
    """Also by the first request after a long idle time."""
    time.sleep(2 * LOOK_S)
    for seed in range(3):
        hit = reload(second, prompt_of(seed), ANSWER_TOKENS)
        assert said(hit.answer) == rig.right[seed]
        assert hit.answer.cached_tokens == CHUNKS * CHUNK_TOKENS
        assert hit.moved["shared_hits"] == CHUNKS
        assert hit.bytes_from("ssd") == CHUNKS * RECORD_BYTES
        assert hit.bytes_from("dram") == 0
    assert counters(second)["persisted_chunks"] == 0, "what another has on SSD is not written again"
    assert counters(second)["recovered_chunks"] == 0


def check_that_an_orphan_is_read(rig: Rig, second: Server) -> None:
    for seed in range(3, 6):
        hit = reload(second, prompt_of(seed), ANSWER_TOKENS)
        assert said(hit.answer) == rig.right[seed]
        assert hit.moved["shared_hits"] == CHUNKS
    rig.ask_first(second, range(100, 100 + PROMPTS))
    assert counters(second)["persisted_chunks"] > 6 * CHUNKS


def check_that_its_own_is_found_again(rig: Rig, first: Server) -> None:
    """And what the second one wrote in the meantime."""
    time.sleep(2 * LOOK_S)
    for seed in (5, 6, 100, 101):
        hit = reload(first, prompt_of(seed), ANSWER_TOKENS)
        assert said(hit.answer) == rig.right[seed]
        assert hit.bytes_from("ssd") == CHUNKS * RECORD_BYTES
        assert hit.moved["shared_hits"] == (0 if seed < 100 else CHUNKS)
    assert counters(first)["recovered_chunks"] >= 6 * CHUNKS


def check_that_both_have_their_part(rig: Rig, first: Server, second: Server) -> None:
    """Each writes more than its part: what is old goes, and all answers stay right."""
    for start in range(200, 200 + 2 * PROMPTS, 4):
        rig.ask_first(first, range(start, start + 4))
        rig.ask_first(second, range(start + 100, start + 104))
        for server in (first, second):
            for seed in (start - 2, start + 2, start + 98, start + 102):
                if seed in rig.right:
                    assert said(reload(server, prompt_of(seed), ANSWER_TOKENS).answer) == rig.right[seed]
    for server in (first, second):
        after = counters(server)
        assert after["retired_chunks"] > 0
        assert after["shared_hits"] > 0
        after.pop('errors{reason="not_found"}', 0)  # The other may retire what is just about to be read.
        assert not sum(count for name, count in after.items() if name.startswith(("errors", "internal_errors")))


def check_that_the_heir_has_both(rig: Rig, heir: Server) -> None:
    """Of what was written last, and asked of one server only."""
    time.sleep(2 * LOOK_S)
    for seed in (213, 215, 217, 313, 315, 317):
        hit = reload(heir, prompt_of(seed), ANSWER_TOKENS)
        assert said(hit.answer) == rig.right[seed]
        assert hit.bytes_from("ssd") == CHUNKS * RECORD_BYTES
        assert hit.moved["shared_hits"] == (0 if seed < 300 else CHUNKS)
