"""`saria fsck`: every kind of damage is found and named, nothing else is, and only what is bad is dropped."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from live_engine import NAME, PARTS, SHAPES, LiveEngine, end, start
from saria_vllm.cli import main
from saria_vllm.storage import checking, segment_check
from saria_vllm.storage import format as fmt
from saria_vllm.storage.namespace import Generation, namespace_name, pack_generation
from saria_vllm.storage.recovery import SEGMENT_ID_END, data_name, journal_name
from saria_vllm.storage.wear import write_state
from saria_vllm.types import Extent

GOOD = 12 + 4 + 3
"""Records of the healthy directory: segment 0 of group 0 and 1 of group 1 sealed, 2 open when its engine died."""


class Place(NamedTuple):
    """A healthy directory, to be damaged."""

    root: Path

    @property
    def top(self) -> Path:
        return self.root / "saria"

    @property
    def namespace(self) -> Path:
        return self.top / NAME

    @property
    def engine(self) -> Path:
        return self.namespace / "e0"

    @property
    def rank(self) -> Path:
        return self.engine / "r0"

    def data(self, segment: int) -> Path:
        return self.rank / data_name(segment)

    def journal(self, segment: int) -> Path:
        return self.rank / journal_name(segment)


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


# Damage. Each says what must be found, as (kind, path below the engine's rank directory or SSD path, record), and
# whether it can be dropped.


def patch(path: Path, offset: int, data: bytes | None = None) -> None:
    """Overwrite bytes, or flip a bit of one."""
    with path.open("r+b") as file:
        file.seek(offset)
        data = data if data is not None else bytes([file.read(1)[0] ^ 4])
        file.seek(offset)
        file.write(data)


Found = list[tuple[str, str, int | None]]


def offset_of(group: int, record: int) -> int:
    return fmt.record_offset(SHAPES[group].record_bytes, record)


def flipped_payload(place: Place) -> Found:
    patch(place.data(0), offset_of(0, 5) + 1000)
    return [("record", "r0/" + data_name(0), 5)]


def flipped_payload_of_an_open_segment(place: Place) -> Found:
    patch(place.data(2), offset_of(0, 2) + 4095)
    return [("record", "r0/" + data_name(2), 2)]


def flipped_padding(place: Place) -> Found:
    patch(place.data(1), offset_of(1, 3) + 10_001)
    return [("record", "r0/" + data_name(1), 3)]


def swapped_records(place: Place) -> Found:
    data = place.data(0).read_bytes()
    one, two = (data[offset_of(0, record) :][:4096] for record in (3, 7))
    patch(place.data(0), offset_of(0, 3), two)
    patch(place.data(0), offset_of(0, 7), one)
    return [("record", "r0/" + data_name(0), 3), ("record", "r0/" + data_name(0), 7)]


def lost_write(place: Place) -> Found:
    patch(place.data(0), offset_of(0, 0), bytes(4096))
    return [("record", "r0/" + data_name(0), 0)]


def misplaced_write(place: Place) -> Found:
    patch(place.data(0), offset_of(0, 1), place.data(2).read_bytes()[offset_of(0, 1) :][:4096])
    return [("record", "r0/" + data_name(0), 1)]


def torn_write(place: Place) -> Found:
    patch(place.data(1), offset_of(1, 2) + 8192, bytes(4096))
    return [("record", "r0/" + data_name(1), 2)]


def flipped_header(place: Place) -> Found:
    patch(place.data(0), 3000)
    return [("header", "r0/" + data_name(0), None)]


def no_header(place: Place) -> Found:
    patch(place.data(2), 0, bytes(4096))
    return [("header", "r0/" + data_name(2), None)]


def empty_file(place: Place) -> Found:
    os.truncate(place.data(0), 0)
    return [("header", "r0/" + data_name(0), None)]


def cut_file(place: Place) -> Found:
    os.truncate(place.data(0), place.data(0).stat().st_size - 1)
    return [("size", "r0/" + data_name(0), None)]


def long_file(place: Place) -> Found:
    os.truncate(place.data(1), place.data(1).stat().st_size + 4096)
    return [("size", "r0/" + data_name(1), None)]


def renamed_file(place: Place) -> Found:
    place.data(0).rename(place.data(9))
    return [("store", "r0/" + data_name(9), None)]


def file_of_another_rank(place: Place) -> Found:
    (place.engine / "r1").mkdir(mode=0o700)
    place.data(0).rename(place.engine / "r1" / data_name(0))
    return [("store", "r1/" + data_name(0), None)]


def header_of(place: Place, segment: int) -> fmt.Header:
    return fmt.parse_header(place.data(segment).read_bytes()[: fmt.HEADER_BYTES])


def other_format_version(place: Place) -> Found:
    with pytest.MonkeyPatch.context() as change:
        change.setattr(fmt, "FORMAT_VERSION", fmt.FORMAT_VERSION + 1)
        later = fmt.pack_header(header_of_bytes := fmt.Header(*header_of_raw(place)))
    assert header_of_bytes.segment == 0
    patch(place.data(0), 0, later)
    return [("version", "r0/" + data_name(0), None)]


def header_of_raw(place: Place) -> tuple[Any, ...]:
    from saria_vllm.storage.namespace import store_id

    return store_id(NAME, 0, 0), 0, 0, 0, 4096, 12


def unknown_group(place: Place) -> Found:
    patch(place.data(0), 0, fmt.pack_header(header_of(place, 0)._replace(group=7)))
    return [("group", "r0/" + data_name(0), None)]


def size_of_another_group(place: Place) -> Found:
    patch(place.data(0), 0, fmt.pack_header(header_of(place, 0)._replace(group=1)))
    return [("group", "r0/" + data_name(0), None)]


def huge_counts(place: Place) -> Found:
    header = header_of(place, 0)._replace(records_max=2**32 - 1)
    patch(place.data(0), 0, fmt.pack_header(header))
    os.truncate(place.data(0), min(fmt.data_file_bytes(4096, header.records_max), 2**43))
    return [("size", "r0/" + data_name(0), None)]


def flipped_index(place: Place) -> Found:
    patch(place.data(0), place.data(0).stat().st_size - 4000)
    return [("index", "r0/" + data_name(0), None)]


def no_index(place: Place) -> Found:
    patch(place.data(0), place.data(0).stat().st_size - 4096, bytes(4096))
    return [("index", "r0/" + data_name(0), None)]


def no_journal(place: Place) -> Found:
    place.journal(2).unlink()
    return [("index", "r0/" + data_name(2), None)]


def torn_journal(place: Place) -> Found:
    with place.journal(2).open("ab") as file:
        file.write(b"half an entry")
    return [("journal", "r0/" + journal_name(2), None)]


def flipped_journal(place: Place) -> Found:
    patch(place.journal(2), fmt.ENTRY_BYTES + 40)
    return [("journal", "r0/" + journal_name(2), None)]


def endless_journal(place: Place) -> Found:
    os.truncate(place.journal(2), 2**42)
    return [("journal", "r0/" + journal_name(2), None)]


def orphan_journal(place: Place) -> Found:
    place.data(2).unlink()
    return [("orphan", "r0/" + journal_name(2), None)]


def data_is_a_symlink(place: Place) -> Found:
    place.data(0).rename(place.root / "elsewhere")
    place.data(0).symlink_to(place.root / "elsewhere")
    return [("symlink", "r0/" + data_name(0), None)]


def data_is_a_fifo(place: Place) -> Found:
    place.data(0).unlink()
    os.mkfifo(place.data(0), 0o600)
    return [("special", "r0/" + data_name(0), None)]


def data_is_a_socket(place: Place) -> Found:
    place.data(0).unlink()
    before = os.getcwd()
    os.chdir(place.rank)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(data_name(0))
    finally:
        os.chdir(before)
    return [("special", "r0/" + data_name(0), None)]


def data_is_a_directory(place: Place) -> Found:
    place.data(0).unlink()
    place.data(0).mkdir()
    return [("special", "r0/" + data_name(0), None)]


def journal_is_a_fifo(place: Place) -> Found:
    os.mkfifo(place.journal(0), 0o600)
    return [("special", "r0/" + journal_name(0), None)]


def open_mode(place: Place) -> Found:
    place.data(0).chmod(0o644)
    return [("mode", "r0/" + data_name(0), None)]


def open_small_files(place: Place) -> Found:
    for path in (place.engine / "lease", place.engine / "generation", place.top / "endurance-e0.json"):
        path.chmod(0o640)
    return [("mode", "lease", None), ("mode", "generation", None), ("mode", "saria/endurance-e0.json", None)]


def open_directories(place: Place) -> Found:
    for path in (place.top, place.namespace, place.engine, place.rank):
        path.chmod(0o755)
    return [("mode", "saria", None), ("mode", f"saria/{NAME}", None), ("mode", "", None), ("mode", "r0", None)]


def foreign_files(place: Place) -> Found:
    for folder in (place.top, place.namespace, place.engine, place.rank):
        (folder / "\x1b[31mred").write_text("x")
    (place.rank / data_name(SEGMENT_ID_END)).write_text("x")
    return [
        ("foreign", "saria", None),
        ("foreign", f"saria/{NAME}", None),
        ("foreign", "", None),
        ("foreign", "r0", None),
    ]


def no_lease(place: Place) -> Found:
    (place.engine / "lease").unlink()
    return [("lease", "lease", None)]


def lease_is_a_symlink(place: Place) -> Found:
    (place.engine / "lease").unlink()
    (place.engine / "lease").symlink_to("generation")
    return [("symlink", "lease", None)]


def damaged_generation(place: Place) -> Found:
    patch(place.engine / "generation", 16)
    return [("generation", "generation", None)]


def no_generation(place: Place) -> Found:
    (place.engine / "generation").unlink()
    return [("generation", "generation", None)]


def generation_of_before(place: Place) -> Found:
    engine = LiveEngine([str(place.root)])
    engine.reset()
    engine.fill(5)
    engine.directory.release()
    (place.engine / "generation").write_text(pack_generation(Generation(1, False)))
    return [("generation", "generation", None)]


def damaged_parts(place: Place) -> Found:
    (place.namespace / "namespace.json").write_text(json.dumps(PARTS).replace("tiny", "tony"))
    return [("parts", f"saria/{NAME}/namespace.json", None)]


def endless_parts(place: Place) -> Found:
    (place.namespace / "namespace.json").write_text("[" * 100_000)
    return [("parts", f"saria/{NAME}/namespace.json", None)]


def no_parts(place: Place) -> Found:
    (place.namespace / "namespace.json").unlink()
    return [("parts", f"saria/{NAME}/namespace.json", None)]


def damaged_endurance(place: Place) -> Found:
    patch(place.top / "endurance-e0.json", 3)
    return [("endurance", "saria/endurance-e0.json", None)]


def temporary_files(place: Place) -> Found:
    found: Found = []
    for path in (
        place.rank / "probe", place.engine / "generation.new", place.namespace / "namespace.json.new",
        place.top / "endurance-e0.json.new",
    ):  # fmt: skip
        path.touch(mode=0o600)
        os.utime(path, (1, 1))
        name = str(path.relative_to(place.engine if path.is_relative_to(place.engine) else place.root))
        found.append(("temporary", name, None))
    return found


def key_twice(place: Place) -> Found:
    engine = LiveEngine([str(place.root)])
    engine.write(b"0-0-4", Extent(0, 5, 0))
    engine.directory.release()
    return [("duplicate", "r0/" + data_name(0), 4)]


def rank_is_a_symlink(place: Place) -> Found:
    place.rank.rename(place.root / "elsewhere")
    place.rank.symlink_to(place.root / "elsewhere")
    return [("symlink", "r0", None)]


def engine_is_a_symlink(place: Place) -> Found:
    place.engine.rename(place.root / "elsewhere")
    place.engine.symlink_to(place.root / "elsewhere")
    return [("symlink", "", None)]


def namespace_is_a_file(place: Place) -> Found:
    (place.top / ("0" * 32)).write_text("")
    return [("special", f"saria/{'0' * 32}", None)]


def other_user(place: Place) -> Found:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(place.data(1), 12345, -1)
    return [("owner", "r0/" + data_name(1), None)]


def other_users_rank(place: Place) -> Found:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(place.rank, 12345, -1)
    return [("owner", "r0", None)]


def namespace_of_another_version(place: Place) -> Found:
    shutil.rmtree(place.namespace)
    parts = {**PARTS, "format": fmt.FORMAT_VERSION + 1}
    LiveEngine([str(place.root)], parts=parts).close()
    return [("version", f"saria/{namespace_name(parts)}/e0", None)]


DROPPED = [
    flipped_payload, flipped_payload_of_an_open_segment, flipped_padding, swapped_records, lost_write, misplaced_write,
    torn_write, flipped_header, no_header, empty_file, cut_file, long_file, renamed_file, file_of_another_rank,
    other_format_version, unknown_group, size_of_another_group, huge_counts, flipped_index, no_index, no_journal,
    torn_journal, flipped_journal, endless_journal, orphan_journal, data_is_a_symlink, data_is_a_fifo, data_is_a_socket,
    damaged_parts, endless_parts, damaged_endurance, temporary_files, key_twice,
]  # fmt: skip
KEPT = [
    data_is_a_directory, journal_is_a_fifo, open_mode, open_small_files, open_directories, foreign_files, no_lease,
    lease_is_a_symlink, damaged_generation, no_generation, generation_of_before, no_parts, rank_is_a_symlink,
    engine_is_a_symlink, namespace_is_a_file, other_user, other_users_rank, namespace_of_another_version,
]  # fmt: skip


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
    assert after["records"] == found["records"] - (damage is key_twice)
    engine = LiveEngine([str(place.root)])
    assert len(engine.found) == after["records"]
    engine.close()
    assert fsck(capsys, place.root)[0] == 0


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


# Hostile directories, failing drives, bad usage.


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


def test_an_unreadable_header_costs_its_segment(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(segment_check, "read_aligned", failing)
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
