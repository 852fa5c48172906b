"""`Tiers` after a restart that found chunks on SSD, and through a cache reset with jobs in flight."""

from __future__ import annotations

from collections.abc import Sequence

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.tiers import Tiers
from saria_vllm.types import Extent, FoundChunk, FoundChunks
from tier_steps import (
    KEYS,
    end,
    evict_all,
    make_tiers,
    match,
    on_ssd,
    plan_load,
    plan_store,
    store,
)


def found(key: bytes, parent: bytes, segment: int, record: int, group: int = 0, drive: int = 0) -> FoundChunk:
    return FoundChunk(group, key, parent, Extent(drive, segment, record))


def adopt(tiers: Tiers, chunks: list[FoundChunk], next_segment: int, seen: Sequence[tuple[int, int]] = ()) -> None:
    assert tiers.chunks.extents is not None
    tiers.open_ssd(tiers.chunks.extents, FoundChunks.of(chunks), next_segment, seen)


def test_found_chunks_are_offered_from_where_they_were_found() -> None:
    tiers = make_tiers(records=2)
    adopt(tiers, [found(b"k0", b"", 3, 1), found(b"k1", b"k0", 7, 0)], next_segment=9)
    tiers.check()
    load = plan_load(tiers, KEYS[:2])
    assert [item.extent for item in load.items] == [Extent(0, 3, 1), Extent(0, 7, 0)]
    assert tiers.chunks.counts["recovered_chunks"] == 2
    store(tiers, [b"new"])
    (persist,) = tiers.make_room(0.0)
    assert persist.items[0].extent == Extent(0, 9, 0)


def test_what_does_not_fit_this_configuration_is_not_adopted() -> None:
    tiers = make_tiers(records=2)
    strange = [
        found(b"group", b"", 0, 0, group=1),
        found(b"drive", b"", 0, 0, drive=1),
        found(b"record", b"", 0, 2),
        found(b"ok", b"", 0, 0),
        found(b"same place", b"", 0, 0),
        found(b"ok", b"", 0, 1),
    ]
    adopt(tiers, strange, next_segment=1)
    tiers.check()
    assert len(tiers.chunks.index) == tiers.chunks.counts["recovered_chunks"] == 1


def test_a_chunk_stored_before_it_was_found_gains_its_ssd_copy() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="saria", evictions=1))
    store(tiers, [b"k0"])
    adopt(tiers, [found(b"k0", b"", 2, 0)], next_segment=3)
    tiers.check()
    assert evict_all(tiers) == [], "nothing to write"
    assert plan_load(tiers, [b"k0"]).items[0].extent == Extent(0, 2, 0)


def test_segments_that_were_seen_but_hold_nothing_of_use_are_retired() -> None:
    tiers = make_tiers()
    adopt(tiers, [found(b"a", b"", 2, 0), found(b"a", b"", 3, 0)], next_segment=4, seen=[(0, 2), (0, 3)])
    assert tiers.chunks.extents is not None
    assert tiers.chunks.extents.retired == [(0, 3)]


def test_parents_that_name_each_other_do_not_hang() -> None:
    tiers = make_tiers()
    adopt(tiers, [found(b"a", b"b", 0, 0), found(b"b", b"a", 0, 1)], next_segment=1)
    store(tiers, [b"a", b"child"])
    tiers.check()


def test_reset_forgets_everything_and_frees_idle_slots_at_once() -> None:
    tiers = make_tiers()
    on_ssd(tiers, KEYS[:2])
    store(tiers, KEYS[4:8])
    tiers.reset()
    tiers.check()
    assert match(tiers, KEYS, 0, 1) == 0
    assert match(tiers, KEYS, 4, 5) == 4
    assert tiers.chunks.slots.used == [0]
    assert tiers.chunks.extents is not None
    assert tiers.chunks.extents.segments() == 0
    assert tiers.chunks.extents.retired == [(0, 0)]
    assert tiers.make_room(0.0) == [], "nothing is wanted any more"


def test_reset_with_jobs_in_flight_frees_their_slots_and_segments_once_at_their_end() -> None:
    tiers = make_tiers(records=2, persist_records=4)
    store(tiers, KEYS[:2])
    (persist_0, persist_1), loads = tiers.make_room(0.0), [plan_load(tiers, KEYS[:2]) for _ in range(2)]
    pending = plan_store(tiers, [b"x", b"y"])
    tiers.reset()
    tiers.reset()
    tiers.check()
    assert tiers.chunks.slots.used == [4]
    store(tiers, KEYS[:4])
    taken = {item.slot for item in plan_load(tiers, KEYS[:4]).items}
    assert taken.isdisjoint({item.slot for job in [*loads, pending] for item in job.items})
    end(tiers, loads[0], persist_0, loads[1], failed=(0,))
    assert match(tiers, KEYS, 0, 4) == 4, "a stale failure says nothing about the new copy"
    assert tiers.chunks.slots.used == [7]
    end(tiers, persist_1, pending)
    assert tiers.chunks.slots.used == [4]
    assert tiers.chunks.extents is not None
    assert tiers.chunks.extents.retired == [(0, 0)]
    assert match(tiers, [b"x"], 0, 1) == 0


def test_a_ghost_from_before_a_reset_is_forgotten() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="saria"))
    store(tiers, KEYS[:1])
    evict_all(tiers)
    tiers.reset()
    store(tiers, KEYS[:1])
    assert evict_all(tiers) == []


def test_the_persist_bound_survives_a_reset() -> None:
    tiers = make_tiers(persist_records=1)
    store(tiers, KEYS[:1])
    (persist,) = tiers.make_room(0.0)
    tiers.reset()
    store(tiers, KEYS[:1])
    assert tiers.make_room(0.0) == []
    end(tiers, persist)
    assert len(tiers.make_room(0.0)) == 1


def test_a_reset_without_an_ssd_tier_gives_all_slots_back() -> None:
    tiers = make_tiers(ssd=False)
    store(tiers, KEYS[:5])
    load = plan_load(tiers, KEYS[:1])
    tiers.reset()
    assert (match(tiers, KEYS, 0, 5), tiers.chunks.slots.used) == (0, [1]), "the load still reads its slot"
    end(tiers, load)
    assert tiers.chunks.slots.used == [0]
    store(tiers, KEYS[:5])
    assert match(tiers, KEYS, 0, 5) == 5
