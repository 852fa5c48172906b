"""Which CPUs our threads run on."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

PINNED_CPUS = 8
"""From so many CPUs on our threads leave the engine's alone."""


def io_cpus(configured: Iterable[int], engine: Collection[int], count: int) -> set[int]:
    """CPUs for our threads: the configured ones; else, from `PINNED_CPUS` on, those of `count` that the engine's thread
    leaves; else all.

    Threads inherit the mask of their creator, which on CPU machines is the engine's own core: that is why even
    "anywhere" has to be said.
    """
    everywhere = set(range(count))
    spare = everywhere.difference(engine) if count >= PINNED_CPUS else set()
    return set(configured) or spare or everywhere


def pin_this_thread(cpus: set[int]) -> None:
    """Best effort: a container may allow fewer CPUs than it shows."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        pass


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
                return cpus & cpu_list(file.read()) or cpus
        except (OSError, ValueError):
            folder = os.path.dirname(folder)
    return cpus


def cpu_list(text: str) -> set[int]:
    """CPUs of a list such as "0-3,8".

    Raises:
        ValueError: it is none.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
