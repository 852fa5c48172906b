"""docs/format.md as bytes: round trips, the worked example, and hostile input."""

from __future__ import annotations

import random
import re
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saria_vllm.errors import FormatError
from saria_vllm.storage import format as fmt

HEADER = fmt.Header(bytes(range(16)), rank=1, segment=7, group=2, record_bytes=8192, records_max=20)
U64 = st.integers(0, 2**64 - 1)
ENTRIES = st.builds(
    fmt.Entry, st.integers(0, 19), U64, U64, U64, st.binary(min_size=1, max_size=32), st.binary(max_size=32)
)


def entries(count: int) -> list[fmt.Entry]:
    return [fmt.Entry(i, 3, i * 7, i + 1, b"k%d" % i, b"p" * (i % 33)) for i in range(count)]


@given(
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**32 - 1),
    U64,
    st.integers(1, 2**40),
    st.integers(1, 2**32 - 1),
)
def test_header_round_trip(store: bytes, number: int, segment: int, pages: int, records: int) -> None:
    header = fmt.Header(store, number, segment, number, pages * 4096, records)
    packed = fmt.pack_header(header)
    assert len(packed) == 4096
    assert fmt.parse_header(packed) == header


@given(ENTRIES)
def test_entry_round_trip(entry: fmt.Entry) -> None:
    packed = fmt.pack_entry(entry, fmt.salt_of(HEADER))
    assert len(packed) == 128
    assert fmt.parse_journal(packed, HEADER) == [entry]


@given(st.lists(ENTRIES, max_size=20, unique_by=lambda entry: entry.record))
def test_index_and_journal_round_trip(listed: list[fmt.Entry]) -> None:
    assert fmt.parse_index(fmt.pack_index(listed, HEADER), HEADER) == listed
    salt = fmt.salt_of(HEADER)
    assert fmt.parse_journal(b"".join(fmt.pack_entry(entry, salt) for entry in listed), HEADER) == listed


def test_worked_example_of_the_document() -> None:
    text = Path(__file__).parents[2].joinpath("docs/format.md").read_text().partition("## Worked example")[2]
    rows = dict(re.findall(r"^    ([a-z ]+?) +((?:[0-9a-f]{2} ?)+)$", text, re.MULTILINE))
    header = fmt.Header(bytes(range(16)), 0, 5, 0, 4096, 3)
    entry = fmt.Entry(1, 2, 0x1122334455667788, 9, b"abcd", b"")
    packed = fmt.pack_header(header)
    assert bytes.fromhex(rows["header"]) == packed[:56]
    assert bytes.fromhex(rows["header crc"]) == packed[4092:]
    assert bytes.fromhex(rows["entry"]) == fmt.pack_entry(entry, fmt.salt_of(header))[:40]
    assert bytes.fromhex(rows["footer"]) == fmt.pack_index([entry], header)[-16:]
    assert bytes.fromhex(rows["seed"]) == fmt.seed_of(header.store_id, b"abcd", 2, 5, 1).to_bytes(8, "little")
    assert fmt.data_file_bytes(4096, 3) == 20480


@given(st.integers(1, 2000), st.integers(0, 2**34))
def test_records_per_segment_is_the_most_that_fits(pages: int, segment_bytes: int) -> None:
    records = fmt.records_per_segment(pages * 4096, segment_bytes)
    if records:
        assert fmt.segment_cost_bytes(pages * 4096, records) <= segment_bytes
    assert fmt.segment_cost_bytes(pages * 4096, records + 1) > segment_bytes


def test_sizes_are_aligned() -> None:
    for records in (1, 31, 32, 33, 1000):
        assert fmt.index_bytes(records) % 4096 == 0
        assert fmt.index_bytes(records) >= records * 128 + 16
    assert fmt.index_offset(HEADER) == fmt.record_offset(8192, 20)


def test_every_single_bit_of_a_header_counts() -> None:
    packed = fmt.pack_header(HEADER)
    for bit in [*range(60 * 8), *range(4000 * 8, 4096 * 8, 7)]:
        bad = bytearray(packed)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            fmt.parse_header(bytes(bad))


