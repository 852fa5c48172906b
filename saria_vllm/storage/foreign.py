"""Other engines' sealed segments of our namespace: found by the scheduler half, read by the workers, never written and
never removed here.

An extent whose drive number is `drives * (1 + k) + d` lies in engine directory e<k> of drive d. A sealed segment never
changes, so who has it open reads right bytes even when its owner retires it. Only records of the generation that its
directory states are used, and none of a directory that was reset in its process: such KV does not belong to the weights
on disk. Whatever else is wrong reads as a miss, for the seed of a checksum holds the owner's store id.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from saria_vllm.errors import FormatError, StorageError
from saria_vllm.storage import format as fmt
from saria_vllm.storage.directories import (
    ENGINE_NAME,
    GENERATION_NAME,
    TOP_NAME,
    names_in,
    open_path,
    open_regular,
    read_small,
)
from saria_vllm.storage.namespace import ENGINES_MAX, parse_generation, store_id
from saria_vllm.storage.recovery import data_name, journal_name, segment_of_name
from saria_vllm.types import Extent, FoundChunk, GroupShape

FOUND_MAX = 4096
"""Chunks found in one look, but for the last segment's: indexing them holds up an engine step."""

KNOWN_MAX = 1024
"""Segments of which a worker remembers the index."""

_INDEX_END_BYTES = 16
"""Nothing but zeros there: the index was not written yet."""

Place = tuple[int, int]
"""(drive number, segment)."""


class _Sealed(NamedTuple):
    header: fmt.Header
    entries: dict[int, fmt.Entry]
    """By record number; of one generation, drops applied."""


