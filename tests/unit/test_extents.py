"""SSD records: filling, retiring oldest first under the cap, leases, pauses, adoption and reset."""

from __future__ import annotations

import random

import numpy as np
import pytest

from saria_vllm.policy.extents import (
    SEGMENT_BYTES_MAX,
    SEGMENT_OVERHEAD_BYTES,
    SEGMENTS_WANTED,
    ExtentAllocator,
    choose_segments,
)
from saria_vllm.policy.striping import PAUSE_S
from saria_vllm.storage.format import records_per_segment
from saria_vllm.types import RECORD_ALIGN_BYTES, Extent, Ints


def places(*extents: Extent | None) -> Ints:
    return np.array(extents, np.int32)


def write(extents: ExtentAllocator, row: int, group: int = 0, now: float = 0.0) -> tuple[Extent | None, list[int]]:
    """One write that ends well at once."""
    taken, lost = extents.take(group, 1, [9] * extents.drives, now)
    if len(taken):
        extents.filled(taken, np.array([row], np.int32))
        extents.release(taken)
    return Extent(*taken[0].tolist()) if len(taken) else None, lost.tolist()


def adopt(extents: ExtentAllocator, extent: Extent, group: int, row: int) -> bool:
    return bool(extents.adopt(places(extent), group, np.array([row], np.int32))[0])


def take(extents: ExtentAllocator, group: int, now: float) -> Extent | None:
    taken, _ = extents.take(group, 1, [9] * extents.drives, now)
    return Extent(*taken[0].tolist()) if len(taken) else None


def test_segments_are_filled_in_order_and_ids_never_repeat() -> None:
    extents = ExtentAllocator(1, 10, [2], next_segment=5)
    assert [write(extents, row)[0] for row in range(5)] == [
        Extent(0, 5, 0), Extent(0, 5, 1), Extent(0, 6, 0), Extent(0, 6, 1), Extent(0, 7, 0),
    ]  # fmt: skip


def test_drives_take_turns_and_groups_have_segments_of_their_own() -> None:
    extents = ExtentAllocator(2, 10, [4, 2])
    taken = [write(extents, row, group)[0] for row, group in enumerate([0, 0, 1, 1, 0, 0])]
    assert [extent.drive for extent in taken if extent] == [0, 1, 0, 1, 0, 1]
    assert len({(extent.drive, extent.segment) for extent in taken if extent}) == 4
    assert extents.segments() == 4


def test_a_batch_goes_to_all_drives_in_turn_as_far_as_each_has_room() -> None:
    extents = ExtentAllocator(3, 10, [4])
    taken, _ = extents.take(0, 9, [9, 1, 3], 0.0)
    assert taken[:, 0].tolist() == [0, 1, 2, 0, 2, 0, 2, 0, 0]
    assert taken[taken[:, 0] == 0].tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 3], [0, 1, 0]]
    extents.striping.failed(1, False, 0.0)
    taken, _ = extents.take(0, 4, [1, 9, 9], 0.0)
    assert sorted(taken[:, 0].tolist()) == [0, 2, 2, 2]
    assert len(extents.take(0, 9, [0, 9, 0], 0.0)[0]) == 0


def test_the_oldest_segment_is_retired_under_the_cap() -> None:
    extents = ExtentAllocator(1, 2, [2])
    for row in range(4):
        assert write(extents, row)[1] == []
    extent, lost = write(extents, 4)
    assert extent == Extent(0, 2, 0)
    assert lost == [0, 1]
    assert extents.retired == [(0, 0)]
    write(extents, 5)
    assert write(extents, 6)[1] == [2, 3]
    assert extents.retired == [(0, 0), (0, 1)]
    assert extents.segments() == 2


