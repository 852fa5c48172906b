"""Planner, executor and storage under faults, in 2,000 seeded episodes: no wrong byte, nothing leaked, every end.

An episode is a few sessions that grow, branch and come back over tiers that are far too small, on two drives. Loads,
stores, promotions and persists are in flight at the same time, in the order that threads make of them; requests are
dropped while they load. By its seed an episode has faults: late transfers, short ones, errors, lost writes, flipped
bits, a dead drive, a deadline that loads miss, a cache reset in the middle; and rates at which loading does not pay.
Afterwards all has ended and all slots, blocks, leases and buffers are back.
"""

from __future__ import annotations

import errno
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from doubles import Fault, Rig, Transfer, holdings, wait_for, whose
from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.admission import make_admission
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.promotion import Promotion
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.policy.tiers import Tiers
from saria_vllm.types import FoundChunks, GroupShape, Ints, JobResult, PersistJob, StoreJob

EPISODES, BATCHES = 2000, 16
SHAPE = GroupShape(0, 16, 2, 2048)
DRIVES, SLOTS, HEADROOM, SEGMENT_RECORDS, SEGMENTS_MAX = 2, 10, 2, 6, 5
BLOCKS, SESSIONS, CHUNKS_MAX, TURNS = 96, 3, 8, 12
SETTLES = 0.4
"""Chance that what is in flight ends before the next turn: else hardly anything is on SSD in time."""


class Work(NamedTuple):
    """What reads or writes blocks in HBM."""

    keys: list[bytes]
    """Of its chunks."""
    first: int
    """Depth of the first of them."""
    blocks: Ints
    generation: int
    promoted: int = 0
    """Where promotion ends."""


class World:
    """Real threads and files that many episodes run on, one after the other."""

    def __init__(self, directory: Path, engine: str) -> None:
        self.seen: Counter[str] = Counter()
        pages = {0: (SHAPE.block_bytes,)}
        self.rig = Rig(
            directory, engine, shapes=(SHAPE,), pages=pages, blocks=BLOCKS, drives=DRIVES,
            segment_records=SEGMENT_RECORDS, segments_max=SEGMENTS_MAX,
        )  # fmt: skip
        assert self.rig.open().problem == ""
        for drive, faulty in enumerate(self.rig.engines):
            faulty.faults = lambda transfer, drive=drive: self.fault(drive, transfer)
        self.fault: Callable[[int, Transfer], Fault | None] = lambda drive, transfer: None
        self.generation, self.now, self.next_segment = 1, 0.0, 0
        """Each only grows: what an episode left on the drives must never be found by a later one."""

    def close(self) -> None:
        self.rig.check_quiet()
        self.rig.executor.close()


