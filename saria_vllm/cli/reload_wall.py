"""The arms of `saria bench reload` in wall time."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

from saria_vllm.cli import UsageError
from saria_vllm.cli.reload_mix import DRIVE_SHARE
from saria_vllm.cli.reload_time import Machine, Reload
from saria_vllm.config import PacingMode
from saria_vllm.engine.reload_bench import RECORD_BYTES, ReloadBench

CHUNKS = 256
SSD_SHARES = (0.25, 0.5, 0.75)
ROUNDS = 3

INGRESS = 800e6
"""Bytes per second: what small machines can do with room to spare."""

Row = dict[str, Any]


def check_directory(path: str) -> None:
    """Raises UsageError, before any work, where nothing can be written."""
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--wall {path}: accepted: a directory that this user can write in")


def in_wall_time(path: str, drives: int, tell: Callable[[str], None]) -> list[Row]:
    """A row for each arm and share on SSD: the median of some rounds, beside the ideal.

    Raises:
        StorageError: the drive fails, or brings other bytes than were stored.
    """
    machine = Machine(INGRESS, (INGRESS * DRIVE_SHARE,) * drives)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="saria-bench-", dir=path) as directory:
        modes: tuple[PacingMode, ...] = ("off", "priority")
        for mode in modes:
            tell(f"{drives} drives in wall time, pacing {mode}")
            with ReloadBench(directory, CHUNKS, machine.ingress, machine.drives, mode) as bench:
                bench.load(range(CHUNKS), range(0))  # Now the drives are known.
                for share in SSD_SHARES:
                    rows += _rows(bench, machine, mode, int(CHUNKS * share))
    return rows


def _rows(bench: ReloadBench, machine: Machine, mode: PacingMode, on_ssd: int) -> list[Row]:
    nothing, everything, ssd, dram = range(0), range(CHUNKS), range(on_ssd), range(on_ssd, CHUNKS)
    arms: dict[str, Callable[[], float]] = {
        "two_hops": lambda: bench.load(ssd, nothing) + bench.load(nothing, everything),
        "one_after_the_other": lambda: bench.load(ssd, nothing) + bench.load(nothing, dram),
        "overlapped": lambda: bench.load(ssd, dram),
    }
    if mode != "off":
        arms = {"coordinated": arms["overlapped"]}
    ideal = machine.ideal_s(Reload(len(dram) * RECORD_BYTES, on_ssd * RECORD_BYTES))
    rows = []
    for arm, load in arms.items():
        seconds = statistics.median(load() for _ in range(ROUNDS))
        rows.append(
            {
                "drives": len(machine.drives),
                "arm": arm,
                "ssd_share": on_ssd / CHUNKS,
                "seconds": seconds,
                "over_ideal": seconds / ideal,
            }
        )
    return rows
