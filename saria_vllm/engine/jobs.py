"""What the executor's threads share: jobs in flight, their ends, counters, the generation."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from saria_vllm.config import LOAD_DEADLINE_S, PacingConfig
from saria_vllm.engine.pacer import Pacer, Turn
from saria_vllm.engine.pieces import Pieces
from saria_vllm.metrics import Counts, count
from saria_vllm.types import JobResult, LoadJob, Moved, PersistJob


class Meter:
    """Bytes that were moved in one direction, and how long there was something to move. Guarded by `Ends`."""

    __slots__ = ("_begun", "_bytes", "_seconds", "_under_way")

    def __init__(self) -> None:
        self._bytes = self._under_way = 0
        self._seconds = self._begun = 0.0

    def begin(self, records: int, now: float) -> None:
        if not self._under_way:
            self._begun = now
        self._under_way += records

    def end(self, records: int, nbytes: int, now: float) -> None:
        """Records ended, with so many bytes moved."""
        self._bytes += nbytes
        self._under_way -= records
        assert self._under_way >= 0
        if not self._under_way:
            self._seconds += now - self._begun

    def take(self, now: float) -> tuple[int, float]:
        """Bytes and seconds since the last call."""
        if self._under_way:
            self._seconds += now - self._begun
            self._begun = now
        taken = self._bytes, self._seconds
        self._bytes, self._seconds = 0, 0.0
        return taken


class LoadState:
    """A load in flight on this rank."""

    __slots__ = ("deadline", "failed", "generation", "items_left", "job", "on_drive", "pieces", "reason", "writers")

    def __init__(self, job: LoadJob, generation: int, deadline: float) -> None:
        self.pieces: Pieces | None = None
        """What is to be copied from DRAM. Once it is under way, the copy thread's own."""
        self.on_drive: dict[int, tuple[int, int]] = {}
        """Of the positions that are being read from SSD and have not ended: drive and record bytes."""
        self.job, self.generation = job, generation
        self.items_left = set(range(job.chunks or 1))
        """Positions that have not ended; a load without items has one to end all the same."""
        self.failed: list[int] = []
        self.reason = ""
        self.deadline = deadline
        """When it ends as failed: a drive that hangs must not hang a request."""
        self.writers = 0
        """Threads that are writing into the load's blocks at this moment."""


class PersistState:
    """A persist job in flight on this rank. Only the thread that writes it touches it."""

    __slots__ = ("drive", "failed", "generation", "items", "job_id", "left", "reason", "record_bytes")

    def __init__(self, job: PersistJob, generation: int, drive: int, record_bytes: int) -> None:
        self.drive, self.record_bytes = drive, record_bytes
        self.job_id, self.items, self.generation = job.job_id, job.items, generation
        """The generation in which the slots were filled."""
        self.left = job.chunks
        self.failed: list[int] = []
        self.reason = ""


