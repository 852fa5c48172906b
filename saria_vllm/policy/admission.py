"""When a chunk is worth an SSD write. Each policy answers at three moments, for many chunks at once, with reasons."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.hints import Hints
from saria_vllm.policy.index import NONE, ChunkIndex, Mask, Rows
from saria_vllm.policy.returns import Returns


class Reason(NamedTuple):
    name: str
    """A label for counters."""
    admit: bool


REASONS = (
    Reason("every_chunk", True),
    Reason("never", False),
    Reason("not_yet", False),
    Reason("eviction_count", True),
    Reason("reuse_count", True),
    Reason("score_high", True),
    Reason("score_low", False),
    Reason("return_likely", True),
    Reason("return_unlikely", False),
    Reason("branch_left", False),
    Reason("session_ended", False),
)
(
    EVERY_CHUNK, NEVER, NOT_YET, EVICTION_COUNT, REUSE_COUNT, SCORE_HIGH, SCORE_LOW, RETURN_LIKELY, RETURN_UNLIKELY,
    BRANCH_LEFT, SESSION_ENDED,
) = range(len(REASONS))  # fmt: skip
ADMITS = np.array([reason.admit for reason in REASONS])
"""By reason number."""

Reasons = npt.NDArray[np.uint8]
"""A reason number for each row that was asked about."""


class Budget(NamedTuple):
    """What is left of the write budget."""

    strictness: float
    """What it asks for: 0 while it is ample, 1 when it is spent."""
    chunks: int
    """How many it has room for now, with all of their groups."""


class Admission(Protocol):
    def arrived(self, index: ChunkIndex, rows: Rows, now: float, hints: Hints) -> int:
        """A request came with these rows of its chunks in order, -1 where one is unknown. Returns a number that its
        chunks get in the column `visit`."""

    def kept(self, index: ChunkIndex, rows: Rows) -> Reasons | None:
        """The chunks entered DRAM or were reused there; `reuses` counts this one. None: nothing to write yet."""

    def evicted(self, index: ChunkIndex, rows: Rows, now: float, budget: Budget | None) -> Reasons:
        """The chunks are leaving DRAM and are not on SSD, or have a second chance there; `evictions` does not count
        this one yet. One that stays after all is asked about again."""


class Unlearned:
    """What policies share that learn nothing from requests and want no early writes."""

    def arrived(self, index: ChunkIndex, rows: Rows, now: float, hints: Hints) -> int:
        return 0

    def kept(self, index: ChunkIndex, rows: Rows) -> Reasons | None:
        return None


class FullDuplicate(Unlearned):
    """Persist every stored chunk: the baseline of other tiers."""

    def kept(self, index: ChunkIndex, rows: Rows) -> Reasons | None:
        return np.full(len(rows), EVERY_CHUNK, np.uint8)

    def evicted(self, index: ChunkIndex, rows: Rows, now: float, budget: Budget | None) -> Reasons:
        return np.full(len(rows), EVERY_CHUNK, np.uint8)


class DramOnly(Unlearned):
    """Never persist."""

    def evicted(self, index: ChunkIndex, rows: Rows, now: float, budget: Budget | None) -> Reasons:
        return np.full(len(rows), NEVER, np.uint8)


class Saria(Unlearned):
    """Persist on the k-th DRAM eviction, and before eviction once reused N times (0: off).

    A chunk that came back after k-1 evictions has proved that it outlives DRAM and returns; what is read once and
    never again costs no write.
    """

    def __init__(self, evictions: int, reuses: int) -> None:
        self._evictions_min, self._reuses_min = evictions, reuses

    def kept(self, index: ChunkIndex, rows: Rows) -> Reasons | None:
        if not self._reuses_min:
            return None
        return np.where(index.reuses[rows] >= self._reuses_min, np.uint8(REUSE_COUNT), np.uint8(NOT_YET))

    def evicted(self, index: ChunkIndex, rows: Rows, now: float, budget: Budget | None) -> Reasons:
        often = index.evictions[rows] >= self._evictions_min - 1
        reasons = np.where(often, np.uint8(EVICTION_COUNT), np.uint8(NOT_YET))
        kept = self.kept(index, rows)
        return reasons if kept is None else np.where(reasons == NOT_YET, kept, reasons)


class Score(Unlearned):
    """Admit a score A = reuses x L / age x exp(-idle / L), L being the DRAM lifetime: what is idle for longer is
    evicted. Zero where the next reuse is predicted (by the mean gap, age / reuses) before L is over: DRAM alone serves
    that.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold, self._lifetime_s, self._learned_at = threshold, 0.0, 0.0

    def _learn(self, idle_s: float, now: float) -> None:
        """The mean over the last lifetime of how long what left DRAM had been idle. By time, so that it does not matter
        in how many batches chunks leave."""
        if not self._lifetime_s:
            self._lifetime_s = idle_s
        new = -math.expm1(-max(0.0, now - self._learned_at) / self._lifetime_s)
        self._lifetime_s += (idle_s - self._lifetime_s) * new
        self._learned_at = max(self._learned_at, now)

    def evicted(self, index: ChunkIndex, rows: Rows, now: float, budget: Budget | None) -> Reasons:
        if not rows.size:
            return np.empty(0, np.uint8)
        idle = np.maximum(now - index.touched[rows], 1e-3)
        self._learn(float(idle[0]), now)
        lifetime = self._lifetime_s
        age = np.maximum(now - index.entered[rows], 1e-3)
        # Whoever was evicted before and is here again was asked for again.
        reuses = index.reuses[rows].astype(np.float64) + index.evictions[rows]
        score = reuses * lifetime / age * np.exp(-idle / lifetime)
        gap = age / np.maximum(reuses, 1e-9)
        threshold = self._threshold
        if budget is not None:
            threshold += budget.strictness * (8 - self._threshold)
        return np.where((score >= threshold) & (gap > lifetime), np.uint8(SCORE_HIGH), np.uint8(SCORE_LOW))


