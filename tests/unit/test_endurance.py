"""The endurance governor: bytes per day, carry-over, the cap of any 24 hours, restarts."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import msgspec
import pytest

from saria_vllm.policy.endurance import (
    DAY_S,
    DRAWN_DAYS,
    FADING,
    FRESH_DAYS,
    KEPT_DAYS,
    LEAD,
    EnduranceState,
    Governor,
    drive_life_years,
)

GB = 10**9


def write(governor: Governor, wanted: int, now: float) -> int:
    nbytes = min(wanted, governor.room(now))
    governor.spend(nbytes, now)
    return nbytes


def pressed(governor: Governor, now: float) -> Governor:
    """With far more demand than budget."""
    governor.ask(10**15, now)
    return governor


def test_a_fresh_budget_begins_small_and_accrues_evenly() -> None:
    governor = pressed(Governor(100 * GB, 200 * GB, now=50.0), 50.0)
    assert governor.room(50.0) == pytest.approx(FRESH_DAYS * 100 * GB)
    write(governor, 10**15, 50.0)
    assert governor.room(50.0) == 0
    assert governor.room(50.0 + DAY_S / 4) == pytest.approx(LEAD * 25 * GB, rel=1e-6)


def test_a_day_that_is_joined_late_has_no_more_than_its_rest() -> None:
    governor = Governor(100 * GB, 200 * GB, now=0.75 * DAY_S, day_began=0.0)
    assert governor.room(0.75 * DAY_S) == pytest.approx((1 - LEAD * 0.75 + FRESH_DAYS) * 100 * GB)
    pressed(governor, 0.75 * DAY_S)
    assert write(governor, 10**15, 0.75 * DAY_S) == pytest.approx(FRESH_DAYS * 100 * GB)
    assert write(governor, 10**15, 0.999 * DAY_S) == pytest.approx((1 - LEAD * 0.75) * 100 * GB)


@pytest.mark.parametrize("hour", [6, 12, 18, 22, 23.9])
def test_a_day_that_is_joined_late_tells_of_the_next_as_a_whole_one_does(hour: float) -> None:
    """Half of the budget a day, evenly: on the next day none of it is taken for the demand of that late hour."""
    governor = Governor(100 * GB, 200 * GB, now=hour * 3600, day_began=0.0)
    for minute in range(math.ceil(hour * 60), 2 * 24 * 60):
        governor.ask(50 * GB / (24 * 60), minute * 60.0)
        if minute > 24 * 60:
            assert governor.threshold(minute * 60.0) == 0
            assert write(governor, 50 * GB // (24 * 60), minute * 60.0) == 50 * GB // (24 * 60)


def test_a_day_is_worth_three_tenths_of_what_is_usual_and_one_without_demand_nothing() -> None:
    governor = Governor(100 * GB, 200 * GB, now=0.0)
    governor.ask(100, 0.0)
    governor.ask(1000, DAY_S * 1.5)
    for day in (2, 5):
        usual = governor.state(day * DAY_S, 0.0).usual_bytes
        assert usual[0] == pytest.approx(0.7 * 0.3 * 100)
        assert usual[48] == pytest.approx(0.3 * 1000)
        assert math.fsum(usual) == pytest.approx(usual[0] + usual[48])


def test_the_last_moments_of_a_day_belong_to_it() -> None:
    """Differences of times round: to a whole day before it is over, to less when it is."""
    began = 34889.78874837356
    last = math.nextafter(began + DAY_S, 0)
    assert last - began == DAY_S
    pressed(Governor(100 * GB, 1000 * GB, now=began), last)
    began = 504720.46742886334
    end = began + DAY_S
    assert end - began < DAY_S
    governor = pressed(Governor(100 * GB, 1000 * GB, now=began), began)
    assert write(governor, 10**15, end - 1) > 0
    assert governor.room(end) == 0, "a day's budget is there once"
    assert governor.room(end + DAY_S) > 0


def test_demand_that_fits_is_never_refused() -> None:
    """Half of the budget a day, at any time of it, from the first minute on; the budget does not even ask for care."""
    governor = Governor(100 * GB, 200 * GB, now=0.0)
    rng = random.Random(5)
    for day in range(30):
        for now in sorted(rng.uniform(0, DAY_S) for _ in range(50)):
            at = day * DAY_S + now
            governor.ask(GB, at)
            assert governor.threshold(at) == 0 or day == 0
            assert write(governor, GB, at) == GB
    assert governor.strictest < 0.5, "on the first day nobody knows yet"


def test_nine_tenths_of_the_budget_fit_to_the_last_minute() -> None:
    governor = Governor(100 * GB, 200 * GB, now=0.0)
    each = 90 * GB // (24 * 60)
    for minute in range(3 * 24 * 60):
        governor.ask(each, minute * 60.0)
        assert governor.threshold(minute * 60.0) == 0
        assert write(governor, each, minute * 60.0) == each


def test_unused_budget_is_kept_for_a_day_and_given_out_little_by_little() -> None:
    governor = Governor(100 * GB, 1000 * GB, now=0.0)
    days = []
    for day in (10, 11, 12, 40):
        written = 0
        for quarter in range(96):
            written += write(governor, 10**15, (day + quarter / 96) * DAY_S)
        days.append(written / GB)
    assert days == pytest.approx([100 * (1 + DRAWN_DAYS)] * 4)
    kept = governor.state(40.999 * DAY_S, 1e9).kept_bytes
    assert kept == pytest.approx(KEPT_DAYS * 100 * GB)


def test_what_is_kept_runs_out() -> None:
    governor = Governor(100 * GB, 1000 * GB, now=0.0)
    drawn = []
    for day in range(2, 60):
        drawn.append(sum(write(governor, 10**15, (day + at / 96) * DAY_S) for at in range(96)) / GB - 100)
    assert sum(drawn) == pytest.approx(100 * KEPT_DAYS, rel=0.01)
    assert drawn[-1] == pytest.approx(0, abs=1e-6)


def test_the_threshold_rises_as_the_last_of_the_budget_goes() -> None:
    governor, now = Governor(100 * GB, 1000 * GB, now=0.0), DAY_S / 2
    assert pressed(governor, now).threshold(now) == 0
    seen = []
    while governor.room(now) > GB:
        write(governor, GB // 2, now)
        seen.append(governor.threshold(now))
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] > 0.9
    steps = [after - before for before, after in pairwise(seen)]
    assert max(steps) < 0.03


def test_where_nothing_is_left_of_the_day_nothing_is_begun_however_little_is_asked_for() -> None:
    governor = Governor(100 * GB, 1000 * GB, now=0.0)
    governor.spend(200 * GB, DAY_S / 2)
    assert governor.threshold(DAY_S / 2) == 1
    assert governor.room(DAY_S / 2) == 0


def test_at_the_end_of_a_day_what_is_left_is_spent_generously() -> None:
    governor = pressed(Governor(100 * GB, 1000 * GB, now=0.0), 0.0)
    now = DAY_S / 2
    while governor.threshold(now) < 0.9:
        write(governor, GB // 4, now)
    now = DAY_S * 0.85
    while governor.room(now) > 2 * GB:
        write(governor, GB // 4, now)
    early, late = governor.threshold(now), governor.threshold(0.99 * DAY_S)
    assert early > 0.7
    assert late == 0


def test_the_budget_is_spent_where_the_demand_of_other_days_was() -> None:
    """Demand from 8 to 12 o'clock: on the first day most of the budget is not there yet, then it is."""
    governor = Governor(100 * GB, 200 * GB, now=0.0)
    at_nine, written = [], []
    for day in range(3):
        written.append(0)
        for minute in range(8 * 60, 12 * 60):
            now = day * DAY_S + minute * 60
            if minute == 9 * 60:
                at_nine.append(written[-1] / GB)
            governor.ask(GB, now)
            written[-1] += write(governor, int(GB * (1 - governor.threshold(now))), now)
    assert written[0] < 65 * GB
    assert written[1:] == pytest.approx([104 * GB] * 2, rel=0.01)
    assert all(20 < before < 45 for before in at_nine[1:]), "not all at once"


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
            governor.ask(int(demand), now)
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


