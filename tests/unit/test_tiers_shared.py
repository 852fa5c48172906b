"""`Tiers` with chunks in other engines' segments, which come and go as their owners please, and under a moving cap."""

from __future__ import annotations

import numpy as np

from saria_vllm.policy.striping import READS_PAUSE_S
from saria_vllm.policy.tiers import Tiers
from saria_vllm.types import Extent, FoundChunk
from tier_steps import KEYS, end, evict_all, make_tiers, match, on_ssd, plan_load, plan_store, store, tier_tokens

FOREIGN = 5
"""Drive number of a segment of another engine, where there is one drive."""


def sealed(keys: list[bytes], segment: int = 3, drive: int = FOREIGN) -> list[FoundChunk]:
    parents = [b"", *keys]
    return [FoundChunk(0, key, parents[i], Extent(drive, segment, i)) for i, key in enumerate(keys)]


def adopt(tiers: Tiers, keys: list[bytes], segment: int = 3, drive: int = FOREIGN) -> None:
    tiers.adopt_others(sealed(keys, segment, drive), [])
    tiers.check()


def go(tiers: Tiers, *segments: int, drive: int = FOREIGN) -> None:
    tiers.adopt_others([], [(drive, segment) for segment in segments])
    tiers.check()


def test_what_another_sealed_is_offered_and_loaded_from_there() -> None:
    tiers = make_tiers()
    adopt(tiers, KEYS[:3])
    assert match(tiers, KEYS, 0, 5) == 3
    assert tier_tokens(tiers, KEYS, 0, 3) == (0, 48)
    load = plan_load(tiers, KEYS[:3])
    assert [item.extent for item in load.items] == [Extent(FOREIGN, 3, record) for record in range(3)]
    end(tiers, load)
    assert tiers.take_counts() == {
        "shared_chunks": 3, "shared_hits": 3, "loads:loaded": 1, "hit_tokens:ssd": 48,
    }  # fmt: skip


def test_our_own_copy_comes_first_and_a_chunk_in_dram_gains_one() -> None:
    tiers = make_tiers()
    on_ssd(tiers, KEYS[:1])
    store(tiers, KEYS[1:2])
    adopt(tiers, KEYS[:2])
    load = plan_load(tiers, KEYS[:2])
    assert load.items[0].extent == Extent(0, 0, 0) and load.items[1].slot is not None
    end(tiers, load)
    assert evict_all(tiers) == [], "it is on SSD already: nothing is written"
    assert plan_load(tiers, KEYS[1:2]).items[0].extent == Extent(FOREIGN, 3, 1)


def test_it_is_never_retired_by_us_and_never_written() -> None:
    tiers = make_tiers(records=1, segments_max=2)
    adopt(tiers, KEYS[:2])
    for key in KEYS[2:8]:
        on_ssd(tiers, [key])
    assert tiers.chunks.extents is not None
    assert match(tiers, KEYS, 0, 2) == 2
    assert {drive for drive, _ in tiers.chunks.extents.retired} == {0}


def test_when_its_owner_retires_it_the_chunk_is_a_ghost() -> None:
    tiers = make_tiers()
    adopt(tiers, KEYS[:2], segment=3)
    adopt(tiers, KEYS[2:4], segment=4)
    adopt(tiers, KEYS[4:6], segment=3, drive=9)
    go(tiers, 3, 77)
    assert [match(tiers, [key], 0, 1) for key in KEYS[:6]] == [0, 0, 1, 1, 1, 1]
    assert len(tiers.chunks.ghosts) == 2
    adopt(tiers, KEYS[:2], segment=8)
    assert match(tiers, KEYS, 0, 4) == 4 and not len(tiers.chunks.ghosts)


def test_a_load_of_what_goes_meanwhile_ends_well_or_as_a_miss() -> None:
    for failed in ((), (0, 1)):
        tiers = make_tiers()
        adopt(tiers, KEYS[:2])
        load = plan_load(tiers, KEYS[:2])
        go(tiers, 3)
        assert match(tiers, KEYS, 0, 2) == 0
        end(tiers, load, failed=failed, reason="not_found")
        assert match(tiers, KEYS, 0, 2) == 0
        counts = tiers.take_counts()
        assert counts.get("shared_hits", 0) == (0 if failed else 2)
        assert counts.get("errors:not_found", 0) == len(failed)


def test_what_goes_and_is_stored_anew_while_a_load_reads_it_keeps_its_slot() -> None:
    tiers = make_tiers()
    adopt(tiers, KEYS[:1])
    load = plan_load(tiers, KEYS[:1])
    go(tiers, 3)
    again = plan_store(tiers, KEYS[:1])
    end(tiers, load)
    end(tiers, again)
    assert tier_tokens(tiers, KEYS, 0, 1) == (16, 0)


def test_a_bad_record_of_anothers_is_offered_once() -> None:
    tiers = make_tiers()
    adopt(tiers, KEYS[:2])
    end(tiers, plan_load(tiers, KEYS[:2]), failed=(1,))
    assert match(tiers, KEYS, 0, 2) == 1
    go(tiers, 3)
    assert match(tiers, KEYS, 0, 2) == 0


