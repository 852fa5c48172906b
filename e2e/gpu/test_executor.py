"""The executor between host memory, SSD and a KV cache on a GPU, with torch and without vLLM: `pytest e2e/gpu -rs`.

Every byte is checked. Where there is no GPU the same tests run with the CPU in its place, so that they are known
to work; what only a GPU shows (order behind its streams, pinned memory, rates) is skipped by name.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from doubles import STORE_ID, load_job, store_job  # noqa: E402
from saria_vllm.engine.device_pages import DevicePages, Layer, pin, round_trip  # noqa: E402
from saria_vllm.engine.executor import Executor  # noqa: E402
from saria_vllm.engine.pool import DramPool  # noqa: E402
from saria_vllm.storage import format as fmt  # noqa: E402
from saria_vllm.types import (  # noqa: E402
    NULL_BLOCK,
    Extent,
    GroupShape,
    LoadItem,
    OpenSsd,
    PersistJob,
    Slot,
    StoreItem,
)

LAYERS, BLOCKS, PAGE_BYTES, PER_CHUNK = 8, 512, 32 << 10, 4
SHAPE = GroupShape(0, 16, PER_CHUNK, LAYERS * PAGE_BYTES)
SLOTS = 96
gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: torch finds no CUDA device")


class Node:
    """A KV cache in one of vLLM's layouts, a DRAM pool, an SSD tier, and an executor between them."""

    def __init__(self, directory: Path, device: str, layout: str) -> None:
        self.device = device
        self.memory = torch.zeros(LAYERS * BLOCKS * PAGE_BYTES, dtype=torch.uint8, device=device)
        block_major = layout == "BLHNC"
        apart, stride = (PAGE_BYTES, LAYERS * PAGE_BYTES) if block_major else (BLOCKS * PAGE_BYTES, PAGE_BYTES)
        layers = [Layer(self.memory, number * apart, stride, PAGE_BYTES) for number in range(LAYERS)]
        shape = (BLOCKS, LAYERS, PAGE_BYTES) if block_major else (LAYERS, BLOCKS, PAGE_BYTES)
        self.by_block = self.memory.view(shape) if block_major else self.memory.view(shape).transpose(0, 1)
        self.pages = DevicePages(layers, BLOCKS)
        slab = SLOTS * SHAPE.record_bytes
        self.pool = DramPool(f"gpu{os.getpid()}", slab, 0, 1, slab)
        self.pinned = pin(self.pool.base, self.pool.region_bytes) if device == "cuda" else False
        assert round_trip(self.pages, [1, 2, 3, 4], self.pool.base)
        self.executor = Executor(self.pool, {0: self.pages}, {0: SHAPE}, ssd_engine="auto")  # type: ignore[dict-item]
        self.executor.set_generation(1)
        cost = fmt.segment_cost_bytes(SHAPE.record_bytes, 64)
        self.executor.open_ssd(OpenSsd((str(directory),), 1, cost, 8), 0, STORE_ID)
        assert self.wait(self.executor.take_opened).problem == ""
        self.jobs = 0
        self.ended: dict[int, tuple[int, ...]] = {}

    def wait(self, what: Any) -> Any:
        deadline = time.monotonic() + 60
        while not (found := what()):
            assert time.monotonic() < deadline
            time.sleep(0.0002)
        return found

    def end(self, job: int) -> None:
        """Wait for a job that must not fail."""

        def has_ended() -> bool:
            results, loads, _, messages = self.executor.poll()
            assert not messages
            self.ended |= {result.job_id: result.failed for result in results}
            self.ended |= {state.job.job_id: tuple(state.failed) for state in loads}
            return job in self.ended

        self.wait(has_ended)
        assert self.ended[job] == ()

    def store(self, *items: StoreItem) -> int:
        self.jobs += 1
        self.pages.fence(stores=True)
        self.executor.submit_store(store_job(self.jobs, items))
        return self.jobs

    def load(self, *items: LoadItem) -> int:
        self.jobs += 1
        self.pages.fence(stores=False)
        self.executor.submit_load(load_job(self.jobs, f"r{self.jobs}", items))
        return self.jobs

    def persist(self, slots: range, first_record: int) -> int:
        self.jobs += 1
        keys = tuple(key_of(slot) for slot in slots)
        places = [[(0, slot) for slot in slots], [(0, 0, first_record + at) for at in range(len(slots))]]
        arrays = [torch.tensor(place, dtype=torch.int32).numpy() for place in places]
        self.executor.submit_persist(PersistJob(self.jobs, 0, keys, (b"",) * len(keys), *arrays))
        return self.jobs

    def fill(self, blocks: list[int], seed: int) -> None:
        """What a forward does: queued on the device's stream, not waited for."""
        self.by_block[blocks] = self.content(len(blocks), seed)

    def content(self, blocks: int, seed: int) -> Any:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        shape = (blocks, LAYERS, PAGE_BYTES)
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device, generator=generator)

    def holds(self, blocks: list[int], seed: int) -> bool:
        return bool(torch.equal(self.by_block[blocks], self.content(len(blocks), seed)))


