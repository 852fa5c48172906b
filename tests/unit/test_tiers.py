"""`Tiers` example by example; `tests/model/test_tiers_model.py` tries the orders nobody thought of."""

from __future__ import annotations

import numpy as np
import pytest

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.admission import make_admission
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.policy.striping import READS_PAUSE_S
from saria_vllm.policy.tiers import Tiers
from saria_vllm.types import NULL_BLOCK, Extent, FoundChunk, GroupShape, JobResult, Moved
from tier_steps import (
    DRAM_ONLY,
    KEYS,
    RECORD,
    blocks,
    end,
    evict_all,
    eviction_order,
    is_loading,
    keys_of,
    make_tiers,
    match,
    on_ssd,
    plan_load,
    plan_store,
    store,
    tier_tokens,
    touch,
)

# Stores and matches.


def test_a_store_is_offered_only_when_every_rank_has_ended() -> None:
    tiers = make_tiers(ranks=2)
    job = plan_store(tiers, KEYS[:3])
    assert not tiers.finished([JobResult(job.job_id)], 0.0)
    assert match(tiers, KEYS, 0, 12) == 0
    assert tiers.finished([JobResult(job.job_id)], 0.0)
    assert match(tiers, KEYS, 0, 12) == 3
    assert match(tiers, KEYS, 1, 2) == 2
    assert match(tiers, KEYS, 5, 12) == 5


def test_what_is_known_or_on_its_way_is_not_stored_again() -> None:
    tiers = make_tiers()
    job = plan_store(tiers, KEYS[:3])
    assert tiers.plan_store(Prefix(KEYS), 0, 3, blocks(0, 3), 0.0) == (None, 3)
    second = plan_store(tiers, KEYS[:5])
    assert [item.blocks for item in second.items] == [(3,), (4,)]
    end(tiers, job, second)
    assert match(tiers, KEYS, 0, 12) == 5


def test_a_store_goes_as_far_as_there_are_slots_and_goes_on_later() -> None:
    tiers = make_tiers(4, admission=DRAM_ONLY)
    job, went_on = tiers.plan_store(Prefix(KEYS), 0, 6, blocks(0, 6), 0.0)
    assert job is not None
    assert (len(job.items), went_on) == (4, 4)
    assert tiers.plan_store(Prefix(KEYS), 4, 6, blocks(4, 6), 0.0) == (None, 4)
    assert tiers.make_room(0.0) == []
    end(tiers, job)
    tiers.make_room(0.0)
    _, went_on = tiers.plan_store(Prefix(KEYS), 4, 6, blocks(4, 6), 0.0)
    assert went_on == 6


def test_a_failed_store_on_one_rank_stores_nothing() -> None:
    tiers = make_tiers(ranks=2)
    job = plan_store(tiers, KEYS[:3])
    tiers.finished([JobResult(job.job_id, (1,), "other")], 0.0)
    tiers.finished([JobResult(job.job_id)], 0.0)
    tiers.check()
    assert match(tiers, KEYS, 0, 3) == 0
    assert tiers.chunks.slots.used == [0]
    assert tiers.chunks.counts["errors:other"] == 1
    assert "stored_chunks" not in tiers.chunks.counts


# Recency: children before parents.


def test_children_of_one_store_are_evicted_before_their_parents() -> None:
    tiers = make_tiers(admission=DRAM_ONLY)
    store(tiers, KEYS[:3])
    store(tiers, KEYS[:5])
    assert eviction_order(tiers) == [b"k4", b"k3", b"k2", b"k1", b"k0"]


def test_touch_moves_a_whole_prefix_and_keeps_the_order() -> None:
    tiers = make_tiers(admission=DRAM_ONLY)
    store(tiers, KEYS[:3])
    store(tiers, [b"other0", b"other1"])
    touch(tiers, KEYS[:3], 3, 0)
    assert eviction_order(tiers) == [b"other1", b"other0", b"k2", b"k1", b"k0"]
    touch(tiers, [b"other0", b"other1", b"unknown"], 1, 0)
    assert eviction_order(tiers) == [b"other1", b"k2", b"k1", b"k0", b"other0"]


