"""How fast bytes move: moving averages, for drives and for the way from DRAM to HBM."""

from __future__ import annotations

import math

AVERAGE_S = 5.0
AVERAGE_BYTES = 512 << 20
"""Rates are averages over about so many seconds in which the drive was busy, or so many bytes: a slow drive that became
fast is given little and is hardly ever busy."""

LEARNT_BYTES = 8 << 20
"""A rate is not known before so much was moved."""


class Rate:
    """Bytes per second of busy time, as a moving average."""

    __slots__ = ("_bytes", "_seconds")

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    def learn(self, nbytes: int, seconds: float) -> None:
        kept = math.exp(-seconds / AVERAGE_S - nbytes / AVERAGE_BYTES)
        self._bytes = kept * self._bytes + nbytes
        self._seconds = kept * self._seconds + seconds

    @property
    def known(self) -> float:
        """0 while it is not known, never 0 when it is."""
        enough = self._seconds > AVERAGE_S / 2 or (self._seconds > 0 and self._bytes >= LEARNT_BYTES)
        return max(1.0, self._bytes / self._seconds) if enough else 0.0
