"""How long a drive was busy with how many bytes, whatever became of them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from doubles import Fault, Rig, from_ssd, load_job, persist_job
from saria_vllm.config import LOAD_DEADLINE_S
from saria_vllm.engine.jobs import Ends, Meter, PersistState
from saria_vllm.engine.pieces import Pieces
from saria_vllm.types import Extent, PersistItem, Slot

EXTENTS = [Extent(0, 0, 0), Extent(1, 0, 0), Extent(1, 0, 1)]
SSD_BYTES = {0: 100, 1: 200}
PLACES = {0: (0, 100), 1: (1, 100), 2: (1, 100)}


def test_busy_time_is_from_the_first_under_way_to_none() -> None:
    meter = Meter()
    meter.begin(2, 10.0)
    meter.begin(1, 11.0)
    meter.end(2, 20, 12.0)
    assert meter.take(13.0) == (20, 3.0)
    meter.end(1, 10, 14.0)
    assert meter.take(20.0) == (10, 1.0)
    meter.begin(1, 30.0)
    meter.end(1, 0, 31.0)
    assert meter.take(31.0) == (0, 1.0), "what failed took its time"
    assert meter.take(40.0) == (0, 0.0)


def test_each_drive_of_a_load_is_measured_and_what_failed_has_no_bytes() -> None:
    ends = Ends()
    began = time.monotonic()
    state = ends.begin(load_job(1, "r", [from_ssd(0, (0,), extent, b"k") for extent in EXTENTS]), began)
    ends.begin_moves(state, Pieces([], {}), dict(PLACES), dict(SSD_BYTES), began)
    ends.items(state, (0,))
    ends.items(state, (1,), "read_failed")
    first, second = ends.take_moved(time.monotonic())
    assert (first.drive, first.read_bytes, first.written_bytes) == (0, 100, 0)
    assert (second.drive, second.read_bytes) == (1, 0)
    assert second.read_s >= first.read_s > 0
    ends.items(state, (2,))
    (moved,) = ends.take_moved(time.monotonic())
    assert (moved.drive, moved.read_bytes) == (1, 100)
    assert ends.take_moved(time.monotonic()) == []


def test_a_load_that_reaches_its_deadline_stops_the_clock_and_what_comes_late_is_nothing() -> None:
    ends = Ends()
    state = ends.begin(load_job(1, "r", [from_ssd(0, (0,), extent, b"k") for extent in EXTENTS]), 0.0)
    ends.begin_moves(state, Pieces([], {}), dict(PLACES), dict(SSD_BYTES), time.monotonic() - LOAD_DEADLINE_S)
    ends.expire(LOAD_DEADLINE_S + 1)
    ends.items(state, (0, 1, 2))
    moved = ends.take_moved(time.monotonic() + 100)
    assert [one.read_bytes for one in moved] == [0, 0]
    assert [one.read_s for one in moved] == pytest.approx([LOAD_DEADLINE_S] * 2, abs=1)
    assert ends.take_moved(time.monotonic() + 200) == []


def test_writes_are_measured_by_job() -> None:
    ends = Ends()
    job = persist_job(1, *(PersistItem(0, Slot(0, n), Extent(1, 0, n), b"k", b"") for n in range(3)))
    state = PersistState(job, 1, 1, 4096)
    ends.begin_writes(state, time.monotonic() - 2)
    for position, reason in enumerate(["", "write_failed", ""]):
        ends.written(state, position, reason)
    (moved,) = ends.take_moved(time.monotonic())
    assert (moved.drive, moved.written_bytes) == (1, 2 * 4096)
    assert moved.write_s == pytest.approx(2, abs=0.5)


def test_a_slow_drive_is_seen_to_be_slow(rig: Rig) -> None:
    for record in range(4):
        rig.put_on_ssd(0, b"k%d" % record, Extent(0, 0, record))
    rig.executor.take_moved()
    rig.faults = lambda _transfer: Fault(delay_s=0.2)
    items = [from_ssd(0, tuple(np.arange(4) + 4 * n), Extent(0, 0, n), b"k%d" % n) for n in range(4)]
    assert rig.loaded(rig.load(*items)).failed == []
    (moved,) = rig.executor.take_moved()
    assert moved.read_bytes == 4 * rig.shapes[0].record_bytes
    assert 0.2 <= moved.read_s < 5
