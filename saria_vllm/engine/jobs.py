"""What the executor's threads share: jobs in flight, their ends, counters, the generation."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable

from saria_vllm.metrics import Counts, count
from saria_vllm.types import JobResult, LoadJob, PersistJob

LOAD_DEADLINE_S = 30.0
"""A load that takes longer ends as failed: a drive that hangs must not hang a request."""


class LoadState:
    """A load in flight on this rank."""

    __slots__ = ("deadline", "failed", "generation", "items_left", "job", "reason", "writers")

    def __init__(self, job: LoadJob, generation: int, now: float) -> None:
        self.job, self.generation = job, generation
        self.items_left = set(range(job.chunks or 1))
        """Positions that have not ended; a load without items has one to end all the same."""
        self.failed: list[int] = []
        self.reason = ""
        self.deadline = now + LOAD_DEADLINE_S
        self.writers = 0
        """Threads that are writing into the load's blocks at this moment."""


class PersistState:
    """A persist job in flight on this rank. Only the thread that writes it touches it."""

    __slots__ = ("failed", "generation", "items", "job_id", "left", "reason")

    def __init__(self, job: PersistJob, generation: int) -> None:
        self.job_id, self.items, self.generation = job.job_id, job.items, generation
        """The generation in which the slots were filled."""
        self.left = job.chunks
        self.failed: list[int] = []
        self.reason = ""


class Ends:
    """Collects what ended since the last drain. Threads add, the engine's thread drains once per step. One lock, held
    for a few statements."""

    def __init__(self) -> None:
        self.generation = 0
        """Jobs submitted under an older one end as failed. Only grows, and before the store's does."""
        self._lock = threading.Lock()
        self._live: dict[LoadState, None] = {}
        self._results: list[JobResult] = []
        self._loads: list[LoadState] = []
        self._counts: Counts = {}
        self.said: set[str] = set()
        self._messages: list[str] = []

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
        if not state.left:
            self.job(JobResult(state.job_id, tuple(state.failed), state.reason))

    def begin(self, job: LoadJob, now: float) -> LoadState:
        """A load was submitted; it ends when all its items have, or at its deadline."""
        state = LoadState(job, self.generation, now)
        with self._lock:
            self._live[state] = None
        return state

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
            if reason:
                state.failed.extend(positions)
                state.reason = state.reason or reason
            if not state.items_left:
                self._end(state)

    def _end(self, state: LoadState) -> None:
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


def io_cpus(configured: Iterable[int]) -> set[int]:
    """CPUs for our threads: the configured ones; else, from 8 CPUs on, those that the engine's thread leaves; else all.

    Threads inherit the mask of their creator, which on CPU machines is the engine's own core: that is why even
    "anywhere" has to be said.
    """
    everywhere = set(range(os.cpu_count() or 1))
    spare = everywhere - os.sched_getaffinity(0) if len(everywhere) >= 8 else set()
    return set(configured) or spare or everywhere


def pin_this_thread(cpus: set[int]) -> None:
    """Best effort: a container may allow fewer CPUs than it shows."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        pass
