"""`saria inspect`: what it shows of namespaces and engines, and which namespaces it drops."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from live_engine import NAME, PARTS, LiveEngine, end, start
from saria_vllm.cli import UsageError, main
from saria_vllm.cli import inspect as inspecting
from saria_vllm.cli.inspect import ago, parse_age, wear
from saria_vllm.policy.endurance import DAY_S, Governor
from saria_vllm.storage import format as fmt
from saria_vllm.storage import survey
from saria_vllm.storage.directories import lease_holders
from saria_vllm.storage.namespace import namespace_name
from saria_vllm.storage.recovery import data_name
from saria_vllm.storage.wear import device_bytes, write_state

OTHER_PARTS = {**PARTS, "model": "other"}
OTHER = namespace_name(OTHER_PARTS)


def inspect(capsys: pytest.CaptureFixture[str], root: Path, *options: str) -> tuple[int, dict[str, Any]]:
    status = main(["inspect", str(root), "--json", *options])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return status, json.loads(out)


def age(path: Path, days: float) -> None:
    """Everything below a path was written, claimed and read so long ago."""
    then = time.time() - days * DAY_S
    for file in [path, *path.rglob("*")]:
        os.utime(file, (then, then), follow_symlinks=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two ended engines of one namespace, one with two ranks, and one of another namespace, 40 days old."""
    two, one = LiveEngine([str(tmp_path)], ranks=2), LiveEngine([str(tmp_path)])
    two.fill(0)
    two.fill(0, rank=1)
    two.fill(1, group=1, count=3)
    one.fill(0, count=2)
    one.directory.release()
    two.directory.release()
    other = LiveEngine([str(tmp_path)], parts=OTHER_PARTS)
    other.fill(0)
    other.close()
    age(tmp_path / "saria" / OTHER, 40)
    return tmp_path


@pytest.fixture
def live(root: Path) -> Iterator[subprocess.Popen[str]]:
    """An engine that uses e0 of the first namespace."""
    process = start(root, "idle")
    yield process
    end(process)


