"""Which CPUs are near a drive."""

from __future__ import annotations

import os


def near_drive(cpus: set[int], directory: str, sys_block: str = "/sys/dev/block") -> set[int]:
    """Those of `cpus` on the NUMA node of the drive under `directory`; all of them where none is, or nobody knows.

    sysfs says it of the PCI device that the drive hangs on. Stacked devices (LVM, RAID, NVMe multipath) hang on none.
    """
    try:
        device = os.stat(directory).st_dev
    except OSError:
        return cpus
    folder = os.path.realpath(f"{sys_block}/{os.major(device)}:{os.minor(device)}")
    root = os.path.realpath(sys_block)
    while os.path.dirname(folder) != folder and not root.startswith(folder):
        try:
            with open(f"{folder}/local_cpulist", encoding="ascii") as file:
                return cpus & _cpu_list(file.read()) or cpus
        except (OSError, ValueError):
            folder = os.path.dirname(folder)
    return cpus


def _cpu_list(text: str) -> set[int]:
    """CPUs of a list such as "0-3,8"; ValueError when it is none."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
