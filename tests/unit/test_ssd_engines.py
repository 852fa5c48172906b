"""One contract for all SSD engines (see `SsdEngine`)."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import addressof, c_char
from pathlib import Path

import pytest

from kvikio_double import KvikioDouble
from nixl_double import NixlDouble
from saria_vllm.config import SsdEngineName
from saria_vllm.engine import io_uring, kvikio, nixl
from saria_vllm.engine.emulated import Contention, EmulatedEngine, Emulation
from saria_vllm.engine.io_uring import UringEngine
from saria_vllm.engine.kvikio import KvikioEngine
from saria_vllm.engine.nixl import NixlEngine
from saria_vllm.engine.posix import PosixEngine
from saria_vllm.engine.ssd_engine import SsdEngine, open_engine
from saria_vllm.errors import ConfigError

KIB = 1024
DEPTH = 4


class Memory:
    """Page-aligned memory for transfers."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = mmap.mmap(-1, nbytes)
        self.address = addressof(c_char.from_buffer(self.bytes))


def make_polled(depth: int) -> UringEngine:
    return UringEngine(depth, polled=True)


def make_emulated(depth: int) -> EmulatedEngine:
    return EmulatedEngine(PosixEngine(depth), Emulation(Contention(1e9, [0.5e9])), 0)


@pytest.fixture(params=[UringEngine, make_polled, PosixEngine, make_emulated, "nixl double", "nixl", "kvikio double"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SsdEngine]:
    kind = request.param
    if kind == "kvikio double":
        prepare_kvikio(monkeypatch)
        kind = KvikioEngine
    elif isinstance(kind, str):
        prepare_nixl(monkeypatch, kind == "nixl double")
        kind = NixlEngine
    opened: SsdEngine = kind(DEPTH)
    yield opened
    opened.close()


def prepare_nixl(monkeypatch: pytest.MonkeyPatch, double: bool) -> None:
    """Put the double in NIXL's place, or skip when NIXL is needed and missing."""
    if double:
        monkeypatch.setattr(nixl, "load", lambda: (NixlDouble(), "1.5.0"))
        return
    try:
        nixl.load()
    except ConfigError as error:
        pytest.skip(str(error))


def prepare_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvikio, "load", lambda _threads: (KvikioDouble(), "a double"))


@pytest.fixture
def memory() -> Memory:
    return Memory(1 << 20)


def finish(engine: SsdEngine) -> dict[int, int]:
    """Reap until nothing is in flight: results by tag."""
    results: dict[int, int] = {}
    deadline = time.monotonic() + 30
    while engine.in_flight:
        for tag, result in engine.reap(1.0):
            assert tag not in results
            results[tag] = result
        assert time.monotonic() < deadline
    return results


def open_file(path: Path, direct: bool) -> int:
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip(f"{path.parent} has no O_DIRECT")


@pytest.mark.parametrize("direct", [False, True])
def test_what_was_written_is_read(engine: SsdEngine, tmp_path: Path, memory: Memory, direct: bool) -> None:
    data = os.urandom(256 * KIB)
    memory.bytes[: len(data)] = data
    fd = open_file(tmp_path / "file", direct)
    for i in range(4):
        engine.submit_write(fd, memory.address + i * 64 * KIB, 64 * KIB, i * 64 * KIB, tag=i)
    assert engine.in_flight == 4
    assert finish(engine) == dict.fromkeys(range(4), 64 * KIB)
    assert (tmp_path / "file").read_bytes() == data
    for i in range(4):  # in another order, to another place
        engine.submit_read(fd, memory.address + (512 + 64 * i) * KIB, 64 * KIB, (3 - i) * 64 * KIB, tag=2**64 - 1 - i)
    assert finish(engine) == {2**64 - 1 - i: 64 * KIB for i in range(4)}
    for i in range(4):
        start = (512 + 64 * i) * KIB
        assert memory.bytes[start : start + 64 * KIB] == data[(3 - i) * 64 * KIB : (4 - i) * 64 * KIB]
    os.close(fd)


