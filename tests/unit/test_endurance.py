"""The endurance governor: bytes per day, carry-over, the cap of any 24 hours, restarts."""

from __future__ import annotations

import random

import msgspec
import pytest

from saria_vllm.policy.endurance import BAND_DAYS, DAY_S, EnduranceState, Governor, drive_life_years

GB = 10**9


def write(governor: Governor, wanted: int, now: float) -> int:
    nbytes = min(wanted, governor.room(now))
    governor.spend(nbytes, now)
    return nbytes


def test_a_fresh_budget_begins_small_and_accrues_evenly() -> None:
    governor = Governor(100 * GB, 200 * GB, now=50.0)
    assert governor.room(50.0) == pytest.approx(BAND_DAYS * 100 * GB)
    write(governor, 10**15, 50.0)
    assert governor.room(50.0) == 0
    assert governor.room(50.0 + DAY_S / 4) == pytest.approx(25 * GB, rel=1e-6)


def test_unused_budget_is_carried_over_for_a_day_and_no_longer() -> None:
    governor = Governor(100 * GB, 1000 * GB, now=0.0)
    assert governor.room(10 * DAY_S) == pytest.approx(100 * GB)


def test_the_threshold_rises_as_the_last_of_the_budget_goes() -> None:
    governor = Governor(100 * GB, 1000 * GB, now=0.0)
    now = 3 * DAY_S
    assert governor.threshold(now) == 0
    seen = []
    while governor.room(now) > GB:
        write(governor, GB // 2, now)
        seen.append(governor.threshold(now))
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] > 0.7


@pytest.mark.parametrize("burst", [1.0, 0.25])
def test_seven_days_of_more_demand_than_budget_and_a_step_of_three(burst: float) -> None:
    """Within 5 % of the budget from the second day on, whether demand comes evenly or in a quarter of each day."""
    budget, step_s = 100 * GB, 30.0
    governor = Governor(budget, 2 * budget, now=0.0)
    rng = random.Random(1)
    days = [0] * 7
    now = 0.0
    while now < 7 * DAY_S:
        day = int(now // DAY_S)
        if now % DAY_S < burst * DAY_S:
            demand = 1.5 * budget * (3 if day >= 3 else 1) * step_s / DAY_S / burst
            # Of what would be written, the share whose predicted return is above the threshold.
            wanted = demand * (1 - governor.threshold(now)) * rng.uniform(0.5, 1.5)
            days[day] += write(governor, int(wanted), now)
        now += step_s
    assert all(abs(day / budget - 1) <= 0.05 for day in days[1:]), days


def test_no_24_hours_ever_exceed_the_cap() -> None:
    budget = 100 * GB
    governor = Governor(budget, int(1.2 * budget), now=0.0)
    rng = random.Random(2)
    writes: list[tuple[float, int]] = []
    now = 2 * DAY_S
    for _ in range(4000):
        now += rng.expovariate(1 / 300.0)
        writes.append((now, write(governor, rng.randrange(8 * GB), now)))
    for begin, _ in writes[::37]:
        assert sum(nbytes for at, nbytes in writes if begin <= at < begin + DAY_S) <= 1.2 * budget


def test_a_restart_goes_on_with_the_budget_and_the_last_day() -> None:
    first = Governor(100 * GB, 150 * GB, now=1000.0)
    write(first, 10**15, 1000.0 + DAY_S)
    kept = msgspec.json.decode(msgspec.json.encode(first.state(1000.0 + DAY_S, wall_s=5e9)), type=EnduranceState)
    second = Governor(100 * GB, 150 * GB, now=3.0)
    second.restore(kept, now=3.0, wall_s=5e9 + DAY_S / 2)
    assert second.room(3.0) == pytest.approx(50 * GB, rel=0.01), "half a day has accrued"
    assert second.last_day_bytes(3.0) == first.last_day_bytes(1000.0 + DAY_S)
    assert second.written_bytes == first.written_bytes
    assert second.last_day_bytes(3.0 + 0.6 * DAY_S) == 0


def test_a_smaller_budget_after_a_restart_carries_no_more_than_its_own_day() -> None:
    first = Governor(100 * GB, 150 * GB, now=0.0)
    second = Governor(GB, 150 * GB, now=0.0)
    second.restore(first.state(5 * DAY_S, wall_s=5e9), now=0.0, wall_s=5e9)
    assert second.room(0.0) == GB


def test_a_wall_clock_that_went_back_gives_no_budget() -> None:
    first = Governor(100 * GB, 150 * GB, now=0.0)
    write(first, 10**15, 0.0)
    second = Governor(100 * GB, 150 * GB, now=9.0)
    second.restore(first.state(0.0, wall_s=5e9), now=9.0, wall_s=4e9)
    assert second.room(9.0) == 0
    assert second.last_day_bytes(9.0) == first.written_bytes


def test_b_1145_mib_per_second_end_a_4_tb_drive_in_seventy_days() -> None:
    per_day = 1145 * 2**20 * DAY_S
    assert per_day / 1e12 == pytest.approx(103.7, abs=0.05)
    assert drive_life_years(per_day, 4e12) * 365 == pytest.approx(70.4, abs=0.2)
    assert drive_life_years(0, 4e12) == float("inf")
