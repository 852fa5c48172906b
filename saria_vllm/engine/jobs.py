"""What the executor's threads share: jobs in flight, their ends, counters, the generation."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from saria_vllm.metrics import Counts, count
from saria_vllm.types import JobResult, LoadJob


class LoadState:
    """A load in flight on this rank."""

    __slots__ = ("failed", "generation", "items_left", "job", "reason")

    def __init__(self, job: LoadJob, generation: int) -> None:
        self.job, self.generation = job, generation
        self.items_left = len(job.items)
        self.failed: list[int] = []
        self.reason = ""


class Ends:
    """Collects what ended since the last drain. Threads add, the engine's thread drains once per step. One lock, held
    for a few statements."""

    def __init__(self) -> None:
        self.generation = 0
        """Jobs submitted under an older one end as failed. Only grows, and before the store's does."""
        self._lock = threading.Lock()
        self._results: list[JobResult] = []
        self._loads: list[LoadState] = []
        self._counts: Counts = {}
        self.said: set[str] = set()
        self._messages: list[str] = []

    def job(self, result: JobResult) -> None:
        """A store or persist job ended."""
        with self._lock:
            self._results.append(result)

    def items(self, state: LoadState, done: int, failed: Iterable[int] = (), reason: str = "") -> None:
        """`done` more items of a load ended, of which those at `failed` went wrong."""
        with self._lock:
            state.failed.extend(failed)
            state.reason = state.reason or reason
            state.items_left -= done
            if not state.items_left:
                self._loads.append(state)

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
