"""Drives under vLLM's scheduler: one that goes away is said once and costs no request, and each has its counters."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from harness import Engine, prompt
from saria_connector.stats import SariaPromMetrics, SariaStats
from saria_vllm.metrics import COUNTERS
from saria_vllm.types import Moved

pytestmark = pytest.mark.vllm
Make = Callable[..., Engine]


def two_drives(tmp_path: Path) -> dict[str, Any]:
    return {
        "block_bytes": 512 << 10, "dram_capacity": "8MiB", "ssd_capacity": "128MiB", "admission": "full_duplicate",
        "endurance": "off", "ssd_paths": [f"{tmp_path}/a", f"{tmp_path}/b"],
    }  # fmt: skip


def serve(engine: Engine, prompts: int, seed: int) -> None:
    for number in range(prompts):
        engine.serve(f"{seed}.{number}", prompt(100, seed=seed + number))
    engine.step()


def test_b39_a_drive_that_goes_away_is_said_once_and_requests_go_on(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(**two_drives(tmp_path))
    serve(engine, 4, seed=0)
    worker = engine.worker
    worker.auto_persists = False
    gone = 0
    with caplog.at_level(logging.ERROR, "vllm.saria"):
        for number in range(10, 20):
            engine.serve(f"gone.{number}", prompt(100, seed=number))
            for job_id, flight in list(worker.persists.items()):
                on_b = flight.job.drive == 1
                gone += on_b
                worker.end_persist(job_id, range(flight.job.chunks) if on_b else (), reason="vanished")
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert f"{tmp_path}/b: our directory is gone" in errors[0].getMessage()
    assert gone <= 4, "no more is written there"
    worker.auto_persists = True
    before = len(engine.begun("persist"))
    serve(engine, 4, seed=30)
    assert {job.drive for job in engine.begun("persist")[before:]} == {0}
    serve(engine, 4, seed=0)  # What was there is computed again, or is on the other drive.
    assert engine.counted(f"drive_errors:{tmp_path}/b") > 0
    assert engine.counted("errors:vanished") == engine.counted(f"drive_errors:{tmp_path}/b")


def test_what_workers_moved_is_counted_by_path_and_decides_where_chunks_go(make: Make, tmp_path: Path) -> None:
    engine = make(**two_drives(tmp_path))
    serve(engine, 2, seed=0)
    gb = 10**9
    engine.worker.moved = [Moved(0, gb, 1.0, 5, 1.0), Moved(1, gb // 4, 1.0, 7, 1.0)]
    serve(engine, 2, seed=10)
    assert engine.counted(f"drive_read_bytes:{tmp_path}/b") == gb // 4
    assert engine.counted(f"drive_written_bytes:{tmp_path}/a") == 5
    before = len(engine.begun("persist"))
    serve(engine, 12, seed=20)
    chunks = [sum(job.chunks for job in engine.begun("persist")[before:] if job.drive == drive) for drive in (0, 1)]
    assert chunks[0] >= 2.5 * chunks[1], "as near to 4 as the four that may be under way at once allow"
    assert sum(chunks) > 30


def prom(registry: CollectorRegistry) -> SariaPromMetrics:
    kinds = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    values: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    return SariaPromMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["model_name", "engine"], values)


def test_counters_of_drives_go_out_with_their_path() -> None:
    registry = CollectorRegistry()
    metrics = prom(registry)
    stats = SariaStats(data={"drive_read_bytes:/mnt/a:b": 5, "loads:loaded": 1})
    stats.aggregate(SariaStats(data={"drive_read_bytes:/mnt/a:b": 2, "drive_errors:/mnt/c": 1}))
    metrics.observe(dict(stats.data), 1)
    metrics.observe({"drive_read_bytes:/mnt/a:b": 1}, 0)
    metrics.observe({"drive_read_bytes:/mnt/a:b": 10}, 1)
    text = generate_latest(registry).decode()
    lines = [
        line for line in text.splitlines() if "drive_" in line and not line.startswith("#") and "created" not in line
    ]
    assert sorted(lines) == [
        'vllm:saria_drive_errors_total{drive="/mnt/c",engine="1",model_name="m"} 1.0',
        'vllm:saria_drive_read_bytes_total{drive="/mnt/a:b",engine="0",model_name="m"} 1.0',
        'vllm:saria_drive_read_bytes_total{drive="/mnt/a:b",engine="1",model_name="m"} 17.0',
    ]
    assert 'vllm:saria_loads_total{engine="0",model_name="m",result="failed"} 0.0' in text, "others are there at once"


def test_what_was_measured_is_told_when_it_changes(make: Make, tmp_path: Path) -> None:
    engine = make(**two_drives(tmp_path))
    engine.worker.ingress_bytes_s, engine.worker.token_s = 3e9, 0.001
    engine.serve("opens", prompt(100))
    engine.worker.moved = [Moved(0, 100_000_000, 1.0, 0, 0.0)]
    for number in range(3):
        engine.serve(f"{number}", prompt(600, seed=number))
    drive = f"drive_read_bytes_s:{tmp_path}/a"
    for name, value in ((drive, 10**8), ("ingress_bytes_s", 3 * 10**9), ("prefill_tokens_s", 1000)):
        assert [stats[name] for stats in engine.stats if name in stats] == [value]


def test_what_drives_were_measured_at_decides_where_the_first_chunks_go_and_is_a_gauge(
    make: Make, tmp_path: Path
) -> None:
    engine = make(**two_drives(tmp_path))
    gb = 10**9
    engine.worker.read_bytes_s, engine.worker.ingress_bytes_s = (float(gb), gb / 4), 8.0 * gb
    serve(engine, 12, seed=20)
    chunks = [sum(job.chunks for job in engine.begun("persist") if job.drive == drive) for drive in (0, 1)]
    assert chunks[0] >= 2.5 * chunks[1]
    assert engine.counted(f"drive_read_bytes_s:{tmp_path}/b") == gb // 4, "told once, for it did not change"
    assert engine.counted("ingress_bytes_s") == 8 * gb


def test_gauges_are_set_and_not_added_up() -> None:
    registry = CollectorRegistry()
    metrics = prom(registry)
    stats = SariaStats(data={"drive_read_bytes_s:/mnt/a": 5, "ingress_bytes_s": 7})
    stats.aggregate(SariaStats(data={"drive_read_bytes_s:/mnt/a": 4, "loads:loaded": 1}))
    for _ in range(2):
        metrics.observe(dict(stats.data), 0)
    text = generate_latest(registry).decode()
    assert 'vllm:saria_drive_read_bytes_s{drive="/mnt/a",engine="0",model_name="m"} 4.0' in text
    assert 'vllm:saria_ingress_bytes_s{engine="0",model_name="m"} 7.0' in text


def test_every_counter_is_known_to_prometheus() -> None:
    registry = CollectorRegistry()
    metrics = prom(registry)
    for name, metric in COUNTERS.items():
        labels = ("/x",) if metric.label == "drive" else metric.values or ("",)
        for value in labels:
            metrics.observe({f"{name}:{value}" if value else name: 3}, 0)
    assert generate_latest(registry).decode().count("} 3.0") == sum(len(m.values) or 1 for m in COUNTERS.values())


def test_b46_the_start_says_totals_and_each_ranks_share(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.saria"):
        make(**two_drives(tmp_path), ranks=2)
    (start,) = [text for record in caplog.records if "DRAM slots" in (text := record.getMessage())]
    assert "dram_capacity=8.00MiB ssd_capacity=128.00MiB" in start
    assert "8.00MiB DRAM, 4.00MiB for each of 2 rank(s)" in start
    assert "SSD 64.00MiB for each rank, in" in start
