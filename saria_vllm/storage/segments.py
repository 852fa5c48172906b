"""One rank's segment files over all drives of an engine directory.

Primitives, in the order of a record's life:

    write_target(group, extent)      where to write; makes and allocates the segment file when it is its first record
    seed(extent, key)                what to seed the checksum with
    commit(group, extent, ...)       after the write ended: the record can be read from now on
    abandon(group, extent)           instead of commit: the record will never be written
    read_target(group, extent)       where to read and what the checksum must be
    release(descriptor)              the read or write that a target was asked for has ended, however it did
    forget(extent)                   the record failed its check
    retire(drive, segment)           the segment goes

A record is written once. When all records of a segment are committed or abandoned it is sealed. Two locks: the
store's, held for look-ups only, and each segment's, held while its file is made, its journal appended or its index
written. They nest in one order, segment before store. No lock is held while payload moves.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping

import numpy as np

from saria_vllm.errors import StorageError
from saria_vllm.storage import format as fmt
from saria_vllm.storage.drives import Descriptors, Drive
from saria_vllm.storage.foreign import OthersRecords
from saria_vllm.storage.recovery import (
    SEGMENT_ID_END,
    Expected,
    Scan,
    ScannedSegment,
    discard_segment,
    scan_directory,
)
from saria_vllm.storage.segment import FREE, GONE, LIVE, WRITING, FileState, Segment
from saria_vllm.types import KEY_BYTES_MAX, Extent, FoundChunks, GroupShape, OpenSsd

NOTES_MAX = 100

_FOUND_COLUMNS = {
    "keys": "key", "key_bytes": "key_bytes", "parents": "parent", "parent_bytes": "parent_bytes",
    "sequence": "sequence",
}  # fmt: skip
"""Columns of `FoundChunks`, and the fields of an entry that they are made of; the sequence tells which is newer."""

READ_FDS_MAX = min(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
"""Sealed segments whose files stay open when nobody reads them; the least recently read is closed first."""


class SegmentStore:
    """Reads, writes and finds one rank's records. Safe to call from any thread.

    A drive that cannot be opened is left out: its extents raise StorageError and `notes` says why.

    Raises:
        StorageError: no drive can be used.
    """

    def __init__(self, open: OpenSsd, rank: int, shapes: Mapping[int, GroupShape], store_id: bytes) -> None:
        assert len(store_id) == fmt.STORE_ID_BYTES
        self._open = open
        self._rank = rank
        self._shapes = dict(shapes)
        self._store_id = store_id
        self._generation = open.generation
        self._lock = threading.Lock()
        self._segments: dict[tuple[int, int], Segment] = {}
        self._next_segment_id = 0
        self._sequence = 0
        self._read_fds: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._left: set[Segment] = set()
        """Retired segments whose files could not be unlinked."""
        self._closed = False
        self.notes: list[str] = []
        """What the log should say once: buffered fallbacks, drives left out, files dropped by `recover`."""
        self.drives: tuple[Drive | None, ...] = tuple(self._open_drive(path) for path in open.directories)
        if not any(self.drives):
            raise StorageError("; ".join(self.notes) or "no SSD directories")
        self._descriptors = Descriptors()
        self._others = OthersRecords(open.directories, rank, self._shapes)

    @property
    def reading(self) -> bool:
        """Whether a descriptor is yet to be released."""
        return self._descriptors.in_use > 0

    @property
    def next_segment_id(self) -> int:
        """One above the highest segment id seen on any drive of this store."""
        with self._lock:
            return self._next_segment_id

    def records_max(self, group: int) -> int:
        """Records of a new segment of this group; 0 when not one fits."""
        return fmt.records_per_segment(self._shapes[group].record_bytes, self._open.segment_bytes)

    def recover(self) -> FoundChunks:
        """Find what an earlier process left: the newest record of each chunk. To be called once, before anything else.

        A drive that cannot be listed is left out and named in `notes`. Never raises for what is on disk.
        """
        scans: dict[int, Scan] = {}
        for index, drive in enumerate(self.drives):
            if drive is not None:
                scan = self._scan_drive(index, drive)
                if scan is not None:
                    scans[index] = scan
        found = _newest(scans)
        with self._lock:
            for scan in scans.values():
                self._next_segment_id = max(self._next_segment_id, scan.highest_segment + 1)
                self._sequence = max(self._sequence, scan.highest_sequence)
        for index, scan in scans.items():
            self.notes += scan.notes
            for scanned in scan.segments.values():
                self._adopt(index, scanned)
        return found

    def write_target(self, group: int, extent: Extent) -> tuple[int, int]:
        """File descriptor and byte offset for a record's payload of `record_bytes`. Ask once per record, and
        `release` the descriptor when the write has ended.

        Raises:
            StorageError: the extent cannot be written: no such drive or group, record out of range, written before,
                another group's or a sealed segment, or one segment too many.
            OSError: the segment's file cannot be made (ENOSPC, EIO, ...); the next record of it tries again.
        """
        segment = self._segment_to_write(group, extent)
        with segment.file_lock:
            if segment.state == FileState.NEW:
                self._clear_away(extent.drive)  # What stays would come on top of the cap.
                segment.create()
            with self._lock:
                if segment.state != FileState.OPEN or segment.states[extent.record] != FREE:
                    raise StorageError(f"{extent} cannot be written: written before, or its segment is not open")
                segment.states[extent.record] = WRITING
                segment.generations[extent.record] = self._generation
                self._descriptors.use(segment.data_fd)
            return segment.data_fd, fmt.record_offset(segment.header.record_bytes, extent.record)

    def commit(self, group: int, extent: Extent, key: bytes, parent: bytes, checksum: int) -> None:
        """The payload was written in full: journal it, and let it be read.

        Raises:
            StorageError: the record is not being written, or a reset or retire came in between: the record is lost.
            OSError: the journal cannot be appended; the record is not visible: abandon it.
        """
        assert 1 <= len(key) <= KEY_BYTES_MAX
        assert len(parent) <= KEY_BYTES_MAX
        segment = self._find(group, extent)
        with segment.file_lock:
            entry = self._entry_to_commit(segment, extent, key, parent, checksum)
            segment.append(entry)
            with self._lock:
                segment.checksums[extent.record] = checksum
                segment.entries[extent.record] = entry
                segment.finish(extent.record, LIVE)
            self._seal_if_finished(segment)

    def abandon(self, group: int, extent: Extent) -> None:
        """A record that will never be written, or whose write or commit failed. Unknown extents are a no-op."""
        segment = self._lookup(extent)
        if segment is None or segment.header.group != group or not segment.has(extent.record):
            return
        with segment.file_lock:
            with self._lock:
                begun = segment.state in (FileState.NEW, FileState.OPEN)
                if begun and segment.states[extent.record] in (FREE, WRITING):
                    segment.finish(extent.record, GONE)
            self._seal_if_finished(segment)

    def read_target(self, group: int, extent: Extent) -> tuple[int, int, int]:
        """File descriptor, byte offset and checksum of a committed record. The descriptor stays open, on this file,
        until `release`.

        Raises:
            StorageError: no such record, or one of another generation.
            OSError: the file cannot be opened.
        """
        if extent.drive >= len(self.drives):
            return self._others_target(group, extent)
        segment = self._find(group, extent)
        offset = fmt.record_offset(segment.header.record_bytes, extent.record)
        fd = self._fd_to_read(segment, extent)
        if fd < 0:
            fd = self._open_to_read(segment, extent)
        return fd, offset, segment.checksums[extent.record]

    def before_close(self, tell: Callable[[int], None]) -> None:
        """Have each descriptor of a target told before it is closed, by the thread that does."""
        self._descriptors.before_close(tell)

    def release(self, fd: int) -> None:
        """The transfer through a target's descriptor has ended. Once for each `read_target` and `write_target` that
        returned; never while it may still move bytes."""
        self._descriptors.release(fd)

    def seed(self, extent: Extent, key: bytes) -> int:
        """Checksum seed of a record: of the generation in which it was or is being written, else the current one."""
        if extent.drive >= len(self.drives):
            return self._others.seed(extent, key)
        with self._lock:
            generation = self._generation
            segment = self._segments.get(extent[:2])
            if segment is not None and segment.has(extent.record) and segment.states[extent.record] in (WRITING, LIVE):
                generation = segment.generations[extent.record]
        return fmt.seed_of(self._store_id, key, generation, extent.segment, extent.record)

    def forget(self, extent: Extent) -> None:
        """Drop a record that failed its check. Unknown extents are a no-op.

        Tries to make that last; an error there costs a second failed read after a restart, never wrong bytes.
        """
        segment = self._lookup(extent)
        if segment is None or not segment.has(extent.record):
            return
        with segment.file_lock:
            with self._lock:
                if segment.states[extent.record] != LIVE:
                    return
                segment.states[extent.record] = GONE
                segment.entries.pop(extent.record, None)
                self._sequence += 1
                entry = fmt.Entry(extent.record, self._generation, 0, self._sequence, b"", b"")
            try:
                segment.append_drop(entry)
            except OSError:
                pass  # documented: only a courtesy to the next process

    def retire(self, drive: int, segment: int) -> None:
        """Close and unlink a segment. Unknown ones are a no-op. No payload should be moving in it: who still reads or
        writes does so in a file without a name, which goes with the last `release`.

        Raises:
            OSError: files are still there, of this segment or of one before; it is unknown all the same. No segment is
                made on this drive until they are gone.
        """
        found = self._lookup(Extent(drive, segment, 0))
        if found is None:
            return
        with found.file_lock:
            with self._lock:
                if self._segments.pop((drive, segment), None) is None:
                    return
                found.state = FileState.ENDED
                fd = self._take_fd(found)
            self._descriptors.close(fd)
            found.close_journal()
            self._left.add(found)
            self._clear_away(drive)

    def seal(self, drive: int, segment: int) -> None:
        """End a segment early: records that are free or being written never will be. Unknown ones are a no-op.
        Where the index cannot be written the segment is read-only all the same and its journal stays."""
        found = self._lookup(Extent(drive, segment, 0))
        if found is None:
            return
        with found.file_lock:
            if found.state == FileState.OPEN:
                with self._lock:
                    found.settle()
                self._seal(found)

    def set_generation(self, generation: int) -> None:
        """From now on this is the current generation; records of any other can no longer be read."""
        with self._lock:
            self._generation = generation

    def is_there(self, drive: int) -> bool:
        """Whether our directory on a drive is still where it was: somebody may have removed, moved or replaced it."""
        path = self.directory(drive)
        return os.path.isdir(path) and not os.path.islink(path)

    def directory(self, drive: int) -> str:
        """Ours on a drive, or on the drive of another engine's extents."""
        return os.path.join(self._open.directories[drive % len(self.drives)], f"r{self._rank}")

    def close(self) -> None:
        """Seal what is open (one index write and one sync each), close all files. Idempotent. No payload may be
        moving any more. A segment that cannot be sealed keeps its journal."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            segments = list(self._segments.values())
        for segment in segments:
            self.seal(*segment.place)
        with self._lock:
            for segment in segments:
                segment.state = FileState.ENDED
                self._descriptors.close(segment.data_fd)
            self._segments.clear()
            self._read_fds.clear()
        self._descriptors.close_all()

    # Look-ups

    def _lookup(self, extent: Extent) -> Segment | None:
        with self._lock:
            return self._segments.get(extent[:2])

    def _find(self, group: int, extent: Extent) -> Segment:
        segment = self._lookup(extent)
        if segment is None or segment.header.group != group:
            raise StorageError(f"{extent} is not a segment of group {group}")
        if not segment.has(extent.record):
            raise StorageError(f"{extent}: records end at {segment.header.records_max}")
        return segment

    def _drive(self, index: int) -> Drive:
        drive = self.drives[index] if 0 <= index < len(self.drives) else None
        if drive is None:
            raise StorageError(f"drive {index} cannot be used")
        return drive

    # Opening and recovery

    def _open_drive(self, engine_directory: str) -> Drive | None:
        directory = os.path.join(engine_directory, f"r{self._rank}")
        try:
            if os.path.islink(directory) or os.path.islink(engine_directory):
                raise StorageError(f"{directory}: a symlink, which is not followed")
            if not os.path.lexists(directory):
                os.mkdir(directory, 0o700)
            if not os.path.isdir(directory):
                raise StorageError(f"{directory}: no directory")
            drive = Drive(directory)
        except (OSError, StorageError) as error:
            self.notes.append(f"drive left out: {error}")
            return None
        if drive.note:
            self.notes.append(drive.note)
        return drive

    def _scan_drive(self, index: int, drive: Drive) -> Scan | None:
        expected = Expected(self._store_id, self._rank, self._shapes, self._generation, self._open.segment_bytes)
        try:
            return scan_directory(drive.directory, expected, self._open.segments_max)
        except OSError as error:
            self.notes.append(f"drive left out: {error}")
            self.drives = tuple(None if at == index else kept for at, kept in enumerate(self.drives))
            return None

    def _adopt(self, number: int, scanned: ScannedSegment) -> None:
        drive, header = self._drive(number), scanned.header
        if not scanned.rows.size:
            try:
                discard_segment(drive.directory, header.segment)
            except OSError as error:
                self._note(f"segment {header.segment:x} cannot be unlinked: {error}")
            return
        segment = Segment(number, drive, header)
        segment.adopt(scanned.rows, scanned.journal_bytes)
        with self._lock:
            self._segments[segment.place] = segment
        if not scanned.sealed:
            try:
                segment.reopen(scanned.rows)
            except OSError as error:
                self._note(f"segment {header.segment:x} cannot be sealed, its journal stays: {error}")
                return
            self._seal(segment)

    def _note(self, text: str) -> None:
        if len(self.notes) < NOTES_MAX:
            self.notes.append(text)

    # Writing

    def _segment_to_write(self, group: int, extent: Extent) -> Segment:
        drive = self._drive(extent.drive)
        if group not in self._shapes:
            raise StorageError(f"group {group} is not known")
        with self._lock:
            if extent[:2] not in self._segments:
                self._new_segment(group, extent, drive)
        return self._find(group, extent)

    def _new_segment(self, group: int, extent: Extent, drive: Drive) -> None:
        """Register a segment whose file is yet to be made. The store's lock is held."""
        records_max = self.records_max(group)
        if self._closed or not 0 <= extent.segment < SEGMENT_ID_END or not 0 <= extent.record < records_max:
            raise StorageError(f"{extent}: closed, no segment id, or records end at {records_max}")
        if sum(number == extent.drive for number, _ in self._segments) >= self._open.segments_max:
            raise StorageError(f"{extent}: drive {extent.drive} has {self._open.segments_max} segments already")
        record_bytes = self._shapes[group].record_bytes
        header = fmt.Header(self._store_id, self._rank, extent.segment, group, record_bytes, records_max)
        self._segments[extent[:2]] = Segment(extent.drive, drive, header)
        self._next_segment_id = max(self._next_segment_id, extent.segment + 1)

    def _clear_away(self, drive: int) -> None:
        """Unlink the files of what was retired on a drive.

        Raises:
            OSError: some are still there.
        """
        problem: OSError | None = None
        for segment in [segment for segment in tuple(self._left) if segment.place[0] == drive]:
            try:
                discard_segment(segment.drive.directory, segment.header.segment)
                self._left.discard(segment)
            except OSError as error:
                problem = error
        if problem is not None:
            raise problem

    def _entry_to_commit(self, segment: Segment, extent: Extent, key: bytes, parent: bytes, checksum: int) -> fmt.Entry:
        with self._lock:
            if segment.state != FileState.OPEN or segment.states[extent.record] != WRITING:
                raise StorageError(f"{extent} is not being written")
            if segment.generations[extent.record] != self._generation:
                raise StorageError(f"{extent} was begun before a reset")
            self._sequence += 1
            return fmt.Entry(extent.record, self._generation, checksum, self._sequence, key, parent)

    def _seal_if_finished(self, segment: Segment) -> None:
        if segment.state == FileState.OPEN and segment.unfinished == 0:
            self._seal(segment)

    def _seal(self, segment: Segment) -> None:
        """Write the index. The segment's lock is held, or nobody else knows it yet."""
        try:
            segment.seal()
        except OSError as error:
            self._note(f"segment {segment.header.segment:x} cannot be sealed, its journal stays: {error}")
        with self._lock:
            evicted = self._keep_for_reading(segment)
        self._descriptors.close(evicted)

    # Descriptors

    def _fd_to_read(self, segment: Segment, extent: Extent) -> int:
        """The segment's descriptor, with one more user, or -1 when its file is not open."""
        with self._lock:
            self._check_live(segment, extent)
            if segment.place in self._read_fds:
                self._read_fds.move_to_end(segment.place)
            if segment.data_fd >= 0:
                self._descriptors.use(segment.data_fd)
            return segment.data_fd

    def _open_to_read(self, segment: Segment, extent: Extent) -> int:
        """Open the segment's file, or take what another thread opened meanwhile; with one more user."""
        opened = segment.drive.open_segment_file(segment.data_path)
        spare, evicted = opened, -1
        try:
            with self._lock:
                self._check_live(segment, extent)
                if self._segments.get(segment.place) is not segment:
                    raise StorageError(f"{extent} was retired")
                if segment.data_fd >= 0:
                    self._descriptors.use(segment.data_fd)
                    return segment.data_fd
                self._descriptors.use(opened)
                segment.data_fd, spare = opened, -1
                evicted = self._keep_for_reading(segment)
                return opened
        finally:
            self._descriptors.close(spare)
            self._descriptors.close(evicted)

    def _others_target(self, group: int, extent: Extent) -> tuple[int, int, int]:
        """As `read_target`, of another engine's record. The file is closed with its release: an unlinked one that is
        kept open takes room that nobody sees."""
        direct = self._drive(extent.drive % len(self.drives)).direct
        fd, offset, checksum = self._others.open_record(group, extent, direct)
        self._descriptors.use(fd)
        self._descriptors.close(fd)
        return fd, offset, checksum

    def _check_live(self, segment: Segment, extent: Extent) -> None:
        if segment.states[extent.record] != LIVE or segment.generations[extent.record] != self._generation:
            raise StorageError(f"{extent} holds no record of this generation")

    def _keep_for_reading(self, segment: Segment) -> int:
        """Count an open file of a sealed segment; the descriptor to close for it, or -1. The store's lock is held."""
        self._read_fds[segment.place] = None
        if len(self._read_fds) <= READ_FDS_MAX:
            return -1
        return self._take_fd(self._segments[next(iter(self._read_fds))])

    def _take_fd(self, segment: Segment) -> int:
        """Take a segment's data file from it, to be closed. The store's lock is held."""
        self._read_fds.pop(segment.place, None)
        fd, segment.data_fd = segment.data_fd, -1
        return fd


