"""How many bytes may be written to the SSDs: a budget of drive writes per day, spent where it helps most.

While a day's demand fits into what is left of its budget, admission is as generous as can be. Where it does not, the
budget is planned along the demand of the days before: when a fifth of what a day usually asks for has come, about a
fifth may be spent, and the admission threshold rises smoothly as what the plan allows goes. Unused budget is kept, up
to a day's worth, and given out little by little. A hard cap over any 24 hours stands above. What others write to the
drive and what the drive adds itself is charged, where it is known (`surcharge.py`).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import Annotated, NamedTuple

import msgspec

from saria_vllm.policy.surcharge import Reading, Surcharge, SurchargeState

DAY_S = 86_400.0

KEPT_DAYS = 1.0
"""Unused budget that is kept, in days of it."""

DRAWN_DAYS = 0.04
"""What a day may take of that, so that what is written per day stays near the budget."""

BAND_DAYS = 0.2
"""The threshold rises over the last of what the plan allows by now: from its lowest at this much to 1 at nothing."""

FRESH_DAYS = 0.04
"""What a new deployment begins with."""

TIGHT = 1.25
"""Where the demand is so many times what is left the plan rules alone, and not at all where it fits."""

LEAD = 1.2
"""The plan runs ahead of the usual demand by this much, so that a quiet end of a day leaves no budget over."""

LAST_SHARE = 1 / 3
"""Of a day's demand, during which the band narrows to nothing: what is left is better spent than kept."""

EVEN_SHARE = 0.1
"""Of the plan, whatever the demand was: it may come at another time."""

FADING = 0.7
"""Weight of the days before in the usual demand."""

USUAL_SHARE = 0.1
"""A day's demand is expected to be the usual one, until this share of it has come and says otherwise."""

_PARTS = 96
"""Of a day, in which demand is counted."""

_LAST_PART = math.nextafter(_PARTS, 0)
"""The end of a day: a difference of times may round to the whole of it."""

CHARGED_MAX = 0.9
"""Of a day's budget, that may be charged for others: a tier that writes nothing is of no use, and what a drive says may
be wrong."""

_BIN_S = 300.0

RATED_YEARS = 5.0
"""What a drive's rated writes per day are meant for."""

USED_MIN_PERCENT = 3
"""Of a drive's life, from which on it is known well enough what a byte takes of it: drives say whole percents."""


_EXABYTE = 2**60
_Seconds = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
_Bytes = Annotated[float, msgspec.Meta(ge=0, le=_EXABYTE)]
_Demand = Annotated[list[_Bytes], msgspec.Meta(min_length=_PARTS, max_length=_PARTS)]
_Written = Annotated[int, msgspec.Meta(ge=0, le=_EXABYTE)]


class EnduranceState(msgspec.Struct):
    """What must survive a restart. Times are seconds of the wall clock. Decoding refuses what `restore` cannot use."""

    saved_s: _Seconds
    day_began_s: _Seconds
    spent_bytes: Annotated[float, msgspec.Meta(ge=-_EXABYTE, le=_EXABYTE)]
    """In this day; below zero where a new deployment has more than the plan gives it."""
    kept_bytes: _Bytes
    """Of earlier days, what this one may draw of it included."""
    drawn_bytes: _Bytes
    joined_part: Annotated[float, msgspec.Meta(ge=0, le=_PARTS)]
    """Where in this day, in parts of it, demand began to be counted."""
    usual_bytes: _Demand
    """By part of the day, over the days before."""
    asked_bytes: _Demand
    """Of this day."""
    written_bytes: _Written
    """In all."""
    bins: list[tuple[_Seconds, _Written]]
    """(begin, bytes) of the last 24 hours."""
    charged_bytes: _Written = 0
    """In this day, for others and for the drive: in `spent_bytes`, and not in `written_bytes`."""
    surcharge: SurchargeState | None = None


class DriveBudget(NamedTuple):
    """A drive's budget, and who else uses it."""

    budget_bytes_day: float
    cap_bytes_day: float
    engines: int = 1
    """That are alive and write to it, the asking one included."""
    others_today_bytes: int = 0
    """What others have written to it in this day, and in the last 24 hours."""
    others_last_day_bytes: int = 0


