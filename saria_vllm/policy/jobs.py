"""Jobs in flight, as the scheduler remembers them: which rows, slots and records they use, who has yet to report."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from saria_vllm.policy.index import NO_ROWS, ChunkIndex, Rows
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.types import Ints, JobResult

_NO_SLOTS: Ints = np.empty((0, 2), np.int32)
_NO_EXTENTS: Ints = np.empty((0, 3), np.int32)


class Job:
    """A job in flight. `rows` are index rows; a reset sets `stale` and turns them into group numbers."""

    __slots__ = ("extents", "failed", "kind", "nbytes", "ranks_left", "reason", "rows", "slots", "stale", "tokens")

    def __init__(self, kind: str, ranks: int) -> None:
        self.kind = kind
        self.rows: Rows = NO_ROWS
        self.slots, self.extents = _NO_SLOTS, _NO_EXTENTS
        """Of each row, -1 where it uses none."""
        self.tokens: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """Of a load, by chunk: a hit may begin and end inside one."""
        self.nbytes = (0, 0)
        """Of a load, on one rank: from SSD, and in all."""
        self.ranks_left = ranks
        self.failed: set[int] = set()
        self.reason = ""
        self.stale = False

    def add(self, rows: Rows, slots: Ints, extents: Ints = _NO_EXTENTS) -> None:
        """Rows of one group more."""
        self.rows = np.concatenate((self.rows, rows)) if self.rows.size else rows
        self.slots = np.concatenate((self.slots, slots)) if self.slots.size else slots
        self.extents = np.concatenate((self.extents, extents)) if self.extents.size else extents


class Jobs:
    """Jobs by id. Slots that jobs from before a reset still use are given back by the last of them."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._last_id = 0
        self.live: dict[int, Job] = {}
        self.stale_slots: dict[tuple[int, int, int], int] = {}
        """(group, slab, cell): number of stale jobs that use it."""

    def begin(self, kind: str) -> tuple[int, Job]:
        self._last_id += 1
        job = self.live[self._last_id] = Job(kind, self._ranks)
        return self._last_id, job

    def finished(self, results: Iterable[JobResult]) -> list[Job]:
        """Take ranks' results; the jobs for which they were the last ones."""
        ended = []
        for result in results:
            job = self.live[result.job_id]
            if result.failed:
                job.failed.update(result.failed)
                job.reason = job.reason or result.reason
            job.ranks_left -= 1
            if not job.ranks_left:
                ended.append(self.live.pop(result.job_id))
        return ended

    def make_stale(self, index: ChunkIndex) -> None:
        """Before the index is cleared: from now on these jobs end without a word to it."""
        for job in self.live.values():
            if job.stale:
                continue
            job.stale = True
            job.rows = index.group[job.rows].astype(np.intp)
            for place in _places(job):
                self.stale_slots[place] = self.stale_slots.get(place, 0) + 1

    def give_back(self, job: Job, slots: SlotAllocator) -> None:
        """A stale job has ended: free the slots that no other stale job uses."""
        for place in _places(job):
            self.stale_slots[place] -= 1
            if not self.stale_slots[place]:
                del self.stale_slots[place]
                slots.give_back(place[0], np.array([place[1:]], np.int32))


def _places(job: Job) -> list[tuple[int, int, int]]:
    groups = job.rows.tolist()
    return [(groups[i], slab, cell) for i, (slab, cell) in enumerate(job.slots.tolist()) if slab >= 0]
