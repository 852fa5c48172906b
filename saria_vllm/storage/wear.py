"""Drive wear: how large the drives under our paths are, and a small file that remembers what was written to them.

The file is `<ssd_path>/saria/endurance-e<k>.json`, beside the namespaces: it outlives a change of configuration, and
goes where its drive goes.

  {"endurance": 1, "crc": CRC-32 of the state's bytes, "state": {...}}

What the state says is the policy's.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence

import msgspec

from saria_vllm.errors import StorageError
from saria_vllm.storage.directories import TOP_NAME, open_path, read_small, write_durably

VERSION = 1
_SECTOR_BYTES = 512
_NAME = re.compile(r"endurance-e(\d{1,9})\.json")


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
    devices = _devices(paths, sys_block)
    names = [name for name, _ in devices]
    return [max(1, nbytes // names.count(name)) for name, nbytes in devices]


def on_one_device(paths: Sequence[str], sys_block: str = "/sys/dev/block") -> list[list[str]]:
    """For each existing path those of them that share its device, as `device_bytes` does.

    Raises:
        StorageError: a path cannot be looked at.
    """
    names = [name for name, _ in _devices(paths, sys_block)]
    return [[path for path, other in zip(paths, names, strict=True) if other == name] for name in names]


def _devices(paths: Sequence[str], sys_block: str) -> list[tuple[str, int]]:
    """Name and bytes of the device under each path."""
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
        raise StorageError(f"{path}/{TOP_NAME}/{name}: {error.strerror or error}") from error
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
            found = [_NAME.fullmatch(name) for name in os.listdir(fd)]
    except OSError:
        return []
    return sorted(int(match[1]) for match in found if match)


def write_state(path: str, engine_index: int, state: bytes) -> None:
    """Replace the state, which is JSON: whole or not at all, on disk when this returns.

    Raises:
        StorageError: not written; the old state is still there.
    """
    name = _name(engine_index)
    text = msgspec.json.encode(_File(VERSION, zlib.crc32(state), msgspec.Raw(state))).decode("ascii")
    try:
        with open_path(path, (TOP_NAME,), create=True) as fd:
            write_durably(fd, name, text + "\n")
    except OSError as error:
        raise StorageError(f"{path}/{TOP_NAME}/{name}: {error.strerror or error}") from error
