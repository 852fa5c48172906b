"""The pacer by itself, in made-up time: rates, order, bounds, ends."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from saria_vllm.engine.pacer import FLOOR, PIECE_BYTES_MAX, PIECE_BYTES_MIN, RESERVE, Pacer, Rate

GB, MIB = 10**9, 1 << 20


class Clock:
    """A copier that takes no time itself: what is copied is what was allowed."""

    def __init__(self, pacer: Pacer, late_s: float = 0.0) -> None:
        self.pacer, self.now, self.late_s = pacer, 0.0, late_s
        self.copied: dict[object, int] = {}
        self.order: list[object] = []
        self.ended: dict[object, float] = {}
        """When a load's last piece was taken."""

    def until(self, end: float, tick: Callable[[float], None] = lambda now: None, step: float = 0.001) -> None:
        """Copy what may be copied; `tick` is called every `step` seconds."""
        while self.now < end:
            turn = self.pacer.choose(self.now)
            if turn.load is None:
                self.now = min(end, self.now + min(step, turn.wait_s + self.late_s))
                tick(self.now)
                continue
            self.pacer.take(turn.load, turn.nbytes, self.now)
            self.copied[turn.load] = self.copied.get(turn.load, 0) + turn.nbytes
            self.order.append(turn.load)
            self.ended[turn.load] = self.now


def knows_drive(pacer: Pacer, rate: float, drive: int = 0) -> None:
    """Teach it what a drive reads."""
    pacer.begin("teacher", 0, {drive: int(rate)}, -1.0)
    pacer.ssd_moved("teacher", drive, int(rate), 0.0)
    pacer.end("teacher", 0.0)
    assert pacer.drive_rates()[drive] == pytest.approx(rate)


