"""Reading back one rank directory of one drive: which segments and records are there (docs/format.md, Reopening)."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from saria_vllm.errors import FormatError
from saria_vllm.storage import format as fmt
from saria_vllm.storage.directories import open_regular
from saria_vllm.types import GroupShape

SEGMENT_ID_END = 2**31 - 2**20
"""Segment ids are below this: the index keeps them in 32 bits. A file with a higher one is not ours."""

AHEAD = 256
"""Segments that a drive is asked for before they are read: a cold one takes its time for each. Threads that wait for it
would take turns with the one that parses, which costs more than the reads."""

_ROOM_BYTES = 8 << 20
"""What is read lies in pieces of memory of this size, if there is so much: small ones are had from the kernel page by
page."""

_NAME = re.compile(r"seg-([0-9a-f]{16})\.(data|journal)")
_BAD_FILE = (errno.EIO, errno.ELOOP, errno.ENXIO, errno.ENOENT)


def data_name(segment: int) -> str:
    """File name of a segment's data."""
    return f"seg-{segment:016x}.data"


def journal_name(segment: int) -> str:
    """File name of a segment's journal."""
    return f"seg-{segment:016x}.journal"


def segment_of_name(name: str) -> tuple[int, str] | None:
    """Segment id and "data" or "journal" of a file name, None when it is not one of ours."""
    match = _NAME.fullmatch(name)
    return (int(match[1], 16), match[2]) if match and int(match[1], 16) < SEGMENT_ID_END else None


class Expected(NamedTuple):
    """What a file must say to be one of this store's."""

    store_id: bytes
    rank: int
    shapes: Mapping[int, GroupShape]
    generation: int
    segment_bytes: int


@dataclass(slots=True)
class ScannedSegment:
    """A segment file with at least one usable record."""

    header: fmt.Header
    rows: fmt.EntryRows
    """Its entries by record number; only of the expected generation, drops applied."""
    sealed: bool
    journal_bytes: int
    """Length of the journal's valid part; 0 when there is none."""


@dataclass(slots=True)
class Scan:
    """What a rank directory holds."""

    segments: dict[int, ScannedSegment] = field(default_factory=dict)
    highest_segment: int = -1
    """Highest segment id of any file with our name, usable or not; -1 when there is none."""
    highest_sequence: int = 0
    useless: int = 0
    """Segments without a usable record, which a reset or a crash leaves."""
    notes: list[str] = field(default_factory=list)
    """Files that were dropped or left alone, and why."""


def scan_directory(directory: str, expected: Expected, segments_max: int) -> Scan:
    """Find the usable segments of a rank directory, unlinking files with our names that are of no use.

    Raises:
        OSError: the directory cannot be listed, or we are short of descriptors, memory or rights. A file that
            cannot be read is dropped.
    """
    scan, areas = Scan(), _areas(expected)
    data, journals = _list(directory, scan)
    newest = sorted(data, reverse=True)
    room = _Room(min(_ROOM_BYTES, len(newest) * max(areas.values())))
    for segment in newest[:AHEAD]:
        _announce(directory, segment, areas)
    for at, segment in enumerate(newest):
        if len(scan.segments) == segments_max:
            _discard(directory, segment, f"more than {segments_max} segments", scan)
            continue
        for next_one in newest[at + AHEAD : at + AHEAD + 1]:
            _announce(directory, next_one, areas)
        read = _read(directory, segment in journals, expected, segment, room)
        _take(directory, segment, read, expected.generation, scan)
    for segment in journals - data:
        _discard(directory, segment, "a journal without data", scan)
    if scan.useless:
        scan.notes.append(f"{directory}: {scan.useless} segment(s) with nothing to use, as of before a reset, removed")
    return scan


def discard_segment(directory: str, segment: int) -> None:
    """Unlink a segment's files, data first. A directory that has the name of one is not ours, and stays.

    Raises:
        OSError: they are still there.
    """
    for name in (data_name(segment), journal_name(segment)):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(os.path.join(directory, name))


def _list(directory: str, scan: Scan) -> tuple[set[int], set[int]]:
    data: set[int] = set()
    journals: set[int] = set()
    with os.scandir(directory) as listing:
        for item in listing:
            parsed = segment_of_name(item.name)
            if parsed is None and _NAME.fullmatch(item.name):
                scan.notes.append(f"{item.name}: no segment of ours has such a number; left alone")
            if parsed is not None and not item.is_dir(follow_symlinks=False):
                (data if parsed[1] == "data" else journals).add(parsed[0])
    scan.highest_segment = max(data | journals, default=-1)
    return data, journals


def _discard(directory: str, segment: int, why: str, scan: Scan) -> None:
    """Without a reason there is nothing to say unless it cannot be done."""
    problems = [why] if why else []
    try:
        discard_segment(directory, segment)
    except OSError as error:
        problems.append(f"cannot be unlinked: {error.strerror}")
    if problems:
        scan.notes.append(f"{data_name(segment)}: {'; '.join(problems)}")


