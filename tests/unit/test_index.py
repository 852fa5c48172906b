"""The index of chunks and its recency lists."""

from __future__ import annotations

import pytest

from saria_vllm.policy.ghosts import Ghosts
from saria_vllm.policy.index import BAD, BUSY, NONE, VALID, ChunkIndex


def in_dram(index: ChunkIndex, key: bytes, parent: bytes = b"", group: int = 0) -> int:
    row = index.add(group, key, parent)
    index.dram[row], index.slab[row], index.cell[row] = VALID, 0, row
    return row


def eviction_order(index: ChunkIndex, group: int = 0) -> list[bytes]:
    keys = []
    row = index.oldest(group)
    while row != -1:
        keys.append(index.key[row])
        index.unlist(row)
        index.dram[row], index.slab[row] = NONE, -1
        index.remove(row)
        row = index.oldest(group)
    return keys


def test_the_least_recent_row_is_the_oldest() -> None:
    index = ChunkIndex(1)
    for key in (b"a", b"b", b"c"):
        index.push_newest(in_dram(index, key))
    first = index.rows[0][b"a"]
    index.unlist(first)
    index.push_newest(first)
    index.check()
    assert eviction_order(index) == [b"b", b"c", b"a"]


def test_push_behind_makes_a_row_the_next_older_one() -> None:
    index = ChunkIndex(1)
    parent, other = in_dram(index, b"parent"), in_dram(index, b"other")
    index.push_newest(parent)
    index.push_newest(other)
    index.push_behind(in_dram(index, b"child1", b"parent"), parent)
    index.push_behind(in_dram(index, b"child2", b"parent"), parent)
    index.check()
    assert eviction_order(index) == [b"child1", b"child2", b"parent", b"other"]


def test_push_behind_the_oldest_and_in_the_middle_keeps_both_ends() -> None:
    index = ChunkIndex(1)
    a, b = in_dram(index, b"a"), in_dram(index, b"b")
    index.push_newest(a)
    index.push_newest(b)
    index.push_behind(in_dram(index, b"under a"), a)
    assert index.key[index.oldest(0)] == b"under a"
    index.push_behind(in_dram(index, b"under b"), b)
    index.check()
    assert eviction_order(index) == [b"under a", b"a", b"under b", b"b"]


@pytest.mark.parametrize("taken", [b"a", b"b", b"c"])
def test_unlist_from_either_end_or_the_middle(taken: bytes) -> None:
    index = ChunkIndex(1)
    for key in (b"a", b"b", b"c"):
        index.push_newest(in_dram(index, key))
    row = index.rows[0][taken]
    index.unlist(row)
    index.unlist(row)
    assert not index.listed(row)
    index.leases[row] = 1
    index.check()
    assert eviction_order(index) == [key for key in (b"a", b"b", b"c") if key != taken]


def test_groups_have_lists_and_keys_of_their_own() -> None:
    index = ChunkIndex(2)
    index.push_newest(in_dram(index, b"k", group=0))
    assert index.oldest(1) == -1
    index.push_newest(in_dram(index, b"k", group=1))
    assert len(index) == 2
    index.check()
    assert eviction_order(index, 1) == [b"k"]
    assert eviction_order(index, 0) == [b"k"]


def test_a_removed_row_is_used_again_with_nothing_left_over() -> None:
    index = ChunkIndex(1)
    row = index.add(0, b"old", b"parent of old")
    index.evictions[row], index.reuses[row] = 7, 9
    index.remove(row)
    again = index.add(0, b"new", b"")
    assert again == row
    columns = (index.dram, index.ssd, index.evicting, index.leases, index.loading, index.evictions, index.reuses)
    assert [column[again] for column in columns] == [0] * len(columns)
    assert (index.slab[again], index.segment[again], index.parent[again]) == (-1, -1, b"")
    assert b"old" not in index.rows[0]
    assert len(index) == 1


def test_a_row_in_use_cannot_be_removed() -> None:
    index = ChunkIndex(1)
    row = index.add(0, b"k", b"")
    for column in (index.dram, index.ssd, index.leases):
        column[row] = 1
        with pytest.raises(AssertionError):
            index.remove(row)
        column[row] = 0
    index.remove(row)


def test_a_key_is_added_once() -> None:
    index = ChunkIndex(1)
    index.add(0, b"k", b"")
    with pytest.raises(AssertionError):
        index.add(0, b"k", b"")


def test_check_finds_broken_states() -> None:
    def broken(**columns: int) -> ChunkIndex:
        index = ChunkIndex(1)
        row = in_dram(index, b"k")
        index.push_newest(row)
        index.check()
        for name, value in columns.items():
            getattr(index, name)[row] = value
        return index

    for columns in (
        {"dram": BUSY},
        {"dram": BAD},
        {"dram": NONE, "slab": -1},
        {"leases": 1},
        {"slab": -1},
        {"ssd": VALID},
        {"evicting": 1},
        {"loading": 1},
    ):
        with pytest.raises(AssertionError):
            broken(**columns).check()


def test_ghosts_are_bounded_and_the_oldest_is_forgotten() -> None:
    ghosts = Ghosts(3)
    for number in range(5):
        ghosts.remember(0, b"%d" % number, evictions=1, reuses=number)
    assert len(ghosts) == 3
    assert ghosts.recall(0, b"1") == (0, 0)
    assert ghosts.recall(0, b"2") == (1, 2)
    assert ghosts.recall(0, b"2") == (0, 0), "a history is taken back once"
    assert len(ghosts) == 2


def test_remembering_again_makes_a_ghost_recent() -> None:
    ghosts = Ghosts(2)
    ghosts.remember(0, b"a", 1, 0)
    ghosts.remember(0, b"b", 1, 0)
    ghosts.remember(0, b"a", 2, 5)
    ghosts.remember(0, b"c", 1, 0)
    assert ghosts.recall(0, b"b") == (0, 0)
    assert ghosts.recall(0, b"a") == (2, 5)


def test_ghosts_keep_full_counters_and_tell_groups_apart() -> None:
    ghosts = Ghosts(9)
    ghosts.remember(0, b"k", 255, 65535)
    ghosts.remember(1, b"k", 3, 0)
    assert ghosts.recall(0, b"k") == (255, 65535)
    assert ghosts.recall(1, b"k") == (3, 0)
    ghosts.remember(1, b"k", 3, 0)
    ghosts.clear()
    assert ghosts.recall(1, b"k") == (0, 0)
