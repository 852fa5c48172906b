"""Test doubles of the worker side: bytes that name themselves, HBM in memory, an SSD engine that fails on command."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from saria_vllm import _native
from saria_vllm.config import PacingConfig
from saria_vllm.engine.emulated import EmulatedEngine, EmulatedMap, Emulation
from saria_vllm.engine.executor import Executor
from saria_vllm.engine.jobs import LoadState
from saria_vllm.engine.pool import DramPool
from saria_vllm.engine.ssd_engine import SsdEngine, open_engine
from saria_vllm.metrics import Counts
from saria_vllm.storage import format as fmt
from saria_vllm.types import (
    Extent,
    GroupShape,
    JobResult,
    LoadItem,
    LoadJob,
    LoadPart,
    OpenedSsd,
    OpenSsd,
    PersistItem,
    PersistJob,
    Slot,
    StoreItem,
    StoreJob,
    StorePart,
)

STORE_ID = b"0123456789abcdef"
WAIT_S = 30.0


def payload(key: bytes, nbytes: int, generation: int = 1) -> bytes:
    """Bytes of a chunk: 16-byte words of (tag of key and generation, position), so that each one names itself."""
    words = np.empty((-(-nbytes // 16), 2), dtype="<u8")
    words[:, 0] = int.from_bytes(_tag(key, generation), "little")
    words[:, 1] = np.arange(len(words))
    return words.tobytes()[:nbytes]


def whose(data: bytes, keys: Iterable[bytes], generations: Sequence[int] = (1, 2)) -> set[tuple[bytes, int]]:
    """Which (key, generation) the words of `data` come from; (b"?", 0) for what is nobody's."""
    names = {_tag(key, generation): (key, generation) for key in keys for generation in generations}
    return {names.get(data[at : at + 8], (b"?", 0)) for at in range(0, len(data) - 15, 16)}


def _tag(key: bytes, generation: int) -> bytes:
    return hashlib.blake2b(key + b"|%d" % generation, digest_size=8).digest()


def failing(error: int, call: Any, when: Any = lambda *_args: True) -> Any:
    """`call`, but for arguments of which `when` says that it fails."""

    def shim(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise OSError(error, os.strerror(error), str(args[0]))
        return call(*args, **kwargs)

    return shim


class Hbm:
    """The pages of one group: per layer an array [blocks, page bytes]."""

    def __init__(self, page_bytes: Sequence[int], blocks: int) -> None:
        self.layers = [np.zeros((blocks, nbytes), np.uint8) for nbytes in page_bytes]
        self.block_bytes = sum(page_bytes)
        bases = [layer.ctypes.data for layer in self.layers]
        self.map = _native.PageMap(bases, page_bytes, page_bytes, blocks)

    def device_pages(self) -> Any:
        """The same pages, as a device's."""
        import torch

        from saria_vllm.engine.device_pages import DevicePages, Layer

        layers = [(torch.from_numpy(layer.reshape(-1)), 0, layer.shape[1], layer.shape[1]) for layer in self.layers]
        return DevicePages([Layer(*layer) for layer in layers], len(self.layers[0]))

    def write(self, blocks: Sequence[int], data: bytes) -> None:
        """Cut `data` over the pages in a record's order: by block, then by layer."""
        assert len(data) == len(blocks) * self.block_bytes
        rest = np.frombuffer(data, np.uint8)
        for block in blocks:
            for layer in self.layers:
                layer[block], rest = rest[: layer.shape[1]], rest[layer.shape[1] :]

    def read(self, blocks: Sequence[int]) -> bytes:
        return b"".join(layer[block].tobytes() for block in blocks for layer in self.layers)


class FaultyMap:
    """A `PageMap` that raises what `fault` says before it copies anything."""

    def __init__(self, inner: _native.PageMap) -> None:
        self._inner = inner
        self.fault: Callable[[str, Any], Exception | None] = lambda _call, _blocks: None

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)

        def checked(*args: Any) -> Any:
            error = self.fault(name, args[-1])
            if error is not None:
                raise error
            return call(*args)

        return checked


class Transfer(NamedTuple):
    kind: str
    """"read" or "write"."""
    number: int
    """Counts reads and writes of one engine, each from 0."""
    offset: int
    nbytes: int


@dataclass
class Fault:
    """What happens to a transfer instead of the normal thing."""

    result: int | None = None
    """Reported, and nothing moved: -errno, a short count, or all bytes (a lost write)."""
    raises: Exception | None = None
    """Raised by the submit."""
    flip_bit: int | None = None
    """Of what was read."""
    hold: threading.Event | None = None
    """The transfer is done at once, but its end told only when this is set."""
    delay_s: float = 0.0
    """The same for a time."""


