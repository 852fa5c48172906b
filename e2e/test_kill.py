"""`kill -9` of the server in the middle of SSD writes: restarts work, nothing wrong is returned, little is lost."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest

from models import ensure_model
from reloading import connector, counters, killed_while_asked, make_prompt, reload, said
from saria_vllm.cli.replay_drive import parse_counters
from server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3600)]

ROUNDS = 20
CHECKED = 6
CHUNK_TOKENS = 128
ANSWER_TOKENS = 16
FOUND_SHARE_MIN = 0.95


def serve(model: Path, folder: Path, ssd: Path | None) -> Server:
    extra = {
        "dram_capacity": "6MiB",
        "ssd_paths": [str(ssd)],
        "ssd_capacity": "4GiB",
        "chunk_tokens": CHUNK_TOKENS,
        "admission": "full_duplicate",
    }
    arguments = ["--max-model-len", "2048", "--max-num-seqs", "4"]
    return Server(model, arguments, log=folder / "server.log", connector=connector(extra) if ssd else None)


def on_ssd(now: dict[str, float]) -> float:
    """Chunks that a lookup can find on SSD."""
    return now.get("recovered_chunks", 0) + now.get("persisted_chunks", 0) - now.get("retired_chunks", 0)


def test_kill_9_during_ssd_writes(tmp_path: Path) -> None:
    model = ensure_model("llama-small")
    checked = [make_prompt(seed, 5 * CHUNK_TOKENS + 5) for seed in range(CHECKED)]
    with serve(model, tmp_path, None) as server:
        right = [said(server.complete(prompt, ANSWER_TOKENS)) for prompt in checked]
    ssd, rng = tmp_path / "ssd", random.Random(0)
    ssd.mkdir()
    visible, lost_most, killed_writing = 0.0, 0.0, 0
    for round_number in range(ROUNDS):
        server = serve(model, tmp_path, ssd)
        server.start()
        try:
            position = round_number % CHECKED
            hit = reload(server, checked[position])
            assert said(hit.answer) == right[position]
            found = counters(server).get("recovered_chunks", 0)
            assert found >= FOUND_SHARE_MIN * visible, f"round {round_number}: {found} of {visible} chunks found"
            lost_most = max(lost_most, 1 - found / visible if visible else 0.0)
            hits = [reload(server, prompt) for prompt in checked]
            assert [said(hit.answer) for hit in hits] == right
            assert round_number == 0 or sum(hit.bytes_from("ssd") for hit in hits) > 0, "nothing came from SSD"
            before, visible = write_until_killed(server, 1000 * (round_number + 1), rng.uniform(0.3, 2.0))
            killed_writing += visible > before
        finally:
            server.stop()
    print(f"killed {ROUNDS} times, {killed_writing} after new writes; lost at most {lost_most:.2%} of what was visible")
    assert killed_writing >= ROUNDS // 2


def write_until_killed(server: Server, seed: int, seconds: float) -> tuple[float, float]:
    """Ask new prompts without a pause, kill in the middle; chunks on SSD before, and when last seen."""
    before = on_ssd(parse_counters(server.metrics()))
    prompts = (make_prompt(number, 8 * CHUNK_TOKENS) for number in itertools.count(seed))
    with killed_while_asked(server, prompts):
        time.sleep(seconds)
        last = on_ssd(parse_counters(server.metrics()))
    return before, last
