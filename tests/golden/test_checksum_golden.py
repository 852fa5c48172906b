"""The record checksum is part of the on-disk format: its values never change, and three implementations agree."""

from __future__ import annotations

import ctypes
import random

import pytest

from saria_vllm import _native
from saria_vllm.engine.checksum import checksums_torch

torch = pytest.importorskip("torch")

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15

GOLDEN = {
    ("zeros", 4096, 0x0): 0xC82E018C18EFB951,
    ("zeros", 1048576, 0x0): 0xE2050A4CA1F03CBA,
    ("ones", 4096, 0x1): 0xCE8F88D6CB92897B,
    ("ones", 12288, 0xFFFFFFFFFFFFFFFF): 0xB91166A9F3D5105B,
    ("counting", 4096, 0x0): 0x78F3FE315D0FFFAB,
    ("counting", 65536, 0x123456789ABCDEF): 0x741EAD676F571EDD,
}


def mix64(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def reference_block(block: bytes) -> int:
    s, state = 0, 0x5A71A5A71A5A71A5
    for i in range(512):
        state = (state + GAMMA) & MASK
        key = mix64(state)
        word = int.from_bytes(block[i * 8 : i * 8 + 8], "little")
        low = (word + key) % 2**32
        high = ((word >> 32) + (key >> 32)) % 2**32
        s += low * high + ((word << 32 | word >> 32) & MASK)
    return s & MASK


def reference(record: bytes, seed: int) -> int:
    """The definition, word by word and independent of the package."""
    total = 0
    for j in range(len(record) // 4096):
        s = reference_block(record[j * 4096 : (j + 1) * 4096])
        total += mix64(s ^ mix64((seed + (j + 1) * GAMMA) & MASK))
    return mix64((total & MASK) ^ len(record))


def native(record: bytes, seed: int, misalign: int = 0) -> int:
    memory = (ctypes.c_char * (len(record) + 64)).from_buffer_copy(bytes(misalign) + record + bytes(64 - misalign))
    return _native.checksum(ctypes.addressof(memory) + misalign, len(record), seed)


def by_torch(record: bytes, seed: int) -> int:
    return checksums_torch(torch.frombuffer(bytearray(record), dtype=torch.uint8).unsqueeze(0), [seed])[0]


def sample(kind: str, nbytes: int) -> bytes:
    if kind == "zeros":
        return bytes(nbytes)
    if kind == "ones":
        return b"\xff" * nbytes
    if kind == "counting":
        return b"".join(i.to_bytes(4, "little") for i in range(nbytes // 4))
    return random.Random(nbytes).randbytes(nbytes)


@pytest.mark.parametrize(("kind", "nbytes", "seed"), GOLDEN)
def test_golden_values(kind: str, nbytes: int, seed: int) -> None:
    record = sample(kind, nbytes)
    assert native(record, seed) == GOLDEN[kind, nbytes, seed]
    assert by_torch(record, seed) == GOLDEN[kind, nbytes, seed]


@pytest.mark.parametrize("kind", ["zeros", "ones", "counting", "random"])
@pytest.mark.parametrize("blocks", [1, 2, 5, 16, 33])
def test_native_torch_and_reference_agree(kind: str, blocks: int) -> None:
    record = sample(kind, blocks * 4096)
    for seed in (0, 1, 2**63, MASK, 0x0123456789ABCDEF):
        expected = reference(record, seed)
        assert native(record, seed) == expected
        assert by_torch(record, seed) == expected


@pytest.mark.parametrize("kind", ["zeros", "ones", "counting", "random"])
def test_every_instruction_set_gives_the_same(kind: str) -> None:
    block = sample(kind, 4096)
    memory = (ctypes.c_char * 4097).from_buffer_copy(b"?" + block)
    sums = _native.block_sum_by_all(ctypes.addressof(memory) + 1)
    assert sums
    assert set(sums) == {reference_block(block)}


def test_native_takes_any_alignment() -> None:
    record = sample("random", 8192)
    assert {native(record, 7, misalign) for misalign in range(9)} == {reference(record, 7)}


def test_torch_takes_many_records_at_once() -> None:
    records = [sample("random", 8192), sample("ones", 8192), sample("zeros", 8192)]
    seeds = [MASK, 0, 5]
    stacked = torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8).view(3, 8192)
    assert checksums_torch(stacked, seeds) == [native(r, s) for r, s in zip(records, seeds, strict=True)]


@pytest.mark.parametrize("kind", ["zeros", "ones", "random"])
def test_every_single_bit_flip_changes_the_value(kind: str) -> None:
    rng = random.Random(1)
    record = bytearray(sample(kind, 3 * 4096))
    right = native(bytes(record), 9)
    bits = rng.sample(range(len(record) * 8), 3000) + list(range(256))
    for bit in bits:
        record[bit // 8] ^= 1 << bit % 8
        assert native(bytes(record), 9) != right, f"bit {bit}"
        record[bit // 8] ^= 1 << bit % 8


def test_a_flip_shows_where_the_other_factor_is_zero() -> None:
    """NH alone would miss it: the keyed high half is 0, so the product is 0 whatever the low half is."""
    high_key = mix64((0x5A71A5A71A5A71A5 + GAMMA) & MASK) >> 32
    record = bytearray(4096)
    record[4:8] = (-high_key % 2**32).to_bytes(4, "little")
    right = native(bytes(record), 0)
    record[0] ^= 1
    assert native(bytes(record), 0) != right


def test_swapped_blocks_change_the_value() -> None:
    record = sample("random", 4 * 4096)
    swapped = record[4096:8192] + record[:4096] + record[8192:]
    assert native(swapped, 3) != native(record, 3)


def test_swapped_words_and_halves_change_the_value() -> None:
    record = sample("random", 4096)
    assert native(record[8:16] + record[:8] + record[16:], 3) != native(record, 3)
    assert native(record[4:8] + record[:4] + record[8:], 3) != native(record, 3)


@pytest.mark.parametrize("kept", [0, 512, 4096, 2 * 4096 + 8, 4 * 4096 - 1])
def test_a_tail_of_zeros_changes_the_value(kept: int) -> None:
    record = sample("ones", 4 * 4096)
    torn = record[:kept] + bytes(len(record) - kept)
    assert native(torn, 3) != native(record, 3)


def test_length_and_seed_change_the_value() -> None:
    values = {native(bytes(blocks * 4096), seed) for blocks in range(8) for seed in range(64)}
    assert len(values) == 7 * 64 + 1  # without blocks nothing is seeded: an empty record has one value


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="4096"):
        _native.checksum(0, 4095, 0)
    with pytest.raises(ValueError, match="4096"):
        checksums_torch(torch.zeros(1, 100, dtype=torch.uint8), [0])
    with pytest.raises(ValueError, match="uint8"):
        checksums_torch(torch.zeros(1, 4096, dtype=torch.int8), [0])
    with pytest.raises(ValueError, match="contiguous"):
        checksums_torch(torch.zeros(1, 8192, dtype=torch.uint8)[:, ::2], [0])
    with pytest.raises(ValueError, match="seed"):
        checksums_torch(torch.zeros(2, 4096, dtype=torch.uint8), [1])
