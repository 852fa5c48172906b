"""History of chunks whose bytes are gone: index rows that no tier holds, bounded, the oldest forgotten first."""

from __future__ import annotations

from collections import deque

import numpy as np

from saria_vllm.policy.index import NO_ROWS, ChunkIndex, Rows


class Ghosts:
    """Which rows of an index are ghosts, in the order in which they became it. One costs what an index row costs."""

    def __init__(self, index: ChunkIndex, entries_max: int) -> None:
        assert entries_max > 0
        self._index, self._entries_max = index, entries_max
        self._queue: deque[tuple[int, Rows]] = deque()
        self._number = 0
        self._count, self._queued = 0, 0

    def __len__(self) -> int:
        return self._count

    def add(self, rows: Rows) -> Rows:
        """Rows that no tier holds from now on. Returns ghosts that must be forgotten for them."""
        if not rows.size:
            return NO_ROWS
        self._number += 1
        self._index.ghost[rows] = self._number
        self._queue.append((self._number, rows.astype(np.int32)))
        self._count += len(rows)
        self._queued += len(rows)
        if self._queued > 2 * self._count + (1 << 16):
            self._compact()
        forgotten = []
        while self._count > self._entries_max:
            number, old = self._queue.popleft()
            self._queued -= len(old)
            old = old[self._index.ghost[old] == number]
            over = self._count - self._entries_max
            if len(old) > over:
                self._queue.appendleft((number, old[over:]))
                self._queued += len(old) - over
                old = old[:over]
            self._count -= len(old)
            forgotten.append(old)
        return np.concatenate(forgotten).astype(np.intp) if forgotten else NO_ROWS

    def back(self, rows: Rows) -> None:
        """Rows that a tier holds again; those that were no ghosts stay as they are."""
        self._count -= int((self._index.ghost[rows] != 0).sum())
        self._index.ghost[rows] = 0

    def _compact(self) -> None:
        """Drop what came back: there is never much more of it than of ghosts."""
        still = ((number, rows[self._index.ghost[rows] == number]) for number, rows in self._queue)
        self._queue = deque((number, rows) for number, rows in still if rows.size)
        self._queued = sum(len(rows) for _, rows in self._queue)

    def clear(self) -> None:
        self._queue.clear()
        self._count = self._queued = 0