def test_a_loaded_span_goes_behind_the_prefix_that_was_in_hbm() -> None:
    tiers = make_tiers(admission=DRAM_ONLY)
    store(tiers, KEYS[:4])
    store(tiers, [b"other"])
    job = plan_load(tiers, KEYS[:4], first=2)
    assert eviction_order(tiers) == [b"other", b"k1", b"k0"]
    end(tiers, job)
    assert eviction_order(tiers) == [b"other", b"k3", b"k2", b"k1", b"k0"]


def test_persisting_does_not_change_the_order() -> None:
    """full_duplicate writes every chunk right after its store, parents first."""
    tiers = make_tiers()
    store(tiers, KEYS[:4])
    jobs = tiers.make_room(0.0)
    assert keys_of(jobs) == KEYS[:4]
    end(tiers, *jobs)
    assert eviction_order(tiers) == [b"k3", b"k2", b"k1", b"k0"]


def test_a_row_joins_behind_its_nearest_listed_ancestor() -> None:
    tiers = make_tiers(admission=DRAM_ONLY)
    store(tiers, KEYS[:5])
    load_1, load_3 = plan_load(tiers, KEYS[:5], 1, 2), plan_load(tiers, KEYS[:5], 2, 4)
    end(tiers, load_3)
    end(tiers, load_1)
    assert eviction_order(tiers) == [b"k4", b"k3", b"k2", b"k1", b"k0"]


# Eviction.


def test_make_room_evicts_to_the_headroom_and_no_further() -> None:
    tiers = make_tiers(8, admission=DRAM_ONLY, headroom=3)
    store(tiers, KEYS[:5])
    tiers.make_room(0.0)
    assert match(tiers, KEYS, 0, 12) == 5
    store(tiers, KEYS[:7])
    tiers.make_room(0.0)
    assert match(tiers, KEYS, 0, 12) == 5
    assert tiers.chunks.slots.free(0) == 3
    assert tiers.chunks.counts["evicted_chunks:dropped"] == 2


def test_slots_on_their_way_count_as_headroom() -> None:
    tiers = make_tiers(8, admission=AdmissionConfig(policy="saria", evictions=1), headroom=3)
    store(tiers, KEYS[:8])
    jobs = tiers.make_room(0.0)
    assert len(keys_of(jobs)) == 3
    assert tiers.make_room(0.0) == []
    assert match(tiers, KEYS, 0, 12) == 8, "still a hit while it is written"
    end(tiers, *jobs)
    assert tiers.chunks.slots.free(0) == 3
    assert match(tiers, KEYS, 0, 12) == 8, "now from SSD"
    assert tier_tokens(tiers, KEYS, 0, 8) == (5 * 16, 3 * 16)


def test_leased_chunks_are_not_evicted() -> None:
    tiers = make_tiers(4, admission=DRAM_ONLY, headroom=4)
    store(tiers, KEYS[:4])
    job = plan_load(tiers, KEYS[:4])
    tiers.make_room(0.0)
    assert tiers.chunks.slots.free(0) == 0
    end(tiers, job)
    tiers.make_room(0.0)
    assert tiers.chunks.slots.free(0) == 4


def test_two_groups_that_share_the_last_empty_slab_both_get_room() -> None:
    """Each group alone would count the slab as its own, and nothing would be evicted or stored ever again."""
    tiers = Tiers(
        [GroupShape(0, 16, 1, RECORD), GroupShape(1, 16, 1, RECORD)],
        SlotAllocator(3, [1, 1]),
        None,
        make_admission(DRAM_ONLY, 16),
        ghosts_max=9,
        headroom=[1, 1],
        persist_bytes_max=RECORD,
    )
    for key in KEYS:
        tiers.make_room(0.0)
        store(tiers, [key])
    assert match(tiers, KEYS, 11, 12) == 12


# Admission.


def test_the_second_eviction_persists_by_default() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="saria"))
    store(tiers, KEYS[:1])
    assert evict_all(tiers) == []
    assert match(tiers, KEYS, 0, 1) == 0
    store(tiers, KEYS[:1])
    (job,) = evict_all(tiers)
    assert [(item.key, item.parent) for item in job.items] == [(b"k0", b"")]
    end(tiers, job)
    assert tiers.chunks.counts["admission:not_yet"] == tiers.chunks.counts["admission:eviction_count"] == 1
    assert tier_tokens(tiers, KEYS, 0, 1) == (0, 16)


def test_a_forgotten_ghost_starts_again() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="saria"), ghosts_max=1)
    store(tiers, [b"x"])
    evict_all(tiers)
    store(tiers, [b"y"])
    evict_all(tiers)
    store(tiers, [b"x"])
    assert evict_all(tiers) == []


