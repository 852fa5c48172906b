"""The executor with its pacer, over drives and an ingress of given rates: bytes, turns, ends. In wall time, so that
only coarse things can be said of times; the pacer's own tests say the rest."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from doubles import SHAPES, Fault, MakeRig, Rig, from_dram, from_ssd, wait_for
from saria_vllm.config import PacingConfig
from saria_vllm.engine import link_rate
from saria_vllm.engine import pacer as pacer_module
from saria_vllm.engine.emulated import Contention, Emulation
from saria_vllm.engine.jobs import LoadState
from saria_vllm.engine.link_rate import measure_link
from saria_vllm.engine.pieces import Pieces
from saria_vllm.types import Extent, StoreItem, StorePart

RECORD = SHAPES[0].record_bytes
SLOW = PacingConfig(ingress=1e6)
"""A record takes 12 ms."""


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the loads after every record."""
    monkeypatch.setattr(pacer_module, "PIECE_BYTES_MIN", RECORD)
    monkeypatch.setattr(pacer_module, "PIECE_BYTES_MAX", RECORD)
    monkeypatch.setattr(pacer_module, "SAMPLE_BYTES_MIN", RECORD)


@pytest.fixture
def slow(make_rig: MakeRig, small_pieces: None) -> Rig:
    rig = make_rig(pacing=SLOW)
    rig.open()
    for number in range(40):
        rig.write_slot(0, b"d%d" % number, rig.slot(0, number))
    return rig


def blocks(number: int) -> tuple[int, ...]:
    return tuple(range(1 + 4 * number, 5 + 4 * number))


def dram(rig: Rig, numbers: range, at: int = 0) -> list[Any]:
    return [from_dram(0, blocks(at + number), rig.slot(0, number)) for number in numbers]


