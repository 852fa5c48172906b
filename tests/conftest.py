"""Hooks of the tests without a server: slow ones are skipped unless asked for, never deselected."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    try:
        parser.addoption("--slow", action="store_true", help="run the tests that take minutes, too")
    except ValueError:
        pass  # Another conftest of this run has it.


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: give --slow to run it"))
