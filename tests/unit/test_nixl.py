"""What bites in NIXL, each with a test. (The contract of its engine: test_ssd_engines.py.)"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import time
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from nixl_double import NixlDouble
from saria_vllm.engine import nixl
from saria_vllm.engine.nixl import NixlEngine
from saria_vllm.engine.ssd_engine import open_engine
from saria_vllm.errors import ConfigError

KIB = 1024


class Memory:
    def __init__(self, nbytes: int) -> None:
        self.bytes = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))


@pytest.fixture
def memory() -> Memory:
    return Memory(256 * KIB)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> NixlDouble:
    """In NIXL's place, on a machine without a GPU."""
    made = NixlDouble()
    monkeypatch.setattr(nixl, "load", lambda: (made, "1.5.0"))
    monkeypatch.setattr(nixl, "has_device", lambda: False)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(fd, bytes(range(256)) * 256, 0)
    yield fd
    os.close(fd)


def finish(engine: NixlEngine) -> dict[int, int]:
    results: dict[int, int] = {}
    while engine.in_flight:
        results.update(engine.reap(1.0))
    return results


def real_api() -> Any:
    try:
        return nixl.load()[0]
    except ConfigError as error:
        pytest.skip(str(error))


def without_io_uring(api: Any) -> Any:
    class Agent(api.nixl_agent):  # type: ignore[misc]
        def create_backend(self, plugin: str, params: dict[str, str]) -> None:
            if "use_uring" in params:
                raise RuntimeError("forbidden")
            super().create_backend(plugin, params)

    return types.SimpleNamespace(nixl_agent=Agent, nixl_agent_config=api.nixl_agent_config)


# 1. A handle is never released while in flight.


def test_no_handle_is_released_in_flight(double: NixlDouble, memory: Memory) -> None:
    engine = NixlEngine(4)
    pipes = [os.pipe() for _ in range(3)]
    for tag, (read_fd, _) in enumerate(pipes):
        engine.submit_read(read_fd, memory.address + tag, 1, 0, tag)
    assert engine.reap(0.02) == []
    os.write(pipes[1][1], b"b")
    assert engine.reap(5.0) == [(1, 1)]
    threading.Timer(0.1, lambda: [os.write(write_fd, b"a") for _, write_fd in pipes]).start()
    engine.close()
    assert memory.bytes[:3] == b"aba"
    assert double.released_in_flight == 0
    for pair in pipes:
        for fd in pair:
            os.close(fd)
    assert double.ended == len(double.agents) == 1


def test_the_double_notices_a_handle_dropped_in_flight(double: NixlDouble, memory: Memory) -> None:
    """Else the test above would prove nothing."""
    engine = NixlEngine(1)
    read_fd, write_fd = os.pipe()
    engine.submit_read(read_fd, memory.address, 1, 0, 0)
    thread = engine._flights[0].handle.thread
    engine._flights.clear()
    assert double.released_in_flight == 1
    os.write(write_fd, b"a")
    thread.join()
    engine.close()
    os.close(read_fd)
    os.close(write_fd)


def test_what_nixl_refuses_to_start_is_done_without_it(double: NixlDouble, memory: Memory, file: int) -> None:
    engine = NixlEngine(4)
    double.refuses = True
    engine.submit_read(file, memory.address, KIB, 256, tag=1)
    engine.submit_write(file, memory.address, KIB, 1 << 20, tag=2)
    assert finish(engine) == {1: KIB, 2: KIB}
    assert memory.bytes[:256] == bytes(range(256))
    engine.close()