Faults = Callable[[Transfer], Fault | None]


class FaultyEngine:
    """An `SsdEngine` over a real one. `faults` is asked once per transfer; `reap_raises` ends every reap."""

    def __init__(self, inner: SsdEngine, faults: Faults) -> None:
        self.inner, self.faults = inner, faults
        self.name, self.depth = inner.name, inner.depth
        self.reap_raises: Exception | None = None
        self.submits = {"read": 0, "write": 0}
        self.closed = False
        self._ended: list[tuple[int, int]] = []
        self._faults: dict[int, tuple[Fault, int, float]] = {}
        self._held: list[tuple[int, int, Fault, float]] = []

    @property
    def in_flight(self) -> int:
        return self.inner.in_flight + len(self._ended) + len(self._held)

    def register_memory(self, addr: int, nbytes: int, device: int = -1) -> bool:
        return self.inner.register_memory(addr, nbytes, device)

    def register_files(self) -> Callable[[int], None] | None:
        return self.inner.register_files()

    def submit_read(self, fd: int, addr: int, nbytes: int, offset: int, tag: int) -> None:
        self._submit("read", fd, addr, nbytes, offset, tag)

    def submit_write(self, fd: int, addr: int, nbytes: int, offset: int, tag: int) -> None:
        self._submit("write", fd, addr, nbytes, offset, tag)

    def _submit(self, kind: str, fd: int, addr: int, nbytes: int, offset: int, tag: int) -> None:
        fault = self.faults(Transfer(kind, self.submits[kind], offset, nbytes))
        self.submits[kind] += 1
        if fault is not None and fault.raises is not None:
            raise fault.raises
        if fault is not None and fault.result is not None:
            self._ended.append((tag, fault.result))
            return
        if fault is not None:
            self._faults[tag] = fault, addr, time.monotonic() + fault.delay_s
        submit = self.inner.submit_read if kind == "read" else self.inner.submit_write
        submit(fd, addr, nbytes, offset, tag)

    def reap(self, timeout_s: float) -> list[tuple[int, int]]:
        if self.reap_raises is not None:
            raise self.reap_raises
        ended, self._ended = self._ended, []
        for tag, result in self.inner.reap(0.0 if ended or not self.inner.in_flight else timeout_s):
            fault, addr, due = self._faults.pop(tag, (Fault(), 0, 0.0))
            if fault.flip_bit is not None:
                ctypes.c_uint8.from_address(addr + fault.flip_bit // 8).value ^= 1 << fault.flip_bit % 8
            self._held.append((tag, result, fault, due))
        now = time.monotonic()
        ready = [h for h in self._held if h[3] <= now and (h[2].hold is None or h[2].hold.is_set())]
        self._held = [h for h in self._held if h not in ready]
        if self._held and not ended and not ready:
            time.sleep(min(timeout_s, 0.001))
        return ended + [(tag, result) for tag, result, _, _ in ready]

    def close(self) -> None:
        self.closed = True
        self.inner.close()


def no_faults(_transfer: Transfer) -> Fault | None:
    return None


SHAPES = (GroupShape(0, 16, 4, 3 * 1000), GroupShape(1, 16, 2, 4096 + 8192))
"""Two groups: records of 12,288 bytes with padding, and of 24,576 without."""
PAGES = {0: (1000, 1500, 500), 1: (4096, 8192)}
BLOCKS = 256
SLAB_BYTES = 256 << 10
SLABS = 16
_numbers = itertools.count()


@dataclass
class Rig:
    """An Executor over real parts, whose faults the test commands. One slab range per group."""

    directory: Path
    engine: str = "posix"
    shapes: Sequence[GroupShape] = SHAPES
    pages: Mapping[int, Sequence[int]] = field(default_factory=lambda: PAGES)
    blocks: int = BLOCKS
    faults: Faults = no_faults
    drives: int = 1
    io_threads: int = 1
    segment_records: int = 4
    """Of group 0; group 1 gets what fits in as many bytes."""
    segments_max: int = 1000
    slabs: int = SLABS
    page_maps: Mapping[int, _native.PageMap] | None = None
    """Pages that are not of `pages`."""
    on_device: bool = False
    """Whether pages are copied as those of a GPU are."""
    directories: Sequence[Path] = ()
    """Engine directories that are not `directory`/drive<n>."""
    store_id: bytes = STORE_ID
    pacing: PacingConfig = field(default_factory=PacingConfig)
    first_rates: Any = None
    """See `Executor`."""
    emulation: Emulation | None = None
    """Rates of drives and ingress; with one I/O thread per drive."""

    def __post_init__(self) -> None:
        self.hbm = {group: Hbm(pages, self.blocks) for group, pages in self.pages.items()}
        maps: dict[int, Any] = dict(
            self.page_maps
            or {group: hbm.device_pages() if self.on_device else hbm.map for group, hbm in self.hbm.items()}
        )
        if self.emulation is not None:
            maps = {group: EmulatedMap(page_map, self.emulation) for group, page_map in maps.items()}
        self.maps = {group: FaultyMap(page_map) for group, page_map in maps.items()}
        self.pool = DramPool(f"t{os.getpid()}-{next(_numbers)}", self.slabs * SLAB_BYTES, 0, 1, SLAB_BYTES)
        self.engines: list[FaultyEngine] = []
        self.executor = Executor(
            self.pool,
            self.maps,  # type: ignore[arg-type]
            {shape.group: shape for shape in self.shapes},
            ssd_engine=self.engine,  # type: ignore[arg-type]
            io_threads=self.io_threads,
            pacing=self.pacing,
            first_rates=self.first_rates,
            opener=lambda name, depth: self._open_engine(name, depth),
        )
        self.results: dict[int, list[JobResult]] = {}
        self.loads: dict[int, list[LoadState]] = {}
        self.counts: Counts = {}
        self.messages: list[str] = []
        self._jobs = itertools.count(1)

    def open(self, generation: int = 1) -> OpenedSsd:
        """Open the SSD tier with engines that ask `faults`."""
        directories = self.directories or [self.directory / f"drive{number}" for number in range(self.drives)]
        for directory in directories:
            directory.mkdir(exist_ok=True)
        cost = fmt.segment_cost_bytes(self.shapes[0].record_bytes, self.segment_records)
        opened = OpenSsd(tuple(map(str, directories)), generation, cost, self.segments_max)
        self.executor.set_generation(generation)
        self.executor.open_ssd(opened, 0, self.store_id)
        result = wait_for(self.executor.take_opened)
        assert isinstance(result, OpenedSsd)
        return result

    def _open_engine(self, name: Any, depth: int) -> tuple[FaultyEngine, str]:
        engine, note = open_engine(name, depth)
        if self.emulation is not None:
            engine = EmulatedEngine(engine, self.emulation, len(self.engines) % self.drives)
        self.engines.append(FaultyEngine(engine, lambda transfer: self.faults(transfer)))
        return self.engines[-1], note

    # Bytes.

    def slot(self, group: int, number: int) -> Slot:
        """The number-th slot of a group."""
        cells = SLAB_BYTES // self.shapes[group].record_bytes
        slab = group * self.slabs // len(self.shapes) + number // cells
        assert slab < self.slabs
        return Slot(slab, number % cells)

    def payload(self, group: int, key: bytes, generation: int = 1) -> bytes:
        return payload(key, self.shapes[group].chunk_bytes, generation)

    def fill(self, group: int, key: bytes, blocks: Sequence[int], generation: int = 1) -> None:
        """What a forward does: the chunk's bytes are in these blocks."""
        self.hbm[group].write(blocks, self.payload(group, key, generation))

    def is_at(self, group: int, key: bytes, blocks: Sequence[int], generation: int = 1) -> bool:
        return self.hbm[group].read(blocks) == self.payload(group, key, generation)

    def write_slot(self, group: int, key: bytes, slot: Slot, generation: int = 1) -> None:
        """Bytes straight into the pool."""
        data = self.payload(group, key, generation)
        ctypes.memmove(self.pool.address(slot, self.shapes[group].record_bytes), data, len(data))

    def put_on_ssd(self, group: int, key: bytes, extent: Extent, generation: int = 1) -> JobResult:
        """Write a chunk through the executor, and wait for it."""
        slot = self.slot(group, 0)
        self.write_slot(group, key, slot, generation)
        return self.result(self.persist(group, slot, extent, key))

    # Jobs.

    def store(self, *items: StoreItem) -> int:
        job_id = next(self._jobs)
        self.executor.submit_store(store_job(job_id, items))
        return job_id

    def promote(self, *items: StoreItem) -> int:
        job_id = next(self._jobs)
        self.executor.submit_promotion(store_job(job_id, items))
        return job_id

    def load(self, *items: LoadItem) -> int:
        job_id = next(self._jobs)
        self.executor.submit_load(load_job(job_id, f"request{job_id}", items))
        return job_id

    def persist(self, group: int, slot: Slot, extent: Extent, key: bytes, parent: bytes = b"") -> int:
        return self.write(PersistItem(group, slot, extent, key, parent))

    def write(self, *items: PersistItem) -> int:
        """The same of several chunks of one group and drive in one job."""
        job_id = next(self._jobs)
        self.executor.submit_persist(persist_job(job_id, *items))
        return job_id

    def poll(self) -> None:
        results, loads, counts, messages = self.executor.poll()
        for result in results:
            self.results.setdefault(result.job_id, []).append(result)
        for state in loads:
            self.loads.setdefault(state.job.job_id, []).append(state)
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0) + value
        self.messages += messages

    def result(self, job_id: int) -> JobResult:
        """The one end of a store or persist."""
        wait_for(lambda: self.poll() or job_id in self.results)
        (result,) = self.results[job_id]
        return result

    def ended(self, job_id: int) -> LoadState:
        """The one end of a load."""
        wait_for(lambda: self.poll() or job_id in self.loads)
        (state,) = self.loads[job_id]
        return state

    def loaded(self, job_id: int) -> LoadState:
        """The same of one whose items have all ended."""
        state = self.ended(job_id)
        assert not state.items_left
        return state

    def check_quiet(self) -> None:
        """Nothing is in flight, and every staging buffer and descriptor is back; threads live."""
        for thread in self.executor._ssd:
            wait_for(lambda thread=thread: not (thread._in_flight or thread._reads or thread._writes))
            wait_for(lambda thread=thread: len(thread._buffers) == thread._engine.depth)
            assert sorted(thread._buffers) == list(range(thread._engine.depth))
            assert thread._engine.in_flight == 0
            assert thread._thread.is_alive()
            wait_for(lambda thread=thread: not thread._store.reading)
        assert self.executor._copier.is_alive()
        ends = self.executor._ends
        assert not set(ends._pacer._loads) - set(ends._live), "the pacer knows loads that have ended"
        for ends in (self.results, self.loads):
            assert all(len(ended) == 1 for ended in ends.values())

    def files(self) -> list[Path]:
        return sorted(self.directory.glob("drive*/r0/seg-*.data"))