class Episode:
    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rig, self.seed = world, world.rig, seed
        self.rng = rng = random.Random(seed)
        self.chance = rng.choice([0.0, 0.02, 0.1, 0.3])
        self.late_s = rng.choice([0.0, 0.0, 0.001])
        self.dies = rng.randrange(DRIVES), rng.randrange(TURNS) if rng.random() < 0.15 else TURNS
        world.rig.executor._ends.load_deadline_s = rng.choice([30.0] * 4 + [0.002])
        self.turn, self.now, self.generation = 0, world.now, world.generation
        self.drive_rngs = [random.Random(f"{seed} {drive}") for drive in range(DRIVES)]
        policy: Any = rng.choice(["full_duplicate", "saria", "return"])
        self.tiers = Tiers(
            [SHAPE], SlotAllocator(1, [SLOTS]), None, make_admission(AdmissionConfig(policy=policy, evictions=1), 32),
            ghosts_max=64, headroom=[HEADROOM], persist_bytes_max=8 * SHAPE.record_bytes,
            promotion=Promotion(rng.choice([0.0, 0.5, 1.0, "auto"])), second_chance=rng.choice([0.0, 0.5]),
        )  # fmt: skip
        extents = ExtentAllocator(DRIVES, SEGMENTS_MAX, [SEGMENT_RECORDS])
        self.tiers.open_ssd(extents, FoundChunks.of([]), world.next_segment)
        self.slow = rng.random() < 0.2
        for _ in range(10 * self.slow):
            self.tiers.cost.prefill.learn(256, 256 * 128, 0.3)
        self.free = list(range(BLOCKS))
        self.names = itertools.count()
        self.sessions = [self.grown([], rng.randrange(2, 6)) for _ in range(SESSIONS)]
        self.loads: dict[int, Work] = {}
        self.copies: dict[int, Work] = {}
        world.fault = self.fault

    def fault(self, drive: int, transfer: Transfer) -> Fault | None:
        """On the drive's thread."""
        rng, reads = self.drive_rngs[drive], transfer.kind == "read"
        if self.dies[0] == drive and self.turn >= self.dies[1]:
            return Fault(result=-errno.EIO)
        if rng.random() >= self.chance:
            return Fault(delay_s=self.late_s * rng.random()) if self.late_s else None
        kinds = [
            *(Fault(result=result) for result in (-errno.EIO, transfer.nbytes - 512, 0, transfer.nbytes)),
            Fault(raises=OSError(errno.EIO, "fault")), Fault(raises=RuntimeError("fault")), Fault(delay_s=0.003),
        ]  # fmt: skip
        more = [Fault(flip_bit=rng.randrange(8 * transfer.nbytes))] * 8 if reads else [Fault(result=-errno.ENOSPC)]
        return rng.choice(kinds + more)

    def grown(self, keys: list[bytes], chunks: int) -> list[bytes]:
        return keys + [b"%d/%d" % (self.seed, next(self.names)) for _ in range(chunks)]

    def take(self, chunks: int) -> Ints:
        self.rng.shuffle(self.free)
        taken, self.free = self.free[: 2 * chunks], self.free[2 * chunks :]
        return np.array(taken, np.int32).reshape(-1, 2)

    def give(self, blocks: Ints) -> None:
        self.free += blocks.ravel().tolist()

    # What a scheduler does in a step.

    def request(self) -> None:
        """A session comes back, longer or on another branch; what the tiers have of it is loaded, from some chunk on
        that HBM has."""
        number = self.rng.randrange(SESSIONS)
        keys = self.sessions[number]
        if self.rng.random() < 0.2:
            keys = keys[: self.rng.randrange(1, len(keys) + 1)]
        keys = self.grown(keys, self.rng.randrange(0, 3))
        if len(keys) > CHUNKS_MAX:
            keys = self.grown([], self.rng.randrange(2, 5))
        self.sessions[number] = keys
        prefix, first = Prefix(keys), min(self.rng.choice([0, 0, 0, 1]), len(keys) - 1)
        if 2 * len(keys) > len(self.free) or self.tiers.is_loading(prefix, first):
            return
        found = self.tiers.match(prefix, first, len(keys), self.now)
        end, reason = self.tiers.cut(prefix, first, found, 32 * first, 32 * len(keys), self.now)
        self.world.seen["cuts"] += bool(reason)
        self.tiers.arrived(prefix, end, self.now)
        if end <= first:
            self.compute(keys, first, prefix)
            return
        blocks = self.take(end - first)
        self.rig.fill(0, b"foreign", blocks.ravel().tolist()[:2])
        promoted = self.tiers.promote_until(prefix, first, end, self.now)
        job = self.tiers.plan_load("r", prefix, first, end, [blocks], self.now)
        self.loads[job.job_id] = Work(keys, first, blocks, self.generation, promoted)
        self.rig.executor.submit_load(job)

    def compute(
        self, keys: list[bytes], first: int, prefix: Prefix, loaded: Ints | None = None, promoted: int = 0
    ) -> None:
        """The chunks behind the loaded ones are computed and stored, those before `promoted` are promoted, as far as
        there is room."""
        had = 0 if loaded is None else len(loaded)
        rest = self.take(len(keys) - first - had)
        blocks = rest if loaded is None else np.concatenate((loaded, rest))
        for key, some in zip(keys[first + had :], rest.tolist(), strict=True):
            self.rig.fill(0, key, some, self.generation)
        jobs: list[StoreJob] = []
        if first + had < len(keys):
            self.keep(jobs, self.tiers.plan_store(prefix, first + had, len(keys), [rest], self.now)[0])
        promotions: list[StoreJob] = []
        if promoted > first:
            wanted = [int(mask.sum()) for mask in self.tiers.not_in_dram(prefix, first, promoted)]
            self.persist(self.tiers.make_room(self.now, wanted))
            some = [blocks[: promoted - first]]
            self.keep(promotions, self.tiers.plan_promote(prefix, first, promoted, some, self.now)[0])
        work = Work(keys, first, blocks, self.generation)
        waits = {job.job_id for job in jobs + promotions}
        for job in jobs:
            self.rig.executor.submit_store(job)
        for job in promotions:
            self.world.seen["promotions"] += 1
            self.rig.executor.submit_promotion(job)
        if not waits:
            self.give(blocks)
        self.copies |= dict.fromkeys(waits, work)

    def keep(self, jobs: list[StoreJob], job: StoreJob | None) -> None:
        jobs += [job] if job is not None else []

    def persist(self, persists: list[PersistJob]) -> None:
        """After the files are gone whose place they take."""
        extents = self.tiers.chunks.extents
        assert extents is not None
        for drive, segment in extents.retired:
            self.rig.executor.retire(drive, segment)
        extents.retired.clear()
        for job in persists:
            self.rig.executor.submit_persist(job)

    def step(self) -> None:
        """Send what is planned, take what has ended."""
        tiers, executor = self.tiers, self.rig.executor
        self.persist(tiers.make_room(self.now))
        results, loads, counts, _ = executor.poll()
        for name, value in counts.items():
            self.world.seen[name] += value
        ended = results + [JobResult(state.job.job_id, tuple(state.failed), state.reason) for state in loads]
        tiers.moved(executor.take_moved(), executor.ingress_bytes_s, self.now)
        if self.slow:  # A chunk takes drives 0.2 s, a prefill less.
            tiers.cost.measured(SHAPE.record_bytes / 0.2, 1e9)
        tiers.finished(ended, self.now)
        tiers.take_problems()
        for state in loads:
            self.loaded(self.loads.pop(state.job.job_id), set(state.failed), state.reason)
        for result in results:
            work = self.copies.pop(result.job_id, None)
            if work is not None and all(other is not work for other in self.copies.values()):
                self.give(work.blocks)
        for name, value in tiers.take_counts().items():
            self.world.seen[name] += value

    def loaded(self, work: Work, failed: set[int], reason: str) -> None:
        self.world.seen["stale loads" if work.generation != self.generation else "loads"] += 1
        for position, blocks in enumerate(work.blocks.tolist()):
            key = work.keys[work.first + position]
            if position not in failed:
                assert work.generation == self.generation, "a load of before a reset brought something"
                assert self.rig.is_at(0, key, blocks, self.generation), (self.seed, position, whose(
                    self.rig.hbm[0].read(blocks), [*work.keys, b"foreign"], range(1, self.generation + 1)
                ))  # fmt: skip
        assert bool(failed) == bool(reason)
        if failed or work.generation != self.generation or self.rng.random() < 0.15:  # It fails, or it was dropped.
            self.give(work.blocks)
            return
        prefix = Prefix(work.keys)
        self.tiers.touch(prefix, work.first + len(work.blocks), 0, self.now)
        self.compute(work.keys, work.first, prefix, work.blocks, work.promoted)

    def reset(self) -> None:
        self.world.seen["resets"] += 1
        self.tiers.reset()
        self.generation += 1
        self.rig.executor.set_generation(self.generation)

    def run(self) -> None:
        reset_at = self.rng.randrange(TURNS) if self.rng.random() < 0.25 else -1
        for self.turn in range(TURNS):
            self.now = self.world.now = self.world.now + self.rng.choice([0.1, 10.0, 300.0])
            if self.turn == reset_at:
                self.reset()
            for _ in range(self.rng.randrange(1, 4)):
                self.request()
            for _ in range(self.rng.randrange(1, 4)):
                self.step()
            if self.rng.random() < SETTLES:
                wait_for(self.quiet)
        self.end()

    def quiet(self) -> bool:
        """Whether all has ended."""
        self.step()
        return not (self.tiers.jobs.live or self.loads or self.copies)

    def end(self) -> None:
        """All ends, and all is back where it was."""
        wait_for(self.quiet)
        assert sorted(self.free) == list(range(BLOCKS)), "HBM blocks"
        self.tiers.check()
        extents = self.tiers.chunks.extents
        assert extents is not None
        assert not any(segment.busy for segments in extents._by_drive for segment in segments.values()), (
            "a read or write"
        )
        self.reset()
        self.step()
        assert self.tiers.chunks.slots.free(0) == SLOTS, "DRAM slots"
        assert not self.tiers.jobs.live
        extents = self.tiers.chunks.extents
        assert extents is not None and not extents.segments()
        self.world.generation, self.world.next_segment = self.generation, extents._next_segment
        self.world.fault = lambda drive, transfer: None


@pytest.fixture(params=["posix", "io_uring"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    before = holdings()
    made = World(tmp_path, request.param)
    yield made
    made.close()
    wait_for(lambda: holdings() == before, 10)


@pytest.mark.parametrize("batch", range(BATCHES // 2))
def test_episodes(world: World, batch: int) -> None:
    count = EPISODES // BATCHES
    base = (batch * 2 + (world.rig.engine == "io_uring")) * count
    for seed in range(base, base + count):
        Episode(world, seed).run()
    happened = (
        "loads", "stale loads", "promotions", "resets", "load_bytes:dram", "load_bytes:ssd", "ssd_written_bytes",
        "errors:checksum", "errors:read_failed", "errors:write_failed", "errors:disk_full", "errors:deadline", "cuts",
    )  # fmt: skip
    assert all(world.seen[what] > 0 for what in happened), world.seen
