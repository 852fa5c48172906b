"""Ends that are forced, by closing or a deadline: every job ends once, nothing in use is freed, nothing is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doubles import (
    Fault,
    MakeRig,
    Rig,
    from_dram,
    from_ssd,
    holdings,
    wait_for,
)
from saria_vllm.engine import executor as executor_module
from saria_vllm.engine import pacer
from saria_vllm.errors import ConfigError
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import Extent, StoreItem


def test_close_with_queued_work_is_quick_and_ends_every_job_once(rig: Rig, make_rig: MakeRig) -> None:
    for record in range(4):
        rig.put_on_ssd(0, b"s%d" % record, Extent(0, 0, record))
    rig.faults = lambda _transfer: Fault(delay_s=0.05)
    rig.maps[0].fault = lambda _call, _blocks: time.sleep(0.01)
    persists = [rig.persist(0, rig.slot(0, 0), Extent(0, 1 + n // 4, n % 4), b"w%d" % n) for n in range(300)]
    stores = [rig.store(StoreItem(0, rig.slot(0, n), (0, 1, 2, 3))) for n in range(200)]
    read = from_ssd(0, (4, 5, 6, 7), Extent(0, 0, 1), b"s1")
    loads = [rig.load(read, from_dram(0, (8, 9, 10, 11), rig.slot(0, 0))) for _ in range(300)]
    threads = [thread._thread for thread in rig.executor._ssd]
    start = time.monotonic()
    rig.executor.close()
    assert time.monotonic() - start < 3
    assert not any(thread.is_alive() for thread in [*threads, rig.executor._copier])
    late = [
        rig.store(StoreItem(0, rig.slot(0, 0), (0, 1, 2, 3))),
        rig.persist(0, rig.slot(0, 0), Extent(0, 90, 0), b"l"),
    ]
    loads.append(rig.load(read, from_dram(0, (8, 9, 10, 11), rig.slot(0, 0))))
    rig.executor.retire(0, 0)
    rig.poll()
    for job in (*persists, *stores, *late):
        assert len(rig.results[job]) == 1
    assert sorted(rig.loads) == loads
    assert all(len(states) == 1 and not states[0].items_left for states in rig.loads.values())
    assert all(rig.results[job][0].failed for job in late)
    assert rig.loads[loads[-1]][0].failed
    rig.executor.close()
    # What was reported as persisted is there, nothing else is.
    kept = {b"w%d" % n for n, job in enumerate(persists) if not rig.results[job][0].failed}
    again = make_rig()
    found = again.open().found.items
    assert {chunk.key for chunk in found} == kept | {b"s%d" % n for n in range(4)}
    assert len(kept) < 300
    rig.executor = again.executor  # for the fixture's last look


def test_close_waits_for_no_long_store(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of many pieces stops between two of them: the pool is unmapped next."""
    monkeypatch.setattr(executor_module, "PIECE_BYTES", 1)
    monkeypatch.setattr(pacer, "PIECE_BYTES_MAX", 1)
    rig = make_rig()
    rig.maps[0].fault = lambda _call, _blocks: time.sleep(0.05)
    store = rig.store(*(StoreItem(0, rig.slot(0, n), (0, 1, 2, 3)) for n in range(100)))
    load = rig.load(*(from_dram(0, (4, 5, 6, 7), rig.slot(0, n)) for n in range(100)))
    time.sleep(0.1)
    start = time.monotonic()
    rig.executor.close()
    assert time.monotonic() - start < 1
    assert len(rig.result(store).failed) == 100
    assert rig.loaded(load).failed


