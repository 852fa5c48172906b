"""The index of known chunks: which tier holds them, who uses them, what is remembered of them.

Built for a million chunks and for prefixes of thousands: one dict per group from chunk key to row, and columns of
machine integers that are read and written for many rows at once. A row lives as long as a tier holds the chunk, a job
is at work on it, or its history is kept (a ghost).
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from saria_vllm.types import Ints

NONE, BUSY, VALID, BAD = 0, 1, 2, 3
"""State of a chunk's copy on a tier: not there, being written, readable, or (DRAM only) found unreadable and never
offered again, its slot freed when no job uses it."""

Column = npt.NDArray[np.integer]
Rows = Column
"""Row numbers, of the type with which numpy indexes, `intp`: any other is made into it at each use. Where many are kept
they have 32 bits."""
Mask = npt.NDArray[np.bool_]

NO_ROWS: Rows = np.empty(0, np.intp)

_STRIDE = 64
"""Every so many keys of a prefix are looked up, as long as the chunks between lie in a row."""

_ROW = np.dtype(
    [
        ("slot", np.int32, 2), ("depth", np.int32), ("epoch", np.int32), ("extent", np.int32, 3), ("visit", np.int32),
        ("touched", np.float32), ("dram", np.uint8), ("ssd", np.uint8), ("leases", np.int16), ("reuses", np.uint16),
        ("promoted", np.uint8), ("evicting", np.uint8), ("burst", np.int32), ("uses", np.int32),
        ("group", np.uint8), ("again", np.uint8), ("evictions", np.uint8), ("chained", np.uint8),
        ("ghost", np.int32), ("entered", np.float32),
    ]
)  # fmt: skip
"""A row in 64 bytes, one line of a CPU's cache: what a plan costs is waiting for memory, and it needs most of a row."""
_EMPTY = np.zeros(1, _ROW)
_EMPTY["slot"] = _EMPTY["extent"] = -1


class Prefix:
    """A request's chunk keys, and the rows where they were last found."""

    __slots__ = ("keys", "located", "reused", "rows", "uses", "visit")

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self.keys: list[bytes] = list(keys)
        """May only be appended to, or cut by `cut`."""
        self.rows: list[Rows] = []
        """By group; row numbers of the leading keys, -1 where none was found."""
        self.uses: list[Ints] = []
        """`ChunkIndex.uses` of those rows at that time: a row that was given to another chunk since differs."""
        self.located = (-1, 0, 0)
        """The index's version when chunks first..end were looked at last, and these."""
        self.visit = 0
        """Of the request that it belongs to, and"""
        self.reused = sys.maxsize
        """how many of its chunks that one reuses; as many as there are while nothing else is known."""

    def cut(self, end: int) -> None:
        """Keep the first `end` keys."""
        del self.keys[end:]
        self.located = (-1, 0, 0)
        self.rows = [rows[:end] for rows in self.rows]
        self.uses = [uses[:end] for uses in self.uses]


