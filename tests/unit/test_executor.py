"""Executor over a real DRAM pool, real pages, real segment files and both engines: bytes, order, ends, closing."""

from __future__ import annotations

import ctypes
import errno
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from doubles import (
    SHAPES,
    SLAB_BYTES,
    Fault,
    MakeRig,
    Rig,
    Transfer,
    from_dram,
    from_ssd,
    load_job,
    payload,
    wait_for,
    whose,
)
from saria_vllm.engine import executor as executor_module
from saria_vllm.engine import ssd_thread as ssd_thread_module
from saria_vllm.engine.executor import PIECE_BYTES
from saria_vllm.engine.ssd_thread import STAGING_BYTES, depth_for
from saria_vllm.errors import StorageError
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import NULL_BLOCK, Extent, GroupShape, JobResult, LoadItem, LoadJob, Slot, StoreItem


def test_store_and_load_from_dram_into_other_blocks(rig: Rig) -> None:
    items = []
    for group, keys in ((0, b"ab"), (1, b"cd")):
        for number, key in enumerate(keys):
            per_chunk = SHAPES[group].blocks_per_chunk
            blocks = range(number * per_chunk, (number + 1) * per_chunk)
            rig.fill(group, bytes([key]), blocks)
            items.append(StoreItem(group, rig.slot(group, number), tuple(blocks)))
    assert rig.result(rig.store(*items)).failed == ()
    for hbm in rig.hbm.values():
        for layer in hbm.layers:
            layer[:] = 0
    loads = [
        from_dram(0, (201, 7, 33, 200), rig.slot(0, 1)),
        from_dram(1, (90, 9), rig.slot(1, 0)),
        from_dram(0, (1, 2, 3, 4), rig.slot(0, 0)),
        from_dram(1, (100, 0), rig.slot(1, 1)),
    ]
    assert rig.loaded(rig.load(*loads)).failed == []
    assert rig.is_at(0, b"b", (201, 7, 33, 200))
    assert rig.is_at(1, b"c", (90, 9))
    assert rig.is_at(0, b"a", (1, 2, 3, 4))
    assert rig.is_at(1, b"d", (100, 0))
    nbytes = 2 * sum(shape.record_bytes for shape in SHAPES)
    assert rig.counts == {"store_bytes": nbytes, "load_bytes:dram": nbytes}
    untouched = set(range(256)) - {201, 7, 33, 200, 1, 2, 3, 4}
    assert not rig.hbm[0].layers[0][sorted(untouched)].any()


def test_persist_and_load_from_ssd(rig: Rig) -> None:
    chunks = [(0, Extent(0, 0, 0), b"a"), (1, Extent(0, 1, 0), b"c"), (0, Extent(0, 0, 1), b"b")]
    for group, extent, key in chunks:
        assert rig.put_on_ssd(group, key, extent).failed == ()
    loads = [from_ssd(group, range(20, 20 + SHAPES[group].blocks_per_chunk), e, key) for group, e, key in chunks[1:]]
    assert rig.loaded(rig.load(*loads)).failed == []
    assert rig.is_at(1, b"c", (20, 21))
    assert rig.is_at(0, b"b", (20, 21, 22, 23))
    written = sum(SHAPES[group].record_bytes for group, _, _ in chunks)
    assert rig.counts["ssd_written_bytes"] == written
    assert rig.counts["load_bytes:ssd"] == written - SHAPES[0].record_bytes
    assert "load_bytes:dram" not in rig.counts


def test_what_one_process_persisted_the_next_one_finds(make_rig: MakeRig) -> None:
    first = make_rig()
    first.open()
    assert first.put_on_ssd(0, b"a", Extent(0, 3, 0)).failed == ()
    first.executor.close()
    second = make_rig(engine="io_uring")
    opened = second.open()
    assert [(chunk.group, chunk.key, chunk.extent) for chunk in opened.found.items] == [(0, b"a", Extent(0, 3, 0))]
    assert opened.next_segment == 4
    assert second.loaded(second.load(from_ssd(0, (5, 6, 7, 8), Extent(0, 3, 0), b"a"))).failed == []
    assert second.is_at(0, b"a", (5, 6, 7, 8))


