"""Parsers of what lies on a drive against bytes made to mislead them: FormatError, or what is really there."""

from __future__ import annotations

import json
import os
import random
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saria_vllm.errors import FormatError, StorageError
from saria_vllm.storage import format as fmt
from saria_vllm.storage.namespace import Generation, pack_generation, parse_generation
from saria_vllm.storage.wear import read_state, write_state

HEADER = fmt.Header(bytes(range(16)), rank=1, segment=7, group=2, record_bytes=8192, records_max=20)
SALT = fmt.salt_of(HEADER)
U64 = st.integers(0, 2**64 - 1)
RAW = st.tuples(
    st.integers(0, 21), U64, U64, U64, st.integers(0, 34), st.integers(0, 34), st.sampled_from([0, 0, 0, 0x100]),
    st.binary(max_size=32), st.binary(max_size=32), st.sampled_from([b"", b"", b"", b"\0\0\1"]),
    st.sampled_from([0, 0, 0, 0, 1]),
)  # fmt: skip
"""Fields of an entry, most of which could be, and what to add to its CRC."""


def packed(raw: tuple[object, ...]) -> bytes:
    *fields, key, parent, rest, wrong = raw
    body = struct.pack("<IQQQBBH32s32s28s", *fields, key, parent, rest)
    return struct.pack("<I", zlib.crc32(body, SALT) + int(str(wrong)) & 0xFFFFFFFF) + body


def truth(raw: tuple[object, ...]) -> fmt.Entry | None:
    """What docs/format.md says of it."""
    record, generation, checksum, sequence, key_bytes, parent_bytes, zeros, key, parent, rest, _ = raw
    fits = record < 20 and key_bytes <= 32 and parent_bytes <= 32 and not zeros and not rest  # type: ignore[operator]
    if not fits:
        return None
    wide = [text.ljust(32, b"\0") for text in (key, parent)]  # type: ignore[attr-defined]
    if wide[0][key_bytes:].strip(b"\0") or wide[1][parent_bytes:].strip(b"\0"):
        return None
    return fmt.Entry(record, generation, checksum, sequence, wide[0][:key_bytes], wide[1][:parent_bytes])  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(RAW, max_size=12), st.binary(max_size=200))
def test_a_journal_ends_at_the_first_entry_that_cannot_be(raws: list[tuple[object, ...]], tail: bytes) -> None:
    expected = []
    for raw in raws:
        entry = truth(raw)
        if entry is None or raw[-1]:
            break
        expected.append(entry)
    found = fmt.parse_journal(b"".join(map(packed, raws)) + tail, HEADER)
    assert found[: len(expected)] == expected
    assert len(found) == len(expected) or len(expected) == len(raws)


@settings(deadline=None)
@given(st.lists(RAW, max_size=20), st.integers(-2, 2))
def test_an_index_is_what_it_should_be_or_refused(raws: list[tuple[object, ...]], more: int) -> None:
    """Its CRC is right; entries, count or both are not. The CRCs of the entries do not matter."""
    body = b"".join(map(packed, raws)).ljust(fmt.index_bytes(20) - 16, b"\0")
    body += struct.pack("<8sI", b"SARIAIDX", max(0, len(raws) + more))
    area = body + struct.pack("<I", zlib.crc32(body, SALT))
    listed = [truth(raw) for raw in raws][: len(raws) + more if more < 0 else None]
    good = all(entry is not None and entry.key for entry in listed) and more <= 0
    good = good and len({entry.record for entry in listed if entry}) == len(listed)
    try:
        assert fmt.parse_index(area, HEADER) == listed
        assert good
    except FormatError:
        assert not good


@settings(deadline=None)
@given(st.tuples(U64, *[st.integers(0, 2**32 - 1)] * 5, st.binary(min_size=16, max_size=16), U64), st.booleans())
def test_a_header_with_a_right_crc_is_read_or_refused(fields: tuple[object, ...], magic: bool) -> None:
    size, version, rank, group, records_max, pages, store_id, segment = fields
    version = 1 if magic else version
    record_bytes = int(str(pages)) * 4096 if magic else int(str(size))
    start = b"SARIASEG" if magic else b"SARIASEX"
    body = struct.pack("<8sII16sQIIQ", start, version, rank, store_id, segment, group, records_max, record_bytes)
    body = body.ljust(4092, b"\0")
    try:
        header = fmt.parse_header(body + struct.pack("<I", zlib.crc32(body)))
    except FormatError:
        assert not magic or not pages or not records_max
        return
    assert header == fmt.Header(store_id, rank, segment, group, record_bytes, records_max)  # type: ignore[arg-type]
    assert magic


NAMES = st.sampled_from(["generation", "process_only", "crc", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(JSON)
def test_no_json_but_ours_is_a_generation(value: object) -> None:
    text = json.dumps(value) + "\n"
    found = parse_generation(text.encode())
    assert found is None or pack_generation(found) == text


@pytest.mark.parametrize(
    "text", ["[" * 50_000, "9" * 50_000, '{"generation": ' + "9" * 5000 + "}", "\ud800", "NaN", ""]
)
def test_json_that_overflows_a_parser_is_no_generation(text: str) -> None:
    assert parse_generation(text.encode("utf-8", "surrogatepass")) is None


def test_every_flipped_bit_of_a_generation_counts() -> None:
    good = pack_generation(Generation(77, True)).encode()
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        assert parse_generation(bytes(bad)) is None


def test_a_damaged_endurance_file_is_an_error_or_the_truth(tmp_path: Path) -> None:
    state = b'{"written":[1,2,3],"since":12.5}'
    (tmp_path / "saria").mkdir()
    write_state(str(tmp_path), 0, state)
    file = tmp_path / "saria" / "endurance-e0.json"
    good, rng, refused = file.read_bytes(), random.Random(5), 0
    for _ in range(400):
        bad = bytearray(good)
        for _ in range(rng.choice([1, 1, 3])):
            at = rng.randrange(len(bad))
            bad[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        file.write_bytes(bytes(bad))
        try:
            assert read_state(str(tmp_path), 0) == state
        except StorageError:
            refused += 1
    assert refused > 300
    os.truncate(file, 2**40)
    with pytest.raises(StorageError):
        read_state(str(tmp_path), 0)
