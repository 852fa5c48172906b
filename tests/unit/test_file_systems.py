"""File systems that refuse what we ask first, and the cap that holds on all of them: B41, B47."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doubles import MakeRig, wait_for
from node import Node, mounted
from saria_vllm.engine.ssd_engine import open_engine
from saria_vllm.storage import format as fmt

MIB = 1 << 20
ENGINES = ["posix", "io_uring"]

# B41


def round_trip(node: Node) -> None:
    """What is written is read back, from SSD."""
    prefixes = [node.store(8) for _ in range(4)]
    for _ in range(7):
        node.store(8)
    before = node.counts.get("load_bytes:ssd", 0)
    assert [node.load(keys) for keys in prefixes] == [8] * 4
    assert node.counts["load_bytes:ssd"] == before + 32 * node.record_bytes[0]
    assert not [name for name in node.counts if name.startswith(("errors", "internal_errors"))]
    for name in ("read", "written"):
        assert node.counts[f"drive_{name}_bytes:0"] > 0
    assert node.counts["drive_written_bytes:0"] == node.counts["ssd_written_bytes"]
    assert node.counts["drive_read_bytes:0"] == node.counts["load_bytes:ssd"]


def refuses_open(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def shim(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            if flags & os.O_CREAT:  # As Linux does: the file is there already.
                os.close(real(path, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd))
            raise OSError(errno.EINVAL, "refused")
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", shim)


def refuses_first_write(monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_open, direct = os.pwrite, os.open, set()

    def open_shim(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd = real_open(path, flags, mode, dir_fd=dir_fd)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def write_shim(fd: int, data: bytes, offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "refused")
        return real_write(fd, data, offset)

    monkeypatch.setattr(os, "open", open_shim)
    monkeypatch.setattr(os, "pwrite", write_shim)


def refuses_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate

    def shim(fd: int, offset: int, size: int) -> None:
        if "/seg-" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EOPNOTSUPP, "refused")
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", shim)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("refuse", "buffered"), [(refuses_open, 1), (refuses_first_write, 1), (refuses_allocation, 0)])
def test_b41_what_is_refused_is_done_without_and_said_once(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, engine: str, refuse: Callable[[Any], None], buffered: int
) -> None:
    refuse(monkeypatch)
    node = Node(make_rig, segments_max=100, options={"engine": engine})
    round_trip(node)
    assert sum("no O_DIRECT here" in message for message in node.rig.messages) == buffered
    assert node.counts.get("buffered_drives", 0) == buffered


@pytest.mark.parametrize("kind", ["tmpfs", "overlay", "ext4"])
@pytest.mark.parametrize("engine", ENGINES)
def test_b41_real_file_systems(make_rig: MakeRig, tmp_path: Path, kind: str, engine: str) -> None:
    with mounted(kind, tmp_path, 96) as mount:
        node = Node(make_rig, segments_max=30, options={"engine": engine, "directory": mount})
        try:
            round_trip(node)
        finally:
            node.rig.executor.close()


@pytest.mark.parametrize("name", ENGINES)
def test_b41_an_unaligned_buffer_is_an_error_of_that_transfer_or_works(tmp_path: Path, name: str) -> None:
    engine, _ = open_engine(name, 4)  # type: ignore[arg-type]
    memory = mmap.mmap(-1, 3 * 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[:] = bytes(range(256)) * 48
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        for tag, (start, nbytes, offset) in enumerate(
            [(0, 4096, 0), (3, 4096, 4096), (0, 4095, 8192), (0, 4096, 12289)]
        ):
            engine.submit_write(fd, address + start, nbytes, offset, tag)
            ((ended, result),) = wait_for(lambda: engine.reap(0.1))
            assert ended == tag
            assert result in ([nbytes] if tag == 0 else [nbytes, -errno.EINVAL])
    finally:
        engine.close()
        os.close(fd)


def test_b41_slots_are_aligned_for_every_record_size(make_rig: MakeRig) -> None:
    rig = make_rig()
    for group, shape in enumerate(rig.shapes):
        for number in range(50):
            assert rig.pool.address(rig.slot(group, number), shape.record_bytes) % 4096 == 0


# B47


@pytest.mark.parametrize(
    ("limit", "stored_bytes"),
    [(8 * MIB, 20 * MIB), pytest.param(64 * MIB, 1 << 30, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["20MiB", "1GiB"],
)
@pytest.mark.parametrize(
    "record_bytes", [(4096,), (64 << 10,), (256 << 10,), (128 << 10, 12 << 10)], ids=["4K", "64K", "256K", "mixed"]
)
def test_b47_the_cap_holds_while_half_of_it_is_pinned(
    make_rig: MakeRig, record_bytes: tuple[int, ...], limit: int, stored_bytes: int
) -> None:
    if record_bytes == (4096,):  # As many operations as with the others; the cap is as much smaller.
        limit, stored_bytes = limit // 16, stored_bytes // 16
    segments_max = 16
    records = fmt.records_per_segment(record_bytes[0], limit // segments_max)
    unit = fmt.segment_cost_bytes(record_bytes[0], records)
    node = Node(make_rig, segments_max, records, record_bytes)
    rng, stored, pins, highest, recent = random.Random(47), 0, [], 0, []
    while stored < stored_bytes:
        recent = [*recent[-40:], node.store(rng.randint(1, 8))]
        stored += len(recent[-1]) * sum(record_bytes)
        if len(pins) < 8 and (job := node.pin(recent[0])) is not None:
            pins.append(job)
        elif len(pins) == 8 and rng.random() < 0.1:
            node.unpin(pins.pop(0))
        highest = max(highest, node.du())
    assert highest <= limit + unit
    assert highest > 0.8 * segments_max * unit, "the room is used"
    assert node.counts["retired_chunks"] > 0
    for job in pins:
        node.unpin(job)
    node.settle()


def test_b47_nothing_is_written_while_everything_is_pinned(make_rig: MakeRig) -> None:
    node = Node(make_rig, segments_max=4, segment_records=8)
    prefixes = [node.store(8) for _ in range(4)]
    for _ in range(7):
        node.store(8)
    pins = [job for keys in prefixes[-4:] if (job := node.pin(keys)) is not None]
    held = [node.store(8) for _ in range(8)]
    while len(pins) < 8 and (job := node.pin(held.pop())) is not None:
        pins.append(job)
    extents = node.tiers.chunks.extents
    assert extents is not None
    for segment in extents._by_drive[0].values():  # All of it is being read.
        segment.busy += 1
    before = node.counts["ssd_written_bytes"]
    for _ in range(8):
        node.store(8)
    assert node.counts["ssd_written_bytes"] == before
    assert node.counts["dropped_chunks:ssd_full"] >= 8
    for segment in extents._by_drive[0].values():
        segment.busy -= 1
    for job in pins:
        node.unpin(job)
    node.store(8)
    assert node.counts["ssd_written_bytes"] > before