def test_the_nth_reuse_persists_before_eviction() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="saria", reuses=2))
    store(tiers, KEYS[:2])
    touch(tiers, KEYS, 2, 1)
    assert tiers.make_room(0.0) == []
    touch(tiers, KEYS, 2, 1)
    (job,) = tiers.make_room(0.0)
    assert job.keys == (b"k0",)
    end(tiers, job)
    touch(tiers, KEYS, 2, 1)
    assert tiers.make_room(0.0) == [], "written once"
    assert evict_all(tiers) == []
    assert tiers.chunks.counts["evicted_chunks:already_on_ssd"] == 1


def test_full_duplicate_writes_each_chunk_once_before_eviction() -> None:
    tiers = make_tiers()
    store(tiers, KEYS[:3])
    jobs = tiers.make_room(0.0)
    assert keys_of(jobs) == KEYS[:3]
    end(tiers, *jobs)
    assert evict_all(tiers) == []
    assert match(tiers, KEYS, 0, 12) == 3
    assert tiers.chunks.counts["admission:every_chunk"] == tiers.chunks.counts["persisted_chunks"] == 3


def test_dram_only_never_writes() -> None:
    tiers = make_tiers(admission=DRAM_ONLY)
    for _ in range(5):
        store(tiers, KEYS[:3])
        touch(tiers, KEYS, 3, 3)
        assert tiers.make_room(0.0) == []
        assert evict_all(tiers) == []
    assert tiers.chunks.counts["dropped_chunks:not_admitted"] == 15


def test_without_an_ssd_what_is_admitted_is_dropped_and_counted() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="saria", evictions=1), ssd=False)
    store(tiers, KEYS[:2])
    assert evict_all(tiers) == []
    assert tiers.chunks.counts["dropped_chunks:ssd_off"] == 2
    assert tiers.chunks.slots.used == [0]


# Persisting.


def test_over_the_persist_bound_evicted_chunks_are_dropped_and_counted() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="saria", evictions=1), persist_records=2)
    store(tiers, KEYS[:5])
    jobs = evict_all(tiers)
    assert keys_of(jobs) == [b"k4", b"k3"]
    assert tiers.chunks.counts["dropped_chunks:persist_queue_full"] == 3
    assert tiers.chunks.counts["evicted_chunks:dropped"] == 3
    end(tiers, *jobs)
    store(tiers, KEYS[:1])
    assert len(evict_all(tiers)) == 1, "ended writes make room in the bound"


def test_over_the_persist_bound_early_persists_wait() -> None:
    tiers = make_tiers(persist_records=2)
    store(tiers, KEYS[:5])
    written = []
    for expected in (2, 2, 1, 0):
        jobs = tiers.make_room(0.0)
        assert len(keys_of(jobs)) == expected
        written += keys_of(jobs)
        assert tiers.make_room(0.0) == []
        end(tiers, *jobs)
    assert written == KEYS[:5]
    assert "dropped_chunks:persist_queue_full" not in tiers.chunks.counts


def test_a_record_larger_than_the_bound_is_written_alone() -> None:
    tiers = make_tiers(persist_records=0)
    store(tiers, KEYS[:2])
    assert len(keys_of(tiers.make_room(0.0))) == 1


def test_a_load_during_the_write_of_an_evicted_chunk_rescues_it() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="saria", evictions=1))
    store(tiers, KEYS[:1])
    (persist,) = evict_all(tiers)
    load = plan_load(tiers, KEYS[:1])
    assert load.items[0].slot == persist.items[0].slot
    end(tiers, persist)
    assert tiers.chunks.slots.used == [1], "the slot is being read"
    end(tiers, load)
    assert tier_tokens(tiers, KEYS, 0, 1) == (16, 0), "kept in DRAM"
    assert eviction_order(tiers) == [b"k0"]
    assert evict_all(tiers) == []
    assert tiers.chunks.counts["evicted_chunks:already_on_ssd"] == 1


def test_evicting_a_chunk_that_is_being_written_waits_for_that_write() -> None:
    tiers = make_tiers()
    store(tiers, KEYS[:1])
    (persist,) = tiers.make_room(0.0)
    assert evict_all(tiers) == []
    assert match(tiers, KEYS, 0, 1) == 1
    end(tiers, persist)
    assert tiers.chunks.slots.used == [0]
    assert tier_tokens(tiers, KEYS, 0, 1) == (0, 16)


