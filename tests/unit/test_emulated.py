"""The model of drives and ingress, and what puts it in the way of transfers, in made-up time."""

from __future__ import annotations

import random
import tempfile
from ctypes import addressof, c_char, create_string_buffer

import numpy as np
import pytest

from saria_vllm import _native
from saria_vllm.config import ConfigError
from saria_vllm.engine.emulated import Contention, EmulatedEngine, EmulatedMachine, EmulatedMap, Emulation
from saria_vllm.engine.posix import PosixEngine

GB, MIB = 10**9, 1 << 20
READS = 200
READ_BYTES = 10 * 10**6


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)


def read_rate(contention: Contention, dram_rate: float | None, drives: int = 1, seconds: float = 2.0) -> float:
    """What drives read in all, in steady state, beside copies at a rate; none: copies without a pause."""
    for drive in range(drives):
        for _ in range(10_000):
            contention.read(drive, MIB, 0.0)
    now, ended, began, piece = 0.0, 0, None, 8 * MIB
    copied = 0.0
    while now < seconds:
        if dram_rate != 0.0 and (dram_rate is None or copied <= dram_rate * now):
            took = contention.copy_s(piece, now)
            contention.copied(piece, now, now + took)
            now, copied = now + took, copied + piece
        else:
            now += 0.001
        taken = sum(contention.take_ended(drive, now) for drive in range(drives))
        if began is not None:
            ended += taken
        elif now >= seconds / 2:
            began = now
    assert began is not None
    return ended * MIB / (now - began)


@pytest.mark.parametrize(("ssd", "drives"), [(0.25, 1), (0.5, 1), (0.5, 2), (1.5, 2)])
def test_the_model(ssd: float, drives: int) -> None:
    def make() -> Contention:
        return Contention(GB, [ssd * GB / drives] * drives)

    most = min(ssd, 1.0)
    for dram_rate, expected in [
        (0.0, most),
        (None, most / 2),
        (0.3 * GB, min(ssd, 0.7)),
        (0.6 * GB, max(min(ssd, 0.4), most / 2)),
    ]:
        assert read_rate(make(), dram_rate, drives) == pytest.approx(expected * GB, rel=0.03), dram_rate


def test_a_piece_gets_what_ingress_is_left() -> None:
    contention = Contention(GB, [0.4 * GB, 0.2 * GB])
    assert contention.copy_s(GB, 0.0) == 1
    contention.read(1, GB, 0.0)
    assert contention.copy_s(GB, 0.0) == pytest.approx(1 / 0.9)
    contention.read(0, GB, 0.0)
    assert contention.copy_s(GB, 0.0) == pytest.approx(1 / 0.7)
    assert contention.copy_s(GB, 100.0) == 1


def test_reads_of_a_drive_end_in_order_at_its_rate_and_none_is_lost() -> None:
    contention = Contention(GB, [0.5 * GB, 0.25 * GB])
    for _ in range(10):
        contention.read(0, 5 * 10**6, 0.0)
        contention.read(1, 5 * 10**6, 0.0)
    assert contention.take_ended(0, 0.0099) == 0
    assert contention.take_ended(0, 0.0101) == 1
    assert contention.next_s() <= contention.step_s
    assert (contention.take_ended(0, 0.0501), contention.take_ended(1, 0.0501)) == (4, 2)
    assert (contention.take_ended(0, 1e3), contention.take_ended(1, 1e3)) == (5, 8)


def test_an_unpaced_reload_of_half_and_half_takes_what_the_issue_says() -> None:
    """At B = I / 2: 1.33, where one tier after the other takes 1.5 and the ideal is 1."""
    contention, copied, now = Contention(GB, [0.5 * GB]), 0, 0.0
    for _ in range(500):
        contention.read(0, 10**6, 0.0)
    while copied < 0.5 * GB:
        took = contention.copy_s(4 * 10**6, now)
        contention.copied(4 * 10**6, now, now + took)
        now, copied = now + took, copied + 4 * 10**6
    ended = contention.take_ended(0, now)
    while ended < 500:
        now += 0.001
        ended += contention.take_ended(0, now)
    assert now == pytest.approx(1.333, rel=0.02)