def test_the_oldest_quarter_of_a_full_drive_goes_soon() -> None:
    extents = ExtentAllocator(2, 5, [1])
    for row in range(8):
        write(extents, row)
    assert extents.going().tolist() == [-1, -1], "there is room"
    write(extents, 8)
    assert extents.going().tolist() == [4, -1], "only drive 0 is full: 0 and 2 go"
    write(extents, 9)
    write(extents, 10)
    assert extents.retired == [(0, 0)]
    assert extents.going().tolist() == [6, 5]
    assert ExtentAllocator(1, 0, [1]).going().tolist() == [-1]


def test_so_many_records_can_be_taken_before_one_is_lost() -> None:
    extents = ExtentAllocator(2, 2, [3])
    assert extents.untroubled(0, 0.0) == 6
    for row in range(9):
        write(extents, row)
        assert extents.untroubled(0, 0.0) == (11 - row) // 2, "on the drive that has the least left"
    assert not write(extents, 9)[1]
    extents.striping.failed(0, False, 0.0)
    extents.striping.failed(1, False, 0.0)
    assert extents.untroubled(0, 0.0) > 1 << 30, "nothing is written"


def test_records_that_are_not_readable_are_not_lost() -> None:
    extents = ExtentAllocator(1, 1, [3])
    for row in (7, 8, 9):
        write(extents, row)
    extents.forget(Extent(0, 0, 1))
    assert write(extents, 10)[1] == [7, 9]


def test_a_leased_segment_is_passed_over_and_the_next_oldest_goes() -> None:
    extents = ExtentAllocator(1, 2, [2])
    for row in range(4):
        write(extents, row)
    extents.hold(places(Extent(0, 0, 0)))
    assert write(extents, 4)[1] == [2, 3]
    assert extents.retired == [(0, 1)]
    extents.release(places(Extent(0, 0, 0)))
    write(extents, 5)
    assert write(extents, 6)[1] == [0, 1]


def test_nothing_is_written_while_every_segment_is_busy() -> None:
    extents = ExtentAllocator(1, 2, [1])
    first = take(extents, 0, 0.0)
    assert first is not None
    second = take(extents, 0, 0.0)
    assert second is not None
    assert take(extents, 0, 0.0) is None
    assert extents.retired == []
    extents.release(places(first))
    assert take(extents, 0, 0.0) == Extent(0, 2, 0)


def test_the_open_segment_of_another_group_is_retired_last() -> None:
    extents = ExtentAllocator(1, 2, [4, 1])
    write(extents, 0, group=0)
    write(extents, 1, group=1)
    assert write(extents, 2, group=1)[1] == [1], "the full one, though the open one is older"
    write(extents, 3, group=0)
    extents = ExtentAllocator(1, 1, [4, 1])
    write(extents, 0, group=0)
    assert write(extents, 1, group=1)[1] == [0], "the open one when there is no other"
    assert write(extents, 2, group=0)[0] == Extent(0, 2, 0), "its group opens a new one"


def test_a_drive_that_failed_a_write_is_paused() -> None:
    extents = ExtentAllocator(2, 10, [4])
    extents.striping.failed(1, False, 100.0)
    places = [write(extents, row, now=100.0 + PAUSE_S - 0.1)[0] for row in range(3)]
    assert [place.drive for place in places if place] == [0, 0, 0]
    places = [write(extents, row, now=100.0 + PAUSE_S)[0] for row in range(2)]
    assert {place.drive for place in places if place} == {0, 1}
    extents.striping.failed(0, False, 200.0)
    extents.striping.failed(1, False, 200.0)
    assert take(extents, 0, 200.0) is None


def test_only_drives_that_are_beyond_a_lower_cap_give_up_segments() -> None:
    extents = ExtentAllocator(2, 4, [1])
    for row, drive in enumerate([0, 0, 0, 0, 1, 1]):
        taken, _ = extents.take(0, 1, [int(drive == 0), int(drive == 1)], 0.0)
        extents.filled(taken, np.array([row], np.int32))
        extents.release(taken)
    extents.segments_max = 3
    assert extents.shrink().tolist() == [0]
    assert extents.retired == [(0, 0)]
    assert extents.segments() == 5, "the other drive keeps what it has"


