"""One segment: its record states, and its data file and journal. The store in segments.py guards both."""

from __future__ import annotations

import enum
import os
import threading
from array import array

import numpy as np

from saria_vllm.storage import format as fmt
from saria_vllm.storage.directories import open_regular
from saria_vllm.storage.drives import Drive, sync_directory, write_aligned, write_whole
from saria_vllm.storage.recovery import data_name, journal_name

FREE, WRITING, LIVE, GONE = range(4)
"""States of a record, in one byte each."""


class FileState(enum.Enum):
    """NEW: no file yet. OPEN: records may be written. SEALED: read only. ENDED: retired or closed."""

    NEW = 0
    OPEN = 1
    SEALED = 2
    ENDED = 3


class Segment:
    """A segment's state. The store's lock guards record states, numbers and `data_fd`; `file_lock` all that
    touches the files."""

    def __init__(self, drive_number: int, drive: Drive, header: fmt.Header) -> None:
        self.place = drive_number, header.segment
        self.drive = drive
        self.header = header
        self.file_lock = threading.Lock()
        self.state = FileState.NEW
        self.data_fd = -1
        self.journal_bytes = 0
        self.states = bytearray(header.records_max)
        self.checksums = array("Q", bytes(8 * header.records_max))
        self.generations = array("Q", bytes(8 * header.records_max))
        self.entries: dict[int, fmt.Entry] = {}
        """By record number, until the seal: what the index will hold."""
        self.unfinished = header.records_max
        """Records that are free or being written."""
        self._journal_fd = -1
        self._salt = fmt.salt_of(header)

    @property
    def data_path(self) -> str:
        return os.path.join(self.drive.directory, data_name(self.header.segment))

    @property
    def journal_path(self) -> str:
        return os.path.join(self.drive.directory, journal_name(self.header.segment))

    def has(self, record: int) -> bool:
        """Whether a record number is within the segment."""
        return 0 <= record < self.header.records_max

    def finish(self, record: int, state: int) -> None:
        """A record that was free or being written reaches its end."""
        self.states[record] = state
        self.unfinished -= 1

    def settle(self) -> None:
        """Whatever is not live never will be."""
        self.states = self.states.translate(bytes([GONE, GONE, LIVE, GONE]).ljust(256, b"\0"))
        self.unfinished = 0

    def adopt(self, rows: fmt.EntryRows, journal_bytes: int) -> None:
        """Take over the records found by recovery, in order; nothing is written here any more."""
        records = rows["record"] if len(rows) < self.header.records_max else slice(None)
        np.frombuffer(self.states, np.uint8)[records] = LIVE
        np.frombuffer(self.checksums, np.uint64)[records] = rows["checksum"]
        np.frombuffer(self.generations, np.uint64)[records] = rows["generation"]
        self.settle()
        self.journal_bytes = journal_bytes
        self.state = FileState.SEALED

    def create(self) -> None:
        """Make the files, allocated and with a header, or leave nothing behind.

        Raises:
            OSError: ENOSPC, EIO, EEXIST and the like.
        """
        header = self.header
        size = fmt.data_file_bytes(header.record_bytes, header.records_max)
        data_fd = self.drive.open_segment_file(self.data_path, create=True, size=size)
        try:
            write_aligned(data_fd, fmt.pack_header(header), 0)
            self._journal_fd = self._open_journal(os.O_TRUNC)
        except OSError:
            os.close(data_fd)
            os.unlink(self.data_path)
            raise
        self.data_fd = data_fd
        self.state = FileState.OPEN

    def reopen(self, rows: fmt.EntryRows) -> None:
        """Open the data file of a segment that recovery found without an index, to seal it.

        Raises:
            OSError: it cannot be opened for writing.
        """
        self.data_fd = self.drive.open_segment_file(self.data_path, writable=True)
        self.entries = {entry.record: entry for entry in fmt.entries_of(rows)}

    def append(self, entry: fmt.Entry) -> None:
        """Add an entry to the open journal: one write, over the remains of one that failed.

        Raises:
            OSError: the entry is not there.
        """
        write_whole(self._journal_fd, fmt.pack_entry(entry, self._salt), self.journal_bytes)
        self.journal_bytes += fmt.ENTRY_BYTES

    def append_drop(self, entry: fmt.Entry) -> None:
        """Add a dropped record to the journal, which a sealed segment gets again for this.

        Raises:
            OSError: it is not there.
        """
        if self._journal_fd >= 0:
            self.append(entry)
            return
        self._journal_fd = self._open_journal(0)
        try:
            self.append(entry)
        finally:
            self.close_journal()

    def seal(self) -> None:
        """Write the index, make it durable, remove the journal. The segment is sealed even where that fails.

        Raises:
            OSError: the journal stays, and has all that the index should have.
        """
        self.state = FileState.SEALED
        entries, self.entries = self.entries, {}
        self.close_journal()
        area = fmt.pack_index(list(entries.values()), self.header)
        write_aligned(self.data_fd, area, fmt.index_offset(self.header))
        os.fdatasync(self.data_fd)
        sync_directory(self.drive.directory)
        os.unlink(self.journal_path)
        self.journal_bytes = 0
        self.drive.drop_cache(self.data_fd)

    def close_journal(self) -> None:
        """Close the journal's descriptor, if it is open."""
        fd, self._journal_fd = self._journal_fd, -1  # Even a close that fails gives the number back.
        if fd >= 0:
            os.close(fd)

    def _open_journal(self, flags: int) -> int:
        return open_regular(self.journal_path, os.O_WRONLY | os.O_CREAT | flags)