def test_an_engine_tells_each_read_when_the_drive_has_read_it() -> None:
    rng, clock = random.Random(1), Clock()
    emulation = Emulation(Contention(GB, [MIB / 0.010]), clock, clock.sleep)
    engine = EmulatedEngine(PosixEngine(8), emulation, 0)
    data = rng.randbytes(8 * MIB)
    memory = create_string_buffer(8 * MIB)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        began, ends = clock.now, {}
        for tag in range(8):
            engine.submit_read(file.fileno(), addressof(memory) + tag * MIB, MIB, tag * MIB, tag)
        with pytest.raises(RuntimeError):
            engine.submit_read(file.fileno(), addressof(memory), MIB, 0, 9)
        with pytest.raises(RuntimeError):
            engine.submit_write(file.fileno(), addressof(memory), MIB, 0, 9)
        assert engine.reap(0.0) == []
        while engine.in_flight:
            for tag, result in engine.reap(0.004):
                assert result == MIB
                ends[tag] = clock.now - began
        assert list(ends) == list(range(8))
        for tag, seconds in ends.items():
            assert 0.010 * (tag + 1) <= seconds + 1e-4 < 0.010 * (tag + 1) + 0.006
        assert memory.raw == data
        engine.submit_read(file.fileno(), addressof(memory), 4096, 8 * MIB, 77)  # Behind the end: a short read.
        engine.submit_write(file.fileno(), addressof(memory), 4096, 0, 78)
        found = []
        while engine.in_flight:
            found += engine.reap(1.0)
        assert sorted(found) == [(77, 0), (78, 4096)]
    engine.close()


def test_a_map_copies_right_and_takes_its_time() -> None:
    clock = Clock()
    emulation = Emulation(Contention(MIB, []), clock, clock.sleep)
    pages, record = np.zeros((4, 4096), np.uint8), bytearray(random.Random(2).randbytes(8192))
    plain = _native.PageMap([pages.ctypes.data], [4096], [4096], 4)
    slow = EmulatedMap(plain, emulation)
    address = addressof(c_char.from_buffer(record))
    slow.scatter_many([address], [[2, 1]])
    assert clock.now == pytest.approx(100.0 + 8192 / MIB)
    assert pages[2].tobytes() + pages[1].tobytes() == bytes(record)
    with pytest.raises(IndexError):
        slow.scatter_many([address], [[2, 9]])
    assert slow.block_bytes == 4096


@pytest.mark.parametrize(
    ("text", "drives", "ingress", "rates"),
    [
        ("800MB/s,200MB/s", 1, 800e6, (200e6,)),
        ("800MB/s, 200MB/s", 3, 800e6, (200e6, 200e6, 200e6)),
        ("1GB/s,200MB/s,100MB/s", 3, 1e9, (200e6, 100e6, 100e6)),
        ("1GB/s,200MB/s,100MB/s", 1, 1e9, (200e6,)),
        ("1GB/s", 2, 1e9, (1e9, 1e9)),
        ("1GB/s,100MB/s", 0, 1e9, (100e6,)),
    ],
)
def test_what_the_environment_says_of_a_machine(
    text: str, drives: int, ingress: float, rates: tuple[float, ...]
) -> None:
    contention = EmulatedMachine.of(text, drives)._emulation._contention
    assert (contention._ingress, contention._rates) == (ingress, rates)


@pytest.mark.parametrize("text", ["", "1", "1GB", "fast", "1GB/s,", "1GB/s;200MB/s", "1GB/s,10KB/s", "-1GB/s"])
def test_what_the_environment_may_not_say(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^SARIA_EMULATED_RATES: .* is not a rate of at least 1MB/s with a unit"):
        EmulatedMachine.of(text, 1)


def test_engines_of_a_machine_are_of_its_drives_in_turn() -> None:
    machine = EmulatedMachine(1e9, [1e8, 2e8])
    engines = [machine.open_engine("posix", 4) for _ in range(4)]
    assert [engine._drive for engine, _ in engines if isinstance(engine, EmulatedEngine)] == [0, 1, 0, 1]
    assert all(note.endswith("; emulated rate") for _, note in engines)
    for engine, _ in engines:
        engine.close()
