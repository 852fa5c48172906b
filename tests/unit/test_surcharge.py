"""What others write to a drive, and what the drive writes itself, against the budget."""

from __future__ import annotations

import random

import msgspec
import pytest

from saria_vllm.policy.endurance import CHARGED_MAX, DAY_S, FRESH_DAYS, EnduranceState, Governor, life_left_years
from saria_vllm.policy.surcharge import AMPLIFICATION_MAX, Reading, Surcharge

GB = 10**9
BUDGET = 1000 * GB


class Drive:
    """A drive with a write amplification of its own, that we and others write to; it counts late."""

    def __init__(self, amplification: float = 1.0, says: bool = True, late_bytes: int = 0) -> None:
        self.amplification, self.says, self.late_bytes = amplification, says, late_bytes
        self.host, self.media, self.ours, self.mine = 50 * GB, 90 * GB, 7 * GB, 3 * GB

    def write(self, mine: int = 0, siblings: int = 0, others: int = 0) -> None:
        self.host += mine + siblings + others
        self.media += int(self.amplification * (mine + siblings + others))
        self.mine += mine
        self.ours += mine + siblings

    def reading(self) -> Reading:
        return Reading(self.host - self.late_bytes, self.media if self.says else 0, self.ours, self.mine)


def learn(surcharge: Surcharge, drive: Drive, times: int, share: float = 1.0, **written: int) -> int:
    charged = 0
    for now in range(times):
        drive.write(**written)
        charged += surcharge.learn(drive.reading(), share, float(now))
    return charged


def begun(drive: Drive) -> Surcharge:
    surcharge = Surcharge(BUDGET)
    assert surcharge.learn(drive.reading(), 1.0, 0.0) == 0, "what was before is nobody's"
    return surcharge


def test_a_drive_of_our_own_costs_nothing_more() -> None:
    drive = Drive()
    assert learn(begun(drive), drive, 100, mine=GB) == 0


def test_what_others_write_is_charged_by_our_share() -> None:
    drive = Drive(says=False)
    surcharge = begun(drive)
    assert learn(surcharge, drive, 10, share=0.5, mine=GB, siblings=2 * GB, others=4 * GB) == 20 * GB
    assert surcharge.amplification == 1.0


def test_the_drives_own_amplification_is_learnt_and_charged_on_our_bytes_and_others() -> None:
    drive = Drive(amplification=1.5)
    surcharge = begun(drive)
    learn(surcharge, drive, 400, mine=GB, others=GB)
    assert surcharge.amplification == pytest.approx(1.5, abs=0.01)
    assert learn(surcharge, drive, 10, mine=GB, others=2 * GB) == pytest.approx(10 * (0.5 + 1.5 * 2) * GB, rel=0.02)


def test_writes_that_the_drive_has_not_counted_yet_are_not_others_later() -> None:
    drive = Drive(says=False)
    surcharge = begun(drive)
    for late in (5 * GB, 0, 3 * GB, 0):
        drive.late_bytes = late
        assert learn(surcharge, drive, 1, mine=6 * GB) == 0
    assert learn(surcharge, drive, 1, others=GB) == GB


@pytest.mark.parametrize("field", ["host", "ours", "mine"])
def test_a_total_that_goes_back_begins_anew(field: str) -> None:
    drive = Drive()
    surcharge = begun(drive)
    setattr(drive, field, 0)
    assert learn(surcharge, drive, 1) == 0
    assert learn(surcharge, drive, 1, others=GB) == GB


def test_nonsense_is_bounded() -> None:
    drive = Drive(amplification=1e6)
    surcharge = begun(drive)
    learn(surcharge, drive, 100, mine=GB)
    assert surcharge.amplification == AMPLIFICATION_MAX
    drive.amplification = 0.0
    learn(surcharge, drive, 1000, mine=GB)
    assert surcharge.amplification == 1.0, "compression in the drive is no credit"
    rng = random.Random(5)
    for now in range(2000):
        numbers = [rng.choice((0, 1, GB, 2**60, rng.randint(0, 2**60))) for _ in range(4)]
        assert surcharge.learn(Reading(*numbers), rng.random(), float(now)) >= 0
        assert 1 <= surcharge.amplification <= AMPLIFICATION_MAX


def governor(now: float = 0.0) -> Governor:
    budget = Governor(BUDGET, 1.2 * BUDGET, now, now)
    budget.learn(Reading(0, 0, 0, 0), 1.0, now)
    return budget


