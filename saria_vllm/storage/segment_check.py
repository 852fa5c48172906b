"""What is wrong with one segment: its files as they are, every entry, every payload. Changes nothing but in `drop`.

Reading sizes nothing by what a file says: a header counts only when the file's real size agrees and no segment is that
large otherwise.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from saria_vllm import _native
from saria_vllm.errors import FormatError
from saria_vllm.storage import format as fmt
from saria_vllm.storage.directories import open_regular, remove
from saria_vllm.storage.drives import read_aligned, write_whole
from saria_vllm.storage.recovery import data_name, journal_name

READS_MAX = 8
READ_BYTES_MAX = 256 << 20
"""Payload reads in flight: at most so many, and so many bytes unless one record is larger."""

UNLINK, TRUNCATE, RECORD, NOTHING = "unlink", "truncate", "record", ""
"""What dropping a problem does: remove both files, end the journal where it is whole, journal a drop, or nothing."""

WORTH_BYTES = 1 << 20
"""Of payload for each thread that reads it."""

_NO_READER = (errno.EIO, errno.ELOOP, errno.ENXIO)
"""Files that fail so are unlinked by recovery."""


class Problem(NamedTuple):
    """One thing that is wrong."""

    kind: str
    name: str
    """Of the file, in its directory."""
    record: int | None
    what: str
    drop: str


class Expected(NamedTuple):
    """What the files of a rank directory must say."""

    store_id: bytes
    rank: int
    record_bytes: Mapping[int, int] | None
    """By group; None where the namespace does not tell."""
    generation: int | None
    """The current one; None where it is not known, and then any will do."""
    owner: int
    """User id."""


@dataclass(slots=True)
class SegmentView:
    """A segment's files, without a look at payloads."""

    segment: int
    nbytes: int = 0
    """On disk, data and journal."""
    modified: float = 0.0
    read: float = 0.0
    """Seconds since the epoch of the last write and, as far as the file system keeps it, the last read."""
    header: fmt.Header | None = None
    sealed: bool = False
    live: dict[int, fmt.Entry] = field(default_factory=dict)
    """By record number: what a reader would use."""
    stale: int = 0
    """Entries of other generations."""
    generation_max: int = 0
    sequence_max: int = 0
    journal_bytes: int = 0
    """Of the journal's valid part."""
    problems: list[Problem] = field(default_factory=list)


def look(rank_fd: int, segment: int, expected: Expected) -> SegmentView | None:
    """Read a segment's structure; None when it has no data file (any more).

    Raises:
        OSError: as from read(2), but for errors of the drive.
    """
    with _opened(rank_fd, segment, expected) as (view, _):
        return view


def check(rank_fd: int, segment: int, expected: Expected) -> tuple[SegmentView | None, int]:
    """`look`, and every payload that a reader would use: bad ones are among the problems and no longer live. Also how
    many bytes of payload were read.

    Raises:
        OSError: as from `look`.
    """
    with _opened(rank_fd, segment, expected) as (view, fd):
        if view is None or view.header is None:
            return view, 0
        read = len(view.live) * view.header.record_bytes
        for record, what in sorted(_bad_payloads(fd, view.header, view.live.values())):
            view.problems.append(Problem("record", data_name(segment), record, what, RECORD))
            del view.live[record]
        return view, read


def drop(rank_fd: int, view: SegmentView, problems: Iterable[Problem]) -> None:
    """Do what the problems' `drop` says, and nothing else. The lease of the engine directory must be held.

    Raises:
        OSError: not all was done.
    """
    problems = list(problems)
    if any(problem.drop == UNLINK for problem in problems):
        for name in (data_name(view.segment), journal_name(view.segment)):
            remove(rank_fd, name)
        return
    records = [problem.record for problem in problems if problem.drop == RECORD and problem.record is not None]
    if not records and not any(problem.drop == TRUNCATE for problem in problems):
        return
    assert view.header is not None
    salt = fmt.salt_of(view.header)
    generation = view.generation_max
    entries = [
        fmt.pack_entry(fmt.Entry(record, generation, 0, view.sequence_max + 1 + at, b"", b""), salt)
        for at, record in enumerate(records)
    ]
    fd = open_regular(journal_name(view.segment), os.O_WRONLY | (os.O_CREAT if records else 0), rank_fd)
    try:
        os.ftruncate(fd, view.journal_bytes)  # Else entries behind damaged ones would count again.
        if entries:
            write_whole(fd, b"".join(entries), view.journal_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)


