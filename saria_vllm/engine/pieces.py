"""Jobs between HBM and DRAM, cut into pieces that are copied in one go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from saria_vllm.types import GroupShape, Ints, LoadPart, StorePart


class Piece(NamedTuple):
    """Chunks of one group that are copied in one go."""

    group: int
    positions: list[int]
    """In the job."""
    slots: Ints
    blocks: Ints
    nbytes: int


class Pieces:
    """The chunks of a job that have a slot, cut off piece by piece."""

    def __init__(self, parts: Sequence[LoadPart | StorePart], shapes: Mapping[int, GroupShape]) -> None:
        self._parts: list[tuple[int, int, Any, Ints, Ints]] = []
        """Group, bytes of a record, positions, slots and blocks of what is left, the last part first."""
        self.nbytes, before = 0, 0
        for part in parts:
            here = (part.slots[:, 0] >= 0).nonzero()[0]
            if len(here):
                record_bytes = shapes[part.group].record_bytes
                self._parts.append((part.group, record_bytes, here + before, part.slots[here], part.blocks[here]))
                self.nbytes += len(here) * record_bytes
            before += len(part.slots)
        self._parts.reverse()

    @property
    def left_bytes(self) -> int:
        return sum(len(positions) * record_bytes for _, record_bytes, positions, _, _ in self._parts)

    def next(self, nbytes: int) -> Piece | None:
        """The next chunks, at most so many bytes but at least one chunk; None when all have been."""
        if not self._parts:
            return None
        group, record_bytes, *columns = self._parts.pop()
        count = max(1, nbytes // record_bytes)
        positions, slots, blocks = (column[:count] for column in columns)
        if count < len(columns[0]):
            positions_left, slots_left, blocks_left = (column[count:] for column in columns)
            self._parts.append((group, record_bytes, positions_left, slots_left, blocks_left))
        return Piece(group, positions.tolist(), slots, blocks, len(positions) * record_bytes)

    def rest(self) -> list[int]:
        """Give up what is left. Returns its positions."""
        parts, self._parts = self._parts, []
        positions: list[int] = np.concatenate([[], *(part[2] for part in reversed(parts))]).astype(int).tolist()
        return positions
