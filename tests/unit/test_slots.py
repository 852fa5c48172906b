"""The DRAM pool's slots and slab sizes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from saria_vllm.policy.slots import SLAB_BYTES, SlotAllocator, choose_slab_bytes
from saria_vllm.types import Slot, align_up

MIB = 1 << 20


def waste(slab_bytes: int, record_bytes: int) -> float:
    return slab_bytes % record_bytes / slab_bytes


def take(slots: SlotAllocator, group: int) -> Slot | None:
    taken = slots.take(group, 1).tolist()
    return Slot(*taken[0]) if taken else None


def give_back(slots: SlotAllocator, group: int, slot: Slot) -> None:
    slots.give_back(group, np.array([slot], np.int32))


def test_many_slots_at_once_are_as_many_as_there_are() -> None:
    slots = SlotAllocator(3, [4])
    places = slots.take(0, 9)
    assert len({tuple(place) for place in places.tolist()}) == 9
    assert slots.take(0, 9).shape == (3, 2)
    assert slots.take(0, 1).shape == (0, 2)
    slots.give_back(0, places)
    assert (slots.used, slots.free(0), slots.free_in_own_slabs(0)) == ([3], 9, 1)


def test_every_slot_is_handed_out_once() -> None:
    slots = SlotAllocator(3, [4])
    assert slots.free(0) == slots.total(0) == 12
    taken = [take(slots, 0) for _ in range(12)]
    assert len(set(taken)) == 12
    assert take(slots, 0) is None
    assert slots.free(0) == 0
    assert slots.used == [12]


def test_a_slot_given_back_is_used_again() -> None:
    slots = SlotAllocator(1, [2])
    first, second = take(slots, 0), take(slots, 0)
    assert first is not None
    assert second is not None
    give_back(slots, 0, first)
    assert take(slots, 0) == first


def test_giving_back_twice_is_a_bug() -> None:
    slots = SlotAllocator(1, [2])
    slot, _ = take(slots, 0), take(slots, 0)
    assert slot is not None
    give_back(slots, 0, slot)
    with pytest.raises(AssertionError):
        give_back(slots, 0, slot)


def test_an_empty_slab_moves_to_another_group() -> None:
    slots = SlotAllocator(2, [2, 3])
    zero = [take(slots, 0) for _ in range(4)]
    assert take(slots, 1) is None
    assert slots.free(1) == slots.total(1) == 0
    slab = [slot for slot in zero if slot is not None and slot.slab == zero[0].slab]  # type: ignore[union-attr]
    give_back(slots, 0, slab[0])
    assert take(slots, 1) is None, "half of the slab is still in use"
    give_back(slots, 0, slab[1])
    assert slots.free(1) == 3
    moved = [take(slots, 1) for _ in range(3)]
    assert {slot.slab for slot in moved if slot} == {slab[0].slab}
    assert {slot.cell for slot in moved if slot} == {0, 1, 2}
    assert slots.free(0) == 0
    assert slots.used == [2, 3]


def test_groups_that_share_one_empty_slab_cannot_both_have_it() -> None:
    slots = SlotAllocator(1, [4, 4])
    assert (slots.free(0), slots.free(1)) == (4, 4)
    assert slots.slabs_short([1, 0]) == slots.slabs_short([0, 4]) == 0
    assert slots.slabs_short([1, 1]) == 1
    assert slots.slabs_short([5, 1]) == 2
    take(slots, 0)
    assert slots.slabs_short([3, 0]) == 0
    assert slots.slabs_short([3, 1]) == 1
    assert slots.slabs_short([-1, 0]) == 0


def test_random_takes_and_returns_keep_slabs_in_one_group() -> None:
    rng = random.Random(7)
    cells = [5, 2, 1]
    slots = SlotAllocator(6, cells)
    used: list[tuple[int, Slot]] = []
    for _ in range(4000):
        if used and rng.random() < 0.5:
            group, slot = used.pop(rng.randrange(len(used)))
            give_back(slots, group, slot)
        else:
            group = rng.randrange(3)
            free = slots.free(group)
            taken = take(slots, group)
            assert (taken is None) == (free == 0)
            if taken is not None:
                assert 0 <= taken.cell < cells[group]
                used.append((group, taken))
        owner: dict[int, int] = {}
        assert len(set(used)) == len(used)
        for group, slot in used:
            assert owner.setdefault(slot.slab, group) == group
        empty = 6 - len(owner)
        for group in range(3):
            own = sum(g == group for g in owner.values()) * cells[group]
            assert slots.used[group] == sum(g == group for g, _ in used)
            assert slots.free(group) == own - slots.used[group] + empty * cells[group]
            assert slots.free_in_own_slabs(group) == own - slots.used[group]


def test_a_slab_for_records_of_one_and_a_half_mib_wastes_little() -> None:
    slab = choose_slab_bytes([3 * MIB // 2], 64 << 30)
    assert slab == 6 * MIB
    assert waste(slab, 3 * MIB // 2) == 0


def test_small_records_use_the_smallest_slab() -> None:
    assert choose_slab_bytes([64 << 10], 64 << 30) == SLAB_BYTES
    assert choose_slab_bytes([36 << 10, 20 << 10], 64 << 30) == SLAB_BYTES


@pytest.mark.parametrize("record", [2 * MIB + 4096, 5 * MIB // 2, 7 * MIB, 37 * MIB, 3 * MIB + 12288])
def test_a_record_larger_than_two_mib_fits_and_wastes_little(record: int) -> None:
    slab = choose_slab_bytes([record], 64 << 30)
    assert slab % SLAB_BYTES == 0
    assert slab >= record
    assert waste(slab, record) <= 1 / 32


def test_every_group_fits_into_the_common_slab() -> None:
    sizes = [align_up(300 << 10), 3 * MIB // 2, 9 * MIB]
    slab = choose_slab_bytes(sizes, 64 << 30)
    assert slab <= 8 << 30
    assert all(waste(slab, size) <= 1 / 32 for size in sizes)


@pytest.mark.parametrize("record", [4096, 64 << 10, 3 * MIB // 2, 5 * MIB])
def test_a_tiny_region_gets_the_smallest_slab_that_holds_a_record(record: int) -> None:
    slab = choose_slab_bytes([record], 1 * MIB)
    assert slab == align_up(record, SLAB_BYTES)


def test_a_slab_is_at_most_an_eighth_of_the_region() -> None:
    for region in (32 * MIB, 48 * MIB, 100 * MIB, 1 << 30):
        slab = choose_slab_bytes([3 * MIB // 2 + 4096, 20480], region)
        assert slab <= region // 8
        assert slab >= 3 * MIB // 2 + 4096