def test_dram_is_copied_while_ssd_is_read(rig: Rig) -> None:
    rig.put_on_ssd(0, b"s", Extent(0, 0, 0))
    rig.write_slot(0, b"d", rig.slot(0, 1))
    told = threading.Event()
    rig.faults = lambda transfer: Fault(hold=told) if transfer.kind == "read" else None
    job = rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"s"), from_dram(0, (4, 5, 6, 7), rig.slot(0, 1)))
    wait_for(lambda: rig.poll() or "load_bytes:dram" in rig.counts)
    assert rig.is_at(0, b"d", (4, 5, 6, 7))
    assert job not in rig.loads  # half of it is there, and it has not ended
    assert rig.counts["load_bytes:dram"] == SHAPES[0].record_bytes
    told.set()
    assert rig.loaded(job).failed == []
    assert rig.is_at(0, b"s", (0, 1, 2, 3))


def test_ssd_is_read_while_dram_is_copied(rig: Rig) -> None:
    rig.put_on_ssd(0, b"s", Extent(0, 0, 0))
    copying, go_on = threading.Event(), threading.Event()

    def stall(call: str, _blocks: object) -> None:
        if call == "scatter_many":
            copying.set()
            assert go_on.wait(10)

    rig.maps[0].fault = stall
    job = rig.load(from_dram(0, (4, 5, 6, 7), rig.slot(0, 0)), from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"s"))
    assert copying.wait(10)
    wait_for(lambda: rig.is_at(0, b"s", (0, 1, 2, 3)))
    rig.poll()
    assert job not in rig.loads
    go_on.set()
    assert rig.loaded(job).failed == []


def test_null_blocks_are_left_alone(rig: Rig) -> None:
    keys = [b"first", b"middle", b"last"]
    for number, key in enumerate(keys):
        rig.put_on_ssd(0, key, Extent(0, 0, number))
    for number, key in enumerate(keys):
        rig.write_slot(0, key, rig.slot(0, number))
    tables = [(NULL_BLOCK, NULL_BLOCK, 12, 13), (14, 15, 16, 17), (18, NULL_BLOCK, NULL_BLOCK, NULL_BLOCK)]
    for from_where in ("dram", "ssd"):
        rig.fill(0, b"foreign", (8, 9, 10, 11))
        rig.fill(0, b"foreign", (19, 20, 21, 255))
        items = [
            from_dram(0, table, rig.slot(0, number), key)
            if from_where == "dram"
            else from_ssd(0, table, Extent(0, 0, number), key)
            for number, (table, key) in enumerate(zip(tables, keys, strict=True))
        ]
        assert rig.loaded(rig.load(*items)).failed == []
        per_block = SHAPES[0].block_bytes
        assert rig.hbm[0].read((12, 13)) == rig.payload(0, b"first")[2 * per_block :]
        assert rig.is_at(0, b"middle", (14, 15, 16, 17))
        assert rig.hbm[0].read((18,)) == rig.payload(0, b"last")[:per_block]
        assert rig.is_at(0, b"foreign", (8, 9, 10, 11)), "a block before the hit was written"
        assert rig.is_at(0, b"foreign", (19, 20, 21, 255)), "a block behind the hit was written"
        for layer in rig.hbm[0].layers:
            layer[12:19] = 0


def test_records_larger_than_a_piece_or_than_the_staging_memory(make_rig: MakeRig) -> None:
    page = PIECE_BYTES // 2 + 4096
    shapes = (GroupShape(0, 16, 2, page),)
    rig = make_rig(shapes=shapes, pages={0: (page,)}, blocks=6, slabs=160, segment_records=1)
    assert depth_for(shapes[0].record_bytes) == 2
    assert depth_for(STAGING_BYTES * 4) == 2
    rig.slot = lambda _group, _number: Slot(0, 0)  # type: ignore[method-assign]
    rig.pool.address = lambda _slot, _nbytes: rig.pool.base  # type: ignore[method-assign]
    assert shapes[0].record_bytes > PIECE_BYTES
    assert shapes[0].record_bytes <= 160 * SLAB_BYTES
    rig.open()
    rig.fill(0, b"big", (0, 1))
    assert rig.result(rig.store(StoreItem(0, Slot(0, 0), (0, 1)))).failed == ()
    assert rig.result(rig.persist(0, Slot(0, 0), Extent(0, 0, 0), b"big")).failed == ()
    job = rig.load(from_dram(0, (2, 3), Slot(0, 0)), from_ssd(0, (5, 4), Extent(0, 0, 0), b"big"))
    assert rig.loaded(job).failed == []
    assert rig.is_at(0, b"big", (2, 3))
    assert rig.is_at(0, b"big", (5, 4))
    rig.check_quiet()


