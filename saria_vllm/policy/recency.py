"""LRU order of the chunks in DRAM, children before parents.

Every touch of a prefix is an epoch, and within an epoch deeper chunks are the older ones; so a prefix that is touched
as a whole never has a chunk older than a descendant. A chunk that joins later takes its parent's epoch. The order is
kept as one array of rows per epoch; entries that no longer hold are dropped when they are met. Rows that are met while
they may not be evicted are parked, out of the order, until what holds them ends: else each search would meet them.
"""

from __future__ import annotations

import numpy as np

from saria_vllm.policy.index import NO_ROWS, NONE, ChunkIndex, Column, Rows

_SLICE = 1024
"""Rows looked at in one go."""


class Recency:
    """One group's order. An entry holds while its row is in DRAM and has the epoch that it was entered under."""

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index
        self._epochs: dict[int, list[Rows]] = {}
        """Oldest first; an array alone is sorted, the oldest row first."""
        self._entries, self._entries_max = 0, 1 << 16
        self._parked: set[int] = set()

    def put(self, rows: Rows) -> None:
        """Enter rows, one at least, under the epoch and depth that their columns say."""
        epochs, rows = self._index.epoch[rows], rows.astype(np.int32)
        if epochs[0] == epochs[-1] and (epochs == epochs[0]).all():
            self._put(int(epochs[0]), rows)
        else:
            for epoch in np.unique(epochs).tolist():
                self._put(epoch, rows[epochs == epoch])

    def begin(self, epoch: int, rows: Rows) -> None:
        """Enter rows of a new epoch, each once, the deepest first."""
        if rows.size:
            self._epochs[epoch] = [rows.astype(np.int32)]
            self._entered(len(rows))

    def _put(self, epoch: int, rows: Rows) -> None:
        present = self._epochs.get(epoch)
        if present is not None:
            present.append(rows)
        else:
            last = next(reversed(self._epochs), 0)
            self._epochs[epoch] = [self._sorted(rows)]
            if epoch < last:
                self._epochs = dict(sorted(self._epochs.items()))
        self._entered(len(rows))

    def _entered(self, entries: int) -> None:
        self._entries += entries
        if self._entries > self._entries_max:
            self.compact()

    def _sorted(self, rows: Rows) -> Rows:
        depths = self._index.depth[rows]
        if (depths[:-1] > depths[1:]).all():
            return rows
        rows = np.unique(rows)
        order = np.argsort(-self._index.depth[rows].astype(np.int64), kind="stable")
        sorted_rows: Rows = rows[order]
        return sorted_rows

    def _holds(self, epoch: int, rows: Rows) -> Rows:
        index = self._index
        held: Rows = rows[(index.epoch[rows] == epoch) & (index.dram[rows] != NONE)]
        return held

    def unpark(self, rows: Rows) -> None:
        """What held these rows may have ended."""
        if not self._parked or self._parked.isdisjoint(numbers := rows.tolist()):
            return
        mine = np.array([row for row in numbers if row in self._parked], np.intp)
        free, gone = self._index.evictable(mine), self._index.dram[mine] == NONE
        self._parked.difference_update(mine[free | gone].tolist())
        if free.any():
            self.put(mine[free])

    def oldest(self, count: int) -> Rows:
        """Up to `count` rows that may be evicted, the oldest first; they stay in the order until they are evicted."""
        chosen: list[Rows] = []
        gone = []
        for epoch, arrays in self._epochs.items():
            if count <= 0:
                break
            if len(arrays) > 1:
                self._entries -= sum(map(len, arrays))
                arrays[:] = [self._sorted(self._holds(epoch, np.concatenate(arrays)))]
                self._entries += len(arrays[0])
            kept: list[Rows] = []
            rows, start = arrays[0], 0
            while start < len(rows) and count > 0:
                part = rows[start : start + _SLICE]
                start += _SLICE
                part = self._holds(epoch, part)
                free = self._index.evictable(part)
                if not free.all():
                    self._parked.update(part[~free].tolist())
                    part = part[free]
                kept.append(part)
                chosen.append(part[:count])
                count -= len(chosen[-1])
            left = sum(map(len, kept))
            if left < min(start, len(rows)) // 2 or not left:
                rest = rows[start:]
                self._entries -= min(start, len(rows)) - left
                arrays[0] = np.concatenate((*kept, rest)) if left else rest
            if not len(arrays[0]):
                gone.append(epoch)
        for epoch in gone:
            del self._epochs[epoch]
        return np.concatenate(chosen).astype(np.intp) if chosen else NO_ROWS

    def compact(self) -> None:
        """Drop entries that no longer hold: there are never many more of them than of those that do."""
        held = {}
        for epoch, arrays in self._epochs.items():
            rows = self._holds(epoch, np.concatenate(arrays) if len(arrays) > 1 else arrays[0])
            if rows.size:
                held[epoch] = [self._sorted(rows) if len(arrays) > 1 else rows]
        self._epochs = held
        self._entries = sum(len(arrays[0]) for arrays in held.values())
        self._entries_max = 2 * self._entries + (1 << 16)

    def renumber(self, epochs: Column) -> None:
        """Call each epoch by its position in these. Only those that hold are left, after `compact`."""
        numbers = epochs.searchsorted(list(self._epochs)).tolist()
        self._epochs = dict(zip(numbers, self._epochs.values(), strict=True))

    def clear(self) -> None:
        self._epochs.clear()
        self._entries = 0
        self._parked.clear()

    def order(self) -> list[int]:
        """All rows in order, parked ones in their place, the oldest first; for tests."""
        self.compact()
        rows = [row for arrays in self._epochs.values() for row in arrays[0].tolist()]
        assert len(rows) == len(set(rows))
        parked = np.array(sorted(self._parked.difference(rows)), np.intp)
        assert not self._index.evictable(parked).any() and (self._index.dram[parked] != NONE).all()
        epoch, depth = self._index.epoch, self._index.depth
        return sorted([*rows, *parked.tolist()], key=lambda row: (int(epoch[row]), -int(depth[row])))
