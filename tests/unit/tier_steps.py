"""Steps of `Tiers` in short words, for its tests: one group, one slab, one drive, jobs that end when told to."""

from __future__ import annotations

from collections.abc import Sequence

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.admission import make_admission
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.policy.tiers import Tiers
from saria_vllm.types import GroupShape, JobResult, LoadJob, PersistJob, StoreJob

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
) -> Tiers:
    """One group, one slot per slab cell, one drive."""
    return Tiers(
        [GroupShape(0, 16, 1, RECORD)],
        SlotAllocator(1, [slots]),
        ExtentAllocator(1, segments_max, [records]) if ssd else None,
        make_admission(admission or AdmissionConfig(policy="full_duplicate")),
        ghosts_max=ghosts_max,
        headroom=[headroom],
        persist_bytes_max=persist_records * RECORD,
        ranks=ranks,
    )


def blocks(first: int, end: int, groups: int = 1) -> list[list[tuple[int, ...]]]:
    return [[(position,) for position in range(first, end)] for _ in range(groups)]


def plan_store(tiers: Tiers, keys: Sequence[bytes], first: int = 0, end: int | None = None) -> StoreJob:
    end = len(keys) if end is None else end
    job, went_on = tiers.plan_store(keys, first, end, blocks(first, end, len(tiers.shapes)))
    assert job is not None
    assert went_on == end
    return job


def plan_load(tiers: Tiers, keys: Sequence[bytes], first: int = 0, end: int | None = None) -> LoadJob:
    end = len(keys) if end is None else end
    assert tiers.match(keys, first, end) == end
    return tiers.plan_load("r", keys, first, end, blocks(first, end, len(tiers.shapes)))


def end(
    tiers: Tiers,
    *jobs: StoreJob | LoadJob | PersistJob,
    failed: tuple[int, ...] = (),
    now: float = 0.0,
    reason: str = "checksum",
) -> None:
    for job in jobs:
        tiers.finished(JobResult(job.job_id, failed, reason if failed else ""), now)
        tiers.check()


def store(tiers: Tiers, keys: Sequence[bytes], first: int = 0) -> None:
    end(tiers, plan_store(tiers, keys, first))


def evict_all(tiers: Tiers, now: float = 0.0) -> list[PersistJob]:
    """Ask for more room than there is."""
    headroom, tiers._headroom = tiers._headroom, [10**6] * len(tiers.shapes)
    jobs = tiers.make_room(now)
    tiers._headroom = headroom
    tiers.check()
    return jobs


def eviction_order(tiers: Tiers, group: int = 0) -> list[bytes]:
    index, keys = tiers.index, []
    row = index.oldest(group)
    while row != -1:
        keys.append(index.key[row])
        row = index._newer[row]
    return keys


def on_ssd(tiers: Tiers, keys: Sequence[bytes]) -> None:
    store(tiers, keys)
    end(tiers, *tiers.make_room(0.0))
    assert evict_all(tiers) == []