def test_loads_overtake_stores_also_in_the_middle_of_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "PIECE_BYTES", 1)  # a look at the queues after every chunk
    entered, go_on, order = threading.Event(), threading.Event(), []

    def record(call: str, blocks: Any) -> None:
        order.append((call, blocks[0][0]))
        entered.set()
        assert go_on.wait(10)

    rig.maps[0].fault = record
    first = rig.store(*(StoreItem(0, rig.slot(0, n), (n, n, n, n)) for n in range(3)))
    assert entered.wait(10)
    second = rig.store(StoreItem(0, rig.slot(0, 9), (9, 9, 9, 9)))
    load = rig.load(from_dram(0, (100, 101, 102, 103), rig.slot(0, 20)))
    go_on.set()
    for job in (first, second):
        assert rig.result(job).failed == ()
    assert rig.loaded(load).failed == []
    gathers = [("gather_many", n) for n in (1, 2, 9)]
    assert order == [("gather_many", 0), ("scatter_many", 100), *gathers]


def test_reads_overtake_writes(rig: Rig) -> None:
    rig.put_on_ssd(0, b"s", Extent(0, 0, 0))
    (thread,), go_on, order = rig.executor._ssd, threading.Event(), []

    def record(transfer: Transfer) -> Fault:
        order.append(transfer.kind)
        return Fault(hold=go_on)

    rig.faults = record
    jobs = [rig.persist(0, rig.slot(0, 0), Extent(0, 1 + n // 4, n % 4), b"w") for n in range(100)]
    wait_for(lambda: len(thread._in_flight) == thread._engine.depth)
    load = rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"s"))
    go_on.set()
    rig.loaded(load)
    assert order.index("read") <= 2 * thread._engine.depth
    for job in jobs:
        assert rig.result(job).failed == ()


def test_a_new_generation_fails_loads_in_flight(rig: Rig) -> None:
    rig.put_on_ssd(0, b"s", Extent(0, 0, 0))
    told = threading.Event()
    rig.faults = lambda _transfer: Fault(hold=told)
    both = rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"s"), from_dram(0, (4, 5, 6, 7), rig.slot(0, 0)))
    dram = rig.load(from_dram(0, (8, 9, 10, 11), rig.slot(0, 0)))  # ends before the reset, is polled after it
    wait_for(lambda: rig.is_at(0, b"s", (8, 9, 10, 11)))
    rig.executor.set_generation(2)
    told.set()
    for job, items in ((both, [0, 1]), (dram, [0])):
        state = rig.loaded(job)
        assert (sorted(state.failed), state.reason) == (items, "stale")
    state = rig.loaded(rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"s")))
    assert (state.failed, state.reason) == ([0], "not_found")
    rig.faults = lambda _transfer: None
    assert rig.put_on_ssd(0, b"n", Extent(0, 1, 0), generation=2).failed == ()
    assert rig.loaded(rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 1, 0), b"n"))).failed == []
    assert rig.is_at(0, b"n", (0, 1, 2, 3), generation=2)


