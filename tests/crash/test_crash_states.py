"""Every state in which a crash can leave a few pending writes of the real store: no wrong byte is ever accepted."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disk_states import (
    Files,
    Operation,
    crash_states,
    opened,
    put_files,
    read_files,
    recorded,
    right_keys,
    state,
    write,
)
from saria_vllm.types import Extent

PENDING_MAX = 8
STATES_BY_DEFAULT = 150


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory."""
    directory = Path(tempfile.mkdtemp(prefix="saria-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


History = tuple[Files, list[Operation], set[bytes], int]
"""Files at first, pending operations, the keys that are there when all of them are, and the generation then."""


def created(directory: Path) -> History:
    """A segment made, two records committed."""
    with opened(directory) as store, recorded(directory / "r0") as operations:
        for record, key in enumerate([b"a", b"b"]):
            write(store, Extent(0, 0, record), key)
    return {}, operations, {b"a", b"b"}, 1


def sealed(directory: Path) -> History:
    """The last record of a segment, its index, the journal's unlink; and the next segment's first record."""
    with opened(directory) as store:
        for record, key in enumerate([b"a", b"b"]):
            write(store, Extent(0, 0, record), key)
        before = read_files(directory / "r0")
        with recorded(directory / "r0") as operations:
            write(store, Extent(0, 0, 2), b"c")
            write(store, Extent(0, 1, 0), b"d")
    return before, operations, {b"a", b"b", b"c", b"d"}, 1


def dropped(directory: Path) -> History:
    """Records dropped from a sealed and an open segment, another one committed, an older segment retired."""
    with opened(directory) as store:
        for number, key in enumerate([b"a", b"b", b"c", b"d"]):
            write(store, Extent(0, number // 3, number % 3), key)
        write(store, Extent(0, 2, 0), b"old")
        before = read_files(directory / "r0")
        with recorded(directory / "r0") as operations:
            store.forget(Extent(0, 0, 1))
            store.forget(Extent(0, 1, 0))
            write(store, Extent(0, 1, 1), b"e")
            store.retire(0, 2)
    return before, operations, {b"a", b"c", b"e"}, 1


def reset(directory: Path) -> History:
    """A new generation in the middle of a segment: the same key again, with other bytes."""
    with opened(directory) as store:
        write(store, Extent(0, 0, 0), b"a")
        before = read_files(directory / "r0")
        with recorded(directory / "r0") as operations:
            write(store, Extent(0, 0, 1), b"b")
            store.set_generation(2)
            write(store, Extent(0, 0, 2), b"a", 2)
            write(store, Extent(0, 1, 0), b"b", 2)
    return before, operations, {b"a", b"b"}, 2


def reused(directory: Path) -> History:
    """A segment retired, and one of its number made after a restart: its file may hold the old one's bytes."""
    with opened(directory) as store:
        for record, key in enumerate([b"a", b"b", b"c"]):
            write(store, Extent(0, 0, record), key)
    before = read_files(directory / "r0")
    with recorded(directory / "r0") as operations, opened(directory) as store:
        store.recover()
        store.retire(0, 0)
        write(store, Extent(0, 0, 0), b"b")
        write(store, Extent(0, 0, 1), b"a")
    return before, operations, {b"a", b"b"}, 1


def reopened(directory: Path) -> History:
    """A segment that a crash left open, sealed by the next process, which goes on in another."""
    with opened(directory) as store:
        for record, key in enumerate([b"a", b"b"]):
            write(store, Extent(0, 0, record), key)
    before = read_files(directory / "r0")
    with recorded(directory / "r0") as operations, opened(directory) as store:
        store.recover()
        write(store, Extent(0, 1, 0), b"c")
        write(store, Extent(0, 1, 1), b"a")  # a twin, newer
    return before, operations, {b"a", b"b", b"c"}, 1


SCENARIOS = [created, sealed, dropped, reset, reused, reopened]


def check(scenario: Callable[[Path], History], memory: Path, most: int) -> int:
    """Of all states, `most` picked by a seed and the one with all of everything. Returns how many unlike ones."""
    (memory / "history").mkdir()
    before, operations, keys, generation = scenario(memory / "history")
    assert operations, "nothing was recorded"
    *some, whole = crash_states(operations, PENDING_MAX)
    if len(some) > most:
        some = random.Random(scenario.__name__).sample(some, most)
    seen = set()
    for parts in [*some, whole]:
        files = state(before, operations, parts)
        identity = frozenset(files.items())
        if identity in seen:
            continue
        seen.add(identity)
        for current in {1, generation}:  # The reset itself may not have reached the disk.
            put_files(memory / "state" / "r0", files)
            found = right_keys(memory / "state", current)
            if parts == whole and current == generation:
                assert found == keys
            if current == generation:
                assert found <= keys | {b"a", b"b", b"c", b"d", b"old"}
            assert right_keys(memory / "state", current) == found, "the second look differs"
    return len(seen)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_no_state_of_pending_writes_yields_a_wrong_byte(scenario: Callable[[Path], History], memory: Path) -> None:
    """A seeded part of the states; all of them in the slow test."""
    assert check(scenario, memory, STATES_BY_DEFAULT) > 100


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_no_state_of_eight_pending_writes_yields_a_wrong_byte(
    scenario: Callable[[Path], History], memory: Path
) -> None:
    assert check(scenario, memory, 3 * 4**PENDING_MAX) > STATES_BY_DEFAULT
