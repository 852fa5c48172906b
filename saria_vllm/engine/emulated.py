"""Drives and an ingress of given rates: for tests, benchmarks and the demo, where DRAM and SSD are too alike.

The model is fixed. Ingress I, drives that can read B together. While reads are in flight:

- Copies from DRAM that run without pause take I - B / 2: reads get B / 2 and what is unused of the ingress.
- Copies that pause in between, at a rate R over all, leave I - R to reads.

So reads get min(B, max(B / 2, I - R)), where R is what was really copied in a short time before, and a piece is copied
at I - B / 2. Without reads it is copied at I.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from saria_vllm import _native
from saria_vllm.config import SsdEngineName, parse_rate
from saria_vllm.engine.ssd_engine import SsdEngine, open_engine

ENVIRONMENT = "SARIA_EMULATED_RATES"
"""Turns it on in an engine: the ingress, then the rate of each drive, as "800MB/s,200MB/s"; the last one goes for
further drives, too."""

WINDOW_BYTES = 64 << 20
"""The time before is that in which the ingress moves so much, some pieces, or since copying began."""

STEPS = 16
"""In which a window passes: rates are constant within one."""


class Contention:
    """See the module's text. All times are of one clock, and never go back.

    Args:
        ingress: bytes per second.
        drives: bytes per second of each.
    """

    def __init__(self, ingress: float, drives: Sequence[float]) -> None:
        self._ingress, self._rates = ingress, tuple(drives)
        self._queues: list[deque[float]] = [deque() for _ in drives]
        """By drive: bytes left of the reads in flight. The first is read at the drive's rate, then the next."""
        self._ended = [0] * len(drives)
        self._window_s = WINDOW_BYTES / ingress
        self.step_s = self._window_s / STEPS
        """How long to look away from reads in flight at most."""
        self._pieces: deque[tuple[float, float, int]] = deque()
        """Pieces of the last window: began, ended, bytes."""
        self._now = 0.0

    def read(self, drive: int, nbytes: int, now: float) -> None:
        """A read was submitted."""
        self.advance(now)
        self._queues[drive].append(nbytes)

    def take_ended(self, drive: int, now: float) -> int:
        """How many reads of a drive ended since the last call, in the order in which they were submitted."""
        self.advance(now)
        ended, self._ended[drive] = self._ended[drive], 0
        return ended

    def copy_s(self, nbytes: int, now: float) -> float:
        """How long a piece takes that is copied from now on."""
        self.advance(now)
        return nbytes / (self._ingress - self._reading() / 2)

    def copied(self, nbytes: int, began: float, ends: float) -> None:
        """A piece is copied within that time."""
        self.advance(began)
        self._pieces.append((began, ends, nbytes))

    def next_s(self) -> float:
        """How long nothing ends on the drives, or less."""
        rate = self._ssd_rate()
        share = rate / self._reading() if rate else 0.0
        ends = [queue[0] / (self._rates[drive] * share) for drive, queue in enumerate(self._queues) if queue]
        return min(self.step_s, *ends) if ends else self.step_s

    def advance(self, now: float) -> None:
        """Let time pass."""
        while self._now < now and any(self._queues):
            step = min(self.step_s, now - self._now)
            share = self._ssd_rate() / self._reading_raw()
            self._now += step
            for drive, queue in enumerate(self._queues):
                moved = self._rates[drive] * share * step
                while queue and moved >= queue[0] - 1:  # Without the crumbs of rounding.
                    moved -= queue.popleft()
                    self._ended[drive] += 1
                if queue:
                    queue[0] -= max(0.0, moved)
        self._now = max(self._now, now)

    def _reading_raw(self) -> float:
        return sum(rate for rate, queue in zip(self._rates, self._queues, strict=True) if queue)

    def _reading(self) -> float:
        """B: what the drives that read could do together, and the ingress can take."""
        return min(self._ingress, self._reading_raw())

    def _ssd_rate(self) -> float:
        since = self._now - self._window_s
        while self._pieces and self._pieces[0][1] <= since:
            self._pieces.popleft()
        if not self._pieces:
            return self._reading()
        copied, span = 0.0, min(self._window_s, self._now - self._pieces[0][0])
        for began, ended, nbytes in self._pieces:
            inside = min(ended, self._now) - max(began, since)
            copied += nbytes * max(0.0, inside) / max(1e-12, ended - began)
        most = self._reading()
        return min(most, max(most / 2, self._ingress - copied / max(1e-9, span)))


