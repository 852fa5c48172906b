"""Engines in processes of their own on one directory: what is read of a killed one, who comes after it, and the cap."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from saria_vllm.storage.foreign import OthersFiles
from saria_vllm.storage.namespace import EngineDirectory, namespace_name, store_id
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import Extent, OpenSsd
from store_bench import SEGMENT_BYTES, SHAPES, fill, is_right

PARTS = {"model": "a"}
NAME = namespace_name(PARTS)
RECORDS = 4


def open_store(directory: EngineDirectory) -> SegmentStore:
    opened = OpenSsd(directory.directories, directory.generation, SEGMENT_BYTES, 100)
    return SegmentStore(opened, 0, SHAPES, store_id(NAME, directory.index, 0))


class Engine:
    """One in this process."""

    def __init__(self, path: Path) -> None:
        self.directory = EngineDirectory.claim((str(path),), NAME, PARTS, 0)
        self.store = open_store(self.directory)
        self.recovered = {chunk.key: chunk.extent for chunk in self.store.recover().items}
        self.files = OthersFiles((str(path),), NAME, self.directory.index, 1, SHAPES)

    def look(self) -> dict[bytes, Extent]:
        return {chunk.key: chunk.extent for chunk in self.files.look()[0]}

    def close(self) -> None:
        self.store.close()
        self.directory.release()


class Process:
    """One that answers a line with a line: "fill 3", "retire 3", "reset 0"."""

    def __init__(self, path: Path, script: str = "", *arguments: str) -> None:
        command = [sys.executable, script or __file__, str(path), *arguments]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.index = int(self.read())

    def read(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline()

    def do(self, what: str, number: int) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{what} {number}\n")
        self.child.stdin.flush()
        assert self.read() == "done\n"

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.communicate()


def serve(path: Path) -> None:
    engine = Engine(path)
    print(engine.directory.index, flush=True)
    for line in sys.stdin:
        what, number = line.split()
        match what:
            case "fill":
                fill(engine.store, int(number))
            case "begin":
                fill(engine.store, int(number), count=RECORDS - 1)
            case "retire":
                engine.store.retire(0, int(number))
            case "reset":
                engine.store.set_generation(engine.directory.bump_generation())
        print("done", flush=True)


def grow(path: Path, seed: int) -> None:
    """Take and retire segments as fast as can be, under a capacity that is shared."""
    from test_sharing import Engine as Growing

    rng = random.Random(seed)
    engine = Growing((str(path),), {"model": "xyz"[seed % 3]})
    print(engine.directory.index, flush=True)
    while True:
        engine.settle(late=rng.random() < 0.5)
        for _ in range(3):
            engine.step(rng.randrange(12))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        grow(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        serve(Path(sys.argv[1]))


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Process]]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    processes: list[Process] = []

    def start(*arguments: str) -> Process:
        processes.append(Process(tmp_path, "", *arguments))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], Engine]]:
    engines: list[Engine] = []

    def make() -> Engine:
        engines.append(Engine(tmp_path))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


Start, Make = Callable[..., Process], Callable[[], Engine]


def all_right(engine: Engine, found: dict[bytes, Extent]) -> bool:
    return all(is_right(engine.store, 0, extent, key) for key, extent in found.items())


def test_one_stores_and_another_loads_until_it_is_retired(start: Start, make: Make) -> None:
    theirs, ours = start(), make()
    assert (theirs.index, ours.directory.index) == (0, 1)
    theirs.do("fill", 0)
    theirs.do("fill", 1)
    found = ours.look()
    assert len(found) == 2 * RECORDS and all_right(ours, found)
    fd, offset, _ = ours.store.read_target(0, found[b"0-0-0"])
    theirs.do("retire", 0)
    assert os.fstat(fd).st_nlink == 0 and offset
    ours.store.release(fd)
    assert ours.files.look() == ([], [(1, 0)], False)
    assert all_right(ours, {key: extent for key, extent in found.items() if extent.segment == 1})


def test_a_killed_engine_is_read_at_once_and_its_successor_has_all_it_had(start: Start, make: Make) -> None:
    theirs, ours = start(), make()
    theirs.do("fill", 0)
    theirs.do("begin", 1)
    theirs.kill()
    assert len(ours.look()) == RECORDS
    heir = make()
    assert heir.directory.index == 0, "the lease went with its holder"
    assert len(heir.recovered) == 2 * RECORDS - 1 and all_right(heir, heir.recovered)
    found = ours.look()
    assert {extent.segment for extent in found.values()} == {1}, "its successor sealed it"
    assert all_right(ours, found)


def test_what_a_process_stored_after_its_reset_is_nobodys(start: Start, make: Make) -> None:
    theirs, ours = start(), make()
    theirs.do("reset", 0)
    theirs.do("fill", 0)
    assert ours.look() == {}
    theirs.kill()
    assert ours.look() == {}
    heir = make()
    assert (heir.directory.index, heir.recovered) == (0, {})
    assert ours.look() == {}


def test_at_their_cap_engines_never_exceed_it_together(start: Start, tmp_path: Path) -> None:
    from test_sharing import CAPACITY, SEGMENT

    rng, most = random.Random(1), 0
    running = [start(str(seed)) for seed in range(2)]
    until, samples = time.monotonic() + 3, 0
    while time.monotonic() < until or samples < 50:
        samples += 1
        for process in running:
            process.child.send_signal(signal.SIGSTOP)
            os.waitpid(process.child.pid, os.WUNTRACED)
        total = SEGMENT * sum(name.startswith("seg-") for _, _, names in os.walk(tmp_path) for name in names)
        for process in running:
            process.child.send_signal(signal.SIGCONT)
        assert total <= CAPACITY
        most = max(most, total)
        if rng.random() < 0.01:
            running.pop(0).kill()
            running.append(start(str(samples)))
    assert most > CAPACITY // 2