class ChunkIndex:
    """Rows by (group, key). Invariants: `check`."""

    group: Column
    dram: Column
    ssd: Column
    evicting: Column
    """1 while a persist runs whose end frees the slot."""
    slot: Ints
    """(slab, cell), -1 for none; `slots` reads them faster."""
    extent: Ints
    """(drive, segment, record), -1 for none."""
    leases: Column
    """Loads in flight that read this chunk and bring it to HBM."""
    evictions: Column
    reuses: Column
    epoch: Column
    """When it was last touched: a number that `Recency` gives out, 0 for never."""
    touched: npt.NDArray[np.float32]
    """Time of the last touch, in seconds."""
    entered: npt.NDArray[np.float32]
    """Time at which it entered DRAM first, in seconds."""
    visit: Column
    """The request that touched it last, and"""
    burst: Column
    """the eviction that it was last part of: numbers of `Returns`, 0 for none."""
    promoted: Column
    """1 while it is in DRAM by a promotion and was not used since."""
    again: Column
    """1 while it has a second chance: it is on SSD, and is written there again when it leaves DRAM."""
    depth: Column
    """Position in the prefix, in chunks."""
    ghost: Column
    """When only its history was left: a number that `Ghosts` gives out, 0 while a tier holds it."""
    uses: Column
    """How often this row was given back; tells a stale row number in a `Prefix`."""
    chained: Column
    """1 where the row before holds the chunk before in the prefix, in the same group."""

    def __init__(self, groups: int, rows: int = 1 << 14) -> None:
        self.rows: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self.key: list[bytes] = []
        self.parent: list[bytes] = []
        self._free: list[int] = []
        self._version = 0
        """Grows when a row is given to a chunk or taken from it."""
        self._table = np.zeros(0, _ROW)
        self._grow(rows)

    def __len__(self) -> int:
        return sum(map(len, self.rows))

    def find(self, group: int, keys: Sequence[bytes]) -> Rows:
        """Rows of the consecutive chunks of one prefix, -1 where there is none.

        Chunk keys are hashes over the whole prefix, so a key tells all keys before it. Where every `_STRIDE`th key lies
        as many rows after the one before and the rows between are chained, these are the chunks between.
        """
        count = len(keys)
        if count <= _STRIDE:
            return self.find_each(group, keys)
        samples = np.append(np.arange(0, count - 1, _STRIDE), count - 1)
        ends = self.find_each(group, [keys[p] for p in samples.tolist()])
        lengths = np.diff(samples)
        rows = np.repeat(ends[:-1], lengths) + (np.arange(count - 1) - np.repeat(samples[:-1], lengths))
        rows = np.append(rows, ends[-1])
        runs = (ends[:-1] >= 0) & (np.diff(ends) == lengths)
        inside = np.where(np.repeat(runs, lengths), rows[1:], 0)
        runs &= np.minimum.reduceat(self.chained[inside], samples[:-1]) == 1
        for run in (~runs).nonzero()[0].tolist():
            low, high = int(samples[run]), int(samples[run + 1])
            rows[low:high] = self.find_each(group, keys[low:high])
        return rows

    def find_each(self, group: int, keys: Sequence[bytes]) -> Rows:
        """Rows of any keys, -1 where there is none."""
        if not self.rows[group]:
            return np.full(len(keys), -1, np.intp)
        return np.fromiter(map(self.rows[group].get, keys, itertools.repeat(-1)), np.intp, len(keys))

    def locate(self, prefix: Prefix, first: int, end: int) -> list[Rows]:
        """By group: rows of the prefix's chunks first..end, -1 where there is none. Looks up only what it must."""
        if not prefix.rows:
            prefix.rows = [NO_ROWS] * len(self.rows)
            prefix.uses = [np.empty(0, np.int32)] * len(self.rows)
        version, low, high = prefix.located
        if version == self._version and low <= first and end <= high:
            return [rows[first:end] for rows in prefix.rows]
        prefix.located = (self._version, first, end)
        located = []
        for group in range(len(self.rows)):
            more = end - len(prefix.rows[group])
            if more > 0:
                prefix.rows[group] = np.concatenate((prefix.rows[group], np.full(more, -1, np.intp)))
                prefix.uses[group] = np.concatenate((prefix.uses[group], np.zeros(more, np.int32)))
            rows, uses = prefix.rows[group][first:end], prefix.uses[group][first:end]
            stale = ((rows < 0) | (self.uses[rows] != uses)).nonzero()[0]
            if stale.size:
                low, high = int(stale[0]), int(stale[-1]) + 1
                found = self.find(group, prefix.keys[first + low : first + high])
                rows[low:high] = found
                uses[low:high] = self.uses[found]
            located.append(rows)
        return located

    def add(self, group: int, keys: Sequence[bytes], parents: Sequence[bytes]) -> Rows:
        """Rows for chunks that are not known yet, each once."""
        self._version += 1
        count = len(keys)
        reused = self._free[len(self._free) - min(count, len(self._free)) :]
        del self._free[len(self._free) - len(reused) :]
        reused.sort()  # They were evicted children first; rows in a row are found, and read, faster.
        size = len(self.key)
        end = size + count - len(reused)
        for row, key, parent in zip(reused, keys, parents, strict=False):
            self.key[row], self.parent[row] = key, parent
        before = self.key[-1] if size else b""
        fresh = keys[len(reused) :] if reused else keys
        self.key += fresh
        self.parent += parents[len(reused) :] if reused else parents
        if len(self.key) > len(self.dram):
            self._grow(max(len(self.key), len(self.dram) * 4))
        self.slot[size : len(self.key)] = self.extent[size : len(self.key)] = -1
        known = self.rows[group]
        known_before = len(known)
        known.update(zip(keys, itertools.chain(reused, range(size, end)) if reused else range(size, end), strict=True))
        assert len(known) == known_before + count, "a chunk was known already"
        rows: Rows = np.concatenate((np.array(reused, np.intp), np.arange(size, end)))
        self.group[rows] = group
        some = len(reused)
        above = [self.key[row - 1] for row in reused] + [before][: count - some]
        first = [parent == key != b"" for parent, key in zip(parents, above, strict=False)]  # Rows may be free.
        # A new one's parent is one of these very objects, if any: looking into both would wait for a million's memory.
        more = map(operator.is_, itertools.islice(parents, len(first), None), fresh)
        follows = np.fromiter(itertools.chain(first, more), np.bool_, count)
        self.chained[rows] = follows & (rows > 0) & (self.group[rows - 1] == group)
        return rows

    def _grow(self, size: int) -> None:
        """Rows beyond the last one cost address space alone: the memory of zeros is taken when it is written."""
        table = np.zeros(size, _ROW)
        table[: len(self._table)] = self._table
        self._table = table
        for name in _ROW.names or ():
            setattr(self, name, table[name])
        # Two numbers side by side are one to numpy, which has no fast way for pairs.
        pairs = table.view(np.int64).reshape(size, -1)
        self._slots, self._order = pairs[:, 0], pairs[:, 1]

    def remove(self, rows: Rows) -> None:
        """Forget rows that no tier and no job uses."""
        if not rows.size:
            return
        self._version += 1
        assert not (self.dram[rows] | self.ssd[rows]).any() and not self.leases[rows].any()
        numbers = rows.tolist()
        for row, group in zip(numbers, self.group[rows].tolist(), strict=True):
            del self.rows[group][self.key[row]]
            self.key[row] = self.parent[row] = b""
        uses = self.uses[rows] + 1
        self._table[rows] = _EMPTY
        self.uses[rows] = uses
        self.chained[np.minimum(rows + 1, len(self.chained) - 1)] = 0
        self._free.extend(numbers)

    def clear(self) -> None:
        """Forget everything, also what tiers hold and jobs use."""
        live = np.array([row for rows in self.rows for row in rows.values()], np.intp)
        self.dram[live], self.ssd[live], self.leases[live] = NONE, NONE, 0
        self.remove(live)

    def put_order(self, rows: Rows, epoch: int, depths: Column) -> None:
        """Write the columns `epoch` and `depth`."""
        self._order[rows] = depths + (epoch << 32)

    def slots(self, rows: Rows) -> Ints:
        """Of these rows: (rows, 2)."""
        slots: Ints = self._slots[rows].view(np.int32).reshape(-1, 2)
        return slots

    def evictable(self, rows: Rows) -> Mask:
        """Whether DRAM may drop them: valid, without leases and not being evicted already."""
        mask: Mask = (self.dram[rows] == VALID) & (self.leases[rows] == 0) & (self.evicting[rows] == 0)
        return mask

    def check(self) -> None:
        """Assert the invariants; for tests, linear in the number of rows."""
        live = 0
        for group, rows in enumerate(self.rows):
            for key, row in rows.items():
                live += 1
                assert self.key[row] == key and self.group[row] == group
                held = self.dram[row] != NONE or self.ssd[row] != NONE or self.leases[row] > 0
                assert held == (self.ghost[row] == 0)
                assert (self.slot[row, 0] >= 0) == (self.dram[row] != NONE)
                assert (self.extent[row, 0] >= 0) == (self.ssd[row] != NONE)
                assert not self.promoted[row] or self.dram[row] != NONE
                assert not self.again[row] or self.ssd[row] == VALID
                if self.chained[row]:
                    assert self.key[row - 1] == self.parent[row] and self.group[row - 1] == group
                if self.evicting[row]:
                    assert self.dram[row] == VALID and self.ssd[row] == BUSY and not self.leases[row]
        assert live + len(self._free) == len(self.key)
