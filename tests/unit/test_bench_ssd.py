"""`saria bench ssd` and the rates behind it, on real files; fio is a double where its failures are the matter."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles import Fault, FaultyEngine
from saria_vllm.cli import bench_ssd, main
from saria_vllm.engine import drive_rates
from saria_vllm.engine.drive_rates import Moved, measure, scratch_file
from saria_vllm.engine.posix import PosixEngine
from saria_vllm.engine.ssd_engine import SsdEngine
from saria_vllm.errors import StorageError

QUICK = ["--rounds", "3", "--seconds", "0.02", "--file-size", "1MiB", "--block-size", "64KiB", "--queue-depth", "4"]
KEYS = {"read_mb_s", "random_read_mb_s", "write_mb_s", "cpu_ms_per_gb"}


@pytest.fixture
def direct(tmp_path: Path) -> Path:
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip(f"{tmp_path} has no O_DIRECT")
    (tmp_path / "probe").unlink()
    return tmp_path


def run(path: Path, *words: str) -> int:
    return main(["bench", "ssd", "--path", str(path), *QUICK, *words])


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    answer: dict[str, Any] = json.loads(out)
    return answer


def test_one_engine_gives_one_object(direct: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(direct, "--engine", "posix", "--json") == 0
    row = printed(capsys)
    assert row.keys() >= KEYS and "read_ratio_to_fio" not in row and "fio" not in row
    assert (row["engine"], row["block_bytes"], row["queue_depth"], row["rounds"]) == ("posix", 65536, 4, 3)
    for key in KEYS:
        low, high = row["spread"][key]
        assert 0 < low <= row[key] <= high
    assert list(direct.iterdir()) == []


def test_several_engines_give_rows_in_the_order_asked(direct: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(direct, "--engine", "posix", "--engine", "auto", "--engine", "posix", "--json") == 0
    rows = printed(capsys)["rows"]
    assert [row["engine"] for row in rows][:1] == ["posix"] and len(rows) == 2
    assert "its probe read worked" in rows[1]["why"] or rows[1]["engine"] == "posix"


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_runs_over_the_same_file_and_leaves_nothing(direct: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(direct, "--engine", "io_uring", "--compare-fio", "--json", "--rounds", "1") == 0
    row = printed(capsys)
    for kind in drive_rates.KINDS:
        rate = row["fio"][f"{kind}_mb_s"]
        assert rate > 0
        assert row[f"{kind}_ratio_to_fio"] == pytest.approx(row[f"{kind}_mb_s"] / rate, rel=0.05)
    assert list(direct.iterdir()) == []


def test_a_table_for_people(direct: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(direct) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "blocks of 64.00KiB, 4 in flight, medians of 3 rounds"
    assert len(lines[1]) == len(lines[2]) and lines[3].startswith("ssd engine ")
    assert "round 3 of 3" in captured.err


def test_what_a_library_prints_does_not_spoil_the_answer(
    direct: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def open_loud(_name: str, depth: int) -> tuple[SsdEngine, str]:
        ctypes.CDLL(None).puts(b"hello from a library")
        return PosixEngine(depth), "loud"

    monkeypatch.setattr(drive_rates, "open_engine", open_loud)
    assert run(direct, "--json") == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["why"] == "loud"
    assert "hello from a library" in captured.err


def fake_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    fio = tmp_path / "bin" / "fio"
    fio.parent.mkdir()
    fio.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{textwrap.dedent(body)}")
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", str(fio.parent))


GOOD_FIO = """
name = [word for word in sys.argv if word.startswith("--filename=")][0].partition("=")[2]
assert os.stat(name).st_size == 1 << 20 and os.stat(name).st_nlink == 0
assert {"--direct=1", "--iodepth=4", "--bs=65536", "--overwrite=1"} <= set(sys.argv)
kind = "write" if "--rw=write" in sys.argv else "read"
done = {"io_bytes": 10**9, "bw_bytes": 2 * 10**9}
print(json.dumps({"jobs": [{kind: done, "usr_cpu": 10.0, "sys_cpu": 20.0, "job_runtime": 500}]}))
"""


def test_ratios_are_those_of_each_round(direct: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    fake_fio(direct, monkeypatch, GOOD_FIO)
    moved = iter([Moved(10**9, seconds, 0.25) for seconds in (1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25)])
    monkeypatch.setattr(drive_rates.Bench, "run", lambda *_: next(moved))
    assert run(direct, "--engine", "posix", "--compare-fio", "--json") == 0
    row = printed(capsys)
    assert (row["read_mb_s"], row["write_mb_s"], row["cpu_ms_per_gb"]) == (2000.0, 2000.0, 250.0)
    assert (row["read_ratio_to_fio"], row["random_read_ratio_to_fio"], row["write_ratio_to_fio"]) == (1.0, 1.0, 1.0)
    assert row["spread"]["read_ratio_to_fio"] == [0.5, 2.0]
    assert (row["fio"]["read_mb_s"], row["fio"]["cpu_ms_per_gb"]) == (2000.0, 150.0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('cannot open', file=sys.stderr); sys.exit(3)", "fio failed: cannot open"),
        ("print('{}')", "fio failed: exit status 0"),
        ("print('[]')", "fio failed: exit status 0"),
        ("time.sleep(60)", "timed out"),
    ],
)
def test_a_fio_that_fails_is_a_problem_found(
    direct: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], body: str, message: str
) -> None:
    fake_fio(direct, monkeypatch, body)
    monkeypatch.setattr(bench_ssd, "FIO_WAIT_S", 0.5 if "sleep" in body else 60)
    assert run(direct, "--compare-fio") == 1
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err.splitlines()[-1]


def test_without_fio_comparing_is_bad_usage(
    direct: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(direct))
    assert run(direct, "--compare-fio") == 2
    assert "fio is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--block-size", "5000B"], "--block-size 5000B: accepted: multiples of 4KiB"),
        (["--block-size", "big"], "--block-size: 'big' is not a size above zero"),
        (["--block-size", "2GiB"], "--block-size 2GiB: accepted"),
        (["--queue-depth", "0"], "--queue-depth 0: accepted: 1 to 4096"),
        (["--queue-depth", "4096", "--block-size", "4MiB"], "at most 4GiB of blocks in flight"),
        (["--rounds", "0"], "--rounds 0: accepted"),
        (["--seconds", "nan"], "--seconds nan: accepted"),
        (["--file-size", "9000TB"], "are needed for the test file"),
        (["--file-size", "1ZB"], "--file-size: '1ZB' is not a size"),
        (["--engine", "nixl"], 'ssd_engine: "nixl"'),
        (["--engine", "kvikio"], "no GPU answers here"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    direct: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    assert run(direct, *words) == (1 if "9000TB" in words else 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err and len(captured.err.splitlines()) == 1
    assert list(direct.iterdir()) == []


def test_a_path_that_is_no_writable_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "missing"):
        assert run(path) == 2
        assert "accepted: a directory that this user can write in" in capsys.readouterr().err
    (tmp_path / "closed").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    if not os.access(tmp_path / "closed", os.W_OK):  # Root may write anywhere.
        assert run(tmp_path / "closed") == 2


@pytest.mark.parametrize("fault", [errno.EIO, "short"])
def test_a_drive_that_fails_is_a_problem_found(
    direct: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: Any
) -> None:
    """With others in flight: they end before their memory goes."""
    engines: list[FaultyEngine] = []

    def open_faulty(_name: str, depth: int) -> tuple[SsdEngine, str]:
        result = 4096 if fault == "short" else -fault
        engine = FaultyEngine(
            PosixEngine(depth),
            lambda transfer: Fault(result=result) if transfer.kind == "read" and transfer.number == 5 else None,
        )
        engines.append(engine)
        return engine, "faulty"

    monkeypatch.setattr(drive_rates, "open_engine", open_faulty)
    assert run(direct) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == "saria bench ssd: a read through posix failed: " + (
        "4096 of 65536 bytes" if fault == "short" else os.strerror(errno.EIO)
    )
    assert engines[0].closed and engines[0].in_flight == 0


def test_a_drive_that_hangs_is_told_and_its_memory_kept(
    direct: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Hanging(PosixEngine):
        def reap(self, timeout_s: float) -> list[tuple[int, int]]:
            return []

    monkeypatch.setattr(drive_rates, "open_engine", lambda _name, depth: (Hanging(depth), "hanging"))
    monkeypatch.setattr(drive_rates, "HANG_S", 0.05)
    stuck: list[Any] = []
    monkeypatch.setattr(drive_rates, "_stuck", stuck)
    assert run(direct) == 1
    assert "did not end within 0.05 s" in capsys.readouterr().err
    (bench,) = stuck
    PosixEngine.close(bench._engine)


def test_no_room_and_no_direct_io_are_said(direct: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="No space left"), scratch_file(str(direct), 4096):
        pass
    monkeypatch.undo()
    with pytest.raises(StorageError, match="No such file"), scratch_file(str(direct / "missing"), 4096):
        pass
    if os.path.isdir("/proc/self/task"):
        with pytest.raises(StorageError, match="/proc"), scratch_file("/proc/self", 4096):
            pass
    assert list(direct.iterdir()) == []


def test_measure_gives_rates_and_leaves_nothing(direct: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_rates, "FILE_BYTES", 1 << 20)
    before = os.listdir("/proc/self/fd")
    rates = measure("auto", str(direct), 65536, 4, 0.05)
    assert "ssd engine " in rates.engine
    for one in (rates.read, rates.write):
        assert one.seconds >= 0.05 and one.nbytes % 65536 == 0 and one.mb_s > 0 and one.cpu_ms_per_gb > 0
    moved = Moved(2 * 10**9, 4.0, 0.5)
    assert (moved.mb_s, moved.cpu_ms_per_gb) == (500.0, 250.0)
    assert list(direct.iterdir()) == [] and os.listdir("/proc/self/fd") == before


def test_passes_move_what_they_say_in_the_order_they_say(direct: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FaultyEngine(PosixEngine(4), lambda transfer: moved.append(transfer))  # type: ignore[func-returns-value]
    moved: list[Any] = []
    monkeypatch.setattr(drive_rates, "open_engine", lambda *_: (engine, "recorded"))
    with scratch_file(str(direct), 8 * 4096) as file, drive_rates.Bench("posix", file, 4096, 4) as bench:
        bench.fill()
        assert [(one.kind, one.offset) for one in moved] == [("write", i * 4096) for i in range(8)]
        for kind in drive_rates.KINDS:
            moved.clear()
            assert bench.run(kind, 0.05).nbytes == 4096 * len(moved) > 0
            assert {one.kind for one in moved} == {"write" if kind == "write" else "read"}
            positions = [one.offset // 4096 for one in moved]
            in_order = [i % 8 for i in range(len(moved))]
            assert set(positions) == set(range(8))
            assert (positions == in_order) == (kind != "random_read")
    assert engine.closed


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Children take SIGINT even where these tests run in a shell's background, which ignores it for all below it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(direct: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-m", "saria_vllm.cli", "bench", "ssd", "--path", str(direct), *QUICK, "--seconds", "9"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("writing")
        time.sleep(0.2)
        free = os.statvfs(direct).f_bavail
        process.send_signal(how)
        out, err = process.communicate(timeout=20)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert out == "" and "Traceback" not in err
    assert list(direct.iterdir()) == [] and free > 0