class Ends:
    """Collects what ended since the last drain. Threads add, the engine's thread drains once per step. One lock, held
    for a few statements."""

    def __init__(
        self,
        pacing: PacingConfig = PacingConfig(),  # noqa: B008  Frozen.
        link: float = 0.0,
        load_deadline_s: float = LOAD_DEADLINE_S,
    ) -> None:
        self.load_deadline_s = load_deadline_s
        self.generation = 0
        """Jobs submitted under an older one end as failed. Only grows, and before the store's does."""
        self._pacer = Pacer(pacing.mode, pacing.ingress, pacing.epsilon, link)
        """Of `LoadState`s."""
        self._lock = threading.Lock()
        self._live: dict[LoadState, None] = {}
        self._results: list[JobResult] = []
        self._loads: list[LoadState] = []
        self._counts: Counts = {}
        self.said: set[str] = set()
        self._messages: list[str] = []
        self._meters: dict[int, tuple[Meter, Meter]] = {}
        """By drive: of reads and writes."""

    def job(self, result: JobResult) -> None:
        """A store or persist job ended."""
        with self._lock:
            self._results.append(result)

    def written(self, state: PersistState, position: int, reason: str = "") -> None:
        """An item of a persist job ended; with a reason it failed."""
        state.left -= 1
        if reason:
            state.failed.append(position)
            state.reason = state.reason or reason
        with self._lock:
            self._meter(state.drive)[1].end(1, 0 if reason else state.record_bytes, time.monotonic())
        if not state.left:
            self.job(JobResult(state.job_id, tuple(state.failed), state.reason))

    def begin(self, job: LoadJob, now: float) -> LoadState:
        """A load was submitted; it ends when all its items have, or at its deadline."""
        state = LoadState(job, self.generation, now + self.load_deadline_s)
        with self._lock:
            self._live[state] = None
        return state

    def begin_moves(
        self,
        state: LoadState,
        pieces: Pieces,
        drives: dict[int, tuple[int, int]],
        ssd_bytes: dict[int, int],
        now: float,
    ) -> None:
        """A load is about to be copied from DRAM, and positions of it read from these drives, in records of so many
        bytes; `ssd_bytes` is their sum by drive."""
        with self._lock:
            if state not in self._live:
                return
            state.pieces, state.on_drive = pieces, drives
            for drive, records in Counter(drive for drive, _ in drives.values()).items():
                self._meter(drive)[0].begin(records, now)
            self._pace("begin", state, pieces.nbytes, ssd_bytes, now)

    def choose(self) -> Turn:
        """Which load may copy its next piece now; see `Pacer`."""
        with self._lock:
            turn: Turn = self._pace("choose", time.monotonic())
            return turn

    def take(self, state: LoadState, nbytes: int) -> None:
        """So much of a load is copied next."""
        with self._lock:
            self._pace("take", state, nbytes, time.monotonic())

    def copied(self, nbytes: int, began: float) -> None:
        """A piece was copied from then until now."""
        with self._lock:
            self._pace("copied", nbytes, began, time.monotonic())

    def give_up(self, state: LoadState, reason: str) -> None:
        """What of a load was not copied from DRAM will not be."""
        with self._lock:
            self._pace("give_up", state, time.monotonic())
        if state.pieces is not None:
            self.items(state, state.pieces.rest(), reason)

    def ingress(self) -> float:
        """See `Pacer.ingress`."""
        with self._lock:
            return self._pacer.ingress

    def seed_drive(self, number: int, read_bytes_s: float) -> None:
        """See `Pacer.seed_drive`."""
        with self._lock:
            self._pacer.seed_drive(number, read_bytes_s)

    def _pace(self, call: str, *args: object) -> Any:
        """Call the pacer. After a fault of it loads are copied in their order, at once: none may hang on that."""
        try:
            return getattr(self._pacer, call)(*args)
        except Exception as error:
            count(self._counts, "internal_errors", 1)
            self._messages.append(f"pacing is off from now on: {type(error).__name__}: {error}")
            self._pacer = Pacer("off")
            for state in self._live:
                if state.pieces is not None:
                    self._pacer.begin(state, state.pieces.left_bytes, {}, time.monotonic())
            return getattr(self._pacer, call)(*args)

    def live(self) -> list[LoadState]:
        """Loads that have not ended."""
        with self._lock:
            return list(self._live)

    def begin_writes(self, state: PersistState, now: float) -> None:
        """A persist job was submitted."""
        with self._lock:
            self._meter(state.drive)[1].begin(state.left, now)

    def take_moved(self, now: float) -> list[Moved]:
        """What was moved since the last call."""
        with self._lock:
            moved = [Moved(drive, *read.take(now), *write.take(now)) for drive, (read, write) in self._meters.items()]
        return [one for one in moved if one.read_s or one.write_s]

    def _meter(self, drive: int) -> tuple[Meter, Meter]:
        meters = self._meters.get(drive)
        if meters is None:
            meters = self._meters[drive] = Meter(), Meter()
        return meters

    def is_wanted(self, state: LoadState) -> bool:
        """Whether a load has not ended and no reset will fail it: ask before reading for it."""
        with self._lock:
            return state in self._live and state.generation == self.generation

    def may_write(self, state: LoadState) -> bool:
        """Ask before writing into a load's blocks; after True, `wrote` must follow. False: the blocks are not its own
        any more."""
        with self._lock:
            alive = state in self._live
            state.writers += alive
            return alive

    def wrote(self, state: LoadState) -> None:
        with self._lock:
            state.writers -= 1

    def items(self, state: LoadState, positions: Collection[int], reason: str = "") -> None:
        """Items of a load ended; with a reason they failed."""
        with self._lock:
            if state not in self._live:
                return
            state.items_left.difference_update(positions)
            self._end_reads(state, positions, not reason)
            if reason:
                state.failed.extend(positions)
                state.reason = state.reason or reason
            if not state.items_left:
                self._end(state)

    def _end_reads(self, state: LoadState, positions: Iterable[int], well: bool) -> None:
        if not state.on_drive:
            return
        now = time.monotonic()
        for position in positions:
            if (place := state.on_drive.pop(position, None)) is not None:
                drive, record_bytes = place
                self._meter(drive)[0].end(1, record_bytes if well else 0, now)
                self._pace("ssd_moved", state, drive, record_bytes, now, well)

    def _end(self, state: LoadState) -> None:
        self._end_reads(state, tuple(state.on_drive), False)
        self._pace("end", state, time.monotonic())
        del self._live[state]
        self._loads.append(state)

    def expire(self, now: float) -> None:
        """End loads past their deadline, unless a thread is writing for them: then the next call does."""
        with self._lock:
            for state in [state for state in self._live if now > state.deadline and not state.writers]:
                state.failed.extend(state.items_left)
                state.reason = state.reason or "deadline"
                self._end(state)

    def count(self, name: str, value: int, label: str = "") -> None:
        with self._lock:
            count(self._counts, name, value, label)

    def say_once(self, topic: str, message: str) -> None:
        """A line for the log, at most one per topic."""
        with self._lock:
            if topic not in self.said:
                self.said.add(topic)
                self._messages.append(message)

    def drain(self) -> tuple[list[JobResult], list[LoadState], Counts, list[str]]:
        with self._lock:
            drained = self._results, self._loads, self._counts, self._messages
            self._results, self._loads, self._counts, self._messages = [], [], {}, []
        return drained
