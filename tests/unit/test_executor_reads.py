"""The executor's SSD reads: many segments at once, loads that have ended, files that are none."""

from __future__ import annotations

import errno
import os
import random
import threading
from typing import Any

import pytest

from doubles import Fault, MakeRig, Rig, from_ssd, wait_for
from saria_vllm.storage import segments as segments_module
from saria_vllm.storage.drives import Drive
from saria_vllm.types import Extent, GroupShape

SMALL = GroupShape(0, 16, 1, 4096)
ENGINES = ["posix", "io_uring"]


def small(make_rig: MakeRig, **options: Any) -> Rig:
    """One group with records of 4 KiB, a block each."""
    return make_rig(shapes=(SMALL,), pages={0: (4096,)}, **options)


def fill(rig: Rig, count: int, drives: int = 1) -> list[tuple[bytes, Extent]]:
    """Chunks on SSD, each in a segment of its own."""
    chunks = [(b"key%d" % n, Extent(n % drives, n, 0)) for n in range(count)]
    for key, extent in chunks:
        assert rig.put_on_ssd(0, key, extent).failed == ()
    return chunks


@pytest.mark.parametrize("engine", ENGINES)
def test_more_reads_in_flight_than_files_stay_open(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(segments_module, "READ_FDS_MAX", 4)
    rig = small(make_rig, engine=engine, drives=2, io_threads=2, segment_records=1)
    rig.open()
    chunks, rng = fill(rig, 200, drives=2), random.Random(1)
    rig.faults = lambda _transfer: Fault(delay_s=rng.random() * 0.01)
    for _ in range(3):
        items = [from_ssd(0, (n,), extent, key) for n, (key, extent) in enumerate(chunks)]
        rng.shuffle(items)
        jobs = [rig.load(*items[at : at + 20]) for at in range(0, 200, 20)]
        assert [rig.loaded(job).failed for job in jobs] == [[]] * 10, rig.messages
        assert all(rig.is_at(0, key, (n,)) for n, (key, _) in enumerate(chunks))
    rig.check_quiet()


@pytest.mark.parametrize("engine", ENGINES)
def test_reads_wait_for_the_descriptors_of_others_and_fail_when_there_are_none(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(segments_module, "READ_FDS_MAX", 0)
    rig = small(make_rig, engine=engine, io_threads=3, segment_records=1)
    rig.open()
    chunks = fill(rig, 60)
    real, most, store = Drive.open_segment_file, 4, rig.executor._store
    assert store is not None

    def few(drive: Drive, path: str, **options: Any) -> int:
        if store._descriptors.in_use >= most:
            raise OSError(errno.EMFILE, "too many")
        return real(drive, path, **options)

    monkeypatch.setattr(Drive, "open_segment_file", few)
    rig.faults = lambda _transfer: Fault(delay_s=0.005)
    items = [from_ssd(0, (n,), extent, key) for n, (key, extent) in enumerate(chunks)]
    jobs = [rig.load(*items[at : at + 20]) for at in range(0, 60, 20)]
    assert [rig.loaded(job).failed for job in jobs] == [[]] * 3, rig.messages
    most = 0
    state = rig.loaded(rig.load(items[0]))
    assert (state.failed, state.reason) == ([0], "other"), "the drive is not to blame"
    rig.check_quiet()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reset", [False, True], ids=["deadline", "reset"])
def test_nothing_is_read_for_a_load_that_has_ended(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, engine: str, reset: bool
) -> None:
    rig = small(make_rig, engine=engine, segment_records=64)
    rig.open()
    for record in range(64):
        assert rig.put_on_ssd(0, b"%d" % record, Extent(0, 0, record)).failed == ()
    told = threading.Event()
    rig.faults = lambda _transfer: Fault(hold=told)
    depth = rig.engines[0].depth
    items = [from_ssd(0, (record,), Extent(0, 0, record), b"%d" % record) for record in range(64)]
    jobs_in_flight = [rig.load(*items[at : at + 16]) for at in range(0, depth, 16)]
    wait_for(lambda: rig.engines[0].submits["read"] == depth)
    if not reset:
        monkeypatch.setattr(rig.executor._ends, "load_deadline_s", -1.0)
    queued = rig.load(*items[32:])
    monkeypatch.undo()
    if reset:
        rig.executor.set_generation(2)
    else:
        assert (rig.ended(queued).reason, len(rig.ended(queued).failed)) == ("deadline", 32)
    told.set()
    assert rig.ended(queued).failed
    assert [rig.loaded(job).failed != [] for job in jobs_in_flight] == [reset] * len(jobs_in_flight)
    rig.check_quiet()
    assert rig.engines[0].submits["read"] == depth


@pytest.mark.parametrize("engine", ENGINES)
def test_a_data_file_or_journal_that_is_a_fifo_blocks_no_thread(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(segments_module, "READ_FDS_MAX", 0)
    rig = small(make_rig, engine=engine, segment_records=1)
    rig.open()
    (one, two, three, _, next_one), files = fill(rig, 5)[:5], rig.files()
    files[0].unlink()
    os.mkfifo(files[0])
    os.mkfifo(files[1].with_suffix(".journal"))  # where a bad record is noted
    with files[1].open("r+b") as data:
        data.seek(4096)
        data.write(b"x" * 100)
    files[2].unlink()
    files[2].mkdir()
    for (key, extent), reason in ((one, "read_failed"), (two, "checksum"), (three, "read_failed")):
        assert rig.loaded(rig.load(from_ssd(0, (1,), extent, key))).reason == reason
    os.mkfifo(files[0].with_name("seg-0000000000000009.journal"))
    assert rig.put_on_ssd(0, b"new", Extent(0, 9, 0)).reason == "write_failed"
    assert rig.loaded(rig.load(from_ssd(0, (1,), next_one[1], next_one[0]))).failed == []
    rig.check_quiet()
