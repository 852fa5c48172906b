"""Engines on one directory under vLLM's scheduler: each finds what others sealed, and has its part of what is there."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from content import Content
from harness import Engine, prompt, write_model
from saria_connector import opening
from saria_connector.sharing import _News
from saria_vllm.policy.endurance import DAY_S
from saria_vllm.storage import reclaim
from saria_vllm.storage.namespace import store_id
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import Extent, OpenSsd

pytestmark = pytest.mark.vllm
BLOCK_BYTES = 512 << 10
RATED_BYTES = 256 << 20


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A model whose weights can be told from others, so that its namespace is the same for all engines."""
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


Make = Callable[..., Engine]


@pytest.fixture
def together(known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines that look when they are told to."""
    monkeypatch.setattr(opening, "LEASE_WAIT_S", 0.0)
    monkeypatch.setattr(opening.Sharing, "_run", lambda self: None)
    engines: list[Engine] = []

    def make(**more: Any) -> Engine:
        settings: dict[str, Any] = {
            "block_bytes": BLOCK_BYTES, "dram_capacity": "8MiB", "ssd_paths": [f"{tmp_path}/ssd"],
            "ssd_capacity": "64MiB", "admission": "full_duplicate", "endurance": "off", **more,
        }  # fmt: skip
        engines.append(Engine(settings.pop("model", known), asynchronous=False, **settings))
        engines[-1].serve("first", prompt(20, seed=70))  # The SSD tier opens.
        return engines[-1]

    yield make
    for engine in engines:
        if not engine.closed:
            engine.close()


def look(*engines: Engine) -> None:
    for engine in engines:
        assert engine.side.ssd.sharing is not None
        engine.side.ssd.sharing.look()
        engine.serve(f"step {engine.steps}", prompt(20, seed=71))


def seal(engine: Engine, keys: list[bytes], rank: int = 0, generation: int = 0) -> dict[bytes, Extent]:
    """Write whole segments of this engine with these keys, as its worker would. Bytes are of no matter."""
    directory, opened = engine.side.ssd.directory, engine.worker.opened
    assert directory is not None and opened is not None
    shape = engine.side.sizing.shapes[0]
    mine = OpenSsd(opened.directories, generation or opened.generation, opened.segment_bytes, 100)
    store = SegmentStore(mine, rank, {0: shape}, store_id(directory.namespace, directory.index, rank))
    places = {}
    for number, key in enumerate(keys):
        extent = Extent(0, 1000 + number // store.records_max(0), number % store.records_max(0))
        fd, offset = store.write_target(0, extent)
        with mmap.mmap(-1, shape.record_bytes) as buffer:
            os.pwrite(fd, buffer, offset)
        store.release(fd)
        store.commit(0, extent, key, keys[number - 1] if number else b"", 0)
        places[key] = extent
    store.close()
    return places


def keys_of(engine: Engine, seed: int = 0) -> list[bytes]:
    """Of a prompt of 100 tokens, which DRAM forgets again."""
    engine.serve(f"asks for keys {seed}", prompt(100, seed=seed))
    keys = engine.keys(engine.requests[f"asks for keys {seed}"])[:6]
    engine.flush_hbm()
    return keys


def foreign(engine: Engine, places: dict[bytes, Extent], owner: Engine) -> None:
    """Let the double know what lies where for this engine."""
    assert owner.side.ssd.directory is not None
    number = 1 + owner.side.ssd.directory.index
    for key, extent in places.items():
        engine._marks.setdefault(key, owner._marks[key])
        engine.worker.ssd[extent._replace(drive=number)] = Content(owner.marks_of(key), engine.worker.generation)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_is_served_from_what_another_engine_sealed(together: Make, ranks: int) -> None:
    ours, theirs = together(ranks=ranks), together(ranks=ranks)
    assert theirs.side.ssd.directory is not None and theirs.side.ssd.directory.index == 1
    keys = keys_of(theirs)
    for rank in range(ranks):
        foreign(ours, seal(theirs, keys, rank), theirs)
    look(ours)
    assert ours.counted("shared_chunks") == 6
    ours.serve("hit", prompt(100))
    assert ours.offered("hit") == [96]
    assert ours.counted("shared_hits") == 6 and ours.counted("hit_tokens:ssd") == 96
    (load,) = [job for job in ours.begun("load") if job.request_id == "hit"]
    assert {item.extent.drive for item in load.items} == {2}


def test_an_idle_engine_finds_what_others_sealed_with_its_first_request(together: Make) -> None:
    """The look is over long before that, and the first step comes after the look-up."""
    ours, theirs = together(), together()
    foreign(ours, seal(theirs, keys_of(theirs)), theirs)
    assert ours.side.ssd.sharing is not None
    ours.side.ssd.sharing.look()
    ours.serve("first for long", prompt(100))
    assert ours.offered("first for long") == [96]
    assert ours.counted("shared_hits") == 6


def test_an_engine_without_room_says_so(together: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What lies there and is nobody's is never removed."""
    (tmp_path / "ssd" / "saria").mkdir(parents=True)
    with open(tmp_path / "ssd" / "saria" / "foreign", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 << 20)
    with caplog.at_level(logging.WARNING, "vllm.saria"):
        engine = together()
    assert [line for line in caplog.messages if "so nothing is written to SSD for now: saria inspect" in line]
    os.unlink(tmp_path / "ssd" / "saria" / "foreign")
    caplog.clear()
    with caplog.at_level(logging.INFO, "vllm.saria"):
        look(engine)
    assert engine.side.tiers.chunks.extents.segments_max > 0
    assert not any("nothing is written" in line for line in caplog.messages)


def test_news_that_come_just_when_there_were_none_are_not_lost(together: Make) -> None:
    """The thread looks only once at a segment."""
    ours, theirs = together(), together()
    seal(theirs, keys_of(theirs))
    sharing = ours.side.ssd.sharing
    assert sharing is not None
    late: list[bool] = []

    class Racing(type(sharing)):  # type: ignore[misc]
        @property
        def _news(self) -> Any:
            """None, while the thread stores what it found."""
            news = self.__dict__.get("stored")
            if not late:
                late.append(True)
                self.__dict__["stored"] = _News(self._others.look()[0], [])
            return news

        @_news.setter
        def _news(self, news: Any) -> None:
            self.__dict__["stored"] = news

    sharing.__class__ = Racing
    sharing.take_news()
    assert ours.counted("shared_chunks") == 0
    sharing.take_news()
    ours.serve("step", prompt(20, seed=71))
    assert ours.counted("shared_chunks") == 6


def test_steps_that_are_slow_do_not_slow_down_what_is_found(
    together: Make, known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one look finds is bounded, and taken by a step: a step may take longer than the pause to the next look."""
    theirs = together()
    seal(theirs, keys_of(theirs))
    monkeypatch.undo()
    monkeypatch.setattr(opening, "LEASE_WAIT_S", 0.0)
    monkeypatch.setattr("saria_connector.sharing.LOOK_S", 0.05)
    monkeypatch.setattr("saria_connector.sharing.MORE_S", 0.01)
    monkeypatch.setattr("saria_vllm.storage.foreign.FOUND_MAX", 1)
    ours = together()
    time.sleep(0.5)
    monkeypatch.setattr("saria_connector.sharing.LOOK_S", 60.0)
    for number in range(8):
        time.sleep(0.1)
        ours.serve(f"step {number}", prompt(20, seed=71))
    assert ours.counted("shared_chunks") == 6


def test_what_only_one_rank_of_the_other_sealed_is_not_found(together: Make) -> None:
    ours, theirs = together(ranks=2), together(ranks=2)
    seal(theirs, keys_of(theirs), rank=0)
    look(ours)
    assert ours.counted("shared_chunks") == 0


def test_after_a_reset_nothing_of_others_is_used_and_nothing_of_ours_by_them(together: Make) -> None:
    ours, theirs = together(), together()
    foreign(ours, seal(theirs, keys_of(theirs)), theirs)
    sharing = ours.side.ssd.sharing
    assert sharing is not None
    sharing.look()
    assert ours.connector.reset_cache() is True
    ours.serve("after", prompt(100))
    assert ours.offered("after") == [0], "what was found before it was used is of other weights"
    look(ours)
    assert ours.counted("shared_chunks") == 0
    seal(ours, keys_of(ours, seed=5), generation=ours.side.ssd.generation)
    look(theirs)
    assert theirs.counted("shared_chunks") == 0


def test_what_its_owner_retired_is_offered_no_more(together: Make, tmp_path: Path) -> None:
    ours, theirs = together(), together()
    seal(theirs, keys_of(theirs))
    look(ours)
    for file in tmp_path.glob("ssd/saria/*/e1/r0/seg-*"):
        file.unlink()
    look(ours)
    ours.serve("late", prompt(100))
    assert ours.offered("late") == [0]


def test_an_engine_that_takes_no_steps_gives_up_what_it_does_not_use(together: Make) -> None:
    ours, theirs = together(), together()
    for _ in range(2):
        assert ours.side.ssd.sharing is not None
        ours.side.ssd.sharing.look()
    look(theirs)
    extents = theirs.side.tiers.chunks.extents
    assert extents is not None and extents.segments_max >= 10


def test_a_look_that_hangs_at_the_end_leaves_the_directory_leased(
    together: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might write into a lease whose descriptor is another file's by then."""
    go_on = threading.Event()
    monkeypatch.setattr("saria_connector.sharing.CLOSE_S", 0.1)
    monkeypatch.setattr(opening.Sharing, "_run", lambda self: go_on.wait(60))
    ours = together()
    directory = ours.side.ssd.directory
    ours.close()
    theirs = together()
    assert theirs.side.ssd.directory is not None and theirs.side.ssd.directory.index == 1
    go_on.set()
    assert directory is not None
    directory.release()


def test_engines_divide_the_capacity_and_the_heir_has_it_all_again(together: Make) -> None:
    def segments(engine: Engine) -> int:
        extents = engine.side.tiers.chunks.extents
        assert extents is not None
        return extents.segments_max

    ours = together()
    alone = segments(ours)
    theirs = together()
    assert segments(theirs) == 0, "all is granted to the first one"
    look(ours, ours, theirs)
    assert alone // 2 - 1 <= segments(ours) <= alone // 2 and alone // 2 - 1 <= segments(theirs) <= alone // 2
    theirs.close()
    look(ours)
    assert segments(ours) > alone * 3 // 4


def test_a_cap_that_went_down_retires_our_oldest_segments(together: Make) -> None:
    ours = together(block_bytes=BLOCK_BYTES, ssd_capacity="24MiB")
    for seed in range(20):
        ours.serve(f"fill {seed}", prompt(100, seed=seed))
    extents = ours.side.tiers.chunks.extents
    assert extents is not None
    before = extents.segments()
    theirs = together(ssd_capacity="24MiB")
    look(ours, ours, theirs)
    assert extents.segments() <= before // 2 + 1
    assert ours.counted("retired_chunks") > 0
    assert theirs.side.tiers.chunks.extents is not None and theirs.side.tiers.chunks.extents.segments_max > 0


def test_a_capacity_that_cannot_be_settled_leaves_what_is_there_readable(
    together: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*args: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(reclaim, "sharing_lock", fails)
    ours = together()
    extents = ours.side.tiers.chunks.extents
    assert extents is not None and extents.segments_max == 0
    look(ours)
    monkeypatch.undo()
    look(ours)
    assert extents.segments_max > 0


def test_engines_of_unlike_configurations_share_one_write_budget(together: Make, known: Path, tmp_path: Path) -> None:
    budget = {"endurance": {"rated_capacity": f"{RATED_BYTES}B"}}
    engines = [together(**budget), together(**budget, namespace="another")]
    assert [engine.side.ssd.directory.index for engine in engines if engine.side.ssd.directory] == [0, 0]
    states = sorted(path.name for path in tmp_path.glob("ssd/saria/endurance-*"))
    assert states == ["endurance-e0.lease", "endurance-e1.lease"]
    written = 0
    for hour in range(30):
        for number, engine in enumerate(engines):
            look(engine)
            engine.serve(f"{hour}.{number}", prompt(100, seed=hour * 2 + number))
            wear = engine.side.ssd.wear
            assert wear is not None
            for drive in wear.drives:
                drive.save(engine.now)
                assert drive._writer is not None
                drive._writer.join()
            engine.now += 600
        written = sum(engine.side.ssd.wear.written_bytes for engine in engines if engine.side.ssd.wear)
        assert written <= RATED_BYTES
    assert written > 0 and all(engine.side.ssd.wear.written_bytes for engine in engines if engine.side.ssd.wear)
    assert all(governor.budget_bytes_day == pytest.approx(0.375 * RATED_BYTES) for governor in governors(engines))
    engines[1].close()
    look(engines[0])
    (governor,) = governors(engines[:1])
    assert governor.budget_bytes_day == pytest.approx(0.75 * RATED_BYTES)
    assert governor.room(engines[0].now + DAY_S / 2) <= RATED_BYTES - written


def test_a_drive_that_went_does_not_hide_who_shares_the_others(together: Make, tmp_path: Path) -> None:
    budget = {"endurance": {"rated_capacity": f"{2 * RATED_BYTES}B"}}
    ours = together(**budget, ssd_paths=[f"{tmp_path}/gone", f"{tmp_path}/ssd"])
    whole = [governor.budget_bytes_day for governor in governors([ours])]
    shutil.rmtree(tmp_path / "gone" / "saria")
    together(**budget, namespace="another")
    look(ours)
    budgets = [governor.budget_bytes_day for governor in governors([ours])]
    assert budgets == [whole[0], whole[1] / 2]
    assert list((tmp_path / "gone").iterdir()) == []


def governors(engines: list[Engine]) -> list[Any]:
    return [governor for engine in engines if engine.side.ssd.wear for governor in engine.side.ssd.wear.governors]


def test_a_fault_of_a_look_is_said_and_the_engine_goes_on(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(opening.Sharing, "look", lambda self: 1 / 0)
    monkeypatch.setattr("saria_connector.sharing.LOOK_S", 0.01)
    engine = Engine(known, asynchronous=False, ssd_paths=[f"{tmp_path}/ssd"], ssd_capacity="64MiB")
    engine.serve("cold", prompt(100))
    assert engine.side.ssd.sharing is not None and engine.side.ssd.sharing._thread is not None
    engine.side.ssd.sharing._thread.join(10)
    assert any("a fault of ours" in record.getMessage() for record in caplog.records)
    engine.flush_hbm()
    engine.serve("warm", prompt(100))
    assert engine.offered("warm")[-1] == 96
    engine.close()
