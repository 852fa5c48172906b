"""The brain of both tiers: what is where, what to load, what to evict, what to persist.

Call order of one scheduler step: `match`, `cut` and `is_loading` (questions, any number of times), `arrived` for a
request that is served, or `touch` where it was before, `plan_load` for an allocated hit, `plan_store` for new chunks,
`make_room`, `plan_promote`, then `finished` for every result of every rank.
A job ends when all ranks have reported it. Between plan and end its chunks are leased: their slots are not evicted
and their segments not retired.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from saria_vllm.metrics import Counts, count
from saria_vllm.policy.admission import Admission
from saria_vllm.policy.chunks import Chunks
from saria_vllm.policy.cost import LoadOrCompute
from saria_vllm.policy.eviction import Evictor
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.hints import NO_HINTS, Hints
from saria_vllm.policy.index import BAD, BUSY, NO_ROWS, NONE, VALID, Mask, Prefix, Rows
from saria_vllm.policy.jobs import Job, Jobs
from saria_vllm.policy.promotion import Promotion, chunks_to_promote
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.types import (
    NULL_BLOCK,
    FoundChunk,
    FoundChunks,
    GroupShape,
    Ints,
    JobResult,
    LoadJob,
    LoadPart,
    Moved,
    PersistJob,
    StoreJob,
    StorePart,
)

_FIRST_LOOK = 256
"""Chunks of a prefix looked up at first: most prefixes that no tier knows end before."""

ChunkBlocks = Sequence[Ints]
"""Block ids by group: (chunks of a plan, blocks of a chunk)."""


class Tiers:
    """See the module's text.

    Args:
        shapes: one per group, in group order.
        slots: the DRAM pool's allocator.
        extents: the SSD's allocator, None while there is no SSD tier.
        headroom: free slots to keep, by group, so that a store never waits for a disk.
        persist_bytes_max: bound of DRAM bytes being written to SSD, on one rank.
        ranks: how many ranks report each job.
        promotion: how much of what was loaded from SSD goes back to DRAM; none: all.
        cost: what loads and prefills take, for `cut`.
        second_chance: what may be written to SSD again before its segment goes, as a share of what is written first.
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
        promotion: Promotion | None = None,
        cost: LoadOrCompute | None = None,
        second_chance: float = 0.0,
    ) -> None:
        self.shapes = list(shapes)
        self.chunks = Chunks(len(self.shapes), slots, extents, ghosts_max)
        self.jobs = Jobs(ranks)
        self._admission = admission
        self.promotion, self.cost = promotion or Promotion(), cost or LoadOrCompute()
        self.evictor = Evictor(
            self.shapes, self.chunks, self.jobs, admission, headroom, persist_bytes_max, ranks, self.promotion,
            second_chance,
        )  # fmt: skip
        self.ingress_bytes_s = 0.0
        self._told: Counts = {}
        """Gauges as `take_counts` returned them last."""
        self._tokens = self.shapes[0].block_tokens * self.shapes[0].blocks_per_chunk

    # Questions.

    def match(self, prefix: Prefix, first: int, end: int, now: float) -> int:
        """The end of the longest run of chunks from `first` that every group can load, at most `end`."""
        index, extents, look = self.chunks.index, self.chunks.extents, _FIRST_LOOK
        paused = None if extents is None else extents.unreadable(now)
        while first < end:
            stop = min(end, first + look)
            for rows in index.locate(prefix, first, stop):
                on_ssd = index.ssd[rows] == VALID
                if paused is not None:
                    on_ssd &= ~paused[index.extent[rows, 0] % len(paused)]
                missing = ((rows < 0) | ((index.dram[rows] != VALID) & ~on_ssd)).nonzero()[0]
                if missing.size:
                    end = stop = min(stop, first + int(missing[0]))
            first, look = stop, look * 4
        return end

    def cut(self, prefix: Prefix, first: int, end: int, computed: int, usable: int, now: float) -> tuple[int, str]:
        """Where to end the hit of chunks first..end, which `match` has just offered, and why before its end: beyond,
        computing takes less time than loading.

        Args:
            computed, usable: tokens between which the hit lies; the first and the last chunk may reach beyond them.
        """
        if end <= first:
            return end, ""
        ssd_bytes = np.zeros(end - first)
        for shape, rows in zip(self.shapes, self.chunks.index.locate(prefix, first, end), strict=True):
            ssd_bytes += (self.chunks.index.dram[rows] != VALID) * shape.record_bytes
        boundaries = np.clip(np.arange(first, end + 1) * float(self._tokens), computed, usable)
        chunk_bytes = sum(shape.record_bytes for shape in self.shapes)
        chunks, reason = self.cost.cut(ssd_bytes, chunk_bytes, boundaries, now)
        return first + chunks, reason

    def is_loading(self, prefix: Prefix, position: int) -> bool:
        """Whether a load in flight brings this chunk to HBM already."""
        index = self.chunks.index
        located = index.locate(prefix, position, position + 1)
        return any(rows[0] >= 0 and index.leases[rows[0]] > 0 for rows in located)

    def tier_tokens(self, prefix: Prefix, first: int, end: int) -> tuple[int, int]:
        """Tokens of matched chunks that would come from (DRAM, SSD); a chunk with any group on SSD counts as SSD."""
        index = self.chunks.index
        in_dram = np.ones(end - first, np.bool_)
        for rows in index.locate(prefix, first, end):
            in_dram &= index.dram[rows] == VALID
        dram = int(np.count_nonzero(in_dram))
        return dram * self._tokens, (end - first - dram) * self._tokens

    # Requests.

    def arrived(self, prefix: Prefix, reused: int, now: float, hints: Hints = NO_HINTS) -> None:
        """A request is being served that reuses its first `reused` chunks: once for each, before its load is planned.
        Admission learns from it, what it reuses may get a second chance on SSD, and all of its chunks become recent:
        those behind a gap, too, will be used soon."""
        index, end = self.chunks.index, len(prefix.keys)
        located = index.locate(prefix, 0, end)
        prefix.visit, prefix.reused = self._admission.arrived(index, located[0], now, hints), reused
        for group, rows in enumerate(located):
            self.evictor.grant(group, rows[:reused])
        self._touch(located, reused, now, prefix.visit)

    # Loads.

    def plan_load(
        self, request_id: str, prefix: Prefix, first: int, end: int, blocks: ChunkBlocks, now: float
    ) -> LoadJob:
        """Lease and load chunks first..end, which `match` has just offered; `arrived` or `touch` made them recent."""
        index = self.chunks.index
        job_id, job = self.jobs.begin("load")
        keys, parts, ssd_bytes = tuple(prefix.keys[first:end]), [], 0
        for group, rows in enumerate(index.locate(prefix, first, end)):
            rows = rows.copy()
            from_ssd = (index.dram[rows] != VALID).nonzero()[0]
            slots, extents = index.slots(rows), np.full((len(rows), 3), -1, np.int32)
            if from_ssd.size:
                slots[from_ssd] = -1
                assert self.chunks.extents is not None and (index.ssd[rows[from_ssd]] == VALID).all()
                extents[from_ssd] = index.extent[rows[from_ssd]]
                self.chunks.extents.hold(extents[from_ssd])
                ssd_bytes += from_ssd.size * self.shapes[group].record_bytes
            self.evictor.rescue(group, rows)
            index.leases[rows] += 1
            job.add(rows, slots, extents)
            parts.append(LoadPart(group, keys, blocks[group], slots, extents))
        job.tokens = np.full(end - first, self._tokens, np.int64)
        if blocks[0].min() == NULL_BLOCK:
            job.tokens = (blocks[0] != NULL_BLOCK).sum(axis=1) * self.shapes[0].block_tokens
        job.nbytes = ssd_bytes, (end - first) * sum(shape.record_bytes for shape in self.shapes)
        self.cost.begun(*job.nbytes, now)
        return LoadJob(job_id, request_id, tuple(parts))

    def _end_load(self, job: Job, now: float) -> None:
        chunks, index = self.chunks, self.chunks.index
        if chunks.extents is not None:
            chunks.extents.release(job.extents[job.extents[:, 0] >= 0])
        counts = chunks.counts
        if job.stale:
            self.jobs.give_back(job, chunks.slots)
        else:
            failed = np.array(sorted(job.failed), np.int64)
            from_ssd = job.extents[failed, 0] >= 0
            bad = job.rows[failed[~from_ssd]]
            assert np.isin(index.dram[bad], (VALID, BAD)).all()
            index.dram[bad] = BAD
            chunks.reads_failed(job.rows[failed[from_ssd]], job.extents[failed[from_ssd]], job.reason, now)
            index.leases[job.rows] -= 1  # Only now: what is lost with these would be forgotten twice.
            chunks.settle(job.rows)
        if job.failed or job.stale:
            count(counts, "errors", max(1, len(job.failed)), job.reason or "stale")
            count(counts, "loads", 1, "failed")
            return
        count(counts, "loads", 1, "loaded")
        from_ssd = (job.extents[:, 0] >= 0).reshape(len(self.shapes), -1).any(axis=0)
        ssd = int(job.tokens[from_ssd].sum())
        count(counts, "hit_tokens", int(job.tokens.sum()) - ssd, "dram")
        count(counts, "hit_tokens", ssd, "ssd")
        if chunks.extents is not None:
            count(counts, "shared_hits", int((job.extents[:, 0] >= chunks.extents.drives).sum()))

    # Stores.

    def plan_store(
        self, prefix: Prefix, first: int, end: int, blocks: ChunkBlocks, now: float
    ) -> tuple[StoreJob | None, int]:
        """Store chunks first..end that no tier holds to be read, or that have a second chance, as far as there are
        slots.

        Their blocks must hold their bytes.

        Returns:
            The job, or None when there is nothing to copy, and the chunk to go on with.
        """
        index, extents = self.chunks.index, self.chunks.extents
        paused = None if extents is None else extents.unreadable(now)
        absent = []
        for rows in index.locate(prefix, first, end):
            lost = (index.ssd[rows] == NONE) | (index.again[rows] == 1)
            lost[max(0, prefix.reused - first) :] = True
            if paused is not None:
                lost |= paused[index.extent[rows, 0] % len(paused)]
            absent.append((rows < 0) | ((index.dram[rows] == NONE) & lost))
        return self._plan_copies("store", prefix, first, absent, blocks, now, [0] * len(absent))

    def promote_until(self, prefix: Prefix, first: int, end: int, now: float) -> int:
        """Where `plan_promote` should end, of chunks first..end, which are about to be loaded, so that as much of the
        prefix is in DRAM as promotion wants when its other chunks have been stored. Asked once, before the load, so
        that nothing depends on the steps in which chunks are stored and evicted meanwhile.

        The leading ones are promoted: every later request of the session has them, and eviction takes them last. And
        no more than there are slots for beside the rest of the prefix, which is newer than all else, and would go next.
        """
        index, slots, headroom = self.chunks.index, self.chunks.slots, self.evictor.headroom
        ssd_only = np.zeros(end, np.bool_)
        for rows in index.locate(prefix, 0, end):  # Those with a second chance are stored.
            ssd_only |= (index.dram[rows] == NONE) & (index.ssd[rows] == VALID) & (index.again[rows] == 0) & (rows >= 0)
        found = ssd_only.nonzero()[0]
        others = len(prefix.keys) - len(found)
        room = min(slots.total(group) - kept for group, kept in enumerate(headroom)) - others
        share = self.promotion.share(now)
        promote = max(0, min(room, chunks_to_promote(others, len(found), share)))
        found = found[found >= first][:promote]
        return int(found[-1]) + 1 if found.size else first

    def not_in_dram(self, prefix: Prefix, first: int, end: int) -> list[Mask]:
        """By group: which of chunks first..end are to be promoted still. One may have left SSD since it was loaded."""
        dram = self.chunks.index.dram
        return [(rows < 0) | (dram[rows] == NONE) for rows in self.chunks.index.locate(prefix, first, end)]

    def plan_promote(
        self, prefix: Prefix, first: int, end: int, blocks: ChunkBlocks, now: float
    ) -> tuple[StoreJob | None, int]:
        """Copy chunks first..end that DRAM does not have back to it, as far as there are slots beyond the headroom,
        which is for stores; returns as `plan_store`.

        Their blocks must hold their bytes: they were just loaded.
        """
        absent = self.not_in_dram(prefix, first, end)
        return self._plan_copies("promote", prefix, first, absent, blocks, now, self.evictor.headroom)

    def _plan_copies(
        self,
        kind: str,
        prefix: Prefix,
        first: int,
        absent: Sequence[Mask],
        blocks: ChunkBlocks,
        now: float,
        reserve: Sequence[int],
    ) -> tuple[StoreJob | None, int]:
        end = first + self._room_for(absent, reserve)
        job_id, job = 0, None
        parts = []
        for group, mask in enumerate(absent):
            wanted = mask[: end - first].nonzero()[0]
            if not wanted.size:
                continue
            if job is None:
                job_id, job = self.jobs.begin(kind)
            slots = self.chunks.slots.take(group, len(wanted))
            job.add(self.chunks.fill(group, prefix, wanted + first, slots, now), slots)
            parts.append(StorePart(group, slots, blocks[group][wanted]))
        return (None if job is None else StoreJob(job_id, tuple(parts))), end

    def _room_for(self, absent: Sequence[Mask], reserve: Sequence[int]) -> int:
        """How many leading chunks there are slots for, all groups together, so that `reserve` of each stay free."""
        slots, total = self.chunks.slots, len(absent[0])
        if slots.slabs_short([int(mask.sum()) + kept for mask, kept in zip(absent, reserve, strict=True)]) <= 0:
            return total
        wanted = [np.concatenate(([0], np.cumsum(mask))) + kept for mask, kept in zip(absent, reserve, strict=True)]
        low, high = 0, total  # The largest number that fits: more chunks never need fewer slots.
        while low < high:
            middle = (low + high + 1) // 2
            if slots.slabs_short([int(need[middle]) for need in wanted]) <= 0:
                low = middle
            else:
                high = middle - 1
        return low

    def _end_store(self, job: Job) -> None:
        chunks = self.chunks
        if job.stale:
            self.jobs.give_back(job, chunks.slots)
        elif job.failed:
            chunks.drop_dram(job.rows)
            chunks.settle(job.rows)
        else:
            chunks.index.dram[job.rows] = VALID
            chunks.index.promoted[job.rows] = job.kind == "promote"
            chunks.settle(job.rows)
            self.evictor.consider(job.rows)
        if job.failed:
            name = "errors" if job.kind == "store" else "unpromoted_chunks"
            count(chunks.counts, name, len(job.failed), job.reason)
        elif not job.stale:
            count(chunks.counts, "stored_chunks" if job.kind == "store" else "promoted_chunks", len(job.rows))

    def touch(self, prefix: Prefix, end: int, reused: int, now: float) -> None:
        """Make chunks 0..end of a request recent, children first, and count a reuse of those before `reused`."""
        self._touch(self.chunks.index.locate(prefix, 0, end), reused, now)

    def _touch(self, located: Sequence[Rows], reused: int, now: float, visit: int | None = None) -> None:
        index = self.chunks.index
        for group, rows in enumerate(located):
            depths = (rows >= 0).nonzero()[0]
            if len(depths) < len(rows):
                rows = rows[depths]
            self.chunks.touch(group, rows, depths, now)
            if visit is not None:
                index.visit[rows] = visit
            used = rows[: int(depths.searchsorted(reused))]
            if used.size:
                reuses = index.reuses[used]
                index.reuses[used] = np.minimum(reuses, 0xFFFE, out=reuses) + 1
                promoted = int(np.count_nonzero(index.promoted[used]))
                if promoted:
                    self.promotion.used(promoted, now)
                    index.promoted[used] = 0
                self.evictor.consider(used)

    # Room and ends.

    def make_room(self, now: float, promotions: Sequence[int] = ()) -> list[PersistJob]:
        """Evict from DRAM until the headroom, and by group as many slots more as promotions want, are there or on their
        way; and persist what admission wants."""
        return self.evictor.make_room(now, promotions)

    def finished(self, results: Iterable[JobResult], now: float) -> int:
        """Take ranks' results, of each job at most one per rank. Returns how many jobs ended with them."""
        jobs = self.jobs.finished(results)
        persists = []
        for job in jobs:
            if job.kind == "load":
                self.cost.ended(*job.nbytes)
                self._end_load(job, now)
            elif job.kind == "persist":
                persists.append(job)
            else:
                self._end_store(job)
        if persists:
            self.evictor.end_persists(persists, now)
        return len(jobs)

    def moved(self, moved: Iterable[Moved], ingress_bytes_s: float, now: float) -> None:
        """What ranks moved from and to drives, and the rate at which DRAM reaches HBM, 0 while it is not known. Chunks
        to come go where they can be read soonest; promotion and `cut` go by the rates of both tiers."""
        ssd_bytes_s = 0.0
        self.ingress_bytes_s = ingress_bytes_s
        if self.chunks.extents is not None:
            striping = self.chunks.extents.striping
            for one in moved:
                striping.learn(one)
            ssd_bytes_s = striping.read_bytes_s(now)
        self.promotion.measured(ssd_bytes_s, ingress_bytes_s)
        self.cost.measured(ssd_bytes_s, ingress_bytes_s)

    def take_problems(self) -> list[str]:
        """What became of drives since the last call, to be said."""
        if self.chunks.extents is None:
            return []
        problems, self.chunks.extents.striping.problems = self.chunks.extents.striping.problems, []
        return problems

    # Recovery and reset.

    def open_ssd(
        self,
        extents: ExtentAllocator,
        found: FoundChunks,
        next_segment: int,
        seen: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Use the SSD tier from now on, and index chunks that every rank found there; one stored meanwhile gains its
        SSD copy. No segment id below `next_segment` is given out; `seen` segments without a use are retired."""
        self.chunks.extents = extents
        count(self.chunks.counts, "recovered_chunks", self.chunks.adopt(found))
        extents.end_adoption(next_segment, seen)

    def shrink_ssd(self) -> None:
        """Give up segments beyond a cap that became lower."""
        if self.chunks.extents is not None:
            self.chunks.lose_ssd(self.chunks.extents.shrink())

    def adopt_others(self, found: Iterable[FoundChunk], gone: Sequence[tuple[int, int]]) -> None:
        """Other engines sealed what is `found`, and retired the (drive, segment) that are `gone`."""
        if self.chunks.extents is not None:
            self.chunks.lose_others(gone)
            count(self.chunks.counts, "shared_chunks", self.chunks.adopt(FoundChunks.of(list(found)), others=True))

    def reset(self) -> None:
        """Forget everything. Jobs in flight end as stale: their slots and segments are freed then, once."""
        self.jobs.make_stale(self.chunks.index)
        self.chunks.clear(self.jobs)
        self.evictor.clear()

    def take_counts(self) -> Counts:
        """Counter increments since the last call, and the gauges that changed."""
        counts, self.chunks.counts = self.chunks.counts, {}
        gauges = {
            "ingress_bytes_s": round(self.ingress_bytes_s),
            "prefill_tokens_s": round(self.cost.prefill.tokens_s),
        }
        if self.chunks.extents is not None:
            striping = self.chunks.extents.striping
            counts |= striping.counts
            striping.counts = {}
            for label, rate in zip(striping.labels, striping.read_rates(), strict=True):
                gauges[f"drive_read_bytes_s:{label}"] = round(rate)
        counts |= {name: value for name, value in gauges.items() if value and value != self._told.get(name)}
        self._told |= gauges
        return counts

    def check(self) -> None:
        """Assert the invariants; for tests, linear in the number of chunks."""
        index = self.chunks.index
        self.chunks.check(self.jobs)
        self.evictor.check()
        leased = [job.rows for job in self.jobs.live.values() if job.kind == "load" and not job.stale]
        assert int(index.leases.sum()) == sum(map(len, leased))
        busy = [job.rows for job in self.jobs.live.values() if job.kind in ("store", "promote") and not job.stale]
        filling = np.concatenate(busy) if busy else NO_ROWS
        assert set((index.dram == BUSY).nonzero()[0].tolist()) == set(filling.tolist())
