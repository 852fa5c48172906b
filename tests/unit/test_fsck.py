"""`saria fsck`: every kind of damage is found and named, nothing else is, and only what is bad is dropped."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from damage import DROPPED, KEPT, Found, Place, damaged_parts, endless_parts, key_twice, offset_of, patch
from doubles import failing
from live_engine import NAME, PARTS, SHAPES, LiveEngine, end, start
from saria_vllm.cli import main
from saria_vllm.storage import checking, segment_check
from saria_vllm.storage.namespace import EngineDirectory
from saria_vllm.storage.rates import write_rate
from saria_vllm.storage.reclaim import share_capacity
from saria_vllm.storage.recovery import data_name, journal_name
from saria_vllm.storage.wear import lease_state, write_state

GOOD = 12 + 4 + 3
"""Records of the healthy directory: segment 0 of group 0 and 1 of group 1 sealed, 2 open when its engine died."""


def fsck(capsys: pytest.CaptureFixture[str], root: Path, *options: str) -> tuple[int, dict[str, Any]]:
    status = main(["fsck", str(root), "--json", *options])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return status, json.loads(out)


def snapshot(root: Path) -> dict[str, tuple[Any, ...]]:
    """All that could change: names, kinds, modes, sizes, times of change, bytes."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() and status.st_size < 1 << 20 else b""
        found[str(path)] = (status.st_ino, status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns, data)
    return found


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an engine left that died."""
    root = tmp_path_factory.mktemp("healthy")
    engine = LiveEngine([str(root)])
    assert (engine.fill(0), engine.fill(1, group=1), engine.fill(2, count=3)) == (12, 4, 3)
    write_state(str(root), 0, b"{}")
    engine.directory.release()
    return root


@pytest.fixture
def place(tmp_path: Path, healthy: Path) -> Place:
    return Place(Path(shutil.copytree(healthy, tmp_path / "drive")))


def found_in(report: dict[str, Any]) -> Found:
    """Kinds, places and records of a report's findings, places as damage names them."""
    engine = f"saria/{NAME}/e0"
    return sorted(
        (
            (row["kind"], row["path"].removeprefix(engine).lstrip("/"), row["record"])
            for row in report["findings"]
        ),
        key=repr,
    )  # fmt: skip


@pytest.mark.parametrize("damage", [*DROPPED, *KEPT], ids=lambda damage: damage.__name__)
def test_damage_is_found_and_only_what_is_bad_is_dropped(
    capsys: pytest.CaptureFixture[str], place: Place, damage: Callable[[Place], Found]
) -> None:
    expected = sorted(damage(place), key=repr)
    before = snapshot(place.root)
    status, found = fsck(capsys, place.root)
    assert found_in(found) == expected
    assert (status, found["found"], found["dropped"]) == (1, len(expected), 0)
    assert snapshot(place.root) == before
    status, dropping = fsck(capsys, place.root, "--drop-bad")
    assert (status, found_in(dropping)) == (1, expected)
    if damage in KEPT:
        assert dropping["dropped"] == 0
        assert snapshot(place.root) == before
        return
    assert dropping["dropped"] == len(expected)
    status, after = fsck(capsys, place.root)
    gone = damage in (damaged_parts, endless_parts)  # The next engine writes it again.
    assert found_in(after) == ([("parts", f"saria/{NAME}/namespace.json", None)] if gone else [])
    assert after["records"] == found["records"]
    engine = LiveEngine([str(place.root)])
    assert len(engine.found) == after["records"]
    engine.close()
    assert fsck(capsys, place.root)[0] == 0


def test_what_engines_share_and_what_a_second_chance_leaves_is_no_damage(
    capsys: pytest.CaptureFixture[str], place: Place
) -> None:
    directory = EngineDirectory.claim([str(place.root)], NAME, PARTS, 0)
    share_capacity([str(place.root)], directory, 1 << 30)
    lease = lease_state(str(place.root), 3)[1]
    write_rate(str(place.root), 0, 1, 1e9, 5e8)
    key_twice(place)
    for options in ((), ("--drop-bad",)):
        status, report = fsck(capsys, place.root, *options)
        assert (status, report["findings"], report["records"]) == (0, [], GOOD + 1)
    directory.release()
    os.close(lease)
    assert fsck(capsys, place.root, "--drop-bad")[0] == 0


def test_what_a_living_engine_wrote_is_not_dropped_whatever_its_directory(
    capsys: pytest.CaptureFixture[str], place: Place
) -> None:
    state = place.top / "endurance-e0.json"
    patch(state, 3)
    lease = lease_state(str(place.root), 0)[1]
    status, report = fsck(capsys, place.root, "--drop-bad")
    assert (status, found_in(report), report["dropped"]) == (1, [("endurance", "saria/endurance-e0.json", None)], 0)
    os.close(lease)
    assert fsck(capsys, place.root, "--drop-bad")[1]["dropped"] == 1 and not state.exists()


