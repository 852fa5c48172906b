"""The ceiling: an admission that knows the future."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from saria_vllm.policy.admission import EVICTION_COUNT, NOT_YET, Budget, Reasons, Unlearned
from saria_vllm.policy.index import ChunkIndex, Rows
from saria_vllm.sim.simulator import Arrival, id_of


class Oracle(Unlearned):
    """Writes on an eviction only what a later request contains. Nobody serves more hits with fewer writes."""

    def __init__(self, stream: Iterable[Arrival]) -> None:
        self._last: dict[int, int] = {}
        """Number of the last request that contains a chunk."""
        self._number = -1
        """Of the request that is being served."""
        for number, (_, _, _, ids) in enumerate(stream):
            self._last.update(dict.fromkeys(ids, number))

    def next_request(self) -> None:
        """Another request is served."""
        self._number += 1

    def evicted(self, index: ChunkIndex, rows: Rows, now: float, budget: Budget | None) -> Reasons:
        last, number = self._last, self._number
        again = [last[id_of(index.key[row])] > number for row in rows.tolist()]
        return np.where(again, np.uint8(EVICTION_COUNT), np.uint8(NOT_YET))