def test_a_group_whose_record_does_not_fit_a_segment_is_not_written() -> None:
    extents = ExtentAllocator(1, 2, [0, 1])
    assert take(extents, 0, 0.0) is None
    assert take(extents, 1, 0.0) is not None


def test_a_cap_of_no_segments_takes_nothing() -> None:
    assert take(ExtentAllocator(1, 0, [4]), 0, 0.0) is None


def test_adopted_segments_are_read_not_filled_and_retired_by_age() -> None:
    extents = ExtentAllocator(2, 2, [3])
    assert adopt(extents, Extent(0, 9, 1), 0, row=1)
    assert adopt(extents, Extent(0, 4, 0), 0, row=2)
    assert adopt(extents, Extent(0, 4, 2), 0, row=3)
    extents.end_adoption(12, ())
    assert extents.segment(Extent(0, 4, 0)).rows.tolist() == [2, -1, 3]
    assert write(extents, 10) == (Extent(0, 12, 0), [2, 3])
    assert write(extents, 11) == (Extent(1, 13, 0), [])
    assert extents.retired == [(0, 4)]


def test_more_adopted_segments_than_the_cap_are_retired_down_to_it() -> None:
    extents = ExtentAllocator(1, 2, [1])
    for segment in range(5):
        assert adopt(extents, Extent(0, segment, 0), 0, row=segment)
    extents.end_adoption(5, ())
    assert write(extents, 9)[1] == [0, 1, 2, 3]
    assert extents.segments() == 2


@pytest.mark.parametrize(
    "extent", [Extent(2, 0, 0), Extent(-1, 0, 0), Extent(0, 0, 3), Extent(0, 0, -1)], ids=lambda extent: str(extent)
)
def test_a_record_of_another_configuration_is_not_adopted(extent: Extent) -> None:
    assert not adopt(ExtentAllocator(2, 4, [3]), extent, 0, row=1)


def test_a_record_or_segment_is_adopted_for_one_chunk_and_group() -> None:
    extents = ExtentAllocator(1, 4, [3, 3])
    assert adopt(extents, Extent(0, 0, 0), 0, row=1)
    assert not adopt(extents, Extent(0, 0, 0), 0, row=2)
    assert not adopt(extents, Extent(0, 0, 1), 1, row=2)


def test_records_adopted_at_once_are_sorted_out_as_one_by_one() -> None:
    """In any order, with places twice, of too high a record and on drives that are not there."""
    rng = random.Random(7)
    for ordered in (False, True) * 100:
        found = [Extent(rng.randrange(3), rng.randrange(3), rng.randrange(5)) for _ in range(rng.randrange(12))]
        if ordered:
            found = sorted(set(found), key=lambda extent: (extent.segment, extent.drive, extent.record))
        together, alone = (ExtentAllocator(2, 4, [4]) for _ in range(2))
        adopt(together, Extent(0, 0, 1), 0, row=99)
        adopt(alone, Extent(0, 0, 1), 0, row=99)
        rows = np.arange(len(found), dtype=np.int32)
        fits = together.adopt(np.array(found, np.int32).reshape(-1, 3), 0, rows)
        assert fits.tolist() == [adopt(alone, extent, 0, row) for row, extent in enumerate(found)]
        assert held(together) == held(alone)


def held(extents: ExtentAllocator) -> dict[tuple[int, int], list[int]]:
    return {(drive, number): segment.rows.tolist() for drive, segments in enumerate(extents._by_drive)
            for number, segment in segments.items()}  # fmt: skip


def test_new_ids_are_above_every_adopted_one() -> None:
    extents = ExtentAllocator(1, 9, [1])
    adopt(extents, Extent(0, 30, 0), 0, row=1)
    extents.end_adoption(7, ())
    assert write(extents, 2)[0] == Extent(0, 31, 0)


def test_found_segments_without_a_use_are_retired() -> None:
    """Such as one whose chunks are on one rank only: nobody else would ever delete its file."""
    extents = ExtentAllocator(2, 4, [3])
    assert adopt(extents, Extent(0, 4, 0), 0, row=1)
    extents.end_adoption(9, [(1, 5), (0, 4), (0, 8), (0, 8)])
    assert extents.retired == [(0, 8), (1, 5)]
    assert extents.segments() == 1


