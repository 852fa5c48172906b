"""One capacity for all engines on a directory, whoever comes, dies and grows; leases, and the lock to share under."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from saria_vllm.errors import StorageError
from saria_vllm.storage import directories
from saria_vllm.storage.directories import is_leased, open_path, sharing_lock
from saria_vllm.storage.namespace import EngineDirectory, granted, namespace_name
from saria_vllm.storage.reclaim import share_capacity

SEGMENT = 32 << 10
CAPACITY = 32 * SEGMENT
SMALL_FILES = 4096 * 32
_numbers = itertools.count()


class Engine:
    """Takes files of `SEGMENT` bytes as a scheduler takes segments: goes by what was settled last."""

    def __init__(self, paths: tuple[str, ...], parts: dict[str, str], engines: int = 1) -> None:
        self.directory = EngineDirectory.claim(paths, namespace_name(parts), parts, 0)
        self.engines = engines
        for directory in self.directory.directories:
            Path(directory, "r0").mkdir(exist_ok=True)
        self.files = [sorted(Path(directory, "r0").iterdir()) for directory in self.directory.directories]
        self.limit = self.next_limit = 0

    def settle(self, capacity: int = CAPACITY, late: bool = False) -> int:
        """With `late` a step is under way that goes by the old limit."""
        held = max(self.limit, *map(len, self.files)) * SEGMENT * len(self.files)
        left, _ = share_capacity(self.directory.paths, self.directory, capacity, held, self.engines)
        self.next_limit = left // (SEGMENT * len(self.files))
        if not late:
            self.limit = self.next_limit
        return left

    def step(self, wanted: int) -> None:
        """Take so many segments on each path, and retire the oldest over the limit."""
        for directory, files in zip(self.directory.directories, self.files, strict=True):
            for _ in range(wanted):
                while files and len(files) >= self.limit:
                    files.pop(0).unlink()
                if len(files) < self.limit:
                    files.append(Path(directory, "r0", f"seg-{next(_numbers):016x}.data"))
                    with files[-1].open("xb") as file:
                        os.posix_fallocate(file.fileno(), 0, SEGMENT)
        self.limit = self.next_limit

    def fill(self) -> int:
        self.step(100)
        return sum(map(len, self.files))


Make = Callable[..., Engine]


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # No power is lost here.
    return (str(tmp_path / "a"), str(tmp_path / "b"))


@pytest.fixture
def make(paths: tuple[str, ...]) -> Iterator[Make]:
    engines: list[Engine] = []

    def make(model: str = "m", engines_of_one: int = 1, paths: tuple[str, ...] = paths) -> Engine:
        engines.append(Engine(paths, {"model": model}, engines_of_one))
        return engines[-1]

    yield make
    for engine in engines:
        engine.directory.release()


def used(paths: tuple[str, ...]) -> int:
    """As du counts."""
    files = (Path(folder, name) for path in paths for folder, _, names in os.walk(path) for name in names)
    return sum(file.stat().st_blocks * 512 for file in files)


def test_one_engine_has_it_all(make: Make, paths: tuple[str, ...]) -> None:
    engine = make()
    assert CAPACITY - SMALL_FILES < engine.settle() <= CAPACITY
    assert engine.fill() >= 28
    assert used(paths) <= CAPACITY


@pytest.mark.parametrize("model", ["m", "another"])
def test_a_newcomer_takes_what_is_left_and_then_its_share(make: Make, paths: tuple[str, ...], model: str) -> None:
    first = make()
    first.settle()
    first.step(4)
    second = make(model)
    assert second.settle() < SMALL_FILES, "all is granted to the first one"
    assert second.fill() == 0
    first.settle()
    assert CAPACITY / 2 - SMALL_FILES < first.limit * 2 * SEGMENT <= CAPACITY / 2
    first.settle()
    assert CAPACITY / 2 - SMALL_FILES < second.settle() <= CAPACITY / 2
    first.fill()
    second.fill()
    assert CAPACITY * 0.8 < used(paths) <= CAPACITY


def test_who_has_more_than_its_share_keeps_its_grant_until_it_has_less(make: Make, paths: tuple[str, ...]) -> None:
    first = make()
    first.settle()
    full = first.fill()
    second = make()
    first.settle()
    first.settle()
    assert second.settle() < SMALL_FILES and second.fill() == 0
    first.step(1)
    assert sum(map(len, first.files)) <= full / 2 + 1
    first.settle()
    second.settle()
    assert second.fill() > 10
    assert used(paths) <= CAPACITY


def test_a_step_that_is_under_way_may_still_go_by_the_old_limit(make: Make, paths: tuple[str, ...]) -> None:
    first = make()
    first.settle()
    second = make()
    first.settle(late=True)
    second.settle()
    first.fill()
    second.fill()
    assert used(paths) <= CAPACITY


def test_what_a_killed_engine_left_counts_and_its_heir_takes_it_over(make: Make, paths: tuple[str, ...]) -> None:
    first, second = make(), make()
    for engine in (first, second, first, second):
        engine.settle()
    assert second.fill() > 10
    second.directory.release()
    first.settle()
    held = sum(map(len, second.files))
    assert (first.limit * 2 + held) * SEGMENT <= CAPACITY
    first.fill()
    assert used(paths) <= CAPACITY
    heir = make()
    assert heir.directory.index == 1 and sum(map(len, heir.files)) == held
    heir.settle()
    assert heir.fill() > 10 and used(paths) <= CAPACITY


def test_an_old_namespace_counts_and_keeps_at_most_half(make: Make, paths: tuple[str, ...]) -> None:
    old = make("old")
    old.settle()
    old.fill()
    old.directory.release()
    new = make("new")
    assert new.settle() >= CAPACITY / 2 - SMALL_FILES
    new.fill()
    assert used(paths) <= CAPACITY


def test_data_parallel_engines_leave_the_others_their_part_from_the_start(make: Make) -> None:
    first = make(engines_of_one=4)
    assert CAPACITY / 4 - SMALL_FILES < first.settle() <= CAPACITY / 4
    others = [make(engines_of_one=4) for _ in range(3)]
    assert all(CAPACITY / 4 - SMALL_FILES < engine.settle() <= CAPACITY / 4 for engine in others)


def test_engines_on_different_paths_share_those_that_both_have(make: Make, paths: tuple[str, ...]) -> None:
    both, one = make(), make("another", paths=paths[1:])
    both.settle()
    one.settle(CAPACITY // 2)
    both.settle()
    both.settle()
    one.settle(CAPACITY // 2)
    both.fill()
    one.fill()
    assert used(paths[1:]) <= CAPACITY // 2
    assert used(paths) <= CAPACITY


@pytest.mark.parametrize("seed", range(2))
def test_the_sum_never_exceeds_the_capacity(paths: tuple[str, ...], seed: int) -> None:
    rng, engines = random.Random(seed), list[Engine]()
    most = 0
    for _ in range(100):
        what = rng.random()
        if what < 0.1 and len(engines) < 4:
            engines.append(Engine(paths, {"model": rng.choice("xy")}))
        elif what < 0.15 and engines:
            engines.pop(rng.randrange(len(engines))).directory.release()
        elif what < 0.5 and engines:
            rng.choice(engines).settle(late=rng.random() < 0.5)
        elif engines:
            rng.choice(engines).step(rng.randrange(6))
        segments = [Path(folder, name) for path in paths for folder, _, names in os.walk(path) for name in names]
        total = SEGMENT * sum(file.suffix == ".data" for file in segments)
        assert total <= CAPACITY
        most = max(most, total)
    assert most > CAPACITY // 2
    for engine in engines:
        engine.directory.release()


@pytest.mark.parametrize(
    ("lease", "nbytes"), [(b"", 0), (b"%020d" % 5, 5), (b"7", 0), (b"-" * 20, 0), (b"%021d" % 5, 0), (b"\xff" * 20, 0)]
)
def test_a_lease_says_how_much_or_nothing(lease: bytes, nbytes: int) -> None:
    assert granted(lease) == nbytes


def test_a_look_at_a_lease_takes_nothing(paths: tuple[str, ...], make: Make) -> None:
    engine = make()
    with open_path(paths[0], engine.directory.names) as fd:
        assert is_leased(fd) and is_leased(fd)
        engine.directory.release()
        assert not is_leased(fd)
        assert not is_leased(fd, "missing")
    assert make().directory.index == engine.directory.index


def test_who_does_not_give_the_lock_back_holds_up_the_others_for_a_while_only(
    paths: tuple[str, ...], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    monkeypatch.setattr(directories, "_LOCK_WAIT_S", 0.05)
    with sharing_lock(paths[1:]), pytest.raises(StorageError, match="another process holds it"):
        engine.settle()
    assert engine.settle() > 0


def test_what_stands_in_the_place_of_the_lock_is_named(paths: tuple[str, ...]) -> None:
    lock = Path(paths[0], "saria", "sharing")
    lock.mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as caught, sharing_lock(paths):
        pass
    assert caught.value.filename == str(lock)


def test_where_a_drive_was_unmounted_nothing_is_made(make: Make, paths: tuple[str, ...]) -> None:
    """What is made there would lie on another file system, and some refuse to mount over what is not empty."""
    engine = make()
    engine.settle()
    shutil.rmtree(f"{paths[1]}/saria")
    assert engine.settle() > 0
    assert os.listdir(paths[1]) == []


def test_a_grant_that_cannot_be_written_changes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make(), make()
    for engine in (first, second, first, second):
        engine.settle()
    make()
    first.settle()
    before = first.limit

    def fails(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(OSError, match="No space"):
        first.settle()
    monkeypatch.undo()
    assert first.limit == before
