"""The index of chunks, its order of recency and its ghosts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from saria_vllm.policy.ghosts import Ghosts
from saria_vllm.policy.index import BAD, BUSY, NO_ROWS, NONE, VALID, ChunkIndex, Prefix, Rows
from saria_vllm.policy.recency import Recency


def rows_of(*numbers: int) -> Rows:
    return np.array(numbers, np.int32)


def add(index: ChunkIndex, keys: list[bytes], group: int = 0) -> Rows:
    return index.add(group, keys, [b"", *keys[:-1]])


def in_dram(index: ChunkIndex, keys: list[bytes], group: int = 0) -> Rows:
    rows = add(index, keys, group)
    index.dram[rows], index.slot[rows, 0], index.slot[rows, 1] = VALID, 0, rows
    index.depth[rows] = np.arange(len(rows))
    return rows


def touch(index: ChunkIndex, recency: Recency, rows: Rows, epoch: int) -> None:
    index.epoch[rows] = epoch
    recency.put(rows[::-1])


def keys_of(index: ChunkIndex, rows: Rows) -> list[bytes]:
    return [index.key[row] for row in rows.tolist()]


# Rows and keys.


def test_a_removed_row_is_used_again_with_nothing_left_over() -> None:
    index = ChunkIndex(1)
    row = index.add(0, [b"old"], [b"parent of old"])
    index.evictions[row], index.reuses[row], index.depth[row] = 7, 9, 3
    index.remove(row)
    again = index.add(0, [b"new"], [b""])
    assert again.tolist() == row.tolist()
    columns = (index.dram, index.ssd, index.evicting, index.leases, index.evictions, index.reuses, index.depth)
    assert [int(column[again[0]]) for column in columns] == [0] * len(columns)
    assert (index.slot[again[0], 0], index.extent[again[0], 0], index.parent[again[0]]) == (-1, -1, b"")
    assert b"old" not in index.rows[0]
    assert len(index) == 1
    assert index.uses[again[0]] == 1


def test_a_first_chunk_behind_a_free_row_follows_nothing() -> None:
    index = ChunkIndex(1)
    index.remove(index.add(0, [b"a", b"b"], [b"", b"a"]))
    row = index.add(0, [b"c"], [b""])
    assert (row.tolist(), index.chained[row].tolist()) == ([1], [0])


def test_a_row_in_use_cannot_be_removed() -> None:
    index = ChunkIndex(1)
    row = index.add(0, [b"k"], [b""])
    for column in (index.dram, index.ssd, index.leases):
        column[row] = 1
        with pytest.raises(AssertionError):
            index.remove(row)
        column[row] = 0
    index.remove(row)


def test_a_key_is_added_once() -> None:
    index = ChunkIndex(1)
    index.add(0, [b"k"], [b""])
    with pytest.raises(AssertionError):
        index.add(0, [b"k"], [b""])


def test_groups_have_keys_of_their_own() -> None:
    index = ChunkIndex(2)
    zero, one = add(index, [b"k"], 0), add(index, [b"k"], 1)
    assert len(index) == 2
    assert (index.find(0, [b"k"]).tolist(), index.find(1, [b"k"]).tolist()) == (zero.tolist(), one.tolist())


def test_columns_grow_and_keep_what_they_hold() -> None:
    index = ChunkIndex(1, rows=2)
    first = in_dram(index, [b"a", b"b"])
    in_dram(index, [b"x%d" % n for n in range(500)])
    assert index.dram[first].tolist() == [VALID, VALID]
    assert len(index) == 502
    assert index.find(0, [b"a", b"b"]).tolist() == first.tolist()


def test_check_finds_broken_states() -> None:
    def broken(**columns: int) -> ChunkIndex:
        index = ChunkIndex(1)
        (row,) = in_dram(index, [b"k"])
        index.check()
        for name, value in columns.items():
            getattr(index, name)[row] = value
        return index

    for columns in ({"dram": NONE, "slot": -1}, {"slot": -1}, {"ssd": VALID}, {"evicting": 1}, {"ghost": 3}):
        with pytest.raises(AssertionError):
            broken(**columns).check()
    broken(dram=BUSY).check()
    broken(dram=BAD).check()


# Finding a whole prefix.


def test_a_long_prefix_is_found_by_few_look_ups_when_its_rows_lie_in_a_row() -> None:
    index = ChunkIndex(1)
    keys = [b"%d" % n for n in range(1000)]
    rows = add(index, keys)

    class Counting(dict[bytes, int]):
        asked = 0

        def get(self, key: bytes, default: int = -1) -> int:  # type: ignore[override]
            Counting.asked += 1
            return dict.get(self, key, default)

    index.rows[0] = Counting(index.rows[0])
    assert index.find(0, keys).tolist() == rows.tolist()
    assert Counting.asked < 50


def test_the_same_rows_are_found_whatever_was_removed_or_moved() -> None:
    """Against plain look-ups, over chains with gaps, other chunks in the rows between, and branches."""
    rng = random.Random(3)
    for _ in range(200):
        index = ChunkIndex(1)
        trunk = [b"t%d" % n for n in range(400)]
        fork = rng.randrange(1, 400)
        branch = trunk[:fork] + [b"b%d" % n for n in range(fork, 400)]
        position = 0
        while position < 400:
            end = min(400, position + rng.randrange(1, 200))
            index.add(0, trunk[position:end], [b"" if n == 0 else trunk[n - 1] for n in range(position, end)])
            position = end
        for _ in range(rng.randrange(4)):
            low = rng.randrange(400)
            some = index.find(0, trunk[low : low + rng.randrange(1, 90)])
            index.remove(np.unique(some[some >= 0]))
            other = [b"o%d.%d" % (low, n) for n in range(rng.randrange(1, 60))]
            other = [key for key in other if key not in index.rows[0]]
            index.add(0, other, [b""] * len(other))
        more = [n for n in range(fork, 400) if rng.random() < 0.9]
        index.add(0, [branch[n] for n in more], [branch[n - 1] for n in more])
        for path in (trunk, branch):
            assert index.find(0, path).tolist() == [index.rows[0].get(key, -1) for key in path]
        assert all(index.key[row] == key for key, row in index.rows[0].items())


def test_a_prefix_notices_that_its_row_was_given_to_another_chunk() -> None:
    index = ChunkIndex(1)
    prefix = Prefix([b"a", b"b", b"c"])
    rows = add(index, prefix.keys)
    assert index.locate(prefix, 0, 3)[0].tolist() == rows.tolist()
    index.remove(rows[1:2])
    assert index.locate(prefix, 0, 3)[0].tolist() == [rows[0], -1, rows[2]]
    index.add(0, [b"other"], [b""])
    assert index.locate(prefix, 0, 3)[0].tolist() == [rows[0], -1, rows[2]]
    again = int(index.add(0, [b"b"], [b"a"])[0])
    assert index.locate(prefix, 1, 2)[0].tolist() == [again]
    prefix.keys.append(b"d")
    assert index.locate(prefix, 0, 4)[0].tolist() == [rows[0], again, rows[2], -1]
    prefix.cut(2)
    assert index.locate(prefix, 0, 2)[0].tolist() == [rows[0], again]
    index.clear()
    assert index.locate(prefix, 0, 2)[0].tolist() == [-1, -1]


# Recency.


def test_the_least_recent_epoch_goes_first_and_in_it_the_deepest_chunk() -> None:
    index = ChunkIndex(1)
    recency = Recency(index)
    a, b = in_dram(index, [b"a0", b"a1", b"a2"]), in_dram(index, [b"b0", b"b1"])
    touch(index, recency, a, 1)
    touch(index, recency, b, 2)
    assert keys_of(index, recency.oldest(9)) == [b"a2", b"a1", b"a0", b"b1", b"b0"]
    touch(index, recency, a[:1], 3)
    assert keys_of(index, recency.oldest(9)) == [b"a2", b"a1", b"b1", b"b0", b"a0"]
    assert keys_of(index, recency.oldest(2)) == [b"a2", b"a1"], "they stay until they are evicted"
    index.dram[a[2]] = NONE
    assert keys_of(index, recency.oldest(2)) == [b"a1", b"b1"]


def test_a_chunk_that_joins_later_goes_behind_its_parent() -> None:
    index = ChunkIndex(1)
    recency = Recency(index)
    a, b = in_dram(index, [b"a0", b"a1", b"a2"]), in_dram(index, [b"b0"])
    touch(index, recency, a[:2], 1)
    touch(index, recency, b, 2)
    index.epoch[a[2]] = 1
    recency.put(a[2:])
    assert keys_of(index, recency.oldest(9)) == [b"a2", b"a1", b"a0", b"b0"]
    index.dram[a] = NONE
    assert keys_of(index, recency.oldest(9)) == [b"b0"]
    index.dram[a[2]] = VALID
    recency.put(a[2:])
    assert keys_of(index, recency.oldest(9)) == [b"a2", b"b0"], "an epoch that was used up comes back in its place"


def test_rows_in_use_are_passed_over() -> None:
    index = ChunkIndex(1)
    recency = Recency(index)
    rows = in_dram(index, [b"a", b"b", b"c", b"d"])
    touch(index, recency, rows, 1)
    index.leases[rows[3]], index.dram[rows[2]], index.evicting[rows[1]] = 1, BUSY, 1
    assert keys_of(index, recency.oldest(9)) == [b"a"]
    recency.unpark(rows)
    assert keys_of(index, recency.oldest(9)) == [b"a"], "they are in use still"
    index.leases[rows[3]], index.dram[rows[2]], index.evicting[rows[1]] = 0, VALID, 0
    recency.unpark(rows)
    assert keys_of(index, recency.oldest(9)) == [b"d", b"c", b"b", b"a"]


def test_the_order_is_that_of_a_sorted_list_and_does_not_grow_without_bound() -> None:
    rng = random.Random(5)
    index = ChunkIndex(1)
    recency = Recency(index)
    recency._entries_max = 64
    paths = [in_dram(index, [b"%d.%d" % (p, n) for n in range(rng.randrange(1, 9))]) for p in range(12)]

    def age(row: int) -> tuple[int, int]:
        return int(index.epoch[row]), -int(index.depth[row])

    held: set[int] = set()
    for epoch in range(1, 3000):
        rows = rng.choice(paths)
        rows = rows[: rng.randrange(1, len(rows) + 1)]
        index.dram[rows] = VALID
        touch(index, recency, rows, epoch)
        held.update(rows.tolist())
        gone = recency.oldest(rng.randrange(5)).tolist()
        assert [age(row) for row in gone] == sorted(map(age, held))[: len(gone)]
        if epoch % 3 == 0:
            index.dram[gone] = NONE
            held.difference_update(gone)
        assert sum(len(rows) for arrays in recency._epochs.values() for rows in arrays) < 70_000
    order = recency.order()
    assert set(order) == held
    assert [age(row) for row in order] == sorted(map(age, held))


# Ghosts.


def test_ghosts_are_bounded_and_the_oldest_is_forgotten() -> None:
    index = ChunkIndex(1)
    ghosts = Ghosts(index, 3)
    rows = add(index, [b"%d" % n for n in range(6)])
    assert ghosts.add(rows[:2]).tolist() == []
    assert ghosts.add(rows[2:5]).tolist() == rows[:2].tolist()
    assert len(ghosts) == 3
    ghosts.back(rows[2:3])
    assert len(ghosts) == 2
    assert ghosts.add(rows[5:]).tolist() == []
    assert ghosts.add(rows[2:3]).tolist() == rows[3:4].tolist(), "one that came back and left again is the newest"
    assert ghosts.add(NO_ROWS).tolist() == []


def test_more_ghosts_at_once_than_the_bound_keeps_the_last() -> None:
    index = ChunkIndex(1)
    ghosts = Ghosts(index, 2)
    rows = add(index, [b"%d" % n for n in range(5)])
    assert ghosts.add(rows).tolist() == rows[:3].tolist()
    assert len(ghosts) == 2


def test_ghosts_that_come_and_go_leave_nothing_behind() -> None:
    index = ChunkIndex(1)
    ghosts = Ghosts(index, 100)
    rows = add(index, [b"%d" % n for n in range(50)])
    for _ in range(5000):
        ghosts.add(rows)
        ghosts.back(rows)
    assert len(ghosts) == 0
    assert sum(len(rows) for _, rows in ghosts._queue) < 70_000