class Emulation:
    """A `Contention` in wall time, in the way of real transfers. For any thread."""

    def __init__(
        self,
        contention: Contention,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._contention, self._clock, self.sleep = contention, clock, sleep
        self._began, self._lock = clock(), threading.Lock()

    def now(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._began

    def read(self, drive: int, nbytes: int) -> None:
        """See `Contention`; so are the others."""
        with self._lock:
            self._contention.read(drive, nbytes, self.now())

    def take_ended(self, drive: int) -> tuple[int, float]:
        """Reads that ended, and how long no other does, or less."""
        with self._lock:
            return self._contention.take_ended(drive, self.now()), self._contention.next_s()

    def copy(self, nbytes: int, copy: Callable[[], None]) -> None:
        """Copy a piece, and take as long as it has to take."""
        with self._lock:
            began = self.now()
            ends = began + self._contention.copy_s(nbytes, began)
            self._contention.copied(nbytes, began, ends)
        try:
            copy()
        finally:
            while (left := ends - self.now()) > 0:
                self.sleep(left)


class EmulatedMap:
    """A `PageMap` whose copies into HBM are as slow as the ingress. All else it leaves alone."""

    def __init__(self, inner: _native.PageMap, emulation: Emulation) -> None:
        self._inner, self._emulation = inner, emulation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def scatter_many(self, srcs: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """See `PageMap`."""
        nbytes = sum(map(len, blocks)) * self._inner.block_bytes
        self._emulation.copy(nbytes, lambda: self._inner.scatter_many(srcs, blocks))


class EmulatedEngine:
    """An `SsdEngine` over a real one that tells the end of a read when the drive of that number could have read it.
    Writes it leaves alone. Each drive has one engine."""

    def __init__(self, inner: SsdEngine, emulation: Emulation, drive: int) -> None:
        self._inner, self._emulation, self._drive = inner, emulation, drive
        self.name, self.depth = f"emulated over {inner.name}", inner.depth
        self._reading: deque[int] = deque()
        """Tags, in order, of what the drive has not read yet."""
        self._waited: set[int] = set()
        """Tags that the drive has read, and `inner` has not."""
        self._held: dict[int, int] = {}
        """Results of what `inner` has read, and the drive has not."""

    @property
    def in_flight(self) -> int:
        """See `SsdEngine`."""
        return self._inner.in_flight + len(self._held)

    def register_memory(self, addr: int, nbytes: int, device: int = -1) -> bool:
        """See `SsdEngine`."""
        return self._inner.register_memory(addr, nbytes, device)

    def register_files(self) -> Callable[[int], None] | None:
        """See `SsdEngine`."""
        return self._inner.register_files()

    def submit_read(self, fd: int, addr: int, nbytes: int, offset: int, tag: int) -> None:
        """See `SsdEngine`."""
        if self.in_flight >= self.depth:
            raise RuntimeError("more than depth transfers in flight")
        self._inner.submit_read(fd, addr, nbytes, offset, tag)
        self._reading.append(tag)
        self._emulation.read(self._drive, nbytes)

    def submit_write(self, fd: int, addr: int, nbytes: int, offset: int, tag: int) -> None:
        """See `SsdEngine`."""
        if self.in_flight >= self.depth:
            raise RuntimeError("more than depth transfers in flight")
        self._inner.submit_write(fd, addr, nbytes, offset, tag)

    def reap(self, timeout_s: float) -> list[tuple[int, int]]:
        """See `SsdEngine`."""
        if timeout_s < 0:
            raise ValueError(f"timeout_s {timeout_s} is negative")
        deadline = self._emulation.now() + timeout_s
        while True:
            next_s = self._take_read()
            only_held = not self._inner.in_flight
            left = deadline - self._emulation.now()
            ended = self._sort(self._inner.reap(0.0 if only_held else max(0.0, min(left, next_s))))
            if ended or left <= 0 or not self.in_flight:
                return ended
            if only_held:
                self._emulation.sleep(min(left, next_s))

    def close(self) -> None:
        """See `SsdEngine`."""
        self._inner.close()
        self._held.clear()

    def _take_read(self) -> float:
        """Note what the drive has read. Returns how long it reads nothing more, or less."""
        ended, next_s = self._emulation.take_ended(self._drive)
        self._waited.update(self._reading.popleft() for _ in range(ended))
        return next_s

    def _sort(self, ended: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Hold what has ended too early. Returns what has ended for both, and all writes."""
        reading = set(self._reading)
        self._held.update((tag, result) for tag, result in ended if tag in reading)
        done = [(tag, result) for tag, result in ended if tag not in reading]
        done += [(tag, self._held.pop(tag)) for tag in self._waited & self._held.keys()]
        self._waited.difference_update(tag for tag, _ in done)
        return done


class EmulatedMachine:
    """What an `Executor` over emulated rates is given: page maps, and SSD engines, one for each drive in turn.

    Args:
        ingress, drives: bytes per second; less than this machine can do.
    """

    def __init__(self, ingress: float, drives: Sequence[float]) -> None:
        self._emulation, self._drives, self._opened = Emulation(Contention(ingress, drives)), len(drives), 0

    @classmethod
    def of(cls, text: str, drives: int) -> EmulatedMachine:
        """One that `ENVIRONMENT` describes.

        Raises:
            ConfigError: it does not.
        """
        ingress, *rates = [parse_rate(rate, ENVIRONMENT) for rate in text.split(",")]
        rates = (rates or [ingress])[: max(1, drives)]
        return cls(ingress, rates + rates[-1:] * (drives - len(rates)))

    def pages(self, inner: Any) -> Any:
        """A page map whose copies into HBM are as slow as the ingress."""
        return EmulatedMap(inner, self._emulation)

    def open_engine(self, name: SsdEngineName, depth: int) -> tuple[SsdEngine, str]:
        """See `open_engine`."""
        engine, note = open_engine(name, depth)
        self._opened += 1
        return EmulatedEngine(engine, self._emulation, (self._opened - 1) % self._drives), f"{note}; emulated rate"
