"""How much of what was loaded from SSD goes back to DRAM: just enough for both tiers to end together next time."""

from __future__ import annotations

import math


def dram_share(ssd_bytes_s: float, ingress_bytes_s: float) -> float:
    """Share of a prefix that belongs in DRAM: 1 - B_ssd / B_ingress.

    A reload of n_ssd and n_dram bytes that run side by side takes T = max(n_ssd / B_ssd, (n_ssd + n_dram) / B_ingress);
    it is shortest when both terms are equal.
    """
    assert ingress_bytes_s > 0
    return min(1.0, max(0.0, 1 - ssd_bytes_s / ingress_bytes_s))


def chunks_to_promote(in_dram: int, from_ssd: int, share: float) -> int:
    """How many of `from_ssd` loaded chunks to copy back, so that `share` of all hit chunks are in DRAM."""
    return min(from_ssd, max(0, math.ceil(share * (in_dram + from_ssd) - 1e-9) - in_dram))
