"""What drives say of their wear, over doubles of sysfs and of the ioctl: no NVMe drive is here."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from pathlib import Path

import pytest

from saria_vllm.storage import smart
from saria_vllm.storage.smart import Smart, disks_under, get_log_page, read_smart

OCP_GUID = bytes.fromhex("afd514c97c6f4f9ca4f2bfea2810afc5")[::-1]


def health(units: int, used: int = 3, spare: int = 100, warning: int = 0) -> bytes:
    """Page 02h: other fields are full of ones, so that a field read from a wrong place shows."""
    page = bytearray(b"\xff" * 512)
    page[0], page[3], page[5] = warning, spare, used
    page[48:64] = units.to_bytes(16, "little")
    return bytes(page)


def media(nbytes: int, guid: bytes = OCP_GUID) -> bytes:
    return nbytes.to_bytes(16, "little") + b"\xff" * 480 + guid


class Drives:
    """Answers by (device file, page); what is not there is refused."""

    def __init__(self, pages: dict[tuple[str, int], bytes]) -> None:
        self.pages = pages
        self.error: OSError = OSError(None, "refused")

    def __call__(self, device: str, page: int) -> bytes:
        if (device, page) not in self.pages:
            raise self.error
        return self.pages[device, page]


def add_disk(root: Path, name: str, *members: Path, partition: str = "") -> Path:
    """A block device in a sysfs at `root`; the directory of its partition, if it has one."""
    folder = root / "devices" / name
    (folder / "slaves").mkdir(parents=True)
    (folder / "size").write_text("1000\n")
    for member in members:
        (folder / "slaves" / member.name).symlink_to(member)
    if not partition:
        return folder
    (folder / partition).mkdir()
    for file, text in (("size", "500\n"), ("partition", "1\n")):
        (folder / partition / file).write_text(text)
    return folder / partition


def link(root: Path, folder: Path) -> str:
    """The path `root` lies on this device."""
    device = os.stat(root).st_dev
    (root / "block").mkdir()
    (root / "block" / f"{os.major(device)}:{os.minor(device)}").symlink_to(folder)
    return str(root / "block")


def test_one_drive(tmp_path: Path) -> None:
    links = link(tmp_path, add_disk(tmp_path, "nvme1n1", partition="nvme1n1p2"))
    ask = Drives({("/dev/nvme1n1", 0x02): health(2**70), ("/dev/nvme1n1", 0xC0): media(2**81)})
    assert read_smart(str(tmp_path), links, ask=ask) == Smart(("/dev/nvme1n1",), 2**70 * 512_000, 2**81, 3, 100, 0)


@pytest.mark.parametrize("page", [None, media(5, b"\xff" * 16), bytes(512), b""])
def test_a_drive_that_does_not_tell_what_it_wrote_to_flash(tmp_path: Path, page: bytes | None) -> None:
    links = link(tmp_path, add_disk(tmp_path, "nvme0n1"))
    pages = {("/dev/nvme0n1", 0x02): health(7)} | ({("/dev/nvme0n1", 0xC0): page} if page is not None else {})
    found = read_smart(str(tmp_path), links, ask=Drives(pages))
    assert isinstance(found, Smart)
    assert (found.written_bytes, found.media_bytes) == (7 * 512_000, 0)


def test_a_volume_on_a_raid_is_its_drives_each_once(tmp_path: Path) -> None:
    parts = [add_disk(tmp_path, f"nvme{n}n1", partition=f"nvme{n}n1p1") for n in range(2)]
    raid = add_disk(tmp_path, "md0", *parts)
    volume = add_disk(tmp_path, "dm-0", raid, parts[1])
    assert sorted(disks_under(str(volume))) == ["nvme0n1", "nvme1n1"]
    links = link(tmp_path, volume)
    pages = {("/dev/nvme0n1", 0x02): health(1, 9, 80, 1), ("/dev/nvme1n1", 0x02): health(2, 4, 70, 4)}
    pages[("/dev/nvme0n1", 0xC0)] = media(10)
    found = read_smart(str(tmp_path), links, ask=Drives(pages))
    assert isinstance(found, Smart)
    assert (found.written_bytes, found.percentage_used, found.spare_percent) == (3 * 512_000, 9, 70)
    assert found.critical_warning == 5
    assert found.media_bytes == 0, "one drive does not say: a sum would be too low"
    pages[("/dev/nvme1n1", 0xC0)] = media(20)
    found = read_smart(str(tmp_path), links, ask=Drives(pages))
    assert isinstance(found, Smart)
    assert found.media_bytes == 30


def test_a_disk_of_a_kernel_that_lists_no_members(tmp_path: Path) -> None:
    folder = add_disk(tmp_path, "nvme0n1")
    (folder / "slaves").rmdir()
    assert disks_under(str(folder)) == ["nvme0n1"]


def test_why_it_cannot_be_read_is_said(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert read_smart(missing) == f"{missing}: No such file or directory"
    assert read_smart(str(tmp_path), str(tmp_path / "block")) == (
        f"{tmp_path} is on no block device (tmpfs, overlay, btrfs, a network)"
    )
    links = link(tmp_path, add_disk(tmp_path, "sda"))
    assert read_smart(str(tmp_path), links) == f"{tmp_path} is on sda, which is no NVMe drive"


def test_what_the_drive_or_the_kernel_refuses_is_said(tmp_path: Path) -> None:
    links = link(tmp_path, add_disk(tmp_path, "nvme0n1"))
    ask = Drives({})
    assert read_smart(str(tmp_path), links, ask=ask) == "/dev/nvme0n1: refused"
    ask.error = PermissionError(13, "Permission denied")
    assert read_smart(str(tmp_path), links, ask=ask) == "/dev/nvme0n1: Permission denied (it takes CAP_SYS_ADMIN)"
    found = read_smart(str(tmp_path), links, dev=str(tmp_path))
    assert found == f"{tmp_path}/nvme0n1: No such file or directory"


def test_a_file_that_is_no_drive_is_an_error_of_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "nvme0n1").write_bytes(bytes(1000))
    with pytest.raises(OSError, match="ioctl"):
        get_log_page(str(tmp_path / "nvme0n1"), 2)


def test_the_command_is_as_the_kernel_defines_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ioctl(_fd: int, request: int, command: bytearray) -> int:
        assert len(command) == 72
        opcode, namespace, address, nbytes, word, last = struct.unpack("<B3xI16xQ4xII24xI", command)
        asked.append((request, opcode, namespace, nbytes, word, last))
        ctypes.memmove(address, bytes(range(256)) * 2, nbytes)
        return status

    (tmp_path / "nvme0n1").touch()
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    status = 0
    assert get_log_page(str(tmp_path / "nvme0n1"), 0xC0) == bytes(range(256)) * 2
    request = 3 << 30 | 72 << 16 | ord("N") << 8 | 0x41
    assert asked == [(request, 2, 0xFFFFFFFF, 512, 0x007F00C0, 0)]
    status = 0x4109
    with pytest.raises(OSError, match=r"refused log page c0h with status 0x4109"):
        get_log_page(str(tmp_path / "nvme0n1"), 0xC0)


def test_this_machine_gives_an_answer(tmp_path: Path) -> None:
    assert isinstance(smart.read_smart(str(tmp_path)), str | Smart)
