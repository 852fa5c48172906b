"""PageMap, and DevicePages on tensors of the CPU, copy exactly the bytes of the block list, and verify what they copy.
(Uring: test_ssd_engines.py.)"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from saria_vllm import _native
from saria_vllm.types import NULL_BLOCK, align_up

try:
    import torch

    from saria_vllm.engine.device_pages import DevicePages, Layer
except ImportError:
    torch = None  # type: ignore[assignment]

Bytes = NDArray[np.uint8]


def address(array: Bytes) -> int:
    return int(array.ctypes.data)


def randoms(nbytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Cache:
    """A KV cache of `blocks` blocks and layers of `page_bytes`, block-major or layer-major, with gaps between pages."""

    on_device = False
    """Whether it is copied as a device's memory is: on the CPU here."""

    def __init__(self, blocks: int, page_bytes: list[int], block_major: bool, seed: int = 0) -> None:
        self.page_bytes = page_bytes
        gap = 24
        if block_major:
            strides = [sum(page_bytes) + gap * len(page_bytes)] * len(page_bytes)
            starts = [sum(page_bytes[:i]) + gap * i for i in range(len(page_bytes))]
            total = blocks * strides[0]
        else:
            strides = [nbytes + gap for nbytes in page_bytes]
            starts = [blocks * sum(strides[:i]) for i in range(len(page_bytes))]
            total = blocks * sum(strides)
        self.starts, self.strides = starts, strides
        self.memory = randoms(total, seed)
        bases = [address(self.memory) + start for start in starts]
        if self.on_device:
            whole = torch.from_numpy(self.memory)
            places = zip(starts, strides, page_bytes, strict=True)
            self.map: Any = DevicePages([Layer(whole, *place) for place in places], blocks)
        else:
            self.map = _native.PageMap(bases, strides, page_bytes, blocks)

    def page(self, block: int, layer: int) -> Bytes:
        start = self.starts[layer] + block * self.strides[layer]
        return self.memory[start : start + self.page_bytes[layer]]

    def record(self, blocks: list[int]) -> Bytes:
        return np.concatenate([self.page(b, layer) for b in blocks for layer in range(len(self.page_bytes))])