THRESHOLD_LOWEST = 0.1
"""While the write budget is ample, `return` refuses only what is surely useless."""


class Return(Unlearned):
    """Persist what is likely to be asked for again: see `Returns`."""

    def __init__(self, threshold: float, chunk_tokens: int) -> None:
        self._threshold, self.returns = threshold, Returns(chunk_tokens)

    def arrived(self, index: ChunkIndex, rows: Rows, now: float, hints: Hints) -> int:
        unknown = (rows < 0).nonzero()[0]
        known = int(unknown[0]) if unknown.size else len(rows)
        present = rows[rows >= 0] if unknown.size else rows
        returned: dict[int, int] = {}
        bursts = index.burst[present]
        if np.count_nonzero(bursts):
            numbers, counts = np.unique(bursts[(bursts > 0) & (index.dram[present] == NONE)], return_counts=True)
            returned = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
            index.burst[present] = 0
        last = int(index.visit[rows[known - 1]]) if known else 0
        mine = self.returns.last_visit(hints.session) if hints.session else 0
        # Who touches a chunk touches all before it: those of the session's visit before were touched then or later.
        kept = int((index.visit[rows[:known]] >= mine).sum()) if mine else 0
        absent = index.ssd[rows[:known]] == NONE
        on_ssd = int(absent.argmax()) if np.count_nonzero(absent) else known
        return self.returns.visit(len(rows), known, last, returned, now, hints, kept, on_ssd)

    def evicted(self, index: ChunkIndex, rows: Rows, now: float, budget: Budget | None) -> Reasons:
        self.returns.stayed(index.burst[rows])  # Those asked about before.
        index.burst[rows] = 0
        reasons = np.full(len(rows), RETURN_UNLIKELY, np.uint8)
        again = index.evictions[rows] > 0
        visits = index.visit[rows]
        for visit in np.unique(visits).tolist():
            left_at = self.returns.left_at(visit)
            if left_at == -2:
                continue
            of_visit = visits == visit
            dead_from = self.returns.dead_from(visit)
            if dead_from >= 0:
                dead = of_visit & (index.depth[rows] >= dead_from)
                reasons[dead] = SESSION_ENDED if self.returns.ended(visit) else BRANCH_LEFT
                of_visit &= ~dead
            left = (index.depth[rows] >= left_at) if left_at >= 0 else np.zeros(len(rows), np.bool_)
            for is_left, is_again in ((False, False), (False, True), (True, False), (True, True)):
                some = of_visit & (left == is_left) & (again == is_again)
                count = int(some.sum())
                if not count:
                    continue
                probability, burst = self.returns.evicted(visit, is_left, is_again, count, now)
                index.burst[rows[some]] = burst
                admitted = self._admitted(visit, index.depth[rows[some]], probability, budget)
                reasons[some] = np.where(admitted, RETURN_LIKELY, BRANCH_LEFT if is_left else RETURN_UNLIKELY)
        return reasons

    def _admitted(
        self, visit: int, depths: npt.NDArray[np.int32], probability: float, budget: Budget | None
    ) -> Mask | bool:
        """Which of a visit's chunks are written. They leave DRAM the last ones first, and a hole makes what is behind
        it useless: under a budget, no more is begun than there is room for, and what was begun is finished."""
        if budget is None:
            return probability >= self._threshold
        if probability < THRESHOLD_LOWEST:
            return False
        finishes: Mask = depths < self.returns.begun(visit)
        threshold = THRESHOLD_LOWEST + budget.strictness * (1 - THRESHOLD_LOWEST)
        if probability >= threshold:
            finishes |= self.returns.begin(visit, depths, budget.chunks)
        return finishes


def make_admission(config: AdmissionConfig, chunk_tokens: int) -> Admission:
    """The configured policy."""
    match config.policy:
        case "full_duplicate":
            return FullDuplicate()
        case "dram_only":
            return DramOnly()
        case "saria":
            return Saria(config.evictions, config.reuses)
        case "score":
            return Score(config.threshold)
        case "return":  # pragma: no branch - mypy sees that no other policy is left
            return Return(config.threshold, chunk_tokens)