def key_of(slot: int) -> bytes:
    return b"chunk%d" % slot


def from_dram(blocks: list[int], slot: int) -> LoadItem:
    return LoadItem(0, tuple(blocks), Slot(0, slot), None, key_of(slot))


def from_ssd(blocks: list[int], slot: int, record: int) -> LoadItem:
    return LoadItem(0, tuple(blocks), None, Extent(0, 0, record), key_of(slot))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu_only)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["LBHNC", "BLHNC"])
def node(request: pytest.FixtureRequest, device: str, tmp_path: Path) -> Iterator[Node]:
    """SARIA_GPU_DIR is the directory for files (default: pytest's own)."""
    directory = Path(os.environ.get("SARIA_GPU_DIR", tmp_path)) / f"saria-executor-{os.getpid()}"
    directory.mkdir()
    made = Node(directory, device, request.param)
    yield made
    made.executor.close()
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def test_chunks_of_both_tiers_come_back_into_other_blocks(node: Node) -> None:
    """Stores, persists and loads of both tiers, shuffled, several at once, with blocks that are to be left alone."""
    rng = random.Random(1)
    chunks = 48
    blocks = rng.sample(range(1, BLOCKS), chunks * PER_CHUNK)
    where = [blocks[at * PER_CHUNK : (at + 1) * PER_CHUNK] for at in range(chunks)]
    for number, some in enumerate(where):
        node.fill(some, number)
    node.end(node.store(*(StoreItem(0, Slot(0, number), tuple(some)) for number, some in enumerate(where))))
    node.end(node.persist(range(chunks // 2, chunks), 0))
    for turn in range(4):
        node.memory.zero_()
        targets = rng.sample(range(1, BLOCKS), chunks * PER_CHUNK)
        order = rng.sample(range(chunks), chunks)
        items, expected = [], {}
        for number, chunk in enumerate(order):
            some = targets[number * PER_CHUNK : (number + 1) * PER_CHUNK]
            expected[chunk] = list(some)
            if rng.random() < 0.2:
                some[rng.randrange(PER_CHUNK)] = NULL_BLOCK
                expected[chunk] = []
            ssd = chunk >= chunks // 2
            items.append(from_ssd(some, chunk, chunk - chunks // 2) if ssd else from_dram(some, chunk))
        jobs = [node.load(*items[: chunks // 3]), node.load(*items[chunks // 3 :])]
        for job in jobs:
            node.end(job)
        for chunk, some in expected.items():
            assert not some or node.holds(some, chunk), (turn, chunk)
        assert not node.by_block[0].any(), "a block that no load named was written"


@gpu_only
def test_copies_come_behind_what_the_stream_has_queued(node: Node) -> None:
    """A store reads what the forward before it has yet to write; a load writes blocks that one has yet to read."""
    if node.device == "cpu":
        pytest.skip("the CPU has no streams")
    some = [5, 6, 7, 8]
    node.fill(some, 0)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(5e8))
    node.fill(some, 1)
    store = node.store(StoreItem(0, Slot(0, 0), tuple(some)))
    node.end(store)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(5e8))
    seen = node.by_block[some].clone()
    node.fill(some, 2)
    load = node.load(from_dram(some, 0))
    node.end(load)
    torch.cuda.synchronize()
    assert torch.equal(seen, node.content(PER_CHUNK, 1)), "the load overtook a read"
    assert node.holds(some, 1), "the load was overtaken by a write, or the store had old bytes"


@gpu_only
def test_rates(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """GB/s of loads and stores of 64 chunks, over that of one plain pinned copy of as many bytes."""
    if node.device == "cpu":
        pytest.skip("rates are of a GPU's link")
    assert node.pinned, "CUDA did not pin the pool"
    chunks = 64
    nbytes = chunks * SHAPE.record_bytes
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    plain = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    seconds: dict[str, list[float]] = {"link": [], "load": [], "store": []}
    for _ in range(9):
        torch.cuda.synchronize()
        began = time.perf_counter()
        plain.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds["link"].append(time.perf_counter() - began)
        where = [list(range(1 + at * PER_CHUNK, 1 + (at + 1) * PER_CHUNK)) for at in range(chunks)]
        began = time.perf_counter()
        node.end(node.store(*(StoreItem(0, Slot(0, at), tuple(some)) for at, some in enumerate(where))))
        seconds["store"].append(time.perf_counter() - began)
        began = time.perf_counter()
        node.end(node.load(*(from_dram(some, at) for at, some in enumerate(where))))
        seconds["load"].append(time.perf_counter() - began)
    with capsys.disabled():
        for kind, found in seconds.items():
            rate = nbytes / statistics.median(found) / 1e9
            over = statistics.median(a / b for a, b in zip(seconds["link"], found, strict=True))
            print(f"\n{kind}: {rate:.1f} GB/s, {over:.2f} of the link", end="")