def test_a_persist_from_before_a_reset_is_never_found_under_the_new_generation(make_rig: MakeRig) -> None:
    """Whether it was queued or being written: its bytes are of the old weights."""
    rig = make_rig()
    rig.open()
    (thread,), told = rig.executor._ssd, threading.Event()
    rig.faults = lambda _transfer: Fault(hold=told)
    rig.write_slot(0, b"old", rig.slot(0, 0))
    jobs = [rig.persist(0, rig.slot(0, 0), Extent(0, n // 4, n % 4), b"old%d" % n) for n in range(80)]
    wait_for(lambda: len(thread._in_flight) == thread._engine.depth)
    assert thread._writes  # some are queued
    rig.executor.set_generation(2)
    told.set()
    assert all(rig.result(job).failed == (0,) for job in jobs)
    assert {rig.results[job][0].reason for job in jobs[thread._engine.depth :]} == {"stale"}
    rig.check_quiet()
    rig.executor.close()
    assert len(make_rig().open(generation=2).found) == 0


def test_a_reset_while_the_ssd_tier_opens_reaches_the_store(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it comes at the last moment: after the opener has looked at the generation."""
    first = make_rig()
    first.open()
    assert first.put_on_ssd(0, b"old", Extent(0, 0, 0)).failed == ()
    first.executor.close()
    rig = make_rig()
    set_generation = SegmentStore.set_generation
    reset: list[threading.Thread] = []

    def late(store: SegmentStore, generation: int) -> None:
        set_generation(store, generation)
        if not reset:
            reset.append(threading.Thread(target=rig.executor.set_generation, args=(2,)))
            reset[0].start()
            reset[0].join(0.2)

    monkeypatch.setattr(SegmentStore, "set_generation", late)
    opened = rig.open()
    reset[0].join()
    assert [chunk.key for chunk in opened.found.items] == [b"old"]
    state = rig.loaded(rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"old")))
    assert (state.failed, state.reason) == ([0], "not_found")
    assert whose(rig.hbm[0].read((0, 1, 2, 3)), [b"old"]) == {(b"?", 0)}


def test_a_refused_load_ends_as_failed_and_touches_nothing(rig: Rig) -> None:
    rig.fill(0, b"foreign", (0, 1, 2, 3))
    items = tuple(from_dram(0, (0, 1, 2, 3), rig.slot(0, n)) for n in range(3))
    rig.executor.refuse_load(load_job(901, "r", items))
    rig.executor.refuse_load(LoadJob(902, "r", ()))
    for job, failed in ((901, [0, 1, 2]), (902, [0])):
        state = rig.loaded(job)
        assert (state.failed, state.reason) == (failed, "stale")
    rig.executor.refuse_load(LoadJob(903, "r", ()))
    rig.executor.set_generation(2)  # must not turn it into a load without failures
    assert rig.loaded(903).failed == [0]
    assert rig.is_at(0, b"foreign", (0, 1, 2, 3))


def test_a_load_of_nothing_ends(rig: Rig) -> None:
    assert rig.loaded(rig.load()).failed == []
    assert rig.result(rig.store()).failed == ()


def test_retired_segments_are_unlinked_in_order(rig: Rig) -> None:
    for record in range(4):
        rig.put_on_ssd(0, b"%d" % record, Extent(0, 0, record))
    assert len(rig.files()) == 1
    rig.executor.retire(0, 0)
    rig.executor.retire(0, 77)  # unknown
    assert rig.put_on_ssd(0, b"n", Extent(0, 1, 0)).failed == ()  # behind the retirement in the queue
    assert [file.name for file in rig.files()] == ["seg-0000000000000001.data"]
    state = rig.loaded(rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"0")))
    assert (state.failed, state.reason) == ([0], "not_found")


def test_a_segment_retired_while_it_is_read_or_written_yields_no_bytes(rig: Rig) -> None:
    """The scheduler does not do this. If it did: a miss, and the late write is lost."""
    rig.put_on_ssd(0, b"s", Extent(0, 0, 0))
    rig.fill(0, b"foreign", (0, 1, 2, 3))
    told = threading.Event()
    rig.faults = lambda _transfer: Fault(hold=told)
    load = rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"s"))
    persist = rig.persist(0, rig.slot(0, 0), Extent(0, 0, 1), b"w")
    wait_for(lambda: len(rig.executor._ssd[0]._in_flight) == 2)
    rig.executor.retire(0, 0)
    wait_for(lambda: not rig.files())
    told.set()
    assert rig.result(persist).failed == (0,)
    state = rig.loaded(load)  # its bytes were right and are checked: either is fine
    assert state.failed == [0] or rig.is_at(0, b"s", (0, 1, 2, 3))
    assert rig.files() == []


def test_an_ssd_tier_that_is_off_fails_at_once(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.write_slot(0, b"d", rig.slot(0, 0))
    job = rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"s"), from_dram(0, (4, 5, 6, 7), rig.slot(0, 0)))
    state = rig.loaded(job)
    assert (state.failed, state.reason) == ([0], "not_found")
    assert rig.is_at(0, b"d", (4, 5, 6, 7))
    alone = rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"s"))
    rig.poll()  # no waiting at all
    assert rig.loads[alone][0].failed == [0]
    assert rig.result(rig.persist(0, rig.slot(0, 0), Extent(0, 0, 0), b"k")).failed == (0,)
    rig.executor.retire(0, 0)


def test_unknown_extents_are_misses(rig: Rig) -> None:
    rig.put_on_ssd(0, b"s", Extent(0, 0, 0))
    rig.fill(0, b"foreign", (0, 1, 2, 3))
    unknown = [Extent(0, 9, 0), Extent(0, 0, 1), Extent(0, 0, 99), Extent(7, 0, 0), Extent(0, 0, -1)]
    state = rig.loaded(rig.load(*(from_ssd(0, (0, 1, 2, 3), extent, b"s") for extent in unknown)))
    assert (sorted(state.failed), state.reason) == ([0, 1, 2, 3, 4], "not_found")
    state = rig.loaded(rig.load(from_ssd(1, (0, 1), Extent(0, 0, 0), b"s")))  # of another group
    assert (state.failed, state.reason) == ([0], "not_found")
    assert rig.is_at(0, b"foreign", (0, 1, 2, 3))
    assert rig.engines[0].submits["read"] == 0
    assert rig.result(rig.persist(0, rig.slot(0, 0), Extent(9, 0, 0), b"k")).failed == (0,)


def test_bytes_of_another_key_are_never_accepted(rig: Rig) -> None:
    rig.put_on_ssd(0, b"right", Extent(0, 0, 0))
    state = rig.loaded(rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"wrong")))
    assert (state.failed, state.reason) == ([0], "checksum")
    assert "load_bytes:ssd" not in rig.counts


@pytest.mark.parametrize("bit", [0, 8 * 12_000 - 1, 8 * 12_288 - 1], ids=["first", "last of the payload", "padding"])
def test_b24_a_flipped_bit_on_disk_is_found_and_the_record_read_once(rig: Rig, bit: int) -> None:
    rig.put_on_ssd(0, b"a", Extent(0, 0, 0))
    rig.put_on_ssd(0, b"b", Extent(0, 0, 1))
    (file,) = rig.files()
    with file.open("r+b") as data:
        data.seek(4096 + bit // 8)
        byte = data.read(1)[0] ^ 1 << bit % 8
        data.seek(4096 + bit // 8)
        data.write(bytes([byte]))
    items = [from_ssd(0, (4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3), Extent(0, 0, n), b"ab"[n : n + 1]) for n in (0, 1)]
    state = rig.loaded(rig.load(*items))
    assert (state.failed, state.reason) == ([0], "checksum")
    assert rig.is_at(0, b"b", (4, 5, 6, 7))
    reads = rig.engines[0].submits["read"]
    state = rig.loaded(rig.load(*items))
    assert (state.failed, state.reason) == ([0], "not_found")
    assert rig.engines[0].submits["read"] == reads + 1, "a record known to be bad was read again"


def test_a_bit_that_flips_on_the_way_is_found(rig: Rig) -> None:
    rig.put_on_ssd(1, b"a", Extent(0, 0, 0))
    rig.faults = lambda transfer: Fault(flip_bit=99_999) if transfer.kind == "read" else None
    state = rig.loaded(rig.load(from_ssd(1, (0, 1), Extent(0, 0, 0), b"a")))
    assert (state.failed, state.reason) == ([0], "checksum")


def test_a_lost_write_is_found(rig: Rig) -> None:
    rig.faults = lambda transfer: Fault(result=transfer.nbytes) if transfer.kind == "write" else None
    assert rig.put_on_ssd(0, b"a", Extent(0, 0, 0)).failed == ()
    state = rig.loaded(rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"a")))
    assert (state.failed, state.reason) == ([0], "checksum")


def test_every_thread_of_every_drive_reads(make_rig: MakeRig) -> None:
    rig = make_rig(drives=2, io_threads=2)
    rig.open()
    keys = [b"%d" % n for n in range(12)]
    extents = [Extent(n % 2, n // 8, n % 8 // 2) for n in range(12)]
    for key, extent in zip(keys, extents, strict=True):
        assert rig.put_on_ssd(0, key, extent).failed == ()
    items = [
        from_ssd(0, range(4 * n, 4 * n + 4), extent, key)
        for n, (key, extent) in enumerate(zip(keys, extents, strict=True))
    ]
    assert rig.loaded(rig.load(*items)).failed == []  # striped: the drives alternate
    assert all(rig.is_at(0, key, range(4 * n, 4 * n + 4)) for n, key in enumerate(keys))
    assert [engine.submits["read"] for engine in rig.engines] == [3, 3, 3, 3]
    assert [engine.submits["write"] for engine in rig.engines] == [6, 6, 0, 0]


def test_a_topic_is_said_once_and_failures_are_all_reported(rig: Rig) -> None:
    rig.put_on_ssd(0, b"s", Extent(0, 0, 0))
    rig.faults = lambda transfer: Fault(result=-errno.EIO) if transfer.kind == "read" else None
    for _ in range(50):
        assert rig.loaded(rig.load(from_ssd(0, (0, 1, 2, 3), Extent(0, 0, 0), b"s"))).reason == "read_failed"
    about_reads = [message for message in rig.messages if "read on SSD failed" in message]
    assert len(about_reads) == 1
    assert "counted from now on" in about_reads[0]


def test_each_drive_that_fails_is_named(make_rig: MakeRig) -> None:
    rig = make_rig(drives=2)
    rig.open()
    rig.faults = lambda _transfer: Fault(result=-errno.ENOSPC)
    for number in range(4):
        assert rig.put_on_ssd(0, b"%d" % number, Extent(number % 2, number % 2, number // 2)).reason == "disk_full"
    about = [message for message in rig.messages if "write on SSD failed (disk_full)" in message]
    assert [message.split(" in ")[1].split(": ")[0] for message in about] == [
        f"{rig.directory}/drive{drive}/r0" for drive in range(2)
    ]


@pytest.mark.parametrize(
    ("code", "reason"), [(errno.ENOSPC, "disk_full"), (errno.EDQUOT, "disk_full"), (5, "write_failed")]
)
def test_b40_a_full_disk_is_told_from_a_broken_one(rig: Rig, code: int, reason: str) -> None:
    rig.faults = lambda _transfer: Fault(result=-code)
    assert rig.put_on_ssd(0, b"a", Extent(0, 0, 0)) == JobResult(1, (0,), reason)
    rig.faults = lambda _transfer: None
    assert rig.put_on_ssd(0, b"a", Extent(0, 0, 1)).failed == ()


def test_the_log_says_what_the_store_noted(make_rig: MakeRig, tmp_path: Path) -> None:
    (tmp_path / "drive0" / "r0").mkdir(parents=True)
    for segment in range(10):
        (tmp_path / "drive0" / "r0" / f"seg-{segment:016x}.data").write_bytes(b"junk")
    rig = make_rig()
    rig.open()
    rig.poll()
    assert sum("seg-" in message for message in rig.messages) == executor_module.NOTES_SAID_MAX
    assert any(message.startswith("and 5 more") for message in rig.messages)
    assert rig.files() == []


def test_only_a_found_result_is_taken(rig: Rig) -> None:
    assert rig.executor.take_opened() is None


# Scenarios of shared/scenarios.md.


def test_b01_a_store_never_copies_what_was_there_before_the_forward(rig: Rig) -> None:
    """500 steps: poison, loads, a forward that writes at its very end, then the store, as WorkerSide orders them."""
    rng = random.Random(1)
    per_chunk = SHAPES[0].blocks_per_chunk
    held: dict[int, tuple[bytes, tuple[int, ...], int]] = {}
    free_slots = list(range(200))
    free_blocks = [tuple(range(at, at + per_chunk)) for at in range(0, 128, per_chunk)]
    checked = 0
    for step in range(500):
        blocks = free_blocks.pop(rng.randrange(len(free_blocks)))
        slot = free_slots.pop(0)
        rig.fill(0, b"poison", blocks)
        if step % 3 == 0:  # loads keep the copy thread busy
            rig.load(from_dram(0, (200, 201, 202, 203), rig.slot(0, 201)))
        time.sleep(rng.random() * 0.002)
        key = b"step%d" % step
        rig.fill(0, key, blocks)
        held[rig.store(StoreItem(0, rig.slot(0, slot), blocks))] = key, blocks, slot
        rig.poll()
        ended = [job for job in held if job in rig.results]
        if len(free_blocks) < 4:
            ended = [min(held)]
        for job in ended:
            assert rig.result(job).failed == ()
            key, blocks, slot = held.pop(job)
            rig.fill(0, b"poison", blocks)  # vLLM has the blocks back
            assert rig.loaded(rig.load(from_dram(0, (240, 241, 242, 243), rig.slot(0, slot)))).failed == []
            data = rig.hbm[0].read((240, 241, 242, 243))
            assert data == rig.payload(0, key), whose(data, [b"poison", key])
            free_blocks.append(blocks)
            free_slots.append(slot)
            checked += 1
    assert checked + len(held) == 500
    assert checked > 450


def test_b04_a_record_is_a_miss_until_it_is_complete(rig: Rig) -> None:
    """Eight readers on the store and the executor's own loads, while 64 records are written slowly."""
    rng = random.Random(4)
    keys = {Extent(0, n // 4, n % 4): b"k%d" % n for n in range(64)}
    rig.faults = lambda t: Fault(delay_s=rng.random() * 0.02) if t.kind == "write" else None
    store = rig.executor._store
    assert store is not None
    stop, wrong, seen = threading.Event(), [], [set() for _ in range(8)]

    def read(number: int) -> None:
        pick = random.Random(number)
        while not stop.is_set():
            extent = pick.choice(list(keys))
            try:
                fd, _, checksum = store.read_target(0, extent)
                store.release(fd)
            except StorageError:
                continue
            with rig.files()[0].parent.joinpath(f"seg-{extent.segment:016x}.data").open("rb") as data:
                data.seek(4096 + extent.record * 12_288)
                found = data.read(12_000)
            if found != payload(keys[extent], 12_000) or not checksum:
                wrong.append(extent)
            seen[number].add(extent)
            time.sleep(0.001)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for reader in readers:
        reader.start()
    jobs, misses, hits, todo = {}, 0, 0, list(keys.items())
    ended: set[Extent] = set()
    while todo or len(ended) < len(keys):
        if todo and len(jobs) - len(ended) < 8:
            extent, key = todo.pop(0)
            slot = rig.slot(0, len(jobs))
            rig.write_slot(0, key, slot)
            jobs[rig.persist(0, slot, extent, key)] = extent
        extent = rng.choice(list(jobs.values()))
        rig.poll()
        ended = {jobs[job] for job in jobs if job in rig.results}
        known = extent in ended
        rig.fill(0, b"foreign", (0, 1, 2, 3))
        state = rig.loaded(rig.load(from_ssd(0, (0, 1, 2, 3), extent, keys[extent])))
        if state.failed:
            assert not known, "a record whose persist had ended was a miss"
            assert state.reason == "not_found"
            assert rig.is_at(0, b"foreign", (0, 1, 2, 3))
            misses += 1
        else:
            assert rig.is_at(0, keys[extent], (0, 1, 2, 3))
            hits += 1
    wait_for(lambda: all(len(extents) > 20 for extents in seen))
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert misses > 0 and hits > 0


def test_staging_has_room_for_a_record_of_any_group(rig: Rig) -> None:
    (thread,) = rig.executor._ssd
    record_bytes = max(shape.record_bytes for shape in SHAPES)
    assert thread._engine.depth == len(thread._buffers) == ssd_thread_module.depth_for(record_bytes)
    assert thread._staging.address(0) % 4096 == 0
    assert thread._staging.address(1) - thread._staging.address(0) == record_bytes
    end = thread._staging.address(thread._engine.depth) - 1
    ctypes.c_char.from_address(end).value = b"e"
    assert ctypes.c_char.from_address(end).value == b"e"


def test_many_items_of_both_tiers_and_groups_in_one_load(rig: Rig) -> None:
    rng = random.Random(9)
    items: list[LoadItem] = []
    expected: list[tuple[int, bytes, tuple[int, ...]]] = []
    free = {0: list(range(256)), 1: list(range(256))}
    for n in range(60):
        group = n % 2
        key, slot = b"m%d" % n, rig.slot(group, n // 2)
        rig.write_slot(group, key, slot)
        blocks = tuple(free[group].pop(rng.randrange(len(free[group]))) for _ in range(SHAPES[group].blocks_per_chunk))
        expected.append((group, key, blocks))
        if rng.random() < 0.5:
            items.append(from_dram(group, blocks, slot, key))
            continue
        records = 4 if group == 0 else 2
        extent = Extent(0, 2 * (n // 2 // records) + group, n // 2 % records)
        assert rig.result(rig.persist(group, slot, extent, key)).failed == ()
        items.append(from_ssd(group, blocks, extent, key))
    assert rig.loaded(rig.load(*items)).failed == []
    for group, key, blocks in expected:
        assert rig.is_at(group, key, blocks), (group, key)