def test_what_is_charged_is_room_that_is_gone_and_not_what_we_wrote() -> None:
    budget, beside = governor(), governor()
    now = 0.5 * DAY_S
    assert budget.learn(Reading(300 * GB, 0, 0, 0), 1.0, now) == 300 * GB
    assert beside.room(now) - budget.room(now) == pytest.approx(300 * GB, abs=1)
    assert (budget.written_bytes, budget.last_day_bytes(now)) == (0, 0)
    assert budget.threshold(now) >= beside.threshold(now)


def test_others_cannot_take_everything_of_a_day() -> None:
    budget = governor()
    assert budget.learn(Reading(10**15, 0, 0, 0), 1.0, 10.0) == CHARGED_MAX * BUDGET
    assert budget.learn(Reading(2 * 10**15, 0, 0, 0), 1.0, 20.0) == 0
    assert budget.room(DAY_S - 1) == pytest.approx((1 - CHARGED_MAX + FRESH_DAYS) * BUDGET, rel=0.01)
    assert budget.learn(Reading(2 * 10**15 + GB, 0, 0, 0), 1.0, DAY_S + 1) == GB, "another day"


def test_the_hard_cap_counts_what_is_charged() -> None:
    budget = Governor(BUDGET, BUDGET, 0.0)
    budget.learn(Reading(0, 0, 0, 0), 1.0, 0.0)
    now = 0.9 * DAY_S
    budget.spend(300 * GB, now)
    budget.learn(Reading(600 * GB, 0, 300 * GB, 300 * GB), 1.0, now)
    assert budget.room(now) <= 400 * GB


def test_a_restart_goes_on_where_it_stopped() -> None:
    budget = governor(1000.0)
    budget.learn(Reading(100 * GB, 200 * GB, 0, 0), 1.0, 2000.0)
    budget.learn(Reading(200 * GB, 400 * GB, 0, 0), 1.0, 2100.0)
    assert budget.surcharge.amplification > 1.5
    text = msgspec.json.encode(budget.state(2200.0, 500_000.0))
    state = msgspec.json.decode(text, type=EnduranceState)
    again = Governor(BUDGET, 1.2 * BUDGET, 50.0)
    again.restore(state, 50.0, 500_600.0)
    assert again.surcharge.amplification == budget.surcharge.amplification
    assert again.room(50.0) == pytest.approx(budget.room(2800.0), abs=2)
    reading = Reading(210 * GB, 420 * GB, 0, 0)
    assert again.learn(reading, 1.0, 60.0) == budget.learn(reading, 1.0, 2810.0) > 10 * GB
    much = Reading(10**15, 2 * 10**15, 0, 0)
    assert again.learn(much, 1.0, 70.0) == budget.learn(much, 1.0, 2820.0) < CHARGED_MAX * BUDGET - 200 * GB
    later = Governor(BUDGET, 1.2 * BUDGET, 50.0)
    later.restore(state, 50.0, 500_000.0 + 2 * DAY_S)
    assert later.learn(reading, 1.0, 60.0) == 0, "what was written while nobody ran is of days that are over"


@pytest.mark.parametrize("field", range(4))
def test_numbers_of_no_drive_are_not_kept(field: int) -> None:
    budget = governor()
    numbers = [0, 0, 0, 0]
    numbers[field] = 2**128 - 1
    assert budget.learn(Reading(*numbers), 1.0, 10.0) == 0
    text = msgspec.json.encode(budget.state(20.0, 20.0))
    assert msgspec.json.decode(text, type=EnduranceState).surcharge is not None, "or all would be forgotten"
    assert budget.learn(Reading(GB, 0, 0, 0), 1.0, 30.0) == GB


def test_a_state_of_before_is_still_read() -> None:
    fields = msgspec.to_builtins(governor().state(5.0, 5.0))
    for name in ("charged_bytes", "surcharge"):
        del fields[name]
    assert msgspec.convert(fields, EnduranceState).surcharge is None


def test_drive_life_by_its_own_word_or_by_its_rating() -> None:
    rated_day = 1000 * GB
    assert life_left_years(0, 0, rated_day, rated_day) == 5.0
    assert life_left_years(2, GB, rated_day, rated_day) == pytest.approx(5 * 0.98)
    # Half of the life went for 365 days of the rating: it wears five years' worth in two.
    assert life_left_years(50, 365 * rated_day, rated_day, rated_day) == pytest.approx(1.0)
    assert life_left_years(120, 365 * rated_day, rated_day, rated_day) == 0
    assert life_left_years(50, 365 * rated_day, 0, rated_day) == float("inf")