@pytest.mark.parametrize("direct", [False, True])
def test_registered_memory_changes_no_byte(engine: SsdEngine, tmp_path: Path, memory: Memory, direct: bool) -> None:
    """Transfers within it, across each of its ends, around it and far from it."""
    data = os.urandom(512 * KIB)
    (tmp_path / "file").write_bytes(data)
    fd = open_file(tmp_path / "file", direct)
    start, nbytes = 128 * KIB, 256 * KIB
    if engine.register_memory(memory.address + start, nbytes):
        assert not engine.register_memory(memory.address, KIB)  # Once.
    for first, last in ((128, 384), (192, 256), (64, 192), (320, 512), (0, 640), (0, 128), (384, 448), (700, 800)):
        moved = (last - first) * KIB
        memory.bytes[:] = bytes(1 << 20)
        engine.submit_read(fd, memory.address + first * KIB, moved, 0, tag=first)
        assert finish(engine) == {first: min(moved, len(data))}
        assert memory.bytes[first * KIB : last * KIB].rstrip(b"\0") == data[:moved].rstrip(b"\0")
        assert not any(memory.bytes[: first * KIB]) and not any(memory.bytes[last * KIB :])
        memory.bytes[first * KIB : last * KIB] = flipped = bytes(
            255 - byte for byte in memory.bytes[first * KIB : last * KIB]
        )
        engine.submit_write(fd, memory.address + first * KIB, moved, 0, tag=first)
        assert finish(engine) == {first: moved}
        assert (tmp_path / "file").read_bytes()[:moved] == flipped
        data = (tmp_path / "file").read_bytes()
    os.close(fd)


def test_io_uring_registers_memory_here_and_works_where_it_may_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: Memory
) -> None:
    """Locked memory is limited: 4 KiB of it is what every limit allows, no memory at all is refused."""
    engine = UringEngine(DEPTH)
    assert not engine.register_memory(memory.address, 2**40)
    assert engine.register_memory(memory.address, 4096)
    (tmp_path / "file").write_bytes(b"x" * KIB)
    fd = open_file(tmp_path / "file", direct=False)
    engine.submit_read(fd, memory.address, KIB, 0, tag=1)
    engine.submit_read(fd, memory.address + 4096, KIB, 0, tag=2)
    assert finish(engine) == {1: KIB, 2: KIB}
    engine.close()
    assert not engine.register_memory(memory.address, 4096)
    os.close(fd)


def test_registered_files_change_no_byte(engine: SsdEngine, tmp_path: Path, memory: Memory) -> None:
    """A descriptor that was forgotten and closed may be another file's number."""
    forget = engine.register_files() or (lambda _fd: None)
    numbers = set()
    for number in range(20):
        (tmp_path / f"{number}").write_bytes(b"%4d" % number * KIB)
        fd = open_file(tmp_path / f"{number}", direct=False)
        numbers.add(fd)
        engine.submit_read(fd, memory.address, 4 * KIB, 0, tag=1)
        assert finish(engine) == {1: 4 * KIB}
        assert memory.bytes[: 4 * KIB] == b"%4d" % number * KIB
        engine.submit_write(fd, memory.address + 2, 2 * KIB, KIB, tag=2)
        engine.submit_read(fd, memory.address + 8 * KIB, KIB, 0, tag=3)
        assert finish(engine) == {2: 2 * KIB, 3: KIB}
        assert (tmp_path / f"{number}").read_bytes()[KIB : 3 * KIB] == memory.bytes[2 : 2 * KIB + 2]
        forget(fd)
        os.close(fd)
    assert len(numbers) == 1
    engine.submit_read(fd, memory.address, KIB, 0, tag=1)
    assert finish(engine) == {1: -errno.EBADF}
    engine.close()
    forget(fd)


