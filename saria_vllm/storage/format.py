"""Bytes of segment files and journals, as `docs/format.md` describes them. Pure functions, no I/O.

Parsers take untrusted bytes: they raise FormatError on anything wrong and size nothing by what they read.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from saria_vllm.errors import FormatError
from saria_vllm.types import KEY_BYTES_MAX, RECORD_ALIGN_BYTES, align_up

FORMAT_VERSION = 1
HEADER_BYTES = 4096
ENTRY_BYTES = 128
STORE_ID_BYTES = 16

SEGMENT_BYTES_MAX = 1 << 32
"""No engine makes larger segments: a header that says so is not believed."""

JOURNAL_ENTRIES_PER_RECORD = 2
"""A journal holds at most one commit and one drop of each record."""

_MAGIC = b"SARIASEG"
_INDEX_MAGIC = b"SARIAIDX"
_HEADER = struct.Struct("<8sII16sQIIQ")
_ENTRY = struct.Struct("<IIQQQBBxx32s32s28x")
_FOOTER = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_SEED = struct.Struct("<QQQB")
_U32_MAX = 2**32 - 1
_ZEROS_AT = 25
"""The 32-bit word of an entry where its zeros begin."""
_KEY_PLACES = np.arange(KEY_BYTES_MAX, dtype=np.uint8)

EntryRows = npt.NDArray[np.void]
"""Entries by column, of `ENTRY_ROW`."""

ENTRY_ROW = np.dtype([
    ("crc", "<u4"), ("record", "<u4"), ("generation", "<u8"), ("checksum", "<u8"), ("sequence", "<u8"),
    ("key_bytes", "u1"), ("parent_bytes", "u1"), ("zeros", "<u2"), ("key", "u1", KEY_BYTES_MAX),
    ("parent", "u1", KEY_BYTES_MAX), ("more_zeros", "<u4", 7),
])  # fmt: skip
"""An entry as it lies on disk. Keys are padded with zeros."""


class Header(NamedTuple):
    """What a segment file says about itself. Sizes in bytes."""

    store_id: bytes
    rank: int
    segment: int
    group: int
    record_bytes: int
    records_max: int


class Entry(NamedTuple):
    """One finished record of a segment, or, with an empty key, the news that a record was dropped."""

    record: int
    generation: int
    checksum: int
    sequence: int
    key: bytes
    parent: bytes


def index_bytes(records_max: int) -> int:
    """Size of the index area at the end of a data file."""
    return align_up(records_max * ENTRY_BYTES + _FOOTER.size)


def data_file_bytes(record_bytes: int, records_max: int) -> int:
    """Size of a data file: header, records and index area."""
    return HEADER_BYTES + records_max * record_bytes + index_bytes(records_max)


def journal_bytes_max(records_max: int) -> int:
    """Most bytes that a journal can occupy on disk."""
    return align_up(JOURNAL_ENTRIES_PER_RECORD * records_max * ENTRY_BYTES)


def segment_cost_bytes(record_bytes: int, records_max: int) -> int:
    """Most bytes that a segment can occupy on disk, data file and journal."""
    return data_file_bytes(record_bytes, records_max) + journal_bytes_max(records_max)


def records_per_segment(record_bytes: int, segment_bytes: int) -> int:
    """The most records such that data file and journal together stay within `segment_bytes`; 0 when none fits."""
    assert record_bytes > 0
    assert record_bytes % RECORD_ALIGN_BYTES == 0
    per_record = record_bytes + (1 + JOURNAL_ENTRIES_PER_RECORD) * ENTRY_BYTES
    records = min(max(0, segment_bytes - HEADER_BYTES) // per_record, _U32_MAX)
    while records > 0 and segment_cost_bytes(record_bytes, records) > segment_bytes:
        records -= 1
    return records


def record_offset(record_bytes: int, record: int) -> int:
    """Offset of a record in its data file, in bytes."""
    return HEADER_BYTES + record * record_bytes


def index_offset(header: Header) -> int:
    """Offset of the index area in its data file, in bytes."""
    return record_offset(header.record_bytes, header.records_max)


def seed_of(store_id: bytes, key: bytes, generation: int, segment: int, record: int) -> int:
    """64-bit seed of a record's checksum: bytes of another key, generation or place do not match it."""
    text = _SEED.pack(generation, segment, record, len(key)) + key
    digest = hashlib.blake2b(text, digest_size=8, key=store_id, person=b"saria-seed").digest()
    return int.from_bytes(digest, "little")


def pack_header(header: Header) -> bytes:
    """The first 4096 bytes of a data file."""
    assert len(header.store_id) == STORE_ID_BYTES
    fields = _HEADER.pack(
        _MAGIC, FORMAT_VERSION, header.rank, header.store_id, header.segment,
        header.group, header.records_max, header.record_bytes,
    )  # fmt: skip
    body = fields.ljust(HEADER_BYTES - _CRC.size, b"\0")
    return body + _CRC.pack(zlib.crc32(body))


