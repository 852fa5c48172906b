"""What the naive model of `Tiers` knows of bytes, of jobs in flight and of admission."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.index import Prefix
from saria_vllm.types import Extent, Ints, LoadJob, PersistJob, Slot, StoreJob

Plan = Callable[[Prefix, int, int, list[Ints], float], tuple[StoreJob | None, int]]
"""`Tiers.plan_store` or `plan_promote`."""

ADMISSIONS = [
    AdmissionConfig(),
    AdmissionConfig(policy="full_duplicate"),
    AdmissionConfig(policy="saria", evictions=1),
    AdmissionConfig(policy="saria", evictions=2),
    AdmissionConfig(policy="saria", evictions=3),
    AdmissionConfig(policy="saria", evictions=2, reuses=2),
    AdmissionConfig(policy="dram_only"),
    AdmissionConfig(policy="score"),
]

EVICTIONS_MIN = {"full_duplicate": 1, "dram_only": sys.maxsize}
"""On which eviction they write a chunk; `saria` says so itself."""


class Content(NamedTuple):
    group: int
    key: bytes
    generation: int
    sound: bool = True


TORN = Content(-1, b"torn", -1)
"""Bytes of a write that was planned and has not run: nobody may read them."""
Place = tuple[int, Slot | Extent]
"""(group, slot) or (group, extent). A slot of one group has another address than the same slot of another group."""


class Chunk(NamedTuple):
    group: int
    key: bytes


class Flight:
    """A job in flight with the generation it was planned in and the ranks that have not run it yet."""

    def __init__(
        self, job: StoreJob | LoadJob | PersistJob, generation: int, ranks: int, keys: list[bytes] | None = None
    ) -> None:
        self.job, self.generation = job, generation
        self.store_keys = keys or []
        """Keys of a store's items, which the job itself does not carry."""
        self.ranks_left = list(range(ranks))
        self.failed: set[int] = set()

    def slots(self) -> list[tuple[int, Slot]]:
        return [(item.group, item.slot) for item in self.job.items if item.slot is not None]

    def extents(self) -> list[Extent]:
        if isinstance(self.job, StoreJob):
            return []
        return [item.extent for item in self.job.items if item.extent is not None]