class OthersFiles:
    """What other engines have sealed, as far as it was looked at. For one thread."""

    def __init__(
        self, paths: Sequence[str], namespace: str, own: int, ranks: int, shapes: Mapping[int, GroupShape]
    ) -> None:
        self._paths, self._namespace, self._own = tuple(paths), namespace, own
        self._ranks, self._shapes = ranks, shapes
        self._known: dict[Place, int] = {}
        """Segments that were read, and the generation of their records."""

    def look(self) -> tuple[list[FoundChunk], list[Place], bool]:
        """Chunks that every rank of another engine sealed since the last look, oldest segments first; the segments that
        went; and whether there is more."""
        found: list[FoundChunk] = []
        there: set[Place] = set()
        more = False
        for drive, engine, generation, segments in self._others():
            number = len(self._paths) * (1 + engine) + drive
            for segment in segments:
                place = (number, segment)
                if self._known.get(place, generation) != generation:
                    continue  # Gone first, for those who know it by its old records.
                there.add(place)
                if place not in self._known:
                    more = len(found) >= FOUND_MAX
                    chunks = None if more else self._read(place, engine, generation)
                    if chunks is not None:
                        self._known[place] = generation
                        found += chunks
        gone = [place for place in self._known if place not in there]
        for place in gone:
            del self._known[place]
        return found, gone, more

    def _others(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """(drive, engine, its generation, its segments) of all others on all drives."""
        for drive, path in enumerate(self._paths):
            try:
                with open_path(path, (TOP_NAME, self._namespace)) as fd:
                    engines = {int(name[1:]) for name in names_in(fd, ENGINE_NAME)} - {self._own}
            except (OSError, StorageError):
                continue
            for engine in sorted(engines):
                try:
                    listed = self._list(path, engine) if engine < ENGINES_MAX else None
                except (OSError, StorageError):
                    continue
                if listed is not None:
                    yield drive, engine, *listed

    def _list(self, path: str, engine: int) -> tuple[int, list[int]] | None:
        names = (TOP_NAME, self._namespace, f"e{engine}")
        with open_path(path, names) as fd:
            generation = _usable_generation(fd)
        if generation is None:
            return None
        segments: set[int] | None = None
        for rank in range(self._ranks):
            with open_path(path, (*names, f"r{rank}")) as fd:
                parsed = (segment_of_name(name) for name in os.listdir(fd))
                mine = {name[0] for name in parsed if name is not None and name[1] == "data"}
            segments = mine if segments is None else segments & mine
        return generation, sorted(segments or ())

    def _read(self, place: Place, engine: int, generation: int) -> list[FoundChunk] | None:
        """Chunks that all ranks have in a segment; None while it cannot be told."""
        path = self._paths[place[0] % len(self._paths)]
        ranks = []
        for rank in range(self._ranks):
            try:
                with open_path(path, (TOP_NAME, self._namespace, f"e{engine}", f"r{rank}")) as fd:
                    data_fd = open_regular(data_name(place[1]), os.O_RDONLY, fd)
                    try:
                        owner = store_id(self._namespace, engine, rank)
                        sealed = _read_sealed(fd, data_fd, place[1], owner, rank, self._shapes, generation)
                    finally:
                        os.close(data_fd)
            except (OSError, StorageError, FormatError):
                return None  # It goes, or is being made.
            if sealed is None:
                return None
            ranks.append(sealed)
        first, *others = ranks
        if any(other.header.group != first.header.group for other in others):
            return []
        return [
            FoundChunk(first.header.group, entry.key, entry.parent, Extent(*place, record))
            for record, entry in sorted(first.entries.items())
            if all(record in other.entries and other.entries[record].key == entry.key for other in others)
        ]


class _Known(NamedTuple):
    """What a worker keeps of another engine's segment."""

    identity: tuple[int, int]
    """Of the file."""
    header: fmt.Header
    generation: int
    checksums: array[int]
    """By record."""
    live: bytearray
    """By record: 1 where it may be used."""


class OthersRecords:
    """Reads one rank's records in other engines' segments. Safe to call from any thread.

    Args:
        directories: our own engine directories, by drive.
    """

    def __init__(self, directories: Sequence[str], rank: int, shapes: Mapping[int, GroupShape]) -> None:
        self._directories, self._rank, self._shapes = tuple(directories), rank, shapes
        self._known: OrderedDict[Place, _Known] = OrderedDict()
        """The least recently used first."""
        self._lock = threading.Lock()

    def open_record(self, group: int, extent: Extent, direct: bool) -> tuple[int, int, int]:
        """A new descriptor for the caller to close, byte offset and checksum of a record.

        Raises:
            StorageError: no such record, none that may be used, or its owner retired it.
            OSError: the file cannot be opened.
        """
        try:
            return self._open_record(group, extent, direct)
        except FileNotFoundError:
            raise StorageError(f"{extent} of another engine is gone") from None

    def _open_record(self, group: int, extent: Extent, direct: bool) -> tuple[int, int, int]:
        path, names, engine = self._where(extent)
        with open_path(path, (*names, f"r{self._rank}")) as fd:
            data_fd = open_regular(data_name(extent.segment), os.O_RDONLY | (os.O_DIRECT if direct else 0), fd)
            try:
                known = self._find(extent)
                if known is None or known.identity != _identity(data_fd):
                    known = self._learn(fd, extent, path, names, engine)
            except BaseException:
                os.close(data_fd)
                raise
        if known.header.group != group or extent.record >= len(known.live) or not known.live[extent.record]:
            os.close(data_fd)
            raise StorageError(f"{extent} of another engine holds no record that may be used")
        return data_fd, fmt.record_offset(known.header.record_bytes, extent.record), known.checksums[extent.record]

    def seed(self, extent: Extent, key: bytes) -> int:
        """Checksum seed of a record; no record's when its segment was not opened."""
        known = self._find(extent)
        if known is None:
            return 0
        return fmt.seed_of(known.header.store_id, key, known.generation, extent.segment, extent.record)

    def _find(self, extent: Extent) -> _Known | None:
        with self._lock:
            known = self._known.get(extent[:2])
            if known is not None:
                self._known.move_to_end(extent[:2])
            return known

    def _where(self, extent: Extent) -> tuple[str, tuple[str, str, str], int]:
        """Path, names below it, and number of the engine that an extent belongs to."""
        engine, drive = divmod(extent.drive, len(self._directories))
        rest, _ = os.path.split(self._directories[drive])
        rest, namespace = os.path.split(rest)
        return os.path.dirname(rest), (TOP_NAME, namespace, f"e{engine - 1}"), engine - 1

    def _learn(self, fd: int, extent: Extent, path: str, names: tuple[str, str, str], engine: int) -> _Known:
        with open_path(path, names) as engine_fd:
            generation = _usable_generation(engine_fd)
        if generation is None:
            raise StorageError(f"{path}/{'/'.join(names)}: of this process only")
        buffered_fd = open_regular(data_name(extent.segment), os.O_RDONLY, fd)
        try:
            owner, identity = store_id(names[1], engine, self._rank), _identity(buffered_fd)
            sealed = _read_sealed(fd, buffered_fd, extent.segment, owner, self._rank, self._shapes, generation)
        except FormatError as error:
            raise StorageError(f"{extent}: {error}") from None
        finally:
            os.close(buffered_fd)
        if sealed is None:
            raise StorageError(f"{extent}: not sealed")
        checksums, live = array("Q", bytes(8 * sealed.header.records_max)), bytearray(sealed.header.records_max)
        for record, entry in sealed.entries.items():
            checksums[record], live[record] = entry.checksum, 1
        known = _Known(identity, sealed.header, generation, checksums, live)
        with self._lock:
            self._known[extent[:2]] = known
            self._known.move_to_end(extent[:2])
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
        return known


def _identity(fd: int) -> tuple[int, int]:
    """Of a sealed file, which never changes: inode numbers come back, but not with the same time."""
    status = os.fstat(fd)
    return status.st_ino, status.st_mtime_ns


def _usable_generation(engine_fd: int) -> int | None:
    """The generation of an engine directory, None when nothing there may be used by others."""
    generation = parse_generation(read_small(engine_fd, GENERATION_NAME) or b"")
    return None if generation is None or generation.process_only else generation.number


def _read_sealed(
    directory_fd: int, data_fd: int, segment: int, owner: bytes, rank: int, shapes: Mapping[int, GroupShape],
    generation: int,
) -> _Sealed | None:  # fmt: skip
    """Header and usable entries of a segment file; None while it has no index.

    Raises:
        FormatError: not a file of this owner and rank for these shapes.
        OSError: as from pread(2).
    """
    header = fmt.parse_header(os.pread(data_fd, fmt.HEADER_BYTES, 0))
    shape = shapes.get(header.group)
    if (header.store_id, header.rank, header.segment) != (owner, rank, segment):
        raise FormatError("header: of another store, rank or segment")
    if shape is None or shape.record_bytes != header.record_bytes:
        raise FormatError(f"header: group {header.group} with records of {header.record_bytes} bytes is not ours")
    size = fmt.data_file_bytes(header.record_bytes, header.records_max)
    if size > fmt.SEGMENT_BYTES_MAX or os.fstat(data_fd).st_size != size:
        raise FormatError(f"file size {os.fstat(data_fd).st_size}, not {size}")
    if not any(os.pread(data_fd, _INDEX_END_BYTES, size - _INDEX_END_BYTES)):
        return None
    area = os.pread(data_fd, fmt.index_bytes(header.records_max), fmt.index_offset(header))
    try:
        entries = fmt.parse_index(area, header)
    except FormatError:
        return None
    usable = {entry.record: entry for entry in entries if entry.generation == generation}
    for entry in fmt.parse_journal(_journal(directory_fd, header), header):
        if not entry.key:
            usable.pop(entry.record, None)
    return _Sealed(header, usable)


def _journal(directory_fd: int, header: fmt.Header) -> bytes:
    try:
        fd = open_regular(journal_name(header.segment), os.O_RDONLY, directory_fd)
    except OSError:
        return b""
    try:
        return os.pread(fd, fmt.journal_bytes_max(header.records_max), 0)
    finally:
        os.close(fd)
