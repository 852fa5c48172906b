"""Drive sizes from sysfs, and the file that remembers what was written: damage, foreign files, reclaiming."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from saria_vllm.errors import StorageError
from saria_vllm.storage.namespace import EngineDirectory, namespace_name
from saria_vllm.storage.reclaim import share_capacity
from saria_vllm.storage.wear import device_bytes, engines_with_state, on_one_device, read_state, write_state

STATE = b'{"saved_s":5.0,"spent_bytes":1.5}'


def state_file(root: Path, index: int = 0) -> Path:
    return root / "saria" / f"endurance-e{index}.json"


# Sizes.


def sysfs(tmp_path: Path, device: int, *, sectors: int, partition: bool) -> str:
    """A sysfs in which `device` is a disk of so many sectors, or the half of one."""
    disk = tmp_path / "devices" / "disk0"
    folder = disk / "disk0p1" if partition else disk
    folder.mkdir(parents=True, exist_ok=True)
    (disk / "size").write_text(f"{sectors}\n")
    if partition:
        (folder / "size").write_text(f"{sectors // 2}\n")
        (folder / "partition").write_text("1\n")
    links = tmp_path / "block"
    links.mkdir(exist_ok=True)
    (links / f"{os.major(device)}:{os.minor(device)}").symlink_to(folder)
    return str(links)


@pytest.mark.parametrize("partition", [False, True])
def test_paths_on_one_disk_share_it_and_a_partition_counts_whole(tmp_path: Path, partition: bool) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        os.mkdir(path)
    links = sysfs(tmp_path, os.stat(tmp_path).st_dev, sectors=1000, partition=partition)
    assert device_bytes(paths, links) == [256_000, 256_000]
    assert device_bytes(paths[:1], links) == [512_000]


def test_without_a_block_device_the_file_system_counts_once(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    size = disk.f_blocks * disk.f_frsize
    (tmp_path / "a").mkdir()
    assert device_bytes([str(tmp_path), str(tmp_path / "a")], str(tmp_path / "no sysfs")) == [size // 2] * 2
    links = sysfs(tmp_path, os.stat(tmp_path).st_dev, sectors=0, partition=False)
    assert device_bytes([str(tmp_path)], links) == [size]


def test_a_file_system_without_a_size_still_has_one_byte(tmp_path: Path) -> None:
    assert os.statvfs("/proc").f_blocks == 0
    assert device_bytes(["/proc"], str(tmp_path / "no sysfs")) == [1]


def test_two_file_systems_are_two_drives(tmp_path: Path) -> None:
    ours, theirs = device_bytes([str(tmp_path), "/dev/shm"], str(tmp_path / "no sysfs"))
    shared_memory = os.statvfs("/dev/shm")
    assert theirs == shared_memory.f_blocks * shared_memory.f_frsize
    assert ours == device_bytes([str(tmp_path)], str(tmp_path / "no sysfs"))[0]


def test_this_machine_has_drives(tmp_path: Path) -> None:
    assert device_bytes([str(tmp_path)])[0] > 0
    with pytest.raises(StorageError, match="nonexistent"):
        device_bytes(["/nonexistent"])


def test_paths_on_one_device_are_known_to_be(tmp_path: Path) -> None:
    paths = [str(tmp_path), "/dev/shm", str(tmp_path / "a")]
    (tmp_path / "a").mkdir()
    here = [paths[0], paths[2]]
    assert on_one_device(paths, str(tmp_path / "no sysfs")) == [here, ["/dev/shm"], here]
    with pytest.raises(StorageError, match="nonexistent"):
        on_one_device(["/nonexistent"])


# The file.


def test_a_state_is_read_back_by_its_engine_only(tmp_path: Path) -> None:
    assert read_state(str(tmp_path), 0) is None
    (tmp_path / "saria").mkdir()
    write_state(str(tmp_path), 0, b"{}")
    write_state(str(tmp_path), 0, STATE)
    assert read_state(str(tmp_path), 0) == STATE
    assert read_state(str(tmp_path), 1) is None
    assert stat.S_IMODE(state_file(tmp_path).stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path / "saria")) == ["endurance-e0.json"]


def test_engines_with_a_state_are_found(tmp_path: Path) -> None:
    assert engines_with_state(str(tmp_path)) == []
    (tmp_path / "saria").mkdir()
    for index in (12, 0, 3):
        write_state(str(tmp_path), index, STATE)
    for name in ("endurance-e7.json.new", "endurance-ex.json", "endurance-e1234567890.json", "endurance-e5.lease"):
        (tmp_path / "saria" / name).touch()
    assert engines_with_state(str(tmp_path)) == [0, 3, 12]


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def noise(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 300)


def deep(path: Path) -> None:
    path.write_bytes(b'{"endurance":1,"crc":0,"state":' + b"[" * 60_000)


def flipped(path: Path) -> None:
    write_state(str(path.parent.parent), 0, STATE)
    path.write_bytes(path.read_bytes().replace(b"1.5", b"9.5"))


def cut(path: Path) -> None:
    write_state(str(path.parent.parent), 0, STATE)
    path.write_bytes(path.read_bytes()[:-9])


def later(path: Path) -> None:
    write_state(str(path.parent.parent), 0, STATE)
    path.write_bytes(path.read_bytes().replace(b'"endurance":1', b'"endurance":2'))


def foreign(path: Path) -> None:
    path.write_bytes(msgspec.json.encode({"generation": 5}))


def symlink(path: Path) -> None:
    (path.parent / "elsewhere").write_bytes(STATE)
    path.symlink_to("elsewhere")


def fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [nothing, noise, deep, flipped, cut, later, foreign, symlink, fifo])
def test_what_is_not_a_state_is_said_and_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "saria").mkdir()
    make(state_file(tmp_path))
    with pytest.raises(StorageError, match=r"endurance-e0\.json: damaged, or not ours"):
        read_state(str(tmp_path), 0)
    write_state(str(tmp_path), 0, b"{}")
    assert read_state(str(tmp_path), 0) == b"{}"
    if make is symlink:
        assert (tmp_path / "saria" / "elsewhere").read_bytes() == STATE, "a symlink is not followed"


@pytest.mark.parametrize("name", ["endurance-e0.json", "endurance-e0.json.new"])
def test_a_directory_in_its_place_is_an_error_to_be_said(tmp_path: Path, name: str) -> None:
    (tmp_path / "saria" / name / "full").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"endurance-e0\.json"):
        write_state(str(tmp_path), 0, STATE)
    if name == "endurance-e0.json":
        with pytest.raises(StorageError, match="damaged, or not ours"):
            read_state(str(tmp_path), 0)


def test_where_a_drive_was_unmounted_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"{tmp_path}/saria: No such file"):
        write_state(str(tmp_path), 0, STATE)
    assert os.listdir(tmp_path) == []


def test_a_symlink_on_the_way_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "saria").symlink_to("other")
    with pytest.raises(StorageError):
        write_state(str(tmp_path), 0, STATE)
    with pytest.raises(StorageError):
        read_state(str(tmp_path), 0)
    assert not os.listdir(tmp_path / "other")


def test_claims_and_reclaiming_leave_it_alone(tmp_path: Path) -> None:
    (tmp_path / "saria").mkdir()
    write_state(str(tmp_path), 0, STATE)
    for parts in ({"model": "old"}, {"model": "new"}):
        ours = EngineDirectory.claim([str(tmp_path)], namespace_name(parts), parts, 0)
        _, removed = share_capacity([str(tmp_path)], ours, 0)
        assert len(removed) == (parts["model"] == "new")
        ours.release()
    assert read_state(str(tmp_path), 0) == STATE
