"""How fast each drive reads before anything was read from it: from its file, or measured now."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from saria_vllm.config import SsdEngineName
from saria_vllm.engine.drive_rates import Bench, scratch_file
from saria_vllm.errors import SariaError
from saria_vllm.storage.directories import TOP_NAME
from saria_vllm.storage.rates import read_rate, write_rate

BYTES_MAX = 64 << 20
"""Written and read once, on all drives of a rank together."""

SECONDS_MAX = 1.0
"""A drive that has not answered by then is not waited for."""

DEPTH = 8

FirstRates = Callable[[SsdEngineName, Sequence[str], int], tuple[float, ...]]


class Calibration:
    """A `FirstRates`: bytes per second at which a rank reads from each drive, 0 where that is not known.

    Measuring ends within `SECONDS_MAX` whatever drives do; one that is full, fails or hangs is passed over.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def __call__(self, engine: SsdEngineName, paths: Sequence[str], record_bytes: int) -> tuple[float, ...]:
        """`paths` are the SSD paths, empty for a drive that is not used."""
        now, rates = time.time(), [0.0] * len(paths)
        for drive, path in enumerate(paths):
            rates[drive] = read_rate(path, self._rank, self._ranks, now) if path else 0.0
        unknown = [drive for drive, path in enumerate(paths) if path and not rates[drive]]
        blocks = BYTES_MAX // max(1, len(unknown)) // record_bytes
        if not unknown or not blocks:
            return tuple(rates)
        measured: dict[int, float] = {}

        def work() -> None:
            until = time.monotonic() + SECONDS_MAX
            for drive in unknown:
                if time.monotonic() < until:
                    measured[drive] = self._measure(engine, paths[drive], blocks, record_bytes)

        thread = threading.Thread(target=work, name="saria-rates", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Too many threads here.
            return tuple(rates)
        thread.join(SECONDS_MAX)
        for drive, rate in list(measured.items()):
            rates[drive] = rate
        return tuple(rates)

    def _measure(self, engine: SsdEngineName, path: str, blocks: int, record_bytes: int) -> float:
        try:
            with (
                scratch_file(os.path.join(path, TOP_NAME), blocks * record_bytes) as file,
                Bench(engine, file, record_bytes, min(DEPTH, blocks)) as bench,
            ):
                bench.fill()
                read = bench.read_all()
        except SariaError:
            return 0.0
        rate = read.nbytes / max(1e-9, read.seconds)
        write_rate(path, self._rank, self._ranks, time.time(), rate)
        return rate