def test_handles_of_failed_transfers_stay_a_while(
    double: NixlDouble, memory: Memory, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL may have told the failure of one transfer to another that is in flight."""
    monkeypatch.setattr(nixl, "KEPT_MAX", 3)
    engine = NixlEngine(4)
    before = double.released
    for tag in range(5):
        engine.submit_read(file, memory.address, KIB, 1 << 20, tag)
        assert finish(engine) == {tag: 0}
    assert double.released == before + 4  # The test at the start left two, and three may stay.
    engine.close()
    assert double.released == before + 7
    assert double.released_in_flight == 0


# 2. NIXL's POSIX needs 1.5.0.


def test_without_nixl_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match=r"ssd_engine: \"nixl\": NIXL cannot be imported.*nixl>=1.5.*auto"):
        open_engine("nixl", 2)


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("0.10.1", False), ("1.4.2", False), ("1.5.0", True), ("1.5.1", True), ("1.10.0", True), ("2.0", True),
        (None, False),
    ],
)  # fmt: skip
def test_versions_before_1_5_0_are_refused(
    monkeypatch: pytest.MonkeyPatch, version: str | None, accepted: bool
) -> None:
    api = types.ModuleType("nixl_cu12._api")
    package = types.ModuleType("nixl")
    package._api = api  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl", package)

    def installed(name: str) -> str:
        assert name == "nixl_cu12"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    if accepted:
        assert nixl.load() == (api, version)
    else:
        with pytest.raises(
            ConfigError, match=rf"NIXL {version or 'of unknown version'} is installed, 1\.5\.0 or newer"
        ):
            nixl.load()


# 3. A short read is not whole, and a failed transfer harms no other.


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"short_is_whole": True}, "past the end of a file was whole"),
        ({"failure_stays": True}, "after a failed one"),
        ({"wrong_bytes": True}, "a read failed"),
        ({"refuses": True}, "a read failed"),
        ({"queues": ()}, "NIXL_ERR_BACKEND"),
    ],
)
def test_a_nixl_that_fails_its_test_is_refused(double: NixlDouble, fault: dict[str, Any], problem: str) -> None:
    for name, value in fault.items():
        setattr(double, name, value)
    with pytest.raises(ConfigError, match=f"POSIX over io_uring: .*{problem}.*; POSIX over libaio: .*{problem}.*auto"):
        open_engine("nixl", 2)
    assert double.ended == len(double.agents) == 2
    assert double.released_in_flight == 0


def test_a_transfer_that_does_not_end_at_the_start_is_refused_and_kept(
    double: NixlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "PROBE_S", 0.05)
    stuck: list[Any] = []
    monkeypatch.setattr(nixl, "_stuck", stuck)
    go = threading.Event()
    pread = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: (go.wait(), pread(*args))[1])
    with pytest.raises(ConfigError, match="does not end"):
        open_engine("nixl", 2)
    assert double.released_in_flight == 0
    go.set()
    ((_, flight, _),) = stuck
    flight.handle.thread.join()


def test_libaio_stands_in_for_io_uring(double: NixlDouble) -> None:
    double.queues = ("use_aio",)
    engine, why = open_engine("nixl", 2)
    assert why == "ssd engine nixl: configured (POSIX over libaio, NIXL 1.5.0)"
    engine.close()


@pytest.mark.parametrize("which", ["double", "NIXL over io_uring", "NIXL over libaio"])
def test_failed_transfers_say_why_and_harm_no_other(
    monkeypatch: pytest.MonkeyPatch, memory: Memory, file: int, which: str
) -> None:
    queue = "libaio" if which.endswith("libaio") else "io_uring"
    api: Any = NixlDouble() if which == "double" else real_api()
    if queue == "libaio":
        api = without_io_uring(api)
    monkeypatch.setattr(nixl, "load", lambda: (api, "1.5.0"))
    monkeypatch.setattr(nixl, "has_device", lambda: False)
    engine = NixlEngine(8)
    assert engine.backend == f"POSIX over {queue}, NIXL 1.5.0"
    full, closed = os.open("/dev/full", os.O_WRONLY), os.dup(file)
    os.close(closed)
    for _ in range(20):
        memory.bytes[:] = bytes(256 * KIB)
        engine.submit_read(file, memory.address, 128 * KIB, 0, tag=1)
        engine.submit_write(full, memory.address, KIB, 0, tag=2)
        engine.submit_read(file, memory.address + 128 * KIB, 4 * KIB, 256, tag=3)
        engine.submit_read(closed, memory.address, KIB, 0, tag=4)
        engine.submit_read(file, memory.address + 132 * KIB, KIB, 1 << 20, tag=5)
        engine.submit_read(file, memory.address + 136 * KIB, KIB, 512, tag=6)
        assert finish(engine) == {1: 64 * KIB, 2: -errno.ENOSPC, 3: 4 * KIB, 4: -errno.EBADF, 5: 0, 6: KIB}
        assert memory.bytes[: 64 * KIB] == bytes(range(256)) * 256
        assert memory.bytes[128 * KIB : 132 * KIB] == bytes(range(256)) * 16
        assert memory.bytes[136 * KIB : 137 * KIB] == bytes(range(256)) * 4
    engine.close()
    os.close(full)


# 4. No GPU backend without a GPU.


def test_a_machine_without_libcuda_has_no_device_and_says_so_soon() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        began = time.monotonic()
        assert not nixl.has_device.__wrapped__()
        assert time.monotonic() - began < nixl.PROBE_S
    else:
        pytest.skip("libcuda is installed here")


def test_a_device_probe_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    probe = f"import os; open({str(mark)!r}, 'w').write(str(os.getpid()))\nwhile True: pass"
    monkeypatch.setattr(nixl, "_DEVICE_PROBE", probe)
    monkeypatch.setattr(nixl, "PROBE_S", 2.0)
    assert not nixl.has_device.__wrapped__()
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


@pytest.mark.parametrize(
    ("plugins", "chosen"),
    [
        (("GDS_MT", "GDS", "POSIX"), "GDS_MT"),
        (("GDS", "POSIX"), "GDS"),
        (("POSIX",), "POSIX over io_uring"),
    ],
)
def test_with_a_device_gds_comes_first(
    double: NixlDouble, monkeypatch: pytest.MonkeyPatch, memory: Memory, file: int, plugins: Any, chosen: str
) -> None:
    double.plugins = plugins
    monkeypatch.setattr(nixl, "has_device", lambda: True)
    engine, why = open_engine("nixl", 2)
    assert f"({chosen}, NIXL" in why
    engine.submit_read(file, memory.address, KIB, 0, tag=1)
    assert engine.reap(5.0) == [(1, KIB)]
    registered = double.agents[-1].registered
    assert registered["FILE"] == []
    assert len(registered["DRAM"]) == (1 if chosen.startswith("POSIX") else 0)
    engine.close()
    assert double.ended == len(double.agents)


@pytest.mark.parametrize(("device", "kind"), [(0, "VRAM"), (-1, "DRAM")])
def test_gds_registers_memory_once_and_for_all_transfers_within(
    double: NixlDouble, monkeypatch: pytest.MonkeyPatch, memory: Memory, file: int, device: int, kind: str
) -> None:
    double.plugins = ("GDS_MT",)
    monkeypatch.setattr(nixl, "has_device", lambda: True)
    engine = NixlEngine(4)
    double.kinds.clear()
    where = memory.address + 8 * KIB, 16 * KIB
    assert engine.register_memory(*where, device)
    assert not engine.register_memory(memory.address, KIB, device)
    assert double.agents[-1].registered[kind] == [(*where, 0)]
    engine.submit_read(file, where[0], 16 * KIB, 0, tag=1)
    engine.submit_read(file, where[0] + 15 * KIB, KIB, 0, tag=2)
    engine.submit_read(file, memory.address, KIB, 0, tag=3)
    engine.submit_read(file, where[0] + 15 * KIB, 2 * KIB, 0, tag=4)
    assert finish(engine) == {1: 16 * KIB, 2: KIB, 3: KIB, 4: 2 * KIB}
    assert double.kinds == [kind, kind, "DRAM", "DRAM"]
    assert double.agents[-1].registered[kind] == [(*where, 0)]
    engine.close()
    assert not engine.register_memory(memory.address, KIB, device)


def test_posix_registers_nothing_more_than_all_memory(double: NixlDouble, memory: Memory) -> None:
    """Ranges that overlap are not found by NIXL."""
    engine = NixlEngine(1)
    assert not engine.register_memory(memory.address, KIB)
    assert len(double.agents[-1].registered["DRAM"]) == 1
    engine.close()


def test_only_the_plugins_asked_for_are_tried(double: NixlDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    double.plugins = ("GDS_MT", "GDS", "POSIX")
    monkeypatch.setattr(nixl, "has_device", lambda: True)
    engine = NixlEngine(1, ("GDS",))
    assert engine.backend.startswith("GDS,")
    engine.close()
    double.plugins = ("POSIX",)
    with pytest.raises(ConfigError, match="GDS_MT"):
        NixlEngine(1, ("GDS_MT",))


def test_without_a_device_gds_is_not_touched(double: NixlDouble) -> None:
    double.plugins = ("GDS_MT", "GDS", "POSIX")
    NixlEngine(2).close()
    assert [agent.plugin for agent in double.agents] == ["POSIX"]


# Registrations.


def test_a_file_is_registered_while_it_is_in_use(double: NixlDouble, memory: Memory) -> None:
    engine = NixlEngine(4)
    read_fd, write_fd = os.pipe()
    registered = double.agents[-1].registered
    for tag in range(3):
        engine.submit_read(read_fd, memory.address, 1, 0, tag)
    assert [device for _, _, device in registered["FILE"]] == [read_fd]
    os.write(write_fd, b"a")
    assert len(engine.reap(5.0)) == 1
    assert [device for _, _, device in registered["FILE"]] == [read_fd]
    os.write(write_fd, b"bc")
    finish(engine)
    assert registered["FILE"] == []
    engine.close()
    os.close(read_fd)
    os.close(write_fd)


# The double.


def outcomes(api: Any, directory: Path, memory: Memory) -> list[str]:
    """What an agent answers to what we do with it, and to what we avoid."""
    agent = api.nixl_agent(f"test-{id(api)}", api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("POSIX", {"use_uring": "true", "ios_pool_size": "64", "kernel_queue_size": "16"})
    (directory / "file").write_bytes(bytes(range(250)) * 40)
    file, read_only = os.open(directory / "file", os.O_RDWR), os.open(directory / "file", os.O_RDONLY)
    full, unknown = os.open("/dev/full", os.O_WRONLY), os.dup(file)
    pipe = os.pipe()
    found: list[str] = []

    def register(where: tuple[int, int, int], kind: str) -> Any:
        return agent.register_memory([(*where, "")], kind, ["POSIX"])

    def start(operation: str, fd: int, nbytes: int, offset: int, at: int = 0) -> Any:
        local = agent.get_xfer_descs([(memory.address + at, nbytes, 0)], "DRAM")
        remote = agent.get_xfer_descs([(offset, nbytes, fd)], "FILE")
        handle = agent.initialize_xfer(operation, local, remote, agent_name, backends=["POSIX"])
        found.append(agent.transfer(handle))
        return handle

    def state(handle: Any) -> str:
        try:
            return str(agent.check_xfer_state(handle))
        except Exception:
            return "raises"

    def end(handle: Any) -> None:
        while (now := state(handle)) == "PROC":
            time.sleep(0.001)
        found.append(now)
        agent.release_xfer_handle(handle)

    agent_name = f"test-{id(api)}"
    try:
        start("READ", file, KIB, 0)
    except Exception:
        found.append("not registered")
    everywhere = register((0, nixl._MEMORY_END, 0), "DRAM")
    files = [register((0, nixl._FILE_END, fd), "FILE") for fd in (file, read_only, full, pipe[0])]
    twice = register((0, nixl._FILE_END, file), "FILE")
    agent.deregister_memory(twice, ["POSIX"])
    end(start("READ", file, KIB, 0))
    found.append(str(memory.bytes[:KIB] == (bytes(range(250)) * 5)[:KIB]))
    end(start("READ", file, 16 * KIB, 0))  # short
    end(start("READ", file, KIB, 1 << 20))  # past the end
    end(start("WRITE", file, KIB, 0, KIB))
    found.append(str(os.pread(file, KIB, 0) == memory.bytes[KIB : 2 * KIB]))
    end(start("WRITE", read_only, KIB, 0))
    waiting, failing = start("READ", pipe[0], 4, 0), start("WRITE", full, KIB, 0)
    end(failing)
    found.append(state(waiting))
    os.write(pipe[1], b"late")
    end(waiting)
    found.append(str(memory.bytes[:4]))
    agent.deregister_memory(files[0], ["POSIX"])
    for fd in (file, unknown):
        try:
            start("READ", fd, KIB, 0)
        except Exception:
            found.append("not registered")
    agent.deregister_memory(everywhere, ["POSIX"])
    for fd in (file, read_only, full, unknown, *pipe):
        os.close(fd)
    return found


def test_the_double_answers_as_nixl_does(tmp_path: Path, memory: Memory) -> None:
    assert outcomes(real_api(), tmp_path, memory) == outcomes(NixlDouble(), tmp_path, Memory(256 * KIB))


def test_the_real_one_is_opened_over_io_uring_and_passes_its_test() -> None:
    real_api()
    engine, why = open_engine("nixl", 2)
    assert why.startswith("ssd engine nixl: configured (")
    engine.close()
