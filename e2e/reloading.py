"""What the reload tests share: prompts, a server with our connector, and proof of which tier was read."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models import VOCAB
from saria_vllm.cli.replay_drive import parse_counters
from server import Answer, Server

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Kind:
    """A model and how to serve it."""

    model: str
    chunk_tokens: int
    prefix_chunks: int
    dram_capacity: str
    """Holds two prompts, not three."""
    launcher: tuple[str, ...] = ("-m", "vllm.entrypoints.cli.main")
    arguments: tuple[str, ...] = ()
    compare_with_local_hit: bool = False
    """Whether the right answer is that of a local prefix hit rather than of a cold run (MLA: other kernels)."""


KINDS = {
    "llama": Kind("llama-small", 128, 5, "6MiB"),
    "mla": Kind(
        "deepseek-v2",
        64,
        10,
        "16MiB",
        launcher=(str(HERE / "serve_prefix_caching.py"),),
        arguments=("--enable-prefix-caching",),
        compare_with_local_hit=True,
    ),
}


def make_prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(tokens)]


def connector(extra: Mapping[str, Any], policy: str = "recompute") -> dict[str, Any]:
    """A `--kv-transfer-config` with our connector."""
    return {
        "kv_connector": "SariaConnector",
        "kv_connector_module_path": "saria_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": dict(extra),
    }


def counters(server: Server) -> dict[str, float]:
    """Our counters once they stand still: the last step's arrive a moment after the answer."""
    last: dict[str, float] = {}
    for _ in range(50):
        now = parse_counters(server.metrics())
        if now == last:
            break
        last = now
        time.sleep(0.2)
    return last


Right = tuple[tuple[int, ...], tuple[float, ...]]


def said(answer: Answer) -> Right:
    """Tokens and their log-probabilities, to the last bit: in tokens alone random models hardly notice wrong KV."""
    return tuple(answer.token_ids), tuple(answer.logprobs)


@dataclass
class Reload:
    answer: Answer
    moved: dict[str, float] = field(default_factory=dict)
    """Counter differences over the request."""

    def bytes_from(self, tier: str) -> float:
        return self.moved.get(f'load_bytes{{tier="{tier}"}}', 0.0)

    def errors(self, reason: str) -> float:
        return self.moved.get(f'errors{{reason="{reason}"}}', 0.0)


def reload(server: Server, prompt: Sequence[int], max_tokens: int = 16) -> Reload:
    """Ask with an HBM that has forgotten everything, and tell what the tiers did."""
    server.reset_prefix_cache()
    before = counters(server)
    answer = server.complete(prompt, max_tokens)
    after = counters(server)
    return Reload(answer, {name: value - before.get(name, 0.0) for name, value in after.items()})


def data_files(ssd: Path) -> list[Path]:
    return sorted(ssd.rglob("seg-*.data"))