@pytest.mark.parametrize("polled", [False, True])
def test_io_uring_keeps_files_until_it_is_to_forget_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: Memory, polled: bool
) -> None:
    """As many as it has room for: others work, too."""
    monkeypatch.setattr(io_uring, "FILES_MAX", 2)
    engine = UringEngine(DEPTH, polled)
    forget = engine.register_files()
    assert forget is not None and engine.register_files() is None  # Once.
    fds = []
    for number in range(4):
        (tmp_path / f"{number}").write_bytes(b"%d" % number * KIB)
        fds.append(open_file(tmp_path / f"{number}", direct=False))
        engine.submit_read(fds[number], memory.address + number * KIB, KIB, 0, number)
    assert finish(engine) == dict.fromkeys(range(4), KIB)
    assert memory.bytes[: 4 * KIB] == b"".join(b"%d" % number * KIB for number in range(4))

    def read_all() -> list[int]:
        for number in range(4):
            engine.submit_read(fds[number], memory.address, KIB, 0, number)
        results = finish(engine)
        return [results[number] for number in range(4)]

    for fd in fds:
        os.close(fd)
    assert read_all() == [KIB, KIB, -errno.EBADF, -errno.EBADF]
    threads = [threading.Thread(target=forget, args=(fd,)) for fd in fds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_all() == [-errno.EBADF] * 4
    engine.close()
    assert engine.register_files() is None


def test_io_uring_without_registered_files_where_few_may_be_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: Memory
) -> None:
    monkeypatch.setattr(io_uring, "FILES_MAX", 1 << 22)
    engine = UringEngine(DEPTH)
    assert engine.register_files() is None
    (tmp_path / "file").write_bytes(b"x" * KIB)
    fd = open_file(tmp_path / "file", direct=False)
    engine.submit_read(fd, memory.address, KIB, 0, tag=1)
    assert finish(engine) == {1: KIB}
    engine.close()
    os.close(fd)


def test_a_polled_ring_wakes_its_thread(tmp_path: Path, memory: Memory) -> None:
    """It sleeps after 50 ms without work."""
    (tmp_path / "file").write_bytes(b"x" * KIB)
    fd = open_file(tmp_path / "file", direct=False)
    engine = make_polled(DEPTH)
    for tag in range(20):
        engine.submit_read(fd, memory.address, KIB, 0, tag)
        assert finish(engine) == {tag: KIB}
        time.sleep(0.02 * (tag % 6))
    engine.close()
    os.close(fd)


@pytest.mark.parametrize(("size", "direct"), [(10_000, False), (10_000, True), (8192, False), (8192, True)])
def test_a_read_past_the_end_gives_the_bytes_there_are(
    engine: SsdEngine, tmp_path: Path, memory: Memory, size: int, direct: bool
) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    fd = open_file(tmp_path / "file", direct)
    engine.submit_read(fd, memory.address, 16 * KIB, 0, tag=1)
    engine.submit_read(fd, memory.address + 64 * KIB, 4 * KIB, 64 * KIB, tag=2)
    assert finish(engine) == {1: size, 2: 0}
    assert memory.bytes[:size] == data
    os.close(fd)


def test_io_uring_continues_short_transfers(memory: Memory) -> None:
    """A pipe gives at most what is in it: one transfer here takes many."""
    data = os.urandom(256 * KIB)
    read_fd, write_fd = os.pipe()

    def feed() -> None:
        for at in range(0, len(data), 50_000):
            os.write(write_fd, data[at : at + 50_000])
        os.close(write_fd)

    engine = UringEngine(DEPTH)
    thread = threading.Thread(target=feed)
    thread.start()
    engine.submit_read(read_fd, memory.address, len(data), 0, tag=1)
    assert finish(engine) == {1: len(data)}
    thread.join()
    assert memory.bytes[: len(data)] == data
    engine.submit_read(read_fd, memory.address, KIB, 0, tag=2)
    assert finish(engine) == {2: 0}
    engine.close()
    os.close(read_fd)


def test_posix_continues_short_transfers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: Memory) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:1000]], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: pwritev(fd, [views[0][:777]], offset))
    data = os.urandom(16 * KIB)
    memory.bytes[: len(data)] = data
    fd = open_file(tmp_path / "file", direct=False)
    engine = PosixEngine(DEPTH)
    engine.submit_write(fd, memory.address, len(data), 512, tag=1)
    assert finish(engine) == {1: len(data)}
    engine.submit_read(fd, memory.address + 64 * KIB, len(data), 512, tag=2)
    assert finish(engine) == {2: len(data)}
    assert memory.bytes[64 * KIB : 80 * KIB] == data
    engine.close()
    os.close(fd)


