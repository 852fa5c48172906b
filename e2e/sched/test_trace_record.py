"""`trace_record`: what the simulator reads back is what was asked, and nothing that a disk does holds up the engine."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import Engine, prompt
from saria_connector import recording as recording_module
from saria_connector.recording import FILES_MAX, Recording
from saria_vllm.sim.formats import read_trace
from saria_vllm.sim.trace import Request

pytestmark = pytest.mark.vllm
Make = Callable[..., Engine]

KEYS = [bytes([number]) * 32 for number in range(6)]


def recorded(path: Path) -> list[Request]:
    trace = read_trace(path)
    assert trace.form == "recorded"
    return [session.requests[0] for session in trace.sessions]


def wait_for(truth: Callable[[], Any]) -> None:
    for _ in range(1000):
        if truth():
            return
        time.sleep(0.01)
    raise AssertionError("it does not come")


# Under vLLM's scheduler.


def test_the_simulator_reads_the_prompts_that_were_served(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    began = time.time()
    engine = make(chunk_blocks=2, blocks=100, trace_record=str(path))
    first = engine.serve("turn 1", prompt(200), 40)
    engine.serve("other", prompt(70, seed=1), 3)
    engine.serve("turn 2", prompt(200) + first + prompt(50, seed=2), 10)
    engine.serve("short", prompt(20, seed=3), 2)
    engine.serve("remote", prompt(64, seed=4), 2, params={"do_remote_prefill": True})
    engine.close()
    found = recorded(path)
    names = ["turn 1", "other", "turn 2", "short", "remote"]
    ids: dict[bytes, int] = {}
    for name, request in zip(names, found, strict=True):
        asked = engine.requests[name]
        assert (request.input_tokens, request.output_tokens) == (asked.num_prompt_tokens, len(engine.outputs[name]))
        assert began - 1 <= request.time_s + began <= time.time() + 1
        keys = engine.keys(asked)[: asked.num_prompt_tokens // engine.chunk_tokens]
        assert len(request.blocks()) == len(keys)
        for key, each in zip(keys, request.blocks(), strict=True):
            assert ids.setdefault(key, each) == each, "equal chunks are equal in the recording"
    assert len(set(ids.values())) == len(ids), "and unequal ones are not"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    data = path.read_bytes()
    assert not any(key.hex().encode() in data or key in data for key in ids)


def test_aborted_requests_are_recorded_once_they_were_scheduled(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = make(requests_max=1, trace_record=str(path))
    engine.add("running", prompt(100), 60)
    engine.add("waiting", prompt(70, seed=1), 60)
    engine.steps_of(6)
    engine.abort("waiting", "running")
    engine.close()
    (request,) = recorded(path)
    assert request.input_tokens == 100
    assert len(request.blocks()) == 6


def test_times_are_those_of_arrival(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = make(trace_record=str(path))
    now = time.time()
    engine.serve("later", prompt(40), arrival_time=now + 1000)
    engine.serve("sooner", prompt(40, seed=1), arrival_time=now + 400)
    engine.close()
    times = [request.time_s for request in recorded(path)]
    assert times[0] - times[1] == pytest.approx(600, abs=0.01)


def test_a_restart_goes_on_in_the_same_file(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        engine = make(trace_record=str(path))
        engine.serve("one", prompt(100))
        engine.close()
    first, second = recorded(path)
    assert not set(first.blocks()) & set(second.blocks()), "the salt is new"
    assert os.listdir(tmp_path) == ["trace.jsonl"]


def test_without_the_key_nothing_is_recorded(make: Make) -> None:
    engine = make()
    engine.serve("one", prompt(100))
    assert engine.side._recording is None


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Appending waits for this event."""
    go_on, append = threading.Event(), recording_module._append

    def waits(fd: int, line: bytes) -> None:
        go_on.wait(60)
        append(fd, line)

    monkeypatch.setattr(recording_module, "_append", waits)
    yield go_on
    go_on.set()


def test_a_full_queue_drops_counts_and_holds_up_nothing(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: threading.Event
) -> None:
    monkeypatch.setattr(recording_module, "QUEUE_KEYS_MAX", 14)
    path = tmp_path / "trace.jsonl"
    engine = make(trace_record=str(path))
    for number in range(5):
        engine.serve(f"{number}", prompt(100, seed=number))  # Six chunks each.
    assert engine.counted("recording_dropped") == 3
    stuck.set()
    recording = engine.side._recording
    assert recording is not None
    wait_for(lambda: recording._taken == recording._queued)
    engine.serve("again", prompt(100, seed=9))
    engine.close()
    assert engine.counted("recording_dropped") == 3
    assert [len(request.blocks()) for request in recorded(path)] == [6] * 3


