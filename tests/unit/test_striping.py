"""Drives of unlike speed, that fail, that are full: where chunks go. A model of drives stands for the real ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from saria_vllm.policy.extents import GROWTH_S, ExtentAllocator
from saria_vllm.policy.striping import (
    AVERAGE_S,
    FULL_PAUSE_MAX_S,
    LEAST_SHARE,
    PAUSE_MAX_S,
    PAUSE_S,
    READ_FAILED_S,
    READS_PAUSE_S,
    Striping,
)
from saria_vllm.types import Ints, Moved

MIB = 1 << 20


class Machine:
    """Drives that read so many bytes per second, each its queue in order; requests of records of 1 MiB."""

    def __init__(self, rates: Sequence[float], segments_max: int = 10**6) -> None:
        self.rates = list(rates)
        self.extents = ExtentAllocator(len(rates), segments_max, [16])
        self.rows = 0

    def write(self, chunks: int, room: Sequence[int] | None = None, now: float = 0.0) -> Ints:
        taken, _ = self.extents.take(0, chunks, room or [10**6] * len(self.rates), now)
        self.extents.filled(taken, np.arange(self.rows, self.rows + len(taken), dtype=np.int32))
        self.extents.release(taken)
        self.rows += len(taken)
        return taken

    def read(self, extents: Ints) -> list[float]:
        """When each drive that is asked has read its part; the scheduler learns it."""
        ends = []
        for drive, rate in enumerate(self.rates):
            nbytes = int((extents[:, 0] == drive).sum()) * MIB
            if nbytes:
                ends.append(nbytes / rate)
                self.extents.striping.learn(Moved(drive, nbytes, nbytes / rate, 0, 0.0))
        return ends

    def serve(self, requests: int, chunks: int) -> None:
        for _ in range(requests):
            self.read(self.write(chunks))


def test_a_rate_measured_before_any_read_gives_way_to_what_is_read() -> None:
    striping = Striping(2)
    striping.seed(0, 1e9)
    assert striping.read_rates() == [pytest.approx(1e9), 0.0] and striping.read_bytes_s(0.0) == pytest.approx(2e9)
    striping.learn(Moved(0, 128 << 20, (128 << 20) / 1e8, 0, 0.0))
    assert striping.read_rates()[0] < 1.1e8


def test_reads_of_a_request_end_together_on_drives_of_unlike_speed() -> None:
    machine = Machine([3e9, 3e9, 1e9, 0.5e9])
    even = machine.read(machine.write(256))
    assert max(even) / min(even) == pytest.approx(6), "before anything is known"
    machine.serve(4, 256)
    for _ in range(10):
        ends = machine.read(machine.write(256))
        assert max(ends) / min(ends) < 1.1
        best = 256 * MIB / sum(machine.rates)
        assert max(ends) < 1.05 * best
    chunks = machine.write(256)[:, 0]
    for start in range(0, 192, 64):
        part = machine.read(np.stack([chunks[start : start + 64]] * 3, 1))
        assert max(part) < 1.35 * 64 * MIB / sum(machine.rates), "so do those of a part of it"


def test_a_drive_that_becomes_slow_does_not_hold_up_loads_for_ever() -> None:
    machine = Machine([2e9] * 4)
    machine.serve(20, 256)
    machine.rates[2] = 0.1e9
    late = 0.0
    while (took := max(machine.read(machine.write(256)))) > 1.3 * 256 * MIB / sum(machine.rates):
        late += took
        assert late < 3 * AVERAGE_S, "it is learnt within some times of the average"
    machine.rates[2] = 2e9
    machine.serve(200, 256)
    assert machine.extents.striping.weights()[2] > 0.9, "and it is found to be well again"


def test_a_drive_that_hardly_reads_keeps_a_little() -> None:
    machine = Machine([1e9, 1e6])
    machine.serve(3, 64)
    assert machine.extents.striping.weights() == [1.0, LEAST_SHARE]
    drives = machine.write(330)[:, 0]
    assert (drives == 1).sum() == pytest.approx(330 * LEAST_SHARE / (1 + LEAST_SHARE), abs=1)


def test_what_is_not_known_counts_as_usual_and_writes_stand_in_for_reads() -> None:
    striping = Striping(3)
    assert striping.weights() == [1.0, 1.0, 1.0]
    striping.learn(Moved(0, 0, 0.0, 90 * MIB, 1.0))
    striping.learn(Moved(1, 0, 0.0, 30 * MIB, 1.0))
    assert striping.weights() == pytest.approx([1, 1 / 3, 2 / 3])
    striping.learn(Moved(1, 1 * MIB, 0.001, 0, 0.0))
    assert striping.weights() == pytest.approx([1, 1 / 3, 2 / 3]), "one small read says nothing"
    striping.learn(Moved(1, 40 * MIB, 1.0, 0, 0.0))
    striping.learn(Moved(2, 10 * MIB, 1.0, 0, 0.0))
    weights = striping.weights()
    assert weights[1] == 1.0
    assert weights[2] == pytest.approx(10 / 41, rel=0.01)
    assert weights[0] == pytest.approx((1 + 10 / 41) / 2, rel=0.01)


def test_a_drive_that_hangs_is_known_to_be_slow_though_it_moved_nothing() -> None:
    striping = Striping(2)
    striping.learn(Moved(0, 64 * MIB, 0.1, 0, 0.0))
    striping.learn(Moved(1, 0, 30.0, 0, 0.0))
    assert striping.weights() == [1.0, LEAST_SHARE]


def test_nobody_catches_up_with_what_he_missed() -> None:
    machine = Machine([1e9, 1e9])
    machine.write(500, [1000, 0])
    assert machine.write(8)[:, 0].tolist() in ([1, 0] * 4, [0, 1] * 4)
    machine.write(500, [1000, 3])
    drives = machine.write(8)[:, 0].tolist()
    assert drives.count(0) >= 3, drives


def test_counters_of_drives_have_their_labels() -> None:
    striping = Striping(2)
    striping.labels = ["/a", "/b"]
    striping.learn(Moved(1, 5, 1.0, 7, 1.0))
    striping.failed(0, False, 0.0)
    striping.failed(0, False, 1.0)
    assert striping.counts == {"drive_read_bytes:/b": 5, "drive_written_bytes:/b": 7, "drive_pauses:/a": 1}


def test_pauses_grow_while_a_drive_fails_soon_after_each_and_begin_anew_when_it_does_not() -> None:
    striping, now, lengths = Striping(1), 0.0, []
    for _ in range(9):
        striping.failed(0, False, now)
        began = now
        while not striping.writable(now)[0]:
            now += 1.0
            striping.failed(0, False, began + 0.5)  # What was in flight ends within the pause: it is the same failure.
        lengths.append(now - began)
    assert lengths == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    now += PAUSE_MAX_S
    striping.failed(0, False, now)
    assert striping.writable(now + PAUSE_S) == [True]
    striping.full(0, now + PAUSE_S)
    for _ in range(9):
        while not striping.writable(now)[0]:
            now += 1.0
        striping.full(0, now)
    assert striping.writable(now + FULL_PAUSE_MAX_S) == [True], "who was full is asked again soon"


def test_reads_stop_with_the_second_that_fails() -> None:
    striping = Striping(2)
    striping.failed(1, True, 0.0)
    assert striping.unreadable(0.0) is None
    assert striping.writable(0.0) == [True, False]
    striping.failed(1, True, READ_FAILED_S)
    assert striping.unreadable(READ_FAILED_S) is None
    striping.failed(1, True, READ_FAILED_S + 30.0)
    unreadable = striping.unreadable(READ_FAILED_S + 30.0)
    assert unreadable is not None
    assert unreadable.tolist() == [False, True]
    assert striping.unreadable(READ_FAILED_S + 30.0 + READS_PAUSE_S) is None


# Failures, in the allocator.


def failed(machine: Machine, place: tuple[int, int, int], now: float, reading: bool = True) -> list[int]:
    return machine.extents.failed(np.array([place], np.int32), reading, now).tolist()


def test_a_failed_record_takes_its_segment_with_it_when_its_last_job_ends() -> None:
    machine = Machine([1e9])
    machine.write(16)
    open_one = machine.write(4)
    busy = machine.extents.take(0, 2, [9], 0.0)[0]
    assert failed(machine, (0, 1, 0), 0.0) == [16, 17, 18, 19]
    assert machine.extents.retired == []
    assert machine.extents.given_up(np.concatenate((open_one, busy))).all()
    assert not machine.extents.given_up(np.array([[0, 0, 3]], np.int32)).any()
    assert failed(machine, (0, 1, 1), 0.0) == [], "what fails behind it is no second failure"
    assert machine.extents.unreadable(0.0) is None
    assert machine.write(1, now=PAUSE_S).tolist() == [[0, 2, 0]], "it is not filled on"
    machine.extents.release(busy)
    assert machine.extents.retired == [(0, 1)]
    assert failed(machine, (0, 1, 2), PAUSE_S) == []
    assert machine.write(1, now=PAUSE_S).tolist() == [[0, 2, 1]]


def test_a_full_drive_loses_its_oldest_segment_once_and_gets_no_more_than_it_had() -> None:
    machine = Machine([1e9], segments_max=10)
    machine.write(4 * 16)
    new = [machine.extents.take(0, 1, [9], 0.0)[0] for _ in range(2)]
    lost = [machine.extents.full(extents, 0.0).tolist() for extents in new]
    assert lost == [list(range(16)), []]
    for extents in new:
        machine.extents.release(extents)
    assert machine.extents.retired == [(0, 0), (0, 4)]
    assert len(machine.write(1, now=PAUSE_S - 0.1)) == 0
    assert machine.write(16, now=PAUSE_S)[:, 1].tolist() == [5] * 16
    assert machine.extents.retired[2:] == [], "one went for this one"
    machine.write(16, now=PAUSE_S)
    assert machine.extents.retired[2:] == [(0, 1)]
    machine.write(16, now=2 * GROWTH_S)
    machine.write(16, now=2 * GROWTH_S)
    assert machine.extents.retired[2:] == [(0, 1)], "after a while more are tried"
    assert machine.extents.segments() == 6
    machine.write(16 * 9, now=9e9)
    assert machine.extents.segments() == 10, "but never more than the cap"


def test_a_full_drive_without_anything_of_ours_is_asked_again() -> None:
    machine = Machine([1e9], segments_max=4)
    now = 0.0
    for _ in range(5):
        (extents,) = [machine.extents.take(0, 3, [9], now)[0]]
        assert len(extents) == 3
        assert machine.extents.full(extents, now).tolist() == []
        machine.extents.release(extents)
        assert machine.extents.segments() == 0
        now += FULL_PAUSE_MAX_S
    assert len(machine.write(3, now=now)) == 3


def test_a_drive_whose_directory_is_gone_is_left_and_said_once() -> None:
    machine = Machine([1e9, 1e9])
    machine.write(40)
    reading = np.array([[0, 0, 0]], np.int32)
    machine.extents.hold(reading)
    lost = machine.extents.lose_drive(0)
    assert len(lost) == 20
    assert machine.extents.lose_drive(0).tolist() == []
    assert machine.extents.retired == [(0, 1)]
    machine.extents.release(reading)
    assert machine.extents.retired == [(0, 1), (0, 0)]
    assert set(machine.write(10, now=9e9)[:, 0].tolist()) == {1}
    machine.extents.lose_drive(1)
    assert len(machine.write(10, now=9e9)) == 0
    said = machine.extents.striping.problems
    assert len(said) == 2
    assert "SSD tier is off" in said[1] and "off" not in said[0]


def test_what_all_drives_read_together_leaves_out_those_that_are_not_read_from() -> None:
    striping = Machine([1e9] * 3).extents.striping
    assert striping.read_bytes_s(0.0) == 0
    striping.learn(Moved(0, 1000 * MIB, 1.0, 0, 0.0))
    assert striping.read_bytes_s(0.0) == pytest.approx(3000 * MIB), "others are believed to be as fast"
    striping.learn(Moved(1, 400 * MIB, 1.0, 1000 * MIB, 1.0))
    assert striping.read_bytes_s(0.0) == pytest.approx(2100 * MIB)
    striping.late(0, 0.0)
    assert striping.read_bytes_s(1.0) == pytest.approx(800 * MIB)
    striping.leave_out(2)
    assert striping.read_bytes_s(1.0) == pytest.approx(400 * MIB)
    assert striping.read_bytes_s(READS_PAUSE_S) == pytest.approx(1400 * MIB)
