"""Bytes of segment files and journals, as `docs/format.md` describes them. Pure functions, no I/O.

Parsers take untrusted bytes: they raise FormatError on anything wrong and size nothing by what they read.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from saria_vllm.errors import FormatError
from saria_vllm.types import KEY_BYTES_MAX, RECORD_ALIGN_BYTES, align_up

FORMAT_VERSION = 1
HEADER_BYTES = 4096
ENTRY_BYTES = 128
STORE_ID_BYTES = 16
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


def _entry_of(fields: tuple[int, int, int, int, int, int, int, bytes, bytes], records_max: int) -> Entry:
    _, record, generation, checksum, sequence, key_bytes, parent_bytes, key, parent = fields
    if record >= records_max or key_bytes > KEY_BYTES_MAX or parent_bytes > KEY_BYTES_MAX:
        raise FormatError(f"entry: record {record}, key of {key_bytes} bytes, parent of {parent_bytes} bytes")
    return Entry(record, generation, checksum, sequence, key[:key_bytes], parent[:parent_bytes])


def parse_entry(data: bytes | memoryview, header: Header, salt: int) -> Entry:
    """Read one entry of a journal.

    Raises:
        FormatError: wrong length or CRC, or numbers that cannot be.
    """
    if len(data) != ENTRY_BYTES:
        raise FormatError(f"entry: {len(data)} bytes, not {ENTRY_BYTES}")
    fields = _ENTRY.unpack(data)
    if fields[0] != zlib.crc32(data[4:], salt):
        raise FormatError("entry: CRC mismatch")
    return _entry_of(fields, header.records_max)


def parse_journal(data: bytes, header: Header) -> list[Entry]:
    """Entries of a journal, in order, up to the first that does not check: a torn tail ends it. Never raises."""
    entries: list[Entry] = []
    view, salt = memoryview(data), salt_of(header)
    for start in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        try:
            entries.append(parse_entry(view[start : start + ENTRY_BYTES], header, salt))
        except FormatError:
            break
    return entries


def pack_index(entries: Sequence[Entry], header: Header) -> bytes:
    """The index area of a segment."""
    assert len(entries) <= header.records_max
    salt = salt_of(header)
    body = b"".join(pack_entry(entry, salt) for entry in entries)
    area = body.ljust(index_bytes(header.records_max) - _FOOTER.size, b"\0")
    area += _FOOTER.pack(_INDEX_MAGIC, len(entries), 0)[: -_CRC.size]
    return area + _CRC.pack(zlib.crc32(area, salt))


def parse_index(data: bytes, header: Header) -> list[Entry]:
    """Read the index area of a sealed segment. Its one CRC covers all entries.

    Raises:
        FormatError: wrong length, magic or CRC, or entries that cannot be.
    """
    if len(data) != index_bytes(header.records_max):
        raise FormatError(f"index: {len(data)} bytes, not {index_bytes(header.records_max)}")
    magic, count, crc = _FOOTER.unpack_from(data, len(data) - _FOOTER.size)
    if magic != _INDEX_MAGIC or count > header.records_max:
        raise FormatError("index: not there")
    view = memoryview(data)
    if crc != zlib.crc32(view[: -_CRC.size], salt_of(header)):
        raise FormatError("index: CRC mismatch")
    records_max = header.records_max
    entries = [_entry_of(fields, records_max) for fields in _ENTRY.iter_unpack(view[: count * ENTRY_BYTES])]
    if len({entry[0] for entry in entries}) != count or not all(entry[4] for entry in entries):
        raise FormatError("index: a record twice or an entry without a key")
    return entries