def test_errors_come_back_as_results(engine: SsdEngine, tmp_path: Path, memory: Memory) -> None:
    (tmp_path / "file").write_bytes(bytes(KIB))
    read_only = os.open(tmp_path / "file", os.O_RDONLY)
    directory = os.open(tmp_path, os.O_RDONLY)
    closed = os.dup(read_only)
    os.close(closed)
    engine.submit_read(closed, memory.address, KIB, 0, tag=1)
    engine.submit_write(read_only, memory.address, KIB, 0, tag=2)
    engine.submit_read(directory, memory.address, KIB, 0, tag=3)
    engine.submit_read(read_only, memory.address, KIB, 0, tag=4)
    assert finish(engine) == {1: -errno.EBADF, 2: -errno.EBADF, 3: -errno.EISDIR, 4: KIB}
    os.close(read_only)
    os.close(directory)


def test_a_full_disk_comes_back_as_enospc(engine: SsdEngine, memory: Memory) -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    engine.submit_write(fd, memory.address, KIB, 0, tag=1)
    assert finish(engine) == {1: -errno.ENOSPC}
    os.close(fd)


def test_more_than_depth_is_refused_and_harms_nothing(engine: SsdEngine, memory: Memory) -> None:
    fd = os.open("/dev/zero", os.O_RDONLY)
    memory.bytes[:4] = b"full"
    for tag in range(DEPTH):
        engine.submit_read(fd, memory.address + tag, 1, 0, tag)
    with pytest.raises(RuntimeError, match="depth"):
        engine.submit_read(fd, memory.address, 1, 0, DEPTH)
    assert finish(engine) == dict.fromkeys(range(DEPTH), 1)
    assert memory.bytes[:4] == bytes(4)
    engine.submit_read(fd, memory.address, 1, 0, DEPTH)
    assert finish(engine) == {DEPTH: 1}
    os.close(fd)


def test_many_transfers_through_a_small_queue(engine: SsdEngine, tmp_path: Path, memory: Memory) -> None:
    data = os.urandom(1 << 20)
    (tmp_path / "file").write_bytes(data)
    fd = open_file(tmp_path / "file", direct=False)
    results: dict[int, int] = {}
    for tag in range(256):
        while engine.in_flight == DEPTH:
            results.update(engine.reap(1.0))
        engine.submit_read(fd, memory.address + tag * 4096, 4096, tag * 4096, tag)
    results.update(finish(engine))
    assert results == dict.fromkeys(range(256), 4096)
    assert memory.bytes[:] == data
    os.close(fd)


def test_reap_waits_no_longer_than_asked(engine: SsdEngine) -> None:
    start = time.monotonic()
    assert engine.reap(10.0) == []  # nothing in flight: nothing to wait for
    assert time.monotonic() - start < 5
    with pytest.raises(ValueError):
        engine.reap(-1.0)


def blocking_source(engine: SsdEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Callable[[], object]]:
    """A descriptor whose read blocks until the returned function is called, and then gives b"late"."""
    read_fd, write_fd = os.pipe()

    def let_go() -> None:
        os.write(write_fd, b"late")
        os.close(write_fd)

    if engine.name.endswith("posix"):  # preadv refuses a pipe
        monkeypatch.setattr(os, "preadv", lambda fd, views, _offset: os.readv(fd, views))
    return read_fd, let_go