def restarted(state: EnduranceState) -> EnduranceState:
    return msgspec.json.decode(msgspec.json.encode(state), type=EnduranceState)


def test_a_restart_goes_on_as_if_there_had_been_none() -> None:
    """Two days, the second of which is cut by a restart on a machine whose clock begins anew."""
    whole, first = Governor(100 * GB, 150 * GB, now=1000.0), Governor(100 * GB, 150 * GB, now=1000.0)
    second = Governor(100 * GB, 150 * GB, now=3.0)
    rng = random.Random(4)
    for minute in range(2 * 24 * 60):
        now = 1000.0 + minute * 60
        nbytes = rng.randrange(GB // 4)
        whole.ask(nbytes, now)
        written = write(whole, nbytes, now)
        if minute == 36 * 60:
            second.restore(restarted(first.state(now, wall_s=5e9)), now=3.0, wall_s=5e9)
        other, at = (first, now) if minute < 36 * 60 else (second, 3.0 + (minute - 36 * 60) * 60)
        other.ask(nbytes, at)
        assert abs(write(other, nbytes, at) - written) <= 4
        assert other.threshold(at) == pytest.approx(whole.threshold(now), abs=1e-6)
    assert second.written_bytes == pytest.approx(whole.written_bytes, abs=10_000)


def test_budget_accrues_while_no_process_runs() -> None:
    first = pressed(Governor(100 * GB, 150 * GB, now=1000.0), 1000.0)
    write(first, 10**15, 1000.0)
    second = Governor(100 * GB, 150 * GB, now=3.0)
    second.restore(restarted(first.state(1000.0, wall_s=5e9)), now=3.0, wall_s=5e9 + DAY_S / 2)
    assert second.room(3.0) == pytest.approx(LEAD * 50 * GB)
    assert second.last_day_bytes(3.0) == second.written_bytes == first.written_bytes
    assert second.last_day_bytes(3.0 + 0.6 * DAY_S) == 0


def test_after_a_night_without_a_process_the_morning_is_not_taken_for_one_without_demand() -> None:
    """Demand in the morning is three times the afternoon's; on the fourth day the process starts at noon."""
    governor = Governor(100 * GB, 200 * GB, now=0.0)
    state = governor.state(0.0, 0.0)
    for quarter in range(4 * 96):
        day, part = divmod(quarter, 96)
        now = quarter * DAY_S / 96
        if day == 3 and part < 48:
            continue
        if day == 3 and part == 48:
            governor = Governor(100 * GB, 200 * GB, now=now)
            governor.restore(restarted(state), now, wall_s=now)
            assert governor.state(now, now).joined_part == pytest.approx(48)
        governor.ask(3 * GB if part < 48 else GB, now)
        state = governor.state(now, now)
    usual = [FADING * usual + (1 - FADING) * asked for usual, asked in zip(state.usual_bytes, [GB] * 96, strict=True)]
    after = governor.state(4 * DAY_S, 4 * DAY_S).usual_bytes
    assert after[48:] == pytest.approx(usual[48:])
    assert after[:48] == pytest.approx(state.usual_bytes[:48])


def test_what_a_quarter_of_a_day_asked_for_is_expected_of_the_next_also_where_the_day_was_joined_at_noon() -> None:
    governor = Governor(100 * GB, 200 * GB, now=DAY_S / 2, day_began=0.0)
    left = governor.room(DAY_S / 2)
    governor.ask(60 * GB, DAY_S / 2)
    assert governor.room(0.75 * DAY_S) < 0.9 * left


def test_a_day_joined_at_its_last_moment_is_not_a_day_of_such_moments() -> None:
    governor = Governor(100 * GB, 200 * GB, now=DAY_S - 1e-3, day_began=0.0)
    governor.ask(GB, DAY_S - 1e-3)
    assert sum(governor.state(DAY_S, 0.0).usual_bytes) <= 0.3 * 97 * GB


def odd(**values: object) -> bytes:
    state = msgspec.to_builtins(Governor(100 * GB, 150 * GB, now=0.0).state(0.0, 5e9))
    return msgspec.json.encode({**state, **values})


@pytest.mark.parametrize(
    "values",
    [
        {"usual_bytes": [0.0] * 95},
        {"asked_bytes": [0.0] * 97},
        {"usual_bytes": [-1.0] + [0.0] * 95},
        {"asked_bytes": [1e300] * 96},
        {"saved_s": 1e300},
        {"day_began_s": -1e300},
        {"spent_bytes": -1e300},
        {"kept_bytes": -1.0},
        {"drawn_bytes": 1e300},
        {"joined_part": 96.5},
        {"written_bytes": -1},
        {"bins": [[5e9, -1]]},
        {"bins": [[1e300, 1]]},
    ],
)
def test_a_state_that_no_governor_has_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(odd(**values), type=EnduranceState)


@pytest.mark.parametrize(
    "values",
    [
        {"saved_s": 1e11},
        {"saved_s": -1e11, "day_began_s": -1e11},
        {"day_began_s": 1e11},
        {"day_began_s": -1e11},
        {"spent_bytes": 2.0**60, "kept_bytes": 2.0**60, "drawn_bytes": 2.0**60},
        {"usual_bytes": [2.0**59] * 96, "asked_bytes": [2.0**59] * 96, "joined_part": 96},
        {"joined_part": 10.5, "asked_bytes": [1.0] * 96},
        {"bins": [[9e10, 2**60], [0, 5]]},
    ],
)
def test_the_oddest_state_that_is_taken_gives_no_more_than_a_budget_and_no_error(values: dict[str, object]) -> None:
    governor = Governor(100 * GB, 150 * GB, now=7.0)
    governor.restore(msgspec.json.decode(odd(**values), type=EnduranceState), now=7.0, wall_s=5e9)
    for now in (7.0, 1000.0, DAY_S, 3 * DAY_S + 1):
        governor.ask(GB, now)
        assert 0 <= governor.threshold(now) <= 1
        assert 0 <= governor.room(now) <= 150 * GB
        restarted(governor.state(now, 5e9 + now))


def test_a_day_that_a_state_says_is_to_come_begins_now() -> None:
    governor = Governor(100 * GB, 150 * GB, now=7.0)
    governor.restore(msgspec.json.decode(odd(day_began_s=9e10), type=EnduranceState), now=7.0, wall_s=5e9)
    write(governor, 10**15, DAY_S)
    assert governor.state(DAY_S + 8.0, 5e9).day_began_s == pytest.approx(5e9 - 1.0)


def test_a_clock_that_goes_back_stands_still() -> None:
    governor = pressed(Governor(100 * GB, 150 * GB, now=0.0), 0.0)
    room = governor.room(DAY_S / 2)
    assert governor.room(DAY_S / 4) == room > 0
    write(governor, room, 5.0)
    assert governor.room(DAY_S / 2) == 0


def test_a_smaller_budget_after_a_restart_carries_no_more_than_its_own_day() -> None:
    first = Governor(100 * GB, 150 * GB, now=0.0)
    second = Governor(GB, 150 * GB, now=0.0)
    second.restore(first.state(5 * DAY_S, wall_s=5e9), now=0.0, wall_s=5e9)
    assert sum(write(second, 10**15, at * DAY_S / 96) for at in range(96)) == pytest.approx(GB * (1 + DRAWN_DAYS))


def test_what_a_larger_budget_had_spent_is_no_debt() -> None:
    first = pressed(Governor(100 * GB, 150 * GB, now=0.0), 0.0)
    write(first, 10**15, 0.9 * DAY_S)
    second = Governor(GB, 150 * GB, now=0.0)
    second.restore(first.state(0.9 * DAY_S, wall_s=5e9), now=0.0, wall_s=5e9)
    assert second.room(0.05 * DAY_S) == 0
    assert 0 < second.room(0.2 * DAY_S) <= LEAD * GB


def test_a_wall_clock_that_went_back_gives_no_budget() -> None:
    first = Governor(100 * GB, 150 * GB, now=0.0)
    write(first, 10**15, 0.0)
    second = Governor(100 * GB, 150 * GB, now=9.0)
    second.restore(first.state(0.0, wall_s=5e9), now=9.0, wall_s=4e9)
    assert second.room(9.0) == 0
    assert second.last_day_bytes(9.0) == first.written_bytes
    assert second.last_day_bytes(9.0 + 1.01 * DAY_S) == 0


def test_b_1145_mib_per_second_end_a_4_tb_drive_in_seventy_days() -> None:
    per_day = 1145 * 2**20 * DAY_S
    assert per_day / 1e12 == pytest.approx(103.7, abs=0.05)
    assert drive_life_years(per_day, 4e12) * 365 == pytest.approx(70.4, abs=0.2)
    assert drive_life_years(0, 4e12) == float("inf")
