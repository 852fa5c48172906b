"""What `Tiers` does with drives that fail: their chunks are forgotten, never those of others."""

from __future__ import annotations

import pytest

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.types import Extent, FoundChunk, FoundChunks
from tier_steps import KEYS, end, evict_all, make_tiers, match, on_ssd, plan_load, plan_store, store, tier_tokens


def test_what_is_on_a_drive_that_is_not_read_is_stored_again() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="saria", evictions=1), drives=2, persist_records=12)
    store(tiers, KEYS[:4])
    end(tiers, *evict_all(tiers))
    assert tiers.chunks.extents is not None
    tiers.chunks.extents.pause_reads(0, 0.0)
    assert match(tiers, KEYS, 0, 4) == 1
    job = plan_store(tiers, KEYS[:4])
    assert job.chunks == 2, "of the other drive's nothing"
    end(tiers, job)
    assert match(tiers, KEYS, 0, 4) == 4
    assert tier_tokens(tiers, KEYS, 0, 4) == (32, 32)


@pytest.mark.parametrize("reason", ["read_failed", "vanished", "checksum", "other"])
def test_what_a_failed_read_says_of_its_drive(reason: str) -> None:
    """Segments of two records, children first; chunk 1 fails, 0 is in its segment."""
    tiers = make_tiers(admission=AdmissionConfig(policy="saria", evictions=1), persist_records=12)
    store(tiers, KEYS[:4])
    end(tiers, *evict_all(tiers))
    load, other = plan_load(tiers, KEYS[:4]), plan_load(tiers, KEYS[:1])
    end(tiers, load, failed=(1,), reason=reason)
    left = {"read_failed": [0, 0, 1, 1], "vanished": [0] * 4}.get(reason, [1, 0, 1, 1])
    assert [match(tiers, [key], 0, 1) for key in KEYS[:4]] == left
    assert tiers.chunks.extents is not None
    assert tiers.chunks.extents.retired == ([(0, 0)] if reason == "vanished" else [])
    end(tiers, other)
    gone = {"read_failed": [(0, 1)], "vanished": [(0, 0), (0, 1)]}.get(reason, [])
    assert tiers.chunks.extents.retired == gone, "when the last job that reads it has ended"
    assert tiers.take_counts().get("drive_errors:0", 0) == (reason != "other")


def test_loads_of_two_drives_do_not_say_which_is_gone() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="saria", evictions=1), drives=2, persist_records=12)
    store(tiers, KEYS[:4])
    end(tiers, *evict_all(tiers))
    end(tiers, plan_load(tiers, KEYS[:4]), failed=(0, 1), reason="vanished")
    assert tiers.take_problems() == []
    assert tiers.chunks.extents is not None
    assert not tiers.chunks.extents.striping.left_out


def test_a_write_that_ends_well_on_a_segment_that_was_given_up_is_not_kept() -> None:
    tiers = make_tiers(admission=AdmissionConfig(policy="saria", evictions=1), records=4, persist_records=8)
    store(tiers, KEYS[:4])
    jobs = evict_all(tiers)
    assert len(jobs) == 2
    end(tiers, jobs[0], failed=(0,), reason="write_failed")
    end(tiers, jobs[1])
    assert [match(tiers, [key], 0, 1) for key in KEYS[:4]] == [0] * 4
    assert tiers.chunks.extents is not None
    assert tiers.chunks.extents.retired == [(0, 0)]


def test_a_full_drive_gives_up_the_oldest_and_keeps_what_was_written() -> None:
    """Four chunks are there, in segments of two; of the next two one finds no room."""
    tiers = make_tiers(admission=AdmissionConfig(policy="saria", evictions=1), persist_records=12, segments_max=9)
    store(tiers, KEYS[:4])
    end(tiers, *evict_all(tiers))
    store(tiers, [b"x", b"y"])
    end(tiers, *evict_all(tiers), failed=(1,), reason="disk_full")
    assert tiers.chunks.extents is not None
    assert tiers.chunks.extents.retired == [(0, 0), (0, 2)]
    assert [match(tiers, [key], 0, 1) for key in (*KEYS[:4], b"x", b"y")] == [1, 1, 0, 0, 0, 0]
    store(tiers, [b"z"])
    assert evict_all(tiers, now=9.0) == []
    store(tiers, [b"z"])
    end(tiers, *evict_all(tiers, now=10.0), now=10.0)
    assert match(tiers, [b"z"], 0, 1) == 1
    counts = tiers.take_counts()
    assert (counts["drive_errors:0"], counts["drive_pauses:0"], counts["retired_chunks"]) == (1, 1, 2)


def test_failed_reads_of_more_chunks_than_are_remembered_forget_each_once() -> None:
    tiers = make_tiers(records=4, ghosts_max=1)
    on_ssd(tiers, KEYS[:4])
    end(tiers, plan_load(tiers, KEYS[:4]), failed=(0,), reason="read_failed")
    assert match(tiers, KEYS, 0, 4) == 0
    assert len(tiers.chunks.index) == 1


def test_a_prefix_found_on_two_drives_has_one_object_for_each_key() -> None:
    """Of a million chunks a second one for the parent would take a third of the index."""
    tiers = make_tiers(drives=2)
    keys = [bytes([n]) * 32 for n in range(1, 9)]
    places = [Extent(n % 2, n // 4, n // 2 % 2) for n in range(8)]
    chunks = [FoundChunk(0, key, keys[n - 1] if n else b"", places[n]) for n, key in enumerate(keys)]
    chunks += [FoundChunk(0, b"orphan", b"of none", Extent(0, 2, 0)), FoundChunk(0, b"last", keys[7], Extent(0, 2, 1))]
    chunks.sort(key=lambda chunk: (chunk.extent.segment, chunk.extent.drive, chunk.extent.record))
    tiers.open_ssd(ExtentAllocator(2, 4, [2]), FoundChunks.of(chunks), 3)
    tiers.check()
    index = tiers.chunks.index
    for key, parent in ((chunk.key, chunk.parent) for chunk in chunks):
        found = index.parent[index.rows[0][key]]
        assert found == parent
        assert parent not in keys or found is index.key[index.rows[0][parent]]
    assert match(tiers, keys, 0, 8) == 8
