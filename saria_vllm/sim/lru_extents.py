"""An SSD that replaces single records, the least recently written or read first: what other simulators assume.

Stands in for `ExtentAllocator`, whose segments are retired whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.index import NO_ROWS, Rows
from saria_vllm.types import Extent, Ints


class LruExtents(ExtentAllocator):
    """Records of one group on one drive. An extent is (0, record, 0); reading is instant, so nothing is ever busy."""

    def __init__(self, records: int) -> None:
        super().__init__(1, 0, [1])
        self._free = list(range(records - 1, -1, -1))
        self._order: OrderedDict[int, None] = OrderedDict()
        self._row = np.full(records, -1, np.int32)

    def take(self, group: int, count: int, room: Sequence[int], now: float) -> tuple[Ints, Rows]:
        taken: list[tuple[int, int, int]] = []
        lost: list[int] = []
        while len(taken) < count and (self._free or self._order):
            if not self._free:
                record, _ = self._order.popitem(last=False)
                lost.append(int(self._row[record]))
                self._free.append(record)
            taken.append((0, self._free.pop(), 0))
        return np.array(taken, np.int32).reshape(-1, 3), np.array(lost, np.int32) if lost else NO_ROWS

    def group_of(self, extent: Extent) -> int:
        return 0

    def filled(self, extents: Ints, rows: Rows) -> None:
        self._row[extents[:, 1]] = rows
        self._order.update(dict.fromkeys(extents[:, 1].tolist()))

    def forget(self, extent: Extent) -> None:
        del self._order[extent.segment]
        self._free.append(extent.segment)

    def hold(self, extents: Ints) -> None:
        """Reading makes recent, children first."""
        self.refresh(extents[:, 1])

    def refresh(self, records: Ints) -> None:
        """Make records of one prefix, parents first, the most recent."""
        move = self._order.move_to_end
        for record in records[::-1].tolist():
            move(record)

    def release(self, extents: Ints) -> None:
        pass