def test_close_waits_for_no_long_queue(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of work that is done at once, such as unlinking."""
    rig = make_rig()
    rig.open()
    entered = threading.Event()
    monkeypatch.setattr(SegmentStore, "retire", lambda *_args: entered.set() or time.sleep(0.05))
    for segment in range(100):
        rig.executor.retire(0, segment)
    assert entered.wait(10)
    (thread,) = rig.executor._ssd
    rig.executor.close()
    assert not thread._thread.is_alive()


def test_close_while_a_drive_hangs_is_bounded_and_frees_nothing_that_is_in_use(make_rig: MakeRig) -> None:
    rig = make_rig(drives=2, io_threads=2)
    rig.open()
    rig.put_on_ssd(0, b"a", Extent(0, 0, 0))
    told = threading.Event()
    rig.faults = lambda _transfer: Fault(hold=told)
    rig.fill(0, b"foreign", (0, 1, 2, 3))
    persists = [rig.persist(0, rig.slot(0, 0), Extent(drive, 1, 0), b"h") for drive in (0, 1)]
    loads = [rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"a")) for _ in range(2)]
    wait_for(lambda: sum(len(thread._in_flight) for thread in rig.executor._ssd) == 4)
    start = time.monotonic()
    rig.executor.close()
    assert time.monotonic() - start < 3
    assert rig.executor._store is not None and not rig.executor._store._closed
    rig.pool.address(rig.slot(0, 0), 4096)
    told.set()  # the drive comes back
    for thread in rig.executor._ssd:
        thread._thread.join(10)
    assert rig.is_at(0, b"foreign", (0, 1, 2, 3)), "HBM was written after close"
    assert all(rig.loaded(job).failed == [0] for job in loads)
    assert all(rig.result(job).failed == () for job in persists)
    rig.executor.close()
    assert rig.executor._store._closed


def test_close_while_the_ssd_tier_opens(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    recover, entered, go_on = SegmentStore.recover, threading.Event(), threading.Event()

    def slow(store: SegmentStore) -> Any:
        entered.set()
        assert go_on.wait(10)
        return recover(store)

    monkeypatch.setattr(SegmentStore, "recover", slow)
    opener = threading.Thread(target=rig.open)
    opener.start()
    assert entered.wait(10)
    monkeypatch.setattr(executor_module, "CLOSE_S", 0.1)
    rig.executor.close()
    go_on.set()
    opener.join()
    assert rig.executor._ssd == []


@pytest.mark.parametrize("fails", ["store", "recover", "second engine", "second thread"])
def test_an_ssd_tier_that_cannot_open_is_off_and_leaves_nothing(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: str
) -> None:
    rig = make_rig(io_threads=3)
    opens = [0]
    open_engine, thread = Rig._open_engine, executor_module.SsdThread

    def second_fails(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def opens_once(*args: Any) -> Any:
            opens[0] += 1
            if opens[0] == 2 and fails == kind:
                raise ConfigError("no second one") if kind == "second engine" else MemoryError("no second one")
            return call(*args)

        return opens_once

    if fails == "store":
        (tmp_path / "drive0").mkdir()
        (tmp_path / "drive0" / "r0").write_text("in the way")
    elif fails == "recover":
        monkeypatch.setattr(SegmentStore, "recover", lambda _store: 1 // 0)
    elif fails == "second engine":
        monkeypatch.setattr(Rig, "_open_engine", second_fails(fails, open_engine))
    else:
        monkeypatch.setattr(executor_module, "SsdThread", second_fails(fails, thread))
    opened = rig.open()
    assert len(opened.found) == 0
    assert opened.problem
    assert rig.loaded(rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"s"))).reason == "not_found"
    assert all(engine.closed for engine in rig.engines)
    assert not [name for name in holdings()[1] if "ssd" in name or "posix" in name]


def test_opening_and_closing_leaves_descriptors_and_threads_flat(make_rig: MakeRig) -> None:
    """The fixture compares; here it is many times."""
    before = holdings()
    for _ in range(5):
        rig = make_rig(engine="io_uring", io_threads=2)
        rig.open()
        rig.put_on_ssd(0, b"s", Extent(0, 0, 0))
        rig.executor.retire(0, 0)
        rig.executor.close()
    wait_for(lambda: holdings() == before, 10)


# Deadlines.


def test_b24_a_drive_that_hangs_ends_the_load_at_its_deadline_and_never_writes_late(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.put_on_ssd(0, b"s", Extent(0, 0, 0))
    rig.write_slot(0, b"d", rig.slot(0, 1))
    back = threading.Event()
    rig.faults = lambda transfer: Fault(hold=back) if transfer.kind == "read" else None
    monkeypatch.setattr(rig.executor._ends, "load_deadline_s", 0.3)
    rig.fill(0, b"foreign", (0, 1, 2, 3))
    job = rig.load(from_dram(0, (4, 5, 6, 7), rig.slot(0, 1)), from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"s"))
    state = rig.ended(job)
    assert (state.failed, state.reason) == ([1], "deadline"), "what had come from DRAM is not doubted"
    back.set()  # By now the blocks belong to somebody else.
    rig.check_quiet()
    assert rig.is_at(0, b"foreign", (0, 1, 2, 3))
    rig.faults = lambda transfer: None
    assert rig.loaded(rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"s"))).failed == []


def test_a_load_does_not_end_while_its_blocks_are_being_written(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.write_slot(0, b"d", rig.slot(0, 1))
    copying, go_on = threading.Event(), threading.Event()

    def stall(call: str, _blocks: object) -> None:
        copying.set()
        assert go_on.wait(10)

    rig.maps[0].fault = stall
    monkeypatch.setattr(rig.executor._ends, "load_deadline_s", 0.0)
    job = rig.load(from_dram(0, (4, 5, 6, 7), rig.slot(0, 1)))
    assert copying.wait(10)
    time.sleep(0.05)
    rig.poll()
    assert job not in rig.loads
    go_on.set()
    wait_for(lambda: rig.poll() or job in rig.loads)
    assert rig.is_at(0, b"d", (4, 5, 6, 7))
