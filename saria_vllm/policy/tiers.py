"""The brain of both tiers: what is where, what to load, what to evict, what to persist.

Call order of one scheduler step: `match` and `is_loading` (questions, any number of times), `plan_load` for an
allocated hit, `plan_store` for newly computed chunks, `make_room`, then `finished` for every result of every rank.
A job ends when all ranks have reported it. Between plan and end its chunks are leased: their slots are not evicted
and their segments not retired.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from saria_vllm.metrics import Counts, count
from saria_vllm.policy.admission import Admission, Decision
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.ghosts import Ghosts
from saria_vllm.policy.index import BAD, BUSY, NONE, VALID, ChunkIndex
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.types import (
    NULL_BLOCK,
    Extent,
    FoundChunk,
    GroupShape,
    JobResult,
    LoadItem,
    LoadJob,
    PersistJob,
    Slot,
    StoreItem,
    StoreJob,
)

_ANCESTORS_MAX = 8192
"""How far up a prefix to look for a listed ancestor."""

ChunkBlocks = Sequence[Sequence[tuple[int, ...]]]
"""Block ids by group and chunk of a plan: blocks[group][chunk - first]."""


class Job:
    """A job in flight. `rows` are index rows; a reset sets `stale` and turns them into group numbers."""

    __slots__ = ("extents", "failed", "kind", "ranks_left", "reason", "rows", "slots", "stale", "tokens")

    def __init__(self, kind: str, ranks: int) -> None:
        self.kind = kind
        self.rows = array("i")
        self.slots: list[Slot | None] = []
        self.extents: list[Extent | None] = []
        self.tokens: list[int] = []
        """Of a load, by chunk: a hit may begin and end inside one."""
        self.ranks_left = ranks
        self.failed: set[int] = set()
        self.reason = ""
        self.stale = False


class Tiers:
    """See the module's text.

    Args:
        shapes: one per group, in group order.
        slots: the DRAM pool's allocator.
        extents: the SSD's allocator, None while there is no SSD tier.
        headroom: free slots to keep, by group, so that a store never waits for a disk.
        persist_bytes_max: bound of DRAM bytes being written to SSD, on one rank.
        ranks: how many ranks report each job.
    """

    def __init__(
        self,
        shapes: Sequence[GroupShape],
        slots: SlotAllocator,
        extents: ExtentAllocator | None,
        admission: Admission,
        *,
        ghosts_max: int,
        headroom: Sequence[int],
        persist_bytes_max: int,
        ranks: int = 1,
    ) -> None:
        self.shapes, self.slots, self.extents, self.admission = list(shapes), slots, extents, admission
        self.index = ChunkIndex(len(self.shapes))
        self.ghosts = Ghosts(ghosts_max)
        self.counts: Counts = {}
        self.jobs: dict[int, Job] = {}
        self._headroom, self._ranks = list(headroom), ranks
        self._persist_bytes_max, self._persist_bytes = persist_bytes_max, 0
        self._evicting = [0] * len(self.shapes)
        self._orphans: dict[tuple[int, Slot], int] = {}
        """Slots that jobs from before a reset still use, with the number of those jobs."""
        self._wanted: OrderedDict[int, None] = OrderedDict()
        """Rows admitted before eviction, waiting for `make_room`."""
        self._next_job = 0
        self._tokens = self.shapes[0].block_tokens * self.shapes[0].blocks_per_chunk

    # Questions.

    def match(self, keys: Sequence[bytes], first: int, end: int) -> int:
        """The end of the longest run of chunks from `first` that every group can load, at most `end`."""
        dram, ssd = self.index.dram, self.index.ssd
        for rows in self.index.rows:
            get = rows.get
            for position in range(first, end):
                row = get(keys[position])
                if row is None or (dram[row] != VALID and ssd[row] != VALID):
                    end = position
                    break
        return end

    def is_loading(self, key: bytes) -> bool:
        """Whether a load in flight brings this chunk to HBM already."""
        loading = self.index.loading
        return any((row := rows.get(key)) is not None and loading[row] > 0 for rows in self.index.rows)

    def tier_tokens(self, keys: Sequence[bytes], first: int, end: int) -> tuple[int, int]:
        """Tokens of matched chunks that would come from (DRAM, SSD); a chunk with any group on SSD counts as SSD."""
        dram = self.index.dram
        in_dram = sum(
            all(dram[rows[keys[position]]] == VALID for rows in self.index.rows) for position in range(first, end)
        )
        return in_dram * self._tokens, (end - first - in_dram) * self._tokens

    # Loads.

    def plan_load(self, request_id: str, keys: Sequence[bytes], first: int, end: int, blocks: ChunkBlocks) -> LoadJob:
        """Lease and load chunks first..end, which `match` has just offered, and make the prefix before them recent."""
        self.touch(keys, first, 0)
        index, job_id, job = self.index, *self._new_job("load")
        items = []
        for group, rows in enumerate(index.rows):
            for position in range(first, end):
                key = keys[position]
                row = rows[key]
                slot = extent = None
                if index.dram[row] == VALID:
                    slot = Slot(index.slab[row], index.cell[row])
                    index.unlist(row)
                    index.evicting[row] = self._rescue(row)
                else:
                    assert index.ssd[row] == VALID and self.extents is not None
                    extent = Extent(index.drive[row], index.segment[row], index.record[row])
                    self.extents.segment(extent).busy += 1
                index.leases[row] += 1
                index.loading[row] += 1
                job.rows.append(row)
                job.slots.append(slot)
                job.extents.append(extent)
                items.append(LoadItem(group, blocks[group][position - first], slot, extent, key))
        block_tokens = self.shapes[0].block_tokens
        job.tokens = [(len(ids) - ids.count(NULL_BLOCK)) * block_tokens for ids in blocks[0]]
        return LoadJob(job_id, request_id, tuple(items))

    def _rescue(self, row: int) -> int:
        if self.index.evicting[row]:
            self._evicting[self.index.group[row]] -= 1
        return 0

    def _end_load(self, job: Job) -> None:
        index = self.index
        for position in range(len(job.rows)):
            row, slot, extent = job.rows[position], job.slots[position], job.extents[position]
            if extent is not None:
                assert self.extents is not None
                self.extents.release(extent)
            if job.stale:
                if slot is not None:
                    self._release_orphan(position, job)
                continue
            index.leases[row] -= 1
            index.loading[row] -= 1
            if position in job.failed:
                if extent is not None:
                    self._drop_ssd(row, extent)
                else:
                    assert index.dram[row] in (VALID, BAD)
                    index.dram[row] = BAD
            self._settle(row)
        if job.failed or job.stale:
            count(self.counts, "errors", max(1, len(job.failed)), job.reason or "stale")
            count(self.counts, "loads", 1, "failed")
            return
        count(self.counts, "loads", 1, "loaded")
        chunks = len(job.tokens)
        from_ssd = [any(job.extents[group * chunks + i] for group in range(len(self.shapes))) for i in range(chunks)]
        ssd = sum(itertools.compress(job.tokens, from_ssd))
        count(self.counts, "hit_tokens", sum(job.tokens) - ssd, "dram")
        count(self.counts, "hit_tokens", ssd, "ssd")

    # Stores.

    def plan_store(
        self, keys: Sequence[bytes], first: int, end: int, blocks: ChunkBlocks
    ) -> tuple[StoreJob | None, int]:
        """Store chunks first..end that no tier holds, as far as there are slots.

        Returns:
            The job, or None when there is nothing to copy, and the chunk to go on with.
        """
        index, items = self.index, []
        rows_new: list[int] = []
        position = first
        while position < end:
            key = keys[position]
            absent = [g for g, rows in enumerate(index.rows) if (r := rows.get(key)) is None or self._gone(r)]
            if self.slots.slabs_short([int(g in absent) for g in range(len(self.shapes))]) > 0:
                break
            for group in absent:
                slot = self.slots.take(group)
                assert slot is not None
                row = self._fill(group, key, keys[position - 1] if position else b"", slot)
                rows_new.append(row)
                items.append(StoreItem(group, slot, blocks[group][position - first]))
            position += 1
        if not items:
            return None, position
        job_id, job = self._new_job("store")
        job.rows.extend(rows_new)
        job.slots.extend(item.slot for item in items)
        return StoreJob(job_id, tuple(items)), position

    def _gone(self, row: int) -> bool:
        return self.index.dram[row] == NONE and self.index.ssd[row] == NONE

    def _fill(self, group: int, key: bytes, parent: bytes, slot: Slot) -> int:
        index = self.index
        row = index.rows[group].get(key)
        if row is None:
            row = index.add(group, key, parent)
            index.evictions[row], index.reuses[row] = self.ghosts.recall(group, key)
        index.dram[row] = BUSY
        index.slab[row], index.cell[row] = slot
        return row

    def _end_store(self, job: Job) -> None:
        index = self.index
        for position, row in enumerate(job.rows):
            if job.stale:
                self._release_orphan(position, job)
            elif job.failed:
                self._drop_dram(row)
                self._settle(row)
            else:
                index.dram[row] = VALID
                self._settle(row)
                self._consider(row, self.admission.stored(index.evictions[row], index.reuses[row]))
        if job.failed:
            count(self.counts, "errors", len(job.failed), job.reason)
        elif not job.stale:
            count(self.counts, "stored_chunks", len(job.rows))

    def touch(self, keys: Sequence[bytes], end: int, reused: int) -> None:
        """Make chunks 0..end of a request recent, children first, and count a reuse of those before `reused`."""
        index = self.index
        for rows in index.rows:
            for position in reversed(range(end)):
                row = rows.get(keys[position])
                if row is None:
                    continue
                if index.listed(row):
                    index.unlist(row)
                    index.push_newest(row)
                if position < reused:
                    index.reuses[row] = min(index.reuses[row] + 1, 0xFFFF)
                    if index.dram[row] == VALID:
                        self._consider(row, self.admission.reused(index.evictions[row], index.reuses[row]))

    def _consider(self, row: int, decision: Decision) -> None:
        if decision.admit and self.index.ssd[row] == NONE:
            self._wanted[row] = None

    # Eviction and persisting.

    def make_room(self, now: float) -> list[PersistJob]:
        """Evict from DRAM until the headroom is there or on its way, and persist what admission wants."""
        persists = []
        while self._wanted:
            row = next(iter(self._wanted))
            if self._persist_queue_full(self.index.group[row]):
                break
            del self._wanted[row]
            if self.index.dram[row] == VALID and self.index.ssd[row] == NONE:
                self._count_admission(self.admission.reused(self.index.evictions[row], self.index.reuses[row]))
                persists += self._persist(row, now)
        while (row := self._victim()) != -1 and not self._may_wait(row):
            persists += self._evict(row, now)
        return persists

    def _may_wait(self, row: int) -> bool:
        """Whether a chunk worth an SSD write should stay until the writes before it have ended: while half of the
        headroom is there. Below that it is dropped, for a store never waits for a disk."""
        index, group = self.index, self.index.group[row]
        if self.extents is None or index.ssd[row] != NONE or not self._persist_queue_full(group):
            return False
        admit = self.admission.evicted(min(index.evictions[row] + 1, 0xFF), index.reuses[row]).admit
        return admit and self.slots.slabs_short([-(-wanted // 2) for wanted in self._headroom]) <= 0

    def _victim(self) -> int:
        """The row to evict next, -1 when the headroom is there for all groups at once or nothing can be evicted."""
        coming = [wanted - evicting for wanted, evicting in zip(self._headroom, self._evicting, strict=True)]
        if self.slots.slabs_short(coming) <= 0:
            return -1
        short = [g for g, wanted in enumerate(coming) if self.slots.free_in_own_slabs(g) < wanted]
        row = next((row for g in short if (row := self.index.oldest(g)) != -1), -1)
        if row == -1 and any(not self.slots.used[g] for g in short):
            # A group without any slab can only get one that another group empties.
            row = next((row for g in range(len(coming)) if (row := self.index.oldest(g)) != -1), -1)
        return row

    def _evict(self, row: int, now: float) -> list[PersistJob]:
        index, group = self.index, self.index.group[row]
        index.evictions[row] = min(index.evictions[row] + 1, 0xFF)
        persists: list[PersistJob] = []
        if index.ssd[row] == NONE:
            decision = self.admission.evicted(index.evictions[row], index.reuses[row])
            self._count_admission(decision)
            if decision.admit:
                persists = self._persist(row, now)
            else:
                count(self.counts, "dropped_chunks", 1, "not_admitted")
        if index.ssd[row] == BUSY:
            index.unlist(row)
            index.evicting[row] = 1
            self._evicting[group] += 1
            count(self.counts, "evicted_chunks", 1, "persisted")
            return persists
        count(self.counts, "evicted_chunks", 1, "already_on_ssd" if index.ssd[row] == VALID else "dropped")
        self._drop_dram(row)
        self._settle(row)
        return []

    def _count_admission(self, decision: Decision) -> None:
        count(self.counts, "admission", 1, decision.reason)

    def _persist_queue_full(self, group: int) -> bool:
        """Whether one more write would pass the bound; a single write always may."""
        more = self._persist_bytes + self.shapes[group].record_bytes
        return self._persist_bytes > 0 and more > self._persist_bytes_max

    def _persist(self, row: int, now: float) -> list[PersistJob]:
        index, group = self.index, self.index.group[row]
        if self.extents is None:
            count(self.counts, "dropped_chunks", 1, "ssd_off")
            return []
        if self._persist_queue_full(group):
            count(self.counts, "dropped_chunks", 1, "persist_queue_full")
            return []
        extent, lost = self.extents.take(group, now)
        for lost_row in lost:
            self._clear_ssd(lost_row)
            self._settle(lost_row)
        count(self.counts, "retired_chunks", len(lost))
        if extent is None:
            count(self.counts, "dropped_chunks", 1, "ssd_full")
            return []
        index.ssd[row] = BUSY
        index.drive[row], index.segment[row], index.record[row] = extent
        self._persist_bytes += self.shapes[group].record_bytes
        slot = Slot(index.slab[row], index.cell[row])
        job_id, job = self._new_job("persist")
        job.rows.append(row)
        job.slots.append(slot)
        job.extents.append(extent)
        return [PersistJob(job_id, group, slot, extent, index.key[row], index.parent[row])]

    def _end_persist(self, job: Job, now: float) -> None:
        index, extent = self.index, job.extents[0]
        assert extent is not None and self.extents is not None
        segment = self.extents.segment(extent)
        self.extents.release(extent)
        self._persist_bytes -= self.shapes[segment.group].record_bytes
        if job.failed:
            count(self.counts, "errors", 1, job.reason)
            if job.reason in ("write_failed", "disk_full"):
                self.extents.pause(extent.drive, now)
        if job.stale:
            self._release_orphan(0, job)
            return
        row = job.rows[0]
        if job.failed or index.dram[row] == BAD:
            self._clear_ssd(row)
        else:
            index.ssd[row] = VALID
            segment.rows[extent.record] = row
            count(self.counts, "persisted_chunks", 1)
        if index.evicting[row]:
            index.evicting[row] = self._rescue(row)
            assert not index.leases[row]
            self._drop_dram(row)
        self._settle(row)

    # Ends.

    def finished(self, result: JobResult, now: float) -> bool:
        """Take one rank's result. True when it was the last one and the job has ended."""
        job = self.jobs[result.job_id]
        job.failed.update(result.failed)
        job.reason = job.reason or result.reason
        job.ranks_left -= 1
        if job.ranks_left:
            return False
        del self.jobs[result.job_id]
        if job.kind == "load":
            self._end_load(job)
        elif job.kind == "store":
            self._end_store(job)
        else:
            self._end_persist(job, now)
        return True

    def _new_job(self, kind: str) -> tuple[int, Job]:
        self._next_job += 1
        job = self.jobs[self._next_job] = Job(kind, self._ranks)
        return self._next_job, job

    def _settle(self, row: int) -> None:
        """List a row that became evictable, remove one that nothing holds."""
        index = self.index
        if index.leases[row]:
            return
        if index.dram[row] == BAD and index.ssd[row] != BUSY:
            self._drop_dram(row)
        if index.dram[row] == VALID:
            if not index.evicting[row] and not index.listed(row):
                self._list(row)
        elif index.dram[row] == NONE and index.ssd[row] == NONE:
            self._wanted.pop(row, None)
            self.ghosts.remember(index.group[row], index.key[row], index.evictions[row], index.reuses[row])
            index.remove(row)

    def _list(self, row: int) -> None:
        """List a row behind its nearest listed ancestor, as the most recent when there is none."""
        index, rows = self.index, self.index.rows[self.index.group[row]]
        above = rows.get(index.parent[row], -1)
        for _ in range(_ANCESTORS_MAX):
            if above == -1 or index.listed(above):
                break
            above = rows.get(index.parent[above], -1)
        if above == -1 or not index.listed(above):
            index.push_newest(row)
        else:
            index.push_behind(row, above)

    def _drop_dram(self, row: int) -> None:
        index, group = self.index, self.index.group[row]
        index.unlist(row)
        self.slots.give_back(group, Slot(index.slab[row], index.cell[row]))
        index.dram[row] = NONE
        index.slab[row] = index.cell[row] = -1

    def _clear_ssd(self, row: int) -> None:
        index = self.index
        index.ssd[row] = NONE
        index.drive[row] = index.segment[row] = index.record[row] = -1

    def _drop_ssd(self, row: int, extent: Extent) -> None:
        """Never offer a bad record again; the row may have been given a better copy meanwhile."""
        index = self.index
        here = Extent(index.drive[row], index.segment[row], index.record[row])
        if index.ssd[row] == VALID and here == extent:
            assert self.extents is not None
            self.extents.segment(extent).rows[extent.record] = -1
            self._clear_ssd(row)

    # Recovery and reset.

    def adopt(self, chunks: Iterable[FoundChunk], next_segment: int, seen: Iterable[tuple[int, int]] = ()) -> None:
        """Index chunks that every rank found on SSD; one stored meanwhile gains its SSD copy."""
        if self.extents is None:
            return
        index = self.index
        for chunk in chunks:
            if chunk.group >= len(self.shapes):
                continue
            known = index.rows[chunk.group].get(chunk.key)
            if known is not None and index.ssd[known] != NONE:
                continue
            row = index.add(chunk.group, chunk.key, chunk.parent) if known is None else known
            if self.extents.adopt(chunk.extent, chunk.group, row):
                index.ssd[row] = VALID
                index.drive[row], index.segment[row], index.record[row] = chunk.extent
                count(self.counts, "recovered_chunks", 1)
            elif known is None:
                index.remove(row)
        self.extents.end_adoption(next_segment, seen)

    def reset(self) -> None:
        """Forget everything. Jobs in flight end as stale: their slots and segments are freed then, once."""
        index = self.index
        for job in self.jobs.values():
            if job.stale:
                continue
            job.stale = True
            job.rows = array("i", [index.group[row] for row in job.rows])
            for group, slot in zip(job.rows, job.slots, strict=True):
                if slot is not None:
                    self._orphans[group, slot] = self._orphans.get((group, slot), 0) + 1
        for group, rows in enumerate(index.rows):
            for row in rows.values():
                slot = Slot(index.slab[row], index.cell[row])
                if index.dram[row] != NONE and (group, slot) not in self._orphans:
                    self.slots.give_back(group, slot)
        self.index = ChunkIndex(len(self.shapes))
        self.ghosts.clear()
        self._wanted.clear()
        self._evicting = [0] * len(self.shapes)
        if self.extents is not None:
            self.extents = self.extents.drop_all(e for job in self.jobs.values() for e in job.extents if e is not None)

    def _release_orphan(self, position: int, job: Job) -> None:
        slot = job.slots[position]
        assert slot is not None
        place = (job.rows[position], slot)
        self._orphans[place] -= 1
        if not self._orphans[place]:
            del self._orphans[place]
            self.slots.give_back(*place)

    def check(self) -> None:
        """Assert the invariants; for tests, linear in the number of chunks."""
        self.index.check()
        for group in range(len(self.shapes)):
            held = sum(self.index.dram[row] != NONE for row in self.index.rows[group].values())
            orphaned = sum(place[0] == group for place in self._orphans)
            assert self.slots.used[group] == held + orphaned
            evicting = sum(self.index.evicting[row] for row in self.index.rows[group].values())
            assert evicting == self._evicting[group]
        leases = sum(self.index.leases[row] for rows in self.index.rows for row in rows.values())
        assert leases == sum(len(j.rows) for j in self.jobs.values() if j.kind == "load" and not j.stale)
