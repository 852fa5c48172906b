"""Steps of `Tiers` in short words, for its tests: a slab for each group, jobs that end when told to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.admission import make_admission
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.policy.tiers import Tiers
from saria_vllm.types import GroupShape, Ints, JobResult, LoadJob, PersistJob, StoreJob

RECORD = 4096
KEYS = [b"k%d" % i for i in range(12)]
DRAM_ONLY = AdmissionConfig(policy="dram_only")


def make_tiers(
    slots: int = 8,
    *,
    admission: AdmissionConfig | None = None,
    headroom: int = 2,
    persist_records: int = 8,
    segments_max: int = 4,
    records: int = 2,
    ranks: int = 1,
    ssd: bool = True,
    ghosts_max: int = 100,
    drives: int = 1,
    record_bytes: Sequence[int] = (RECORD,),
    second_chance: float = 0.0,
) -> Tiers:
    """One slot per slab cell; by default one group and one drive."""
    groups = len(record_bytes)
    return Tiers(
        [GroupShape(group, 16, 1, nbytes) for group, nbytes in enumerate(record_bytes)],
        SlotAllocator(groups, [slots] * groups),
        ExtentAllocator(drives, segments_max, [records] * groups) if ssd else None,
        make_admission(admission or AdmissionConfig(policy="full_duplicate"), 16),
        ghosts_max=ghosts_max,
        headroom=[headroom] * groups,
        persist_bytes_max=persist_records * RECORD,
        ranks=ranks,
        second_chance=second_chance,
    )


def blocks(first: int, end: int, groups: int = 1) -> list[Ints]:
    return [np.arange(first, end, dtype=np.int32).reshape(-1, 1) for _ in range(groups)]


def match(tiers: Tiers, keys: Sequence[bytes], first: int, end: int, now: float = 0.0) -> int:
    return tiers.match(Prefix(keys), first, min(end, len(keys)), now)


def tier_tokens(tiers: Tiers, keys: Sequence[bytes], first: int, end: int) -> tuple[int, int]:
    return tiers.tier_tokens(Prefix(keys), first, end)


def touch(tiers: Tiers, keys: Sequence[bytes], end: int, reused: int) -> None:
    tiers.touch(Prefix(keys), end, reused, 0.0)


def is_loading(tiers: Tiers, key: bytes) -> bool:
    return tiers.is_loading(Prefix([key]), 0)


def plan_store(tiers: Tiers, keys: Sequence[bytes], first: int = 0, end: int | None = None) -> StoreJob:
    end = len(keys) if end is None else end
    job, went_on = tiers.plan_store(Prefix(keys), first, end, blocks(first, end, len(tiers.shapes)), 0.0)
    assert job is not None
    assert went_on == end
    return job


def plan_load(tiers: Tiers, keys: Sequence[bytes], first: int = 0, end: int | None = None) -> LoadJob:
    end = len(keys) if end is None else end
    prefix = Prefix(keys)
    assert tiers.match(prefix, first, end, 0.0) == end
    tiers.touch(prefix, end, 0, 0.0)
    return tiers.plan_load("r", prefix, first, end, blocks(first, end, len(tiers.shapes)), 0.0)


def end(
    tiers: Tiers,
    *jobs: StoreJob | LoadJob | PersistJob,
    failed: tuple[int, ...] = (),
    now: float = 0.0,
    reason: str = "checksum",
) -> None:
    for job in jobs:
        tiers.finished([JobResult(job.job_id, failed, reason if failed else "")], now)
        tiers.check()


def store(tiers: Tiers, keys: Sequence[bytes], first: int = 0) -> None:
    end(tiers, plan_store(tiers, keys, first))


def evict_all(tiers: Tiers, now: float = 0.0) -> list[PersistJob]:
    """Ask for more room than there is."""
    headroom, tiers.evictor.headroom = tiers.evictor.headroom, [10**6] * len(tiers.shapes)
    tiers.evictor._enough_at = -1
    jobs = tiers.make_room(now)
    tiers.evictor.headroom = headroom
    tiers.check()
    return jobs


def keys_of(jobs: Sequence[PersistJob]) -> list[bytes]:
    return [key for job in jobs for key in job.keys]


def eviction_order(tiers: Tiers, group: int = 0) -> list[bytes]:
    index, order = tiers.chunks.index, tiers.chunks.recency[group].order()
    return [index.key[row] for row in order if index.evictable(np.array([row]))[0]]


def on_ssd(tiers: Tiers, keys: Sequence[bytes]) -> None:
    store(tiers, keys)
    end(tiers, *tiers.make_room(0.0))
    assert evict_all(tiers) == []
