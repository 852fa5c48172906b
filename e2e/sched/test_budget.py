"""The endurance budget under vLLM's scheduler: what it refuses is counted, and what was written is never forgotten."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import Engine, prompt
from saria_connector import wear as wear_module
from saria_connector.wear import REPORT_S, SAVE_S, SMART_S, Wear
from saria_vllm.config import EnduranceConfig
from saria_vllm.errors import StorageError
from saria_vllm.policy.endurance import DAY_S, FRESH_DAYS, EnduranceState, Governor
from saria_vllm.policy.striping import PAUSE_S
from saria_vllm.storage.smart import Smart
from saria_vllm.storage.wear import device_bytes, read_state, write_state

pytestmark = pytest.mark.vllm
Make = Callable[..., Engine]

RECORD_BYTES = 512 << 10
RATED_BYTES = 256 << 20
FIRST_CHUNKS = int(FRESH_DAYS * 0.75 * RATED_BYTES) // RECORD_BYTES
"""What a fresh budget allows."""


@pytest.fixture(autouse=True)
def six_o_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets go by days: at whatever hour this runs, it is 18:00 UTC when a test begins. Earlier there is so much left
    that little demand is not held back, later nothing more comes before midnight."""
    wall_s = time.time
    shift = DAY_S * 3 / 4 - wall_s() % DAY_S
    monkeypatch.setattr(wear_module.time, "time", lambda: wall_s() + shift)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Our log lines."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("vllm.saria"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def small(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """A DRAM tier of few chunks, every one of which is wanted on SSD, and a budget of `FIRST_CHUNKS`."""
    return {
        "block_bytes": RECORD_BYTES, "dram_capacity": "8MiB", "ssd_paths": [f"{tmp_path}/ssd"],
        "ssd_capacity": "64MiB", "admission": "full_duplicate",
        "endurance": {"rated_capacity": f"{RATED_BYTES}B"}, **more,
    }  # fmt: skip


def persisted(engine: Engine) -> int:
    """Chunks whose write to SSD was begun."""
    return sum(job.chunks for job in engine.begun("persist"))


def fill(engine: Engine, prompts: int = 6, seed: int = 0) -> int:
    """Serve prompts that overflow DRAM; how many chunks were written to SSD."""
    before = persisted(engine)
    for number in range(prompts):
        engine.serve(f"{seed}.{number}", prompt(100, seed=seed + number))
    engine.step()
    return persisted(engine) - before


def test_writes_stop_at_the_budget_and_what_it_refuses_is_counted(make: Make, tmp_path: Path) -> None:
    engine = make(**small(tmp_path))
    assert fill(engine) == FIRST_CHUNKS
    assert engine.counted("dropped_chunks:over_budget") > 0
    assert engine.side.ssd.wear is not None
    assert engine.side.ssd.wear.written_bytes == FIRST_CHUNKS * RECORD_BYTES
    engine.now += 3 * RECORD_BYTES * DAY_S / (0.75 * RATED_BYTES)
    assert fill(engine, seed=50) == 3, "budget accrues with time"


def test_all_ranks_writes_count(make: Make, tmp_path: Path) -> None:
    engine = make(**small(tmp_path, ranks=2, dram_capacity="16MiB"))
    assert fill(engine) == FIRST_CHUNKS // 2


def test_off_bounds_nothing(make: Make, tmp_path: Path) -> None:
    engine = make(**small(tmp_path, endurance="off"))
    assert fill(engine) > FIRST_CHUNKS
    assert engine.side.ssd.wear is None
    engine.close()
    assert not list((tmp_path / "ssd" / "saria").glob("endurance*"))


def test_a_reset_gives_no_new_budget(make: Make, tmp_path: Path) -> None:
    engine = make(**small(tmp_path))
    fill(engine)
    assert engine.connector.reset_cache() is True
    assert fill(engine, seed=50) == 0


@pytest.mark.parametrize("namespace", ["", "another"])
def test_what_was_written_survives_a_restart(make: Make, tmp_path: Path, namespace: str) -> None:
    engine = make(**small(tmp_path))
    fill(engine)
    engine.close()
    engine = make(**small(tmp_path, namespace=namespace))
    assert fill(engine, seed=50) == 0
    assert engine.counted("dropped_chunks:over_budget") > 0
    assert engine.side.ssd.wear is not None
    assert engine.side.ssd.wear.written_bytes == FIRST_CHUNKS * RECORD_BYTES


def kept(tmp_path: Path) -> EnduranceState | None:
    data = read_state(f"{tmp_path}/ssd", 0)
    return None if data is None else msgspec.json.decode(data, type=EnduranceState)


def test_at_the_end_a_drive_that_hangs_holds_up_neither_the_others_nor_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, write = threading.Event(), wear_module.write_state

    def first_hangs(path: str, index: int, state: bytes) -> None:
        if path.endswith("a"):
            go_on.wait(60)
        write(path, index, state)

    monkeypatch.setattr(wear_module, "write_state", first_hangs)
    monkeypatch.setattr(wear_module, "CLOSE_S", 0.5)
    paths = [f"{tmp_path}/a", f"{tmp_path}/b"]
    for path in paths:
        Path(path).mkdir()
    wear = Wear(EnduranceConfig(), paths, 0, 0, 1, 5.0)
    for number, governor in enumerate(wear.governors):
        governor.spend(1000 + number, 5.0)
    began = time.monotonic()
    wear.close(6.0)
    assert 0.4 < time.monotonic() - began < 5
    data = read_state(paths[1], 0)
    assert data is not None and msgspec.json.decode(data, type=EnduranceState).written_bytes == 1001
    assert read_state(paths[0], 0) is None
    go_on.set()


@pytest.mark.parametrize("share", [wear_module.SAVE_SHARE, 1.0])
def test_a_crash_forgets_half_a_minute_or_a_small_share(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(wear_module, "SAVE_SHARE", share)
    engine = make(**small(tmp_path))
    wear = engine.side.ssd.wear
    assert wear is not None
    fill(engine, 3)
    written = wear.written_bytes
    if share == 1.0:
        assert written and kept(tmp_path) is None
        engine.now += SAVE_S
        engine.serve("step", prompt(20, seed=90))
    (drive,) = wear.drives
    assert drive._writer is not None
    drive._writer.join()
    state = kept(tmp_path)
    assert state is not None
    assert state.written_bytes >= (written if share == 1.0 else RECORD_BYTES)
    assert state.saved_s == pytest.approx(time.time(), abs=60)


def test_a_drive_that_hangs_or_fails_holds_up_no_step(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def hangs(*args: Any) -> None:
        begun.set()
        go_on.wait(60)
        raise StorageError("no such luck")

    monkeypatch.setattr(wear_module, "write_state", hangs)
    monkeypatch.setattr(wear_module, "CLOSE_S", 0.1)
    engine = make(**small(tmp_path))
    for seed in (0, 20, 40):
        fill(engine, 3, seed)
        engine.now += SAVE_S
    assert begun.wait(10)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 30
    assert any("a drive hangs" in line for line in said)
    go_on.set()
    assert engine.side.ssd.wear is None


def damage(path: Path) -> None:
    path.write_bytes(b"{]")


def directory(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def other_version(path: Path) -> None:
    write_state(str(path.parent.parent), 0, b'{"saved_s":"yesterday"}')


@pytest.mark.parametrize("harm", [damage, directory, dangling, other_version])
def test_a_state_that_cannot_be_used_is_said_and_does_not_stop_the_start(
    make: Make, tmp_path: Path, said: list[str], harm: Callable[[Path], None]
) -> None:
    (tmp_path / "ssd" / "saria").mkdir(parents=True)
    harm(tmp_path / "ssd" / "saria" / "endurance-e0.json")
    engine = make(**small(tmp_path))
    assert any("what was written to SSD before is not known" in line for line in said)
    assert fill(engine) == FIRST_CHUNKS
    engine.close()
    if harm is directory:
        assert any("will be forgotten at the next start" in line for line in said)
    else:
        state = kept(tmp_path)
        assert state is not None and state.written_bytes == FIRST_CHUNKS * RECORD_BYTES


@pytest.mark.parametrize(("ahead_s", "counted"), [(0.0, True), (DAY_S / 2, True), (30 * DAY_S, False)])
def test_what_a_dead_engine_wrote_does_not_count_for_ever_after_a_clock_went_back(
    make: Make, tmp_path: Path, ahead_s: float, counted: bool
) -> None:
    dead = Governor(float(RATED_BYTES), float(RATED_BYTES), 0.0)
    dead.spend(RATED_BYTES, 1.0)
    state = dead.state(1.0, wear_module.time.time() + ahead_s)
    (tmp_path / "ssd" / "saria").mkdir(parents=True)
    write_state(f"{tmp_path}/ssd", 1, msgspec.json.encode(state))
    engine = make(**small(tmp_path))
    assert fill(engine) == (0 if counted else FIRST_CHUNKS)


def test_budget_and_drive_life_are_said(
    make: Make, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wear_module.time, "time", lambda: 20_000 * DAY_S + DAY_S / 2)
    engine = make(**small(tmp_path))
    (line,) = [line for line in said if "may write" in line]
    assert line == (
        "SARIA: this engine may write 192.00MiB to SSD per day and at most 256.00MiB in any 24 h (of drives rated "
        "256.00MiB, shared by 1 engine(s)); 84.48MiB left today; written so far: 0B"
    )
    fill(engine)
    engine.close()
    (line,) = [line for line in said if "years" in line]
    # 7.5 MiB in what counts as an hour are 180 MiB per day, of 256 MiB for 5 years.
    assert "wrote 7.50MiB to SSD in the last 24 h, 7.50MiB in all" in line
    assert "last 7.1 years" in line


def test_local_engines_share_the_budget_and_the_drives_size_is_the_default(tmp_path: Path) -> None:
    wears = [Wear(EnduranceConfig(), [str(tmp_path)], 0, index, engines, 5.0) for index, engines in ((0, 1), (1, 4))]
    (one,), (quarter,) = (wear.governors for wear in wears)
    assert one.budget_bytes_day == pytest.approx(4 * quarter.budget_bytes_day)
    assert one.budget_bytes_day == pytest.approx(0.75 * device_bytes([str(tmp_path)])[0])
    assert quarter.cap_bytes_day == pytest.approx(quarter.budget_bytes_day / 0.75)


def test_each_drive_has_the_budget_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wear_module, "device_bytes", lambda paths: [10**9 * (1 + int(path[-1])) for path in paths])
    monkeypatch.setattr(wear_module, "on_one_device", lambda paths: [[path] for path in paths])
    paths = [f"{tmp_path}/{drive}" for drive in range(3)]

    def governors(*args: Any) -> list[Governor]:
        wear = Wear(*args, 5.0)
        wear.close(5.0)
        return wear.governors

    by_size = governors(EnduranceConfig(), paths, 0, 0, 1)
    assert [governor.budget_bytes_day for governor in by_size] == pytest.approx([0.75e9, 1.5e9, 2.25e9])
    rated = EnduranceConfig(rated_capacity=12 * 10**9)
    halves = governors(rated, paths, 0, 0, 2)
    assert [governor.cap_bytes_day for governor in halves] == pytest.approx([1e9, 2e9, 3e9])
    (alone,) = governors(rated, paths[:1], 2, 0, 1)
    assert alone.cap_bytes_day == pytest.approx(4e9), "what the missing drives are rated for is not written to it"


def test_no_drive_gets_more_than_its_own_budget(make: Make, tmp_path: Path) -> None:
    """Two drives on one disk, one of which fails all writes for a while: the other takes no more for it."""
    paths = [f"{tmp_path}/a", f"{tmp_path}/b"]
    engine = make(**small(tmp_path, ssd_paths=paths, ssd_capacity="128MiB"))
    engine.serve("first", prompt(20, seed=90))
    wear, extents = engine.side.ssd.wear, engine.side.tiers.chunks.extents
    assert wear is not None and extents is not None
    extents.striping.failed(1, False, engine.now)
    each = FIRST_CHUNKS // 2
    assert fill(engine) == each
    assert [governor.written_bytes // RECORD_BYTES for governor in wear.governors] == [each, 0]
    engine.now += PAUSE_S
    assert fill(engine, seed=50) == each
    assert [governor.written_bytes // RECORD_BYTES for governor in wear.governors] == [each, each]
    engine.close()
    engine = make(**small(tmp_path, ssd_paths=paths[1:]))
    assert fill(engine, seed=70) > 0, "of the whole rating, which is this drive's now"
    assert engine.side.ssd.wear is not None
    assert engine.side.ssd.wear.written_bytes > each * RECORD_BYTES, "its history came with it"


def test_admission_is_as_generous_as_the_drive_with_most_left_allows(make: Make, tmp_path: Path) -> None:
    paths = [f"{tmp_path}/a", f"{tmp_path}/b"]
    engine = make(**small(tmp_path, ssd_paths=paths, ssd_capacity="128MiB"))
    fill(engine)
    evictor, extents = engine.side.tiers.evictor, engine.side.tiers.chunks.extents
    assert extents is not None
    engine.now += DAY_S / 96
    spent, left = evictor.governors
    spent.spend(spent.room(engine.now), engine.now)

    def strictness() -> float:
        budget = evictor._budget(engine.now)
        assert budget is not None
        return budget.strictness

    assert strictness() == left.threshold(engine.now) < 0.99 < spent.threshold(engine.now)
    extents.striping.failed(1, False, engine.now)
    assert strictness() == spent.threshold(engine.now), "the other is not written to"
    extents.striping.leave_out(0)
    assert evictor._budget(engine.now) == (1.0, 0)


# What drives say of their wear.


class Smarts:
    """A drive under every path, that others write to."""

    def __init__(self) -> None:
        self.smart: Smart | str = Smart(("/dev/nvme0n1",), 10**12, 0, 7, 100, 0)
        self.asked: list[str] = []

    def __call__(self, path: str) -> Smart | str:
        self.asked.append(path)
        return self.smart

    def add(self, nbytes: int, warning: int = 0) -> None:
        assert isinstance(self.smart, Smart)
        written = self.smart.written_bytes + nbytes
        self.smart = msgspec.structs.replace(self.smart, written_bytes=written, critical_warning=warning)


def ask(engine: Engine) -> None:
    """The drive is asked again, and what it said is taken."""
    wear = engine.side.ssd.wear
    assert wear is not None
    engine.now += SMART_S
    wear.step(engine.now)
    await_answers(wear)
    wear.step(engine.now)


def await_answers(wear: Wear) -> None:
    deadline = time.monotonic() + 10
    while any(smart._answer is None for smart in wear.smarts):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_others_write_to_the_drive_leaves_less_for_us(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    smarts = Smarts()
    monkeypatch.setattr(wear_module, "read_smart", smarts)
    engine = make(**small(tmp_path))
    ask(engine)
    smarts.add((FIRST_CHUNKS - 3) * RECORD_BYTES)
    ask(engine)
    wear = engine.side.ssd.wear
    assert wear is not None
    accrued = 0.75 * RATED_BYTES * 1.2 * 2 * SMART_S / DAY_S
    assert 3 <= fill(engine) <= 3 + 1 + accrued / RECORD_BYTES < FIRST_CHUNKS
    charged = engine.counted(f"drive_charged_bytes:{tmp_path}/ssd")
    assert charged == (FIRST_CHUNKS - 3) * RECORD_BYTES
    # Our own bytes are no others': the drive has them, too.
    smarts.add(wear.written_bytes, warning=4)
    ask(engine)
    engine.serve("another", prompt(20, seed=90))
    assert engine.counted(f"drive_charged_bytes:{tmp_path}/ssd") == charged
    assert any("/dev/nvme0n1 warns of its state: 0x4" in line for line in said)
    engine.now += REPORT_S
    ask(engine)
    assert any("7 % of its life used" in line and "amplification not said" in line for line in said)


def test_a_second_path_on_the_drive_is_ours_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As are other engines': what they wrote is in their files."""
    smarts, paths = Smarts(), [f"{tmp_path}/a", f"{tmp_path}/b"]
    monkeypatch.setattr(wear_module, "read_smart", smarts)
    for path in paths:
        Path(path).mkdir()
    wear = Wear(EnduranceConfig(rated_capacity=10**12), paths, 0, 0, 2, 0.0)

    def read(now: float) -> list[int]:
        for smart in wear.smarts:
            smart.step(now)
        await_answers(wear)
        return [smart.step(now) for smart in wear.smarts]

    assert read(0.0) == [0, 0]
    for governor, drive in zip(wear.governors, wear.drives, strict=True):
        governor.spend(10**9, 1.0)
        drive.save(1.0)
        drive.wait(time.monotonic() + 5)
    sibling = msgspec.json.decode(read_state(paths[0], 0) or b"", type=EnduranceState)
    sibling.written_bytes = 5 * 10**9
    write_state(paths[0], 1, msgspec.json.encode(sibling))
    smarts.add(7 * 10**9 + 4 * 10**9)
    # The others' 4 GB: over two engines, over two paths.
    assert read(SMART_S) == [10**9, 10**9]


def test_a_drive_that_says_nothing_is_said_once(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    smarts = Smarts()
    smarts.smart = "/dev/nvme0n1: Permission denied"
    monkeypatch.setattr(wear_module, "read_smart", smarts)
    engine = make(**small(tmp_path))
    for _ in range(3):
        ask(engine)
    assert sum("own count only: /dev/nvme0n1: Permission denied" in line for line in said) == 1
    assert fill(engine) >= FIRST_CHUNKS


def test_a_drive_that_hangs_is_not_asked_twice(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, asked = threading.Event(), []

    def hangs(path: str) -> str:
        asked.append(path)
        go_on.wait(20)
        return "late"

    monkeypatch.setattr(wear_module, "read_smart", hangs)
    engine = make(**small(tmp_path))
    for _ in range(5):
        engine.now += SMART_S
        engine.serve(f"{engine.now}", prompt(20, seed=1))
    assert len(asked) == 1
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 5, "and holds up no shutdown"
    go_on.set()
