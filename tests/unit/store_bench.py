"""Stores over the same directories, one after the other, with records whose bytes follow from their keys."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
from pathlib import Path

from saria_vllm.storage import format as fmt
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import Extent, FoundChunk, GroupShape, OpenSsd

SHAPES = {0: GroupShape(0, 16, 1, 4096), 1: GroupShape(1, 16, 1, 5000)}
STORE_ID = b"0123456789abcdef"
SEGMENT_BYTES = fmt.segment_cost_bytes(4096, 4)


def checksum(data: bytes, seed: int) -> int:
    """Stands in for the native one."""
    key = seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little")


def payload(key: bytes, nbytes: int) -> bytes:
    return random.Random(key).randbytes(nbytes)


class Bench:
    """Opens stores over the same directories, as one engine after the other would."""

    def __init__(self, root: Path) -> None:
        self.directories = tuple(str(root / name) for name in ("a", "b"))
        for directory in self.directories:
            os.mkdir(directory)
        self.stores: list[SegmentStore] = []

    def open(self, generation: int = 1, segments_max: int = 8, rank: int = 0, **other: object) -> SegmentStore:
        segment_bytes = int(str(other.get("segment_bytes", SEGMENT_BYTES)))
        opened = OpenSsd(self.directories, generation, segment_bytes, segments_max)
        store = SegmentStore(opened, rank, SHAPES, bytes(other.get("store_id", STORE_ID)))  # type: ignore[call-overload]
        self.stores.append(store)
        return store

    def reopen(self, generation: int = 1, **other: object) -> tuple[SegmentStore, list[FoundChunk]]:
        store = self.open(generation, **other)  # type: ignore[arg-type]
        return store, sorted(store.recover().items, key=lambda chunk: chunk.extent)

    def files(self, drive: int = 0, rank: int = 0) -> list[str]:
        return sorted(os.listdir(os.path.join(self.directories[drive], f"r{rank}")))

    def path(self, name: str, drive: int = 0) -> str:
        return os.path.join(self.directories[drive], "r0", name)


def write(store: SegmentStore, group: int, extent: Extent, key: bytes, parent: bytes = b"") -> None:
    data = payload(key, SHAPES[group].record_bytes)
    fd, offset = store.write_target(group, extent)
    with mmap.mmap(-1, len(data)) as buffer:
        buffer[:] = data
        assert os.pwrite(fd, buffer, offset) == len(data)
    store.release(fd)
    store.commit(group, extent, key, parent, checksum(data, store.seed(extent, key)))


def is_right(store: SegmentStore, group: int, extent: Extent, key: bytes) -> bool:
    """False for a mismatch. Bytes that match but are wrong end the test."""
    fd, offset, expected = store.read_target(group, extent)
    nbytes = SHAPES[group].record_bytes
    with mmap.mmap(-1, nbytes) as buffer:
        data = buffer[: os.preadv(fd, [buffer], offset)]
    store.release(fd)
    if checksum(data, store.seed(extent, key)) != expected:
        return False
    assert data == payload(key, nbytes), "wrong bytes accepted"
    return True


def fill(store: SegmentStore, segment: int = 0, drive: int = 0, count: int = 4) -> list[bytes]:
    keys = [b"%d-%d-%d" % (drive, segment, record) for record in range(count)]
    for record, key in enumerate(keys):
        write(store, 0, Extent(drive, segment, record), key, keys[record - 1] if record else b"")
    return keys