def _newest(scans: Mapping[int, Scan]) -> FoundChunks:
    """All chunks found, one per group and key: the newest. Older entries are taken out of the scans."""
    places = sorted((number, drive) for drive, scan in scans.items() for number in scan.segments)
    scanned = [scans[drive].segments[number] for number, drive in places]
    if not scanned:
        return FoundChunks.of([])
    ends = np.cumsum([len(segment.rows) for segment in scanned])
    count = int(ends[-1])
    fields = {name: fmt.ENTRY_ROW[field] for name, field in _FOUND_COLUMNS.items()}
    columns = {name: np.empty((count, *field.shape), field.base) for name, field in fields.items()}
    groups, extents = np.empty(count, np.int32), np.empty((count, 3), np.int32)
    for (number, drive), segment, end in zip(places, scanned, ends.tolist(), strict=True):
        here = slice(end - len(segment.rows), end)  # All of a segment while the processor has it at hand.
        for name, field in _FOUND_COLUMNS.items():
            columns[name][here] = segment.rows[field]
        groups[here], extents[here, 0], extents[here, 1] = segment.header.group, drive, number
        extents[here, 2] = segment.rows["record"]
    sequence = columns.pop("sequence")
    found = FoundChunks(groups, extents=extents, **columns)
    older = found.twins(sequence)
    if not older.size:
        return found
    keep = np.ones(len(found), np.bool_)
    keep[older] = False
    for segment, kept in zip(scanned, np.split(keep, ends[:-1]), strict=True):
        segment.rows = segment.rows[kept]
    return found.take(keep)
