"""How much of what was loaded from SSD goes back to DRAM: just enough for both tiers to end together next time."""

from __future__ import annotations

import math

from saria_vllm.config import PromotionMode

_HALF_LIFE_S = 600.0
"""What was seen counts half after it: load changes within minutes."""

_PRIOR_CHUNKS = 1024.0
"""Believed to have been used when nothing has been seen: a share that went to nothing comes back when time passes."""

_USED_ENOUGH = 0.5
"""Share of promoted chunks that are used before they are evicted, from which on there is no pressure."""


def dram_share(ssd_ingress_ratio: float) -> float:
    """Share of a prefix that belongs in DRAM: 1 - B_ssd / B_ingress.

    A reload of n_ssd and n_dram bytes that run side by side takes T = max(n_ssd / B_ssd, (n_ssd + n_dram) / B_ingress);
    it is shortest when both terms are equal, and more in DRAM makes it no shorter.
    """
    return min(1.0, max(0.0, 1 - ssd_ingress_ratio))


def chunks_to_promote(in_dram: int, from_ssd: int, share: float) -> int:
    """How many of `from_ssd` loaded chunks to copy back, so that `share` of all hit chunks are in DRAM."""
    return min(from_ssd, max(0, math.ceil(share * (in_dram + from_ssd) - 1e-9) - in_dram))


class Promotion:
    """The share of a prefix that belongs in DRAM now.

    A fixed one stays as it is. `auto` is `dram_share`, and lower in proportion while less than half of the promoted
    chunks are used before DRAM evicts them again: copies that nobody reads only push out what is read.

    Args:
        ssd_ingress_ratio: B_ssd / B_ingress, for `auto`, until it is measured.
    """

    def __init__(self, mode: PromotionMode = 1.0, ssd_ingress_ratio: float = 0.5) -> None:
        self._adapts = mode == "auto"
        self._target = dram_share(ssd_ingress_ratio) if mode == "auto" else float(mode)
        self._used, self._evicted, self._at = 0.0, 0.0, 0.0

    def measured(self, ssd_bytes_s: float, ingress_bytes_s: float) -> None:
        """The rates of all drives together, and from DRAM to HBM while nothing is read from drives; 0 while one is not
        known: then what was believed stays."""
        if self._adapts and ssd_bytes_s > 0 and ingress_bytes_s > 0:
            self._target = dram_share(ssd_bytes_s / ingress_bytes_s)

    def used(self, chunks: int, now: float) -> None:
        """So many chunks were used for the first time since they were promoted."""
        self._decay(now)
        self._used += chunks

    def evicted(self, chunks: int, now: float) -> None:
        """So many promoted chunks left DRAM and were never used there."""
        self._decay(now)
        self._evicted += chunks

    def _decay(self, now: float) -> None:
        if now > self._at:
            factor = 0.5 ** ((now - self._at) / _HALF_LIFE_S)
            self._used, self._evicted, self._at = self._used * factor, self._evicted * factor, now

    def used_share(self, now: float) -> float:
        """Of chunks promoted lately, those used before they were evicted."""
        self._decay(now)
        used = self._used + _PRIOR_CHUNKS
        return used / (used + self._evicted)

    def share(self, now: float) -> float:
        """See the class."""
        return self._target * min(1.0, self.used_share(now) / _USED_ENOUGH) if self._adapts else self._target