def test_reset_retires_idle_segments_at_once_and_busy_ones_with_their_last_job() -> None:
    extents = ExtentAllocator(1, 3, [2])
    for row in range(2):
        write(extents, row)
    busy = take(extents, 0, 0.0)
    again = take(extents, 0, 0.0)
    assert busy is not None
    assert again is not None
    fresh = extents.drop_all([busy, again])
    assert fresh.retired == [(0, 0)]
    assert fresh.segments() == 1
    extent = take(fresh, 0, 0.0)
    assert extent == Extent(0, 2, 0), "an old segment is not filled on and its id not used again"
    fresh.release(places(busy))
    assert fresh.retired == [(0, 0)]
    fresh.release(places(again))
    assert fresh.retired == [(0, 0), (0, 1)]
    assert fresh.segments() == 1


def test_a_pause_and_undrained_retirements_survive_a_reset() -> None:
    extents = ExtentAllocator(1, 1, [1])
    write(extents, 0)
    write(extents, 1)
    extents.striping.failed(0, False, 50.0)
    fresh = extents.drop_all([])
    assert fresh.retired == [(0, 0), (0, 1)]
    assert take(fresh, 0, 51.0) is None


def test_a_drive_left_out_gets_nothing_and_loses_nothing() -> None:
    extents = ExtentAllocator(2, 4, [2])
    extents.striping.leave_out(1)
    assert {take(extents, 0, 1e9).drive for _ in range(6)} == {0}  # type: ignore[union-attr]
    assert not adopt(extents, Extent(1, 50, 0), 0, 7)
    extents.end_adoption(60, [(1, 50), (0, 51)])
    assert extents.retired == [(0, 51)], "what other ranks have on the drive stays"


# Sizes.

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("budget", "records", "chosen"),
    [
        (32 * GIB, [MIB], (GIB, 32)),
        (100 * GIB, [MIB], (GIB, 100)),  # larger segments would give up more at once
        (100 * GIB + MIB, [MIB], (GIB, 100)),
        (8 * GIB, [MIB], (256 * MIB, 32)),
        (8 * GIB, [MIB] * 32, (128 * MIB, 64)),  # an open segment and a full one for each group
        (16 * MIB, [4096, MIB], (MIB + (64 << 10), 15)),  # at least one record
        (4 * (MIB + (64 << 10)), [4096, MIB], (MIB + (64 << 10), 4)),
        (4 * (MIB + (64 << 10)) - 1, [4096, MIB], (0, 0)),
        (64 * GIB, [2 * GIB], (2 * GIB + (64 << 10), 31)),
        (0, [4096], (0, 0)),
    ],
)
def test_segments_of_a_budget(budget: int, records: list[int], chosen: tuple[int, int]) -> None:
    assert choose_segments(budget, records) == chosen


def test_segments_use_a_budget_and_never_exceed_it() -> None:
    rng = random.Random(1)
    for _ in range(20_000):
        records = [
            rng.randint(1, 1 << rng.randint(0, 14)) * RECORD_ALIGN_BYTES for _ in range(rng.choice((1, 1, 2, 3, 20)))
        ]
        budget = rng.randint(0, 1 << rng.randint(12, 46))
        segment_bytes, segments = choose_segments(budget, iter(records))
        least = max(records) + SEGMENT_OVERHEAD_BYTES
        assert (segments == 0) == (segment_bytes == 0) == (budget < 2 * len(records) * least)
        if not segments:
            continue
        assert segments * segment_bytes <= budget < (segments + 1) * segment_bytes
        assert least <= segment_bytes <= max(least, SEGMENT_BYTES_MAX)
        assert segments >= SEGMENTS_WANTED or segment_bytes == least
        assert all(records_per_segment(size, segment_bytes) > 0 for size in records)