def test_a_failed_write_pauses_the_drive_and_drops_its_segments() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="saria", evictions=1), persist_records=12)
    store(tiers, KEYS[:3])
    end(tiers, *evict_all(tiers), failed=(0, 2), now=100.0, reason="write_failed")
    assert [match(tiers, [key], 0, 1) for key in KEYS[:3]] == [0, 0, 0]
    assert tiers.chunks.counts["errors:write_failed"] == 2
    assert "persisted_chunks" not in tiers.chunks.counts, "what was written beside it may be no better"
    assert tiers.chunks.extents is not None
    assert tiers.chunks.extents.retired == [(0, 0), (0, 1)]
    counts = tiers.take_counts()
    assert (counts["drive_errors:0"], counts["drive_pauses:0"]) == (2, 1)
    store(tiers, [b"x", b"y"])
    assert evict_all(tiers, now=109.0) == []
    assert tiers.chunks.counts["dropped_chunks:ssd_full"] == 2
    store(tiers, [b"x"])
    assert len(evict_all(tiers, now=110.0)) == 1


def test_a_failed_early_write_keeps_the_chunk_in_dram() -> None:
    tiers = make_tiers()
    store(tiers, KEYS[:1])
    (persist,) = tiers.make_room(0.0)
    end(tiers, persist, failed=(0,))
    assert tier_tokens(tiers, KEYS, 0, 1) == (16, 0)
    (again,) = evict_all(tiers, now=60.0)
    assert again.items[0].extent != persist.items[0].extent


def test_under_the_cap_the_oldest_segment_goes_with_its_chunks() -> None:
    tiers = make_tiers(records=2, segments_max=2)
    on_ssd(tiers, [b"a", b"b"])
    on_ssd(tiers, [b"c", b"d"])
    on_ssd(tiers, [b"e"])
    assert [match(tiers, [key], 0, 1) for key in (b"a", b"b", b"c", b"d", b"e")] == [0, 0, 1, 1, 1]
    assert tiers.chunks.counts["retired_chunks"] == 2
    assert tiers.chunks.extents is not None
    assert tiers.chunks.extents.retired == [(0, 0)]


def test_a_segment_that_is_being_read_is_not_retired() -> None:
    tiers = make_tiers(records=2, segments_max=2)
    on_ssd(tiers, [b"a", b"b"])
    on_ssd(tiers, [b"c", b"d"])
    load = plan_load(tiers, [b"a"])
    on_ssd(tiers, [b"e"])
    assert [match(tiers, [key], 0, 1) for key in (b"a", b"b", b"c", b"d")] == [1, 1, 0, 0]
    end(tiers, load)
    on_ssd(tiers, [b"f", b"g"])
    assert match(tiers, [b"a"], 0, 1) == 0


def test_a_chunk_in_dram_survives_the_retirement_of_its_ssd_copy() -> None:
    tiers = make_tiers(records=1, segments_max=1)
    store(tiers, [b"a"])
    end(tiers, *tiers.make_room(0.0))
    on_ssd_job = plan_store(tiers, [b"b"])
    end(tiers, on_ssd_job)
    end(tiers, *tiers.make_room(0.0))
    assert tier_tokens(tiers, [b"a", b"b"], 0, 2) == (32, 0)
    assert len(evict_all(tiers)) == 1, "only the retired one is written again"


def test_a_wish_to_write_a_chunk_dies_with_it() -> None:
    """Index rows are used again: the next chunk in the row was never admitted."""
    tiers = make_tiers(admission=AdmissionConfig(policy="saria", evictions=9, reuses=1), persist_records=1)
    store(tiers, [b"a", b"b"])
    touch(tiers, [b"a", b"b"], 2, 2)
    (persist,) = tiers.make_room(0.0)
    evict_all(tiers)
    end(tiers, persist)
    store(tiers, [b"x", b"y"])
    assert tiers.make_room(0.0) == []


# Failed loads.


