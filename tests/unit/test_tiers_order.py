"""`Tiers`: the order in which chunks leave DRAM, whatever came before."""

from __future__ import annotations

import random

import pytest

from saria_vllm.policy import chunks
from saria_vllm.policy.index import Prefix
from tier_steps import DRAM_ONLY, blocks, end, eviction_order, make_tiers, match, plan_load, touch


def orders(seed: int) -> list[list[bytes]]:
    """Eviction orders after random stores, touches, loads and evictions."""
    rng, tiers, seen = random.Random(seed), make_tiers(admission=DRAM_ONLY, slots=16), []
    for _ in range(60):
        keys = [b"%d %d" % (rng.randrange(4), place) for place in range(rng.randrange(1, 5))]
        match rng.randrange(4):
            case 0:
                job, _ = tiers.plan_store(Prefix(keys), 0, len(keys), blocks(0, len(keys)), 0.0)
                end(tiers, *([job] if job else []))
            case 1:
                touch(tiers, keys, len(keys), 0)
            case 2 if match(tiers, keys, 0, len(keys)) == len(keys):
                end(tiers, plan_load(tiers, keys))
            case 3:
                tiers.make_room(0.0)
        tiers.check()
        seen.append(eviction_order(tiers))
    return seen


@pytest.mark.parametrize("epoch_max", [1, 9, 25])
def test_touches_that_outgrow_their_column_are_told_anew(monkeypatch: pytest.MonkeyPatch, epoch_max: int) -> None:
    wanted = [orders(seed) for seed in range(6)]
    monkeypatch.setattr(chunks, "EPOCH_MAX", epoch_max)
    assert [orders(seed) for seed in range(6)] == wanted
