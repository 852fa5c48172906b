"""How fast drives read when the SSD tier opens: measured once, kept in a file, passed over where that does not work."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from saria_vllm.engine import drive_rates, first_rates
from saria_vllm.engine.first_rates import Calibration
from saria_vllm.errors import StorageError
from saria_vllm.storage import rates as rates_module
from saria_vllm.storage.rates import FRESH_S, kept_rate, read_rate, ssd_path, write_rate

RECORD = 1 << 16
NOW = 1e9


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "saria").mkdir(mode=0o700)
    return str(tmp_path)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_rates, "BYTES_MAX", 4 << 20)


def test_a_rate_is_kept_for_this_device_these_ranks_and_a_month(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_rate(path, 1, 2, NOW) == 0 and kept_rate(path, NOW) == (0.0, 0.0)
    for rank in (0, 1):
        write_rate(path, rank, 2, NOW, 5e8)
    assert os.stat(f"{path}/saria/rates-r1.json").st_mode & 0o777 == 0o600
    assert read_rate(path, 1, 2, NOW + FRESH_S - 1) == 5e8
    assert kept_rate(path, NOW + 60) == (5e8, 60.0)
    assert read_rate(path, 1, 2, NOW + FRESH_S) == 0, "stale"
    assert read_rate(path, 1, 2, NOW - 1) == 0, "from the future"
    assert read_rate(path, 1, 1, NOW) == 0, "other ranks"
    monkeypatch.setattr(rates_module, "devices_under", lambda paths: [("another", 1)])
    assert read_rate(path, 1, 2, NOW) == 0, "another device"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"rates": 2}', b"[" * 100_000])
def test_what_is_not_understood_is_no_rate(path: str, content: bytes) -> None:
    Path(path, "saria", "rates-r0.json").write_bytes(content)
    assert read_rate(path, 0, 1, NOW) == 0


def test_what_cannot_be_kept_is_not(tmp_path: Path) -> None:
    write_rate(str(tmp_path), 0, 1, NOW, 5e8)
    write_rate(f"{tmp_path}/gone", 0, 1, NOW, 5e8)
    assert not list(tmp_path.iterdir())


def test_the_path_of_an_engine_directory() -> None:
    assert ssd_path("/mnt/a/saria/" + "0" * 32 + "/e0") == "/mnt/a"


def test_a_drive_is_measured_once_and_leaves_only_its_file(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Calibration(0, 1)("posix", [path, ""], RECORD)
    assert first[0] > 0 and first[1] == 0
    assert os.listdir(f"{path}/saria") == ["rates-r0.json"]
    monkeypatch.setattr(first_rates, "Bench", None)
    assert Calibration(0, 1)("posix", [path, ""], RECORD) == first


def test_all_drives_together_move_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    paths = [f"{tmp_path}/{name}" for name in "abc"]
    for path in paths:
        os.makedirs(f"{path}/saria")
    done = drive_rates.Bench._pass

    def count(bench: drive_rates.Bench, *what: object) -> drive_rates.Moved:
        moved.append(done(bench, *what).nbytes)  # type: ignore[arg-type]
        return drive_rates.Moved(moved[-1], 0.1, 0.0)

    monkeypatch.setattr(drive_rates.Bench, "_pass", count)
    rates = Calibration(0, 1)("posix", paths, RECORD)
    assert len(moved) == 6 and sum(moved) <= 2 * first_rates.BYTES_MAX
    assert rates == (moved[0] / 0.1,) * 3
    assert Calibration(1, 2)("posix", paths, first_rates.BYTES_MAX) == (0.0,) * 3, "a record is more than that"


def test_a_drive_that_fails_or_hangs_is_passed_over(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bench: drive_rates.Bench) -> None:
        raise StorageError("full")

    monkeypatch.setattr(drive_rates.Bench, "fill", fail)
    assert Calibration(0, 1)("posix", [path, f"{path}/gone"], RECORD) == (0.0, 0.0)
    monkeypatch.setattr(drive_rates.Bench, "fill", lambda bench: time.sleep(0.3))
    monkeypatch.setattr(first_rates, "SECONDS_MAX", 0.05)
    began = time.monotonic()
    assert Calibration(0, 1)("posix", [path], RECORD) == (0.0,)
    assert time.monotonic() - began < 0.25
    assert not os.listdir(f"{path}/saria")


def test_without_a_thread_nothing_is_measured(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(first_rates.threading.Thread, "start", refuse)
    assert Calibration(0, 1)("posix", [path], RECORD) == (0.0,)
