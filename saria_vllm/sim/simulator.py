"""A trace through the very objects that the connector runs: `Tiers` with index, admission, eviction and promotion.

Time is the trace's; transfers end at once. A request's hit is loaded, what came from SSD is promoted, and its other
chunks are computed and stored, before the next request comes. Only full chunks of prompts count; HBM keeps nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from saria_vllm.config import AdmissionConfig, PromotionMode
from saria_vllm.metrics import Counts
from saria_vllm.policy.admission import Admission, make_admission
from saria_vllm.policy.endurance import DAY_S, Governor
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.hints import NO_HINTS, Hints
from saria_vllm.policy.index import VALID, Prefix, Rows
from saria_vllm.policy.promotion import Promotion
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.policy.tiers import Tiers
from saria_vllm.sim.lru_extents import LruExtents
from saria_vllm.sim.trace import Request
from saria_vllm.types import GroupShape, Ints, JobResult

_RECORD_BYTES = 4096
"""Of a simulated chunk: nothing depends on it; a write budget is scaled to it."""

_HEADROOM = 1024
"""Slots beyond the DRAM tier's size, for chunks on their way: a request's chunks enter before others are evicted."""

_PREFIXES_MAX = 4096
"""Threads whose last prompt is remembered, to look up only what is new in the next."""

SEGMENTS = 32
"""Of the SSD tier, where it is retired by segment."""

SSD_INGRESS_RATIO = 0.5
"""B_ssd / B_ingress of a node that nothing more is known of."""

Arrival = tuple[float, int, Request, list[int]]
"""Time in seconds, number of the session, the request, ids of its full chunks."""


class SimConfig(msgspec.Struct, frozen=True):
    """What is simulated. Sizes are tokens."""

    chunk_tokens: int
    dram_tokens: int
    ssd_tokens: int
    admission: AdmissionConfig = AdmissionConfig()
    promotion: PromotionMode = 1.0
    ssd_eviction: str = "lru"
    """`lru` by record, or `segment` as it is served."""
    ssd_ingress_ratio: float = SSD_INGRESS_RATIO
    """B_ssd / B_ingress, for promotion `auto`."""
    write_budget_tokens_day: float = 0.0
    """What the governor lets be written per day; 0: no governor."""
    write_cap_tokens_day: float = 0.0
    """What no 24 hours may exceed; at least the budget."""


class SimRequest(msgspec.Struct, frozen=True):
    """What happened to one request, for a model of time."""

    time_s: float
    prompt_tokens: int
    dram_tokens: int
    ssd_tokens: int


class SimResult(msgspec.Struct):
    """Totals of one run."""

    requests: int = 0
    prompt_tokens: int = 0
    dram_hit_tokens: int = 0
    ssd_hit_tokens: int = 0
    hit_requests: int = 0
    dram_only_requests: int = 0
    ssd_write_tokens: int = 0
    ssd_second_chance_tokens: int = 0
    """Of what was written, what was on SSD already, in a segment that went soon."""
    ssd_read_once_tokens: int = 0
    """Of what was written, what was read at least once before it was written again or the run ended."""
    ssd_write_tokens_by_day: list[int] = []
    """Days begin with the first request; the last one ends with the last request."""
    ssd_write_tokens_24h_max: int = 0
    """Most in any 24 hours."""
    dram_evicted_tokens: int = 0
    chunk_accesses: int = 0
    elapsed_s: float = 0.0
    counts: Counts = {}
    """What the connector's own counters would say."""

    def rates(self) -> dict[str, float]:
        """What users compare, shares from 0 to 1."""
        prompt, writes = max(1, self.prompt_tokens), max(1, self.ssd_write_tokens)
        never_read = self.ssd_write_tokens - self.ssd_read_once_tokens
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "hit_rate": (self.dram_hit_tokens + self.ssd_hit_tokens) / prompt,
            "dram_hit_rate": self.dram_hit_tokens / prompt,
            "ssd_hit_rate": self.ssd_hit_tokens / prompt,
            "ssd_write_tokens": self.ssd_write_tokens,
            "ssd_second_chance_tokens": self.ssd_second_chance_tokens,
            "ssd_write_amplification": writes / max(1, writes - self.ssd_second_chance_tokens),
            "ssd_writes_never_read_fraction": never_read / writes,
            "dram_only_request_fraction": self.dram_only_requests / max(1, self.hit_requests),
            "dram_evicted_tokens": self.dram_evicted_tokens,
            "elapsed_s": self.elapsed_s,
            "chunk_accesses_per_s": self.chunk_accesses / max(1e-9, self.elapsed_s),
        }


