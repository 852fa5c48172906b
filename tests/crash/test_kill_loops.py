"""Engines that are killed while they store and load, again and again, over one directory. What comes back is exact.

The rounds run in a process of their own without threads, which forks the engines: `python test_kill_loops.py WHAT ...`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import disk_states
from disk_states import opened, right_keys, write
from doubles import Rig, from_ssd, whose
from saria_vllm.storage.namespace import EngineDirectory, namespace_name, store_id
from saria_vllm.types import Extent, GroupShape, PersistItem

NAMESPACE = namespace_name({"model": "m"})
SHAPE = GroupShape(0, 16, 1, 4096)
RECORDS, SEGMENTS_MAX = 8, 12
BATCH = 16


class Engine:
    """What an engine has: a leased directory, and an executor over it whose loads are checked."""

    def __init__(self, path: Path, name: str, blocks: int = 64) -> None:
        self.claimed = EngineDirectory.claim([str(path)], NAMESPACE, {}, 0)
        self.directory = Path(self.claimed.directories[0])
        self.generation = self.claimed.generation
        self.rig = Rig(
            self.directory, name, (SHAPE,), {0: (4096,)}, blocks, segment_records=RECORDS, segments_max=SEGMENTS_MAX,
            slabs=1, directories=(self.directory,), store_id=store_id(NAMESPACE, self.claimed.index, 0),
        )  # fmt: skip
        opened = self.rig.open(self.generation)
        assert not opened.problem, opened.problem
        self.found = opened.found.items
        self.next_segment = opened.next_segment

    def check(self, chunks: dict[Extent, bytes]) -> dict[str, list[Extent]]:
        """Load these. What is loaded must be exact; returns which were, and which missed."""
        ends: dict[str, list[Extent]] = {"loaded": [], "missed": []}
        rest = list(chunks.items())
        while rest:
            some, rest = rest[:BATCH], rest[BATCH:]
            for n in range(len(some)):
                self.rig.fill(0, b"foreign", (n,))
            items = [from_ssd(0, (n,), extent, key) for n, (extent, key) in enumerate(some)]
            state = self.rig.loaded(self.rig.load(*items))
            for n, (extent, key) in enumerate(some):
                if n in state.failed:
                    ends["missed"].append(extent)
                    continue
                got = self.rig.hbm[0].read((n,))
                generations = (self.generation, self.generation - 1)
                assert self.rig.is_at(0, key, (n,), self.generation), (key, whose(got, [key], generations))
                ends["loaded"].append(extent)
        return ends

    def close(self) -> None:
        self.rig.executor.close()
        self.claimed.release()


def run(path: Path, name: str, seed: int, say: Callable[[dict[str, object]], None]) -> None:
    """Store, load, retire and now and then reset, until killed. Says what has ended, before it relies on it."""
    engine, rng = Engine(path, name), random.Random(seed)
    say({"engine": engine.claimed.index})
    there = {chunk.extent: chunk.key for chunk in engine.found}
    segment = engine.next_segment
    while True:
        for old in sorted({extent.segment for extent in there})[: 4 - SEGMENTS_MAX]:
            say({"retired": old})
            engine.rig.executor.retire(0, old)
            there = {extent: key for extent, key in there.items() if extent.segment != old}
        extents = [Extent(0, segment + n // RECORDS, n % RECORDS) for n in range(BATCH)]
        segment += BATCH // RECORDS
        keys = [b"%d:%d:%d" % (seed, *extent[1:]) for extent in extents]
        for n, key in enumerate(keys):
            engine.rig.write_slot(0, key, engine.rig.slot(0, n), engine.generation)
        job = engine.rig.write(*(PersistItem(0, engine.rig.slot(0, n), extents[n], keys[n], b"") for n in range(BATCH)))
        some = dict(rng.sample(sorted(there.items()), min(len(there), BATCH)))
        if set(engine.check(some)["loaded"]) != set(some):
            raise AssertionError("a record that was there is not")
        assert not engine.rig.result(job).failed
        there.update(zip(extents, keys, strict=True))
        say({"stored": [[*extent, key.decode()] for extent, key in zip(extents, keys, strict=True)]})
        if rng.random() < 0.02:
            say({"reset": "begun"})
            engine.generation = engine.claimed.bump_generation()
            say({"reset": "done"})
            engine.rig.executor.set_generation(engine.generation)
            for old in {extent.segment for extent in there}:
                engine.rig.executor.retire(0, old)
            there = {}


def look(path: Path, name: str, expected: dict[int, list[dict[str, object]]]) -> dict[str, int]:
    """Reopen every engine's directory: what is found loads exactly, what was said to be stored is found."""
    counts = {"loaded": 0, "missed": 0, "found": 0}
    engines = [Engine(path, name) for _ in range(len(expected) or 1)]
    for engine in engines:
        found = {chunk.extent: chunk.key for chunk in engine.found}
        said = expected.get(engine.claimed.index, [])
        stored = {Extent(*e[:3]): str(e[3]).encode() for line in said for e in line.get("stored", ())}  # type: ignore[attr-defined]
        gone = {line["retired"] for line in said if "retired" in line}
        ends = engine.check(found)
        resets = [line["reset"] for line in said if "reset" in line]
        if not resets:
            kept = {extent for extent in stored if extent.segment not in gone}
            assert kept <= set(ends["loaded"]), "what was stored is not there"
        assert "done" not in resets or not found, "what is from before a reset, or behind one, was found"
        counts["loaded"] += len(ends["loaded"])
        counts["missed"] += len(ends["missed"])
        counts["found"] += len(found)
        names = {file.name for file in (engine.directory / "r0").iterdir()}
        assert all(file.startswith("seg-") for file in names), f"a temporary file is left: {names}"
        engine.close()
    return counts


