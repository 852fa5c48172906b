"""When a chunk is worth an SSD write. Each policy answers at three moments and gives its reason."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from saria_vllm.config import AdmissionConfig


class Decision(NamedTuple):
    admit: bool
    reason: str
    """A label for counters."""


class Admission(Protocol):
    def stored(self, evictions: int, reuses: int) -> Decision:
        """The chunk entered DRAM."""

    def reused(self, evictions: int, reuses: int) -> Decision:
        """The chunk in DRAM was reused; `reuses` counts this one."""

    def evicted(self, evictions: int, reuses: int) -> Decision:
        """The chunk is leaving DRAM and is not on SSD; `evictions` counts this one."""


class FullDuplicate:
    """Persist every stored chunk: the baseline of other tiers."""

    def stored(self, evictions: int, reuses: int) -> Decision:
        return Decision(True, "every_chunk")

    reused = stored
    evicted = stored


class DramOnly:
    """Never persist."""

    def stored(self, evictions: int, reuses: int) -> Decision:
        return Decision(False, "never")

    reused = stored
    evicted = stored


class Saria:
    """Persist on the k-th DRAM eviction, and before eviction once reused N times (0: off).

    A chunk that came back after k-1 evictions has proved that it outlives DRAM and returns; what is read once and
    never again costs no write.
    """

    def __init__(self, evictions: int, reuses: int) -> None:
        self._evictions_min, self._reuses_min = evictions, reuses

    def stored(self, evictions: int, reuses: int) -> Decision:
        return self.reused(evictions, reuses)

    def reused(self, evictions: int, reuses: int) -> Decision:
        if self._reuses_min and reuses >= self._reuses_min:
            return Decision(True, "reuse_count")
        return Decision(False, "not_yet")

    def evicted(self, evictions: int, reuses: int) -> Decision:
        if evictions >= self._evictions_min:
            return Decision(True, "eviction_count")
        return self.reused(evictions, reuses)


def make_admission(config: AdmissionConfig) -> Admission:
    """The configured policy."""
    match config.policy:
        case "full_duplicate":
            return FullDuplicate()
        case "dram_only":
            return DramOnly()
        case "saria":
            return Saria(config.evictions, config.reuses)
