"""Which cache a start finds: after a changed configuration another one, said once, and the old one after going back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import Engine, prompt, write_model

pytestmark = pytest.mark.vllm


class Starts:
    """Starts engines on one directory, one after the other, and keeps what each says."""

    def __init__(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.model, self.root, self._caplog = write_model(tmp_path / "model"), tmp_path, caplog
        (self.model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    def start(self, **settings: Any) -> tuple[str, list[str]]:
        """The namespace, and what was said of another one."""
        self._caplog.clear()
        engine = Engine(
            self.model, asynchronous=False, ssd_paths=[f"{self.root}/ssd"], ssd_capacity="1GiB", endurance="off",
            **settings,
        )  # fmt: skip
        engine.serve("one", prompt(100))
        directory = engine.side.ssd.directory
        assert directory is not None and directory.index == 0
        engine.close()
        said = [record.getMessage() for record in self._caplog.records if "used last" in record.getMessage()]
        return directory.namespace, said


@pytest.fixture
def starts(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Starts:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    return Starts(tmp_path, caplog)


def configured(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    real = Engine._config

    def config(self: Engine, *args: Any) -> Any:
        made = real(self, *args)
        change(made)
        return made

    monkeypatch.setattr(Engine, "_config", config)


def two_ranks(config: Any) -> None:
    config.parallel_config.tensor_parallel_size = 2


def another_dtype(config: Any) -> None:
    config.cache_config.cache_dtype = "fp8_e5m2"


@pytest.mark.parametrize(
    ("settings", "change", "part"),
    [
        ({"ranks": 2}, two_ranks, "tensor_parallel: 1 -> 2"),
        ({}, another_dtype, "kv_dtype: "),
        ({"block_tokens": 32}, lambda config: None, "hash_block_tokens: 16 -> 32"),
    ],
    ids=["tensor parallel", "dtype of equal width", "block size"],
)
def test_b12_a_changed_configuration_is_said_once_and_going_back_finds_the_old_cache(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], change: Callable[[Any], None], part: str
) -> None:
    first, said = starts.start()
    assert said == []
    with monkeypatch.context() as patch:
        configured(patch, change)
        changed, (line,) = starts.start(**settings)
        assert first in line and changed in line and part in line
        assert starts.start(**settings) == (changed, [])
    back, (line,) = starts.start()
    assert back == first != changed and first in line and changed in line


def test_b21_another_hash_seed_is_one_warning_that_names_both(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    without, _ = starts.start()
    assert starts.start() == (without, []), "sha256 needs no seed"
    monkeypatch.setenv("PYTHONHASHSEED", "11")
    one, (line,) = starts.start()
    monkeypatch.setenv("PYTHONHASHSEED", "22")
    other, (line,) = starts.start()
    assert "'11'" in line and "'22'" in line and "PYTHONHASHSEED" in line
    assert [record.levelname for record in caplog.records if "used last" in record.getMessage()] == ["WARNING"]
    assert len({without, one, other}) == 3


def test_b21_block_hashes_without_a_seed_that_are_random_are_warned_of(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def xxhash(config: Any) -> None:
        config.cache_config.prefix_caching_hash_algo = "xxhash"

    configured(monkeypatch, xxhash)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    first, _ = starts.start()
    second, _ = starts.start()
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert first != second and len([line for line in warned if "set PYTHONHASHSEED" in line]) == 1
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    assert starts.start()[0] == starts.start()[0]


@pytest.mark.parametrize("harm", ["no json", "a list", "a link", "gone"])
def test_a_namespace_that_does_not_say_what_it_is_stops_no_start(starts: Starts, harm: str) -> None:
    first, _ = starts.start()
    file = starts.root / "ssd" / "saria" / first / "namespace.json"
    file.unlink()
    if harm == "a link":
        file.symlink_to("elsewhere")
    elif harm != "gone":
        file.write_text("{]" if harm == "no json" else "[]")
    _, said = starts.start(block_tokens=32)
    assert said == []
