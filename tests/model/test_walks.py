"""Long random walks of the machines that Hypothesis drives."""

from __future__ import annotations

import random

import pytest
from test_tiers_model import ADMISSIONS, PATHS, TiersMachine, TwoGroupsMachine

from saria_vllm.types import LoadJob, PersistJob, StoreJob


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("machine", [TiersMachine, TwoGroupsMachine])
def test_a_long_random_walk_over_the_same_rules(machine: type[TiersMachine], seed: int) -> None:
    """Hypothesis finds small failures and shrinks them; a long walk gets to full tiers and many retired segments."""
    walk(machine(), random.Random(seed), steps=500)


def walk(model: TiersMachine, rng: random.Random, steps: int) -> None:
    model.build(
        ranks=rng.choice([1, 2]),
        slabs=rng.choice([1, 2, 3]),
        headroom=rng.choice([1, 2, 4]),
        admission=rng.choice(ADMISSIONS),
        persists_max=rng.choice([1, 2, 8]),
        ghosts_max=rng.choice([1, 100]),
        with_ssd=True,
        second_chance=rng.choice([1.0, 0.3, 0.0]),
    )
    failing = [()] * 20 + [(0,), (1, 2), (3,)]
    for _ in range(steps):
        path, first, length = rng.choice(PATHS), rng.choice([0, 0, 0, 1, 2]), rng.choice([6, 6, 3, 1])
        match rng.choice(
            ["store"] * 3 + ["load"] * 3 + ["promote", "arrive", "room", "room"] + ["run"] * 9 + ["all", "rare"]
        ):
            case "store":
                model.store(path=path, first=first, length=length)
            case "load":
                model.load(path=path, first=first, length=length)
            case "promote":
                model.promote(path=path, first=first, length=length)
            case "arrive":
                model.arrive(path=path, reused=rng.randrange(7))
            case "room":
                model.make_room(seconds=rng.choice([0.0, 1.0, 20.0]), more=rng.choice([0, 0, 1, 3]))
            case "run" if model.flights:
                model.run_rank(job=rng.randrange(999), rank=rng.randrange(2), failing=rng.choice(failing))
            case "all" if model.flights:
                model.run_all(kind=rng.choice([StoreJob, PersistJob, LoadJob, object]))
            case "rare":
                if rng.random() < 0.3:
                    model.rot(rank=rng.randrange(2), place=rng.randrange(999))
                elif rng.random() < 0.1:
                    model.reset()
        model.check()
    model.teardown()