def test_namespaces_engines_and_chunks_are_shown(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    status, report = inspect(capsys, root)
    assert status == 0
    assert set(report) == {
        "path", "total_bytes", "free_bytes", "reads_known", "namespaces", "wear", "dropped", "not_dropped",
    }  # fmt: skip
    found = {view["name"]: view for view in report["namespaces"]}
    assert set(found) == {NAME, OTHER}
    view = found[NAME]
    assert (view["parts"], view["in_use"]) == (PARTS, False)
    rows = [
        (row["index"], row["ranks"], row["segments"], row["open_segments"], row["chunks"], row["generation"])
        for row in view["engines"]
    ]
    assert rows == [(0, 2, 3, 1, 27, 1), (1, 1, 1, 1, 2, 1)]
    files = sum(path.stat().st_blocks * 512 for path in (root / "saria" / NAME).rglob("*"))
    assert view["bytes"] == files
    assert abs(view["last_used_s"] - time.time()) < 60
    assert abs(found[OTHER]["last_used_s"] - (time.time() - 40 * DAY_S)) < 60


def test_a_living_engine_is_shown_with_its_process(
    capsys: pytest.CaptureFixture[str], root: Path, live: subprocess.Popen[str]
) -> None:
    _, report = inspect(capsys, root)
    view = next(view for view in report["namespaces"] if view["name"] == NAME)
    assert [(row["in_use"], row["pids"]) for row in view["engines"]] == [(True, [live.pid]), (False, [])]
    main(["inspect", str(root)])
    out = capsys.readouterr().out
    assert f"pid {live.pid}" in out and "in use" in out and "model tiny" in out and "last used 40.0 days ago" in out


def test_lease_holders_are_those_of_this_file_only(tmp_path: Path) -> None:
    engine = LiveEngine([str(tmp_path)])
    folder = os.open(engine.directory.directories[0], os.O_RDONLY)
    try:
        assert lease_holders(folder) == [os.getpid()]
        (tmp_path / "locks").write_text("1: FLOCK  ADVISORY  WRITE 77 fe:00:1 0 EOF\n2: -> FLOCK\n3: POSIX x\n")
        assert lease_holders(folder, str(tmp_path)) == []
        with pytest.raises(OSError):
            lease_holders(folder, str(tmp_path / "none"))
    finally:
        os.close(folder)
        engine.directory.release()


def test_hits_are_known_as_far_as_access_times_tell(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    rank = root / "saria" / NAME / "e0" / "r0"
    for segment, days in ((0, 3.0), (1, 45.0)):
        status = (rank / data_name(segment)).stat()
        os.utime(rank / data_name(segment), (now - days * DAY_S, status.st_mtime))
    _, report = inspect(capsys, root)
    row = next(view for view in report["namespaces"] if view["name"] == NAME)["engines"][0]
    history = row["segment_bytes_by_last_read"]
    assert sum(history.values()) == row["bytes"]
    assert history["7d"] > 0 and history["older"] > 0 and history["30d"] == 0

    class NoTimes:
        f_flag, f_blocks, f_frsize, f_bavail = os.ST_NOATIME, 10, 4096, 5

    monkeypatch.setattr(os, "statvfs", lambda path: NoTimes)
    _, report = inspect(capsys, root)
    row = next(view for view in report["namespaces"] if view["name"] == NAME)["engines"][0]
    assert (report["reads_known"], row["segment_bytes_by_last_read"], row["read_s"]) == (False, None, None)
    main(["inspect", str(root)])
    assert "noatime" in capsys.readouterr().out


def test_looking_leaves_no_trace(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    def times() -> dict[str, tuple[int, int]]:
        files = (path for path in (root / "saria").rglob("*") if path.is_file())
        return {str(path): (path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in files if "seg-" in path.name}

    age(root, 20)
    before = times()
    inspect(capsys, root)
    main(["fsck", str(root)])
    assert {path: both for path, both in times().items() if path.endswith(".data")} == {
        path: both for path, both in before.items() if path.endswith(".data")
    }


# Dropping.


def test_a_namespace_is_dropped_by_name_or_its_beginning(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    status, report = inspect(capsys, root, "--drop", OTHER[:6])
    assert (status, report["dropped"], [view["name"] for view in report["namespaces"]]) == (0, [OTHER], [NAME])
    assert sorted(os.listdir(root / "saria")) == [NAME]


def test_old_namespaces_are_dropped_by_age(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    assert inspect(capsys, root, "--drop-older-than", "41d")[1]["dropped"] == []
    assert inspect(capsys, root, "--drop-older-than", "39d")[1]["dropped"] == [OTHER]
    assert sorted(os.listdir(root / "saria")) == [NAME]


def test_a_read_keeps_a_namespace_young(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    path = root / "saria" / OTHER / "e0" / "r0" / data_name(0)
    os.utime(path, (time.time() - DAY_S, path.stat().st_mtime))
    assert inspect(capsys, root, "--drop-older-than", "30d")[1]["dropped"] == []


def test_what_an_engine_uses_is_never_dropped(
    capsys: pytest.CaptureFixture[str], root: Path, live: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, report = inspect(capsys, root, "--drop", NAME, "--drop-older-than", "0s")
    assert (status, report["dropped"]) == (1, [OTHER])
    assert report["not_dropped"] == [{"name": NAME, "why": "an engine uses it"}]
    monkeypatch.setattr(inspecting.NamespaceView, "in_use", False)  # It was claimed after we looked.
    status, report = inspect(capsys, root, "--drop", NAME)
    assert (status, report["dropped"], report["not_dropped"][0]["name"]) == (1, [], NAME)
    assert (root / "saria" / NAME / "e0" / "r0" / data_name(0)).exists()


def test_dropping_follows_no_symlink_and_leaves_what_is_not_ours(
    capsys: pytest.CaptureFixture[str], root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / data_name(0)).write_text("precious")
    engine = root / "saria" / OTHER / "e0"
    (engine / "r1").symlink_to(outside)
    (engine / "r0" / "mine.txt").write_text("mine")
    status, report = inspect(capsys, root, "--drop", OTHER)
    assert (status, report["dropped"]) == (1, [])
    assert (outside / data_name(0)).read_text() == "precious"
    assert (engine / "r0" / "mine.txt").exists()


def test_a_namespace_without_engines_can_be_dropped(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    empty = root / "saria" / ("0" * 32)
    empty.mkdir(mode=0o700)
    (empty / "namespace.json").write_text("{}")
    _, report = inspect(capsys, root, "--drop", empty.name)
    assert report["dropped"] == [empty.name]
    assert not empty.exists()


def test_what_was_to_be_dropped_and_cannot_even_be_read_is_named(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def view(path: str, name: str, reads_known: bool) -> survey.NamespaceView:
        if name == OTHER:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return survey.view_namespace(path, name, reads_known)

    monkeypatch.setattr(inspecting, "view_namespace", view)
    status, report = inspect(capsys, root, "--drop", OTHER)
    assert (status, report["dropped"]) == (1, [])
    assert [row["name"] for row in report["not_dropped"]] == [OTHER]
    assert (root / "saria" / OTHER).exists()


def test_a_path_of_any_bytes_is_shown(root: Path) -> None:
    odd = root.parent / os.fsdecode(b"odd\xff\x1b[31m")
    root.rename(odd)
    command = [sys.executable, "-m", "saria_vllm.cli", "inspect", str(odd)]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict", "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert "odd\\udcff\\x1b[31m: 2 namespace(s)" in shown


# Others' directories.


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_what_is_no_json_is_not_shown_as_json(capsys: pytest.CaptureFixture[str], root: Path, number: str) -> None:
    (root / "saria" / OTHER / "namespace.json").write_text(f'{{"format": 99, "x": {number}}}')
    _, report = inspect(capsys, root)
    assert {view["name"]: view["parts"] for view in report["namespaces"]} == {NAME: PARTS, OTHER: None}


def test_other_versions_and_damage_are_shown_and_not_looked_into(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    parts = {**PARTS, "format": fmt.FORMAT_VERSION + 1}
    LiveEngine([str(root)], parts=parts).close()
    (root / "saria" / OTHER / "namespace.json").write_text("\x1b[31m")
    (root / "saria" / OTHER / "e0" / "r0" / data_name(0)).write_bytes(b"noise")
    (root / "saria" / OTHER / "e7").symlink_to(root)
    os.symlink(root, root / "saria" / ("1" * 32))
    status, report = inspect(capsys, root)
    found = {view["name"]: view for view in report["namespaces"]}
    assert (status, found[namespace_name(parts)]["parts"]["format"]) == (0, fmt.FORMAT_VERSION + 1)
    assert found[OTHER]["parts"] is None
    assert [(row["index"], row["unreadable_segments"]) for row in found[OTHER]["engines"]] == [(0, 1)]
    assert "1" * 32 not in found
    main(["inspect", str(root)])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "namespace.json is missing or damaged" in out and "see saria fsck" in out


def test_wear_is_what_the_engines_wrote_down(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    now = time.time()
    governor = Governor(1e9, 2e9, now - 3600)
    governor.spend(5_000_000, now - 1800)
    write_state(str(root), 0, msgspec.json.encode(governor.state(now, now)))
    write_state(str(root), 3, b'{"saved_s":1}')
    rows = wear(str(root), now)
    size = device_bytes([str(root)])[0]
    assert [row["engine"] for row in rows] == [0, 3]
    assert (rows[0]["written_bytes"], rows[0]["last_day_bytes"], rows[0]["drive_bytes"]) == (5e6, 5e6, size)
    assert rows[0]["drive_life_years"] == pytest.approx(5 * size / 5e6)
    assert "problem" in rows[1]
    main(["inspect", str(root)])
    out = capsys.readouterr().out
    assert "wear e0: 4.77MiB written in all" in out and "wear e3: " in out


@pytest.mark.parametrize(
    "options", [["--drop", "ff"], ["--drop", ""], ["--drop-older-than", "soon"], ["--drop-older-than", "1.5d"]]
)
def test_impossible_wishes_are_refused(capsys: pytest.CaptureFixture[str], root: Path, options: list[str]) -> None:
    assert main(["inspect", str(root), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and ("accepted" in captured.err or "expected" in captured.err)
    assert sorted(os.listdir(root / "saria")) == sorted([NAME, OTHER])


def test_a_directory_that_is_no_ssd_path_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "saria").symlink_to(tmp_path)
    for path in (tmp_path, tmp_path / "x", tmp_path / "none"):
        assert main(["inspect", str(path)]) == 2
        assert "accepted: one of ssd_paths" in capsys.readouterr().err


def test_ages() -> None:
    assert [parse_age(text) for text in ("30d", "12h", "5m", "0s")] == [30 * DAY_S, 12 * 3600, 300, 0]
    for text in ("", "d", "-1d", "1w", "30 d", "٣d", "9999999999d"):
        with pytest.raises(UsageError):
            parse_age(text)
    assert [ago(seconds) for seconds in (-5, 59, 90, 7200, 3 * DAY_S)] == [
        "0 s",
        "59 s",
        "1.5 min",
        "2.0 h",
        "3.0 days",
    ]


def test_what_goes_or_is_missing_costs_what_it_would_have_shown(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = root / "saria" / NAME / "e1"
    (one / "lease").unlink()
    (one / "generation").write_text("{")
    real = survey.look

    def look(rank_fd: int, segment: int, place: Any) -> Any:
        if segment == 1:
            (root / "saria" / NAME / "e0" / "r0" / data_name(1)).unlink()
        return real(rank_fd, segment, place)

    monkeypatch.setattr(survey, "look", look)
    status, report = inspect(capsys, root)
    rows = next(view for view in report["namespaces"] if view["name"] == NAME)["engines"]
    shown = [(row["segments"], row["chunks"], row["generation"], row["in_use"]) for row in rows]
    assert (status, shown) == (0, [(2, 24, 1, False), (1, 2, None, False)])
    assert rows[0]["claimed_s"] and rows[1]["claimed_s"] is None
    main(["inspect", str(root)])
    assert re.search(r"e1 +- +\? ", capsys.readouterr().out)


def test_an_engine_directory_that_goes_is_not_shown(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = survey.record_bytes

    def goes(parts: Any) -> Any:
        if parts == PARTS:
            shutil.rmtree(root / "saria" / NAME / "e0", ignore_errors=True)
        return real(parts)

    monkeypatch.setattr(survey, "record_bytes", goes)
    status, report = inspect(capsys, root)
    view = next(view for view in report["namespaces"] if view["name"] == NAME)
    assert (status, [row["index"] for row in view["engines"]]) == (0, [1])
    files = sum(path.stat().st_blocks * 512 for path in (root / "saria" / NAME).rglob("*"))
    assert view["bytes"] == files
