"""When a chunk is worth an SSD write. Each policy answers at three moments, for many chunks at once, with reasons."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.index import ChunkIndex, Rows


class Reason(NamedTuple):
    name: str
    """A label for counters."""
    admit: bool


REASONS = (
    Reason("every_chunk", True),
    Reason("never", False),
    Reason("not_yet", False),
    Reason("eviction_count", True),
    Reason("reuse_count", True),
)
EVERY_CHUNK, NEVER, NOT_YET, EVICTION_COUNT, REUSE_COUNT = range(len(REASONS))
ADMITS = np.array([reason.admit for reason in REASONS])
"""By reason number."""

Reasons = npt.NDArray[np.uint8]
"""A reason number for each row that was asked about."""


class Admission(Protocol):
    def kept(self, index: ChunkIndex, rows: Rows) -> Reasons | None:
        """The chunks entered DRAM or were reused there; `reuses` counts this one. None: nothing to write yet."""

    def evicted(self, index: ChunkIndex, rows: Rows, now: float) -> Reasons:
        """The chunks are leaving DRAM and are not on SSD; `evictions` does not count this one yet."""


class FullDuplicate:
    """Persist every stored chunk: the baseline of other tiers."""

    def kept(self, index: ChunkIndex, rows: Rows) -> Reasons | None:
        return np.full(len(rows), EVERY_CHUNK, np.uint8)

    def evicted(self, index: ChunkIndex, rows: Rows, now: float) -> Reasons:
        return np.full(len(rows), EVERY_CHUNK, np.uint8)


class DramOnly:
    """Never persist."""

    def kept(self, index: ChunkIndex, rows: Rows) -> Reasons | None:
        return None

    def evicted(self, index: ChunkIndex, rows: Rows, now: float) -> Reasons:
        return np.full(len(rows), NEVER, np.uint8)


class Saria:
    """Persist on the k-th DRAM eviction, and before eviction once reused N times (0: off).

    A chunk that came back after k-1 evictions has proved that it outlives DRAM and returns; what is read once and
    never again costs no write.
    """

    def __init__(self, evictions: int, reuses: int) -> None:
        self._evictions_min, self._reuses_min = evictions, reuses

    def kept(self, index: ChunkIndex, rows: Rows) -> Reasons | None:
        if not self._reuses_min:
            return None
        return np.where(index.reuses[rows] >= self._reuses_min, np.uint8(REUSE_COUNT), np.uint8(NOT_YET))

    def evicted(self, index: ChunkIndex, rows: Rows, now: float) -> Reasons:
        often = index.evictions[rows] >= self._evictions_min - 1
        reasons = np.where(often, np.uint8(EVICTION_COUNT), np.uint8(NOT_YET))
        kept = self.kept(index, rows)
        return reasons if kept is None else np.where(reasons == NOT_YET, kept, reasons)


def make_admission(config: AdmissionConfig) -> Admission:
    """The configured policy."""
    match config.policy:
        case "full_duplicate":
            return FullDuplicate()
        case "dram_only":
            return DramOnly()
        case "saria":
            return Saria(config.evictions, config.reuses)
