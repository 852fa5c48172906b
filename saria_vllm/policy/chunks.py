"""The chunks of both tiers: the index with the allocators of what its rows hold. Every change of state goes through
here.

Invariant: a row of the index holds a slot exactly while its DRAM state is not NONE, and an SSD record exactly while its
SSD state is not NONE. A row that holds neither and has no lease is a ghost.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from saria_vllm.metrics import DRIVE_ERRORS, Counts, count
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.ghosts import Ghosts
from saria_vllm.policy.index import BAD, BUSY, NONE, VALID, ChunkIndex, Column, Mask, Prefix, Rows
from saria_vllm.policy.jobs import Jobs
from saria_vllm.policy.recency import Recency
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.types import Extent, FoundChunks, Ints

EPOCH_MAX = 2**31 - 2


class Chunks:
    """See the module's text."""

    def __init__(self, groups: int, slots: SlotAllocator, extents: ExtentAllocator | None, ghosts_max: int) -> None:
        self.index = ChunkIndex(groups)
        self.slots, self.extents = slots, extents
        self.recency = [Recency(self.index) for _ in range(groups)]
        self.ghosts = Ghosts(self.index, ghosts_max)
        self.counts: Counts = {}
        self.granted = [0] * groups
        """Chunks with a second chance, by group."""
        self._epoch = 0

    def touch(self, group: int, rows: Rows, depths: Column, now: float) -> None:
        """Rows of one prefix, parents first, become the most recent."""
        self._keep_epochs_small()
        index = self.index
        self._epoch += 1
        index.put_order(rows, self._epoch, depths)
        index.touched[rows] = now
        self.recency[group].begin(self._epoch, rows[index.dram[rows] != NONE][::-1])

    def _keep_epochs_small(self) -> None:
        """Columns hold 31 bits, some months of touches of a busy engine: then the epochs in use are told from 1."""
        if self._epoch < EPOCH_MAX:
            return
        for recency in self.recency:
            recency.compact()
        epochs = np.union1d(self.index.epoch, [0])
        self.index.epoch[:] = epochs.searchsorted(self.index.epoch)
        for recency in self.recency:
            recency.renumber(epochs)
        self._epoch = len(epochs)

    def fill(self, group: int, prefix: Prefix, positions: Column, slots: Ints, now: float) -> Rows:
        """Chunks that no tier holds are being stored in these slots. Returns their rows.

        They are as recent as the chunk before them, and older where that is of the same moment.
        """
        self._keep_epochs_small()
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
        index.slot[rows] = slots
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
        """After a change: free what was found unreadable, make ghosts of what no tier holds any more, and let eviction
        find what it may take now."""
        index = self.index
        if not (index.dram[rows] == VALID).all():
            free = rows[index.leases[rows] == 0]
            bad = free[(index.dram[free] == BAD) & (index.ssd[free] != BUSY)]
            if bad.size:
                self.drop_dram(bad)
            gone = free[(index.dram[free] == NONE) & (index.ssd[free] == NONE) & (index.ghost[free] == 0)]
            if gone.size:
                index.remove(self.ghosts.add(gone))
        for recency in self.recency:
            recency.unpark(rows)

    def drop_dram(self, rows: Rows) -> None:
        index = self.index
        slots = index.slots(rows)
        if len(self.recency) == 1:
            self.slots.give_back(0, slots)
        else:
            groups = index.group[rows]
            for group in np.unique(groups).tolist():
                self.slots.give_back(group, slots[groups == group])
        index.dram[rows] = NONE
        index.slot[rows] = -1
        index.promoted[rows] = 0

    def clear_ssd(self, rows: Rows) -> None:
        """Their records are gone or were never written."""
        index = self.index
        self.revoke(rows)
        index.ssd[rows] = NONE
        index.extent[rows] = -1

    def grant(self, group: int, rows: Rows) -> None:
        """Chunks of a group that are on SSD, and have no second chance, get one."""
        self.index.again[rows] = 1
        self.granted[group] += len(rows)

    def revoke(self, rows: Rows) -> None:
        """Second chances of these chunks, where they have one, are over: used, or given back."""
        index = self.index
        rows = rows[index.again[rows] == 1]
        index.again[rows] = 0
        for group, chunks in enumerate(np.bincount(index.group[rows]).tolist()):
            self.granted[group] -= chunks

    def lose_ssd(self, rows: Rows) -> None:
        """Their records went with their segments."""
        if rows.size:
            self.clear_ssd(rows)
            self.settle(rows)
            count(self.counts, "retired_chunks", len(rows))

    def reads_failed(self, rows: Rows, extents: Ints, reason: str, now: float) -> None:
        """Records of these rows, of any drives and also of other engines, could not be read by a load."""
        if self.extents is None or not rows.size:
            return
        if reason != "deadline":  # They may be good: their drive is avoided for a while, and they are not lost.
            for row, extent in zip(rows.tolist(), extents, strict=True):
                self.drop_bad_record(row, extent)
        drives = np.unique(extents[:, 0]).tolist()
        if reason == "vanished" and len(drives) > 1:
            reason = "read_failed"  # One of them is gone: writes will tell which.
        for drive in drives:
            if drive < self.extents.drives:
                self.drive_failed(extents[extents[:, 0] == drive], reason, now, reading=True)
            elif reason == "deadline":
                self.extents.pause_reads(drive, now)

    def drive_failed(self, extents: Ints, reason: str, now: float, reading: bool = False) -> None:
        """Records of one drive, rows of (drive, segment, record), could not be written or read. What is doubtful with
        them goes: their segments where the drive failed, all where its directory is gone. Where it is full its oldest
        goes."""
        assert self.extents is not None
        drive, striping = int(extents[0, 0]), self.extents.striping
        if reason in DRIVE_ERRORS:
            striping.count(drive, "drive_errors", len(extents))
        if reason == "deadline":
            self.extents.pause_reads(drive, now)
        elif reason == "vanished":
            self.lose_ssd(self.extents.lose_drive(drive))
            place = self.index.extent[:, 0]
            self._lose((place >= self.extents.drives) & (place % self.extents.drives == drive))
        elif reason == "disk_full":
            self.lose_ssd(self.extents.full(extents, now))
        elif reason in ("read_failed", "write_failed"):
            self.lose_ssd(self.extents.failed(extents, reading, now))

    def lose_others(self, gone: Sequence[tuple[int, int]]) -> None:
        """These (drive, segment) of other engines are gone. Loads that read them may end well all the same."""
        if not gone:
            return
        index = self.index
        places = index.extent[:, 0].astype(np.int64) << 32 | index.extent[:, 1]
        self._lose(np.isin(places, [drive << 32 | segment for drive, segment in gone]))

    def _lose(self, there: Mask) -> None:
        """Other engines' records of these rows are of no use any more."""
        rows = there.nonzero()[0]
        self.clear_ssd(rows)
        self.settle(rows)

    def drop_bad_record(self, row: int, extent: Ints) -> None:
        """Never offer a bad record again; the row may have been given a better copy meanwhile."""
        index = self.index
        bad = Extent(*extent.tolist())
        here = Extent(*index.extent[row].tolist())
        if index.ssd[row] == VALID and bad == here:
            assert self.extents is not None
            self.extents.forget(bad)
            self.clear_ssd(np.array([row], np.intp))

    def adopt(self, found: FoundChunks, others: bool = False) -> int:
        """Index chunks found on SSD, in our segments or in others'; those that are there already or do not fit are
        passed over, but for others' newer records of what is others'. Returns how many were new."""
        index, taken = self.index, 0
        assert self.extents is not None
        again = found.twins(-np.arange(len(found)))
        if again.size:
            first = np.ones(len(found), np.bool_)
            first[again] = False
            return self.adopt(found.take(first), others) + self.adopt(found.take(again), others)
        for group in range(len(index.rows)):
            here = found.take(found.groups == group)
            keys = here.key_list()
            rows = index.find_each(group, keys)
            new = rows < 0
            new_keys = keys if new.all() else list(itertools.compress(keys, new.tolist()))
            added = index.add(group, new_keys, here.take(new).parent_list(new_keys))
            rows[new] = added
            wanted = index.ssd[rows] == NONE
            if others:  # A second chance is behind what it stands in for, which goes first.
                known = (index.ssd[rows] == VALID) & (index.extent[rows, 0] >= self.extents.drives)
                wanted |= known & (here.extents[:, 1] > index.extent[rows, 1])
            extents = here.extents
            if not wanted.all():
                rows, extents = rows[wanted], extents[wanted]
            fits = self.extents.of_others(extents) if others else self.extents.adopt(extents, group, rows)
            if not fits.all():
                rows, extents = rows[fits], extents[fits]
            taken += int(np.count_nonzero(index.ssd[rows] == NONE))
            index.ssd[rows] = VALID
            index.extent[rows] = extents
            self.ghosts.back(rows)
            index.remove(added[index.ssd[added] == NONE])
        return taken

    def clear(self, jobs: Jobs) -> None:
        """Forget everything; slots and segments that stale jobs use stay taken until these end."""
        index = self.index
        for group, rows in enumerate(index.rows):
            live = np.array(list(rows.values()), np.intp)
            live = live[index.dram[live] != NONE]
            slots = index.slot[live]
            free = [(group, slab, cell) not in jobs.stale_slots for slab, cell in slots.tolist()]
            self.slots.give_back(group, slots[np.array(free, np.bool_)])
        index.clear()
        self.granted = [0] * len(self.granted)
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
        live = np.array([row for rows in index.rows for row in rows.values()], np.intp)
        assert len(self.ghosts) == int((index.ghost[live] != 0).sum())
        for group in range(len(self.recency)):
            mine = live[index.group[live] == group]
            held = int((index.dram[mine] != NONE).sum())
            assert self.slots.used[group] == held + sum(place[0] == group for place in jobs.stale_slots)
            order = self.recency[group].order()
            assert set(order) == set(mine[index.dram[mine] != NONE].tolist())
            assert self.granted[group] == int((index.again[mine] == 1).sum())
