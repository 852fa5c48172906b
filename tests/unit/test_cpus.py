"""CPUs near a drive, on sysfs trees of our own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from doubles import MakeRig
from saria_vllm.engine import executor
from saria_vllm.engine.cpus import cpu_list, near_drive


def make_sysfs(tmp_path: Path, device: str, cpulist: str | None, partition: bool = False) -> str:
    """/sys with a block device of the directory's number: a link below dev/block into devices/."""
    disk = tmp_path / "sys/devices" / device
    disk = disk / "nvme0n1p1" if partition else disk
    disk.mkdir(parents=True)
    if cpulist is not None:
        (tmp_path / "sys/devices/pci0000:00/0000:00:04.0/local_cpulist").write_text(cpulist)
    links = tmp_path / "sys/dev/block"
    links.mkdir(parents=True)
    number = os.stat(tmp_path).st_dev
    (links / f"{os.major(number)}:{os.minor(number)}").symlink_to(disk)
    return str(links)


NVME = "pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1"


@pytest.mark.parametrize(
    ("cpulist", "expected"),
    [
        ("0-3,8\n", {2, 3, 8}),
        ("2\n", {2}),
        ("64-127\n", {2, 3, 8, 9}),
        ("", {2, 3, 8, 9}),
        ("all\n", {2, 3, 8, 9}),
        ("3-2\n", {2, 3, 8, 9}),
        (None, {2, 3, 8, 9}),
    ],
)
@pytest.mark.parametrize("partition", [False, True])
def test_cpus_of_the_drives_node(tmp_path: Path, cpulist: str | None, expected: set[int], partition: bool) -> None:
    sys_block = make_sysfs(tmp_path, NVME, cpulist, partition)
    assert near_drive({2, 3, 8, 9}, str(tmp_path), sys_block) == expected


def test_a_stacked_or_unknown_device_leaves_all(tmp_path: Path) -> None:
    assert near_drive({1, 2}, str(tmp_path), str(tmp_path / "nothing")) == {1, 2}
    assert near_drive({1, 2}, str(tmp_path / "missing")) == {1, 2}
    sys_block = make_sysfs(tmp_path, "virtual/nvme-subsystem/nvme-subsys0/nvme0n1", None)
    (tmp_path / "local_cpulist").write_text("1")  # Outside of sysfs.
    assert near_drive({1, 2}, str(tmp_path), sys_block) == {1, 2}


def test_lists_of_cpus() -> None:
    assert cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert cpu_list("") == set()
    with pytest.raises(ValueError):
        cpu_list("0-x")


def test_threads_of_a_drive_run_near_it_unless_told_where(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[set[int], str]] = []

    def near(cpus: set[int], directory: str) -> set[int]:
        asked.append((cpus, directory))
        return {0}

    monkeypatch.setattr(executor, "near_drive", near)
    for told in (False, True):
        rig = make_rig()
        if told:  # As `cpus` does.
            rig.executor._near_drives = False
        rig.open()
        (thread,) = rig.executor._ssd
        assert thread._cpus == (rig.executor._cpus if told else {0})
    ((cpus, directory),) = asked
    assert cpus == rig.executor._cpus
    assert os.path.isdir(directory)
