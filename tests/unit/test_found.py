"""FoundChunks against lists and sets."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from saria_vllm.types import Extent, FoundChunk, FoundChunks

KEYS = st.sampled_from([b"", b"a", b"b", b"b\0", b"\0b", b"k" * 31, b"k" * 32, b"k" * 31 + b"j"])
EXTENTS = st.builds(
    Extent, st.integers(0, 127), st.sampled_from([0, 1, 2, 2**31 - 2**20 - 1]), st.sampled_from([0, 5, 2**25 - 1])
)
CHUNKS = st.lists(
    st.builds(FoundChunk, st.integers(0, 2), KEYS, KEYS, EXTENTS), max_size=30, unique_by=lambda chunk: chunk.extent
)


@settings(deadline=None)
@given(CHUNKS)
def test_columns_are_the_chunks(chunks: list[FoundChunk]) -> None:
    found = pickle.loads(pickle.dumps(FoundChunks.of(chunks)))
    assert list(found.items) == chunks
    assert len(found) == len(chunks)
    assert found.segments() == {chunk.extent[:2] for chunk in chunks}
    odd = np.arange(len(chunks)) % 2 == 1
    assert list(found.take(odd).items) == chunks[1::2]


@settings(deadline=None)
@given(CHUNKS)
def test_a_parent_behind_its_child_is_one_object_where_most_are(chunks: list[FoundChunk]) -> None:
    """As on a single drive, to which eviction writes the last chunk of a prefix first."""
    keys = [b"key %d" % place for place in range(20)]
    line = [FoundChunk(0, key, keys[at - 1] if at else b"none", Extent(0, 9, 99 - at)) for at, key in enumerate(keys)]
    line += [FoundChunk(chunk.group, chunk.key, b"none", chunk.extent) for chunk in chunks if chunk.extent.segment != 9]
    found = FoundChunks.of(line[::-1])
    keys = found.key_list()
    parents = found.parent_list(keys)
    assert parents == [chunk.parent for chunk in line[::-1]]
    shared = sum(any(parent is key for key in keys) for parent in parents)
    assert shared == (19 if len(line) // 2 < 19 else 0)


@settings(deadline=None)
@given(CHUNKS, st.data())
def test_twins_are_all_but_the_most_worth(chunks: list[FoundChunk], data: st.DataObject) -> None:
    worth = data.draw(st.lists(st.integers(0, 3), min_size=len(chunks), max_size=len(chunks)))
    best: dict[tuple[int, bytes], int] = {}
    for at, chunk in enumerate(chunks):
        other = best.setdefault((chunk.group, chunk.key), at)
        if worth[at] > worth[other]:
            best[chunk.group, chunk.key] = at
    twins = FoundChunks.of(chunks).twins(np.array(worth, np.int64)).tolist()
    assert sorted(twins) == sorted(set(range(len(chunks))) - set(best.values()))


@settings(deadline=None)
@given(CHUNKS, CHUNKS)
def test_what_two_ranks_found_is_what_both_say(mine: list[FoundChunk], theirs: list[FoundChunk]) -> None:
    def by_place(chunk: FoundChunk) -> tuple[int, int, int]:
        return chunk.extent.segment, chunk.extent.drive, chunk.extent.record

    taken = {chunk.extent for chunk in theirs}
    agreed = [chunk for chunk in mine if chunk.extent not in taken]
    first, second = (FoundChunks.of(sorted(chunks, key=by_place)) for chunks in (mine, [*theirs, *agreed]))
    both = first.also_in(second)
    expected = {chunk for chunk in mine if chunk in theirs or chunk in agreed}
    assert set(both.items) == expected
    assert list(both.items) == sorted(both.items, key=by_place)
