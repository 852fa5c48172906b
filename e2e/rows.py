"""Rows of long benchmarks, kept in a file, so that a stopped run goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, float]


class Rows(dict[tuple[Any, ...], Row]):
    """Rows by key, read from a file at first; `add` appends to it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for line in path.read_text().splitlines():
                key, row = json.loads(line)
                self[tuple(key)] = row

    def add(self, key: tuple[Any, ...], row: Row) -> None:
        self[key] = row
        with self._path.open("a") as file:
            print(json.dumps([key, row]), file=file)
