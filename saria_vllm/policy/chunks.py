"""The chunks of both tiers: the index with the allocators of what its rows hold. Every change of state goes through
here.

Invariant: a row of the index holds a slot exactly while its DRAM state is not NONE, and an SSD record exactly while its
SSD state is not NONE. A row that holds neither and has no lease is a ghost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from saria_vllm.metrics import Counts, count
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.ghosts import Ghosts
from saria_vllm.policy.index import BAD, BUSY, NONE, VALID, ChunkIndex, Column, Prefix, Rows
from saria_vllm.policy.jobs import Jobs
from saria_vllm.policy.recency import Recency
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.types import Extent, FoundChunk, Ints


class Chunks:
    """See the module's text."""

    def __init__(self, groups: int, slots: SlotAllocator, extents: ExtentAllocator | None, ghosts_max: int) -> None:
        self.index = ChunkIndex(groups)
        self.slots, self.extents = slots, extents
        self.recency = [Recency(self.index) for _ in range(groups)]
        self.ghosts = Ghosts(self.index, ghosts_max)
        self.counts: Counts = {}
        self._epoch = 0

    def touch(self, group: int, rows: Rows, depths: Column, now: float) -> None:
        """Rows of one prefix, parents first, become the most recent."""
        index = self.index
        self._epoch += 1
        index.epoch[rows] = self._epoch
        index.depth[rows] = depths
        index.touched[rows] = now
        self.recency[group].put(rows[index.dram[rows] != NONE][::-1])

    def fill(self, group: int, prefix: Prefix, positions: Column, slots: Ints, now: float) -> Rows:
        """Chunks that no tier holds are being stored in these slots. Returns their rows.

        They are as recent as the chunk before them, and older where that is of the same moment.
        """
        index, keys = self.index, prefix.keys
        start, end = max(0, int(positions[0]) - 1), int(positions[-1]) + 1
        span = index.locate(prefix, start, end)[group]
        unknown = span[positions - start] < 0
        new = positions[unknown].tolist()
        if new:
            index.add(group, [keys[p] for p in new], [keys[p - 1] if p else b"" for p in new])
            span = index.locate(prefix, start, end)[group]
        rows = span[positions - start]
        index.entered[rows[unknown]] = now
        self.ghosts.back(rows)
        index.dram[rows] = BUSY
        index.slab[rows], index.cell[rows] = slots[:, 0], slots[:, 1]
        index.depth[rows] = positions
        index.touched[rows] = now
        index.visit[rows] = prefix.visit
        epochs = index.epoch[span]
        epochs[positions - start] = 0
        if not epochs[0]:
            self._epoch += 1
            epochs[0] = self._epoch
        known = np.maximum.accumulate(np.where(epochs > 0, np.arange(len(span)), 0))
        index.epoch[rows] = epochs[known][positions - start]
        self.recency[group].put(rows[::-1])
        return rows

    def settle(self, rows: Rows) -> None:
        """After a change: free what was found unreadable, make ghosts of what no tier holds any more."""
        index = self.index
        rows = rows[index.leases[rows] == 0]
        bad = rows[(index.dram[rows] == BAD) & (index.ssd[rows] != BUSY)]
        if bad.size:
            self.drop_dram(bad)
        gone = rows[(index.dram[rows] == NONE) & (index.ssd[rows] == NONE) & (index.ghost[rows] == 0)]
        if gone.size:
            index.remove(self.ghosts.add(gone))

    def drop_dram(self, rows: Rows) -> None:
        index = self.index
        slots = np.stack((index.slab[rows], index.cell[rows]), 1).astype(np.int32)
        if len(self.recency) == 1:
            self.slots.give_back(0, slots)
        else:
            groups = index.group[rows]
            for group in np.unique(groups).tolist():
                self.slots.give_back(group, slots[groups == group])
        index.dram[rows] = NONE
        index.slab[rows] = index.cell[rows] = -1
        index.promoted[rows] = 0

    def clear_ssd(self, rows: Rows) -> None:
        """Their records are gone or were never written."""
        index = self.index
        index.ssd[rows] = NONE
        index.drive[rows] = index.segment[rows] = index.record[rows] = -1

    def lose_ssd(self, rows: Rows) -> None:
        """Their records went with their segments."""
        if rows.size:
            self.clear_ssd(rows)
            self.settle(rows)
            count(self.counts, "retired_chunks", len(rows))

    def lose_others(self, gone: Sequence[tuple[int, int]]) -> None:
        """These (drive, segment) of other engines are gone. Loads that read them may end well all the same."""
        if not gone:
            return
        index = self.index
        places = index.drive.astype(np.int64) << 32 | index.segment
        there = np.isin(places, [drive << 32 | segment for drive, segment in gone])
        rows = there.nonzero()[0].astype(np.int32)
        self.clear_ssd(rows)
        self.settle(rows)

    def drop_bad_record(self, row: int, extent: Ints) -> None:
        """Never offer a bad record again; the row may have been given a better copy meanwhile."""
        index = self.index
        bad = Extent(*extent.tolist())
        here = Extent(int(index.drive[row]), int(index.segment[row]), int(index.record[row]))
        if index.ssd[row] == VALID and bad == here:
            assert self.extents is not None
            self.extents.forget(bad)
            self.clear_ssd(np.array([row], np.int32))

    def adopt(self, found: Iterable[FoundChunk], others: bool = False) -> int:
        """Index chunks found on SSD, in our segments or in others'; those that are there already or do not fit are
        passed over. Returns how many were taken."""
        index, taken = self.index, 0
        assert self.extents is not None
        by_group: list[dict[bytes, FoundChunk]] = [{} for _ in index.rows]
        again = []
        for chunk in found:
            if chunk.group < len(by_group) and by_group[chunk.group].setdefault(chunk.key, chunk) is not chunk:
                again.append(chunk)
        for group, chunks in enumerate(by_group):
            known = index.find_each(group, list(chunks))
            new = [chunk for chunk, row in zip(chunks.values(), known.tolist(), strict=True) if row < 0]
            added = index.add(group, [chunk.key for chunk in new], [chunk.parent for chunk in new])
            rows = known.copy()
            rows[known < 0] = added
            places = np.array([chunk.extent for chunk in chunks.values()], np.int32).reshape(-1, 3)
            wanted = (index.ssd[rows] == NONE).nonzero()[0]
            if others:
                fits = wanted[self.extents.of_others(places[wanted])]
            else:
                fits = wanted[self.extents.adopt(places[wanted], group, rows[wanted])]
            index.ssd[rows[fits]] = VALID
            index.drive[rows[fits]], index.segment[rows[fits]], index.record[rows[fits]] = places[fits].T
            self.ghosts.back(rows[fits])
            index.remove(added[index.ssd[added] == NONE])
            taken += len(fits)
        return taken + (self.adopt(again, others) if again else 0)

    def clear(self, jobs: Jobs) -> None:
        """Forget everything; slots and segments that stale jobs use stay taken until these end."""
        index = self.index
        for group, rows in enumerate(index.rows):
            live = np.array(list(rows.values()), np.int32)
            live = live[index.dram[live] != NONE]
            slots = np.stack((index.slab[live], index.cell[live]), 1).astype(np.int32)
            free = [(group, slab, cell) not in jobs.orphans for slab, cell in slots.tolist()]
            self.slots.give_back(group, slots[np.array(free, np.bool_)])
        index.clear()
        self.ghosts.clear()
        for recency in self.recency:
            recency.clear()
        if self.extents is not None:
            used = np.concatenate([job.extents for job in jobs.live.values()] or [np.empty((0, 3), np.int32)])
            self.extents = self.extents.drop_all(Extent(*e) for e in used.tolist() if e[0] >= 0)

    def check(self, jobs: Jobs) -> None:
        """Assert the invariants; for tests, linear in the number of chunks."""
        index = self.index
        index.check()
        live = np.array([row for rows in index.rows for row in rows.values()], np.int32)
        assert len(self.ghosts) == int((index.ghost[live] != 0).sum())
        for group in range(len(self.recency)):
            mine = live[index.group[live] == group]
            held = int((index.dram[mine] != NONE).sum())
            assert self.slots.used[group] == held + sum(place[0] == group for place in jobs.orphans)
            order = self.recency[group].order()
            assert set(order) == set(mine[index.dram[mine] != NONE].tolist())
