"""Ways to select the connector, what it refuses, and features of vLLM that it must live with, on real servers."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from models import ensure_model
from reloading import connector, counters, make_prompt, reload
from server import Server, ServerDied

pytestmark = pytest.mark.vllm

CHUNK_TOKENS = 128
OPTIONS = ["--max-model-len", "2048", "--max-num-seqs", "4"]


def installed() -> bool:
    return any(entry.name == "saria" for entry in importlib.metadata.entry_points(group="vllm.general_plugins"))


def test_by_name_inside_multiconnector_with_ngram_speculation(tmp_path: Path) -> None:
    """Speculation and generated tokens: turn 2 reloads turn 1's answer, and says what a plain engine says."""
    if not installed():
        pytest.skip("the saria-vllm package is not installed here, so vLLM knows no SariaConnector by name")
    model = ensure_model("llama-small")
    first = make_prompt(1, 3 * CHUNK_TOKENS - 40)
    with Server(model, OPTIONS, log=tmp_path / "plain.log") as server:
        answer = server.complete(first, 60)
        second = [*first, *answer.token_ids, *make_prompt(2, 50)]
        right = server.complete(second, 60)
    (tmp_path / "ssd").mkdir()
    ours: dict[str, Any] = connector(
        {
            "dram_capacity": "32MiB",
            "ssd_paths": [str(tmp_path / "ssd")],
            "ssd_capacity": "256MiB",
            "chunk_tokens": CHUNK_TOKENS,
            "admission": "full_duplicate",
        }
    )
    del ours["kv_connector_module_path"], ours["kv_load_failure_policy"]
    other: dict[str, Any] = connector({"dram_capacity": "32MiB", "chunk_tokens": CHUNK_TOKENS})
    del other["kv_load_failure_policy"]
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, other]},
    }
    speculation = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
    options = [*OPTIONS, "--speculative-config", speculation]
    with Server(model, options, log=tmp_path / "multi.log", connector=multi) as server:
        assert server.complete(first, 60).token_ids == answer.token_ids
        hit = reload(server, second, 60)
        assert hit.answer.token_ids == right.token_ids
        assert hit.answer.cached_tokens == (len(first) + 59) // CHUNK_TOKENS * CHUNK_TOKENS
        assert hit.bytes_from("dram") > 0
        lines = server.metrics().splitlines()
        drafts = [line for line in lines if line.startswith("vllm:spec_decode_num_drafts_total")]
        assert float(drafts[0].rpartition(" ")[2]) > 0, "no draft was made, so nothing was tested"
        assert counters(server)["stored_chunks"] >= 2 * 3, "both children store"


REFUSED = {
    "unknown key": ("llama-small", {"dram_capacity": "64MiB", "dram_capasity": "1GiB"}, "did you mean dram_capacity?"),
    "size without a unit": ("llama-small", {"dram_capacity": "64"}, "dram_capacity: '64' is not a size"),
    "recurrent layers": ("qwen3-next", {"dram_capacity": "64MiB"}, "full attention and MLA only so far"),
    "sliding windows": ("gemma3", {"dram_capacity": "64MiB"}, "full attention and MLA only so far"),
}


SLOW = ("sliding windows", "size without a unit")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in REFUSED])
def test_refused_at_start_with_one_clear_line(name: str, tmp_path: Path) -> None:
    model, extra, message = REFUSED[name]
    dtype = "bfloat16" if model == "qwen3-next" else "float32"
    server = Server(ensure_model(model), OPTIONS, log=tmp_path / "log", connector=connector(extra), dtype=dtype)
    with pytest.raises(ServerDied):
        server.start()
    lines = [line for line in server.log.read_text().splitlines() if "SARIA cannot start" in line]
    assert lines
    assert message in lines[0]
