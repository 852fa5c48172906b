"""An SSD that replaces single records, the least recently written or read first: what other simulators assume.

Stands in for `ExtentAllocator`, whose segments are retired whole.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.index import Column, Mask, Rows
from saria_vllm.types import Extent, Ints

_QUEUE = 1 << 14
"""The oldest records, looked up at once when some must go."""


class LruExtents(ExtentAllocator):
    """Records of one group on one drive. An extent is (0, record, 0); reading is instant, so nothing is ever busy."""

    def __init__(self, records: int) -> None:
        super().__init__(1, 0, [1])
        self._free = list(range(records - 1, -1, -1))
        self._row = np.full(records, -1, np.int32)
        self._stamp = np.zeros(records, np.int64)
        """When each was last used, 0 for one that holds nothing readable."""
        self._ticks = 0
        self._queue = self._queue_stamps = np.empty(0, np.int64)
        """The oldest at some time, the oldest first: those used since have another stamp."""

    def take(self, group: int, count: int, room: Sequence[int], now: float) -> tuple[Ints, Rows]:
        free = min(count, len(self._free))
        taken = self._free[len(self._free) - free :][::-1]
        del self._free[len(self._free) - free :]
        oldest = self._take_oldest(count - free)
        places = np.zeros((free + len(oldest), 3), np.int32)
        places[:, 1] = (*taken, *oldest.tolist())
        lost: Rows = self._row[oldest]
        return places, lost

    def untroubled(self, group: int, now: float) -> int:
        """A record is replaced by each write: what goes with the next of a batch is not looked at."""
        return sys.maxsize

    def _take_oldest(self, count: int) -> Column:
        chosen = [np.empty(0, np.int64)]
        while count:
            if not len(self._queue):
                live = self._stamp.nonzero()[0]
                if not live.size:
                    break
                if len(live) > _QUEUE:
                    live = live[np.argpartition(self._stamp[live], _QUEUE)[:_QUEUE]]
                self._queue = live[np.argsort(self._stamp[live])]
                self._queue_stamps = self._stamp[self._queue]
            part = self._queue[:count][self._stamp[self._queue[:count]] == self._queue_stamps[:count]]
            self._queue, self._queue_stamps = self._queue[count:], self._queue_stamps[count:]
            self._stamp[part] = 0
            chosen.append(part)
            count -= len(part)
        return np.concatenate(chosen)

    def _use(self, records: Column) -> None:
        """Make them the most recent, the last one most."""
        self._stamp[records] = self._ticks + 1 + np.arange(len(records))
        self._ticks += len(records)

    def group_of(self, extent: Extent) -> int:
        return 0

    def filled(self, extents: Ints, rows: Rows) -> None:
        self._row[extents[:, 1]] = rows
        self._use(extents[:, 1])

    def forget(self, extent: Extent) -> None:
        self._stamp[extent.segment] = 0
        self._free.append(extent.segment)

    def hold(self, extents: Ints) -> None:
        """Reading makes recent, children first."""
        self.refresh(extents[:, 1])

    def refresh(self, records: Ints) -> None:
        """Make records of one prefix, parents first, the most recent."""
        assert self._stamp[records].all()
        self._use(records[::-1])

    def release(self, extents: Ints) -> None:
        pass

    def given_up(self, extents: Ints) -> Mask:
        return np.zeros(len(extents), np.bool_)
