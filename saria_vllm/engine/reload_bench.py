"""Reloads through the executor that serves, in wall time, over emulated rates: every byte is moved and looked at."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from ctypes import addressof, c_char
from typing import Any

import numpy as np

from saria_vllm import _native
from saria_vllm.config import PacingConfig, PacingMode
from saria_vllm.engine.emulated import EmulatedMachine
from saria_vllm.engine.executor import Executor
from saria_vllm.engine.pool import DramPool
from saria_vllm.errors import StorageError
from saria_vllm.storage.format import segment_cost_bytes
from saria_vllm.types import GroupShape, Ints, LoadJob, LoadPart, OpenSsd, PersistJob

RECORD_BYTES = 1 << 20
LAYERS = 16
SHAPE = GroupShape(0, 16, 1, RECORD_BYTES)
SEGMENT_RECORDS = 64
HANG_S = 60.0
POLL_S = 0.0005


class ReloadBench:
    """Chunks that are all in DRAM and all on SSD, and an executor that loads them from where it is told. A context
    manager.

    Args:
        directory: of its own, on a drive; what is there afterwards is the caller's to remove.
        chunks: of `RECORD_BYTES` each.
        ingress, drives: bytes per second; less than this machine can do.

    Raises:
        StorageError: the drive fails.
        ConfigError: no memory for the DRAM pool.
    """

    def __init__(self, directory: str, chunks: int, ingress: float, drives: Sequence[float], mode: PacingMode) -> None:
        self._chunks, self._drives = chunks, len(drives)
        machine = EmulatedMachine(ingress, drives)
        self._hbm = mmap.mmap(-1, chunks * RECORD_BYTES)
        self._pages = np.frombuffer(self._hbm, np.uint64).reshape(LAYERS, chunks, -1)
        page, start = RECORD_BYTES // LAYERS, addressof(c_char.from_buffer(self._hbm))
        bases = [start + layer * chunks * page for layer in range(LAYERS)]
        pages = machine.pages(_native.PageMap(bases, [page] * LAYERS, [page] * LAYERS, chunks))
        self._jobs = 0
        pool = DramPool(f"bench-{os.getpid()}-{mode}", chunks * RECORD_BYTES, 0, 1, RECORD_BYTES)
        whole: Any = (c_char * pool.region_bytes).from_address(pool.base)
        np.frombuffer(whole, np.uint64).reshape(chunks, -1)[:] = np.arange(1, chunks + 1, dtype=np.uint64)[:, None]
        self._executor = Executor(
            pool, {0: pages}, {0: SHAPE}, io_threads=1, pacing=PacingConfig(mode, ingress), opener=machine.open_engine
        )
        try:
            self._open(directory)
        except Exception:
            self._executor.close()
            raise

    def __enter__(self) -> ReloadBench:
        return self

    def __exit__(self, *exc: object) -> None:
        self._executor.close()

    def load(self, on_ssd: range, in_dram: range) -> float:
        """Seconds of one request that needs these chunks from SSD and those from DRAM.

        Raises:
            StorageError: it failed, or what came is not what was stored.
        """
        self._pages[:] = 0
        numbers = [*on_ssd, *in_dram]
        slots, extents = self._slots(numbers), self._extents(numbers)
        slots[: len(on_ssd)], extents[len(on_ssd) :] = -1, -1
        blocks = np.array(numbers, np.int32)[:, None]
        part = LoadPart(0, tuple(map(_key, numbers)), blocks, slots, extents)
        began = time.perf_counter()
        self._executor.submit_load(LoadJob(self._next_job(), "bench", (part,)))
        self._wait("a load")
        seconds = time.perf_counter() - began
        expected = np.zeros(self._chunks, np.uint64)
        expected[numbers] = np.array(numbers, np.uint64) + 1
        if not (self._pages == expected[None, :, None]).all():
            raise StorageError("a load brought other bytes than were stored")
        return seconds

    def _open(self, directory: str) -> None:
        """Open the SSD tier, and write all chunks where none are found."""
        folders = tuple(os.path.join(directory, f"drive{drive}") for drive in range(self._drives))
        for folder in folders:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        cost = segment_cost_bytes(RECORD_BYTES, SEGMENT_RECORDS)
        self._executor.set_generation(1)
        self._executor.open_ssd(OpenSsd(folders, 1, cost, 1 << 20), 0, b"saria reload ben")
        until = time.monotonic() + HANG_S
        while (opened := self._executor.take_opened()) is None:
            if time.monotonic() > until:
                raise StorageError(f"{directory}: it takes too long to open")
            time.sleep(POLL_S)
        if opened.problem or not all(opened.drives):
            raise StorageError(f"{directory}: {opened.problem or 'cannot be used'}")
        if len(opened.found):
            return
        for drive in range(self._drives):
            numbers = list(range(drive, self._chunks, self._drives))
            keys = tuple(map(_key, numbers))
            self._executor.submit_persist(
                PersistJob(self._next_job(), 0, keys, (b"",) * len(keys), self._slots(numbers), self._extents(numbers))
            )
            self._wait("a write")

    def _wait(self, what: str) -> None:
        """Until the job that is under way has ended."""
        until = time.monotonic() + HANG_S
        while time.monotonic() < until:
            results, loads, _, messages = self._executor.poll()
            if results or loads:
                if any(result.failed for result in results) or any(state.failed for state in loads):
                    raise StorageError(f"{what} failed: {'; '.join(messages) or loads}")
                return
            time.sleep(POLL_S)
        raise StorageError(f"{what} did not end within {HANG_S:g} s")

    def _next_job(self) -> int:
        self._jobs += 1
        return self._jobs

    def _slots(self, numbers: Sequence[int]) -> Ints:
        """Each slab holds one chunk."""
        return np.array([(number, 0) for number in numbers], np.int32).reshape(-1, 2)

    def _extents(self, numbers: Sequence[int]) -> Ints:
        """Striped over the drives, in order."""
        return np.array(
            [(number % self._drives, *divmod(number // self._drives, SEGMENT_RECORDS)) for number in numbers],
            np.int32,
        ).reshape(-1, 3)


def _key(number: int) -> bytes:
    return b"chunk %d" % number
