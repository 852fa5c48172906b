"""What only a GPU can prove, on a machine with torch and without vLLM: `pytest e2e/gpu -rs`.

NIXL's GDS_MT and GDS, KvikIO, io_uring into pinned memory with a copy behind it, and the checksum on the device. Each
test that cannot run names what is missing. SARIA_GPU_DIR is the directory for files (default: pytest's own): for GDS it
must be on a drive and a file system that has it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from saria_vllm import _native  # noqa: E402
from saria_vllm.engine.checksum import checksums_torch  # noqa: E402
from saria_vllm.engine.io_uring import UringEngine  # noqa: E402
from saria_vllm.engine.kvikio import KvikioEngine  # noqa: E402
from saria_vllm.engine.nixl import NixlEngine  # noqa: E402
from saria_vllm.engine.ssd_engine import SsdEngine  # noqa: E402
from saria_vllm.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: torch finds no CUDA device")

RECORD_BYTES = 1 << 20
DEPTH = 8
MAKERS: dict[str, Callable[[], SsdEngine]] = {
    "nixl GDS_MT": lambda: NixlEngine(DEPTH, ("GDS_MT",)),
    "nixl GDS": lambda: NixlEngine(DEPTH, ("GDS",)),
    "kvikio": lambda: KvikioEngine(DEPTH),
}


@pytest.fixture(params=MAKERS)
def engine(request: pytest.FixtureRequest) -> Iterator[SsdEngine]:
    try:
        made = MAKERS[request.param]()
    except ConfigError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@contextmanager
def opened(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    path = Path(os.environ.get("SARIA_GPU_DIR", tmp_path)) / f"saria-gpu-{os.getpid()}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        yield path, fd
        os.close(fd)
    finally:
        path.unlink(missing_ok=True)


def finish(engine: SsdEngine) -> dict[int, int]:
    results: dict[int, int] = {}
    deadline = time.monotonic() + 60
    while engine.in_flight:
        results.update(engine.reap(1.0))
        assert time.monotonic() < deadline
    return results


def random_records(count: int, seed: int) -> Any:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (count, RECORD_BYTES), dtype=torch.uint8, device="cuda", generator=generator)


def native_checksums(data: bytes, seeds: list[int]) -> list[int]:
    """By the extension, on the host."""
    host = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    size = len(data) // len(seeds)
    return [_native.checksum(host.data_ptr() + i * size, size, seed) for i, seed in enumerate(seeds)]


def test_records_go_from_the_gpu_to_a_file_and_back(engine: SsdEngine, tmp_path: Path) -> None:
    """Through a registered staging ring, several times over, with other offsets each time."""
    staging = torch.zeros(2 * DEPTH, RECORD_BYTES, dtype=torch.uint8, device="cuda")
    assert engine.register_memory(staging.data_ptr(), staging.numel(), torch.cuda.current_device())
    with opened(tmp_path) as (path, fd):
        for turn in range(5):
            records = random_records(DEPTH, turn)
            staging[:DEPTH] = records
            staging[DEPTH:] = 0
            torch.cuda.synchronize()  # What was queued on a stream must have ended before the drive reads it.
            for i in range(DEPTH):
                engine.submit_write(fd, staging[i].data_ptr(), RECORD_BYTES, (i + turn) * RECORD_BYTES, i)
            assert finish(engine) == dict.fromkeys(range(DEPTH), RECORD_BYTES)
            start = turn * RECORD_BYTES
            assert path.read_bytes()[start : start + DEPTH * RECORD_BYTES] == records.cpu().numpy().tobytes()
            for i in range(DEPTH):
                target = staging[2 * DEPTH - 1 - i].data_ptr()
                engine.submit_read(fd, target, RECORD_BYTES, (i + turn) * RECORD_BYTES, i)
            assert finish(engine) == dict.fromkeys(range(DEPTH), RECORD_BYTES)
            assert torch.equal(staging[DEPTH:].flip(0), records)
            seeds = [2**64 - 1 - i for i in range(DEPTH)]
            expected = native_checksums(records.cpu().numpy().tobytes(), seeds)
            assert checksums_torch(staging[DEPTH:].flip(0).contiguous(), seeds) == expected


def test_what_was_not_whole_is_no_success(engine: SsdEngine, tmp_path: Path) -> None:
    """A read past the end, from a closed descriptor, into a file that is read-only: less than all, or an error."""
    staging = torch.zeros(2, RECORD_BYTES, dtype=torch.uint8, device="cuda")
    assert engine.register_memory(staging.data_ptr(), staging.numel(), torch.cuda.current_device())
    with opened(tmp_path) as (path, fd):
        path.write_bytes(b"x" * 8192)
        read_only = os.open(path, os.O_RDONLY | os.O_DIRECT)
        closed = os.dup(fd)
        os.close(closed)
        engine.submit_read(fd, staging.data_ptr(), RECORD_BYTES, 0, 1)
        engine.submit_read(fd, staging.data_ptr(), 4096, 1 << 30, 2)
        engine.submit_read(closed, staging.data_ptr(), 4096, 0, 3)
        engine.submit_write(read_only, staging.data_ptr(), 4096, 0, 4)
        engine.submit_read(fd, staging[1].data_ptr(), 4096, 4096, 5)
        results = finish(engine)
        os.close(read_only)
    assert results[5] == 4096
    assert all(results[tag] < 4096 for tag in (2, 3, 4)) and results[1] < RECORD_BYTES
    assert staging[1, :4096].cpu().numpy().tobytes() == b"x" * 4096


def test_io_uring_reads_into_pinned_memory_and_a_copy_brings_it_to_the_gpu(tmp_path: Path) -> None:
    """As host engines will serve a GPU: read into a registered pinned ring, copy on a stream, verify on the device."""
    engine = UringEngine(DEPTH)
    ring = torch.zeros(DEPTH, RECORD_BYTES, dtype=torch.uint8, pin_memory=True)
    assert isinstance(engine.register_memory(ring.data_ptr(), ring.numel()), bool)
    records = random_records(DEPTH, 7)
    data = records.cpu().numpy().tobytes()
    pages = torch.zeros(DEPTH, RECORD_BYTES, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    with opened(tmp_path) as (path, fd):
        path.write_bytes(data)
        for i in range(DEPTH):
            engine.submit_read(fd, ring[i].data_ptr(), RECORD_BYTES, i * RECORD_BYTES, i)
        while engine.in_flight:
            for i, moved in engine.reap(1.0):
                assert moved == RECORD_BYTES
                with torch.cuda.stream(stream):
                    pages[i].copy_(ring[i], non_blocking=True)
        stream.synchronize()
        engine.close()
    seeds = list(range(DEPTH))
    assert torch.equal(pages, records)
    assert checksums_torch(pages, seeds) == native_checksums(data, seeds)


@pytest.mark.parametrize("blocks", [1, 3, 256, 1024])
def test_the_checksum_on_the_gpu_is_that_of_the_host(blocks: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(blocks)
    records = torch.randint(0, 256, (4, blocks * 4096), dtype=torch.uint8, device="cuda", generator=generator)
    seeds = [0, 1, 2**63, 2**64 - 1]
    expected = native_checksums(records.cpu().numpy().tobytes(), seeds)
    assert checksums_torch(records, seeds) == expected
    records[2, blocks * 4096 - 1] ^= 1
    found = checksums_torch(records, seeds)
    assert [a == b for a, b in zip(found, expected, strict=True)] == [True, True, False, True]
