"""Fixtures of the scheduler tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from harness import Engine

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]  # They import it; `pytest_report_header` says so.


def pytest_report_header() -> list[str]:
    missing = importlib.util.find_spec("vllm") is None
    return ["e2e/sched is left out: vLLM is not installed"] if missing else []


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from harness import write_model

    return write_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make(model: Path, asynchronous: bool) -> Iterator[Callable[..., Engine]]:
    """Makes engines with either scheduler; at the end of the test each is emptied and checked for what is left."""
    from harness import Engine

    engines: list[Engine] = []

    def make(**more: Any) -> Engine:
        engines.append(Engine(model, asynchronous=asynchronous, **more))
        return engines[-1]

    yield make
    for engine in engines:
        if not engine.closed:
            engine.close()


@pytest.fixture
def make_ssd(make: Callable[..., Engine], tmp_path: Path) -> Callable[..., Engine]:
    """Engines with 32 slots, 8 of them headroom, whose `TOKENS` are on SSD only."""

    from on_ssd import TOKENS, fill

    def make_ssd(admission: object = "full_duplicate", **more: Any) -> Engine:
        more = {"blocks": 200, "batched_tokens": 512, "promotion": 0.5, **more}
        engine = make(
            block_bytes=512 << 10, dram_capacity="16MiB", ssd_paths=[f"{tmp_path}/ssd"], ssd_capacity="512MiB",
            admission=admission, **more,
        )  # fmt: skip
        engine.serve("cold", TOKENS, 12)
        fill(engine, "filler")
        return engine

    return make_ssd
