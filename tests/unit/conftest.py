"""Fixtures of the tests of executor and store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles import (
    MakeRig,
    Rig,
    holdings,
    wait_for,
)
from store_bench import Bench


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    """Rigs that are closed at the end, and must then leave nothing behind."""
    before, rigs = holdings(), []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(**{"directory": tmp_path} | options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.executor.close()
        assert all(engine.closed for engine in rig.engines)
    wait_for(lambda: holdings() == before, 10)


@pytest.fixture(params=["posix", "io_uring", "io_uring to a device"])
def rig(request: pytest.FixtureRequest, make_rig: MakeRig) -> Iterator[Rig]:
    """One with an open SSD tier. Every job must have ended exactly once, and every buffer be back. The device is the
    CPU, reached as one."""
    engine, _, on_device = request.param.partition(" to a ")
    if on_device:
        pytest.importorskip("torch", reason="torch is not installed")
    opened = (rig := make_rig(engine=engine, on_device=bool(on_device))).open()
    assert (len(opened.found), opened.next_segment, opened.problem) == (0, 0, "")
    yield rig
    rig.poll()
    rig.check_quiet()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for store in bench.stores:
        store.close()
