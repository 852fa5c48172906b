"""Processes that are killed or told to stop: nothing is left in /dev/shm (B44), and an end takes no long time (B61)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from doubles import Fault, Rig, Transfer, from_dram, from_ssd
from saria_vllm.types import Extent, StoreItem

QUEUED = 500
SLOTS = 100


def shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("saria-pool-")}


def start(*arguments: str) -> subprocess.Popen[str]:
    """This file as a program, which says on its standard output what it does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path])}
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def await_line(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == wanted:
            return
    raise AssertionError(f"it ended before it said {wanted}")


# B44


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_b44_a_killed_engine_leaves_nothing_in_shared_memory(tmp_path: Path, rounds: int) -> None:
    """Where it is killed before its ranks have the pool, the next start clears it away."""
    before, rng = shared_files(), random.Random(44)
    for stage in ("starting", "idle", "loading") * rounds:
        process = start("serve", str(tmp_path))
        await_line(process, stage)
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
        if stage != "starting":
            assert shared_files() == before, stage
    last = start("stop", str(tmp_path))
    assert last.wait(60) == 0
    assert last.stdout is not None
    last.stdout.close()
    assert shared_files() == before


# B61


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow), "twice"])
def test_b61_an_end_with_500_queued_writes_on_a_slow_drive_takes_no_3_seconds(tmp_path: Path, how: str) -> None:
    process = start("busy", str(tmp_path), how)
    await_line(process, "busy")
    began = time.monotonic()
    if how != "twice":
        process.send_signal(getattr(signal, how))
    assert process.stdout is not None
    said = process.stdout.read()
    assert process.wait(10) == 0, said
    took = time.monotonic() - began
    process.stdout.close()
    assert took < 3 + 1, "a second for the interpreter's own end"
    assert float(said.split()[0]) < 3
    written = int(said.split()[1])
    assert 0 < written < QUEUED
    # The rule: what the drive had begun is there, the rest is dropped.
    rig = Rig(tmp_path)
    try:
        found = rig.open().found
        assert len(found) == written + 4
        for chunk in found.items[:20]:
            rig.fill(0, b"foreign", (0, 1, 2, 3))
            assert rig.loaded(rig.load(from_ssd(0, (0, 1, 2, 3), chunk.extent, chunk.key))).failed == []
            number = int(chunk.key[1:]) % SLOTS
            assert rig.is_at(0, chunk.key[:1] + b"%d" % number, (0, 1, 2, 3))
    finally:
        rig.executor.close()
    assert not [name for name in (tmp_path / "drive0" / "r0").iterdir() if not name.name.startswith("seg-")]


# The program.


def serve(rig: Rig) -> None:
    """Stores, loads and persists until it is killed."""
    print("idle", flush=True)
    time.sleep(0.2)
    print("loading", flush=True)
    for number in range(100_000):
        rig.store(StoreItem(0, rig.slot(0, number % 50), (0, 1, 2, 3)))
        rig.put_on_ssd(0, b"k", Extent(0, 10 + number // 4, number % 4))
        rig.load(from_dram(0, (4, 5, 6, 7), rig.slot(0, 0)), from_ssd(0, (8, 9, 10, 11), Extent(0, 0, 0), b"s0"))
        rig.poll()


class Stop(Exception):
    pass


def busy(rig: Rig, how: str) -> None:
    def slow(transfer: Transfer) -> Fault | None:
        return Fault(delay_s=0.05) if transfer.kind == "write" else None

    def stop(_signal: int, _frame: object) -> None:
        raise Stop

    rig.faults = slow
    for name in ("SIGTERM", "SIGINT"):
        signal.signal(getattr(signal, name), stop)
    for number in range(QUEUED):
        key, slot = b"w%d" % number, rig.slot(0, number % SLOTS)
        if number < SLOTS:
            rig.write_slot(0, key, slot)
        rig.persist(0, slot, Extent(0, 1 + number // 4, number % 4), key)
    time.sleep(0.3)
    try:
        print("busy", flush=True)
        time.sleep(60 if how != "twice" else 0)
    except Stop:
        pass
    began = time.monotonic()
    rig.executor.close()
    if how == "twice":
        rig.executor.close()
    took = time.monotonic() - began
    rig.poll()
    print(took, sum(not results[0].failed for results in rig.results.values()) - 4, flush=True)


def main(what: str, folder: str, how: str = "") -> None:
    print("starting", flush=True)
    rig = Rig(Path(folder))
    rig.open()
    if what != "stop":
        for record in range(4):
            rig.put_on_ssd(0, b"s%d" % record, Extent(0, 0, record))
    if what == "serve":
        serve(rig)
    elif what == "busy":
        busy(rig, how)
    rig.executor.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
