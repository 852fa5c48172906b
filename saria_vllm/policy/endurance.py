"""How many bytes may be written to the SSDs: a budget of drive writes per day, spent where it helps most.

The budget accrues evenly. What is unused is carried over, up to a day's worth; while much of it is there, admission is
generous, and as the last of it goes the admission threshold rises smoothly until what is written equals what accrues. A
hard cap over any 24 hours stands above.
"""

from __future__ import annotations

from collections import deque

import msgspec

DAY_S = 86_400.0

CARRY_DAYS = 1.0
"""Unused budget that is kept, in days of it."""

BAND_DAYS = 0.04
"""The threshold rises over the last of the budget: from its lowest at this much to 1 at nothing. Bytes per day stray
from the budget by no more than the level moves within this band."""

_BIN_S = 300.0

RATED_YEARS = 5.0
"""What a drive's rated writes per day are meant for."""


class EnduranceState(msgspec.Struct):
    """What must survive a restart. Times are seconds of the wall clock."""

    saved_s: float
    level_bytes: float
    written_bytes: int
    """In all."""
    bins: list[tuple[float, int]]
    """(begin, bytes) of the last 24 hours."""


class Governor:
    """Budget of one set of drives. `now` is seconds of any one clock that never goes back.

    Args:
        budget_bytes_day: what may be written per day, over all drives.
        cap_bytes_day: what no 24 hours ever exceed.
    """

    def __init__(self, budget_bytes_day: float, cap_bytes_day: float, now: float) -> None:
        assert 0 < budget_bytes_day <= cap_bytes_day
        self.budget_bytes_day, self.cap_bytes_day = budget_bytes_day, cap_bytes_day
        self._level = BAND_DAYS * budget_bytes_day
        self._now = now
        self._bins: deque[tuple[float, int]] = deque()
        self._last_day = 0
        self.written_bytes = 0
        self.strictest = 0.0
        """The highest threshold that was asked for."""

    def _advance(self, now: float) -> None:
        if now > self._now:
            accrued = (now - self._now) * self.budget_bytes_day / DAY_S
            self._level = min(self._level + accrued, CARRY_DAYS * self.budget_bytes_day)
            self._now = now
        while self._bins and self._bins[0][0] + _BIN_S <= self._now - DAY_S:
            self._last_day -= self._bins.popleft()[1]

    def threshold(self, now: float) -> float:
        """How sure admission must be that a chunk is read again: 0 while the budget is ample, 1 when it is spent."""
        self._advance(now)
        threshold = min(1.0, max(0.0, 1 - self._level / (BAND_DAYS * self.budget_bytes_day)))
        self.strictest = max(self.strictest, threshold)
        return threshold

    def room(self, now: float) -> int:
        """Bytes that may be written now."""
        self._advance(now)
        return max(0, int(min(self._level, self.cap_bytes_day - self._last_day)))

    def spend(self, nbytes: int, now: float) -> None:
        """Bytes are being written; `room` allowed them."""
        self._advance(now)
        self._level -= nbytes
        self.written_bytes += nbytes
        self._last_day += nbytes
        begin = self._now // _BIN_S * _BIN_S
        if self._bins and self._bins[-1][0] == begin:
            self._bins[-1] = begin, self._bins[-1][1] + nbytes
        else:
            self._bins.append((begin, nbytes))

    def last_day_bytes(self, now: float) -> int:
        """Written in the last 24 hours."""
        self._advance(now)
        return self._last_day

    def state(self, now: float, wall_s: float) -> EnduranceState:
        """What to keep for the next process."""
        self._advance(now)
        shift = wall_s - self._now
        bins = [(begin + shift, nbytes) for begin, nbytes in self._bins]
        return EnduranceState(wall_s, self._level, self.written_bytes, bins)

    def restore(self, state: EnduranceState, now: float, wall_s: float) -> None:
        """Go on where an earlier process stopped; budget accrued meanwhile, none if the wall clock went back."""
        shift = now - max(wall_s, state.saved_s)
        self._now = min(now, state.saved_s + shift)
        self._level = min(state.level_bytes, CARRY_DAYS * self.budget_bytes_day)
        self.written_bytes += state.written_bytes
        self._bins.extendleft((begin + shift, nbytes) for begin, nbytes in reversed(state.bins))
        self._last_day += sum(nbytes for _, nbytes in state.bins)
        self._advance(now)


def drive_life_years(bytes_day: float, rated_bytes_day: float) -> float:
    """Years until drives have written what they are rated for: rated bytes per day over `RATED_YEARS`, at this rate.
    Infinite when nothing is written."""
    return RATED_YEARS * rated_bytes_day / bytes_day if bytes_day else float("inf")
