"""One engine without vLLM: the real policy over the real executor and real files, step by step, on its own clock."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles import SLAB_BYTES, MakeRig, Rig, wait_for
from saria_vllm.config import AdmissionConfig
from saria_vllm.metrics import Counts
from saria_vllm.policy.admission import make_admission
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.policy.tiers import Tiers
from saria_vllm.storage import format as fmt
from saria_vllm.types import GroupShape, Ints, JobResult, LoadJob

LOAD_CHUNKS = 8


@dataclass
class Node:
    """Chunks of several groups on several drives; every chunk that enters DRAM is wanted on SSD."""

    make_rig: MakeRig
    segments_max: int
    segment_records: int = 15
    """Of group 0."""
    record_bytes: Sequence[int] = (128 << 10,)
    options: dict[str, Any] = field(default_factory=dict)
    """For the rig."""

    def __post_init__(self) -> None:
        shapes = [GroupShape(group, 16, 2, nbytes // 2) for group, nbytes in enumerate(self.record_bytes)]
        pages = {shape.group: (shape.block_bytes,) for shape in shapes}
        slabs = 24 * len(shapes) * max(1, max(self.record_bytes) // SLAB_BYTES)
        options = {"shapes": shapes, "pages": pages, "blocks": 4 * LOAD_CHUNKS, "slabs": slabs} | self.options
        self.rig: Rig = self.make_rig(segment_records=self.segment_records, segments_max=self.segments_max, **options)
        self.opened = self.rig.open()
        assert self.opened.problem == ""
        segment_bytes = fmt.segment_cost_bytes(shapes[0].record_bytes, self.segment_records)
        records = [fmt.records_per_segment(shape.record_bytes, segment_bytes) for shape in shapes]
        cells = [SLAB_BYTES // shape.record_bytes for shape in shapes]
        extents = ExtentAllocator(self.rig.drives, self.segments_max, records)
        self.tiers = Tiers(
            shapes, SlotAllocator(slabs, cells), None, make_admission(AdmissionConfig(policy="full_duplicate"), 32),
            ghosts_max=1000, headroom=[16] * len(shapes), persist_bytes_max=8 << 20,
        )  # fmt: skip
        self.tiers.open_ssd(extents, self.opened.found, self.opened.next_segment)
        self.now = 1000.0
        self.counts: Counts = {}
        self.problems: list[str] = []
        self._numbers = itertools.count()

    def blocks(self, first: int, end: int) -> list[Ints]:
        """Chunk by chunk, the same for all groups."""
        numbers = np.arange(2 * (end - first), dtype=np.int32).reshape(-1, 2)
        return [numbers for _ in self.tiers.shapes]

    def keys(self, chunks: int) -> list[bytes]:
        """Of a prefix that nobody knows."""
        prefix = next(self._numbers)
        return [b"%d/%d" % (prefix, position) for position in range(chunks)]

    def store(self, chunks: int) -> list[bytes]:
        """A new prefix of so many chunks is computed, stored and persisted as far as that works; its keys."""
        keys = self.keys(chunks)
        for first in range(0, chunks, LOAD_CHUNKS):
            end = min(chunks, first + LOAD_CHUNKS)
            blocks = self.blocks(first, end)
            for group in range(len(self.tiers.shapes)):
                for key, some in zip(keys[first:end], blocks[group].tolist(), strict=True):
                    self.rig.fill(group, key, some)
            job, went_on = self.tiers.plan_store(Prefix(keys), first, end, blocks, self.now)
            assert went_on == end, "a store waits for no disk"
            assert job is not None
            self.rig.executor.submit_store(job)
            self.settle()
        return keys

    def settle(self) -> None:
        """Steps until nothing is in flight."""
        while True:
            persists = self.tiers.make_room(self.now)
            extents = self.tiers.chunks.extents
            assert extents is not None
            for drive, segment in extents.retired:
                self.rig.executor.retire(drive, segment)
            extents.retired.clear()
            for job in persists:
                self.rig.executor.submit_persist(job)
            if not self._in_flight():
                break
            wait_for(self._finish)
        self.tiers.check()

    def _in_flight(self) -> bool:
        return any(job.kind != "load" for job in self.tiers.jobs.live.values())

    def _finish(self) -> int:
        results, loads, counts, messages = self.rig.executor.poll()
        self.rig.messages += messages
        results += [JobResult(state.job.job_id, tuple(state.failed), state.reason) for state in loads]
        self.tiers.moved(self.rig.executor.take_moved(), self.rig.executor.ingress_bytes_s, self.now)
        ended = self.tiers.finished(results, self.now)
        self.problems += self.tiers.take_problems()
        for name, value in (*counts.items(), *self.tiers.take_counts().items()):
            self.counts[name] = self.counts.get(name, 0) + value
        return ended

    def load(self, keys: Sequence[bytes]) -> int:
        """How many leading chunks of a prefix a tier offered and brought, each of them right; the others of the load
        failed, and would be computed again."""
        prefix = Prefix(keys)
        end = self.tiers.match(prefix, 0, min(len(keys), LOAD_CHUNKS), self.now)
        if not end:
            return 0
        blocks = self.blocks(0, end)
        for group in range(len(self.tiers.shapes)):
            self.rig.fill(group, b"foreign", blocks[group].ravel().tolist()[:2])
        self.tiers.touch(prefix, end, end, self.now)
        job = self.tiers.plan_load("r", prefix, 0, end, blocks, self.now)
        self.rig.executor.submit_load(job)
        failed = self._ended(job)
        for group in range(len(self.tiers.shapes)):
            for position in range(end):
                if group * end + position not in failed:
                    assert self.rig.is_at(group, keys[position], blocks[group][position].tolist()), "wrong bytes"
        self.settle()
        return min((position % end for position in failed), default=end)

    def _ended(self, job: LoadJob) -> set[int]:
        def ended() -> bool:
            self._finish()
            return job.job_id not in self.tiers.jobs.live

        live = self.tiers.jobs.live[job.job_id]
        wait_for(ended)
        return live.failed

    def pin(self, keys: Sequence[bytes]) -> LoadJob | None:
        """A reader that takes its time: its load is planned and not begun."""
        prefix = Prefix(keys)
        end = self.tiers.match(prefix, 0, min(len(keys), LOAD_CHUNKS), self.now)
        return self.tiers.plan_load("pin", prefix, 0, end, self.blocks(0, end), self.now) if end else None

    def unpin(self, job: LoadJob) -> None:
        self.rig.executor.submit_load(job)
        assert not self._ended(job), "what a reader had leased went away"

    @property
    def directory(self) -> Path:
        """Ours on the first drive."""
        return self.rig.directory / "drive0"

    def du(self) -> int:
        """Bytes that all our files occupy."""
        sizes = []
        for folder, _, names in os.walk(self.rig.directory):
            for name in names:
                try:
                    sizes.append(os.lstat(f"{folder}/{name}").st_blocks * 512)
                except FileNotFoundError:
                    continue  # Retired meanwhile.
        return sum(sizes)


@contextmanager
def mounted(kind: str, folder: Path, mebibytes: int) -> Iterator[Path]:
    """A file system of so many MiB, or a skip that says what is missing here."""
    at = folder / "mount"
    at.mkdir()
    if kind == "tmpfs":
        _mount(["-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs"], at)
    elif kind == "overlay":
        for name in ("lower", "upper", "work"):
            (folder / name).mkdir()
        _mount(
            ["-t", "overlay", "-o", f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work", "o"], at
        )
    else:
        with open(folder / "image", "wb") as image:
            image.truncate(mebibytes << 20)
        _run(["mkfs.ext4", "-q", "-m", "0", str(folder / "image")], "mkfs.ext4 does not work")
        _mount(["-o", "loop", str(folder / "image")], at)
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)


def _mount(arguments: list[str], at: Path) -> None:
    _run(["mount", *arguments, str(at)], "this file system cannot be mounted")


def _run(command: list[str], otherwise: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"{otherwise}: no {command[0]}")
    if done.returncode:
        pytest.skip(f"{otherwise}: {done.stderr.decode().strip()}")


MakeNode = Callable[..., Node]