def test_a_healthy_directory_is_silent_and_untouched(capsys: pytest.CaptureFixture[str], place: Place) -> None:
    before = snapshot(place.root)
    status, report = fsck(capsys, place.root, "--drop-bad")
    assert (status, report["findings"], report["records"], report["segments"]) == (0, [], GOOD, 3)
    assert report["bytes_read"] == 15 * 4096 + 4 * SHAPES[1].record_bytes
    assert snapshot(place.root) == before
    assert main(["fsck", str(place.root)]) == 0
    assert capsys.readouterr().out.endswith("nothing is wrong\n")


def test_what_a_reset_left_is_of_no_use_but_not_wrong(capsys: pytest.CaptureFixture[str], place: Place) -> None:
    engine = LiveEngine([str(place.root)])
    engine.fill(7, count=2)
    engine.reset()
    engine.directory.release()
    patch(place.data(7), offset_of(0, 0))
    status, report = fsck(capsys, place.root)
    assert (status, report["records"], report["useless_segments"]) == (0, 0, 4)


def test_a_seal_that_was_interrupted_is_no_damage(capsys: pytest.CaptureFixture[str], place: Place) -> None:
    patch(place.data(2), place.data(2).stat().st_size - 4096, b"part of an index")
    status, report = fsck(capsys, place.root)
    assert (status, report["records"]) == (0, GOOD)


@pytest.mark.parametrize("ranks", [2])
def test_every_rank_and_engine_is_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path, ranks: int) -> None:
    engines = [LiveEngine([str(tmp_path)], ranks=ranks) for _ in range(2)]
    for engine in engines:
        for rank in range(ranks):
            engine.fill(0, rank=rank)
        engine.close()
    patch(tmp_path / "saria" / NAME / "e1" / "r1" / data_name(0), offset_of(0, 3))
    status, report = fsck(capsys, tmp_path)
    assert (status, report["engines"], report["segments"], report["records"]) == (1, 2, 4, 47)
    assert found_in(report) == [("record", f"saria/{NAME}/e1/r1/{data_name(0)}", 3)]


# Engines that live, and that died.


