"""Which cells of the DRAM pool are free. Groups differ in bytes per chunk, so cells are carved from slabs that move
between groups when they are empty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from saria_vllm.types import Ints

SLAB_BYTES = 2 << 20
"""Slabs are a multiple of this."""

_WASTE_MAX = 1 / 32
"""Share of a slab that cells may leave unused before a larger slab is taken."""


def choose_slab_bytes(record_bytes: Iterable[int], region_bytes: int) -> int:
    """Smallest multiple of `SLAB_BYTES` that wastes little with every record size, at most an eighth of the region."""
    sizes = list(record_bytes)
    slab_max = max(region_bytes // 8, *(-(-size // SLAB_BYTES) * SLAB_BYTES for size in sizes))
    best, best_waste = 0, 2.0
    for slab in range(SLAB_BYTES, min(slab_max, 64 * SLAB_BYTES + max(sizes)) + 1, SLAB_BYTES):
        waste = max(slab % size / slab if slab >= size else 1.0 for size in sizes)
        if waste < best_waste:
            best, best_waste = slab, waste
        if waste <= _WASTE_MAX:
            break
    return best


class SlotAllocator:
    """Slots by group. Invariant: a slab belongs to one group from its first cell taken until its last is given back."""

    def __init__(self, slabs: int, cells_per_slab: list[int]) -> None:
        self._cells_per_slab = cells_per_slab
        self._empty_slabs = list(range(slabs - 1, -1, -1))
        self._free_cells: dict[int, list[int]] = {}
        """Free cells of each slab in use."""
        self._partial: list[dict[int, None]] = [{} for _ in cells_per_slab]
        """Slabs of each group that have a free cell."""
        self._free_in_partial = [0] * len(cells_per_slab)
        self.used = [0] * len(cells_per_slab)
        self.takes = 0
        """Calls of `take`: while there is none, no free slot goes."""
        self._taken = np.zeros((slabs, max(cells_per_slab)), np.bool_)

    def free(self, group: int) -> int:
        """Slots that `group` could take now."""
        return self._free_in_partial[group] + len(self._empty_slabs) * self._cells_per_slab[group]

    def slabs_short(self, wanted: Sequence[int]) -> int:
        """Empty slabs missing before every group could take `wanted[group]` slots at once; not above 0: none is.

        `free` counts the empty slabs for each group on its own, so it cannot answer this.
        """
        slabs = 0
        for group, more in enumerate(wanted):
            missing = more - self._free_in_partial[group]
            if missing > 0:
                slabs += -(-missing // self._cells_per_slab[group])
        return slabs - len(self._empty_slabs)

    def free_in_own_slabs(self, group: int) -> int:
        """Slots that `group` could take without an empty slab."""
        return self._free_in_partial[group]

    def total(self, group: int) -> int:
        """Slots of `group` if it had every slab that no other group uses."""
        return self.used[group] + self.free(group)

    def take(self, group: int, count: int) -> Ints:
        """`count` free slots as rows of (slab, cell), fewer when there are fewer."""
        self.takes += 1
        partial, places = self._partial[group], [np.empty((0, 2), np.int32)]
        while count > 0:
            if partial:
                slab = next(reversed(partial))
            elif self._empty_slabs:
                slab = self._empty_slabs.pop()
                self._free_cells[slab] = list(range(self._cells_per_slab[group] - 1, -1, -1))
                self._free_in_partial[group] += self._cells_per_slab[group]
                partial[slab] = None
            else:
                break
            cells = self._free_cells[slab]
            taken = cells[-count:]
            del cells[-count:]
            places.append(np.array([[slab] * len(taken), taken[::-1]], np.int32).T)
            self._taken[slab, taken] = True
            self._free_in_partial[group] -= len(taken)
            self.used[group] += len(taken)
            count -= len(taken)
            if not cells:
                del partial[slab]
        return np.concatenate(places)

    def give_back(self, group: int, slots: Ints) -> None:
        """Return slots, rows of (slab, cell), that were taken for `group`."""
        assert self._taken[slots[:, 0], slots[:, 1]].all()
        self._taken[slots[:, 0], slots[:, 1]] = False
        self.used[group] -= len(slots)
        self._free_in_partial[group] += len(slots)
        for slab in set(slots[:, 0].tolist()):
            cells = self._free_cells[slab]
            cells += slots[slots[:, 0] == slab, 1].tolist()
            self._partial[group][slab] = None
            if len(cells) == self._cells_per_slab[group]:
                self._free_in_partial[group] -= len(cells)
                del self._partial[group][slab]
                del self._free_cells[slab]
                self._empty_slabs.append(slab)