def test_a_chunk_that_failed_to_load_from_ssd_is_not_offered_again() -> None:
    tiers = make_tiers(ranks=2)
    job = plan_store(tiers, KEYS[:3])
    end(tiers, job, job)
    for persist in tiers.make_room(0.0):
        end(tiers, persist, persist)
    evict_all(tiers)
    load = plan_load(tiers, KEYS[:3])
    assert all(item.extent is not None for item in load.items)
    tiers.finished([JobResult(load.job_id, (1,), "checksum")], 0.0)
    tiers.finished([JobResult(load.job_id)], 0.0)
    tiers.check()
    assert match(tiers, KEYS, 0, 3) == 1
    assert match(tiers, KEYS, 2, 3) == 3
    assert tiers.chunks.counts["loads:failed"] == 1
    assert "hit_tokens:ssd" not in tiers.chunks.counts


def test_a_chunk_that_failed_to_load_from_dram_is_not_offered_again_though_another_load_reads_it() -> None:
    tiers = make_tiers()
    store(tiers, KEYS[:2])
    bad, other = plan_load(tiers, KEYS[:2]), plan_load(tiers, KEYS[:2])
    end(tiers, bad, failed=(0,))
    assert match(tiers, KEYS, 0, 2) == 0
    assert tiers.chunks.slots.used == [2], "the other load still reads the slot"
    end(tiers, other)
    assert match(tiers, KEYS, 0, 2) == 0
    assert tiers.chunks.slots.used == [1]
    store(tiers, KEYS[:2])
    assert match(tiers, KEYS, 0, 2) == 2


def test_a_bad_dram_copy_is_not_trusted_on_ssd_either() -> None:
    tiers = make_tiers()
    store(tiers, KEYS[:1])
    load = plan_load(tiers, KEYS[:1])
    (persist,) = tiers.make_room(0.0)
    end(tiers, load, failed=(0,))
    assert match(tiers, KEYS, 0, 1) == 0
    assert tiers.chunks.slots.used == [1], "still being written from"
    end(tiers, persist)
    assert match(tiers, KEYS, 0, 1) == 0
    assert tiers.chunks.slots.used == [0]


def test_two_loads_of_one_bad_record_end_while_the_chunk_is_stored_again() -> None:
    tiers = make_tiers()
    on_ssd(tiers, KEYS[:1])
    first, second = plan_load(tiers, KEYS[:1]), plan_load(tiers, KEYS[:1])
    end(tiers, first, failed=(0,))
    again = plan_store(tiers, KEYS[:1])
    end(tiers, again)
    (persist,) = tiers.make_room(0.0)
    end(tiers, persist)
    end(tiers, second, failed=(0,))
    assert match(tiers, KEYS, 0, 1) == 1, "the better copies are kept"
    evict_all(tiers)
    assert plan_load(tiers, KEYS[:1]).items[0].extent == persist.items[0].extent


def test_shared_loads_are_counted() -> None:
    tiers = make_tiers()
    store(tiers, KEYS[:1])
    assert not is_loading(tiers, KEYS[0])
    first, second = plan_load(tiers, KEYS[:1]), plan_load(tiers, KEYS[:1])
    end(tiers, first)
    assert is_loading(tiers, KEYS[0])
    end(tiers, second)
    assert not is_loading(tiers, KEYS[0])
    assert tiers.chunks.counts["hit_tokens:dram"] == 32


def test_tokens_of_blocks_that_hbm_has_are_no_hit_of_ours() -> None:
    """A load that begins inside a chunk."""
    tiers = Tiers(
        [GroupShape(0, 16, 4, RECORD)],
        SlotAllocator(1, [4]),
        None,
        make_admission(DRAM_ONLY, 64),
        ghosts_max=9,
        headroom=[0],
        persist_bytes_max=RECORD,
        ranks=1,
    )
    prefix, tables = Prefix(KEYS[:2]), [np.arange(8, dtype=np.int32).reshape(2, 4)]
    job, _ = tiers.plan_store(prefix, 0, 2, tables, 0.0)
    assert job is not None
    end(tiers, job)
    tables[0][0, :3] = NULL_BLOCK
    end(tiers, tiers.plan_load("r", prefix, 0, 2, tables, 0.0))
    assert tiers.chunks.counts["hit_tokens:dram"] == 16 + 64


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_groups_are_stored_and_offered_together(ranks: int) -> None:
    tiers = Tiers(
        [GroupShape(0, 16, 1, RECORD), GroupShape(1, 16, 1, 3 * RECORD)],
        SlotAllocator(4, [4, 2]),
        ExtentAllocator(1, 4, [4, 2]),
        make_admission(AdmissionConfig(policy="saria"), 16),
        ghosts_max=9,
        headroom=[1, 1],
        persist_bytes_max=8 * RECORD,
        ranks=ranks,
    )
    job = plan_store(tiers, KEYS[:3])
    assert [item.group for item in job.items] == [0, 0, 0, 1, 1, 1]
    end(tiers, *[job] * ranks)
    load = plan_load(tiers, KEYS[:3])
    end(tiers, *[load] * (ranks - 1))
    tiers.finished([JobResult(load.job_id, (4,), "checksum")], 0.0)
    tiers.check()
    assert match(tiers, KEYS, 0, 3) == 1, "group 1 lost its second chunk"
    again = plan_store(tiers, KEYS[:3])
    assert [(item.group, item.blocks) for item in again.items] == [(1, (1,))]