def check_status(name: str, status: os.stat_result, owner: int) -> list[Problem]:
    """What is wrong with a file's or directory's mode and owner."""
    problems = []
    if stat.S_IMODE(status.st_mode) & 0o077:
        wanted = "0700" if stat.S_ISDIR(status.st_mode) else "0600"
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        problems.append(Problem("mode", name, None, f"mode {mode}: others may use it; chmod {wanted}", NOTHING))
    if status.st_uid != owner:
        problems.append(Problem("owner", name, None, f"belongs to user {status.st_uid}, not {owner}", NOTHING))
    return problems


def describe(error: OSError) -> tuple[str, str]:
    """Kind of problem, and words, for a file that cannot be opened or read."""
    if error.errno == errno.ELOOP:
        return "symlink", "a symlink, which no reader follows"
    if error.errno == errno.ENXIO:
        return "special", "no regular file"
    return "unreadable", f"cannot be read: {error.strerror or error}"


@contextmanager
def _opened(rank_fd: int, segment: int, expected: Expected) -> Iterator[tuple[SegmentView | None, int]]:
    """A segment's structure and the descriptor of its data, which is closed afterwards; -1 where there is none."""
    name = data_name(segment)
    view = SegmentView(segment)
    try:
        fd = _open_data(rank_fd, name)
    except FileNotFoundError:
        yield None, -1
        return
    except OSError as error:
        kind, what = describe(error)
        droppable = error.errno in _NO_READER and not _is_directory(rank_fd, name)
        view.problems.append(Problem(kind, name, None, what, UNLINK if droppable else NOTHING))
        yield view, -1
        return
    try:
        try:
            _read_structure(fd, rank_fd, view, expected)
        except FormatError as error:
            kind, _, what = str(error).partition(": ")
            view.header = None
            # A file of another version may have another reader, if its namespace is not known to be of ours.
            droppable = kind != "version" or expected.record_bytes is not None
            view.problems.append(Problem(kind, name, None, what, UNLINK if droppable else NOTHING))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            view.header = None
            view.problems.append(Problem("unreadable", name, None, describe(error)[1], UNLINK))
        yield view, fd
    finally:
        os.close(fd)


