"""Making room in DRAM ahead of demand: what leaves it, and what of that is written to SSD first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from saria_vllm.metrics import count
from saria_vllm.policy.admission import ADMITS, REASONS, Admission, Reasons
from saria_vllm.policy.chunks import Chunks
from saria_vllm.policy.index import BAD, BUSY, NO_ROWS, NONE, VALID, Rows
from saria_vllm.policy.jobs import Job, Jobs
from saria_vllm.types import Extent, GroupShape, PersistJob, Slot


class Evictor:
    """See the module's text; arguments as in `Tiers`."""

    def __init__(
        self,
        shapes: Sequence[GroupShape],
        chunks: Chunks,
        jobs: Jobs,
        admission: Admission,
        headroom: Sequence[int],
        persist_bytes_max: int,
    ) -> None:
        self._shapes, self._chunks, self._jobs, self._admission = shapes, chunks, jobs, admission
        self._headroom = list(headroom)
        self._persist_bytes_max, self._persist_bytes = persist_bytes_max, 0
        self._evicting = [0] * len(shapes)
        """Slots that writes in flight will free, by group."""
        self._wanted: dict[int, None] = {}
        """Rows admitted before eviction, waiting for `make_room`."""

    def consider(self, rows: Rows) -> None:
        """Chunks entered DRAM or were reused there: admission may want them on SSD before they are evicted."""
        reasons = self._admission.kept(self._chunks.index, rows)
        if reasons is not None:
            wanted = rows[ADMITS[reasons] & (self._chunks.index.ssd[rows] == NONE)]
            self._wanted.update(dict.fromkeys(wanted.tolist()))

    def rescue(self, group: int, rows: Rows) -> None:
        """These chunks are needed in DRAM: the writes in flight do not free their slots."""
        index = self._chunks.index
        leaving = rows[index.evicting[rows] == 1]
        index.evicting[leaving] = 0
        self._evicting[group] -= len(leaving)

    def make_room(self, now: float) -> list[PersistJob]:
        """See `Tiers.make_room`."""
        persists = self._persist_wanted(now)
        while (rows := self._victims()).size:
            jobs, went_on = self._evict(rows, now)
            persists += jobs
            if not went_on:
                break
        return persists

    def _persist_wanted(self, now: float) -> list[PersistJob]:
        index, persists = self._chunks.index, []
        while self._wanted:
            row = next(iter(self._wanted))
            if self._queue_room(int(index.group[row])) <= 0:
                break
            del self._wanted[row]
            one = np.array([row], np.int32)
            if index.dram[row] == VALID and index.ssd[row] == NONE:
                reasons = self._admission.kept(index, one)
                if reasons is not None and ADMITS[reasons[0]]:
                    self._count_reasons(reasons)
                    persists += self._persist(row, now)
        return persists

    def _victims(self) -> Rows:
        """Rows of one group to evict next; none when the headroom is there for all groups at once or on its way, or
        nothing can be evicted."""
        slots, recency = self._chunks.slots, self._chunks.recency
        coming = [wanted - evicting for wanted, evicting in zip(self._headroom, self._evicting, strict=True)]
        if slots.slabs_short(coming) <= 0:
            return NO_ROWS
        short = [group for group, wanted in enumerate(coming) if slots.free_in_own_slabs(group) < wanted]
        for group in short:
            rows = recency[group].oldest(coming[group] - slots.free_in_own_slabs(group))
            if rows.size:
                return rows
        if any(not slots.used[group] for group in short):
            # A group without any slab can only get one that another group empties.
            return next((rows for order in recency if (rows := order.oldest(1)).size), NO_ROWS)
        return NO_ROWS

    def _evict(self, rows: Rows, now: float) -> tuple[list[PersistJob], bool]:
        """Evict rows of one group, the oldest first. False when it stopped at one that should wait for its write."""
        chunks, index = self._chunks, self._chunks.index
        group = int(index.group[rows[0]])
        new = index.ssd[rows] == NONE
        reasons = self._admission.evicted(index, rows[new], now)
        admitted = np.zeros(len(rows), np.bool_)
        admitted[new] = ADMITS[reasons]
        over = admitted.nonzero()[0][max(0, self._queue_room(group)) :]
        stop = len(rows)
        if over.size and chunks.extents is not None:
            # Those before it go first; then it waits while half of the headroom is there, for a store never waits for
            # a disk.
            stop = int(over[0])
            if stop == 0:
                if chunks.slots.slabs_short([-(-wanted // 2) for wanted in self._headroom]) <= 0:
                    return [], False
                stop = 1
        rows, admitted, reasons = rows[:stop], admitted[:stop], reasons[: int(new[:stop].sum())]
        index.evictions[rows] = np.minimum(index.evictions[rows], 0xFE) + 1
        self._count_reasons(reasons)
        count(chunks.counts, "dropped_chunks", len(reasons) - int(admitted.sum()), "not_admitted")
        persists = []
        for row in rows[admitted].tolist():
            persists += self._persist(row, now)
        leaving = rows[index.ssd[rows] == BUSY]
        index.evicting[leaving] = 1
        self._evicting[group] += len(leaving)
        gone = rows[index.ssd[rows] != BUSY]
        on_ssd = int((index.ssd[gone] == VALID).sum())
        count(chunks.counts, "evicted_chunks", len(leaving), "persisted")
        count(chunks.counts, "evicted_chunks", on_ssd, "already_on_ssd")
        count(chunks.counts, "evicted_chunks", len(gone) - on_ssd, "dropped")
        self._drop(gone)
        return persists, True

    def _drop(self, rows: Rows) -> None:
        if rows.size:
            for row in self._wanted.keys() & set(rows.tolist()) if self._wanted else ():
                del self._wanted[row]
            self._chunks.drop_dram(rows)
            self._chunks.settle(rows)

    def _count_reasons(self, reasons: Reasons) -> None:
        for number, times in enumerate(np.bincount(reasons).tolist()):
            if times:
                count(self._chunks.counts, "admission", times, REASONS[number].name)

    def _queue_room(self, group: int) -> int:
        """How many more chunks may be on their way to SSD; a single one always may."""
        room = (self._persist_bytes_max - self._persist_bytes) // self._shapes[group].record_bytes
        return room if self._persist_bytes else max(1, room)

    def _persist(self, row: int, now: float) -> list[PersistJob]:
        chunks, index = self._chunks, self._chunks.index
        group = int(index.group[row])
        if chunks.extents is None:
            count(chunks.counts, "dropped_chunks", 1, "ssd_off")
            return []
        if self._queue_room(group) <= 0:
            count(chunks.counts, "dropped_chunks", 1, "persist_queue_full")
            return []
        extent, lost = chunks.extents.take(group, now)
        if lost.size:
            chunks.clear_ssd(lost)
            chunks.settle(lost)
            count(chunks.counts, "retired_chunks", len(lost))
        if extent is None:
            count(chunks.counts, "dropped_chunks", 1, "ssd_full")
            return []
        index.ssd[row] = BUSY
        index.drive[row], index.segment[row], index.record[row] = extent
        self._persist_bytes += self._shapes[group].record_bytes
        slot = Slot(int(index.slab[row]), int(index.cell[row]))
        job_id, job = self._jobs.begin("persist")
        job.add(np.array([row], np.int32), np.array([slot], np.int32), np.array([extent], np.int32))
        return [PersistJob(job_id, group, slot, extent, index.key[row], index.parent[row])]

    def end_persist(self, job: Job, now: float) -> None:
        """A write has ended on all ranks."""
        chunks, index = self._chunks, self._chunks.index
        extents = chunks.extents
        assert extents is not None
        extent = Extent(*job.extents[0].tolist())
        group = extents.segment(extent).group
        extents.release(job.extents)
        self._persist_bytes -= self._shapes[group].record_bytes
        if job.failed:
            count(chunks.counts, "errors", 1, job.reason)
            if job.reason in ("write_failed", "disk_full"):
                extents.pause(extent.drive, now)
        if job.stale:
            self._jobs.give_back(job, chunks.slots)
            return
        row, rows = int(job.rows[0]), job.rows
        if job.failed or index.dram[row] == BAD:
            chunks.clear_ssd(rows)
        else:
            index.ssd[row] = VALID
            extents.filled(extent, row)
            count(chunks.counts, "persisted_chunks", 1)
        if index.evicting[row]:
            self.rescue(group, rows)
            assert not index.leases[row]
            chunks.drop_dram(rows)
        chunks.settle(rows)

    def clear(self) -> None:
        """Forget what was wanted; writes in flight end as they are."""
        self._wanted.clear()
        self._evicting = [0] * len(self._shapes)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        index = self._chunks.index
        for group, number in enumerate(self._evicting):
            assert int((index.evicting[index.group == group] == 1).sum()) == number
