"""The record checksum on tensors. It is part of the on-disk format: the value never changes within a format version.

A record is a multiple of 4096 bytes, read as little-endian 64-bit words and cut in blocks j = 0, 1, .. of 512 words
w[i]. K[0..511] is the splitmix64 stream from state 0x5A71A5A71A5A71A5 (the state is advanced by G before each output),
mix64 the splitmix64 finalizer, G its increment 0x9E3779B97F4A7C15, and sums are modulo 2^64:

    s_j = sum_i ((lo32(w[i]) + lo32(K[i])) mod 2^32) * ((hi32(w[i]) + hi32(K[i])) mod 2^32) + rotl64(w[i], 32)
    checksum = mix64( (sum_j mix64(s_j ^ mix64(seed + (j + 1) * G))) ^ nbytes )

The products are the NH universal hash of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway 1999): two blocks that differ
by accident keep one s_j with a chance of about 2^-64, at worst about 2^-32 when they differ in half a word. The rotated
word keeps a change visible where the other factor is zero. One flipped bit always changes s_j, but for bit 63 of a word
whose keyed low half is exactly 1. The keys are public: this finds accidents, not forgeries.
`saria_vllm._native.checksum` is the same value on the CPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 4096
KEY_STATE = 0x5A71A5A71A5A71A5
_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MASK64 = 2**64 - 1


def mix64(x: int) -> int:
    """The splitmix64 finalizer, a bijection on 64-bit unsigned integers."""
    for shift, factor in _MIX:
        x = (x ^ (x >> shift)) * factor & _MASK64
    return x ^ (x >> 31)


def key_table() -> list[int]:
    """K: the 512 unsigned 64-bit keys of a block."""
    return [mix64((KEY_STATE + (i + 1) * _GAMMA) & _MASK64) for i in range(BLOCK_BYTES // 8)]


def checksums_torch(records: torch.Tensor, seeds: list[int]) -> list[int]:
    """The checksums of several records of one size, with a single wait for the device.

    Needs about three times the records' bytes of scratch memory on the device.

    Args:
        records: uint8, shape [records, nbytes], contiguous and 8-byte aligned.
        seeds: one unsigned 64-bit seed per record.

    Raises:
        ValueError: another dtype or shape, or nbytes is not a multiple of 4096.
    """
    import torch

    if records.dtype != torch.uint8 or records.ndim != 2 or not records.is_contiguous():
        raise ValueError(f"records must be contiguous uint8 [records, nbytes], not {records.dtype} {records.shape}")
    count, nbytes = records.shape
    if nbytes % BLOCK_BYTES or count != len(seeds):
        raise ValueError(f"{count} records of {nbytes} bytes, {len(seeds)} seeds: not 4096-byte blocks and a seed each")
    blocks = nbytes // BLOCK_BYTES
    halves = records.view(torch.int32).view(count, blocks, BLOCK_BYTES // 8, 2)
    keyed = halves + _keys(str(records.device))
    products = (keyed[..., 0].long() & 0xFFFFFFFF) * (keyed[..., 1].long() & 0xFFFFFFFF)
    # The sum of the rotated words is the sum of the low halves, moved up, plus the sum of the high halves.
    low, high = (_unsigned_sum(halves[..., half]) for half in (0, 1))
    sums = products.sum(dim=2) + (low << 32) + high
    steps = torch.arange(1, blocks + 1, device=records.device) * _signed(_GAMMA)
    starts = torch.tensor([_signed(seed) for seed in seeds], device=records.device)
    mixed = _mix64(sums ^ _mix64(starts[:, None] + steps)).sum(dim=1)
    return [value & _MASK64 for value in _mix64(mixed ^ nbytes).tolist()]


def _unsigned_sum(halves: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension of int32 read as unsigned, in int64: each negative one counts 2^32 more."""
    return halves.sum(dim=-1) + ((halves < 0).sum(dim=-1) << 32)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    for shift, factor in _MIX:
        x = (x ^ _logical_shift(x, shift)) * _signed(factor)
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & (_MASK64 >> bits)


def _signed(x: int) -> int:
    """The 64-bit pattern of `x` as torch's signed integer."""
    return x - 2**64 if x >= 2**63 else x


@lru_cache(maxsize=16)
def _keys(device: str) -> torch.Tensor:
    """K as int32 halves [512, 2] (low, high)."""
    import torch

    words = torch.tensor([_signed(key) for key in key_table()], dtype=torch.int64)
    return words.view(torch.int32).view(-1, 2).to(device)
