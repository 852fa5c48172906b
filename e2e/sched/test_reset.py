"""Cache resets with transfers in flight, and faults of our own."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from content import Content
from harness import Engine, prompt
from saria_connector import opening
from saria_vllm.errors import StorageError
from saria_vllm.policy.tiers import Tiers
from saria_vllm.storage import namespace
from saria_vllm.types import Extent, FoundChunk

pytestmark = pytest.mark.vllm
Make = Callable[..., Engine]


def busy(engine: Engine) -> None:
    """Five stores and two loads in flight."""
    for name in ("one", "two"):
        engine.serve(name, prompt(100, seed=len(name)) if name == "two" else prompt(100))
    engine.flush_hbm()
    engine.worker.auto_loads = engine.worker.auto_stores = False
    engine.add("load one", prompt(100))
    engine.add("load two", prompt(100, seed=3))
    for number in range(5):
        engine.add(f"store {number}", prompt(40, seed=10 + number))
    engine.steps_of(5)
    assert len(engine.worker.loads) == 2 and len(engine.worker.stores) == 5


@pytest.mark.parametrize("ends", ["stores first", "loads first", "all at once"])
def test_b60_reset_with_stores_and_loads_in_flight(make: Make, ends: str) -> None:
    engine = make(blocks=100)
    busy(engine)
    generation = engine.side.ssd.generation
    assert engine.connector.reset_cache() is True
    assert engine.side.ssd.generation > generation
    engine.steps_of(3)
    stores, loads = list(engine.worker.stores), list(engine.worker.loads)
    if ends == "loads first":
        for request_id in loads:
            engine.worker.end_load(request_id)
            engine.steps_of(2)
    for job_id in stores:
        engine.worker.end_store(job_id)
        if ends != "all at once":
            engine.steps_of(1)
    engine.worker.auto_loads = engine.worker.auto_stores = True
    engine.worker.end_all()
    engine.run()
    assert all(engine.outputs[name] for name in ("load one", "load two"))
    assert all(engine.stored_chunks(f"store {number}") == 0 for number in range(5))
    engine.flush_hbm()
    for number in range(5):
        engine.serve(f"again {number}", prompt(40, seed=10 + number))
        assert engine.offered(f"again {number}") == [0] and engine.stored_chunks(f"again {number}") == 2
    engine.flush_hbm()
    engine.serve("hit", prompt(40, seed=10))
    assert engine.offered("hit") == [32]


def test_b60_a_load_that_was_planned_and_not_sent_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.serve("cold", prompt(100))
    engine.flush_hbm()
    plan_step = engine.side.plan_step

    def reset_between(output: Any) -> None:
        if engine.side._loads:
            assert engine.connector.reset_cache() is True
        plan_step(output)

    monkeypatch.setattr(engine.side, "plan_step", reset_between)
    engine.serve("again", prompt(100))
    assert engine.begun("refused") and not engine.begun("load")


def test_b60_a_store_that_was_planned_and_not_sent_keeps_its_slot_until_it_ends(make: Make) -> None:
    engine = make()
    engine.worker.auto_stores = False
    engine.add("cold", prompt(100))
    while not engine.side._stores:
        engine.step()
    assert engine.connector.reset_cache() is True
    engine.serve_some("next", prompt(100, seed=1))
    engine.worker.auto_stores = True
    engine.worker.end_all()
    engine.run()
    assert engine.stored_chunks("cold") == 0 and engine.stored_chunks("next") == 6


def test_b60_requests_of_before_a_reset_store_nothing_after_it(make: Make) -> None:
    engine = make()
    engine.add("before", prompt(60), 60)
    engine.steps_of(10)
    engine.connector.reset_cache()
    of_before = engine.begun("store") + [job for step in engine._queue for job in step.metadata.stores]
    assert of_before
    engine.run()
    assert len(engine.keys(engine.requests["before"])) > 3, "chunks are completed after the reset"
    assert engine.begun("store") == of_before
    index = engine.side.tiers.chunks.index
    assert not [key for key in engine.keys(engine.requests["before"]) if key in index.rows[0]]
    engine.flush_hbm()
    engine.serve("after", prompt(60))
    assert engine.offered("after") == [0] and engine.stored_chunks("after") == 3


def test_b60_reset_through_the_scheduler(make: Make) -> None:
    engine = make()
    engine.serve("cold", prompt(100))
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.serve("again", prompt(100))
    assert engine.answers[-1] == ("again", 0, 0)


def ssd(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"ssd_paths": [f"{tmp_path}/ssd"], "ssd_capacity": "64MiB", "admission": "full_duplicate", **more}


def test_b60_reset_with_persists_in_flight_retires_their_segments(make: Make, tmp_path: Path) -> None:
    engine = make(block_bytes=512 << 10, dram_capacity="8MiB", **ssd(tmp_path))
    engine.worker.auto_persists = False
    engine.serve("cold", prompt(100))
    engine.serve("warm", prompt(50, seed=5))
    assert engine.worker.persists
    assert engine.connector.reset_cache() is True
    engine.worker.end_all()
    engine.worker.auto_persists = True
    engine.serve("next", prompt(100, seed=1))
    engine.serve("next but one", prompt(100, seed=2))
    generations = {content.generation for content in engine.worker.ssd.values()}
    assert generations == {engine.side.ssd.generation}


def test_b60_a_reset_that_cannot_be_made_durable_is_not_reported_as_done(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(**ssd(tmp_path))
    engine.serve("cold", prompt(100))
    directory = engine.side.ssd.directory
    assert directory is not None

    def fails(*args: Any, **more: Any) -> None:
        raise StorageError("read-only")

    monkeypatch.setattr(directory, "_write_generation", fails)
    generation = engine.side.ssd.generation
    assert engine.connector.reset_cache() is False
    assert engine.side.ssd.generation == generation + 1
    engine.flush_hbm()
    engine.serve("again", prompt(100))
    assert engine.offered("again") == [0], "in this process the reset holds all the same"


# The SSD tier opens.


def test_requests_wait_a_bounded_time_for_the_ssd_tier(make: Make, tmp_path: Path) -> None:
    engine = make(**ssd(tmp_path))
    engine.worker.auto_open = False
    assert engine.scheduler.has_requests(), "an idle engine steps to open it"
    engine.add("early", prompt(100))
    engine.steps_of(4)
    assert set(engine.offered("early")) == {None}
    engine.now += 11
    engine.run()
    assert engine.outputs["early"]
    engine.worker.end_open([])
    engine.serve("later", prompt(100))
    assert engine.side.tiers.chunks.extents is not None


@pytest.mark.parametrize("reset", ["no", "before it is sent", "while it opens"])
def test_what_an_earlier_process_left_is_found_unless_reset(make: Make, tmp_path: Path, reset: str) -> None:
    engine = make(**ssd(tmp_path))
    engine.worker.auto_open = False
    engine.add("wanted", prompt(100))
    keys = engine.keys(engine.requests["wanted"])
    if reset == "before it is sent":
        engine.scheduler.schedule()
        assert engine.side.ssd._reclaimer is not None
        engine.side.ssd._reclaimer.join()
        assert engine.side.ssd._message is not None
        engine.connector.reset_cache()
    engine.steps_of(3)
    assert engine.worker.opened is not None and engine.worker.opened.generation == engine.side.ssd.generation
    if reset == "while it opens":
        engine.connector.reset_cache()
    found = []
    if reset != "before it is sent":
        for number, key in enumerate(keys):
            extent = Extent(0, 7, number)
            found.append(FoundChunk(0, key, keys[number - 1] if number else b"", extent))
            engine.worker.ssd[extent] = Content(engine.marks_of(key), engine.worker.opened.generation)
    engine.worker.end_open(found, next_segment=8)
    engine.run()
    assert engine.offered("wanted")[-1] == (96 if reset == "no" else 0)
    engine.serve("more", prompt(20, seed=1))
    assert bool(engine.worker.ssd) or reset != "no"
    assert Extent(0, 7, 0) in engine.worker.ssd or reset != "no"
    if reset == "while it opens":
        assert not any(extent.segment == 7 for extent in engine.worker.ssd), "their segment is retired"


def test_an_ssd_that_cannot_be_opened_is_left_out(make: Make, tmp_path: Path) -> None:
    engine = make(**ssd(tmp_path, dram_capacity="64MiB"))
    engine.worker.auto_open = False
    engine.add("cold", prompt(100))
    engine.steps_of(3)
    engine.worker.end_open([], problem="OSError: nothing there")
    engine.flush_hbm()
    engine.serve("again", prompt(100))
    assert engine.offered("again") == [96] and engine.side.tiers.chunks.extents is None


def no_room(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_at_start_leaves_dram_only(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(namespace, "write_durably", no_room)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    engine = make(**ssd(tmp_path, dram_capacity="64MiB"))
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([line for line in said if "No space left" in line]) == 1
    assert any(line.startswith(f"SARIA: the SSD tier is off: {tmp_path}/ssd/saria/") for line in said)
    engine.serve("cold", prompt(100))
    engine.flush_hbm()
    engine.serve("again", prompt(100))
    assert engine.offered("again") == [96] and engine.worker.opened is None
    assert engine.connector.reset_cache() is False, "what an earlier process left on SSD is not reset"
    engine.serve("reset", prompt(100))
    assert engine.offered("reset")[-1] in (None, 0)


def test_a_drive_whose_size_cannot_be_told_leaves_dram_only(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise StorageError("Input/output error")

    monkeypatch.setattr(opening, "Wear", fails)
    engine = make(**ssd(tmp_path))
    assert engine.side.ssd.directory is None
    engine.serve("cold", prompt(100))
    monkeypatch.undo()
    second = make(**ssd(tmp_path)).side.ssd.directory
    assert second is not None and second.index == 0, "nothing is leased"


def test_a_drive_that_is_full_at_start_is_left_out(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = namespace.write_durably

    def write_durably(directory_fd: int, *text: str) -> None:
        if os.readlink(f"/proc/self/fd/{directory_fd}").startswith(f"{tmp_path}/full/"):
            no_room()
        write(directory_fd, *text)

    monkeypatch.setattr(namespace, "write_durably", write_durably)
    engine = make(**ssd(tmp_path, ssd_paths=[f"{tmp_path}/full", f"{tmp_path}/ssd"]))
    engine.serve("cold", prompt(100))
    assert engine.worker.opened is not None
    assert [path.partition("/saria/")[0] for path in engine.worker.opened.directories] == [f"{tmp_path}/ssd"]
    assert engine.side.tiers.chunks.extents is not None and engine.side.tiers.chunks.extents.drives == 1
    assert engine.connector.reset_cache() is True


@pytest.mark.parametrize("late", [0, 1])
def test_two_ranks_open_and_share_what_both_found(make: Make, tmp_path: Path, late: int) -> None:
    engine = make(ranks=2, **ssd(tmp_path))
    engine.worker.auto_open = False
    engine.add("wanted", prompt(100))
    keys = engine.keys(engine.requests["wanted"])
    engine.steps_of(3)
    found = [FoundChunk(0, key, keys[i - 1] if i else b"", Extent(0, 7, i)) for i, key in enumerate(keys)]
    for chunk in found:
        engine.worker.ssd[chunk.extent] = Content(engine.marks_of(chunk.key), engine.worker.generation)
    engine.worker.end_open(found[: 6 - 3 * late], 8, ranks=1)
    engine.steps_of(2)
    assert set(engine.offered("wanted")) == {None}
    engine.worker.end_open(found[: 3 + 3 * late], 9, ranks=1)
    engine.run()
    assert engine.offered("wanted")[-1] == 48


# Faults of ours.


WHERE = ["match", "plan_load", "plan_store", "make_room", "finished", "arrived", "is_loading"]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_fault_of_ours_turns_the_tier_off_and_nothing_else(
    make: Make, monkeypatch: pytest.MonkeyPatch, where: str, policy: str
) -> None:
    engine = make(policy=policy)
    first = engine.serve("cold", prompt(100), 20)
    engine.flush_hbm()

    def fails(*args: Any, **more: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Tiers, where, fails)
    engine.add("again", prompt(100) + first[:10], 20)
    engine.add("other", prompt(70, seed=1), 20)
    engine.run(100)
    refused = where in ("plan_load", "arrived")  # Planning a load touches its prefix.
    if refused and policy == "fail":
        assert engine.finished["again"] == "error"
    else:
        assert engine.outputs["again"][:9] == first[10:19] and engine.finished["again"] == "length"
    assert len(engine.outputs["other"]) == 20
    assert engine.counted("internal_errors") >= 1
    assert bool(engine.begun("refused")) == refused
    monkeypatch.undo()
    engine.serve("after", prompt(100))
    assert engine.offered("after") == [0]
    engine.close(allow_off=True)


def test_a_fault_during_a_reset_is_not_reported_as_done(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.serve("cold", prompt(100))
    monkeypatch.setattr(Tiers, "reset", lambda self: 1 / 0)
    assert engine.connector.reset_cache() is False
    engine.flush_hbm()
    engine.serve("again", prompt(100))
    assert engine.offered("again") == [0]
    engine.close(allow_off=True)