def test_a_drive_that_held_up_a_load_is_left_alone_whoever_wrote_to_it() -> None:
    tiers = make_tiers(drives=2)
    adopt(tiers, KEYS[:1], drive=4)  # on drive 0
    adopt(tiers, KEYS[1:2], drive=5)  # on drive 1
    on_ssd(tiers, KEYS[2:3])  # on drive 0
    end(tiers, plan_load(tiers, KEYS[:1]), failed=(0,), reason="deadline")
    assert [match(tiers, [key], 0, 1) for key in KEYS[:3]] == [0, 1, 0]
    assert [match(tiers, [key], 0, 1, READS_PAUSE_S) for key in KEYS[:3]] == [1, 1, 1]


def test_on_a_drive_that_is_left_out_nothing_is_anothers() -> None:
    tiers = make_tiers(drives=2)
    assert tiers.chunks.extents is not None
    tiers.chunks.extents.striping.leave_out(1)
    adopt(tiers, KEYS[:1], drive=4)
    adopt(tiers, KEYS[1:2], drive=5)
    assert [match(tiers, [key], 0, 1) for key in KEYS[:2]] == [1, 0]


def test_of_two_copies_of_one_engine_the_newer_counts_for_the_older_goes_first() -> None:
    for order in ((3, 7), (7, 3)):
        tiers = make_tiers()
        for segment in order:
            adopt(tiers, KEYS[:2], segment=segment)
        load = plan_load(tiers, KEYS[:2])
        go(tiers, 3)
        assert match(tiers, KEYS, 0, 2) == 2
        assert [item.extent for item in load.items] == [Extent(FOREIGN, 7, record) for record in range(2)]
        end(tiers, load)
        assert tiers.take_counts()["shared_chunks"] == 2
    tiers = make_tiers()
    tiers.adopt_others([*sealed(KEYS[:2]), *sealed(KEYS[:2], segment=7)], [])
    go(tiers, 3)
    assert match(tiers, KEYS, 0, 2) == 2


def test_what_others_have_on_a_drive_that_is_lost_is_lost_too_and_may_be_written_elsewhere() -> None:
    tiers = make_tiers(drives=2)
    adopt(tiers, KEYS[:1], drive=4)
    adopt(tiers, KEYS[1:2], drive=5)
    tiers.chunks.drive_failed(np.array([[0, 0, 0]], np.int32), "vanished", 0.0)
    tiers.check()
    assert [match(tiers, [key], 0, 1) for key in KEYS[:2]] == [0, 1]
    on_ssd(tiers, KEYS[:1])
    assert plan_load(tiers, KEYS[:1]).items[0].extent == Extent(1, 0, 0)


def test_a_reset_forgets_what_others_have_and_loads_of_it_end_as_stale() -> None:
    tiers = make_tiers()
    adopt(tiers, KEYS[:2])
    load = plan_load(tiers, KEYS[:1])
    tiers.reset()
    tiers.check()
    assert match(tiers, KEYS, 0, 2) == 0
    end(tiers, load, failed=(0,), reason="stale")
    assert tiers.chunks.extents is not None
    assert tiers.chunks.extents.retired == []


def test_one_of_two_groups_in_anothers_segment_is_enough_with_the_other_here() -> None:
    tiers = make_tiers(record_bytes=(4096, 4096))
    tiers.adopt_others(sealed(KEYS[:2]), [])
    assert match(tiers, KEYS, 0, 2) == 0
    tiers.adopt_others([FoundChunk(1, KEYS[0], b"", Extent(FOREIGN, 6, 0))], [])
    assert match(tiers, KEYS, 0, 2) == 1
    end(tiers, plan_load(tiers, KEYS[:1]))


# The cap moves.


def test_under_a_lower_cap_the_oldest_go_and_those_in_use_later() -> None:
    tiers = make_tiers(records=1, segments_max=4)
    extents = tiers.chunks.extents
    assert extents is not None
    for key in KEYS[:4]:
        on_ssd(tiers, [key])
    load = plan_load(tiers, KEYS[:1])
    extents.segments_max = 1
    assert extents.most_segments() == 4
    tiers.shrink_ssd()
    tiers.check()
    assert [match(tiers, [key], 0, 1) for key in KEYS[:4]] == [1, 0, 0, 0]
    assert extents.retired == [(0, 1), (0, 2), (0, 3)]
    end(tiers, load)
    on_ssd(tiers, KEYS[4:5])
    assert [match(tiers, [key], 0, 1) for key in KEYS[:5]] == [0, 0, 0, 0, 1]
    assert tiers.chunks.counts["retired_chunks"] == 4


def test_without_room_nothing_is_written_and_nothing_lost() -> None:
    tiers = make_tiers(records=1, segments_max=2)
    extents = tiers.chunks.extents
    assert extents is not None
    on_ssd(tiers, KEYS[:1])
    extents.segments_max = 0
    taken, lost = extents.take(0, 1, [9], 0.0)
    assert (len(taken), len(lost)) == (0, 0) and match(tiers, KEYS, 0, 1) == 1
    extents.segments_max = 2
    taken, _ = extents.take(0, 1, [9], 0.0)
    assert len(taken) == 1
    extents.release(np.array(taken))
