"""Making room in DRAM ahead of demand: what leaves it, and what of that is written to SSD first."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import numpy as np

from saria_vllm.metrics import count
from saria_vllm.policy.admission import ADMITS, REASONS, Admission, Budget, Reasons
from saria_vllm.policy.chunks import Chunks
from saria_vllm.policy.endurance import Governor
from saria_vllm.policy.index import BAD, BUSY, NO_ROWS, NONE, VALID, Rows
from saria_vllm.policy.jobs import Job, Jobs
from saria_vllm.policy.promotion import Promotion
from saria_vllm.types import Extent, GroupShape, Ints, PersistJob


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
        ranks: int,
        promotion: Promotion,
        second_chance: float,
    ) -> None:
        self._shapes, self._chunks, self._jobs, self._admission = shapes, chunks, jobs, admission
        self._ranks, self._promotion = ranks, promotion
        self.headroom = list(headroom)
        """Free slots to keep, by group."""
        self.governors: list[Governor] = []
        """Bound what is written per day, by drive; none: no bound."""
        self._persist_bytes_max = persist_bytes_max
        self._persist_bytes: dict[int, int] = {}
        """On their way to SSD, by drive: each has its share of the bound, so one that hangs holds up no other."""
        self._evicting = [0] * len(shapes)
        """Slots that writes in flight will free, by group."""
        self._enough_at = -1
        """`SlotAllocator.takes` when there was room enough last, -1 where it may not be any more: most steps take
        no slot, and need not look."""
        self._wanted: dict[int, None] = {}
        """Rows admitted before eviction, waiting for `make_room`."""
        self._second_chance = second_chance
        self._first_bytes, self._again_bytes = 0, 0
        """Written for the first time, and again as second chances; of those `Chunks.granted` are to come."""

    def consider(self, rows: Rows) -> None:
        """Chunks entered DRAM or were reused: admission may want those in DRAM on SSD before they are evicted."""
        index = self._chunks.index
        reasons = self._admission.kept(index, rows)
        if reasons is not None:
            wanted = rows[ADMITS[reasons] & (index.dram[rows] == VALID) & (index.ssd[rows] == NONE)]
            self._wanted.update(dict.fromkeys(wanted.tolist()))

    def rescue(self, group: int, rows: Rows) -> None:
        """These chunks are needed in DRAM: the writes in flight do not free their slots."""
        if not self._evicting[group]:
            return
        index = self._chunks.index
        leaving = rows[index.evicting[rows] == 1]
        index.evicting[leaving] = 0
        self._evicting[group] -= len(leaving)
        self._enough_at = -1

    def grant(self, group: int, rows: Rows) -> None:
        """A request reuses these chunks, -1 where one is unknown: those whose segments go soon may be written to SSD
        again, the leading ones first, within the share of writes that is for it. Decided here alone, so that nothing
        depends on the pieces in which it is stored and evicted."""
        chunks, index = self._chunks, self._chunks.index
        if chunks.extents is None or not self._second_chance or (going := chunks.extents.going()).max(initial=-1) < 0:
            return
        # Of other drives, which are not ours to write, nothing goes soon.
        rows = rows[(rows >= 0) & (index.ssd[rows] == VALID) & (index.again[rows] == 0)]
        rows = rows[index.extent[rows, 0] < len(going)]
        rows = rows[index.extent[rows, 1] < going[index.extent[rows, 0]]]
        granted = sum(self._written_bytes(group) * granted for group, granted in enumerate(chunks.granted))
        left = int(self._first_bytes * self._second_chance) - self._again_bytes - granted
        chunks.grant(group, rows[: max(0, left // self._written_bytes(group))])

    def make_room(self, now: float, promotions: Sequence[int]) -> list[PersistJob]:
        """See `Tiers.make_room`."""
        persists: list[PersistJob] = []
        if self._wanted or self._enough_at != self._chunks.slots.takes:
            persists = self._persist_wanted(now) if self._wanted else []
            persists += self._free(self.headroom, now)
        # What stores need comes first, also on the way to SSD.
        if any(promotions) and self._chunks.slots.slabs_short(self.headroom) <= 0:
            persists += self._free([*map(operator.add, self.headroom, promotions)], now)
        return persists

    def _free(self, wanted: Sequence[int], now: float) -> list[PersistJob]:
        """Evict until so many slots are free, by group, or on their way."""
        persists = []
        while (rows := self._victims(wanted)).size:
            jobs, went_on = self._evict(rows, now)
            persists += jobs
            if not went_on:
                break
        return persists

    def _persist_wanted(self, now: float) -> list[PersistJob]:
        index, persists = self._chunks.index, []
        for group in range(len(self._shapes)):
            waiting = (row for row in self._wanted if index.group[row] == group)
            mine = list(itertools.islice(waiting, self._queue_room(group)))
            for row in mine:
                del self._wanted[row]
            rows = np.array(mine, np.intp)
            rows = rows[(index.dram[rows] == VALID) & (index.ssd[rows] == NONE)]
            reasons = self._admission.kept(index, rows)
            if reasons is not None and rows.size:
                admitted = ADMITS[reasons]
                self._ask(group, len(rows), now)
                self._count_reasons(reasons[admitted])
                persists += self._persist(group, rows[admitted], now)
        return persists

    def _victims(self, free: Sequence[int]) -> Rows:
        """Rows of one group to evict next; none when so many slots are free for all groups at once or on their way, or
        nothing can be evicted."""
        slots, recency = self._chunks.slots, self._chunks.recency
        coming = self._coming(free)
        if slots.slabs_short(coming) <= 0:
            self._enough_at = slots.takes
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

    def _coming(self, free: Sequence[int]) -> list[int]:
        """Of slots that are to be free those that no write in flight will free, by group."""
        return [wanted - evicting for wanted, evicting in zip(free, self._evicting, strict=True)]

    def _evict(self, rows: Rows, now: float) -> tuple[list[PersistJob], bool]:
        """Evict rows of one group, the oldest first. False when it stopped at one that should wait for its write."""
        chunks, index = self._chunks, self._chunks.index
        group = int(index.group[rows[0]])
        asked = (index.ssd[rows] == NONE) | (index.again[rows] == 1)
        reasons = np.zeros(len(rows), np.uint8)
        reasons[asked] = self._admission.evicted(index, rows[asked], now, self._budget(now))
        admitted = ADMITS[reasons] & asked
        stop = self._stop(group, rows, admitted.nonzero()[0], now)
        if not stop:
            return [], False
        rows, admitted, reasons = rows[:stop], admitted[:stop], reasons[:stop]
        new = index.ssd[rows] == NONE
        self._ask(group, int(new.sum()), now)
        index.evictions[rows] = np.minimum(index.evictions[rows], 0xFE) + 1
        self._promotion.evicted(int(index.promoted[rows].sum()), now)
        self._count_reasons(reasons[new])
        count(chunks.counts, "dropped_chunks", int((new & ~admitted).sum()), "not_admitted")
        persists = self._persist(group, rows[admitted], now)
        chunks.revoke(rows)
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

    def _stop(self, group: int, rows: Rows, writes: Rows, now: float) -> int:
        """How many of these rows to evict at once, those at the positions `writes` to SSD; 0 to wait for writes."""
        chunks, stop = self._chunks, len(rows)
        if chunks.extents is None:
            return stop
        if (chunks.index.ssd[rows] == VALID).any():
            # What these writes retire may be among these rows: then it is asked about anew.
            troubled = writes[chunks.extents.untroubled(group, now) :]
            stop = max(1, int(troubled[0])) if troubled.size else stop
        over = writes[writes < stop][self._queue_room(group) :]
        if not over.size:
            return stop
        if over[0]:
            return int(over[0])
        # Those before it went; now it waits while half of the headroom is there, for a store never waits for a disk.
        half = [-(-wanted // 2) for wanted in self.headroom]
        if chunks.slots.slabs_short(half) <= 0:
            return 0
        return min(stop, max(1, half[group] - chunks.slots.free(group)))

    def _budget(self, now: float) -> Budget | None:
        """What the drives have left: they ask for as much care as the one that has most. A chunk is of use when all of
        its groups are there, so there must be room for them."""
        if not self.governors:
            return None
        governors, nbytes = self._writable(now), sum(map(self._written_bytes, range(len(self._shapes))))
        chunks = sum(governor.room(now) // nbytes for governor in governors)
        return Budget(min((governor.threshold(now) for governor in governors), default=1.0), chunks)

    def _ask(self, group: int, chunks: int, now: float) -> None:
        """So many chunks might be written, and the write budget decides on them: each drive's on its share."""
        governors = self._writable(now)
        in_all = sum(governor.budget_bytes_day for governor in governors)
        for governor in governors:
            share = governor.budget_bytes_day / in_all
            governor.ask(chunks * self._written_bytes(group) * share, now)

    def _writable(self, now: float) -> list[Governor]:
        """Of the drives that are written to."""
        extents = self._chunks.extents
        if extents is None or not self.governors:
            return self.governors
        return [governor for governor, may in zip(self.governors, extents.writable(now), strict=True) if may]

    def _written_bytes(self, group: int) -> int:
        """Of a chunk, on all ranks."""
        return self._shapes[group].record_bytes * self._ranks

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

    def _room_by_drive(self, group: int) -> list[int]:
        """How many more chunks may be on their way to each drive, by what it should get of them; a single one always
        may."""
        extents, nbytes = self._chunks.extents, self._shapes[group].record_bytes
        weights = extents.striping.weights() if extents is not None else [1.0]
        total = sum(weights)
        room = []
        for drive, weight in enumerate(weights):
            under_way = self._persist_bytes.get(drive, 0)
            left = (int(self._persist_bytes_max * weight / total) - under_way) // nbytes
            room.append(max(0, left) if under_way else max(1, left))
        return room

    def _queue_room(self, group: int) -> int:
        """How many more chunks may be on their way to SSD."""
        return sum(self._room_by_drive(group))

    def _persist(self, group: int, rows: Rows, now: float) -> list[PersistJob]:
        """Write chunks to SSD, as many as the bound and the drives take; others are counted as dropped unless SSD has
        them. The record of one that is there is forgotten: its new one takes its place."""
        chunks, index = self._chunks, self._chunks.index
        if chunks.extents is None:
            self._count_dropped(rows, "ssd_off")
            return []
        room = self._room_by_drive(group)
        self._count_dropped(rows[sum(room) :], "persist_queue_full")
        rows = rows[: sum(room)]
        written_bytes = self._written_bytes(group)
        for drive, governor in enumerate(self.governors):
            room[drive] = min(room[drive], governor.room(now) // written_bytes)
        self._count_dropped(rows[sum(room) :], "over_budget")
        rows = rows[: sum(room)]
        if not rows.size:
            return []
        extents, lost = chunks.extents.take(group, len(rows), room, now)
        again = int((index.again[rows[: len(extents)]] == 1).sum())
        chunks.lose_ssd(lost)
        self._count_dropped(rows[len(extents) :], "ssd_full")
        rows = rows[: len(extents)]
        for drive, governor in enumerate(self.governors):
            governor.spend(written_bytes * int((extents[:, 0] == drive).sum()), now)
        self._first_bytes += written_bytes * (len(rows) - again)
        self._again_bytes += written_bytes * again
        count(chunks.counts, "admission", again, "second_chance")
        count(chunks.counts, "second_chance_bytes", written_bytes * again)
        for row in rows[index.ssd[rows] == VALID].tolist():
            chunks.extents.forget(Extent(*index.extent[row].tolist()))
        chunks.revoke(rows)
        index.ssd[rows] = BUSY
        index.extent[rows] = extents
        return [
            self._persist_job(group, rows[some], extents[some])
            for drive in range(chunks.extents.drives)
            for some in self._pieces(group, (extents[:, 0] == drive).nonzero()[0])
        ]

    def _count_dropped(self, rows: Rows, reason: str) -> None:
        """Of these chunks those are lost that are not on SSD."""
        chunks = self._chunks
        count(chunks.counts, "dropped_chunks", int((chunks.index.ssd[rows] == NONE).sum()), reason)

    def _pieces(self, group: int, positions: Rows) -> list[Rows]:
        """Jobs of at most a quarter of what may be on its way to a drive: one is written while others end."""
        assert self._chunks.extents is not None
        share = self._persist_bytes_max // self._chunks.extents.drives
        step = max(1, share // 4 // self._shapes[group].record_bytes)
        return [positions[start : start + step] for start in range(0, len(positions), step)]

    def _persist_job(self, group: int, rows: Rows, extents: Ints) -> PersistJob:
        index = self._chunks.index
        job_id, job = self._jobs.begin("persist")
        slots = index.slots(rows)
        job.add(rows, slots, extents)
        self._under_way(job, self._shapes[group].record_bytes)
        numbers = rows.tolist()
        keys, parents = tuple(index.key[row] for row in numbers), tuple(index.parent[row] for row in numbers)
        return PersistJob(job_id, group, keys, parents, slots, extents)

    def end_persists(self, jobs: Sequence[Job], now: float) -> None:
        """Writes have ended on all ranks."""
        chunks, extents = self._chunks, self._chunks.extents
        assert extents is not None
        for job in jobs:
            group = extents.group_of(Extent(*job.extents[0].tolist()))
            self._under_way(job, -self._shapes[group].record_bytes)
            if job.failed:
                count(chunks.counts, "errors", len(job.failed), job.reason)
                chunks.drive_failed(job.extents[sorted(job.failed)], job.reason, now)
            if job.stale:
                self._jobs.give_back(job, chunks.slots)
            else:
                self._persisted(group, job)
            extents.release(job.extents)

    def _under_way(self, job: Job, record_bytes: int) -> None:
        """A job's records of so many bytes are on their way to its drive, or, below zero, not any more."""
        drive = int(job.extents[0, 0])
        self._persist_bytes[drive] = self._persist_bytes.get(drive, 0) + record_bytes * len(job.rows)

    def _persisted(self, group: int, job: Job) -> None:
        chunks, index, rows = self._chunks, self._chunks.index, job.rows
        assert chunks.extents is not None
        bad = index.dram[rows] == BAD
        bad[list(job.failed)] = True
        bad |= chunks.extents.given_up(job.extents)
        chunks.clear_ssd(rows[bad])
        index.ssd[rows[~bad]] = VALID
        chunks.extents.filled(job.extents[~bad], rows[~bad])
        count(chunks.counts, "persisted_chunks", int((~bad).sum()))
        leaving = rows[index.evicting[rows] == 1]
        if leaving.size:
            self.rescue(group, leaving)
            assert not index.leases[leaving].any()
            chunks.drop_dram(leaving)
        chunks.settle(rows)

    def clear(self) -> None:
        """Forget what was wanted; writes in flight end as they are."""
        self._wanted.clear()
        self._evicting, self._enough_at = [0] * len(self._shapes), -1

    def check(self) -> None:
        """Assert the invariants; for tests."""
        index = self._chunks.index
        for group, number in enumerate(self._evicting):
            assert int((index.evicting[index.group == group] == 1).sum()) == number
        coming = self._coming(self.headroom)
        assert self._enough_at != self._chunks.slots.takes or self._chunks.slots.slabs_short(coming) <= 0