def test_every_single_bit_of_an_entry_counts() -> None:
    salt = fmt.salt_of(HEADER)
    packed = fmt.pack_entry(entries(20)[19], salt)
    for bit in range(1024):
        bad = bytearray(packed)
        bad[bit // 8] ^= 1 << bit % 8
        assert fmt.parse_journal(bytes(bad), HEADER) == []


@pytest.mark.parametrize("change", [{"store_id": b"x" * 16}, {"segment": 8}])
def test_entries_and_indexes_of_another_file_are_refused(change: dict[str, object]) -> None:
    other = HEADER._replace(**change)
    with pytest.raises(FormatError):
        fmt.parse_index(fmt.pack_index(entries(3), HEADER), other)
    assert fmt.parse_journal(fmt.pack_entry(entries(1)[0], fmt.salt_of(HEADER)), other) == []


def test_torn_tail_ends_a_journal() -> None:
    salt = fmt.salt_of(HEADER)
    packed = b"".join(fmt.pack_entry(entry, salt) for entry in entries(10))
    for cut in range(len(packed)):
        assert fmt.parse_journal(packed[:cut], HEADER) == entries(cut // 128)
    hole = packed[:256] + bytes(128) + packed[384:]
    assert fmt.parse_journal(hole, HEADER) == entries(2)


@given(st.binary(max_size=5000))
def test_parsers_of_noise_raise_format_error_only(noise: bytes) -> None:
    for data in (noise, noise.ljust(4096, b"\0")[:4096]):
        for parse in (fmt.parse_header, lambda data: fmt.parse_index(data, HEADER)):
            with pytest.raises(FormatError):
                parse(data)
    assert fmt.parse_journal(noise, HEADER) == []


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_seeded_damage_is_an_error_or_the_truth(seed: int) -> None:
    rng = random.Random(seed)
    truth = entries(rng.randrange(1, 21))
    packed = bytearray(fmt.pack_index(truth, HEADER))
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(packed))
        packed[at : at + rng.randrange(1, 64)] = rng.randbytes(rng.randrange(1, 64))
    try:
        assert fmt.parse_index(bytes(packed), HEADER) == truth
    except FormatError:
        pass


def test_huge_counts_allocate_nothing() -> None:
    header = HEADER._replace(records_max=2**32 - 1, record_bytes=2**63)
    assert fmt.parse_header(fmt.pack_header(header)) == header
    with pytest.raises(FormatError):
        fmt.parse_index(b"\xff" * 4096, header)


def test_impossible_numbers_with_a_right_crc_are_refused() -> None:
    wide = HEADER._replace(records_max=100)
    bad = fmt.pack_entry(fmt.Entry(99, 1, 1, 1, b"k", b""), fmt.salt_of(HEADER))
    assert fmt.parse_journal(bad, HEADER) == []
    assert len(fmt.parse_journal(bad, wide)) == 1
    twice = [fmt.Entry(1, 1, 1, 1, b"a", b""), fmt.Entry(1, 1, 1, 2, b"b", b"")]
    keyless = [fmt.Entry(1, 1, 1, 1, b"", b"")]
    for listed in (twice, keyless):
        with pytest.raises(FormatError):
            fmt.parse_index(fmt.pack_index(listed, HEADER), HEADER)


def test_seed_depends_on_everything() -> None:
    base = (b"s" * 16, b"key", 1, 2, 3)
    changed = [(b"t" * 16, *base[1:]), (base[0], b"kez", 1, 2, 3), (base[0], b"key", 2, 2, 3)]
    changed += [(base[0], b"key", 1, 3, 3), (base[0], b"key", 1, 2, 4), (base[0], b"key\0", 1, 2, 3)]
    seeds = {fmt.seed_of(*args) for args in [base, *changed]}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("field", ["key", "parent"])
@pytest.mark.parametrize("others", [b"abcd", b"k" * 32])
def test_bytes_behind_a_short_key_make_an_entry_invalid(field: str, others: bytes) -> None:
    """Whether or not other keys are longer: keys that are equal must look equal."""
    header = fmt.Header(bytes(16), 0, 5, 0, 4096, 3)
    salt = fmt.salt_of(header)
    entries = [fmt.Entry(0, 1, 1, 1, others, others), fmt.Entry(1, 1, 1, 2, b"abcd", b"abcd")]
    good, bad = (fmt.pack_entry(entry, salt) for entry in entries)
    assert fmt.parse_journal(good + bad, header) == entries
    changed = bytearray(bad)
    changed[fmt.ENTRY_ROW.fields[field][1] + 20] = 1  # type: ignore[index]
    changed[:4] = zlib.crc32(changed[4:], salt).to_bytes(4, "little")
    assert fmt.parse_journal(good + bytes(changed), header) == entries[:1]
