"""What drives were measured to read, kept beside the namespaces so that the next start need not measure.

The file is `<ssd_path>/saria/rates-r<rank>.json`: {"rates": 1, "device": ..., "ranks": ..., "measured": unix seconds,
"read_bytes_s": ...}. It is a hint and no more: whatever is wrong with it, the drive is measured again.
"""

from __future__ import annotations

import os
import re

import msgspec

from saria_vllm.errors import StorageError
from saria_vllm.storage.directories import TOP_NAME, open_path, read_small, write_durably
from saria_vllm.storage.wear import devices_under

VERSION = 1
FILE_NAME = re.compile(r"rates-r(0|[1-9][0-9]{0,5})\.json")
FRESH_S = 30 * 86_400.0
"""Drives age, fill up and are exchanged."""


class _File(msgspec.Struct):
    rates: int
    device: str
    """Where the drive is in this machine, and its bytes."""
    ranks: int
    """That shared the drive when it was measured."""
    measured: float
    read_bytes_s: float


def _device(path: str) -> str:
    name, nbytes = devices_under([path])[0]
    return f"{name} {nbytes}"


def ssd_path(engine_directory: str) -> str:
    """The SSD path that an engine directory lies under."""
    return os.path.normpath(os.path.join(engine_directory, "..", "..", ".."))


def _read(path: str, rank: int) -> _File | None:
    try:
        with open_path(path, (TOP_NAME,)) as fd:
            file = msgspec.json.decode(read_small(fd, f"rates-r{rank}.json") or b"", type=_File)
        usable = file.rates == VERSION and file.read_bytes_s > 0 and file.device == _device(path)
    except (OSError, StorageError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return file if usable else None


def kept_rate(path: str, now: float) -> tuple[float, float]:
    """Bytes per second that the first rank was measured to read from a drive, and how many seconds ago; 0 when nothing
    is known."""
    file = _read(path, 0)
    return (file.read_bytes_s, now - file.measured) if file is not None else (0.0, 0.0)


def read_rate(path: str, rank: int, ranks: int, now: float) -> float:
    """Bytes per second that a rank was measured to read from the drive under an existing SSD path; 0 when that is not
    known, 30 days old, or was measured for another device or number of ranks. `now` is unix seconds."""
    file = _read(path, rank)
    fresh = file is not None and file.ranks == ranks and 0 <= now - file.measured < FRESH_S
    return file.read_bytes_s if file is not None and fresh else 0.0


def write_rate(path: str, rank: int, ranks: int, now: float, read_bytes_s: float) -> None:
    """Keep what was measured; not where the drive does not take it."""
    try:
        file = _File(VERSION, _device(path), ranks, now, read_bytes_s)
        with open_path(path, (TOP_NAME,)) as fd:
            write_durably(fd, f"rates-r{rank}.json", msgspec.json.encode(file).decode("ascii") + "\n")
    except (OSError, StorageError):
        return
