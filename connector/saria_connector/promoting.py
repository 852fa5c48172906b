"""Promotions on their way to a slot: chunks loaded from SSD, whose blocks are held until DRAM has room for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from saria_vllm.metrics import count
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.tiers import Tiers
from saria_vllm.types import Ints, StoreJob

WAIT_S = 1.0
"""A promotion that gets no slots for so long is given up: it holds blocks that requests may need."""


class Waiting(NamedTuple):
    """Chunks first..end of a request that want slots."""

    prefix: Prefix
    first: int
    end: int
    blocks: list[Ints]
    """By group: of chunks first..end."""
    held: list[Any]
    until: float


class Promoting:
    """The queue of promotions that wait, first come first served."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._pool: Any = None
        self.waiting: deque[Waiting] = deque()
        self.held_blocks = 0

    def bind_block_pool(self, block_pool: Any) -> None:
        self._pool = block_pool

    def add(self, prefix: Prefix, first: int, blocks: list[Ints], chunks_max: int, now: float) -> int:
        """Hold the blocks of chunks from `first` on that DRAM does not have, of so many of them at most. Returns where
        it ended.

        Args:
            blocks: by group, of all the chunks in question; they hold their bytes.
        """
        end = first + len(blocks[0])
        wanted = np.logical_or.reduce(self._tiers.not_in_dram(prefix, first, end)).nonzero()[0]
        if len(wanted) > chunks_max:
            end = first + int(wanted[chunks_max])
            wanted = wanted[:chunks_max]
        if wanted.size:
            held = [self._pool.blocks[block] for table in blocks for block in table[wanted].ravel().tolist()]
            self._pool.touch(held)
            self.held_blocks += len(held)
            mine = [table[: end - first] for table in blocks]
            self.waiting.append(Waiting(prefix, first, end, mine, held, now + WAIT_S))
        return end

    def slots_wanted(self) -> list[int]:
        """By group: how many slots the first that waits could use. Not all: together they may be more than DRAM has."""
        if not self.waiting:
            return []
        one = self.waiting[0]
        return [int(mask.sum()) for mask in self._tiers.not_in_dram(one.prefix, one.first, one.end)]

    def plan(self, now: float) -> Iterator[StoreJob]:
        """Jobs for which there are slots now; their blocks are held here until the next job is asked for."""
        while self.waiting:
            one = self.waiting[0]
            job, went_on = self._tiers.plan_promote(one.prefix, one.first, one.end, one.blocks, now)
            if job is not None:
                yield job
            if went_on < one.end and now < one.until:
                left = [table[went_on - one.first :] for table in one.blocks]
                self.waiting[0] = one._replace(first=went_on, blocks=left)
                return
            self._give_back()
            count_unpromoted(self._tiers, one.prefix, went_on, one.end, "no_slot")

    def clear(self) -> None:
        """Forget all that wait, after a reset or a fault of ours: the tiers are not asked."""
        while self.waiting:
            self._give_back()

    def _give_back(self) -> None:
        """The blocks of the first that waits, and it waits no more."""
        held = self.waiting.popleft().held
        self.held_blocks -= len(held)
        self._pool.free_blocks(reversed(held))


def count_unpromoted(tiers: Tiers, prefix: Prefix, first: int, end: int, reason: str) -> None:
    """What of chunks first..end was to be promoted and will not be."""
    left = sum(int(mask.sum()) for mask in tiers.not_in_dram(prefix, first, end))
    count(tiers.chunks.counts, "unpromoted_chunks", left, reason)