class Simulator:
    """One engine's tiers, fed request by request. `hints` tells what the client of a session says of its request."""

    def __init__(
        self,
        config: SimConfig,
        admission: Admission | None = None,
        hints: Callable[[int, Request], Hints] = lambda session, request: NO_HINTS,
    ) -> None:
        self.config, self._hints = config, hints
        chunks = max(1, config.dram_tokens // config.chunk_tokens)
        records = config.ssd_tokens // config.chunk_tokens
        self._lru = LruExtents(records) if records and config.ssd_eviction == "lru" else None
        per_segment = max(1, -(-records // SEGMENTS))
        self.tiers = Tiers(
            [GroupShape(0, config.chunk_tokens, 1, _RECORD_BYTES)],
            SlotAllocator(1, [chunks + _HEADROOM]),
            (self._lru or ExtentAllocator(1, records // per_segment, [per_segment])) if records else None,
            admission or make_admission(config.admission, config.chunk_tokens),
            ghosts_max=config.admission.ghosts_max,
            headroom=[_HEADROOM],
            persist_bytes_max=1 << 60,
            promotion=Promotion(config.promotion, config.ssd_ingress_ratio),
            second_chance=config.admission.second_chance,
        )
        self._refresh_all = config.admission.policy == "full_duplicate" and admission is None
        self._unread = np.zeros(0, np.bool_)
        """By index row: written to SSD and not read since."""
        self._next_request: Callable[[], None] | None = getattr(admission, "next_request", None)
        self._prefixes: OrderedDict[tuple[int, int], tuple[list[int], Prefix]] = OrderedDict()
        self._begun_s: float | None = None
        self._last_day: deque[tuple[float, int]] = deque()
        """(time, tokens) written in the last 24 hours."""
        self._last_day_tokens = 0
        self.result = SimResult()

    def run(self, stream: Iterable[Arrival]) -> Iterator[SimRequest]:
        """Serve a stream in its order. Yields what happened to each request; totals are in `result`."""
        for time_s, session, request, ids in stream:
            began = time.perf_counter()
            if self._begun_s is None:
                self._begin(time_s)
            if self._next_request is not None:
                self._next_request()
            prefix = self._prefix((session, request.thread), ids)
            served = self._serve(time_s, prefix, request.input_tokens, self._hints(session, request))
            self.result.elapsed_s += time.perf_counter() - began
            yield served
        result, counts = self.result, self.tiers.take_counts()
        result.counts = counts
        result.ssd_second_chance_tokens = counts.get("admission:second_chance", 0) * self.config.chunk_tokens

    def _begin(self, time_s: float) -> None:
        self._begun_s = time_s
        if self.config.write_budget_tokens_day:
            scale = _RECORD_BYTES / self.config.chunk_tokens
            budget, cap = self.config.write_budget_tokens_day * scale, self.config.write_cap_tokens_day * scale
            self.tiers.evictor.governors = [Governor(budget, cap, time_s)]

    def _prefix(self, thread: tuple[int, int], ids: list[int]) -> Prefix:
        """The thread's last prefix made into this one: most of it was looked up already."""
        before, prefix = self._prefixes.pop(thread, ([], Prefix()))
        shared = _shared(before, ids)
        prefix.cut(shared)
        prefix.keys.extend(map(key_of, ids[shared:]))
        self._prefixes[thread] = ids, prefix
        if len(self._prefixes) > _PREFIXES_MAX:
            self._prefixes.popitem(last=False)
        return prefix

    def _serve(self, time_s: float, prefix: Prefix, prompt_tokens: int, hints: Hints = NO_HINTS) -> SimRequest:
        tiers, result, end = self.tiers, self.result, len(prefix.keys)
        hit = tiers.match(prefix, 0, end, time_s)
        tiers.arrived(prefix, hit, time_s, hints)
        dram, ssd = tiers.tier_tokens(prefix, 0, hit)
        promoted = tiers.promote_until(prefix, 0, hit, time_s)
        if hit:
            job = tiers.plan_load("", prefix, 0, hit, [_blocks(hit)], time_s)
            tiers.finished([JobResult(job.job_id)], time_s)
        if ssd:
            rows = tiers.chunks.index.locate(prefix, 0, hit)[0]
            self._note_reads(rows[tiers.chunks.index.dram[rows] != VALID])
        self._store(prefix, end, time_s)
        if promoted:
            self._promote(prefix, promoted, time_s)
        tiers.touch(prefix, end, 0, time_s)
        self._make_room(time_s)
        if self._refresh_all and self._lru is not None:
            rows = tiers.chunks.index.locate(prefix, 0, end)[0]
            self._lru.refresh(tiers.chunks.index.extent[rows[tiers.chunks.index.ssd[rows] == VALID], 1])
        result.requests += 1
        result.prompt_tokens += prompt_tokens
        result.dram_hit_tokens += dram
        result.ssd_hit_tokens += ssd
        result.hit_requests += hit > 0
        result.dram_only_requests += hit > 0 and not ssd
        result.chunk_accesses += end
        return SimRequest(time_s, prompt_tokens, dram, ssd)

    def _promote(self, prefix: Prefix, end: int, time_s: float) -> None:
        """Copy to DRAM what only SSD has of the first `end` chunks. All of it is in HBM now, loaded or computed."""
        self._make_room(time_s, [int(mask.sum()) for mask in self.tiers.not_in_dram(prefix, 0, end)])
        job, _ = self.tiers.plan_promote(prefix, 0, end, [_blocks(end)], time_s)
        if job is not None:
            self.tiers.finished([JobResult(job.job_id)], time_s)

    def _store(self, prefix: Prefix, end: int, time_s: float) -> None:
        """Copy chunks into DRAM, and make room, until all are there or none can be evicted any more."""
        first = 0
        while first < end:
            job, went_on = self.tiers.plan_store(prefix, first, end, [_blocks(end - first)], time_s)
            if job is not None:
                self.tiers.finished([JobResult(job.job_id)], time_s)
            self._make_room(time_s)
            if went_on == first and job is None:
                return
            first = went_on

    def _make_room(self, time_s: float, promotions: Sequence[int] = ()) -> None:
        tiers, result = self.tiers, self.result
        free = tiers.chunks.slots.free(0)
        persists = tiers.make_room(time_s, promotions)
        if persists:
            tiers.finished([JobResult(persist.job_id) for persist in persists], time_s)
            self._note_writes([key for persist in persists for key in persist.keys], time_s)
        result.dram_evicted_tokens += (tiers.chunks.slots.free(0) - free) * self.config.chunk_tokens

    def _note_writes(self, keys: list[bytes], time_s: float) -> None:
        rows = self.tiers.chunks.index.find_each(0, keys)
        if len(self._unread) < len(self.tiers.chunks.index.dram):
            grown = np.zeros(len(self.tiers.chunks.index.dram), np.bool_)
            grown[: len(self._unread)] = self._unread
            self._unread = grown
        self._unread[rows[rows >= 0]] = True
        tokens = len(keys) * self.config.chunk_tokens
        self.result.ssd_write_tokens += tokens
        self._note_day(tokens, time_s)

    def _note_day(self, tokens: int, time_s: float) -> None:
        """Counted apart from the governor, which this checks."""
        assert self._begun_s is not None
        by_day, day = self.result.ssd_write_tokens_by_day, int((time_s - self._begun_s) // DAY_S)
        by_day.extend([0] * (day + 1 - len(by_day)))
        by_day[day] += tokens
        self._last_day.append((time_s, tokens))
        self._last_day_tokens += tokens
        while self._last_day[0][0] <= time_s - DAY_S:
            self._last_day_tokens -= self._last_day.popleft()[1]
        self.result.ssd_write_tokens_24h_max = max(self.result.ssd_write_tokens_24h_max, self._last_day_tokens)

    def _note_reads(self, rows: Rows) -> None:
        self.result.ssd_read_once_tokens += int(self._unread[rows].sum()) * self.config.chunk_tokens
        self._unread[rows] = False


def key_of(number: int) -> bytes:
    """The chunk key that stands for a trace's id."""
    return number.to_bytes(16, "little")


def id_of(key: bytes) -> int:
    """The trace's id of a chunk key."""
    return int.from_bytes(key, "little")


def _blocks(chunks: int) -> Ints:
    return np.zeros((chunks, 1), np.int32)


def _shared(before: list[int], now: list[int]) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(before), len(now))
    if before[:high] == now[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if before[low:middle] == now[low:middle]:
            low = middle
        else:
            high = middle
    return low