@pytest.fixture
def engine_in(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts engines in other processes."""
    started: list[subprocess.Popen[str]] = []

    def begin(work: str) -> subprocess.Popen[str]:
        started.append(start(tmp_path, work))
        return started[-1]

    yield begin
    for process in started:
        if process.returncode is None:
            end(process)


def test_an_engine_in_use_is_read_and_never_changed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine_in: Callable[[str], subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(checking, "CONFIRM_S", (0.01, 0.01))
    engine = engine_in("idle")
    place = Place(tmp_path)
    status, report = fsck(capsys, tmp_path, "--drop-bad")
    assert (status, report["in_use"], report["records"], report["findings"]) == (0, 1, 14, [])
    patch(place.data(0), offset_of(0, 4))
    shutil.copy(place.journal(1), place.journal(6))
    (place.engine / "generation.new").touch(mode=0o600)
    os.utime(place.engine / "generation.new", (1, 1))
    before = snapshot(tmp_path)
    status, report = fsck(capsys, tmp_path, "--drop-bad")
    assert (status, report["in_use"], report["dropped"]) == (1, 1, 0)
    bad = [
        ("orphan", "r0/" + journal_name(6), None), ("record", "r0/" + data_name(0), 4),
        ("temporary", "generation.new", None),
    ]  # fmt: skip
    assert found_in(report) == bad
    assert snapshot(tmp_path) == before
    end(engine)
    status, report = fsck(capsys, tmp_path, "--drop-bad")
    assert (found_in(report), report["in_use"], report["dropped"]) == (bad, 0, 3)
    assert fsck(capsys, tmp_path)[0] == 0


@pytest.mark.parametrize("retired", [False, True])
def test_what_an_engine_was_just_changing_is_looked_at_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine_in: Callable[[str], subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch, retired: bool,
) -> None:  # fmt: skip
    engine_in("idle")
    place, pauses = Place(tmp_path), []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if retired:
            place.data(0).unlink()
        else:
            patch(place.data(0), offset_of(0, 4))  # Flips the bit back.

    patch(place.data(0), offset_of(0, 4))
    monkeypatch.setattr(time, "sleep", sleep)
    status, report = fsck(capsys, tmp_path)
    assert (status, report["findings"], len(pauses)) == (0, [], 1)


def test_an_engine_at_work_is_not_mistaken_for_damage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine_in: Callable[[str], subprocess.Popen[str]]
) -> None:
    engine = engine_in("busy")
    for _ in range(12):
        status, report = fsck(capsys, tmp_path, "--drop-bad")
        assert (status, report["findings"], report["in_use"]) == (0, [], 1)
    end(engine)
    status, report = fsck(capsys, tmp_path)
    assert [row for row in report["findings"] if row["kind"] not in ("orphan", "temporary", "header", "index")] == []


def just_before(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, when: str, happens: Callable[[], Any]) -> None:
    """The first time that `module.name` is called with `when` among its arguments, something happens first."""
    real, pending = getattr(module, name), [happens]

    def shim(*args: Any, **kwargs: Any) -> Any:
        if pending and when in args:
            pending.pop()()
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, shim)


@pytest.mark.parametrize("when", ["before it is opened", "before it is leased"])
def test_an_engine_directory_that_goes_meanwhile_is_no_damage(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another engine makes room."""
    name = "e0" if when == "before it is opened" else "lease"
    just_before(monkeypatch, os, "stat" if name == "lease" else "open", name, lambda: shutil.rmtree(place.engine))
    if name == "lease":
        monkeypatch.setattr(checking, "_exists", lambda _fd, name: name == "lease")
    status, report = fsck(capsys, place.root, "--drop-bad")
    assert (status, report["findings"], report["segments"]) == (0, [], 0)
    assert not place.engine.exists()


def test_temporary_files_that_are_new_or_go_meanwhile_are_no_damage(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, gone = place.engine / "generation.new", place.rank / "probe"
    for path in (new, gone):
        path.touch(mode=0o600)
    just_before(monkeypatch, os, "stat", "probe", gone.unlink)
    status, report = fsck(capsys, place.root, "--drop-bad")
    assert (status, report["findings"], report["records"]) == (0, [], GOOD)
    assert new.exists() and not gone.exists()
    os.utime(new, (1, 1))
    assert found_in(fsck(capsys, place.root, "--drop-bad")[1]) == [("temporary", "generation.new", None)]
    assert not new.exists()


def test_a_reset_meanwhile_is_no_damage(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation was read before it, and the records after it."""

    def reset() -> None:
        engine.reset()
        engine.fill(8)

    engine = LiveEngine([str(place.root)])
    just_before(monkeypatch, checking, "open_directory", "r0", reset)
    status, report = fsck(capsys, place.root)
    assert (status, report["findings"], report["in_use"]) == (0, [], 1)
    engine.directory.release()
    assert fsck(capsys, place.root)[1]["records"] == 12


def test_a_segment_that_goes_while_it_is_opened_costs_nothing_else(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_data(rank_fd: int, name: str) -> int:
        if name == data_name(0):
            place.data(0).unlink()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(rank_fd, name)

    real = segment_check._open_data
    monkeypatch.setattr(segment_check, "_open_data", open_data)
    status, report = fsck(capsys, place.root, "--drop-bad")
    assert (status, found_in(report)) == (1, [("unreadable", "r0/" + data_name(0), None)])
    assert (report["records"], report["dropped"]) == (GOOD - 12, 1)
    monkeypatch.undo()
    assert fsck(capsys, place.root)[0] == 0


# Hostile directories, failing drives, bad usage.


@pytest.mark.parametrize("name", ["e0", "r0"])
def test_a_directory_that_cannot_be_opened_is_said_and_kept(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = snapshot(place.root)
    monkeypatch.setattr(os, "open", failing(errno.EACCES, os.open, lambda path, *_: path == name))
    status, report = fsck(capsys, place.root, "--drop-bad")
    assert (status, found_in(report), report["dropped"]) == (1, [("unreadable", "" if name == "e0" else name, None)], 0)
    assert report["findings"][0]["what"] == "cannot be opened: Permission denied"
    assert snapshot(place.root) == before


def test_what_this_process_lacks_is_no_damage_of_a_segment(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(place.root)
    monkeypatch.setattr(segment_check, "read_aligned", failing(errno.ENOMEM, None))
    status, report = fsck(capsys, place.root, "--drop-bad")
    assert (status, found_in(report), report["dropped"]) == (1, [("unreadable", "r0", None)], 0)
    assert report["findings"][0]["what"] == "cannot be read: Cannot allocate memory"
    assert snapshot(place.root) == before


def test_what_was_written_to_a_drive_is_kept_when_its_lease_cannot_be_asked_about(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = place.top / "endurance-e0.json"
    patch(state, 3)
    with monkeypatch.context() as change:
        change.setattr(os, "open", failing(errno.EACCES, os.open, lambda path, *_: path == "endurance-e0.lease"))
        status, report = fsck(capsys, place.root, "--drop-bad")
    assert (status, report["dropped"]) == (1, 0)
    assert found_in(report) == [("endurance", "saria/endurance-e0.json", None)] and state.exists()


def test_what_cannot_be_dropped_is_said(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(place.data(0), offset_of(0, 7))
    bad = ("record", "r0/" + data_name(0), 7)
    with monkeypatch.context() as change:
        change.setattr(segment_check, "write_whole", failing(errno.ENOSPC, None))
        status, report = fsck(capsys, place.root, "--drop-bad")
    assert (status, report["dropped"]) == (1, 0)
    assert found_in(report) == [bad, ("unreadable", "r0/" + data_name(0), None)]
    assert "could not be dropped: No space left on device" in {row["what"] for row in report["findings"]}
    assert fsck(capsys, place.root, "--drop-bad")[1]["dropped"] == 1
    assert fsck(capsys, place.root)[1]["records"] == GOOD - 1


def test_a_drive_that_fails_costs_the_records_that_it_fails_on(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if offset == offset_of(0, 7):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    status, report = fsck(capsys, place.root)
    assert (status, found_in(report)) == (1, [("record", "r0/" + data_name(0), 7)])
    assert "Input/output error" in report["findings"][0]["what"]


def test_what_is_read_short_is_no_record_though_a_buffer_held_its_bytes(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        nbytes = real(fd, buffers, offset)
        return nbytes - 512 if offset == offset_of(0, 7) else nbytes

    monkeypatch.setattr(os, "preadv", preadv)
    status, report = fsck(capsys, place.root)
    assert (status, found_in(report)) == (1, [("record", "r0/" + data_name(0), 7)])
    assert report["findings"][0]["what"] == "short read: 3584 of 4096 bytes"


def test_an_unreadable_header_costs_its_segment(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_check, "read_aligned", failing(errno.EIO, None))
    status, report = fsck(capsys, place.root)
    assert status == 1
    assert {(row["kind"], row["record"]) for row in report["findings"]} == {("unreadable", None)}
    assert report["found"] == 3


def test_without_o_direct_files_are_read_all_the_same(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = segment_check.open_regular

    def buffered(path: str, flags: int, dir_fd: int | None = None) -> int:
        if flags & (os.O_DIRECT | os.O_NOATIME):
            raise OSError(errno.EINVAL if flags & os.O_DIRECT else errno.EPERM, "refused")
        return real(path, flags, dir_fd)

    monkeypatch.setattr(segment_check, "open_regular", buffered)
    assert fsck(capsys, place.root)[1]["records"] == GOOD
    patch(place.data(0), offset_of(0, 11))
    assert fsck(capsys, place.root)[0] == 1


def test_any_number_of_foreign_files_is_one_finding(capsys: pytest.CaptureFixture[str], place: Place) -> None:
    count = 1000
    for number in range(count):
        os.mknod(place.rank / f"foreign-{number}")
    tracemalloc.start()
    status, report = fsck(capsys, place.root)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (status, found_in(report), report["records"]) == (1, [("foreign", "r0", None)], GOOD)
    assert report["findings"][0]["what"].startswith(f"{count} name(s) that are not ours: ")
    assert peak < 4 << 20


def test_large_segments_are_read_by_several_threads(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_check, "WORTH_BYTES", 4096)
    for record in (0, 3, 11):
        patch(place.data(0), offset_of(0, record))
    before, most = threading.active_count(), []
    real = segment_check._check_payloads

    def checked(*arguments: Any) -> Any:
        most.append(threading.active_count() - before)
        return real(*arguments)

    monkeypatch.setattr(segment_check, "_check_payloads", checked)
    status, report = fsck(capsys, place.root)
    assert found_in(report) == [("record", "r0/" + data_name(0), record) for record in (0, 11, 3)]
    assert (status, report["records"]) == (1, GOOD - 3)
    assert max(most) > 1


def test_names_of_others_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str], place: Place) -> None:
    (place.rank / "\x1b[31mred").write_text("x")
    assert main(["fsck", str(place.root)]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out and r"\x1b[31mred" in out
    assert "found 1: 1 foreign; dropped 0" in out


def test_only_so_many_findings_are_listed_but_all_are_counted(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saria_vllm.cli.fsck.FINDINGS_MAX", 2)
    for record in range(5):
        patch(place.data(0), offset_of(0, record))
    _, report = fsck(capsys, place.root)
    assert (len(report["findings"]), report["found"], report["kinds"]) == (2, 5, {"record": 5})
    main(["fsck", str(place.root)])
    assert "only the first 2 were listed" in capsys.readouterr().out


def test_progress_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saria_vllm.cli.fsck.REPORT_S", (0.0, 0.0))
    assert main(["fsck", str(place.root), "--json"]) == 0
    captured = capsys.readouterr()
    assert "3 segments, 108.00KiB of payload read" in captured.err
    json.loads(captured.out)


def test_bad_usage_says_what_is_accepted(capsys: pytest.CaptureFixture[str], place: Place, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "saria").symlink_to(place.top)
    for path in ("x", "nowhere", "x/saria"):
        assert main(["fsck", str(tmp_path / path)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and "accepted: one of ssd_paths" in captured.err
