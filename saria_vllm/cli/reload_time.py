"""Reloads in simulated time: the pacer that serves over drives and an ingress of given rates."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from saria_vllm.config import PacingMode
from saria_vllm.engine.emulated import Contention
from saria_vllm.engine.pacer import Pacer

READ_BYTES = 4 << 20
"""Of one read."""


class Reload(NamedTuple):
    """What one request needs from each tier, and when it comes."""

    dram_bytes: int
    ssd_bytes: int
    at_s: float = 0.0


class Machine(NamedTuple):
    """Bytes per second of the ingress, as far as reloads may use it, and of each drive."""

    ingress: float
    drives: tuple[float, ...]

    @property
    def ssd(self) -> float:
        """Of all drives."""
        return sum(self.drives)

    def ideal_s(self, reload: Reload) -> float:
        """Of a request alone: no tier could be faster, nor the ingress."""
        return max(reload.ssd_bytes / self.ssd, (reload.ssd_bytes + reload.dram_bytes) / self.ingress)

    def serial_s(self, reload: Reload) -> float:
        """One tier after the other."""
        return reload.ssd_bytes / self.ssd + reload.dram_bytes / self.ingress

    def two_hops_s(self, reload: Reload) -> float:
        """All from SSD to DRAM, then everything from there."""
        return reload.ssd_bytes / self.ssd + (reload.ssd_bytes + reload.dram_bytes) / self.ingress


class _Copy(NamedTuple):
    load: int
    nbytes: int
    began: float
    ends: float


class Node:
    """One machine whose pacer learns from request to request, as in service."""

    def __init__(self, machine: Machine, mode: PacingMode) -> None:
        self._machine, self._now = machine, 0.0
        self._contention = Contention(machine.ingress, machine.drives)
        self._pacer = Pacer(mode, ingress=1.0, link=machine.ingress)
        self._reads: list[deque[tuple[int, int]]] = [deque() for _ in machine.drives]
        """By drive, in order: load and bytes of each read in flight."""
        self._left: list[int] = []
        """By load: bytes of it that are not in HBM."""
        self._ends: list[float] = []
        self._copy: _Copy | None = None

    def run(self, reloads: Sequence[Reload]) -> list[float]:
        """Seconds that each took from when it came; the first must come at 0, and all in order."""
        start, coming = self._now, deque(enumerate(reloads))
        self._left = [reload.dram_bytes + reload.ssd_bytes for reload in reloads]
        self._ends = [0.0] * len(reloads)
        while coming or any(self._left):
            while coming and start + coming[0][1].at_s <= self._now:
                self._begin(*coming.popleft())
            self._take_reads()
            wait_s = self._copy_next()
            if coming:
                wait_s = min(wait_s, start + coming[0][1].at_s - self._now)
            if any(self._reads):
                wait_s = min(wait_s, self._contention.next_s())
            if coming or any(self._left):
                self._now += max(wait_s, 1e-9)
        return [end - start - reload.at_s for end, reload in zip(self._ends, reloads, strict=True)]

    def _begin(self, load: int, reload: Reload) -> None:
        on_ssd: dict[int, int] = {}
        for number, at in enumerate(range(0, reload.ssd_bytes, READ_BYTES)):
            nbytes, drive = min(READ_BYTES, reload.ssd_bytes - at), number % len(self._reads)
            self._contention.read(drive, nbytes, self._now)
            self._reads[drive].append((load, nbytes))
            on_ssd[drive] = on_ssd.get(drive, 0) + nbytes
        self._pacer.begin(load, reload.dram_bytes, on_ssd, self._now)

    def _take_reads(self) -> None:
        for drive, reads in enumerate(self._reads):
            for _ in range(self._contention.take_ended(drive, self._now)):
                load, nbytes = reads.popleft()
                self._pacer.ssd_moved(load, drive, nbytes, self._now)
                self._moved(load, nbytes)

    def _copy_next(self) -> float:
        """End the copy that is due and begin the next. Returns how long nothing happens here."""
        if self._copy is not None and self._copy.ends <= self._now:
            load, nbytes, began, _ = self._copy
            self._copy = None
            self._pacer.copied(nbytes, began, self._now)
            self._moved(load, nbytes)
        if self._copy is None:
            turn = self._pacer.choose(self._now)
            if turn.load is None:
                return turn.wait_s
            assert isinstance(turn.load, int)
            ends = self._now + self._contention.copy_s(turn.nbytes, self._now)
            self._pacer.take(turn.load, turn.nbytes, self._now)
            self._contention.copied(turn.nbytes, self._now, ends)
            self._copy = _Copy(turn.load, turn.nbytes, self._now, ends)
        return self._copy.ends - self._now

    def _moved(self, load: int, nbytes: int) -> None:
        self._left[load] -= nbytes
        if not self._left[load]:
            self._ends[load] = self._now
            self._pacer.end(load, self._now)


def leftover_s(machine: Machine, mixed: Reload, dram_bytes: int) -> float:
    """What a request that needs DRAM only takes on the ingress that a mixed one, ending as soon as it can, leaves."""
    ends = machine.ideal_s(mixed)
    rest = machine.ingress - (mixed.dram_bytes + mixed.ssd_bytes) / ends if ends else machine.ingress
    in_time = rest * ends
    return dram_bytes / rest if dram_bytes <= in_time else ends + (dram_bytes - in_time) / machine.ingress


def slowest_quarter(seconds: Sequence[float]) -> float:
    """Mean of the slowest fourth."""
    slowest = sorted(seconds)[-math.ceil(len(seconds) / 4) :]
    return sum(slowest) / len(slowest)
