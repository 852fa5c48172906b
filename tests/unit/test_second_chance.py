"""Chunks that are read while their SSD segment goes soon get a second life there, within a share of writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.endurance import Governor
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.tiers import Tiers
from tier_steps import (
    RECORD,
    blocks,
    end,
    evict_all,
    keys_of,
    make_tiers,
    match,
    plan_load,
    store,
    tier_tokens,
)

OLD, REST = [b"a", b"b"], [b"c", b"d", b"e", b"f", b"g"]
"""Four segments of two records: those of the first go soon."""
EVERY = AdmissionConfig(policy="saria", evictions=1)


def filled(second_chance: float = 1.0, admission: AdmissionConfig = EVERY, **sizes: int) -> Tiers:
    tiers = make_tiers(8, admission=admission, headroom=1, second_chance=second_chance, **sizes)  # type: ignore[arg-type]
    for keys in (OLD, *([key] for key in REST)):
        store(tiers, keys)
        for persist in evict_all(tiers):
            end(tiers, persist)
    assert tier_tokens(tiers, OLD, 0, 2) == (0, 32)
    return tiers


def read(tiers: Tiers, keys: Sequence[bytes]) -> None:
    """A request whose hit this is."""
    tiers.arrived(Prefix(keys), len(keys), 0.0)
    end(tiers, plan_load(tiers, keys))


def stored_again(tiers: Tiers, keys: Sequence[bytes]) -> bool:
    """Whether what HBM holds now is copied to DRAM."""
    job, _ = tiers.plan_store(Prefix(keys), 0, len(keys), blocks(0, len(keys)), 0.0)
    if job is not None:
        end(tiers, job)
    return job is not None


def counted(tiers: Tiers, name: str) -> int:
    return tiers.chunks.counts.get(name, 0)


def test_what_was_read_outlives_its_segment() -> None:
    tiers = filled()
    read(tiers, OLD)
    assert stored_again(tiers, OLD)
    again = evict_all(tiers)
    assert keys_of(again) == [b"b", b"a"], "children first, as they leave DRAM"
    assert tier_tokens(tiers, OLD, 0, 2) == (32, 0), "a hit while it is written"
    end(tiers, *again)
    assert counted(tiers, "admission:second_chance") == 2
    assert counted(tiers, "second_chance_bytes") == 2 * RECORD
    assert counted(tiers, "persisted_chunks") == 9
    for key in (b"h", b"i", b"j"):
        store(tiers, [key])
        end(tiers, *evict_all(tiers))
    assert tiers.chunks.extents is not None
    assert tiers.chunks.extents.retired[0] == (0, 0), "the segment that they were in first"
    assert tier_tokens(tiers, OLD, 0, 2) == (0, 32)


def test_a_third_life_needs_another_read() -> None:
    tiers = filled()
    read(tiers, OLD)
    assert stored_again(tiers, OLD)
    end(tiers, *evict_all(tiers))
    for number in range(20):
        if not match(tiers, OLD, 0, 1):
            break
        assert not stored_again(tiers, OLD[:1])
        store(tiers, [b"x%d" % number])
        end(tiers, *evict_all(tiers))
    assert 4 < number < 10, "it lived as long as any other"
    assert counted(tiers, "admission:second_chance") == 2


@pytest.mark.parametrize(
    ("share", "keys", "reads"),
    [(1.0, OLD, 0), (0.0, OLD, 1), (0.1, OLD, 1), (1.0, REST[1:2], 1)],
    ids=["not read", "turned off", "no write of seven is a tenth", "in a newer segment"],
)
def test_no_second_chance(share: float, keys: list[bytes], reads: int) -> None:
    tiers = filled(share)
    for _ in range(reads):
        read(tiers, keys)
    assert not stored_again(tiers, keys)
    assert not evict_all(tiers)
    assert not counted(tiers, "second_chance_bytes")


def test_no_second_chance_while_there_is_room_on_the_drive() -> None:
    tiers = filled(segments_max=5)
    read(tiers, OLD)
    assert not stored_again(tiers, OLD)


def test_no_more_is_written_again_than_its_share_of_first_writes() -> None:
    tiers = filled(0.15)
    read(tiers, OLD)
    assert stored_again(tiers, OLD)
    assert tier_tokens(tiers, OLD, 0, 2) == (16, 16), "one of seven"
    end(tiers, *evict_all(tiers))
    read(tiers, OLD)
    assert not stored_again(tiers, OLD)
    assert counted(tiers, "second_chance_bytes") == RECORD


def test_what_was_granted_counts_before_it_is_written() -> None:
    tiers = filled(0.15)
    read(tiers, OLD)
    read(tiers, OLD)
    assert tiers.chunks.granted == [1]
    assert stored_again(tiers, OLD)
    assert tier_tokens(tiers, OLD, 0, 2) == (16, 16)


def test_what_goes_with_its_segment_gives_its_share_back() -> None:
    tiers = filled()
    read(tiers, OLD)
    assert tiers.chunks.granted == [2]
    store(tiers, [b"x", b"y"])
    persists = evict_all(tiers)
    assert keys_of(persists) == [b"y", b"x"]
    end(tiers, *persists)
    assert match(tiers, OLD, 0, 2) == 0
    assert tiers.chunks.granted == [0]


def test_a_reset_gives_all_back() -> None:
    tiers = filled()
    read(tiers, OLD)
    tiers.reset()
    tiers.check()
    assert tiers.chunks.granted == [0]


def test_a_write_that_retires_the_segment_of_what_leaves_next_is_seen() -> None:
    """Whatever is evicted with it: else it would be gone from both tiers, and nobody was asked."""
    tiers = filled(0.0)
    store(tiers, [b"x", b"y"])
    behind_a_gap = Prefix(OLD)
    tiers.arrived(behind_a_gap, 0, 0.0)
    job, _ = tiers.plan_store(behind_a_gap, 0, 2, blocks(0, 2), 0.0)
    assert job is not None, "it is computed, and its record may be gone before its piece comes"
    end(tiers, job)
    assert keys_of(evict_all(tiers)) == [b"y", b"x", b"b", b"a"]


def test_one_that_left_hbm_with_both_copies_is_written_again_too() -> None:
    """Nothing has to be read from SSD for it."""
    tiers = make_tiers(8, headroom=1, second_chance=1.0)
    for key in (*OLD, *REST):
        store(tiers, [key])
        end(tiers, *tiers.make_room(0.0))
    tiers.arrived(Prefix(OLD), 2, 0.0)
    assert keys_of(evict_all(tiers)) == [b"b", b"a"]


def test_admission_is_asked_again() -> None:
    tiers = filled(admission=EVERY)
    tiers.evictor._admission = make_tiers(admission=AdmissionConfig(policy="dram_only"))._admission
    read(tiers, OLD)
    assert stored_again(tiers, OLD)
    dropped = counted(tiers, "evicted_chunks:already_on_ssd")
    assert evict_all(tiers) == []
    assert counted(tiers, "evicted_chunks:already_on_ssd") == dropped + 2
    assert not counted(tiers, "dropped_chunks:not_admitted") and not counted(tiers, "admission:never")
    assert tier_tokens(tiers, OLD, 0, 2) == (0, 32)
    assert tiers.chunks.granted == [0]
    assert not stored_again(tiers, OLD), "until it is read again"


def test_a_write_budget_that_is_spent_leaves_the_old_record() -> None:
    tiers = filled()
    read(tiers, OLD)
    assert stored_again(tiers, OLD)
    tiers.evictor.governors = [Governor(1.0, 1.0, 0.0)]
    assert evict_all(tiers) == []
    assert tier_tokens(tiers, OLD, 0, 2) == (0, 32)
    assert tiers.chunks.granted == [0]
    assert not counted(tiers, "dropped_chunks:over_budget"), "nothing was lost"
    assert not counted(tiers, "second_chance_bytes")


def test_a_second_chance_is_spent_from_the_write_budget() -> None:
    tiers = filled()
    governor = Governor(1000.0 * RECORD, 1000.0 * RECORD, 0.0)
    tiers.evictor.governors = [governor]
    read(tiers, OLD)
    assert stored_again(tiers, OLD)
    assert len(keys_of(evict_all(tiers))) == 2
    assert governor.written_bytes == 2 * RECORD


def test_what_the_bound_of_writes_in_flight_does_not_take_keeps_its_old_record() -> None:
    tiers = filled()
    tiers.evictor._persist_bytes_max = RECORD
    read(tiers, OLD)
    assert stored_again(tiers, OLD)
    again = evict_all(tiers)
    assert keys_of(again) == [b"b"]
    end(tiers, *again)
    assert tier_tokens(tiers, OLD, 0, 2) == (0, 32)
    assert tiers.chunks.granted == [0]
    assert not counted(tiers, "dropped_chunks:persist_queue_full")


def test_a_second_write_that_fails_forgets_the_chunk() -> None:
    tiers = filled()
    read(tiers, OLD)
    assert stored_again(tiers, OLD)
    failing, well = evict_all(tiers)
    end(tiers, failing, failed=(0,), reason="write_failed")
    end(tiers, well)
    assert [match(tiers, [key], 0, 1) for key in OLD] == [1, 0]
    assert counted(tiers, "errors:write_failed") == 1


def test_an_old_record_that_turns_out_bad_does_not_take_the_new_one_with_it() -> None:
    tiers = filled()
    tiers.arrived(Prefix(OLD), 2, 0.0)
    late = plan_load(tiers, OLD)
    assert stored_again(tiers, OLD)
    assert evict_all(tiers) == [], "leased"
    end(tiers, plan_load(tiers, OLD))
    (place,) = {item.extent for item in late.items if item.key == b"a"}
    end(tiers, late, failed=(0,))
    assert tier_tokens(tiers, OLD, 0, 2) == (32, 0)
    again = evict_all(tiers)
    end(tiers, *again)
    assert tier_tokens(tiers, OLD, 0, 2) == (0, 32)
    assert place not in {item.extent for item in plan_load(tiers, OLD).items}


def test_unknown_chunks_and_those_on_other_drives_get_none() -> None:
    tiers = filled()
    index = tiers.chunks.index
    rows = index.find_each(0, OLD)
    index.extent[rows[1], 0] = 1
    tiers.evictor.grant(0, np.array([-1, *rows, -1], np.int32))
    assert index.again[rows].tolist() == [1, 0]
