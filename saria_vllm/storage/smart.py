"""What NVMe drives say of their own wear, asked of the kernel by ioctl; needs CAP_SYS_ADMIN and the device file.

Two log pages, as in the NVMe and OCP specifications: 02h, which every drive has, and the vendors' C0h, which drives for
data centres have. Unproved: no machine with a readable NVMe drive has run this, only doubles of sysfs and of the ioctl.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import operator
import os
import struct
from collections.abc import Callable

import msgspec

_ADMIN_COMMAND = 0xC0484E41
"""NVME_IOCTL_ADMIN_CMD: _IOWR('N', 0x41, 72 bytes)."""
_COMMAND = struct.Struct("<BBHIIIQQ10I")
"""opcode, flags, -, namespace, two words, metadata, address, bytes of metadata and data, cdw10..15, timeout, result."""
_GET_LOG_PAGE = 0x02
_ANY_NAMESPACE = 0xFFFFFFFF
_PAGE_BYTES = 512
_HEALTH_PAGE, _VENDOR_PAGE = 0x02, 0xC0
_TIMEOUT_MS = 5000
_DATA_UNIT_BYTES = 512_000
_OCP_GUID = bytes.fromhex("c5af1028eabff2a49c4f6f7cc914d5af")
"""At the end of page C0h where it is the one that OCP defines, and not something of a vendor's own."""

Ask = Callable[[str, int], bytes]
"""(device file, log page) -> the page's 512 bytes. Raises OSError."""


class Smart(msgspec.Struct, frozen=True):
    """What the disks under a path say: bytes are sums over them, the rest is that of the worst."""

    disks: tuple[str, ...]
    """Their device files: several under a software RAID or a volume that spans them."""
    written_bytes: int
    """What hosts wrote in the disks' whole life: we, and everybody else."""
    media_bytes: int
    """What the disks wrote to their flash for it; 0 where one of them does not say."""
    percentage_used: int
    """Of the life that the vendor means a disk to have; may be above 100."""
    spare_percent: int
    """Spare blocks that are left."""
    critical_warning: int
    """Bits, 0: none. 1 spare low, 2 temperature, 4 reliability, 8 read-only, 16 backup of volatile memory."""


def read_smart(path: str, sys_block: str = "/sys/dev/block", dev: str = "/dev", ask: Ask | None = None) -> Smart | str:
    """SMART of the NVMe disks under an existing path, or why it cannot be read. May wait as long as a drive hangs."""
    try:
        device = os.stat(path).st_dev
        disks = disks_under(f"{sys_block}/{os.major(device)}:{os.minor(device)}")
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    if not disks:
        return f"{path} is on no block device (tmpfs, overlay, btrfs, a network)"
    found = []
    for disk in disks:
        if not disk.startswith("nvme"):
            return f"{path} is on {disk}, which is no NVMe drive"
        try:
            found.append(_read_disk(f"{dev}/{disk}", ask or get_log_page))
        except OSError as error:
            hint = " (it takes CAP_SYS_ADMIN)" if isinstance(error, PermissionError) else ""
            return f"{dev}/{disk}: {error.strerror or error}{hint}"
    return Smart(
        tuple(name for one in found for name in one.disks),
        sum(one.written_bytes for one in found),
        sum(one.media_bytes for one in found) if all(one.media_bytes for one in found) else 0,
        max(one.percentage_used for one in found),
        min(one.spare_percent for one in found),
        functools.reduce(operator.or_, (one.critical_warning for one in found)),
    )


def disks_under(link: str) -> list[str]:
    """Names of the disks that a block device's directory in sysfs stands on: of a partition its disk, of a logical
    volume or a software RAID those of its members, each once. None where there is no such device."""
    folder = os.path.realpath(link)
    if not os.path.exists(f"{folder}/size"):
        return []
    if os.path.exists(f"{folder}/partition"):
        folder = os.path.dirname(folder)
    try:
        members = sorted(os.listdir(f"{folder}/slaves"))
    except OSError:
        members = []
    if not members:
        return [os.path.basename(folder)]
    return list(dict.fromkeys(disk for member in members for disk in disks_under(f"{folder}/slaves/{member}")))


def get_log_page(device: str, page: int) -> bytes:
    """A log page of an NVMe drive, through the device file of any of its namespaces.

    Raises:
        OSError: no such file, no permission, no NVMe drive, or the drive refused.
    """
    data = ctypes.create_string_buffer(_PAGE_BYTES)
    command = bytearray(
        _COMMAND.pack(
            _GET_LOG_PAGE, 0, 0, _ANY_NAMESPACE, 0, 0, 0, ctypes.addressof(data),
            0, _PAGE_BYTES, page | (_PAGE_BYTES // 4 - 1) << 16, 0, 0, 0, 0, 0, _TIMEOUT_MS, 0,
        )
    )  # fmt: skip
    fd = os.open(device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = fcntl.ioctl(fd, _ADMIN_COMMAND, command)
    finally:
        os.close(fd)
    if status:
        raise OSError(None, f"the drive refused log page {page:02x}h with status {status:#x}")
    return data.raw


def _read_disk(device: str, ask: Ask) -> Smart:
    page = ask(device, _HEALTH_PAGE)
    written_bytes = int.from_bytes(page[48:64], "little") * _DATA_UNIT_BYTES
    try:
        vendor = ask(device, _VENDOR_PAGE)
        media_bytes = int.from_bytes(vendor[:16], "little") if vendor[496:512] == _OCP_GUID else 0
    except OSError:
        media_bytes = 0
    return Smart((device,), written_bytes, media_bytes, page[5], page[3], page[0])