@pytest.fixture(autouse=True, params=["PageMap", "DevicePages"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "DevicePages" and torch is None:
        pytest.skip("torch is not installed")
    monkeypatch.setattr(Cache, "on_device", request.param == "DevicePages")


SHAPES = [[4096], [64, 64], [65536, 65536], [100, 4096, 7], [5000, 3, 12288], [1 << 20]]
both_orders = pytest.mark.parametrize("block_major", [True, False])
all_shapes = pytest.mark.parametrize("page_bytes", SHAPES, ids=str)


@both_orders
@all_shapes
def test_gather_collects_pages_block_major(page_bytes: list[int], block_major: bool) -> None:
    cache = Cache(5, page_bytes, block_major)
    blocks = [3, 0, 4]
    record = randoms(cache.map.block_bytes * 3 + 100, seed=1)
    padding = record[-100:].copy()
    cache.map.gather(address(record), blocks)
    assert cache.map.block_bytes == sum(page_bytes)
    assert (record[:-100] == cache.record(blocks)).all()
    assert (record[-100:] == padding).all()


@both_orders
@all_shapes
@pytest.mark.parametrize("verify", [False, True])
def test_scatter_writes_its_pages_and_nothing_else(page_bytes: list[int], block_major: bool, verify: bool) -> None:
    cache = Cache(6, page_bytes, block_major)
    expected = Cache(6, page_bytes, block_major)
    blocks = [5, NULL_BLOCK, 1, 2]
    nbytes = align_up(cache.map.block_bytes * len(blocks))
    record = randoms(nbytes + 8, seed=2)
    source = record[8:]
    at = 0
    for block in blocks:
        for layer, size in enumerate(page_bytes):
            if block >= 0:
                expected.page(block, layer)[:] = source[at : at + size]
            at += size
    if verify:
        found = cache.map.scatter_verify(address(source), nbytes, 77, blocks)
        assert found == _native.checksum(address(source), nbytes, 77)
    else:
        cache.map.scatter(address(source), blocks)
    assert (cache.memory == expected.memory).all()


def test_scatter_verify_sums_padding_and_skipped_blocks() -> None:
    cache = Cache(4, [4096, 1000], block_major=True)
    blocks, nbytes = [NULL_BLOCK, 1, NULL_BLOCK], 5 * 4096
    record = randoms(nbytes, seed=3)
    right = _native.checksum(address(record), nbytes, 5)
    for at in (0, 5096, 3 * 5096 - 1, 3 * 5096, nbytes - 1):
        record[at] ^= 1
        assert cache.map.scatter_verify(address(record), nbytes, 5, blocks) != right
        record[at] ^= 1
    assert cache.map.scatter_verify(address(record), nbytes, 5, blocks) == right


def test_store_then_load_moves_blocks() -> None:
    source = Cache(16, [512, 1024], block_major=False, seed=4)
    target = Cache(16, [512, 1024], block_major=False, seed=5)
    records = [randoms(2 * 1536, seed) for seed in (6, 7)]
    addresses = [address(record) for record in records]
    source.map.gather_many(addresses, [[1, 2], [3, 4]])
    target.map.scatter_many(addresses, [(9, 8), (NULL_BLOCK, 0)])
    assert (target.record([9, 8, 0]) == source.record([1, 2, 4])).all()


Copy = Callable[[_native.PageMap, int, list[int]], object]
GATHERS: list[Copy] = [
    lambda m, at, ids: m.gather(at, ids),
    lambda m, at, ids: m.gather_many([at, at], [[0, 1], ids]),
]
SCATTERS: list[Copy] = [
    lambda m, at, ids: m.scatter(at, ids),
    lambda m, at, ids: m.scatter_many([at, at], [[0, 1], ids]),
    lambda m, at, ids: m.scatter_verify(at, 8192, 0, ids),
]


@pytest.mark.parametrize("copy", GATHERS + SCATTERS)
def test_a_block_out_of_bounds_copies_nothing(copy: Copy) -> None:
    cache = Cache(4, [4096], block_major=True)
    record = randoms(8192, seed=8)
    before = cache.memory.copy(), record.copy()
    with pytest.raises(IndexError, match=r"block 4 is outside 0\.\.3"):
        copy(cache.map, address(record), [0, 4])
    assert (cache.memory == before[0]).all()
    assert (record == before[1]).all()


@pytest.mark.parametrize("copy", GATHERS)
def test_a_null_block_cannot_be_stored(copy: Copy) -> None:
    cache = Cache(4, [4096], block_major=True)
    with pytest.raises(IndexError, match="block -1"):
        copy(cache.map, address(randoms(8192, seed=8)), [0, NULL_BLOCK])


def test_bad_arguments_are_refused() -> None:
    for bases, strides, page_bytes, blocks in (
        ([], [], [], 1), ([1], [], [1], 1), ([1], [1], [1, 2], 1), ([1], [1], [0], 1), ([1], [1], [1], 0),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            _native.PageMap(bases, strides, page_bytes, blocks)
    cache = Cache(4, [4096], block_major=True)
    at = address(randoms(8192, seed=0))
    with pytest.raises(ValueError, match="payload"):
        cache.map.scatter_verify(at, 4096, 0, [0, 1])
    with pytest.raises(ValueError, match="4096"):
        cache.map.scatter_verify(at, 8191, 0, [0])
    with pytest.raises(ValueError, match="one block list"):
        cache.map.scatter_many([at], [[0], [1]])
    with pytest.raises(ValueError, match="one block list"):
        cache.map.gather_many([at, at], [[0]])


def test_random_copies_agree_with_numpy() -> None:
    rng = random.Random(11)
    for trial in range(60):
        page_bytes = [rng.choice([1, 17, 256, 4096, 9000]) for _ in range(rng.randint(1, 4))]
        cache = Cache(8, page_bytes, rng.random() < 0.5, seed=trial)
        blocks = rng.sample(range(8), rng.randint(1, 8))
        nbytes = align_up(cache.map.block_bytes * len(blocks)) + 4096 * rng.randint(0, 2)
        record = randoms(nbytes, seed=trial)
        found = cache.map.scatter_verify(address(record), nbytes, trial, blocks)
        assert (cache.record(blocks) == record[: cache.map.block_bytes * len(blocks)]).all()
        assert found == _native.checksum(address(record), nbytes, trial)


def test_bulk_work_runs_without_the_gil() -> None:
    """With this switch interval a thread gives the GIL away only where it releases it itself."""
    cache = Cache(1, [1 << 26], block_major=True)
    record = randoms(1 << 26, seed=9)
    calls: list[Callable[[], object]] = [  # each takes some milliseconds
        lambda: cache.map.gather(address(record), [0]),
        lambda: cache.map.gather_many([address(record)], [[0]]),
        lambda: cache.map.scatter(address(record), [0]),
        lambda: cache.map.scatter_many([address(record)], [[0]]),
        lambda: cache.map.scatter_verify(address(record), 1 << 26, 0, [0]),
        lambda: _native.checksum(address(record), 1 << 26, 0),
    ]
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.0001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    thread.start()
    try:
        for index, call in enumerate(calls):
            for _ in range(50):  # on a loaded machine the other thread may be late, but not always
                start = time.perf_counter()
                call()
                end = time.perf_counter()
                if any(start < at < end for at in ticks[-10_000:]):
                    break
                time.sleep(0.001)
            else:
                pytest.fail(f"the other thread did not run during call {index}")
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()


@pytest.mark.parametrize("offset", [0, 16, 64, 4032])
@pytest.mark.parametrize("page_bytes", [4096, 3 * 4096, 4096 + 64, 5000, 2048])
def test_scatter_verify_copies_pages_of_any_alignment_and_no_byte_beside_them(page_bytes: int, offset: int) -> None:
    """Whole blocks go past the caches where a page allows it, and the rest as ever."""
    layers, blocks, gap = 2, 4, 128
    stride = page_bytes + gap
    memory = np.full(layers * blocks * stride + 8192, 0xEE, np.uint8)
    start = memory.ctypes.data + (-memory.ctypes.data % 4096) + offset
    bases = [start + layer * blocks * stride for layer in range(layers)]
    page_map = _native.PageMap(bases, [stride] * layers, [page_bytes] * layers, blocks)
    ids = [2, -1, 0]
    payload = len(ids) * layers * page_bytes
    record = np.random.default_rng(page_bytes + offset).integers(0, 256, -(-payload // 4096) * 4096, np.uint8)
    expected = memory.copy()
    for number, block in enumerate(ids):
        for layer in range(layers):
            page = record[(number * layers + layer) * page_bytes :][:page_bytes]
            at = start - memory.ctypes.data + layer * blocks * stride + block * stride
            if block >= 0:
                expected[at : at + page_bytes] = page
    found = page_map.scatter_verify(record.ctypes.data, record.nbytes, 9, ids)
    assert found == _native.checksum(record.ctypes.data, record.nbytes, 9)
    assert (memory == expected).all()


ENDS_IN_NATIVE_CODE = """
import ctypes, mmap, threading, time
from saria_vllm import _native

memory = mmap.mmap(-1, 1 << 20)
began = threading.Event()

def work():
    while True:
        began.set()
        _native.checksum(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory), 0)

threading.Thread(target=work, daemon=True).start()
began.wait()
time.sleep(0.05)
"""


def test_a_process_ends_well_while_a_daemon_thread_is_in_native_code() -> None:
    """As a check of `saria doctor` that is left behind, or an SSD thread whose drive hangs at a shutdown."""
    ended = subprocess.run([sys.executable, "-c", ENDS_IN_NATIVE_CODE], capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_neighbours_cross_the_link_in_one_copy_and_like_layers_are_spread_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device_pages = pytest.importorskip("saria_vllm.engine.device_pages", reason="torch is not installed")
    monkeypatch.setattr(Cache, "on_device", True)

    copies: list[int] = []

    def counted(addr: int, nbytes: int) -> Any:
        copies.append(nbytes)
        return host_bytes(addr, nbytes)

    host_bytes = device_pages._host_bytes
    monkeypatch.setattr(device_pages, "_host_bytes", counted)
    cache = Cache(8, [4096] * 6, block_major=False, seed=1)
    assert len(cache.map._runs) == 1
    slots, size = randoms(5 * 24576, seed=2), 24576
    places = [address(slots) + size * cell for cell in (0, 1, 2, 4)]
    cache.map.scatter_many(places, [[0], [1], [2], [7]])
    assert copies == [3 * size, size]
    for block, cell in enumerate((0, 1, 2)):
        assert (cache.record([block]) == slots[cell * size : (cell + 1) * size]).all()
    back = randoms(5 * size, seed=3)
    cache.map.gather_many([address(back) + size * cell for cell in (0, 1, 2, 4)], [[0], [1], [2], [7]])
    assert copies[2:] == [3 * size, size]
    assert (back[: 3 * size] == slots[: 3 * size]).all()
    assert (back[4 * size :] == slots[4 * size :]).all()


def test_a_round_trip_tells_whether_copies_work_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    device_pages = pytest.importorskip("saria_vllm.engine.device_pages", reason="torch is not installed")
    monkeypatch.setattr(Cache, "on_device", True)
    cache, room = Cache(6, [100, 4096], block_major=True), randoms(3 * align_up(2 * 4196), seed=1)
    before = cache.memory.copy()
    assert device_pages.round_trip(cache.map, [4, 1], address(room))
    assert (cache.memory == before).all()
    for broken in ("scatter", "gather"):
        with monkeypatch.context() as patched:
            patched.setattr(cache.map, broken, lambda place, blocks: None)
            assert not device_pages.round_trip(cache.map, [4, 1], address(room))
