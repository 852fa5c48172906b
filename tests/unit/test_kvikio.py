"""What bites in KvikIO, each with a test. (The contract of its engine: test_ssd_engines.py.)"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import types
from pathlib import Path

import pytest

from kvikio_double import KvikioDouble
from saria_vllm.engine import kvikio
from saria_vllm.engine.kvikio import KvikioEngine
from saria_vllm.engine.ssd_engine import open_engine
from saria_vllm.errors import ConfigError

KIB = 1024


class Memory:
    def __init__(self) -> None:
        self.bytes = mmap.mmap(-1, 256 * KIB)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> KvikioDouble:
    made = KvikioDouble()
    monkeypatch.setattr(kvikio, "load", lambda _threads: (made, "a double"))
    return made


def finish(engine: KvikioEngine) -> dict[int, int]:
    results: dict[int, int] = {}
    while engine.in_flight:
        results.update(engine.reap(1.0))
    return results


def test_a_descriptor_number_may_mean_another_file_later(double: KvikioDouble, memory: Memory, tmp_path: Path) -> None:
    engine = KvikioEngine(4)
    numbers = set()
    for name in (b"one", b"two"):
        (tmp_path / "file").unlink(missing_ok=True)
        (tmp_path / "file").write_bytes(name)
        fd = os.open(tmp_path / "file", os.O_RDONLY)
        numbers.add(fd)
        engine.submit_read(fd, memory.address, 3, 0, 1)
        engine.submit_read(fd, memory.address + 3, 2, 1, 2)
        assert double.open_files == 1  # One for both.
        assert finish(engine) == {1: 3, 2: 2}
        assert memory.bytes[:5] == name + name[1:]
        assert double.open_files == 0
        os.close(fd)
    assert len(numbers) == 1
    engine.close()


def test_a_file_stays_open_while_a_transfer_of_it_is_in_flight(double: KvikioDouble, memory: Memory) -> None:
    engine = KvikioEngine(4)
    read_fd, write_fd = os.pipe()
    engine.submit_read(read_fd, memory.address, 1, 0, 1)
    engine.submit_read(read_fd, memory.address + 1, 1, 0, 2)
    os.write(write_fd, b"a")
    assert len(engine.reap(5.0)) == 1
    assert double.open_files == 1
    os.write(write_fd, b"b")
    assert len(engine.reap(5.0)) == 1
    assert (double.open_files, double.closed_in_flight) == (0, 0)
    assert sorted(memory.bytes[:2]) == sorted(b"ab")
    engine.close()
    os.close(read_fd)
    os.close(write_fd)


def test_a_transfer_is_one_task(double: KvikioDouble, memory: Memory) -> None:
    """The other tasks of one that failed would still write into its memory."""
    engine = KvikioEngine(1)
    fd = os.open("/dev/zero", os.O_RDONLY)
    engine.submit_read(fd, memory.address, 200 * KIB, 0, 1)
    assert finish(engine) == {1: 200 * KIB}
    assert double.tasks == [(200 * KIB, 200 * KIB)]
    engine.close()
    os.close(fd)


@pytest.mark.parametrize("told", [True, False])
def test_a_count_that_is_not_whole_is_asked_of_the_kernel(
    double: KvikioDouble, memory: Memory, tmp_path: Path, told: bool
) -> None:
    double.short_is_told = told
    (tmp_path / "file").write_bytes(b"x" * 100)
    fd = os.open(tmp_path / "file", os.O_RDWR)
    engine = KvikioEngine(3)
    engine.submit_read(fd, memory.address, 100, 0, 1)
    engine.submit_read(fd, memory.address + KIB, 200, 0, 2)
    engine.submit_write(fd, memory.address + 2 * KIB, 10, 0, 3)
    assert finish(engine) == {1: 100, 2: 100, 3: 10}
    assert double.modes == ["r", "r+"]
    engine.close()
    os.close(fd)


def test_memory_of_a_gpu_that_was_not_whole_is_an_error_and_no_crash(double: KvikioDouble, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    engine = KvikioEngine(1)
    unmapped = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(unmapped))
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), 4096, 0)  # As a GPU's memory is for the kernel.
    engine.submit_read(fd, address, 100, 0, 1)
    assert finish(engine) == {1: -14}
    engine.close()
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), 4096, 3)
    os.close(fd)


def test_memory_is_registered_once_and_given_back(double: KvikioDouble, memory: Memory) -> None:
    engine = KvikioEngine(1)
    assert engine.register_memory(memory.address, 4096)
    assert not engine.register_memory(memory.address, 4096)
    assert double.registered == [memory.address]
    engine.close()
    engine.close()
    assert double.registered == []
    assert not engine.register_memory(memory.address, 4096)
    double.refuses_memory = True
    with_host_memory = KvikioEngine(1)
    assert not with_host_memory.register_memory(memory.address, 4096)
    with_host_memory.close()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """KvikIO, as far as `load` sees it, on a machine with a GPU."""
    settings = {"num_threads": 1}
    defaults = types.ModuleType("kvikio.defaults")
    defaults.__dict__.update(
        get=settings.__getitem__, set=settings.update, is_compat_mode_preferred=lambda: False, settings=settings
    )
    top = types.ModuleType("kvikio")
    top.__dict__.update(defaults=defaults, __version__="26.10.00", __path__=[])
    monkeypatch.setitem(sys.modules, "kvikio", top)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", defaults)
    monkeypatch.setattr(kvikio, "has_device", lambda: True)
    return types.SimpleNamespace(settings=settings, defaults=defaults)


def test_kvikio_has_one_thread_unless_told(module: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_engine("kvikio", 4)[1] == "ssd engine kvikio: configured (KvikIO 26.10.00, GDS)"
    assert module.settings == {"num_threads": 4}
    open_engine("kvikio", 2)
    assert module.settings == {"num_threads": 4}
    monkeypatch.setattr(module.defaults, "is_compat_mode_preferred", lambda: True)
    assert open_engine("kvikio", 4000)[1].endswith("without GDS)")
    assert module.settings == {"num_threads": kvikio.THREADS_MAX}


def test_without_a_gpu_kvikio_is_refused_and_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvikio, "has_device", lambda: False)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(ConfigError, match=r"ssd_engine.*kvikio.*no GPU answers.*auto"):
        open_engine("kvikio", 4)


def test_kvikio_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvikio, "has_device", lambda: True)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(ConfigError, match=r"cannot be imported.*pip install kvikio-cu13"):
        open_engine("kvikio", 4)
