"""An engine's SSD directory with real checksums, for tests of what looks at it. As a program: an engine at work."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from saria_vllm import _native
from saria_vllm.storage import format as fmt
from saria_vllm.storage.namespace import EngineDirectory, namespace_name, store_id
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import Extent, GroupShape, OpenSsd

SHAPES = {0: GroupShape(0, 16, 1, 4096), 1: GroupShape(1, 16, 2, 5000)}
PARTS = {
    "format": fmt.FORMAT_VERSION, "model": "tiny", "dtype": "bfloat16",
    "chunks": [[shape.block_tokens, shape.blocks_per_chunk, shape.block_bytes] for shape in SHAPES.values()],
}  # fmt: skip
NAME = namespace_name(PARTS)
SEGMENT_BYTES = fmt.segment_cost_bytes(SHAPES[1].record_bytes, 4)


class LiveEngine:
    """One engine with `ranks` ranks on `paths`, that writes what its keys say."""

    def __init__(self, paths: Sequence[str], parts: dict[str, object] = PARTS, ranks: int = 1, index: int = 0) -> None:
        self.directory = EngineDirectory.claim(list(paths), namespace_name(parts), parts, index)
        opened = OpenSsd(self.directory.directories, self.directory.generation, SEGMENT_BYTES, 64)
        self.stores = []
        for rank in range(ranks):
            store = SegmentStore(opened, rank, SHAPES, store_id(namespace_name(parts), self.directory.index, rank))
            self.found = store.recover()
            self.stores.append(store)

    def write(self, key: bytes, extent: Extent, group: int = 0, rank: int = 0) -> None:
        store, nbytes = self.stores[rank], SHAPES[group].record_bytes
        fd, offset = store.write_target(group, extent)
        with mmap.mmap(-1, nbytes) as buffer:
            buffer[:] = random.Random(key).randbytes(nbytes)
            assert os.pwrite(fd, buffer, offset) == nbytes
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            checksum = _native.checksum(address, nbytes, store.seed(extent, key))
        store.release(fd)
        store.commit(group, extent, key, b"", checksum)

    def fill(self, segment: int, group: int = 0, rank: int = 0, count: int | None = None) -> int:
        """Write the first `count` records of a segment of the only drive, or all; how many these are."""
        count = self.stores[rank].records_max(group) if count is None else count
        for record in range(count):
            self.write(b"%d-%d-%d" % (group, segment, record), Extent(0, segment, record), group, rank)
        return count

    def reset(self) -> None:
        generation = self.directory.bump_generation()
        for store in self.stores:
            store.set_generation(generation)

    def close(self) -> None:
        for store in self.stores:
            store.close()
        self.directory.release()


def start(path: Path, work: str) -> subprocess.Popen[str]:
    """An engine in another process, which has done its first work: "idle", or "busy" with all that an engine does."""
    command = [sys.executable, __file__, str(path), work]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        end(process)
        raise AssertionError("it did not start")
    return process


def end(process: subprocess.Popen[str]) -> None:
    """kill -9."""
    process.kill()
    process.communicate()


def main(path: str, work: str) -> None:
    engine = LiveEngine([path])
    first = engine.stores[0].next_segment_id
    engine.fill(first)
    engine.fill(first + 1, count=2)
    print("ready", flush=True)
    if work == "idle":
        time.sleep(60)
    number, ends = first + 2, time.monotonic() + 60
    while time.monotonic() < ends:
        engine.fill(number, group=number % 2, count=None if number % 3 else 2)
        if number % 5 == 0:
            engine.stores[0].forget(Extent(0, number, 1))
        if number % 3 == 0:
            engine.stores[0].seal(0, number)
        if number % 50 == 0:
            engine.reset()
        if number >= first + 10:
            engine.stores[0].retire(0, number - 8)
        number += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
