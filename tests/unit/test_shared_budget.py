"""One write budget of a drive for all engines that write to it, whoever comes, dies and comes back."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from saria_vllm.errors import StorageError
from saria_vllm.policy.endurance import DAY_S, DRAWN_DAYS, FRESH_DAYS, DriveBudget, EnduranceState, Governor
from saria_vllm.storage.wear import lease_state, other_states, write_state

GB = 10**9
WHOLE = DriveBudget(100 * GB, 130 * GB)
STEP_S = DAY_S / 96


class Drive:
    """Engines that write all they may to one drive, and what each keeps of that on it. The wall clock is `now`."""

    def __init__(self) -> None:
        self.alive: dict[int, Governor] = {}
        self.kept: dict[int, EnduranceState] = {}
        self.writes: list[tuple[float, int]] = []

    def share(self, index: int, now: float) -> DriveBudget:
        bins = [entry for other, state in self.kept.items() if other != index for entry in state.bins]
        today = sum(nbytes for begin, nbytes in bins if begin >= now // DAY_S * DAY_S)
        last_day = sum(nbytes for begin, nbytes in bins if begin > now - DAY_S)
        engines = len(self.alive.keys() | {index})
        return WHOLE._replace(engines=engines, others_today_bytes=today, others_last_day_bytes=last_day)

    def start(self, index: int, now: float) -> None:
        shared = self.share(index, now)
        parts = WHOLE.budget_bytes_day / shared.engines, WHOLE.cap_bytes_day / shared.engines
        governor = Governor(*parts, now, now // DAY_S * DAY_S)
        if index in self.kept:
            governor.restore(self.kept[index], now, now)
        governor.share(shared, now)
        self.alive[index] = governor

    def step(self, now: float, wanted: int = 10**15) -> int:
        """Each engine looks, writes what it may, and keeps that."""
        written = 0
        for index, governor in self.alive.items():
            governor.share(self.share(index, now), now)
            governor.ask(wanted, now)
            nbytes = min(wanted, governor.room(now))
            governor.spend(nbytes, now)
            self.kept[index] = governor.state(now, now)
            self.writes.append((now, nbytes))
            written += nbytes
        return written

    def written(self, since: float, until: float) -> int:
        return sum(nbytes for at, nbytes in self.writes if since <= at < until)


def run(drive: Drive, begin: int, end: int) -> None:
    for step in range(begin, end):
        drive.step(step * STEP_S)


@pytest.mark.parametrize("engines", [1, 2, 5])
def test_engines_that_live_together_write_what_one_would(engines: int) -> None:
    drive = Drive()
    for index in range(engines):
        drive.start(index, 0.0)
    run(drive, 0, 2 * 96)
    for day in (0, 1):
        assert drive.written(day * DAY_S, (day + 1) * DAY_S) == pytest.approx(100 * GB, rel=DRAWN_DAYS + 0.01)
    parts = [governor.written_bytes for governor in drive.alive.values()]
    assert max(parts) == pytest.approx(min(parts), rel=0.1), "but for what the first one had before the others came"


def test_who_comes_later_gets_its_share_of_the_rest_and_no_more() -> None:
    drive = Drive()
    drive.start(0, 0.0)
    run(drive, 0, 48)
    first = drive.written(0, DAY_S)
    drive.start(1, 48 * STEP_S)
    run(drive, 48, 96)
    shares = [governor.written_bytes for governor in drive.alive.values()]
    assert sum(shares) <= 100 * GB * (1 + DRAWN_DAYS)
    assert shares[0] > first and shares[1] > FRESH_DAYS * 50 * GB
    assert shares[1] == pytest.approx(shares[0] - first, rel=0.5)


def test_who_stays_gets_what_a_dead_one_leaves_but_not_what_it_wrote() -> None:
    drive = Drive()
    for index in range(2):
        drive.start(index, 0.0)
    run(drive, 0, 48)
    del drive.alive[1]
    run(drive, 48, 96)
    assert drive.written(0, DAY_S) == pytest.approx(100 * GB, rel=DRAWN_DAYS)
    run(drive, 96, 192)
    assert drive.written(DAY_S, 2 * DAY_S) == pytest.approx(100 * GB, rel=DRAWN_DAYS + 0.01)


def test_restarts_in_turn_give_no_budget_anew() -> None:
    """One engine after the other that takes another's state, or begins one."""
    drive = Drive()
    for step in range(96):
        drive.alive.clear()
        drive.start(step % 7, step * STEP_S)
        drive.step(step * STEP_S)
    assert 50 * GB < drive.written(0, DAY_S) <= 100 * GB * (1 + DRAWN_DAYS)


@pytest.mark.parametrize("seed", range(3))
def test_neither_a_day_nor_24_hours_exceed_the_drives_budget(seed: int) -> None:
    rng, drive = random.Random(seed), Drive()
    for step in range(3 * 96):
        now = step * STEP_S
        if rng.random() < 0.08 and len(drive.alive) < 4:
            drive.start(rng.choice([i for i in range(6) if i not in drive.alive]), now)
        if rng.random() < 0.05 and drive.alive:
            del drive.alive[rng.choice(list(drive.alive))]
        drive.step(now, rng.choice([GB, 10**15]))
        # What is written is known by the five minutes in which it was.
        assert drive.written(now - DAY_S + 300, now + 1) <= WHOLE.cap_bytes_day
        assert drive.written(now // DAY_S * DAY_S, now + 1) <= WHOLE.budget_bytes_day * (1 + DRAWN_DAYS)
    assert drive.written(0, 3 * DAY_S) > 150 * GB


def test_a_state_belongs_to_one_living_engine(tmp_path: Path) -> None:
    path = str(tmp_path)
    leases = [lease_state(path, preferred) for preferred in (0, 0, 2, 0)]
    assert [index for index, _ in leases] == [0, 1, 2, 3]
    os.close(leases[1][1])
    assert other_states(path, 0) == (2, [])
    again, lease = lease_state(path, 0)
    assert again == 1
    for fd in (lease, *(fd for index, fd in leases if index != 1)):
        os.close(fd)
    assert other_states(path, 0) == (0, [])


def test_what_others_kept_is_read_and_what_is_damaged_left_out(tmp_path: Path) -> None:
    path = str(tmp_path)
    (tmp_path / "saria").mkdir()
    for index in range(3):
        write_state(path, index, b'{"n":%d}' % index)
    (tmp_path / "saria" / "endurance-e2.json").write_bytes(b"{]")
    (tmp_path / "saria" / "endurance-e03.json").write_bytes(b"{}")
    (tmp_path / "saria" / "endurance-e4.json").symlink_to("endurance-e0.json")
    assert other_states(path, 0) == (0, [b'{"n":1}'])
    with pytest.raises(StorageError):
        other_states(f"{path}/missing", 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        lease_state(f"{path}/file", 0)


def test_what_stands_in_the_place_of_a_lease_is_named(tmp_path: Path) -> None:
    lease = tmp_path / "saria" / "endurance-e0.lease"
    lease.mkdir(parents=True)
    with pytest.raises(StorageError, match=f"^{lease}: Is a directory"):
        lease_state(str(tmp_path), 0)