def test_reap_times_out_and_later_returns_the_transfer(
    engine: SsdEngine, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, let_go = blocking_source(engine, monkeypatch)
    engine.submit_read(fd, memory.address, 4, 0, tag=8)
    start = time.monotonic()
    assert engine.reap(0.0) == []
    assert engine.reap(0.1) == []
    assert 0.09 <= time.monotonic() - start < 5
    assert engine.in_flight == 1
    threading.Timer(0.1, let_go).start()
    assert finish(engine) == {8: 4}
    assert memory.bytes[:4] == b"late"
    os.close(fd)


def test_close_waits_for_what_is_in_flight(engine: SsdEngine, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    fd, let_go = blocking_source(engine, monkeypatch)
    engine.submit_read(fd, memory.address, 4, 0, tag=8)
    threading.Timer(0.2, let_go).start()
    engine.close()
    assert memory.bytes[:4] == b"late"
    assert engine.in_flight == 0
    os.close(fd)


def test_a_closed_engine_refuses_work(engine: SsdEngine, memory: Memory) -> None:
    engine.close()
    engine.close()
    assert engine.in_flight == 0
    with pytest.raises(OSError):
        engine.submit_read(0, memory.address, KIB, 0, tag=1)
    with pytest.raises(OSError):
        engine.reap(0.0)


@pytest.mark.parametrize(("fd", "nbytes", "offset"), [(-1, 1, 0), (0, 0, 0), (0, -1, 0), (0, 1, -1)])
def test_nonsense_is_refused(engine: SsdEngine, memory: Memory, fd: int, nbytes: int, offset: int) -> None:
    for submit in (engine.submit_read, engine.submit_write):
        with pytest.raises(ValueError, match="cannot transfer"):
            submit(fd, memory.address, nbytes, offset, 1)
    assert engine.in_flight == 0


@pytest.mark.parametrize("double", [True, False], ids=["nixl double", "nixl"])
def test_engines_leave_no_thread_and_no_descriptor(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, double: bool
) -> None:
    prepare_nixl(monkeypatch, double)
    prepare_kvikio(monkeypatch)

    def count() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = count()
    for kind in (UringEngine, PosixEngine, NixlEngine, KvikioEngine):
        engine: SsdEngine = kind(DEPTH)
        fd = os.open("/dev/zero", os.O_RDONLY)
        engine.submit_read(fd, memory.address, KIB, 0, tag=1)
        engine.close()
        os.close(fd)
    names: tuple[SsdEngineName, ...] = ("auto", "posix", "io_uring", "io_uring_sqpoll", "nixl", "kvikio")
    for name in names:
        open_engine(name, DEPTH)[0].close()
    assert count() == before


def test_open_engine_says_what_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_nixl(monkeypatch, double=True)
    prepare_kvikio(monkeypatch)
    expected: dict[SsdEngineName, type] = {
        "posix": PosixEngine,
        "io_uring": UringEngine,
        "io_uring_sqpoll": UringEngine,
        "auto": UringEngine,
        "nixl": NixlEngine,
        "kvikio": KvikioEngine,
    }
    for name, kind in expected.items():
        engine, why = open_engine(name, 3)
        assert isinstance(engine, kind)
        assert engine.depth == 3
        assert f"ssd engine {engine.name}: " in why
        assert "\n" not in why
        engine.close()


def forbidden(_depth: int, polled: bool) -> UringEngine:
    raise PermissionError(errno.EPERM, "no")


def test_without_io_uring_auto_falls_back_and_io_uring_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_uring, "UringEngine", forbidden)
    engine, why = open_engine("auto", DEPTH)
    assert isinstance(engine, PosixEngine)
    assert "EPERM" in why
    engine.close()
    names: tuple[SsdEngineName, ...] = ("io_uring", "io_uring_sqpoll")
    for name in names:
        with pytest.raises(ConfigError, match=rf'ssd_engine: "{name}": .*EPERM.*auto'):
            open_engine(name, DEPTH)


@pytest.mark.parametrize("fault", ["wrong bytes", "error"])
def test_an_io_uring_that_does_not_read_is_not_chosen(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    full = os.open("/dev/full", os.O_WRONLY)

    class Broken(UringEngine):
        def submit_read(self, fd: int, addr: int, nbytes: int, offset: int, tag: int) -> None:
            if fault == "error":
                super().submit_write(full, addr, nbytes, offset, tag)
            else:
                super().submit_read(fd, addr, nbytes - 1, offset, tag)

    monkeypatch.setattr(io_uring, "UringEngine", Broken)
    engine, why = open_engine("auto", DEPTH)
    assert isinstance(engine, PosixEngine)
    os.close(full)
    assert ("ENOSPC" if fault == "error" else "wrong bytes") in why
    engine.close()
