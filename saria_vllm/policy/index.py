"""The index of known chunks: which tier holds them, who uses them, how recent they are.

Built for a million chunks: one dict per group from chunk key to row, and columns of machine integers. A row lives as
long as a tier holds the chunk or a job is at work on it.

Recency is one doubly linked list per group through the rows that may be evicted from DRAM: valid, without leases and
not being evicted already. Whoever touches a prefix touches children first, and a row that joins the list later goes
behind its nearest listed ancestor, so no row is older than a descendant and plain LRU order evicts children before
parents.
"""

from __future__ import annotations

from array import array

NONE, BUSY, VALID, BAD = 0, 1, 2, 3
"""State of a chunk's copy on a tier: not there, being written, readable, or (DRAM only) found unreadable and never
offered again, its slot freed when no job uses it."""

_OUT = -2
"""Link value of a row that is not in the recency list; -1 ends the list."""


class ChunkIndex:
    """Rows by (group, key). Invariants: `check`."""

    def __init__(self, groups: int) -> None:
        self.rows: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self.key: list[bytes] = []
        self.parent: list[bytes] = []
        self.group = array("B")
        self.dram = array("B")
        self.ssd = array("B")
        self.evicting = array("B")
        """1 while a persist runs whose end frees the slot."""
        self.slab = array("i")
        self.cell = array("i")
        self.drive = array("b")
        self.segment = array("q")
        self.record = array("i")
        self.leases = array("i")
        self.loading = array("i")
        """Loads in flight that bring this chunk to HBM."""
        self.evictions = array("B")
        self.reuses = array("H")
        self._newer = array("i")
        self._older = array("i")
        self._newest = array("i", [-1] * groups)
        self._oldest = array("i", [-1] * groups)
        self._free: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self.rows))

    def add(self, group: int, key: bytes, parent: bytes) -> int:
        """Row of a chunk that is not known yet."""
        assert key not in self.rows[group]
        if self._free:
            row = self._free.pop()
            self.key[row], self.parent[row], self.group[row] = key, parent, group
        else:
            row = len(self.key)
            self.key.append(key)
            self.parent.append(parent)
            self.group.append(group)
            for column, empty in self._columns():
                column.append(empty)
        self.rows[group][key] = row
        return row

    def remove(self, row: int) -> None:
        """Forget a row that no tier and no job uses."""
        assert self.dram[row] == NONE and self.ssd[row] == NONE and not self.leases[row]
        assert self._newer[row] == _OUT
        del self.rows[self.group[row]][self.key[row]]
        self.key[row] = self.parent[row] = b""
        for column, empty in self._columns():
            column[row] = empty
        self._free.append(row)

    def _columns(self) -> tuple[tuple[array[int], int], ...]:
        return (
            (self.dram, NONE), (self.ssd, NONE), (self.evicting, 0), (self.slab, -1), (self.cell, -1),
            (self.drive, -1), (self.segment, -1), (self.record, -1), (self.leases, 0), (self.loading, 0),
            (self.evictions, 0), (self.reuses, 0), (self._newer, _OUT), (self._older, _OUT),
        )  # fmt: skip

    # Recency.

    def listed(self, row: int) -> bool:
        """Whether the row is in its group's recency list."""
        return self._newer[row] != _OUT

    def oldest(self, group: int) -> int:
        """The row to evict next, -1 when there is none."""
        return self._oldest[group]

    def push_newest(self, row: int) -> None:
        """List a row as the most recent of its group."""
        assert not self.listed(row)
        group = self.group[row]
        first = self._newest[group]
        self._newer[row], self._older[row] = -1, first
        self._newest[group] = row
        if first == -1:
            self._oldest[group] = row
        else:
            self._newer[first] = row

    def push_behind(self, row: int, parent: int) -> None:
        """List a row as the next older one after `parent`, which is listed in the same group."""
        assert not self.listed(row) and self.listed(parent)
        older = self._older[parent]
        self._newer[row], self._older[row] = parent, older
        self._older[parent] = row
        if older == -1:
            self._oldest[self.group[row]] = row
        else:
            self._newer[older] = row

    def unlist(self, row: int) -> None:
        """Take a row out of the recency list; one that is not in it stays out."""
        newer, older = self._newer[row], self._older[row]
        if newer == _OUT:
            return
        group = self.group[row]
        if newer == -1:
            self._newest[group] = older
        else:
            self._older[newer] = older
        if older == -1:
            self._oldest[group] = newer
        else:
            self._newer[older] = newer
        self._newer[row] = self._older[row] = _OUT

    def check(self) -> None:
        """Assert the invariants; for tests, linear in the number of rows."""
        live = 0
        for group, rows in enumerate(self.rows):
            listed, row, newer = set(), self._newest[group], -1
            while row != -1:
                assert self._newer[row] == newer and row not in listed
                listed.add(row)
                newer, row = row, self._older[row]
            assert self._oldest[group] == newer
            for key, row in rows.items():
                live += 1
                assert self.key[row] == key and self.group[row] == group
                assert self.dram[row] != NONE or self.ssd[row] != NONE or self.leases[row]
                assert (self.slab[row] >= 0) == (self.dram[row] != NONE)
                assert (self.segment[row] >= 0) == (self.ssd[row] != NONE)
                evictable = self.dram[row] == VALID and not self.leases[row] and not self.evicting[row]
                assert (row in listed) == evictable, (row, self.dram[row], self.leases[row], self.evicting[row])
                if self.evicting[row]:
                    assert self.dram[row] == VALID and self.ssd[row] == BUSY and not self.leases[row]
                assert self.loading[row] <= self.leases[row]
            assert listed <= set(rows.values())
        assert live + len(self._free) == len(self.key)