def test_a_shutdown_waits_a_bounded_time(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: threading.Event
) -> None:
    monkeypatch.setattr(recording_module, "CLOSE_S", 0.1)
    engine = make(trace_record=str(tmp_path / "trace.jsonl"))
    engine.serve("one", prompt(100))
    engine.close()
    assert not stuck.is_set()


def test_a_disk_that_fills_ends_the_recording_at_a_whole_line(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    write = os.write

    def short(fd: int, line: bytes) -> int:
        return write(fd, line if b'"keep":0' not in line or b'"in":100' in line else line[:20])

    said: list[str] = []
    monkeypatch.setattr(recording_module.os, "write", short)
    monkeypatch.setattr(recording_module.logger, "error", lambda text, *args: said.append(text % args))
    engine = make(trace_record=str(path))
    engine.serve("fits", prompt(100))
    engine.serve("does not", prompt(101, seed=1))
    recording = engine.side._recording
    assert recording is not None
    wait_for(lambda: recording._ended)
    engine.serve("after", prompt(100, seed=2))
    engine.serve("after that", prompt(100, seed=3))
    assert engine.counted("recording_dropped") == 2
    assert said == ["SARIA: trace_record is off: OSError: no room for a whole line"]
    engine.close()
    assert [request.input_tokens for request in recorded(path)] == [100]


# Files.


def record(path: Path, chunk_tokens: int = 16, requests: int = 1) -> Recording:
    recording = Recording(str(path), chunk_tokens)
    for number in range(requests):
        assert recording.add(time.time(), KEYS, 6 * chunk_tokens + number, 5)
    return recording


def test_engines_of_one_path_write_to_files_of_their_own(tmp_path: Path) -> None:
    recordings = []
    for _ in range(3):
        recordings.append(record(tmp_path / "t"))
        wait_for(lambda: recordings[-1]._taken)
    for recording in recordings:
        recording.close()
    assert sorted(os.listdir(tmp_path)) == ["t", "t.1", "t.2"]
    assert [len(recorded(tmp_path / name)) for name in ("t", "t.1", "t.2")] == [1, 1, 1]
    record(tmp_path / "t").close()
    assert len(recorded(tmp_path / "t")) == 2


@pytest.mark.parametrize(
    "foreign", [b"root:x:0:0\n", b"{}\n", b'{"saria_trace":1,"chunk_t', b"\xff" * 9000, b"[" * 9000]
)
def test_files_of_others_are_left_alone(tmp_path: Path, foreign: bytes) -> None:
    (tmp_path / "t").write_bytes(foreign)
    record(tmp_path / "t").close()
    assert (tmp_path / "t").read_bytes() == foreign
    assert len(recorded(tmp_path / "t.1")) == 1


def test_another_chunk_size_begins_another_file(tmp_path: Path) -> None:
    for chunk_tokens in (16, 32, 16, 32):
        record(tmp_path / "t", chunk_tokens).close()
    assert [len(recorded(tmp_path / name)) for name in ("t", "t.1")] == [2, 2]


def test_a_recording_is_bounded_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "FILE_BYTES_MAX", 10_000)
    for _ in range(5):
        recording = Recording(str(tmp_path / "t"), 16)
        for number in range(60):
            recording.add(time.time(), [b"%d.%d" % (number, chunk) for chunk in range(6)], 100, 5)
        recording.close()
    assert 5_000 < (tmp_path / "t").stat().st_size <= 10_000
    assert os.listdir(tmp_path) == ["t"]
    assert recording.add(0.0, KEYS, 100, 5) is False
    assert len(recorded(tmp_path / "t")) > 50


def link(path: Path) -> None:
    path.symlink_to("target")


def gone(path: Path) -> None:
    path.parent.rmdir()


def taken(path: Path) -> None:
    for number in range(FILES_MAX):
        (path.parent / (f"t.{number}" if number else "t")).write_text("not ours")


@pytest.mark.parametrize("harm", [link, gone, taken, os.mkdir])
def test_a_file_that_cannot_be_opened_turns_the_recording_off(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "t"
    harm(path)
    recording = Recording(str(path), 16)
    wait_for(lambda: recording._ended)
    assert recording.add(0.0, KEYS, 100, 5) is False
    recording.close()
    assert not (tmp_path / "folder" / "target").exists()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    def number() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = number()
    (tmp_path / "t").write_text("not ours")
    for _ in range(3):
        record(tmp_path / "t").close()
    assert number() == before
