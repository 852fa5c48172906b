"""A prompt whose chunks are on SSD only."""

from __future__ import annotations

from harness import Engine, prompt
from saria_vllm.policy.index import Prefix

TOKENS = prompt(161)
"""10 chunks and a token to compute."""


def fill(engine: Engine, name: str, seed: int = 1) -> None:
    """Push TOKENS out of HBM and DRAM, with prompts of these seeds."""
    for number in range(8):
        engine.serve(f"{name} {number}", prompt(81, seed=seed + number), 12)
    engine.flush_hbm()
    assert in_tiers(engine) == (0, 160)


def in_tiers(engine: Engine) -> tuple[int, int]:
    """Tokens of TOKENS that would come from (DRAM, SSD)."""
    keys = engine.keys(engine.requests["cold"])[:10]
    assert engine.side.tiers.match(Prefix(keys), 0, 10, engine.now) == 10
    return engine.side.tiers.tier_tokens(Prefix(keys), 0, 10)
