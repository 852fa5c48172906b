"""One rank's executor: takes jobs, moves their bytes on its own threads, hands back their ends.

Loads: DRAM items are copied by the copy thread, piece by piece as the pacer allows, while SSD items are read, verified
and scattered by the SSD threads, at the same time. Stores are copied by the copy thread when no load may be, and
promotions after both. Persists are written from the pool itself.
The engine's thread only appends to queues and drains `poll` once per step.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from saria_vllm import _native
from saria_vllm.config import LOAD_DEADLINE_S, PacingConfig, SsdEngineName
from saria_vllm.engine.cpus import PINNED_CPUS, io_cpus, near_drive, pin_this_thread
from saria_vllm.engine.first_rates import FirstRates
from saria_vllm.engine.jobs import Ends, LoadState, PersistState
from saria_vllm.engine.pieces import Piece, Pieces
from saria_vllm.engine.pool import DramPool
from saria_vllm.engine.ssd_engine import SsdEngine, open_engine
from saria_vllm.engine.ssd_thread import Read, Retire, SsdThread, Write, depth_for
from saria_vllm.errors import StorageError
from saria_vllm.metrics import Counts
from saria_vllm.storage.rates import ssd_path
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import (
    GroupShape,
    JobResult,
    LoadJob,
    Moved,
    OpenedSsd,
    OpenSsd,
    PersistJob,
    Slot,
    StoreJob,
)

PIECE_BYTES = 16 << 20
"""Bytes of a store copied between two looks at the queues."""

LOOK_S = 0.005
"""Between two looks at loads that have to wait: what they wait for changes."""

PROMOTE_S = 1.0
"""A promotion that loads and stores hold up for longer is given up: it holds blocks that requests may need."""

CLOSE_S = 2.0
"""How long `close` waits for what is in flight."""

NOTES_SAID_MAX = 5
"""Of what the SSD tier noted while it opened, so many are told."""


class Executor:
    """See the module's text.

    Args:
        maps: pages of each group in HBM.
        shapes: sizes of each group on this rank.
        ssd_engine, io_threads, cpus, pacing: as configured.
        load_deadline_s: a load that takes longer ends as failed.
        link: what copies from DRAM into HBM reach, bytes per second; 0: to be seen.
        first_rates: says how fast drives read when the SSD tier opens; none: to be seen.
        opener: makes an SSD engine; see `open_engine`.
    """

    def __init__(
        self,
        pool: DramPool,
        maps: Mapping[int, _native.PageMap],
        shapes: Mapping[int, GroupShape],
        *,
        ssd_engine: SsdEngineName = "auto",
        io_threads: int = 0,
        cpus: Sequence[int] = (),
        pacing: PacingConfig = PacingConfig(),  # noqa: B008  Frozen.
        link: float = 0.0,
        load_deadline_s: float = LOAD_DEADLINE_S,
        first_rates: FirstRates | None = None,
        opener: Callable[[SsdEngineName, int], tuple[SsdEngine, str]] = open_engine,
    ) -> None:
        self._pool, self._maps, self._shapes = pool, maps, shapes
        self._ssd_engine, self._io_threads, self._open_engine = ssd_engine, io_threads, opener
        self._cpus = io_cpus(cpus, os.sched_getaffinity(0), os.cpu_count() or 1)
        self._near_drives = not cpus
        self._ends = Ends(pacing, link, load_deadline_s)
        self._first_rates = first_rates
        self._store: SegmentStore | None = None
        self._ssd: list[SsdThread] = []
        """By drive; where a drive has several threads, every so many."""
        self._readers: list[Iterator[SsdThread]] = []
        """By drive: its threads in turn."""
        self._opened: OpenedSsd | None = None
        self._engine_note = ""
        self._opener: threading.Thread | None = None
        self._paced_s = 0.0
        """Waited for the pacer, and not counted yet."""
        self._stores: deque[StoreJob] = deque()
        self._promotions: deque[tuple[StoreJob, float]] = deque()
        """Jobs and when they are given up."""
        self._wake = threading.Condition()
        self._closing = False
        self._copier = threading.Thread(target=self._copy_loop, name="saria-copy", daemon=True)
        self._copier.start()

    # Called by the engine's thread.

    def open_ssd(self, opened: OpenSsd, rank: int, store_id: bytes) -> None:
        """Open and scan the SSD tier in the background; `poll` returns the result once."""
        opener = threading.Thread(target=self._open, args=(opened, rank, store_id), name="saria-open", daemon=True)
        try:
            opener.start()
        except RuntimeError as error:  # Too many threads here.
            self._opened = OpenedSsd(problem=str(error))
            return
        self._opener = opener

    def set_generation(self, generation: int) -> None:
        """Loads submitted under an older generation end as failed from now on."""
        if generation == self._ends.generation:
            return
        with self._wake:
            self._ends.generation = generation
            if self._store is not None:
                self._store.set_generation(generation)

    def submit_load(self, job: LoadJob) -> None:
        state = self._ends.begin(job, time.monotonic())
        if not job.parts:
            self._ends.items(state, (0,))
            return
        drives = np.concatenate([part.extents[:, 0] for part in job.parts])
        on_ssd = (drives >= 0).nonzero()[0].tolist()
        if on_ssd and not self._ssd:
            self._ends.items(state, on_ssd, "not_found")
            on_ssd = []
        pieces = Pieces(job.parts, self._shapes)
        reads: dict[SsdThread, list[Read]] = {}
        places: dict[int, tuple[int, int]] = {}
        ssd_bytes: dict[int, int] = {}
        if on_ssd:
            sizes = np.repeat(
                [self._shapes[part.group].record_bytes for part in job.parts], [len(part.keys) for part in job.parts]
            )[on_ssd]
            numbers = drives[on_ssd] % len(self._readers)
            ssd_bytes = {number: int(sizes[numbers == number].sum()) for number in np.unique(numbers).tolist()}
            places = dict(zip(on_ssd, zip(numbers.tolist(), sizes.tolist(), strict=True), strict=True))
            for position, (drive, _) in places.items():
                reads.setdefault(next(self._readers[drive]), []).append(Read(state, position))
        with self._wake:
            self._ends.begin_moves(state, pieces, places, ssd_bytes, time.monotonic())
            closing = self._closing
            self._wake.notify()
        if closing:
            self._ends.give_up(state, "other")
        for thread, ops in reads.items():
            thread.submit(ops)

    def refuse_load(self, job: LoadJob) -> None:
        """End a load as failed without touching a byte."""
        self._ends.items(self._ends.begin(job, time.monotonic()), _all_positions(job), "stale")

    def submit_store(self, job: StoreJob) -> None:
        """The blocks must hold their final bytes, and stay untouched until the job has ended."""
        if not self._queue(self._stores, job):
            self._fail_store(job)

    def submit_promotion(self, job: StoreJob) -> None:
        """As `submit_store`, of chunks that were loaded from SSD: it gives way to loads and stores."""
        if not self._queue(self._promotions, (job, time.monotonic() + PROMOTE_S)):
            self._fail_store(job)

    def submit_persist(self, job: PersistJob) -> None:
        """The slots must stay untouched until the job has ended."""
        if not self._ssd:
            self._ends.job(JobResult(job.job_id, tuple(range(job.chunks)), "not_found"))
            return
        state = PersistState(
            job, self._ends.generation, job.drive % len(self._readers), self._shapes[job.group].record_bytes
        )
        self._ends.begin_writes(state, time.monotonic())
        self._writer(job.drive).submit([Write(state, position) for position in range(job.chunks)])

    def retire(self, drive: int, segment: int) -> None:
        if self._ssd:
            self._writer(drive).submit([Retire(drive, segment)])

    def poll(self) -> tuple[list[JobResult], list[LoadState], Counts, list[str]]:
        """What ended since the last call: stores and persists, loads, counter increments, lines for the log."""
        self._ends.expire(time.monotonic())
        results, loads, counts, messages = self._ends.drain()
        for state in loads:
            if state.generation != self._ends.generation:
                state.failed, state.reason = list(_all_positions(state.job)), "stale"
        return results, loads, counts, messages

    def take_moved(self) -> list[Moved]:
        """What was read from and written to drives since the last call."""
        return self._ends.take_moved(time.monotonic())

    @property
    def ingress_bytes_s(self) -> float:
        """What loads may bring into HBM; 0 while it is not known."""
        return self._ends.ingress()

    def take_opened(self) -> OpenedSsd | None:
        """The result of `open_ssd`, once."""
        opened = self._opened
        if opened is not None:
            self._opened = None
        return opened

    def close(self) -> None:
        """What is queued fails, what is in flight ends, open segments are sealed. Idempotent.

        Where that takes longer than `CLOSE_S`, as on a drive that hangs, files and memory are left to the end of the
        process: a thread may be using them.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._opener is not None:
            self._opener.join(CLOSE_S)
        deadline = time.monotonic() + CLOSE_S
        for thread in self._ssd:
            thread.close(0)  # All of them stop at the same time.
        ended = [thread.close(max(0.0, deadline - time.monotonic())) for thread in self._ssd]
        self._copier.join(max(0.0, deadline - time.monotonic()))
        if not all(ended) or self._copier.is_alive():
            return
        if self._store is not None:
            self._store.close()
        self._pool.close()

    # Our threads.

    def _open(self, opened: OpenSsd, rank: int, store_id: bytes) -> None:
        pin_this_thread(self._cpus)
        store: SegmentStore | None = None
        threads: list[SsdThread] = []
        try:
            store = SegmentStore(opened, rank, self._shapes, store_id)
            found = store.recover()
            drives = len(opened.directories)
            for number in range(drives * (self._io_threads or (2 if len(self._cpus) >= PINNED_CPUS else 1))):
                threads.append(self._start_ssd(number, store))
            self._say_notes(store.notes)
            self._ends.count("buffered_drives", sum(drive is not None and not drive.direct for drive in store.drives))
            with self._wake:
                if self._closing:
                    raise StorageError("closed while it was opening")
                store.set_generation(self._ends.generation or opened.generation)
                self._readers = [itertools.cycle(threads[drive::drives]) for drive in range(drives)]
                self._store, self._ssd = store, threads
            usable = tuple(drive is not None for drive in store.drives)
            rates = self._rates(opened.directories, usable)
            self._opened = OpenedSsd(found, store.next_segment_id, usable, self._engine_note, read_bytes_s=rates)
        except Exception as error:
            ended = [thread.close(CLOSE_S) for thread in threads]
            if store is not None and all(ended):
                store.close()
            self._opened = OpenedSsd(problem=f"{type(error).__name__}: {error}")

    def _rates(self, directories: Sequence[str], usable: Sequence[bool]) -> tuple[float, ...]:
        """Bytes per second that drives read, as known or measured now; 0 where neither."""
        if self._first_rates is None:
            return (0.0,) * len(directories)
        paths = [ssd_path(directory) if used else "" for directory, used in zip(directories, usable, strict=True)]
        record_bytes = max(shape.record_bytes for shape in self._shapes.values())
        rates = self._first_rates(self._ssd_engine, paths, record_bytes)
        for drive, rate in enumerate(rates):
            if rate:
                self._ends.seed_drive(drive, rate)
        return rates

    def _start_ssd(self, number: int, store: SegmentStore) -> SsdThread:
        depth = depth_for(max(shape.record_bytes for shape in self._shapes.values()))
        engine, note = self._open_engine(self._ssd_engine, depth)
        self._engine_note = note
        drive = store.drives[number % len(store.drives)]
        cpus = near_drive(self._cpus, drive.directory) if drive and self._near_drives else self._cpus
        try:
            return SsdThread(
                f"saria-ssd{number}", store, engine, self._pool, self._maps, self._shapes, self._ends, cpus
            )
        except Exception:
            engine.close()
            raise

    def _say_notes(self, notes: list[str]) -> None:
        for note in notes[:NOTES_SAID_MAX]:
            self._ends.say_once(note, note)
        if len(notes) > NOTES_SAID_MAX:
            self._ends.say_once("notes", f"and {len(notes) - NOTES_SAID_MAX} more while the SSD tier opened")

    def _writer(self, drive: int) -> SsdThread:
        return self._ssd[drive % len(self._readers)]

    def _queue(self, queue: deque[Any], entry: object) -> bool:
        """Hand something to the copy thread. False when that is closing."""
        with self._wake:
            if not self._closing:
                queue.append(entry)
                self._wake.notify()
            return not self._closing

    def _copy_loop(self) -> None:
        pin_this_thread(self._cpus)
        while True:
            with self._wake:
                while not (self._stores or self._promotions or self._closing or self._wait_for_load()):
                    pass
                if self._closing:
                    break
                promotion = self._promotions.popleft() if self._promotions else None
            self._copy_urgent()
            if promotion is not None:
                self._copy_promotion(*promotion)
        for state in self._ends.live():
            self._ends.give_up(state, "other")
        for job in (*self._stores, *(job for job, _ in self._promotions)):
            self._fail_store(job)

    def _copy_urgent(self) -> None:
        """Loads that may be copied now, and stores after them."""
        self._copy_loads()
        while self._stores and not self._closing:
            self._copy_store(self._stores.popleft())
            self._copy_loads()

    def _wait_for_load(self) -> bool:
        """Wait until something may have changed. Whether a load may be copied, without having waited."""
        turn = self._ends.choose()
        if turn.load is not None:
            return True
        if turn.wait_s == math.inf:
            self._wake.wait()
        else:
            began = time.monotonic()
            self._wake.wait(min(turn.wait_s, LOOK_S))
            self._paced_s += time.monotonic() - began
            self._ends.count("paced_ms", int(self._paced_s * 1000))
            self._paced_s %= 0.001
        return False

    def _copy_loads(self) -> None:
        """Copy what may be copied now."""
        while not self._closing and isinstance(state := (turn := self._ends.choose()).load, LoadState):
            self._copy_piece(state, turn.nbytes)

    def _copy_piece(self, state: LoadState, nbytes: int) -> None:
        try:
            piece = state.pieces.next(nbytes) if state.pieces is not None else None
            if piece is None or not self._ends.may_write(state):
                self._ends.give_up(state, "other")
                return
            began = time.monotonic()
            self._ends.take(state, piece.nbytes)
            try:
                self._maps[piece.group].scatter_many(self._addresses(piece), piece.blocks.tolist())
            except Exception:
                self._ends.items(state, piece.positions, "other")
                raise
            finally:
                self._ends.wrote(state)
            self._ends.copied(piece.nbytes, began)
            self._ends.count("load_bytes", piece.nbytes, "dram")
            self._ends.items(state, piece.positions)
        except Exception as error:
            self._fault("load", error)
            self._ends.give_up(state, "other")

    def _copy_store(self, job: StoreJob) -> None:
        copied = 0
        try:
            pieces = Pieces(job.parts, self._shapes)
            while not self._closing and (piece := pieces.next(PIECE_BYTES)) is not None:
                copied += self._copy_out(piece)
                self._copy_loads()
        except Exception as error:
            self._fault("store", error)
        self._end_store(job, copied)

    def _copy_promotion(self, job: StoreJob, until: float) -> None:
        copied, reason = 0, "other"
        try:
            pieces = Pieces(job.parts, self._shapes)
            while not self._closing and (piece := pieces.next(PIECE_BYTES)) is not None:
                if time.monotonic() > until:
                    reason = "too_late"
                    break
                copied += self._copy_out(piece)
                self._copy_urgent()
        except Exception as error:
            self._fault("promotion", error)
        self._end_store(job, copied, reason)

    def _copy_out(self, piece: Piece) -> int:
        """Copy chunks from HBM to DRAM; how many."""
        targets = self._addresses(piece)
        self._maps[piece.group].gather_many(targets, piece.blocks.tolist())
        self._ends.count("store_bytes", piece.nbytes)
        return len(targets)

    def _end_store(self, job: StoreJob, copied: int, reason: str = "other") -> None:
        if copied < job.chunks:
            self._fail_store(job, reason)
        else:
            self._ends.job(JobResult(job.job_id))

    def _fail_store(self, job: StoreJob, reason: str = "other") -> None:
        self._ends.job(JobResult(job.job_id, _all_positions(job), reason))

    def _addresses(self, piece: Piece) -> list[int]:
        nbytes = self._shapes[piece.group].record_bytes
        return [self._pool.address(Slot(slab, cell), nbytes) for slab, cell in piece.slots.tolist()]

    def _fault(self, what: str, error: Exception) -> None:
        self._ends.count("internal_errors", 1)
        self._ends.say_once(f"{what} fault", f"a {what} between HBM and DRAM failed: {type(error).__name__}: {error}")


def _all_positions(job: LoadJob | StoreJob) -> tuple[int, ...]:
    """Of a job that failed as a whole; one that never had chunks has failed too."""
    return tuple(range(job.chunks or 1))
