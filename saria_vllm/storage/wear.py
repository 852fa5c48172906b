"""Drive wear: how large the drives under our paths are, and a small file that remembers what was written to them.

The file is `<ssd_path>/saria/endurance-e<k>.json`, beside the namespaces: it outlives a change of configuration, and
goes where its drive goes.

  {"endurance": 1, "crc": CRC-32 of the state's bytes, "state": {...}}

What the state says is the policy's. Each engine has a file of its own, whatever its namespace: the first whose lease,
`endurance-e<k>.lease`, it gets. What others wrote to the drive is in theirs.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence

import msgspec

from saria_vllm.errors import StorageError
from saria_vllm.storage.directories import (
    TOP_NAME,
    is_leased,
    open_path,
    read_small,
    try_lease,
    write_durably,
)

VERSION = 1
_SECTOR_BYTES = 512
FILE_NAME = re.compile(r"endurance-e(0|[1-9][0-9]{0,5})\.(json|lease)")

ENGINES_MAX = 1024
"""Engines that may write under one path."""


class _File(msgspec.Struct):
    endurance: int
    crc: int
    state: msgspec.Raw


def device_bytes(paths: Sequence[str], sys_block: str = "/sys/dev/block") -> list[int]:
    """Bytes of the block device under each existing path, at least 1, a partition counting as its whole disk; paths on
    one device share it evenly.

    A logical volume or a software RAID counts with its own size. Where there is no block device (tmpfs, overlay,
    btrfs, network), the file system's size counts.

    Raises:
        StorageError: a path cannot be looked at.
    """
    devices = devices_under(paths, sys_block)
    names = [name for name, _ in devices]
    return [max(1, nbytes // names.count(name)) for name, nbytes in devices]


def on_one_device(paths: Sequence[str], sys_block: str = "/sys/dev/block") -> list[list[str]]:
    """For each existing path those of them that share its device, as `device_bytes` does.

    Raises:
        StorageError: a path cannot be looked at.
    """
    names = [name for name, _ in devices_under(paths, sys_block)]
    return [[path for path, other in zip(paths, names, strict=True) if other == name] for name in names]


def devices_under(paths: Sequence[str], sys_block: str = "/sys/dev/block") -> list[tuple[str, int]]:
    """Name and bytes of the device under each path.

    Raises:
        StorageError: a path cannot be looked at.
    """
    devices: list[tuple[str, int]] = []
    for path in paths:
        try:
            device = os.stat(path).st_dev
            name, nbytes = _whole_disk(f"{sys_block}/{os.major(device)}:{os.minor(device)}")
            if not nbytes:
                disk = os.statvfs(path)
                name, nbytes = str(device), disk.f_blocks * disk.f_frsize
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror or error}") from error
        devices.append((name, nbytes))
    return devices


def _whole_disk(link: str) -> tuple[str, int]:
    """Directory in sysfs of a device's disk, and the disk's bytes; 0 when it is no block device."""
    folder = os.path.realpath(link)
    if os.path.exists(f"{folder}/partition"):
        folder = os.path.dirname(folder)
    try:
        with open(f"{folder}/size", encoding="ascii") as file:
            return folder, int(file.read()) * _SECTOR_BYTES
    except (OSError, ValueError):
        return folder, 0


def _name(engine_index: int) -> str:
    return f"endurance-e{engine_index}.json"


def lease_state(path: str, preferred: int) -> tuple[int, int]:
    """Number of the first state from `preferred` on that no living engine has, and the descriptor that keeps it ours.

    Raises:
        StorageError: there is none, or the path cannot be used.
    """
    try:
        with open_path(path, (TOP_NAME,), create=True) as fd:
            for index in range(preferred, preferred + ENGINES_MAX):
                lease = try_lease(fd, f"endurance-e{index}.lease")
                if lease is not None:
                    return index, lease
    except OSError as error:
        raise StorageError(f"{error.filename}: {error.strerror or error}") from error
    raise StorageError(f"{path}/{TOP_NAME}: {ENGINES_MAX} engines write here")


def other_states(path: str, own: int) -> tuple[int, list[bytes]]:
    """How many other living engines write under an SSD path, and what those and earlier ones kept last. What cannot be
    read is left out.

    Raises:
        StorageError: the path cannot be used.
    """
    living, states = 0, []
    try:
        with open_path(path, (TOP_NAME,)) as fd:
            matches = map(FILE_NAME.fullmatch, os.listdir(fd))
            found = [match for match in matches if match and int(match[1]) != own]
            living = sum(match[2] == "lease" and is_leased(fd, match[0]) for match in found)
    except OSError as error:
        raise StorageError(f"{error.filename}: {error.strerror or error}") from error
    for match in found:
        if match[2] == "json":
            try:
                states.append(read_state(path, int(match[1])) or b"")
            except StorageError:
                continue
    return living, states


def read_state(path: str, engine_index: int) -> bytes | None:
    """The state that `write_state` kept last under an SSD path, as JSON; None when there is none.

    Raises:
        StorageError: damaged, not ours, or unreadable.
    """
    name = _name(engine_index)
    try:
        with open_path(path, (TOP_NAME,)) as fd:
            data = read_small(fd, name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{error.filename}: {error.strerror or error}") from error
    if data is None:
        return None
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        file = None
    if file is None or file.endurance != VERSION or zlib.crc32(file.state) != file.crc:
        raise StorageError(f"{path}/{TOP_NAME}/{name}: damaged, or not ours")
    return bytes(file.state)


def engines_with_state(path: str) -> list[int]:
    """Indexes of the engines that have written a state under an SSD path, whether they run or not."""
    try:
        with open_path(path, (TOP_NAME,)) as fd:
            found = list(map(FILE_NAME.fullmatch, os.listdir(fd)))
    except OSError:
        return []
    return sorted(int(match[1]) for match in found if match and match[2] == "json")


def write_state(path: str, engine_index: int, state: bytes) -> None:
    """Replace the state, which is JSON: whole or not at all, on disk when this returns.

    Raises:
        StorageError: not written; the old state is still there.
    """
    name = _name(engine_index)
    text = msgspec.json.encode(_File(VERSION, zlib.crc32(state), msgspec.Raw(state))).decode("ascii")
    try:
        with open_path(path, (TOP_NAME,)) as fd:
            write_durably(fd, name, text + "\n")
    except OSError as error:
        raise StorageError(f"{error.filename}: {error.strerror or error}") from error
