"""What a store's files may hold after a crash: its real file operations, recorded, then replayed in part."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from doubles import payload
from saria_vllm import _native
from saria_vllm.storage import format as fmt
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import Extent, FoundChunk, GroupShape, OpenSsd

RECORD_BYTES = 8192
SHAPES = {0: GroupShape(0, 16, 2, 4096)}
STORE_ID = b"0123456789abcdef"
RECORDS = 3
SEGMENT_BYTES = fmt.segment_cost_bytes(RECORD_BYTES, RECORDS)

Files = dict[str, bytes]
"""Contents by name."""


class Operation(NamedTuple):
    """A change that may not have reached the disk: a file made with `offset` bytes, a write, or an unlink."""

    kind: str
    name: str
    offset: int = 0
    data: bytes = b""


@contextlib.contextmanager
def recorded(directory: Path) -> Iterator[list[Operation]]:
    """What is done to the files of a directory meanwhile, in order, by whoever does it."""
    done: list[Operation] = []
    real = {name: getattr(os, name) for name in ("pwrite", "unlink", "posix_fallocate")}

    def here(path: str) -> str | None:
        folder, name = os.path.split(path)
        return name if folder == str(directory) and name.startswith("seg-") else None

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if name := here(os.readlink(f"/proc/self/fd/{fd}")):
            done.append(Operation("write", name, offset, bytes(data)))
        written: int = real["pwrite"](fd, data, offset)
        return written

    def posix_fallocate(fd: int, offset: int, size: int) -> None:
        if name := here(os.readlink(f"/proc/self/fd/{fd}")):
            done.append(Operation("make", name, size))
        real["posix_fallocate"](fd, offset, size)

    def unlink(path: str, **where: Any) -> None:
        if name := here(str(path)):
            done.append(Operation("unlink", name))
        real["unlink"](path, **where)

    try:
        os.pwrite, os.posix_fallocate, os.unlink = pwrite, posix_fallocate, unlink  # type: ignore[assignment]
        yield done
    finally:
        for name, call in real.items():
            setattr(os, name, call)


NOTHING, START, REST, ALL = range(4)
"""How much of an operation reached the disk. A write's start is its first 4 KiB, or half of a small one."""

Parts = tuple[int, ...]
"""One of these for each operation."""


def all_parts(operations: Sequence[Operation]) -> list[Parts]:
    """Every combination; the last one is all of everything."""
    return list(itertools.product(*map(_parts_of, operations)))


def _parts_of(operation: Operation) -> Parts:
    if operation.kind != "write":
        return NOTHING, ALL
    return (NOTHING, START, REST, ALL) if len(operation.data) > 4096 else (NOTHING, START, ALL)


def crash_states(operations: Sequence[Operation], pending_max: int) -> list[Parts]:
    """For a crash at any time with at most so many pending operations; the last one is all of everything."""
    states = []
    for end in range(min(pending_max, len(operations)), len(operations) + 1):
        first = max(0, end - pending_max)
        done, not_begun = (ALL,) * first, (NOTHING,) * (len(operations) - end)
        states += [done + parts + not_begun for parts in all_parts(operations[first:end])]
    return states


def state(before: Files, operations: Sequence[Operation], parts: Parts) -> Files:
    """What the disk holds then. The order matters only to operations on the same bytes."""
    files = {name: bytearray(content) for name, content in before.items()}
    for operation, part in zip(operations, parts, strict=True):
        if part != NOTHING:
            _apply(files, operation, part)
    return {name: bytes(content) for name, content in files.items()}


def _apply(files: dict[str, bytearray], operation: Operation, part: int) -> None:
    kind, name, offset, data = operation
    if kind == "unlink":
        files.pop(name, None)
        return
    content = files.setdefault(name, bytearray())
    if kind == "make":
        content.extend(bytes(max(0, offset - len(content))))
        return
    start = 4096 if len(data) > 4096 else len(data) // 2
    if part == START:
        data = data[:start]
    elif part == REST:
        offset, data = offset + start, data[start:]
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


def read_files(directory: Path) -> Files:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name.startswith("seg-")}


def put_files(directory: Path, files: Files) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(directory):
        if name not in files:
            os.unlink(directory / name)
    for name, content in files.items():
        (directory / name).write_bytes(content)


@contextlib.contextmanager
def opened(directory: Path, generation: int = 1, **other: Any) -> Iterator[SegmentStore]:
    """A store over `directory`/r0, or another rank, that is killed at the end: closed without a seal."""
    rank, store_id = other.get("rank", 0), other.get("store_id", STORE_ID)
    store = SegmentStore(OpenSsd((str(directory),), generation, SEGMENT_BYTES, 8), rank, SHAPES, store_id)
    try:
        yield store
    finally:
        for segment in store._segments.values():
            segment.close_journal()
            if segment.data_fd >= 0:
                os.close(segment.data_fd)


def write(store: SegmentStore, extent: Extent, key: bytes, generation: int = 1) -> None:
    """A record whose bytes name key and generation, with the executor's checksum."""
    fd, offset = store.write_target(0, extent)
    with Buffer() as buffer:
        buffer.memory[:] = payload(key, RECORD_BYTES, generation)
        assert os.pwrite(fd, buffer.memory, offset) == RECORD_BYTES
        store.release(fd)
        checksum = _native.checksum(buffer.address, RECORD_BYTES, store.seed(extent, key))
    store.commit(0, extent, key, b"", checksum)


def is_right(store: SegmentStore, chunk: FoundChunk, generation: int = 1) -> bool:
    """False for a miss. What is accepted as the executor accepts it, and is wrong, ends the test."""
    fd, offset, expected = store.read_target(0, chunk.extent)
    with Buffer() as buffer:
        got = os.preadv(fd, [buffer.memory], offset)
        store.release(fd)
        seed = store.seed(chunk.extent, chunk.key)
        if got != RECORD_BYTES or _native.checksum(buffer.address, RECORD_BYTES, seed) != expected:
            return False
        assert buffer.memory[:] == payload(chunk.key, RECORD_BYTES, generation), f"wrong bytes accepted for {chunk}"
    return True


def right_keys(directory: Path, generation: int = 1, **other: Any) -> set[bytes]:
    """Reopen, read everything, and return the keys that came back right."""
    with opened(directory, generation, **other) as store:
        found = store.recover().items
        assert len({chunk.key for chunk in found}) == len(found)
        return {chunk.key for chunk in found if is_right(store, chunk, generation)}


class Buffer:
    """Memory for one record, page-aligned, whose address can be had."""

    def __enter__(self) -> Buffer:
        self.memory = mmap.mmap(-1, RECORD_BYTES)
        pin = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(pin)
        del pin
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.close()