def test_pieces_are_cut_by_bytes_and_keep_their_positions() -> None:
    rng = np.random.default_rng(1)
    slots = np.stack([rng.integers(-1, 3, 50), rng.integers(0, 9, 50)], 1).astype(np.int32)
    tables = rng.integers(0, 99, (50, 4)).astype(np.int32)
    parts = [
        StorePart(0, slots[:20], tables[:20]), StorePart(1, slots[20:30], tables[20:30, :2]),
        StorePart(0, slots[30:], tables[30:]),
    ]  # fmt: skip
    pieces, shapes = Pieces(parts, dict(enumerate(SHAPES))), dict(enumerate(SHAPES))
    wanted = [position for position in range(50) if slots[position, 0] >= 0]
    assert pieces.nbytes == sum(shapes[1 if 20 <= position < 30 else 0].record_bytes for position in wanted)
    found: list[int] = []
    for nbytes in (1, 3 * RECORD, 0, 2 * RECORD + 1, 1 << 40, 1):
        piece = pieces.next(nbytes)
        assert piece is not None
        most = max(1, nbytes // shapes[piece.group].record_bytes)
        assert 1 <= len(piece.positions) <= most
        assert piece.nbytes == len(piece.positions) * shapes[piece.group].record_bytes
        assert piece.slots.tolist() == slots[piece.positions].tolist()
        width = shapes[piece.group].blocks_per_chunk
        assert piece.blocks.tolist() == tables[piece.positions, :width].tolist()
        found += piece.positions
    assert found + pieces.rest() == wanted
    assert pieces.rest() == []
    assert pieces.next(1 << 40) is None


def test_what_drives_are_known_to_read_is_told_and_believed(make_rig: MakeRig) -> None:
    asked: list[Any] = []

    def first_rates(*question: Any) -> tuple[float, ...]:
        asked.append(question)
        return 5e8, 0.0

    rig = make_rig(drives=2, first_rates=first_rates)
    opened = rig.open()
    assert opened.read_bytes_s == (5e8, 0.0)
    assert rig.executor._ends._pacer.drive_rates() == {0: 5e8}
    ((_, paths, record_bytes),) = asked
    assert len(paths) == 2 and record_bytes == max(shape.record_bytes for shape in SHAPES)


def test_the_link_is_measured_between_the_pool_and_the_blocks(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.write_slot(0, b"x", rig.slot(0, 0))
    calls: list[int] = []

    class Slow:
        def scatter_many(self, sources: list[int], tables: list[list[int]]) -> None:
            calls.append(len(sources))
            assert len({len(table) for table in tables}) == 1
            rig.hbm[0].map.scatter_many(sources, tables)
            time.sleep(0.2 if len(calls) < 3 else 0.01)  # The first touch takes longer.

    rate = measure_link(rig.pool, Slow(), SHAPES[0], rig.blocks, 0.0)  # type: ignore[arg-type]
    assert len(calls) == 4
    assert 0.3 * calls[0] * RECORD / 0.01 < rate < calls[0] * RECORD / 0.01
    measured = measure_link(rig.pool, rig.hbm[0].map, SHAPES[0], rig.blocks, 0.02)
    assert measured > 1e7


def test_loads_stay_under_the_limit_and_take_turns_by_piece(slow: Rig) -> None:
    began = time.monotonic()
    first, second = slow.load(*dram(slow, range(20))), slow.load(*dram(slow, range(20, 24)))
    assert slow.loaded(second).failed == []
    assert slow.loaded(first).failed == []
    assert time.monotonic() - began > 0.8 * 24 * RECORD / 1e6
    assert slow.counts["paced_ms"] > 50
    for number in range(24):
        assert slow.is_at(0, b"d%d" % number, blocks(number))


def test_stores_go_on_while_loads_must_wait(make_rig: MakeRig, small_pieces: None) -> None:
    rig = make_rig(pacing=PacingConfig(ingress=2e4))  # A record takes 0.6 s.
    rig.write_slot(0, b"d", rig.slot(0, 0))
    load = rig.load(*dram(rig, range(3)))
    wait_for(lambda: rig.poll() or rig.counts.get("load_bytes:dram"))
    rig.fill(0, b"new", blocks(50))
    began = time.monotonic()
    assert rig.result(rig.store(StoreItem(0, rig.slot(0, 39), blocks(50)))).failed == ()
    assert time.monotonic() - began < 0.2
    rig.poll()
    assert load not in rig.loads
    assert rig.loaded(load).failed == []


def test_a_load_that_ends_at_the_last_moment_is_not_written(slow: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it was chosen: its blocks may belong to another request by then."""
    ends = slow.executor._ends
    may_write = ends.may_write

    def late(state: LoadState) -> bool:
        ends.expire(time.monotonic() + 1000)
        return may_write(state)

    monkeypatch.setattr(ends, "may_write", late)
    state = slow.ended(slow.load(*dram(slow, range(3))))
    assert (state.failed, state.reason) == ([0, 1, 2], "deadline")
    time.sleep(0.05)
    assert not slow.hbm[0].layers[0].any()


def test_a_reset_while_a_load_waits_for_credit(slow: Rig) -> None:
    load = slow.load(*dram(slow, range(10)))
    slow.executor.set_generation(2)
    state = slow.loaded(load)
    assert (sorted(state.failed), state.reason) == (list(range(10)), "stale")


def test_the_deadline_of_a_load_that_waits_for_credit(slow: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow.executor._ends, "load_deadline_s", 0.1)
    load = slow.load(*dram(slow, range(40)))
    monkeypatch.setattr(slow.executor._ends, "load_deadline_s", 30.0)
    state = slow.ended(load)
    assert state.reason == "deadline"
    copied = 40 - len(state.failed)
    assert 0 < copied < 30
    time.sleep(0.05)
    assert not slow.is_at(0, b"d39", blocks(39))
    after = slow.load(*dram(slow, range(1), at=45))
    assert slow.loaded(after).failed == []
    assert slow.is_at(0, b"d0", blocks(45))


def test_close_waits_for_no_credit(slow: Rig) -> None:
    loads = [slow.load(*dram(slow, range(40))) for _ in range(3)]
    wait_for(lambda: slow.poll() or slow.counts.get("load_bytes:dram"))
    began = time.monotonic()
    slow.executor.close()
    assert time.monotonic() - began < 0.5
    late = slow.load(*dram(slow, range(1)))
    assert [slow.loaded(load).reason for load in (*loads, late)] == ["other"] * 4


def test_a_piece_that_fails_ends_its_load_and_no_other(slow: Rig) -> None:
    def fails(_call: str, tables: Any) -> Exception | None:
        return OSError("no") if tables[0][0] == blocks(2)[0] else None

    slow.maps[0].fault = fails
    bad, good = slow.load(*dram(slow, range(5))), slow.load(*dram(slow, range(5, 10)))
    assert slow.loaded(bad).failed == [2, 3, 4]
    assert slow.loaded(good).failed == []
    assert slow.counts["internal_errors"] == 1


def test_a_failed_piece_of_a_load_that_waits_for_a_drive_holds_nobody_up(make_rig: MakeRig, small_pieces: None) -> None:
    rig = make_rig()
    rig.open()
    rig.put_on_ssd(0, b"s", Extent(0, 0, 0))
    rig.write_slot(0, b"d0", rig.slot(0, 0))
    told = threading.Event()
    rig.faults = lambda transfer: Fault(hold=told) if transfer.kind == "read" else None
    first = [list(blocks(0))]
    rig.maps[0].fault = lambda _call, tables: OSError("no") if tables == first else None
    mixed = rig.load(from_ssd(0, blocks(60), Extent(0, 0, 0), b"s"), *dram(rig, range(10)))
    assert rig.loaded(rig.load(*dram(rig, range(1), at=20))).failed == []
    told.set()
    assert sorted(rig.loaded(mixed).failed) == list(range(1, 11))


def test_a_load_that_ends_before_anything_moves_is_forgotten(make_rig: MakeRig) -> None:
    rig = make_rig()  # Without an SSD tier.
    state = rig.loaded(rig.load(from_ssd(0, blocks(0), Extent(0, 0, 0), b"s")))
    assert (state.failed, state.reason) == ([0], "not_found")
    rig.check_quiet()


def test_a_load_that_waits_for_a_drive_gives_way_to_others_and_they_to_it(
    make_rig: MakeRig, small_pieces: None
) -> None:
    """A drive that hangs: what its request has in DRAM is copied, and requests without SSD are served."""
    rig = make_rig(pacing=PacingConfig(ingress=1e7))
    rig.open()
    rig.put_on_ssd(0, b"s", Extent(0, 0, 0))
    for number in range(30):
        rig.write_slot(0, b"d%d" % number, rig.slot(0, number))
    told = threading.Event()
    rig.faults = lambda transfer: Fault(hold=told) if transfer.kind == "read" else None
    mixed = rig.load(from_ssd(0, blocks(60), Extent(0, 0, 0), b"s"), *dram(rig, range(10)))
    others = [rig.load(*dram(rig, range(10, 20), at=10)), rig.load(*dram(rig, range(20, 30), at=10))]
    for load in others:
        assert rig.loaded(load).failed == []
    wait_for(lambda: rig.is_at(0, b"d9", blocks(9)))
    rig.poll()
    assert mixed not in rig.loads
    told.set()
    assert rig.loaded(mixed).failed == []
    assert rig.is_at(0, b"s", blocks(60))


@pytest.mark.parametrize("mode", ["priority", "matched", "off"])
def test_mixed_and_other_loads_over_emulated_rates(make_rig: MakeRig, mode: Any, small_pieces: None) -> None:
    """Never a wrong byte, and everything ends, whoever is first."""
    emulation = Emulation(Contention(40e6, [10e6, 10e6]))
    rig = make_rig(drives=2, pacing=PacingConfig(mode, 40e6), emulation=emulation)
    rig.open()
    for number in range(16):
        assert rig.put_on_ssd(0, b"s%d" % number, Extent(number % 2, number // 8, number // 2 % 4)).failed == ()
    for number in range(40):
        rig.write_slot(0, b"d%d" % number, rig.slot(0, number))
    jobs = []
    for turn in range(4):
        ssd = [from_ssd(0, blocks(40 + n), Extent(n % 2, n // 8, n // 2 % 4), b"s%d" % n) for n in range(turn, 16, 4)]
        jobs.append(rig.load(*ssd, *dram(rig, range(turn, 20, 4))))
        jobs.append(rig.load(*dram(rig, range(20 + turn, 40, 4))))
    assert all(rig.loaded(job).failed == [] for job in jobs)
    for number in range(16):
        assert rig.is_at(0, b"s%d" % number, blocks(40 + number))
    for number in range(40):
        assert rig.is_at(0, b"d%d" % number, blocks(number))
    pacer = rig.executor._ends._pacer
    assert [rate > 0 for rate in pacer.drive_rates().values()] == [True] * 2
    rig.check_quiet()


@pytest.mark.parametrize("call", ["begin", "choose", "take", "copied", "ssd_moved", "end"])
def test_after_a_fault_of_the_pacer_nothing_is_paced_and_nothing_is_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    rig.put_on_ssd(0, b"s", Extent(0, 0, 0))
    rig.write_slot(0, b"d0", rig.slot(0, 0))
    monkeypatch.setattr(rig.executor._ends._pacer, call, lambda *_args: 1 // 0)
    for turn in range(2):
        at = 12 * turn
        items = from_dram(0, blocks(at), rig.slot(0, 0), b"d0"), from_ssd(0, blocks(at + 1), Extent(0, 0, 0), b"s")
        assert rig.loaded(rig.load(*items, from_dram(0, blocks(at + 2), rig.slot(0, 0), b"d0"))).failed == []
        assert rig.is_at(0, b"d0", blocks(at)) and rig.is_at(0, b"s", blocks(at + 1))
    assert rig.counts["internal_errors"] == 1 and rig.executor._ends._pacer.mode == "off"
    (said,) = rig.messages
    assert "pacing is off" in said
    rig.messages.clear()


def test_memory_is_measured_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rate, "MEMORY_BYTES", 64 << 20)
    assert 1e8 < link_rate.measure_memory() < 1e12