def _open_data(rank_fd: int, name: str) -> int:
    """Descriptor past the page cache where that works, and without a trace in the access time."""
    for extra in (os.O_DIRECT | os.O_NOATIME, os.O_DIRECT, os.O_NOATIME):
        try:
            return open_regular(name, os.O_RDONLY | extra, rank_fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
                raise
    return open_regular(name, os.O_RDONLY, rank_fd)


def _read_structure(fd: int, rank_fd: int, view: SegmentView, expected: Expected) -> None:
    """Fill a view.

    Raises:
        FormatError: no reader would accept the file; "kind: what".
        OSError: it cannot be read.
    """
    status = os.fstat(fd)
    view.nbytes, view.modified, view.read = status.st_blocks * 512, status.st_mtime, status.st_atime
    view.problems += check_status(data_name(view.segment), status, expected.owner)
    header = view.header = _read_header(fd, view.segment, status.st_size, expected)
    journal, has_journal = _read_journal(rank_fd, view, header, expected.owner)
    area = read_aligned(fd, fmt.index_bytes(header.records_max), fmt.index_offset(header))
    try:
        entries, view.sealed = fmt.parse_index(area, header), True
    except FormatError as error:
        entries = []
        # A seal that was interrupted leaves a part of an index, beside a journal that has everything.
        if any(area) and not any(entry.key for entry in journal):
            raise FormatError(f"index: {str(error).partition(': ')[2]}, and no journal that has its records") from None
        if not has_journal:
            raise FormatError("index: there is none, and no journal") from None
    for entry in (*entries, *journal):
        if not entry.key:
            view.live.pop(entry.record, None)
        elif expected.generation in (None, entry.generation):
            view.live[entry.record] = entry
        else:
            view.stale += 1
        view.generation_max = max(view.generation_max, entry.generation)
        view.sequence_max = max(view.sequence_max, entry.sequence)


def _read_header(fd: int, segment: int, size: int, expected: Expected) -> fmt.Header:
    try:
        header = fmt.parse_header(read_aligned(fd, fmt.HEADER_BYTES, 0))
    except FormatError as error:
        what = str(error).removeprefix("header: ")
        raise FormatError(f"{'version' if what.startswith('format version') else 'header'}: {what}") from None
    if (header.store_id, header.rank, header.segment) != (expected.store_id, expected.rank, segment):
        raise FormatError("store: its header is of another engine, rank or segment")
    record_bytes = None if expected.record_bytes is None else expected.record_bytes.get(header.group, 0)
    if record_bytes not in (None, header.record_bytes):
        raise FormatError(
            f"group: group {header.group} of this namespace has no records of {header.record_bytes} bytes"
        )
    if fmt.segment_cost_bytes(header.record_bytes, header.records_max) > fmt.SEGMENT_BYTES_MAX:
        raise FormatError(f"size: {header.records_max} records of {header.record_bytes} bytes are no segment")
    wanted = fmt.data_file_bytes(header.record_bytes, header.records_max)
    if size != wanted:
        raise FormatError(f"size: {size} bytes, not {wanted}")
    return header


def _read_journal(rank_fd: int, view: SegmentView, header: fmt.Header, owner: int) -> tuple[list[fmt.Entry], bool]:
    """The valid entries of a segment's journal, and whether there is one."""
    name = journal_name(view.segment)
    try:
        fd = open_regular(name, os.O_RDONLY, rank_fd)
    except FileNotFoundError:
        return [], False
    except OSError as error:
        kind, what = describe(error)
        view.problems.append(Problem(kind, name, None, what, NOTHING))
        return [], True
    try:
        status, most = os.fstat(fd), fmt.journal_bytes_max(header.records_max)
        data = read_aligned(fd, most, 0) if status.st_size else b""
    finally:
        os.close(fd)
    view.nbytes += status.st_blocks * 512
    view.modified = max(view.modified, status.st_mtime)
    view.problems += check_status(name, status, owner)
    entries = fmt.parse_journal(data, header)
    view.journal_bytes = len(entries) * fmt.ENTRY_BYTES
    if status.st_size > view.journal_bytes:
        what = f"{status.st_size - view.journal_bytes} bytes from entry {len(entries)} on that no reader uses"
        view.problems.append(Problem("journal", name, None, what, TRUNCATE))
    return entries, True


def _bad_payloads(fd: int, header: fmt.Header, entries: Iterable[fmt.Entry]) -> list[tuple[int, str]]:
    """Records whose bytes are not those that their entries promise, and why. Several are read at once."""
    wanted = sorted(entries, key=lambda entry: entry.record)
    left = iter(wanted)  # Advancing it is atomic.
    reads = min(READS_MAX, READ_BYTES_MAX // header.record_bytes, len(wanted) * header.record_bytes // WORTH_BYTES)
    if reads <= 1:
        return _check_payloads(fd, header, left)
    with ThreadPoolExecutor(reads) as pool:
        parts = [pool.submit(_check_payloads, fd, header, left) for _ in range(reads)]
    return [bad for part in parts for bad in part.result()]


def _check_payloads(fd: int, header: fmt.Header, entries: Iterator[fmt.Entry]) -> list[tuple[int, str]]:
    nbytes, bad = header.record_bytes, []
    with mmap.mmap(-1, nbytes) as buffer:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        for entry in entries:
            try:
                got = os.preadv(fd, [buffer], fmt.record_offset(nbytes, entry.record))
            except OSError as error:
                bad.append((entry.record, describe(error)[1]))
                continue
            seed = fmt.seed_of(header.store_id, entry.key, entry.generation, header.segment, entry.record)
            if got != nbytes:
                bad.append((entry.record, f"short read: {got} of {nbytes} bytes"))
            elif _native.checksum(address, nbytes, seed) != entry.checksum:
                bad.append((entry.record, "checksum mismatch: not the bytes that were written here for this key"))
    return bad


def _is_directory(directory_fd: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
