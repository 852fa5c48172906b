"""Promotions in the executor: they give way to loads and stores, and every one ends."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from doubles import SHAPES, MakeRig, Rig, from_dram
from saria_vllm.engine import executor as executor_module
from saria_vllm.types import StoreItem


def items(rig: Rig, first: int, end: int) -> list[StoreItem]:
    """Chunks of group 0 in blocks of their number."""
    return [StoreItem(0, rig.slot(0, n), (n, n, n, n)) for n in range(first, end)]


class Gate:
    """Copies are noted, and each waits at a gate."""

    def __init__(self, rig: Rig) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.order: list[tuple[str, int]] = []
        rig.maps[0].fault = self._copy

    def _copy(self, call: str, blocks: Any) -> None:
        self.order.append((call, blocks[0][0]))
        self.entered.set()
        assert self.open.wait(10)


def test_a_promotion_is_copied_like_a_store(rig: Rig) -> None:
    blocks = (9, 8, 7, 6)
    rig.fill(0, b"a", blocks)
    job = rig.promote(StoreItem(0, rig.slot(0, 3), blocks))
    assert rig.result(job).failed == ()
    assert rig.counts["store_bytes"] == SHAPES[0].record_bytes
    assert rig.loaded(rig.load(from_dram(0, (20, 21, 22, 23), rig.slot(0, 3)))).failed == []
    assert rig.is_at(0, b"a", (20, 21, 22, 23))


def test_loads_and_stores_overtake_promotions_also_in_the_middle_of_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "PIECE_BYTES", 1)  # A look at the queues after every chunk.
    gate = Gate(rig)
    first = rig.promote(*items(rig, 0, 2))
    assert gate.entered.wait(10)
    second = rig.promote(*items(rig, 2, 3))
    store = rig.store(*items(rig, 8, 10))
    load = rig.load(from_dram(0, (100, 101, 102, 103), rig.slot(0, 20)))
    gate.open.set()
    assert [rig.result(job).failed for job in (first, second, store)] == [()] * 3
    assert rig.loaded(load).failed == []
    assert gate.order == [("gather_many", 0), ("scatter_many", 100), *(("gather_many", n) for n in (8, 9, 1, 2))]


def test_a_promotion_that_is_held_up_for_long_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "PIECE_BYTES", 1)
    monkeypatch.setattr(executor_module, "PROMOTE_S", 0.05)
    gate = Gate(rig)
    begun = rig.promote(*items(rig, 0, 3))
    assert gate.entered.wait(10)
    waits = rig.promote(*items(rig, 3, 4))
    store = rig.store(*items(rig, 8, 9))
    time.sleep(0.06)
    gate.open.set()
    assert rig.result(store).failed == ()
    for job, chunks in ((begun, 3), (waits, 1)):
        assert rig.result(job).failed == tuple(range(chunks)) and rig.result(job).reason == "too_late"
    assert gate.order == [("gather_many", 0), ("gather_many", 8)], "nothing is copied for one that has failed"


def test_a_promotion_whose_copy_fails_ends_and_is_said(rig: Rig) -> None:
    def fail(_call: str, _blocks: object) -> None:
        raise RuntimeError("a fault of ours")

    rig.maps[0].fault = fail
    result = rig.result(rig.promote(*items(rig, 0, 2)))
    assert (result.failed, result.reason) == ((0, 1), "other")
    assert rig.counts["internal_errors"] == 1
    assert any("promotion" in message for message in rig.messages)
    rig.maps[0].fault = lambda _call, _blocks: None
    assert rig.result(rig.promote(*items(rig, 0, 2))).failed == (), "the thread lives"


def test_close_ends_promotions_that_wait_or_run_or_come_too_late(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "PIECE_BYTES", 1)
    rig = make_rig()
    rig.maps[0].fault = lambda _call, _blocks: time.sleep(0.02)
    jobs = [rig.promote(*items(rig, 0, 50)) for _ in range(3)]
    time.sleep(0.05)
    rig.executor.close()
    jobs.append(rig.promote(*items(rig, 0, 1)))
    assert [len(rig.result(job).failed) for job in jobs] == [50, 50, 50, 1]


def test_a_reset_ends_no_promotion_early(rig: Rig) -> None:
    """Its blocks are held and its slots are its own until it ends, whatever the generation."""
    gate = Gate(rig)
    job = rig.promote(*items(rig, 0, 1))
    assert gate.entered.wait(10)
    rig.executor.set_generation(2)
    rig.poll()
    assert job not in rig.results
    gate.open.set()
    assert rig.result(job).failed == ()
