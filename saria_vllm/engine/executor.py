"""One rank's executor: takes jobs, moves their bytes on its own threads, hands back their ends.

Loads: DRAM items are copied by the copy thread while SSD items are read, verified and scattered by the SSD threads, at
the same time. Stores are copied by the copy thread, after loads. Persists are written from the pool itself.
The engine's thread only appends to queues and drains `poll` once per step.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from saria_vllm import _native
from saria_vllm.engine.jobs import Ends, LoadState, io_cpus, pin_this_thread
from saria_vllm.engine.pool import DramPool
from saria_vllm.engine.ssd_engine import open_engine
from saria_vllm.engine.ssd_thread import Read, Retire, SsdThread, Write, depth_for
from saria_vllm.metrics import Counts
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import (
    FoundChunk,
    GroupShape,
    JobResult,
    LoadItem,
    LoadJob,
    OpenSsd,
    PersistJob,
    StoreItem,
    StoreJob,
)

PIECE_BYTES = 16 << 20
"""Bytes copied between two looks at the queues."""

CLOSE_S = 2.0
"""How long `close` waits for I/O that is in flight."""


class Opened:
    """Result of opening the SSD tier on this rank."""

    def __init__(self, found: list[FoundChunk], next_segment: int, problem: str = "") -> None:
        self.found, self.next_segment, self.problem = found, next_segment, problem


class Executor:
    """See the module's text.

    Args:
        maps: pages of each group in HBM.
        shapes: sizes of each group on this rank.
        ssd_engine, io_threads, cpus: as configured.
    """

    def __init__(
        self,
        pool: DramPool,
        maps: Mapping[int, _native.PageMap],
        shapes: Mapping[int, GroupShape],
        *,
        ssd_engine: str = "auto",
        io_threads: int = 0,
        cpus: Sequence[int] = (),
    ) -> None:
        self._pool, self._maps, self._shapes = pool, maps, shapes
        self._ssd_engine, self._io_threads, self._cpus = ssd_engine, io_threads, io_cpus(cpus)
        self._ends = Ends()
        self._generation = 0
        self._store: SegmentStore | None = None
        self._ssd: list[SsdThread] = []
        self._drives = 0
        self._turn = 0
        self._opened: Opened | None = None
        self._opener: threading.Thread | None = None
        self._loads: deque[tuple[LoadState, list[int]]] = deque()
        self._stores: deque[StoreJob] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._copier = threading.Thread(target=self._copy_loop, name="saria-copy", daemon=True)
        self._copier.start()

    # Called by the engine's thread.

    def open_ssd(self, opened: OpenSsd, rank: int, store_id: bytes) -> None:
        """Open and scan the SSD tier in the background; `poll` returns the result once."""
        self._opener = threading.Thread(
            target=self._open, args=(opened, rank, store_id), name="saria-open", daemon=True
        )
        self._opener.start()

    def set_generation(self, generation: int) -> None:
        """Loads submitted under an older generation end as failed from now on."""
        if generation != self._generation:
            self._generation = generation
            if self._store is not None:
                self._store.set_generation(generation)

    def submit_load(self, job: LoadJob) -> None:
        state = LoadState(job, self._generation)
        in_dram = [position for position, item in enumerate(job.items) if item.slot is not None]
        for position, item in enumerate(job.items):
            if item.extent is not None:
                if not self._ssd:
                    self._ends.items(state, 1, (position,), "not_found")
                    continue
                self._reader(item.extent.drive).submit(Read(state, position))
        if in_dram:
            with self._wake:
                self._loads.append((state, in_dram))
                self._wake.notify()

    def refuse_load(self, job: LoadJob) -> None:
        """End a load as failed without touching a byte."""
        self._ends.items(LoadState(job, self._generation), len(job.items), range(len(job.items) or 1), "stale")

    def submit_store(self, job: StoreJob) -> None:
        """The blocks must hold their final bytes, and stay untouched until the job has ended."""
        with self._wake:
            self._stores.append(job)
            self._wake.notify()

    def submit_persist(self, job: PersistJob) -> None:
        """The slot must stay untouched until the job has ended."""
        if not self._ssd:
            self._ends.job(JobResult(job.job_id, (0,), "not_found"))
            return
        self._writer(job.extent.drive).submit(Write(job))

    def retire(self, drive: int, segment: int) -> None:
        if self._ssd:
            self._writer(drive).submit(Retire(drive, segment))

    def poll(self) -> tuple[list[JobResult], list[LoadState], Counts, list[str]]:
        """What ended since the last call: stores and persists, loads, counter increments, lines for the log."""
        results, loads, counts, messages = self._ends.drain()
        for state in loads:
            if state.generation != self._generation:
                state.failed, state.reason = list(range(len(state.job.items))), "stale"
        return results, loads, counts, messages

    def take_opened(self) -> Opened | None:
        """The result of `open_ssd`, once."""
        opened, self._opened = self._opened, None
        return opened

    def close(self) -> None:
        """Queued writes are dropped, copies in flight end, open segments are sealed. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        for thread in self._ssd:
            thread.close(CLOSE_S)
        self._copier.join(CLOSE_S)
        if self._opener is not None:
            self._opener.join(CLOSE_S)
        if self._store is not None:
            self._store.close()
        self._pool.close()

    # Our threads.

    def _open(self, opened: OpenSsd, rank: int, store_id: bytes) -> None:
        pin_this_thread(self._cpus)
        try:
            store = SegmentStore(opened, rank, self._shapes, store_id)
            found = store.recover()
            self._drives = len(opened.directories)
            threads_per_drive = self._io_threads or (2 if len(self._cpus) >= 8 else 1)
            depth = depth_for(max(shape.record_bytes for shape in self._shapes.values()))
            threads = []
            for number in range(self._drives * threads_per_drive):
                engine, note = open_engine(self._ssd_engine, depth)
                if not number:
                    self._ends.say_once("ssd engine", note)
                name = f"saria-ssd{number}"
                threads.append(
                    SsdThread(name, store, engine, self._pool, self._maps, self._shapes, self._ends, self._cpus)
                )
            store.set_generation(self._generation or opened.generation)
            self._store, self._ssd = store, threads
            self._opened = Opened(found, store.next_segment_id)
        except Exception as error:
            self._opened = Opened([], 0, f"{type(error).__name__}: {error}")

    def _reader(self, drive: int) -> SsdThread:
        self._turn += 1
        return self._ssd[drive + self._drives * (self._turn % (len(self._ssd) // self._drives))]

    def _writer(self, drive: int) -> SsdThread:
        return self._ssd[drive]

    def _copy_loop(self) -> None:
        pin_this_thread(self._cpus)
        while True:
            with self._wake:
                while not (self._loads or self._stores or self._closing):
                    self._wake.wait()
                if self._closing:
                    return
                load = self._loads.popleft() if self._loads else None
                store = self._stores.popleft() if load is None else None
            if load is not None:
                self._copy_load(*load)
            elif store is not None:
                self._copy_store(store)

    def _copy_load(self, state: LoadState, positions: list[int]) -> None:
        for piece in self._pieces(state.job.items, positions):
            group = state.job.items[piece[0]].group
            nbytes = self._shapes[group].record_bytes
            try:
                sources, blocks = [], []
                for position in piece:
                    item = state.job.items[position]
                    assert item.slot is not None
                    sources.append(self._pool.address(item.slot, nbytes))
                    blocks.append(item.blocks)
                self._maps[group].scatter_many(sources, blocks)
            except Exception as error:
                self._fault("load", error)
                self._ends.items(state, len(piece), piece, "other")
                continue
            self._ends.count("load_bytes", nbytes * len(piece), "dram")
            self._ends.items(state, len(piece))

    def _copy_store(self, job: StoreJob) -> None:
        try:
            for piece in self._pieces(job.items, range(len(job.items))):
                group = job.items[piece[0]].group
                nbytes = self._shapes[group].record_bytes
                targets = [self._pool.address(job.items[position].slot, nbytes) for position in piece]
                self._maps[group].gather_many(targets, [job.items[position].blocks for position in piece])
                self._ends.count("store_bytes", nbytes * len(piece))
        except Exception as error:
            self._fault("store", error)
            self._ends.job(JobResult(job.job_id, tuple(range(len(job.items))), "other"))
            return
        self._ends.job(JobResult(job.job_id))

    def _fault(self, what: str, error: Exception) -> None:
        self._ends.count("internal_errors", 1)
        self._ends.say_once(f"{what} fault", f"a {what} between HBM and DRAM failed: {type(error).__name__}: {error}")

    def _pieces(self, items: Sequence[StoreItem | LoadItem], positions: Iterable[int]) -> Iterable[list[int]]:
        """Runs of positions of one group, at most `PIECE_BYTES` each."""
        for group, run in itertools.groupby(positions, lambda position: items[position].group):
            members = list(run)
            step = max(1, PIECE_BYTES // self._shapes[group].record_bytes)
            for start in range(0, len(members), step):
                yield members[start : start + step]