class _Room:
    """Memory to read into, cut from large pieces. What was cut off is never used again."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._left = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        if nbytes > len(self._left):
            self._left = np.empty(max(nbytes, self._piece_bytes), np.uint8).data
        taken, self._left = self._left[:nbytes], self._left[nbytes:]
        return taken


def _areas(expected: Expected) -> dict[int, int]:
    """Bytes of the index area by bytes of the data file, as new segments have them."""
    sizes = {shape.record_bytes for shape in expected.shapes.values()}
    records = {size: fmt.records_per_segment(size, expected.segment_bytes) for size in sizes}
    return {fmt.data_file_bytes(size, most): fmt.index_bytes(most) for size, most in records.items()}


def _announce(directory: str, segment: int, areas: Mapping[int, int]) -> None:
    """Have the kernel begin to read a segment's header and index, and wait for neither. Only a hint."""
    with contextlib.suppress(OSError):  # Reading it will say why.
        fd = open_regular(os.path.join(directory, data_name(segment)), os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            if size in areas:
                os.posix_fadvise(fd, 0, fmt.HEADER_BYTES, os.POSIX_FADV_WILLNEED)
                os.posix_fadvise(fd, size - areas[size], areas[size], os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


class _Bytes(NamedTuple):
    """What is read of a segment."""

    header: fmt.Header
    area: memoryview
    journal: bytes


def _read(
    directory: str, has_journal: bool, expected: Expected, segment: int, room: _Room
) -> _Bytes | FormatError | OSError:
    """Read all but the payloads."""
    try:
        fd = open_regular(os.path.join(directory, data_name(segment)), os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # Nothing is to be read beside what is asked for.
            header = _read_header(fd, segment, expected)
            area = _read_area(fd, header, room)
        finally:
            os.close(fd)
        path = os.path.join(directory, journal_name(segment))
        return _Bytes(header, area, _read_journal(path, header) if has_journal else b"")
    except (FormatError, OSError) as error:
        return error


def _read_area(fd: int, header: fmt.Header, room: _Room) -> memoryview:
    """The index area, or what there is of it."""
    area, had = room.take(fmt.index_bytes(header.records_max)), 0
    while had < len(area) and (more := os.preadv(fd, [area[had:]], fmt.index_offset(header) + had)):
        had += more
    return area[:had]


def _take(directory: str, segment: int, read: _Bytes | FormatError | OSError, generation: int, scan: Scan) -> None:
    """Add a segment to the scan, or discard it."""
    if isinstance(read, OSError):
        if read.errno not in _BAD_FILE:
            raise read
        _discard(directory, segment, read.strerror or str(read), scan)
        return
    if isinstance(read, FormatError):
        _discard(directory, segment, str(read), scan)
        return
    found = _parse(read, generation)
    if found is None:
        scan.useless += 1
        _discard(directory, segment, "", scan)
        return
    scan.highest_sequence = max(scan.highest_sequence, int(found.rows["sequence"].max()))
    scan.segments[segment] = found


def _parse(read: _Bytes, generation: int) -> ScannedSegment | None:
    """The segment, None when it has no usable record."""
    header, sealed = read.header, True
    try:
        rows = fmt.index_rows(read.area, header)
    except FormatError:
        rows, sealed = np.empty(0, fmt.ENTRY_ROW), False
    journal = fmt.journal_rows(read.journal, header) if read.journal else rows[:0]
    if journal.size:
        rows = np.concatenate((rows, journal))
    live = _live(rows, header.records_max, generation)
    return ScannedSegment(header, live, sealed, journal.nbytes) if live.size else None


def _read_header(fd: int, segment: int, expected: Expected) -> fmt.Header:
    header = fmt.parse_header(_pread(fd, fmt.HEADER_BYTES, 0))
    if (header.store_id, header.rank, header.segment) != (expected.store_id, expected.rank, segment):
        raise FormatError("header: of another store, rank or segment")
    shape = expected.shapes.get(header.group)
    if shape is None or shape.record_bytes != header.record_bytes:
        raise FormatError(f"header: group {header.group} with records of {header.record_bytes} bytes is not ours")
    if fmt.segment_cost_bytes(header.record_bytes, header.records_max) > expected.segment_bytes:
        raise FormatError("header: larger than a segment may be with this ssd_capacity and so many drives")
    size = fmt.data_file_bytes(header.record_bytes, header.records_max)
    if os.fstat(fd).st_size != size:
        raise FormatError(f"file size {os.fstat(fd).st_size}, not {size}")
    return header


def _read_journal(path: str, header: fmt.Header) -> bytes:
    try:
        fd = open_regular(path, os.O_RDONLY)
        try:
            return _pread(fd, fmt.journal_bytes_max(header.records_max), 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _BAD_FILE:
            raise
        return b""


def _live(rows: fmt.EntryRows, records_max: int, generation: int) -> fmt.EntryRows:
    """By record number, the last word on each that is of this generation or a drop, but for what was dropped."""
    records, ours = rows["record"], rows["generation"] == generation
    if ours.all() and rows["key_bytes"].all() and (records[1:] > records[:-1]).all():
        return rows
    says = (ours | (rows["key_bytes"] == 0)).nonzero()[0]
    last = np.full(records_max, -1)
    last[records[says]] = says
    last = last[last >= 0]
    last = last[rows["key_bytes"][last] > 0]
    live: fmt.EntryRows = rows.view(f"V{fmt.ENTRY_BYTES}")[last].view(fmt.ENTRY_ROW)  # By field it would be slow.
    return live


def _pread(fd: int, nbytes: int, offset: int) -> bytes:
    """All of `nbytes` or what there is to the end of the file."""
    parts = []
    while nbytes > 0:
        part = os.pread(fd, nbytes, offset)
        if not part:
            break
        parts.append(part)
        nbytes -= len(part)
        offset += len(part)
    return b"".join(parts)