def parse_header(data: bytes) -> Header:
    """Read a header.

    Raises:
        FormatError: wrong length, magic, CRC or format version, or sizes that cannot be.
    """
    if len(data) != HEADER_BYTES:
        raise FormatError(f"header: {len(data)} bytes, not {HEADER_BYTES}")
    if _CRC.unpack_from(data, HEADER_BYTES - _CRC.size)[0] != zlib.crc32(data[: -_CRC.size]):
        raise FormatError("header: CRC mismatch")
    magic, version, rank, store_id, segment, group, records_max, record_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise FormatError("header: not a segment file")
    if version != FORMAT_VERSION:
        raise FormatError(f"header: format version {version}, not {FORMAT_VERSION}")
    if record_bytes == 0 or record_bytes % RECORD_ALIGN_BYTES or records_max == 0:
        raise FormatError(f"header: {records_max} records of {record_bytes} bytes")
    return Header(store_id, rank, segment, group, record_bytes, records_max)


def salt_of(header: Header) -> int:
    """Start value of the CRCs of one file's entries and index."""
    return zlib.crc32(header.store_id + struct.pack("<Q", header.segment))


def pack_entry(entry: Entry, salt: int) -> bytes:
    """The 128 bytes of an entry."""
    assert len(entry.key) <= KEY_BYTES_MAX
    assert len(entry.parent) <= KEY_BYTES_MAX
    record, generation, checksum, sequence, key, parent = entry
    body = _ENTRY.pack(0, record, generation, checksum, sequence, len(key), len(parent), key, parent)[4:]
    return _CRC.pack(zlib.crc32(body, salt)) + body


def entries_of(rows: EntryRows) -> list[Entry]:
    """The same entries, one by one."""
    return [
        Entry(record, generation, checksum, sequence, key[:key_bytes], parent[:parent_bytes])
        for _, record, generation, checksum, sequence, key_bytes, parent_bytes, key, parent in _ENTRY.iter_unpack(
            rows.tobytes()
        )
    ]


def _can_be(rows: EntryRows, header: Header) -> npt.NDArray[np.bool_]:
    """Which entries have numbers that can be, and zeros where zeros belong."""
    words = rows.view(np.uint32).reshape(-1, ENTRY_BYTES // 4)
    good: npt.NDArray[np.bool_] = rows["record"] < header.records_max
    for name in ("key", "parent"):
        texts, lengths = rows[name], rows[f"{name}_bytes"]
        longest = int(lengths.max(initial=0))
        if longest > KEY_BYTES_MAX:
            good &= lengths <= KEY_BYTES_MAX
        elif longest < KEY_BYTES_MAX:
            good &= ~texts[:, longest:].any(axis=1)
        short = (lengths < longest).nonzero()[0]
        if short.size:
            good[short] &= ~(texts[short] * (lengths[short, None] <= _KEY_PLACES)).any(axis=1)
    good &= rows["zeros"] == 0
    if np.count_nonzero(words[:, _ZEROS_AT:]):
        good &= ~words[:, _ZEROS_AT:].any(axis=1)
    return good


def journal_rows(data: bytes, header: Header) -> EntryRows:
    """Entries of a journal, in order, up to the first that does not check: a torn tail ends it. Never raises."""
    view, salt, count = memoryview(data), salt_of(header), 0
    for start in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        if _CRC.unpack_from(view, start)[0] != zlib.crc32(view[start + _CRC.size : start + ENTRY_BYTES], salt):
            break
        count += 1
    rows = np.frombuffer(data, ENTRY_ROW, count) if count else np.empty(0, ENTRY_ROW)
    bad = (~_can_be(rows, header)).nonzero()[0]
    return rows[: bad[0]] if bad.size else rows


def parse_journal(data: bytes, header: Header) -> list[Entry]:
    """`journal_rows`, one by one."""
    return entries_of(journal_rows(data, header))


def pack_index(entries: Sequence[Entry], header: Header) -> bytes:
    """The index area of a segment."""
    assert len(entries) <= header.records_max
    salt = salt_of(header)
    body = b"".join(pack_entry(entry, salt) for entry in entries)
    area = body.ljust(index_bytes(header.records_max) - _FOOTER.size, b"\0")
    area += _FOOTER.pack(_INDEX_MAGIC, len(entries), 0)[: -_CRC.size]
    return area + _CRC.pack(zlib.crc32(area, salt))


def index_rows(data: bytes | memoryview, header: Header) -> EntryRows:
    """Read the index area of a sealed segment. Its one CRC covers all entries; theirs are not looked at.

    Raises:
        FormatError: wrong length, magic or CRC, or entries that cannot be.
    """
    if len(data) != index_bytes(header.records_max):
        raise FormatError(f"index: {len(data)} bytes, not {index_bytes(header.records_max)}")
    magic, count, crc = _FOOTER.unpack_from(data, len(data) - _FOOTER.size)
    if magic != _INDEX_MAGIC or count > header.records_max:
        raise FormatError("index: not there")
    if crc != zlib.crc32(memoryview(data)[: -_CRC.size], salt_of(header)):
        raise FormatError("index: CRC mismatch")
    rows = np.frombuffer(data, ENTRY_ROW, count)
    if not (_can_be(rows, header) & (rows["key_bytes"] > 0)).all():
        raise FormatError("index: an entry that cannot be")
    records = rows["record"]
    if not (records[1:] > records[:-1]).all() and np.bincount(records).max() > 1:
        raise FormatError("index: a record twice")
    return rows


def parse_index(data: bytes, header: Header) -> list[Entry]:
    """`index_rows`, one by one.

    Raises:
        FormatError: as from `index_rows`.
    """
    return entries_of(index_rows(data, header))