def damage(path: Path, rng: random.Random) -> None:
    """Cut the end of some file, zero a page of one, swap the contents of two."""
    files = sorted(path.glob("saria/*/e*/r0/seg-*"))
    if not files:
        return
    cut, zeroed = rng.choice(files), rng.choice(files)
    os.truncate(cut, max(0, cut.stat().st_size - rng.randrange(1, 4097)))
    with zeroed.open("r+b") as file:
        file.seek(rng.randrange(max(1, zeroed.stat().st_size // 4096)) * 4096)
        file.write(bytes(4096))
    if len(files) > 1:
        one, two = rng.sample(files, 2)
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)


def in_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Fork. Returns the child's id and the end to read what it says from."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    status = 1
    try:
        os.close(reading)
        work(writing)
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def sayer(fd: int) -> Callable[[dict[str, object]], None]:
    def say(line: dict[str, object]) -> None:
        os.write(fd, json.dumps(line).encode() + b"\n")

    return say


def heard(fd: int, before: bytes = b"") -> list[dict[str, object]]:
    """All that was said, whole lines only; `before` was read already."""
    with os.fdopen(fd, "rb") as file:
        return [json.loads(line) for line in (before + file.read()).split(b"\n")[:-1]]


def rounds(path: Path, name: str, count: int, engines: int, spoil: bool) -> None:
    rng, totals = random.Random(count), {"loaded": 0, "missed": 0, "found": 0}
    for number in range(count):
        children = [in_child(lambda fd, seed=number * 10 + n: run(path, name, seed, sayer(fd))) for n in range(engines)]
        ready = [os.read(reading, 1) for _, reading in children]
        assert all(ready), "an engine did not start"
        time.sleep(rng.uniform(0, 0.15))
        for child, _ in children:
            os.kill(child, signal.SIGKILL)
        for child, _ in children:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            for pool in Path("/dev/shm").glob(f"saria-pool-t{child}-*"):
                pool.unlink()
        expected = {int(str(mine[0]["engine"])): mine for mine in (heard(reading, b"{") for _, reading in children)}
        assert len(expected) == engines, "two engines had one directory"
        if spoil and number % 2:
            damage(path, rng)
            expected = {index: [] for index in expected}
        child, reading = in_child(lambda fd, expected=expected: sayer(fd)(look(path, name, expected)))  # type: ignore[arg-type]
        counts = heard(reading)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, f"round {number}"
        for key in totals:
            totals[key] += int(str(counts[0][key]))
    print(json.dumps(totals))


def reset_and_die(path: Path, number: int, during: bool) -> None:
    """Store, reset, and be gone: as soon as the reset has returned, or while it runs."""
    rng = random.Random(number)

    def work(fd: int) -> None:
        claimed = EngineDirectory.claim([str(path)], NAMESPACE, {}, 0)
        directory, generation = Path(claimed.directories[0]), claimed.generation
        with opened(directory, generation, store_id=store_id(NAMESPACE, 0, 0)) as store:
            store.recover()
            for record in range(disk_states.RECORDS - number % 2):  # sealed, or open
                write(store, Extent(0, store.next_segment_id - (record > 0), record), b"%d" % record, generation)
            sayer(fd)({"generation": generation})
            claimed.bump_generation()
            sayer(fd)({"reset": "done"})
            os.kill(os.getpid(), signal.SIGKILL)

    def look(fd: int) -> None:
        claimed = EngineDirectory.claim([str(path)], NAMESPACE, {}, 0)
        directory = Path(claimed.directories[0])
        found = right_keys(directory, claimed.generation, store_id=store_id(NAMESPACE, 0, 0))
        sayer(fd)({"found": len(found), "generation": claimed.generation})

    child, reading = in_child(work)
    first = os.read(reading, 1)
    if during:
        time.sleep(rng.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    before, *done = heard(reading, first)
    child, reading = in_child(look)
    (after,) = heard(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if done or after["generation"] != before["generation"]:
        assert after["found"] == 0, "an entry from before the reset was found"
    else:
        assert int(str(after["found"])) >= disk_states.RECORDS - number % 2
    print(json.dumps({"done": len(done), "found": after["found"]}))


def helper(*arguments: str, timeout: float = 280) -> list[dict[str, int]]:
    """Run this file as a program; every line that it prints."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", __file__, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("engine", ["posix", "io_uring"])
def test_b42_what_survives_kills_and_damage_is_exact(tmp_path: Path, engine: str) -> None:
    """A few of the rounds of the slow test: after every other kill files are cut, a page zeroed, contents swapped."""
    (totals,) = helper("rounds", str(tmp_path), engine, "5", "1", "spoil")
    assert totals["loaded"] > 50


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["posix", "io_uring"])
def test_b42_fifty_kills_with_damage(tmp_path: Path, engine: str) -> None:
    (totals,) = helper("rounds", str(tmp_path), engine, "50", "1", "spoil", timeout=1100)
    assert totals["loaded"] > 500


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_kills(tmp_path: Path) -> None:
    (totals,) = helper("rounds", str(tmp_path), "io_uring", "200", "1", "", timeout=1700)
    assert totals["loaded"] > 5000 and totals["missed"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kills_of_two_engines_on_one_directory(tmp_path: Path) -> None:
    (totals,) = helper("rounds", str(tmp_path), "posix", "50", "2", "", timeout=1100)
    assert totals["loaded"] > 1000 and totals["missed"] == 0


@pytest.mark.parametrize("when", ["after", "during"])
@pytest.mark.parametrize("count", [20, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_nothing_from_before_a_reset_is_found_after_a_kill(tmp_path: Path, when: str, count: int) -> None:
    lines = helper("resets", str(tmp_path), when, str(count), timeout=1100)
    assert len(lines) == count
    if when == "after":
        assert all(line == {"done": 1, "found": 0} for line in lines)
    elif count > 100:
        assert {line["done"] for line in lines} == {0, 1}


if __name__ == "__main__":
    if sys.argv[1] == "rounds":
        rounds(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6] == "spoil")
    else:
        for number in range(int(sys.argv[4])):
            reset_and_die(Path(sys.argv[2]), number, sys.argv[3] == "during")
