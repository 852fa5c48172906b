"""The executor under faults: of devices, of the store, of memory, of ourselves. No wrong byte, no lost end, no leak."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from doubles import SHAPES, Fault, Rig, Transfer, from_dram, from_ssd, holdings, no_faults, wait_for, whose
from saria_vllm.storage import segment as segment_module
from saria_vllm.storage.segment import Segment
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import Extent, GroupShape, LoadItem, PersistItem, StoreItem

ENGINES = ["posix", "io_uring"]
SMALL = GroupShape(0, 16, 1, 4096)


def small(directory: Path, engine: str, **options: Any) -> Rig:
    """One group with records of 4 KiB, a block each."""
    options = {"segment_records": 16, **options}
    return Rig(directory, engine, shapes=(SMALL,), pages={0: (4096,)}, **options)


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    """Rigs that a test opens; closed at the end, when everything must be back."""
    before, made = holdings(), []
    yield made
    for rig in made:
        rig.executor.close()
        assert all(engine.closed for engine in rig.engines)
    wait_for(lambda: holdings() == before, 10)


# B05


def half_written(write: Callable[..., None], every: int, rng: random.Random) -> Callable[..., None]:
    """`write_whole` that fails one time in `every`, after half of the bytes."""

    def shim(fd: int, data: bytes, offset: int) -> None:
        if rng.randrange(every) == 0:
            write(fd, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC if rng.random() < 0.5 else errno.EIO, "journal")
        write(fd, data, offset)

    return shim


@pytest.mark.parametrize("engine", ENGINES)
def test_b05_a_failed_write_is_a_miss_for_ever(
    rigs: list[Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """1,000 keys; 1 write in 20 fails: EIO, a short write, ENOSPC, or an error while the journal gets its entry."""
    rng, broken = random.Random(5), set()

    def fail(transfer: Transfer) -> Fault | None:
        if transfer.kind == "read" or rng.randrange(30):
            return None
        broken.add(transfer.number)
        return Fault(result=rng.choice([-errno.EIO, -errno.ENOSPC, transfer.nbytes - 512, 0]))

    rig = small(tmp_path, engine, faults=fail)
    rigs.append(rig)
    rig.open()
    monkeypatch.setattr(segment_module, "write_whole", half_written(segment_module.write_whole, 50, rng))
    keys = {b"key%d" % n: Extent(0, n // 16, n % 16) for n in range(1000)}
    left = [PersistItem(0, rig.slot(0, n), extent, key, b"") for n, (key, extent) in enumerate(keys.items())]
    jobs: dict[int, list[bytes]] = {}
    while left:
        some, left = left[: (chunks := rng.randint(1, 9))], left[chunks:]
        for item in some:
            rig.write_slot(0, item.key, item.slot)
        jobs[rig.write(*some)] = [item.key for item in some]
    failed = {written[position] for job, written in jobs.items() for position in rig.result(job).failed}
    rig.check_quiet()
    assert sorted(rig.results) == sorted(jobs)  # each ended, once
    assert 30 <= len(failed) <= 90
    assert len(broken) < len(failed)  # the journal failed too
    assert {rig.results[job][0].reason for job in jobs} == {"", "write_failed", "disk_full"}
    assert rig.counts["ssd_written_bytes"] == 4096 * (1000 - len(failed))
    assert "internal_errors" not in rig.counts
    check_all(rig, keys, failed)
    rig.executor.close()
    monkeypatch.undo()
    again = small(tmp_path, engine)
    rigs.append(again)
    found = {chunk.key: chunk.extent for chunk in again.open().found.items}
    assert found == {key: extent for key, extent in keys.items() if key not in failed}
    check_all(again, keys, failed)
    names = {path.name.split("-")[0] for path in (tmp_path / "drive0" / "r0").iterdir()}
    assert names == {"seg"}, "a temporary file is left"


@pytest.mark.parametrize("engine", ENGINES)
def test_b05_errors_at_close_sync_and_unlink_lose_nothing_that_was_stored(
    rigs: list[Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """1,000 keys; 1 call in 4 of those that end a segment fails: a failed close has given its number back, a failed
    sync or unlink keeps the journal."""
    rng, failing = random.Random(6), []

    def shim(name: str, call: Callable[..., Any], after: bool) -> Callable[..., Any]:
        def wrapped(what: Any, *args: Any, **kwargs: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            hit = "/seg-" in path and not rng.randrange(4)
            if hit:
                failing.append(name)
            if not hit or after:
                call(what, *args, **kwargs)
            if hit:
                raise OSError(errno.EIO, name)

        return wrapped

    rig = small(tmp_path, engine)
    rigs.append(rig)
    rig.open()
    with monkeypatch.context() as patch:
        for name, after in [("close", True), ("fdatasync", False), ("unlink", False)]:
            patch.setattr(os, name, shim(name, getattr(os, name), after))
        keys = {b"key%d" % n: Extent(0, n // 16, n % 16) for n in range(1000)}
        failed = set()
        for n, (key, extent) in enumerate(keys.items()):
            rig.write_slot(0, key, rig.slot(0, n))
            if rig.result(rig.persist(0, rig.slot(0, n), extent, key)).failed:
                failed.add(key)
        rig.check_quiet()
    assert set(failing) == {"close", "fdatasync", "unlink"}
    check_all(rig, keys, failed)
    assert len(failed) <= failing.count("close")
    for segment in range(20):  # Whose journals' numbers may be other files' by now.
        rig.executor.retire(0, segment)
    wait_for(lambda: len(rig.files()) == 63 - 20)
    keys = {key: extent for key, extent in keys.items() if extent.segment >= 20}
    failed &= set(keys)
    check_all(rig, keys, failed)
    rig.executor.close()
    again = small(tmp_path, engine)
    rigs.append(again)
    assert {chunk.key for chunk in again.open().found.items} == set(keys) - failed
    check_all(again, keys, failed)


def check_all(rig: Rig, keys: dict[bytes, Extent], failed: set[bytes]) -> None:
    """Load everything, one item a job: the failed are misses, the others exact."""
    for key, extent in keys.items():
        rig.fill(0, b"foreign", (9,))
        state = rig.loaded(rig.load(from_ssd(0, (9,), extent, key)))
        if key in failed:
            assert (state.failed, state.reason) == ([0], "not_found")
            assert rig.is_at(0, b"foreign", (9,))
        else:
            assert state.failed == []
            assert rig.is_at(0, key, (9,)), whose(rig.hbm[0].read((9,)), keys)


# B06


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ssd", ["", "EIO", "short", "flip", "raise"])
@pytest.mark.parametrize("dram", ["", "raise"])
@pytest.mark.parametrize("where", [0, 2, 4], ids=["first", "middle", "last"])
def test_b06_a_failed_leg_is_a_failed_load(
    rigs: list[Rig], tmp_path: Path, engine: str, ssd: str, dram: str, where: int
) -> None:
    """Five items of each tier; one of either or both goes wrong. Every block starts with a foreign tag."""
    rig = Rig(tmp_path, engine)
    rigs.append(rig)
    rig.open()
    keys = [b"ssd%d" % n for n in range(5)] + [b"dram%d" % n for n in range(5)]
    blocks = [tuple(range(4 * n, 4 * n + 4)) for n in range(10)]
    for n, key in enumerate(keys[:5]):
        assert rig.put_on_ssd(0, key, Extent(0, n // 4, n % 4)).failed == ()
    for n, key in enumerate(keys[5:]):
        rig.write_slot(0, key, rig.slot(0, n))
    for n in range(10):
        rig.fill(0, b"foreign", blocks[n])

    def fail_read(transfer: Transfer) -> Fault | None:
        if transfer.number != where:
            return None
        faults = {
            "EIO": Fault(result=-errno.EIO),
            "short": Fault(result=4096),
            "flip": Fault(flip_bit=77),
            "raise": Fault(raises=OSError(errno.EIO, "submit")),
        }
        return faults.get(ssd)

    def fail_copy(call: str, lists: Any) -> Exception | None:
        hit = call == "scatter_many" and list(blocks[5 + where]) in lists
        return OSError(errno.EFAULT, "copy") if dram and hit else None

    rig.faults, rig.maps[0].fault = fail_read, fail_copy
    items = [from_ssd(0, blocks[n], Extent(0, n // 4, n % 4), keys[n]) for n in range(5)]
    items += [from_dram(0, blocks[5 + n], rig.slot(0, n), keys[5 + n]) for n in range(5)]
    state = rig.loaded(rig.load(*items))
    assert (where in state.failed) == bool(ssd)
    assert (5 + where in state.failed) == bool(dram)
    assert bool(state.failed) == bool(ssd or dram)
    assert len(state.failed) == len(set(state.failed))
    for n in set(range(10)) - set(state.failed):
        assert rig.is_at(0, keys[n], blocks[n]), "reported as loaded"
    if ssd in ("EIO", "short", "raise"):
        assert rig.is_at(0, b"foreign", blocks[where])  # which is why the load must be failed
    loaded = 10 - len(state.failed)
    assert rig.counts.get("load_bytes:ssd", 0) + rig.counts.get("load_bytes:dram", 0) == loaded * SHAPES[0].record_bytes
    rig.check_quiet()


# B29

PLACES: dict[str, tuple[object, str]] = {
    "read_target": (SegmentStore, "read_target"),
    "write_target": (SegmentStore, "write_target"),
    "commit": (SegmentStore, "commit"),
    "abandon": (SegmentStore, "abandon"),
    "forget": (SegmentStore, "forget"),
    "retire": (SegmentStore, "retire"),
    "seed": (SegmentStore, "seed"),
    "journal": (Segment, "append"),
    "seal": (Segment, "seal"),
}
MAP_CALLS = ["gather_many", "scatter_many", "scatter_verify"]
ENGINE_CALLS = ["read", "write"]
ERRORS: list[Callable[[], Exception]] = [
    lambda: OSError(errno.EIO, "injected"),
    lambda: OSError(errno.EMFILE, "injected"),
    MemoryError,
    lambda: ValueError("injected"),
    lambda: KeyError("injected"),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_b29_threads_outlive_whatever_is_raised_in_them(
    rigs: list[Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Each error at each place, one at a time; then 1,000 operations as if nothing had been."""
    rig = small(tmp_path, engine)
    rigs.append(rig)
    rig.open()
    threads = [rig.executor._copier, *(thread._thread for thread in rig.executor._ssd)]
    armed: list[Exception] = []
    hit: set[str] = set()

    def once(place: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def shim(*args: Any, **kwargs: Any) -> Any:
            if armed and place == target:
                hit.add(place)
                raise armed.pop()
            return call(*args, **kwargs)

        return shim

    for place, (owner, name) in PLACES.items():
        monkeypatch.setattr(owner, name, once(place, getattr(owner, name)))
    monkeypatch.setattr(rig.pool, "address", once("address", rig.pool.address))

    def map_fault(call: str, _blocks: object) -> Exception | None:
        if armed and call == target:
            hit.add(call)
            return armed.pop()
        return None

    def engine_fault(transfer: Transfer) -> Fault | None:
        if armed and transfer.kind == target:
            hit.add(transfer.kind)
            return Fault(raises=armed.pop())
        if armed and (target, transfer.kind) == ("forget", "read"):  # called after another fault only
            return Fault(flip_bit=1)
        if armed and (target, transfer.kind) == ("abandon", "write"):
            return Fault(result=-errno.EIO)
        return None

    rig.maps[0].fault, rig.faults = map_fault, engine_fault
    segment = iter(range(10_000))
    places = [*PLACES, "address", *MAP_CALLS, *ENGINE_CALLS]
    for target in places:
        for make in ERRORS:
            armed.append(make())
            for _ in range(2):  # the second time it works
                round_trip(rig, next(segment), records=16, must_work=not armed)
            assert not armed, target
    assert hit == set(places)
    target = ""
    start = time.monotonic()
    for _ in range(20):
        round_trip(rig, next(segment), records=16, must_work=True)  # 3 x 16 + 2 operations
    assert time.monotonic() - start < 20
    rig.check_quiet()
    assert [rig.executor._copier, *(thread._thread for thread in rig.executor._ssd)] == threads
    assert all(thread.is_alive() for thread in threads)
    assert rig.counts["internal_errors"] > 20
    assert len(rig.messages) < 30  # said once each


def round_trip(rig: Rig, segment: int, records: int, must_work: bool) -> None:
    """Store, persist, load from DRAM and from SSD, retire. All jobs end, and what is reported as loaded is exact."""
    keys = [b"%d-%d" % (segment, n) for n in range(records)]
    slots = [rig.slot(0, n) for n in range(records)]
    for n, key in enumerate(keys):
        rig.fill(0, key, (n,))
        rig.fill(0, b"foreign", (100 + n,))
        rig.fill(0, b"foreign", (150 + n,))
    stored = rig.result(rig.store(*(StoreItem(0, slots[n], (n,)) for n in range(records))))
    if stored.failed:
        assert not must_work
        for n, key in enumerate(keys):
            rig.write_slot(0, key, slots[n])
    extents = [Extent(0, segment, n) for n in range(records)]
    persists = [rig.persist(0, slots[n], extents[n], keys[n]) for n in range(records)]
    persisted = [not rig.result(job).failed for job in persists]
    items: list[LoadItem] = [from_ssd(0, (100 + n,), extents[n], keys[n]) for n in range(records)]
    items += [from_dram(0, (150 + n,), slots[n], keys[n]) for n in range(records)]
    state = rig.loaded(rig.load(*items))
    for n in set(range(2 * records)) - set(state.failed):
        where = 100 + n if n < records else 150 + n - records
        assert rig.is_at(0, keys[n % records], (where,)), "reported as loaded"
    assert {n for n in range(records) if not persisted[n]} <= set(state.failed)
    rig.executor.retire(0, segment)
    assert len(state.failed) == len(set(state.failed))
    if must_work:
        assert all(persisted)
        assert state.failed == []


@pytest.mark.parametrize("engine", ENGINES)
def test_b29_an_engine_that_cannot_tell_what_ended_fails_its_work_and_the_thread_lives(
    rigs: list[Rig], tmp_path: Path, engine: str
) -> None:
    rig = small(tmp_path, engine)
    rigs.append(rig)
    rig.open()
    assert rig.put_on_ssd(0, b"a", Extent(0, 0, 0)).failed == ()
    told = threading.Event()
    rig.faults = lambda _transfer: Fault(hold=told)
    rig.fill(0, b"foreign", (1,))
    load, persist = (
        rig.load(from_ssd(0, (1,), Extent(0, 0, 0), b"a")),
        rig.persist(0, rig.slot(0, 0), Extent(0, 0, 1), b"b"),
    )
    wait_for(lambda: len(rig.executor._ssd[0]._in_flight) == 2)
    rig.engines[0].reap_raises = OSError(errno.EBADF, "the ring is gone")
    assert rig.loaded(load).reason == "read_failed"
    assert rig.result(persist).reason == "write_failed"
    rig.engines[0].reap_raises = None
    told.set()
    for _ in range(100):  # more than there are buffers
        state = rig.loaded(rig.load(from_ssd(0, (1,), Extent(0, 0, 0), b"a"), from_dram(0, (2,), rig.slot(0, 0))))
        assert state.failed == [0]
    assert rig.put_on_ssd(0, b"c", Extent(0, 0, 2)).failed == (0,)
    rig.executor.retire(0, 0)
    wait_for(lambda: not rig.files())
    assert rig.is_at(0, b"foreign", (1,))
    assert rig.counts["internal_errors"] == 1


def test_b29_a_transfer_that_began_although_its_submit_raised_ends_once(rigs: list[Rig], tmp_path: Path) -> None:
    """io_uring can do that: the entry is in the ring when the kernel refuses the call."""
    rig = small(tmp_path, "posix")
    rigs.append(rig)
    rig.open()
    engine = rig.engines[0]
    submit_read, submit_write = engine.submit_read, engine.submit_write

    def begin_and_raise(submit: Callable[..., None]) -> Callable[..., None]:
        def shim(*args: Any) -> None:
            submit(*args)
            raise OSError(errno.ENOMEM, "begun all the same")

        return shim

    engine.submit_write = begin_and_raise(submit_write)  # type: ignore[method-assign]
    engine.submit_read = begin_and_raise(submit_read)  # type: ignore[method-assign]
    for n in range(16):
        assert rig.put_on_ssd(0, b"k%d" % n, Extent(0, 0, n)).failed == ()
    items = [from_ssd(0, (n,), Extent(0, 0, n), b"k%d" % n) for n in range(16)]
    for _ in range(10):
        assert rig.loaded(rig.load(*items)).failed == []
    assert all(rig.is_at(0, b"k%d" % n, (n,)) for n in range(16))
    rig.check_quiet()


# B32

FILES_MAX = 128
OPERATIONS = 20_000


@pytest.mark.parametrize("engine", ENGINES)
def test_b32_descriptors_stay_flat_under_errors(tmp_path: Path, engine: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", __file__, str(tmp_path), engine],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.splitlines()[-1] == "flat"


def churn(directory: Path, engine: str) -> None:
    """In a process of its own with 128 descriptors: 20,000 operations over 157 segments, 5 % failing."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES_MAX, FILES_MAX))
    rng = random.Random(32)
    start = holdings()

    def fail(transfer: Transfer) -> Fault | None:
        if rng.random() >= 0.05:
            return None
        if transfer.kind == "read":
            return rng.choice([Fault(result=-errno.EIO), Fault(flip_bit=3), Fault(raises=OSError(errno.EIO, "submit"))])
        return rng.choice([Fault(result=-errno.EIO), Fault(result=512), Fault(raises=MemoryError())])

    rig = small(directory, engine, faults=fail, segments_max=40, segment_records=64)
    rig.open()
    idle = len(os.listdir("/proc/self/fd"))
    operations, failures, generation, highest = 0, 0, 1, 0
    segment = 0
    while operations < OPERATIONS:
        keys = [b"%d-%d" % (segment, n) for n in range(64)]
        for n, key in enumerate(keys):
            rig.write_slot(0, key, rig.slot(0, n), generation)
        jobs = [rig.persist(0, rig.slot(0, n), Extent(0, segment, n), keys[n]) for n in range(64)]
        failures += sum(bool(rig.result(job).failed) for job in jobs)
        load = rig.load(*(from_ssd(0, (n,), Extent(0, segment, n), keys[n]) for n in range(64)))
        if segment % 10 == 9:  # abort what is in flight
            generation += 1
            rig.executor.set_generation(generation)
        state = rig.loaded(load)
        failures += len(state.failed)
        for n in set(range(64)) - set(state.failed):
            assert rig.is_at(0, keys[n], (n,), generation), keys[n]
        operations += 128
        if segment >= 30:
            rig.executor.retire(0, segment - 30)
        highest = max(highest, len(os.listdir("/proc/self/fd")))
        segment += 1
    assert failures > 0.05 * operations
    # 31 segments of one descriptor, one journal.
    assert highest <= idle + 31 + 1, (idle, highest)
    rig.check_quiet()
    overload(rig, segment, generation)
    rig.executor.close()
    wait_for(lambda: holdings() == start, 10)
    print("flat")


def overload(rig: Rig, segment: int, generation: int) -> None:
    """No descriptor is left: what needs one fails as a miss, and works again when there are some."""
    rig.faults = no_faults
    hoard = [os.open("/dev/null", os.O_RDONLY) for _ in range(FILES_MAX - len(os.listdir("/proc/self/fd")) + 1)]
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        os.open("/dev/null", os.O_RDONLY)
    rig.write_slot(0, b"k", rig.slot(0, 0), generation)
    result = rig.result(rig.persist(0, rig.slot(0, 0), Extent(0, segment, 0), b"k"))
    assert (result.failed, result.reason) == ((0,), "other"), "the drive is not to blame"
    for fd in hoard:
        os.close(fd)
    assert rig.put_on_ssd(0, b"k", Extent(0, segment + 1, 0), generation).failed == ()
    assert rig.loaded(rig.load(from_ssd(0, (3,), Extent(0, segment + 1, 0), b"k"))).failed == []
    assert rig.is_at(0, b"k", (3,), generation)


if __name__ == "__main__":
    churn(Path(sys.argv[1]), sys.argv[2])