class Governor:
    """One engine's part of the budget of one drive. `now` is seconds of any one clock that never goes back.

    Args:
        budget_bytes_day: what may be written per day.
        cap_bytes_day: what no 24 hours ever exceed.
        day_began: when this day began, less than a day before `now`; by default now.
    """

    def __init__(
        self, budget_bytes_day: float, cap_bytes_day: float, now: float, day_began: float | None = None
    ) -> None:
        assert 0 < budget_bytes_day <= cap_bytes_day
        self.budget_bytes_day, self.cap_bytes_day = budget_bytes_day, cap_bytes_day
        self._now = now
        self._day_began = now if day_began is None else day_began
        self._usual, self._asked = [0.0] * _PARTS, [0.0] * _PARTS
        self._expect()
        self._kept = self._drawn = self._spent = 0.0
        self._joined = self._part()
        self._spent = self._level(self._due()) - FRESH_DAYS * budget_bytes_day
        self._bins: deque[tuple[float, int]] = deque()
        self._last_day = self._today = self._charged = 0
        self._most_last_day, self._most_today = cap_bytes_day, math.inf
        """Of this engine; see `share`."""
        self.surcharge = Surcharge(budget_bytes_day)
        self.written_bytes = 0
        self.strictest = 0.0
        """The highest threshold that was asked for."""

    def _advance(self, now: float) -> None:
        self._now = max(self._now, now)
        if ended := int((self._now - self._day_began) // DAY_S):
            self._begin_day(ended)
        while self._bins and self._bins[0][0] + _BIN_S <= self._now - DAY_S:
            self._last_day -= self._bins.popleft()[1]

    def _begin_day(self, days: int) -> None:
        """So many days ended since the last call."""
        unused = days * self.budget_bytes_day - self._spent
        self._kept = min(max(0.0, self._kept + unused), KEPT_DAYS * self.budget_bytes_day)
        self._drawn = min(self._kept, DRAWN_DAYS * self.budget_bytes_day)
        self._day_began += days * DAY_S
        if self._asked_in_all:
            self._usual = [
                FADING * usual + (1 - FADING) * asked for usual, asked in zip(self._usual, self._day(), strict=True)
            ]
            self._asked = [0.0] * _PARTS
            self._expect()
        self._spent = self._joined = 0.0
        self._today = self._charged = 0

    def _day(self) -> list[float]:
        """This day's demand by part. What came before it was counted is taken to be the usual; where nothing is usual
        yet, as much as later: a day that was joined in the evening is not one of evening demand only."""
        even = self._asked_in_all / max(1.0, _PARTS - self._joined)
        missed = self._usual if self._usual_in_all else [even] * _PARTS
        return [
            asked + min(1.0, max(0.0, self._joined - part)) * more
            for part, (asked, more) in enumerate(zip(self._asked, missed, strict=True))
        ]

    def _expect(self) -> None:
        """Plan by what is known of the demand."""
        self._plan = _plan(self._usual)
        self._usual_in_all, self._asked_in_all = math.fsum(self._usual), math.fsum(self._asked)

    def _part(self) -> float:
        """Where in this day we are, in parts of it."""
        return min(max(0.0, (self._now - self._day_began) / DAY_S * _PARTS), _LAST_PART)

    def _came(self, part: float) -> float:
        """The share of a day's demand that has usually come by there."""
        whole, rest = divmod(part, 1.0)
        before, after = self._plan[int(whole)], self._plan[int(whole) + 1]
        return before + rest * (after - before)

    def _due(self) -> float:
        """The share of a day's demand that has usually come by now."""
        return self._came(self._part())

    def _level(self, due: float) -> float:
        """Bytes that the plan allows by now and that are not spent."""
        return (self.budget_bytes_day + self._drawn) * min(1.0, LEAD * due) - self._spent

    def _tightness(self, due: float) -> float:
        """0 where the rest of the day's demand fits into what is left of its budget, 1 from `TIGHT` times that on."""
        left = self._level(1.0)
        weight = USUAL_SHARE if self._usual_in_all else FRESH_DAYS
        seen = due - self._came(self._joined)
        demand = (self._asked_in_all + weight * self._usual_in_all) / (seen + weight) * (1 - due)
        return min(1.0, max(0.0, (demand / left - 1) / (TIGHT - 1))) if left > 0 else 1.0

    def ask(self, nbytes: float, now: float) -> None:
        """So many bytes left DRAM and are not on SSD, whatever becomes of them: the demand that a day is planned by."""
        self._advance(now)
        self._asked[int(self._part())] += nbytes
        self._asked_in_all += nbytes

    def threshold(self, now: float) -> float:
        """How sure admission must be that a chunk is read again: 0 while the budget is ample, 1 when it is spent."""
        self._advance(now)
        due = self._due()
        band = BAND_DAYS * self.budget_bytes_day * max(1e-3, min(1.0, (1 - due) / LAST_SHARE))
        threshold = self._tightness(due) * min(1.0, max(0.0, 1 - self._level(due) / band))
        self.strictest = max(self.strictest, threshold)
        return threshold

    def room(self, now: float) -> int:
        """Bytes that may be written now."""
        self._advance(now)
        due = self._due()
        level, left = self._level(due), self._level(1.0)
        planned = left + self._tightness(due) * (level - left)
        allowed = min(self._most_last_day - self._last_day, self._most_today - self._today) - self._charged
        return max(0, int(min(planned, allowed)))

    def share(self, drive: DriveBudget, now: float) -> None:
        """Divide a drive's budget anew among the engines that write to it. What the plan allows now stays as it is,
        what the rest of the day brings is divided evenly. So is, until the next call, what all engines together, those
        of before too, leave of the day's budget and of the cap: neither is exceeded, whoever comes and goes."""
        self._advance(now)
        due = self._due()
        level = self._level(due)
        self.budget_bytes_day = drive.budget_bytes_day / drive.engines
        self.cap_bytes_day = drive.cap_bytes_day / drive.engines
        self._drawn = min(self._drawn, DRAWN_DAYS * self.budget_bytes_day)
        self._spent += self._level(due) - level
        left = drive.cap_bytes_day - drive.others_last_day_bytes - self._last_day
        self._most_last_day = self._last_day + left / drive.engines
        if drive.engines > 1 or drive.others_today_bytes:
            left = drive.budget_bytes_day * (1 + DRAWN_DAYS) - drive.others_today_bytes - self._today
            self._most_today = self._today + left / drive.engines
        else:
            self._most_today = math.inf

    def spend(self, nbytes: int, now: float) -> None:
        """Bytes are being written; `room` allowed them."""
        self._advance(now)
        self._spent += nbytes
        self.written_bytes += nbytes
        self._last_day += nbytes
        self._today += nbytes
        begin = self._now // _BIN_S * _BIN_S
        if self._bins and self._bins[-1][0] == begin:
            self._bins[-1] = begin, self._bins[-1][1] + nbytes
        else:
            self._bins.append((begin, nbytes))

    def learn(self, reading: Reading, share: float, now: float) -> int:
        """The drive was asked what was written to it; `share` of what others wrote is this budget's. Returns the bytes
        that are charged for that and for what the drive added to our own."""
        self._advance(now)
        left = int(CHARGED_MAX * self.budget_bytes_day) - self._charged
        nbytes = max(0, min(self.surcharge.learn(reading, share, self._now), left))
        self._charged += nbytes
        self._spent += nbytes
        return nbytes

    def last_day_bytes(self, now: float) -> int:
        """Written in the last 24 hours."""
        self._advance(now)
        return self._last_day

    def state(self, now: float, wall_s: float) -> EnduranceState:
        """What to keep for the next process."""
        self._advance(now)
        shift = wall_s - self._now
        bins = [(begin + shift, nbytes) for begin, nbytes in self._bins]
        return EnduranceState(
            wall_s, self._day_began + shift, self._spent, self._kept, self._drawn, self._joined, self._usual,
            self._asked, self.written_bytes, bins, self._charged, self.surcharge.state(shift),
        )  # fmt: skip

    def restore(self, state: EnduranceState, now: float, wall_s: float) -> None:
        """Go on where an earlier process stopped; no time went by if the wall clock went back."""
        shift = now - max(wall_s, state.saved_s)
        self._day_began = min(state.day_began_s + shift, now)
        self._spent = state.spent_bytes
        self._kept = min(state.kept_bytes, KEPT_DAYS * self.budget_bytes_day)
        self._drawn = min(state.drawn_bytes, DRAWN_DAYS * self.budget_bytes_day)
        self._joined = min(state.joined_part, self._part())
        self._usual, self._asked = list(state.usual_bytes), list(state.asked_bytes)
        self._expect()
        self.written_bytes += state.written_bytes
        self._bins.extendleft((begin + shift, nbytes) for begin, nbytes in reversed(state.bins))
        self._last_day += sum(nbytes for _, nbytes in state.bins)
        self._today += sum(nbytes for begin, nbytes in state.bins if begin >= state.day_began_s)
        self._charged = state.charged_bytes
        if state.surcharge is not None:
            self.surcharge.restore(state.surcharge, shift, now - DAY_S)
        day = self._day_began
        self._advance(now)
        if self._day_began > day:
            self._joined = self._part()


def _plan(usual: list[float]) -> list[float]:
    """The share of a day's demand to expect by the beginning of each part of the day, and by its end."""
    total = math.fsum(usual)
    even = [part / _PARTS for part in range(_PARTS + 1)]
    if not total:
        return even
    came = [0.0, *itertools.accumulate(usual)]
    return [EVEN_SHARE * at + (1 - EVEN_SHARE) * by / total for at, by in zip(even, came, strict=True)]


def drive_life_years(bytes_day: float, rated_bytes_day: float) -> float:
    """Years until drives have written what they are rated for: rated bytes per day over `RATED_YEARS`, at this rate.
    Infinite when nothing is written."""
    return RATED_YEARS * rated_bytes_day / bytes_day if bytes_day else float("inf")


def life_left_years(percentage_used: int, written_bytes: int, bytes_day: float, rated_bytes_day: float) -> float:
    """Years until a drive's life is used up while hosts write so many bytes per day.

    By what the drive says it has used up for what was written to it so far (which has its own write amplification in
    it), once that is some percent; before by its rating over `RATED_YEARS`. Infinite when nothing is written.
    """
    life_bytes = RATED_YEARS * 365 * rated_bytes_day
    if percentage_used >= USED_MIN_PERCENT:
        life_bytes = written_bytes * 100 / percentage_used
    left = max(0, 100 - percentage_used) / 100
    return life_bytes * left / bytes_day / 365 if bytes_day else float("inf")