def from_dram(group: int, blocks: Sequence[int], slot: Slot, key: bytes = b"k") -> LoadItem:
    return LoadItem(group, tuple(blocks), slot, None, key)


def from_ssd(group: int, blocks: Sequence[int], extent: Extent, key: bytes) -> LoadItem:
    return LoadItem(group, tuple(blocks), None, extent, key)


def persist_job(job_id: int, *items: PersistItem) -> PersistJob:
    """Of items of one group and drive."""
    groups, slots, extents, keys, parents = zip(*items, strict=True)
    return PersistJob(job_id, groups[0], keys, parents, np.array(slots, np.int32), np.array(extents, np.int32))


def store_job(job_id: int, items: Sequence[StoreItem]) -> StoreJob:
    parts = [
        StorePart(group, np.array([i.slot for i in run], np.int32), np.array([i.blocks for i in run], np.int32))
        for group, run in _runs(items)
    ]
    return StoreJob(job_id, tuple(parts))


def load_job(job_id: int, request_id: str, items: Sequence[LoadItem]) -> LoadJob:
    parts = [
        LoadPart(
            group,
            tuple(i.key for i in run),
            np.array([i.blocks for i in run], np.int32),
            np.array([i.slot or (-1, -1) for i in run], np.int32),
            np.array([i.extent or (-1, -1, -1) for i in run], np.int32),
        )
        for group, run in _runs(items)
    ]
    return LoadJob(job_id, request_id, tuple(parts))


def _runs(items: Sequence[Any]) -> list[tuple[int, list[Any]]]:
    """Items of one group with equally many blocks, in a row."""
    runs = itertools.groupby(items, lambda item: (item.group, len(item.blocks)))
    return [(group, list(run)) for (group, _), run in runs]


def wait_for(condition: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "what the test waits for does not happen"
        time.sleep(0.0005)
    return value


def holdings() -> tuple[list[str], list[str], list[str]]:
    """What must be the same before and after a test: open files, our threads, pools in /dev/shm."""
    files = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the listing's own
    files = [file for file in files if not file.startswith(("pipe:", "socket:", "/dev/pts"))]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("saria")]
    pools = [name for name in os.listdir("/dev/shm") if name.startswith(f"saria-pool-t{os.getpid()}-")]
    return sorted(files), sorted(threads), pools


MakeRig = Callable[..., Rig]
"""The fixture that makes rigs and closes them at the end."""