def test_a_measured_drive_is_believed_until_it_was_seen() -> None:
    pacer = Pacer(link=10 * GB)
    pacer.seed_drive(0, GB)
    assert pacer.drive_rates() == {0: GB}
    pacer.begin("load", 0, {0: GB}, 0.0)
    for step in range(1, 11):
        pacer.ssd_moved("load", 0, GB // 10, step * 0.05)
    assert pacer.drive_rates()[0] > 1.8 * GB


def test_off_copies_the_oldest_first_and_never_waits() -> None:
    pacer = Pacer("off", link=GB)
    pacer.begin("mixed", 100 * MIB, {0: 100 * MIB}, 0.0)
    pacer.begin("dram", 100 * MIB, {}, 0.0)
    clock = Clock(pacer)
    clock.until(1e-9)
    assert clock.copied == {"mixed": 100 * MIB, "dram": 100 * MIB}
    assert clock.order == sorted(clock.order, reverse=True)


@pytest.mark.parametrize(("ingress", "rate"), [(0.7, 0.7 * GB), (1.0, GB), (3e8, 3e8), (5e9, 5e9)])
def test_copies_stay_under_the_cap(ingress: float, rate: float) -> None:
    pacer = Pacer(ingress=ingress, link=GB)
    assert pacer.cap == rate
    pacer.begin("a", 10 * GB, {}, 0.0)
    clock = Clock(pacer)
    clock.until(1.0)
    assert clock.copied["a"] == pytest.approx(rate, abs=2 * PIECE_BYTES_MAX)


def test_an_unknown_link_is_not_capped_until_it_is_measured() -> None:
    pacer = Pacer()
    pacer.begin("a", GB, {}, 0.0)
    clock = Clock(pacer)
    clock.until(1e-9)
    assert clock.copied["a"] == GB
    assert pacer.cap == math.inf
    pacer.copied(100 * MIB, 0.0, 0.1)
    assert pacer.cap == pytest.approx(0.7 * 1000 * MIB)


def test_the_link_is_measured_only_while_nothing_is_read() -> None:
    pacer = Pacer(link=GB)
    pacer.begin("a", GB, {0: 2 * MIB}, 0.0)
    pacer.copied(100 * MIB, 0.0, 10.0)
    pacer.ssd_moved("a", 0, 2 * MIB, 10.0)
    pacer.copied(100 * MIB, 9.0, 20.0)  # Began while something was read.
    pacer.copied(100, 11.0, 20.0)  # Too little to say anything.
    assert pacer.link == GB
    pacer.copied(100 * MIB, 20.0, 20.2)
    assert 100 * MIB / 0.2 < pacer.link < GB


@pytest.mark.parametrize("mode", ["priority", "matched"])
def test_while_reads_are_in_flight_copies_leave_the_drives_their_rate(mode: str) -> None:
    pacer = Pacer(mode, ingress=1.0, link=GB)  # type: ignore[arg-type]
    knows_drive(pacer, 0.25 * GB, 0)
    knows_drive(pacer, 0.25 * GB, 1)
    pacer.begin("a", 10 * GB, {0: GB, 1: GB}, 0.0)
    clock = Clock(pacer)
    clock.until(0.4)
    assert clock.copied["a"] == pytest.approx(0.4 * (GB - 0.5 * GB * RESERVE), abs=2 * PIECE_BYTES_MIN)
    pacer.ssd_moved("a", 1, GB, 0.4, well=False)  # Now only one of them reads.
    before = clock.copied["a"]
    clock.until(0.8)
    assert clock.copied["a"] - before == pytest.approx(0.4 * (GB - 0.25 * GB * RESERVE), abs=3 * PIECE_BYTES_MIN)
    pacer.ssd_moved("a", 0, GB, 0.8, well=False)
    before = clock.copied["a"]
    clock.until(1.2)
    assert clock.copied["a"] - before == pytest.approx(0.4 * GB, abs=3 * PIECE_BYTES_MIN)


@pytest.mark.parametrize("mode", ["priority", "matched"])
def test_beside_others_mixed_loads_get_the_matched_rate(mode: str) -> None:
    """n_dram / n_ssd x B_ssd x (1 + epsilon), over all loads that are read before."""
    pacer = Pacer(mode, ingress=1.0, epsilon=0.1, link=GB)  # type: ignore[arg-type]
    knows_drive(pacer, 0.4 * GB)
    pacer.begin("mixed", 2 * GB, {0: 4 * GB}, 0.0)
    pacer.begin("dram", 100 * GB, {}, 0.0)
    clock = Clock(pacer)
    clock.until(0.1)  # The ratio of what is left hardly changes meanwhile.
    matched = 2 / 4 * 0.4 * GB * 1.1
    free = GB - 0.4 * GB * RESERVE
    assert clock.copied["mixed"] == pytest.approx(0.1 * matched, abs=PIECE_BYTES_MIN)
    assert clock.copied["dram"] == pytest.approx(0.1 * (free - matched), abs=PIECE_BYTES_MIN)


def test_a_load_is_matched_to_all_reads_before_its_last() -> None:
    pacer = Pacer("matched", ingress=1.0, epsilon=0.0, link=GB)
    knows_drive(pacer, 0.4 * GB)
    pacer.begin("ssd", 0, {0: 3 * GB}, 0.0)
    pacer.begin("mixed", 2 * GB, {0: GB}, 0.0)
    clock = Clock(pacer)
    clock.until(0.2)
    assert clock.copied["mixed"] == pytest.approx(0.2 * 0.4 * GB * 2 / 4, abs=PIECE_BYTES_MIN)


def test_a_drive_that_reads_less_is_believed_slower_only_slowly() -> None:
    """More often it was held back."""
    pacer = Pacer(ingress=1.0, link=GB)
    knows_drive(pacer, 0.4 * GB)
    pacer.begin("mixed", GB, {0: GB}, 0.0)
    pacer.ssd_moved("mixed", 0, GB // 50, 0.1)
    assert 0.37 * GB < pacer.drive_rates()[0] < 0.39 * GB


def test_matched_holds_mixed_loads_back_also_when_they_are_alone() -> None:
    for mode, rate in (("matched", 0.1 * 0.4 * GB * 1.05), ("priority", GB - 0.4 * GB * RESERVE)):
        pacer = Pacer(mode, ingress=1.0, link=GB)  # type: ignore[arg-type]
        knows_drive(pacer, 0.4 * GB)
        pacer.begin("mixed", GB, {0: 10 * GB}, 0.0)
        clock = Clock(pacer)
        clock.until(0.5)
        assert clock.copied["mixed"] == pytest.approx(0.5 * rate, rel=0.3, abs=PIECE_BYTES_MIN), mode


@pytest.mark.parametrize(("dram", "ssd"), [(1 << 40, 1), (1 << 30, 1 << 50)])
def test_neither_kind_starves(dram: int, ssd: int) -> None:
    pacer = Pacer(ingress=1.0, link=GB)
    knows_drive(pacer, 0.5 * GB)
    pacer.begin("mixed", dram, {0: ssd}, 0.0)
    pacer.begin("dram", 1 << 40, {}, 0.0)
    clock = Clock(pacer)
    clock.until(0.9)
    free = GB - 0.5 * GB * RESERVE
    assert min(clock.copied.values()) == pytest.approx(0.9 * FLOOR * free, abs=PIECE_BYTES_MIN)
    assert sum(clock.copied.values()) == pytest.approx(0.9 * free, abs=3 * PIECE_BYTES_MIN)


def test_drives_as_fast_as_the_ingress_leave_a_floor() -> None:
    pacer = Pacer(ingress=1.0, link=GB)
    knows_drive(pacer, 5 * GB)
    pacer.begin("mixed", GB, {0: GB}, 0.0)
    clock = Clock(pacer)
    clock.until(1.0)
    assert clock.copied["mixed"] == pytest.approx(FLOOR * GB, abs=PIECE_BYTES_MIN)


def test_an_unknown_drive_gets_half() -> None:
    pacer = Pacer(ingress=1.0, link=GB)
    pacer.begin("mixed", 10 * GB, {0: GB}, 0.0)
    clock = Clock(pacer)
    clock.until(1.0 - 0.001)
    assert clock.copied["mixed"] == pytest.approx(GB / 2, abs=2 * PIECE_BYTES_MAX)


def test_a_drive_that_hangs_holds_nobody_back_for_long() -> None:
    pacer = Pacer(ingress=1.0, link=GB)
    knows_drive(pacer, 0.9 * GB)
    pacer.begin("mixed", 100 * GB, {0: GB}, 0.0)
    clock = Clock(pacer)
    clock.until(10.0)
    before = clock.copied["mixed"]
    clock.until(11.0)
    assert clock.copied["mixed"] - before > 0.95 * GB


def test_a_drive_that_was_held_back_is_seen_to_be_faster() -> None:
    """It reads what the ingress leaves. Believing that would give it no more for ever."""
    pacer, drive = Pacer(ingress=1.0, link=GB), 0.6 * GB
    knows_drive(pacer, 0.1 * GB)
    pacer.begin("mixed", 100 * GB, {0: 100 * GB}, 0.0)
    clock, window = Clock(pacer), [0, 0.0]

    def read(now: float) -> None:
        copied, since = window
        if now - since >= 0.05:
            rate = min(drive, GB - (clock.copied["mixed"] - copied) / (now - since))
            pacer.ssd_moved("mixed", 0, int(rate * (now - since)), now)
            window[:] = [clock.copied["mixed"], now]

    clock.until(10.0, read)
    assert pacer.drive_rates()[0] > 0.9 * drive


def test_a_load_that_ends_takes_its_reads_along() -> None:
    pacer = Pacer(ingress=1.0, link=GB)
    knows_drive(pacer, 0.5 * GB)
    pacer.begin("cancelled", 10 * GB, {0: GB}, 0.0)
    pacer.begin("dram", 10 * GB, {}, 0.0)
    pacer.end("cancelled", 0.0)
    pacer.end("cancelled", 0.0)
    pacer.ssd_moved("cancelled", 0, 1000, 0.0)  # Of reads that end later.
    pacer.take("cancelled", 1000, 0.0)
    clock = Clock(pacer)
    clock.until(1.0)
    assert clock.copied == {"dram": pytest.approx(GB, abs=2 * PIECE_BYTES_MAX)}


def test_overslept_time_is_made_up_for() -> None:
    pacer = Pacer(ingress=1.0, link=GB)
    pacer.begin("a", 10 * GB, {}, 0.0)
    clock = Clock(pacer, late_s=0.003)  # Most of a piece's time.
    clock.until(1.0, step=1.0)
    assert clock.copied["a"] == pytest.approx(GB, abs=2 * PIECE_BYTES_MAX)


def test_idling_is_not_hoarded() -> None:
    pacer = Pacer(ingress=1.0, link=GB)
    pacer.choose(0.0)
    pacer.begin("a", 10 * GB, {}, 100.0)
    clock = Clock(pacer)
    clock.now = 100.0
    clock.until(100.0 + 1e-6)
    assert clock.copied["a"] == PIECE_BYTES_MIN
    clock.now = 200.0  # The copier was busy with something else.
    clock.until(200.0 + 1e-6)
    assert clock.copied["a"] <= 4 * PIECE_BYTES_MIN


def test_small_loads_in_a_row_stay_under_the_cap() -> None:
    """A load's debt outlives it."""
    pacer = Pacer(ingress=1.0, link=GB)
    clock, number = Clock(pacer), 0

    def another(now: float) -> None:
        nonlocal number
        pacer.end(number, now)
        number += 1
        pacer.begin(number, PIECE_BYTES_MIN, {}, now)

    clock.until(1.0, another, step=0.0005)
    assert sum(clock.copied.values()) == pytest.approx(GB, abs=2 * PIECE_BYTES_MAX)


def test_pieces_grow_with_the_rate_within_bounds() -> None:
    for link, nbytes in ((GB, PIECE_BYTES_MIN), (10 * GB, 10**7), (100 * GB, PIECE_BYTES_MAX)):
        pacer = Pacer(ingress=1.0, link=link)
        pacer.begin("a", GB, {}, 0.0)
        assert pacer.choose(0.0).nbytes == nbytes
    pacer.begin("small", 7, {}, 0.0)
    pacer.end("a", 0.0)
    assert pacer.choose(0.0) == ("small", 7, 0.0)


def test_nothing_to_copy_is_nothing_to_wait_for() -> None:
    pacer = Pacer(link=GB)
    assert pacer.choose(0.0) == (None, 0, math.inf)
    pacer.begin("ssd", 0, {0: GB}, 0.0)
    assert pacer.choose(0.0) == (None, 0, math.inf)


def test_a_rate_is_an_average_over_time_that_begins_with_the_first_sample() -> None:
    rate = Rate()
    rate.add(0, 1.0)
    assert rate.value == 0
    rate.add(100, 1.0)
    assert rate.value == 100
    rate.add(5, 0.0)
    assert rate.value == 100
    for _ in range(2):
        rate.add(20, 0.1)
    assert rate.value == pytest.approx(200 - 100 / math.e)
    rate.add(0, 10.0)
    assert rate.value == pytest.approx(0, abs=1e-9)
    held = Rate(100, fall_s=1.0)
    held.add(0, 0.1)
    assert held.value == pytest.approx(100 * math.exp(-0.1))
    held.add(100, 0.2)
    assert held.value > 300


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_load_is_copied(seed: int) -> None:
    rng = random.Random(seed)
    pacer = Pacer(rng.choice(["priority", "matched", "off"]), rng.choice([0.7, 1e8]), link=rng.choice([0.0, GB]))  # type: ignore[arg-type]
    clock, left, reads = Clock(pacer), {}, []
    for load in range(30):
        ssd = {drive: rng.randrange(1, GB // 10) for drive in range(rng.randrange(3))}
        left[load] = rng.choice([0, rng.randrange(GB // 10)])
        pacer.begin(load, left[load], ssd, clock.now)
        reads += [(load, drive, nbytes) for drive, nbytes in ssd.items()]
        clock.until(clock.now + rng.random() * 0.05)
        if rng.random() < 0.3:
            ended = rng.choice(list(left))
            pacer.end(ended, clock.now)
            left[ended] = clock.copied.get(ended, 0)
        rng.shuffle(reads)
        for load_, drive, nbytes in reads[len(reads) // 2 :]:
            pacer.ssd_moved(load_, drive, nbytes, clock.now, rng.random() < 0.9)
        del reads[len(reads) // 2 :]
    clock.until(clock.now + 60.0, step=1.0)
    assert {load: nbytes for load, nbytes in left.items() if nbytes} == clock.copied
    assert pacer.choose(clock.now) == (None, 0, math.inf)
