"""Which load may copy its next piece from DRAM, and when, so that SSD reads keep their rate. Pure: time is an argument.

All that loads move stays under the cap C, a share of the measured link. SSD reads are the slow stream and are never
held back: while any is in flight, copies from DRAM may take A = C - B_ssd, and C otherwise. Who gets A:

- Mixed loads, which wait for SSD reads too, take all of it, the oldest first (`priority`). When loads that need DRAM
  only are waiting beside them, the mixed get the matched rate, n_dram / n_ssd x B_ssd x (1 + epsilon), at which both of
  their streams end together, and the others the rest.
- `matched`: mixed loads get the matched rate also when they are alone.
- `off`: the oldest first, at once.

Neither kind gets less than a twentieth of A, nor A less than a twentieth of C. Time becomes credit, in bytes, for each
of the two kinds. A piece is taken when the credit is not negative, and charged in full: what was slept too long is made
up for, and debt is paid. Credit is bounded, so that idling is not hoarded.

Call order: `begin`, then any of `ssd_moved`, `choose` -> `take` -> `copied`, then `end`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from saria_vllm.config import PacingMode

PIECE_BYTES_MIN, PIECE_BYTES_MAX = 4 << 20, 16 << 20
"""A piece cannot be called back, and each costs a look at the queues."""

PIECE_S = 0.001
"""Time that a piece stands for, within those bounds."""

FLOOR = 0.05
"""Least share, of the cap for all copies and of theirs for each kind: nobody waits for ever."""

RESERVE = 1.05
"""Kept free for the drives, times what they were seen to read. A drive that the ingress holds back looks slow: with
nothing above that it would stay so."""

CREDIT_PIECES = 2

SAMPLE_BYTES_MIN = 1 << 20
"""Less says nothing about a rate."""

SAMPLE_S = 0.05
"""Reads end in bursts: less says little, either."""

STUCK_S = 1.0
"""A drive that moves nothing for so long gets slower all the same."""

AVERAGE_S = 0.2
"""Time constant of moving averages, in time in which something moves."""

HELD_S = 1.0
"""The same for a drive that seems to get slower: more often it was held back."""

Load = Hashable
"""Names a load."""


class Rate:
    """A moving average, in bytes per second of the time in which there was something to move; 0 before the first
    sample. `fall_s` is its time constant for samples below it."""

    def __init__(self, value: float = 0.0, fall_s: float = AVERAGE_S) -> None:
        self.value, self._fall_s = value, fall_s

    def add(self, nbytes: int, seconds: float) -> None:
        """So many bytes took so long."""
        if seconds <= 0 or not (self.value or nbytes):
            return
        found = nbytes / seconds
        if not self.value:
            self.value = found
            return
        average_s = AVERAGE_S if found > self.value else self._fall_s
        self.value += (found - self.value) * -math.expm1(-seconds / average_s)


class Turn(NamedTuple):
    """Who may copy now: at most `nbytes` of `load`. Without a load: nobody, for `wait_s` from now on if nothing
    changes; infinite when nobody wants to."""

    load: Load | None
    nbytes: int
    wait_s: float


class _Drive:
    """What is being read from a drive, and how fast that is seen to go."""

    def __init__(self) -> None:
        self.rate = Rate(fall_s=HELD_S)
        self.in_flight = 0
        self._moved, self._since = 0, 0.0

    def begin(self, nbytes: int, now: float) -> None:
        if not self.in_flight:
            self._moved, self._since = 0, now
        self.in_flight += nbytes

    def end(self, nbytes: int, now: float, well: bool) -> None:
        self.in_flight -= nbytes
        self._moved += nbytes if well else 0
        if not self.in_flight or now - self._since >= SAMPLE_S:
            self.sample(now, SAMPLE_BYTES_MIN)

    def sample(self, now: float, least_bytes: int) -> None:
        if self._moved >= least_bytes:
            self.rate.add(self._moved, now - self._since)
            self._moved, self._since = 0, now

    def check(self, now: float) -> None:
        if self.in_flight and now - self._since >= STUCK_S:
            self.sample(now, 0)


class _Waiting:
    """Bytes of a load that have not moved."""

    __slots__ = ("dram", "ssd")

    def __init__(self, dram: int, ssd: Mapping[int, int]) -> None:
        self.dram, self.ssd = dram, dict(ssd)


_MIXED, _OTHER = 0, 1


class Pacer:
    """See the module's text.

    Args:
        ingress: a share of the measured link from 0 to 1, or bytes per second above that.
        epsilon: how much faster than matched the matched rate is.
        link: of the link, bytes per second as calibrated; 0 when it is not known: then nothing is capped until it is.
    """

    def __init__(
        self, mode: PacingMode = "priority", ingress: float = 0.7, epsilon: float = 0.05, link: float = 0.0
    ) -> None:
        self.mode, self._ingress, self._epsilon = mode, ingress, epsilon
        self._link = Rate(link)
        self._loads: dict[Load, _Waiting] = {}
        self._drives: dict[int, _Drive] = {}
        self._credit = [0.0, 0.0]
        self._at = -math.inf
        self._read_until = -math.inf

    @property
    def cap(self) -> float:
        """C, bytes per second; infinite while it is not known."""
        if self._ingress > 1:
            return self._ingress
        return self._ingress * self._link.value or math.inf

    @property
    def ingress(self) -> float:
        """What loads may use, bytes per second; 0 while it is not known."""
        return self._link.value if self.mode == "off" or self.cap == math.inf else self.cap

    @property
    def link(self) -> float:
        """What copies from DRAM reach alone, bytes per second; 0 when it is not known."""
        return self._link.value

    def seed_drive(self, number: int, read_bytes_s: float) -> None:
        """A drive was measured; what it is seen to read replaces that within moments."""
        self._drives.setdefault(number, _Drive()).rate.value = read_bytes_s

    def drive_rates(self) -> dict[int, float]:
        """By drive: what it was seen to read, bytes per second."""
        return {number: drive.rate.value for number, drive in self._drives.items()}

    def begin(self, load: Load, dram_bytes: int, ssd_bytes: Mapping[int, int], now: float) -> None:
        """A load was submitted, with so many bytes in DRAM and on each drive; its reads are in flight from now on."""
        self._advance(now)
        self._loads[load] = _Waiting(dram_bytes, ssd_bytes)
        for number, nbytes in ssd_bytes.items():
            self._drives.setdefault(number, _Drive()).begin(nbytes, now)

    def ssd_moved(self, load: Load, drive: int, nbytes: int, now: float, well: bool = True) -> None:
        """So many bytes of a load were read from a drive and are in HBM; not `well`: they never will be."""
        waiting = self._loads.get(load)
        if waiting is None or drive not in waiting.ssd:
            return
        left = waiting.ssd[drive] - nbytes
        if not left:  # Else the limits stay much as they are.
            self._advance(now)
            del waiting.ssd[drive]
        else:
            waiting.ssd[drive] = left
        self._drives[drive].end(nbytes, now, well)
        self._read_until = now

    def choose(self, now: float) -> Turn:
        """Whose turn it is. Changes nothing: ask as often as you like."""
        self._advance(now)
        for drive in self._drives.values():
            drive.check(now)
        oldest: list[Load | None] = [None, None]
        for load, waiting in reversed(self._loads.items()):
            if waiting.dram:
                oldest[_OTHER if self.mode == "off" or not waiting.ssd else _MIXED] = load
        limits, wait_s = self._limits(), math.inf
        for kind, load in enumerate(oldest):
            if load is None:
                continue
            if self._credit[kind] > -1 or limits[kind] == math.inf:  # Rounding leaves crumbs.
                return Turn(load, min(self._loads[load].dram, _piece_bytes(limits[kind])), 0.0)
            wait_s = min(wait_s, -self._credit[kind] / limits[kind])
        return Turn(None, 0, wait_s)

    def take(self, load: Load, nbytes: int, now: float) -> None:
        """A piece of a load is being copied."""
        waiting = self._loads.get(load)
        if waiting is None:
            return
        self._advance(now)
        waiting.dram = max(0, waiting.dram - nbytes)
        self._credit[_MIXED if waiting.ssd else _OTHER] -= nbytes

    def copied(self, nbytes: int, began: float, now: float) -> None:
        """A piece was copied within that time, which says what the link can do if nothing was read meanwhile."""
        if nbytes >= SAMPLE_BYTES_MIN and not self._reading() and began >= self._read_until:
            self._link.add(nbytes, now - began)

    def give_up(self, load: Load, now: float) -> None:
        """Nothing more of a load will be copied from DRAM."""
        self._advance(now)
        if load in self._loads:
            self._loads[load].dram = 0

    def end(self, load: Load, now: float) -> None:
        """A load ended, whatever of it has been moved. May be called twice."""
        self._advance(now)
        waiting = self._loads.pop(load, None)
        if waiting is not None:
            for number, nbytes in waiting.ssd.items():
                self._drives[number].end(nbytes, now, False)
                self._read_until = now

    def _reading(self) -> bool:
        return any(drive.in_flight for drive in self._drives.values())

    def _advance(self, now: float) -> None:
        """Turn the time since the last call into credit, for what was waiting then."""
        seconds, self._at = now - self._at, max(now, self._at)
        if seconds <= 0:
            return
        kinds = {_MIXED if waiting.ssd else _OTHER for waiting in self._loads.values() if waiting.dram}
        for kind, limit in enumerate(self._limits()):
            most = CREDIT_PIECES * _piece_bytes(limit) if kind in kinds else 0
            self._credit[kind] = min(self._credit[kind] + limit * seconds, most)

    def _limits(self) -> tuple[float, float]:
        """Bytes per second for the two kinds; where one does not wait, all that it might have."""
        cap = math.inf if self.mode == "off" else self.cap
        if cap == math.inf or not self._reading():
            return cap, cap
        rates = [drive.rate.value for drive in self._drives.values() if drive.in_flight]
        ssd = sum(rates) * RESERVE if all(rates) else cap / 2
        free = max(FLOOR * cap, cap - ssd)
        waits = [False, False]
        dram = on_ssd = 0
        matched = 0.0
        for waiting in self._loads.values():
            waits[_MIXED if waiting.ssd else _OTHER] |= waiting.dram > 0
            if waiting.ssd:  # Drives read for the oldest first: all before it has been read when a load's part has.
                dram, on_ssd = dram + waiting.dram, on_ssd + sum(waiting.ssd.values())
                matched = max(matched, dram / on_ssd)
        if not waits[_MIXED] or (self.mode == "priority" and not waits[_OTHER]):
            return free, free
        matched *= ssd / RESERVE * (1 + self._epsilon)
        mixed = min(max(matched, FLOOR * free), (1 - FLOOR if waits[_OTHER] else 1) * free)
        return mixed, free - mixed if waits[_OTHER] else free


def _piece_bytes(limit: float) -> int:
    return int(min(max(limit * PIECE_S, PIECE_BYTES_MIN), PIECE_BYTES_MAX))