def test_a_chunk_worth_a_write_waits_while_half_of_the_headroom_is_there() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="saria", evictions=1), headroom=4, persist_records=1)
    store(tiers, KEYS[:6])
    first = tiers.make_room(0.0)
    assert keys_of(first) == [b"k5"], "two slots are free: the rest may wait"
    assert tiers.make_room(0.0) == []
    end(tiers, *first)
    assert keys_of(tiers.make_room(0.0)) == [b"k4"]
    assert "dropped_chunks:persist_queue_full" not in tiers.chunks.counts
    store(tiers, KEYS[6:8])
    tiers.make_room(0.0)
    assert tiers.chunks.counts["dropped_chunks:persist_queue_full"] > 0, "a store never waits for a disk"


# Drives.


def test_news_of_drives_are_nothing_to_a_tier_that_is_not_open() -> None:
    tiers = make_tiers(ssd=False)
    store(tiers, KEYS[:2])
    tiers.moved([Moved(0, 4096, 0.1, 0, 0.0)], 0.0, 0.0)
    tiers.shrink_ssd()
    tiers.adopt_others([FoundChunk(0, b"theirs", b"", Extent(1, 0, 0))], [(1, 5)])
    assert tiers.take_problems() == []
    assert match(tiers, [b"theirs"], 0, 1) == 0
    assert tiers.take_counts() == {"stored_chunks": 2}
    end(tiers, plan_load(tiers, KEYS[:2]))


# Drives that hang.


def two_drives(persist_records: int) -> Tiers:
    tiers = make_tiers(
        16, admission=AdmissionConfig(policy="saria", evictions=1), headroom=1, persist_records=persist_records
    )
    tiers.chunks.extents = ExtentAllocator(2, 4, [4])
    return tiers


def test_a_drive_whose_writes_never_end_holds_up_no_other() -> None:
    tiers = two_drives(persist_records=4)
    written = 0
    for number in range(8):
        store(tiers, [b"%d.%d" % (number, n) for n in range(4)])
        for persist in evict_all(tiers):
            if persist.drive == 1:
                end(tiers, persist)
                written += persist.chunks
    assert written >= 8, "drive 1 goes on, two at a time"
    in_flight = [len(job.rows) for job in tiers.jobs.live.values() if job.kind == "persist"]
    assert sum(in_flight) == 2, "drive 0 has its share in flight"


def test_a_job_is_a_quarter_of_what_may_be_on_its_way_to_its_drive() -> None:
    tiers = two_drives(persist_records=24)
    store(tiers, KEYS)
    jobs = evict_all(tiers)
    assert [(job.drive, job.chunks) for job in jobs] == [(0, 3), (0, 3), (1, 3), (1, 3)]
    assert sorted(keys_of(jobs)) == sorted(KEYS)


def test_what_came_too_late_is_kept_and_its_drive_left_alone_for_a_while() -> None:
    tiers = two_drives(persist_records=8)
    store(tiers, KEYS[:4])
    end(tiers, *evict_all(tiers))
    load = plan_load(tiers, KEYS[:4])
    slow = next(n for n, item in enumerate(load.items) if item.extent is not None and item.extent.drive == 0)
    end(tiers, load, failed=(slow,), reason="deadline", now=100.0)
    assert match(tiers, KEYS, 0, 4, now=100.0) < 4, "nothing is offered from the drive that hangs"
    assert match(tiers, KEYS, 0, 4, now=100.0 + READS_PAUSE_S) == 4, "and nothing of it was lost"
