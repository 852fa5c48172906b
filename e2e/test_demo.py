"""The demo refuses what it cannot replay before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the replay extra is not installed")
pytest.importorskip("rich", reason="the replay extra is not installed")

import demo

SHORT = """{"id": "s", "block_size": 64, "tool_tokens": 0, "system_tokens": 0, "requests":
[{"t": 0, "th": 0, "in": 64, "out": 1, "keep": 0, "add": [[1, 1]]}]}""".replace("\n", " ")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of the costly things was started."""
    names: list[str] = []

    def note(name: str) -> Any:
        def start(*_arguments: object, **_options: object) -> Any:
            names.append(name)
            raise demo.ServerDied(f"{name} is not for this test")

        return start

    monkeypatch.setattr(demo, "ensure_model", lambda _name: names.append("model") or Path("model"))
    monkeypatch.setattr(demo, "Server", note("server"))
    return names


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(out), "--arms", demo.PLAIN, *options])
    return demo.main()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot be opened: No such file or directory"),
        ("{", "line 1: "),
        (SHORT, "no session has 12 turns"),
        ("", "the file is empty"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_bad_usage(
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str | None,
    problem: str,
) -> None:
    trace = tmp_path / "trace.jsonl"
    if text is not None:
        trace.write_text(text)
    assert run(monkeypatch, tmp_path / "out", "--trace", str(trace)) == 2
    said = capsys.readouterr().err
    assert said.startswith("demo: ") and problem in said and len(said.splitlines()) == 1
    assert started == [] and not (tmp_path / "out").exists()


def test_a_server_that_dies_is_a_failure(started: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    assert run(monkeypatch, tmp_path / "out", "--seeded") == 1
    assert started == ["model", "server"]
