"""A day of requests in simulated time: the real planner over the real store, with everything that can go wrong.

Loads, stores and persists are jobs that end seconds after they were planned and move their bytes then. Bytes are a
function of key and generation. What a job moved while its generation held must be exact, or be reported as failed.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from disk_states import RECORD_BYTES, RECORDS, Buffer, opened
from doubles import payload
from saria_vllm import _native
from saria_vllm.errors import StorageError
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.index import Prefix
from saria_vllm.types import Extent, JobResult, LoadJob, PersistJob, Slot, StoreJob
from tier_steps import blocks, make_tiers

DAY_S = 86_400
SESSIONS, CHUNKS, SLOTS, SEGMENTS_MAX = 12, 16, 24, 8


class Day:
    """See the module's text."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.rng = directory, random.Random(seed)
        self.now, self.generation = 0.0, 1
        self.seen: Counter[str] = Counter()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.dram: dict[Slot, bytes] = {}
        self.lives = 0
        self.stack = ExitStack()
        self.sessions = [0] * SESSIONS
        self.start()

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Unless we are killed before."""
        life = self.lives
        entry = (self.now + delay_s, next(self.numbers), lambda: act() if life == self.lives else None)
        heapq.heappush(self.events, entry)

    def run(self, until_s: float) -> None:
        while self.events and self.events[0][0] <= until_s:
            self.now, _, act = heapq.heappop(self.events)
            act()

    def start(self) -> None:
        """A process begins: reopens what is there."""
        self.lives += 1
        self.was_reset = False
        self.store = self.stack.enter_context(opened(self.directory, self.generation))
        found, seen = self.store.recover(), self.store.next_segment_id
        self.tiers = make_tiers(SLOTS, ssd=False, records=RECORDS, record_bytes=[RECORD_BYTES], persist_records=64)
        extents = ExtentAllocator(1, SEGMENTS_MAX, [RECORDS], seen)
        self.tiers.open_ssd(extents, found, seen, found.segments())
        self.seen["found"] += len(found)
        self.dram = {}
        self.later(self.rng.expovariate(1 / 15), self.request)
        self.later(self.rng.uniform(600, 6000), self.reset)
        self.later(self.rng.uniform(1000, 5000), self.crash)

    def crash(self) -> None:
        """Killed, and now and then a drive or an operator did something to the files."""
        self.seen["crash"] += 1
        self.generation += self.was_reset  # As the next claim of the directory would.
        self.stack.close()
        files = sorted((self.directory / "r0").iterdir())
        if files and self.rng.random() < 0.5:
            victim = self.rng.choice(files)
            content = bytearray(victim.read_bytes())
            for _ in range(self.rng.choice([1, 3]) if content else 0):
                content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
            victim.write_bytes(content[: self.rng.choice([len(content), self.rng.randrange(len(content) + 1)])])
        self.start()

    def reset(self) -> None:
        """The weights changed."""
        self.seen["reset"] += 1
        self.generation, self.was_reset = self.generation + 1, True
        self.store.set_generation(self.generation)
        self.tiers.reset()
        self.retire()
        self.later(self.rng.uniform(600, 6000), self.reset)

    def request(self) -> None:
        """A session's next turn: load what there is, store the rest, drop what has to go."""
        self.later(self.rng.expovariate(1 / 15), self.request)
        session = self.rng.randrange(SESSIONS)
        turn = self.sessions[session] = (self.sessions[session] + self.rng.randrange(1, 4)) % (CHUNKS + 1)
        keys = [b"%d-%d" % (session if n > 2 else 0, n) for n in range(turn)]  # The first ones are shared.
        prefix = Prefix(keys)
        hit = self.tiers.match(prefix, 0, turn, self.now)
        self.tiers.arrived(prefix, hit, self.now)
        self.seen["request"] += 1
        generation = self.generation
        if hit:
            load = self.tiers.plan_load("r", prefix, 0, hit, blocks(0, hit), self.now)
            self.later(self.latency(), lambda: self.load(load, generation))
        if self.rng.random() < 0.1:
            self.seen["cancelled"] += 1  # Its load ends all the same; nothing more is computed.
        else:
            self.later(self.rng.uniform(0, 2), lambda: self.compute(prefix, hit, turn))
        if self.seen["request"] % 50 == 0:
            self.tiers.check()

    def latency(self) -> float:
        return self.rng.random() * self.rng.choice([0.01, 0.1, 1, 40])

    def compute(self, prefix: Prefix, first: int, end: int) -> None:
        job, _ = self.tiers.plan_store(prefix, first, end, blocks(first, end), self.now)
        generation = self.generation
        if job is not None:
            self.later(self.latency(), lambda: self.copy(job, prefix.keys, generation))
        self.make_room()

    def make_room(self) -> None:
        generation = self.generation
        for job in self.tiers.make_room(self.now):
            self.later(self.latency(), lambda job=job: self.persist(job, generation))
        self.retire()

    def retire(self) -> None:
        assert self.tiers.chunks.extents is not None
        retired = self.tiers.chunks.extents.retired
        while retired:
            self.store.retire(*retired.pop(0))

    def end(self, job: StoreJob | LoadJob | PersistJob, failed: list[int], reason: str) -> None:
        self.seen[f"{type(job).__name__} {reason or 'ended'}"] += 1
        self.tiers.finished([JobResult(job.job_id, tuple(failed), reason)], self.now)
        self.make_room()

    # What an executor does.

    def copy(self, job: StoreJob, keys: list[bytes], generation: int) -> None:
        if self.rng.random() < 0.02:
            self.end(job, list(range(job.chunks)), "other")
            return
        for item in job.items:
            self.dram[item.slot] = payload(keys[item.blocks[0]], RECORD_BYTES, generation)
        self.end(job, [], "")

    def load(self, job: LoadJob, generation: int) -> None:
        if generation != self.generation or self.rng.random() < 0.01:
            self.end(job, list(range(job.chunks)), "stale" if generation != self.generation else "deadline")
            return
        failed, reason = [], ""
        for position, item in enumerate(job.items):
            right = payload(item.key, RECORD_BYTES, generation)
            if item.slot is not None:
                assert self.dram[item.slot] == right, f"a wrong byte in {item.slot} at {self.now}"
                self.seen["loaded from dram"] += 1
                continue
            assert item.extent is not None
            data, why = self.read(item.extent, item.key)
            if why:
                failed.append(position)
                reason = reason or why
            else:
                assert data == right, f"a wrong byte in {item.extent} at {self.now}"
                self.seen["loaded from ssd"] += 1
        self.end(job, failed, reason)

    def read(self, extent: Extent, key: bytes) -> tuple[bytes, str]:
        luck = self.rng.random()
        try:
            fd, offset, expected = self.store.read_target(0, extent)
        except StorageError:
            return b"", "not_found"
        with Buffer() as buffer:
            got = os.preadv(fd, [buffer.memory], offset)
            self.store.release(fd)
            if got < RECORD_BYTES or luck < 0.01:
                return b"", "read_failed"
            if luck < 0.02:
                bit = self.rng.randrange(RECORD_BYTES * 8)
                buffer.memory[bit // 8] ^= 1 << bit % 8
            if _native.checksum(buffer.address, RECORD_BYTES, self.store.seed(extent, key)) != expected:
                self.store.forget(extent)
                return b"", "checksum"
            return buffer.memory[:], ""

    def persist(self, job: PersistJob, generation: int) -> None:
        failed, reason = [], ""
        for position, item in enumerate(job.items):
            try:
                if generation != self.generation:
                    raise StorageError("stale")
                data = self.dram[item.slot]
                assert data == payload(item.key, RECORD_BYTES, generation), "a slot changed under its persist"
                self.put(item.extent, item.key, data)
            except (OSError, StorageError) as error:
                self.store.abandon(0, item.extent)
                failed.append(position)
                reason = reason or ("write_failed" if isinstance(error, OSError) else "stale")
        self.end(job, failed, reason)

    def put(self, extent: Extent, key: bytes, data: bytes) -> None:
        luck = self.rng.random()
        fd, offset = self.store.write_target(0, extent)
        with Buffer() as buffer:
            buffer.memory[:] = data
            torn = luck < 0.02  # The drive says that it was whole.
            os.pwrite(fd, buffer.memory[: RECORD_BYTES // 2] if torn else buffer.memory, offset)
            self.store.release(fd)
            checksum = _native.checksum(buffer.address, RECORD_BYTES, self.store.seed(extent, key))
        if luck > 0.98:
            raise OSError(errno.EIO, "the write failed")
        self.seen["torn"] += torn
        self.store.commit(0, extent, key, b"", checksum)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory."""
    directory = Path(tempfile.mkdtemp(prefix="saria-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


def live(memory: Path, seed: int, seconds: float) -> Counter[str]:
    memory.mkdir(exist_ok=True)
    day = Day(memory, seed)
    try:
        day.run(seconds)
        day.tiers.check()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        day.stack.close()
    return day.seen


def test_hours_with_every_fault_give_no_wrong_byte(memory: Path) -> None:
    seen = live(memory, 3, DAY_S / 10)
    assert seen["loaded from ssd"] > 100 and seen["loaded from dram"] > 100, seen
    assert seen["crash"] and seen["reset"] and seen["found"], seen


FAULTS = (
    "torn", "cancelled", "LoadJob checksum", "LoadJob read_failed", "LoadJob deadline", "LoadJob stale",
    "PersistJob write_failed", "PersistJob stale", "StoreJob other",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_days_with_every_fault_give_no_wrong_byte(memory: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(3):
        seen += live(memory / str(seed), seed, DAY_S)
    assert not [what for what in FAULTS if not seen[what]], seen
    assert seen["loaded from ssd"] > 5000 and seen["crash"] > 30 and seen["reset"] > 20, seen
