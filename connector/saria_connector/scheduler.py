"""The scheduler half: turns vLLM's questions and events into calls of `Tiers`, and its plans into metadata."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.kv_cache_interface import KVCacheConfig

from saria_connector import compat
from saria_connector.metadata import SariaMetadata, SariaWorkerMetadata
from saria_connector.opening import SsdOpening
from saria_connector.promoting import Promoting, count_unpromoted
from saria_connector.recording import Recording
from saria_connector.sizing import Sizing
from saria_vllm.config import SariaConfig, format_bytes
from saria_vllm.metrics import Counts, count
from saria_vllm.policy.admission import make_admission
from saria_vllm.policy.cost import LoadOrCompute
from saria_vllm.policy.hints import KEY, parse_hints
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.promotion import Promotion
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.policy.tiers import Tiers
from saria_vllm.types import NULL_BLOCK, Ints, JobResult, LoadJob, PersistJob, Prefill, StoreJob

logger = logging.getLogger("vllm.saria")

LOAD_FAILURES_MAX = 3
"""After so many failed loads a request recomputes."""

HELD_SHARE_MAX = 0.25
"""Share of HBM blocks that unfinished stores may hold."""

PERSIST_BYTES_MAX = 256 << 20
"""Bound of DRAM bytes on their way to SSD, on one rank; a quarter of the DRAM tier if that is less."""


NO_JOB = 0
"""Job id of a load that was promised but never planned."""


@dataclass
class Held:
    blocks: list[Any]
    ranks_left: int


class RequestState:
    """What we remember of a request between vLLM's calls."""

    __slots__ = (
        "arrived", "asked_computed", "cut", "due_tokens", "hints", "hit_end", "load_failures", "no_store", "prefix",
        "promote_end", "promoted", "request", "retried", "scheduled", "sources", "stored", "wait_until", "wrong_hints",
    )  # fmt: skip

    def __init__(self, request: Any) -> None:
        self.request = request
        self.prefix = Prefix()
        """The request's full chunks, as far as they were needed."""
        self.arrived = False
        """Whether blocks were allocated for it once."""
        self.asked_computed = 0
        """Tokens in HBM when the last hit was offered."""
        self.hit_end = 0
        """Chunks that were reused, from HBM or a tier."""
        self.cut = (0, "")
        """Tokens that a tier could have brought beyond the last hit that was offered, and why they are computed."""
        self.stored = 0
        """Chunks that need no more looking at for storing."""
        self.promoted = self.promote_end = 0
        """Chunks between these were loaded, and are looked at for promotion when the prefill that uses them was
        submitted."""
        self.due_tokens = 0
        """Computed tokens from which on a step looks at this request: most steps complete no chunk of most requests."""
        self.sources = (0, 0)
        """Tokens of the last hit by (DRAM, SSD)."""
        self.load_failures = 0
        self.retried = False
        """Whether a hit was offered after a failed load, and not taken yet."""
        self.wait_until = 0.0
        self.scheduled = False
        """Whether it was in a step since blocks were allocated: before that a load, ours or another connector's, may be
        in flight, and vLLM counts its tokens as computed already."""
        params = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
        self.hints, self.wrong_hints = parse_hints(params.get(KEY))
        # KV pulled from a remote prefill may be overwritten bytes after an expired lease: never keep it.
        self.no_store = self.hints.no_store or bool(params.get("do_remote_prefill"))


class SchedulerSide:
    """See `SariaConnector` for when vLLM calls what."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: KVCacheConfig,
        config: SariaConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._clock = config, clock
        self.sizing = sizing = Sizing.of(vllm_config, kv_cache_config, config)
        self._chunk_tokens = sizing.chunk_tokens
        self._block_tokens = sizing.shapes[0].block_tokens
        self._hash_tokens = kv_cache_config.hash_block_size or self._block_tokens
        self._shares_blocks = vllm_config.cache_config.enable_prefix_caching
        # A request that ends may have three steps' chunks to store at once: chunks are stored when they are confirmed.
        batch_chunks = 3 * (-(-vllm_config.scheduler_config.max_num_batched_tokens // self._chunk_tokens) + 1)
        slots = SlotAllocator(sizing.slabs, [sizing.slab_bytes // shape.record_bytes for shape in sizing.shapes])
        region = sizing.slabs * sizing.slab_bytes
        self.tiers = Tiers(
            sizing.shapes,
            slots,
            None,
            make_admission(config.admission, sizing.chunk_tokens),
            ghosts_max=config.admission.ghosts_max,
            headroom=[max(1, min(batch_chunks, slots.total(g) // 4)) for g in range(len(sizing.shapes))],
            persist_bytes_max=min(PERSIST_BYTES_MAX, region // 4),
            ranks=sizing.ranks,
            promotion=Promotion(config.promotion),
            cost=LoadOrCompute(config.load_deadline),
            second_chance=config.admission.second_chance,
        )
        self._requests: dict[str, RequestState] = {}
        self._loads: list[tuple[int, LoadJob]] = []
        """(generation, job) to send with the next step."""
        self._stores: list[StoreJob] = []
        self._promotions: list[StoreJob] = []
        self._promoting = Promoting(self.tiers)
        self._persists: list[PersistJob] = []
        self._held: dict[int, Held] = {}
        """HBM blocks by the store or promotion that still reads them."""
        self._held_blocks = 0
        self._quiet_tokens = 0
        self._looked_at: dict[str, int] = {}
        """The requests that were looked at last; while none of them has got `_quiet_tokens` more, none needs it."""
        self._block_pool: Any = None
        self._prefill: Prefill | None = None
        self._off = self._said_wrong_hints = False
        self.ssd = SsdOpening(config, sizing, self.tiers, clock)
        if config.ssd_paths:
            self.ssd.claim(vllm_config, kv_cache_config)
        self._recording = Recording(config.trace_record, self._chunk_tokens) if config.trace_record else None
        self._log_start()

    def _log_start(self) -> None:
        sizing, ssd = self.sizing, "off"
        if (directory := self.ssd.directory) is not None:
            rank_bytes = sizing.segment_bytes * sizing.segments_max * len(directory.paths)
            ssd = f"{format_bytes(rank_bytes)} for each rank, in {', '.join(directory.directories)}"
        logger.info(
            "SARIA: %s; this engine: %s DRAM, %s for each of %d rank(s); chunks of %d tokens = %s per rank; "
            "%d DRAM slots; SSD %s",
            self._config.describe(),
            format_bytes(sizing.dram_bytes),
            format_bytes(sizing.slabs * sizing.slab_bytes),
            sizing.ranks,
            self._chunk_tokens,
            "+".join(format_bytes(shape.record_bytes) for shape in sizing.shapes),
            sum(self.tiers.chunks.slots.total(group) for group in range(len(sizing.shapes))),
            ssd,
        )

    def bind_block_pool(self, block_pool: Any) -> None:
        self._block_pool = block_pool
        self._promoting.bind_block_pool(block_pool)

    # Lookup and load.

    def new_request(self, request: Any) -> None:
        state = self._requests[request.request_id] = RequestState(request)
        if self.ssd.sharing is not None and not self._off:
            self.ssd.sharing.take_news()
        if not state.wrong_hints:
            return
        count(self.tiers.chunks.counts, "hints_ignored", len(state.wrong_hints))
        if not self._said_wrong_hints:
            self._said_wrong_hints = True
            logger.warning(
                "SARIA: of a request's kv_transfer_params.%s this is ignored: %s. More of it is only counted "
                "(hints_ignored)",
                KEY,
                "; ".join(state.wrong_hints),
            )

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that a tier can load; None means ask again. Changes nothing that matters."""
        state = self._state(request)
        state.asked_computed, state.sources, state.cut = computed, (0, 0), (0, "")
        if self._off or request.skip_reading_prefix_cache or state.load_failures >= LOAD_FAILURES_MAX:
            return 0, False
        if state.retried:
            # vLLM had no room: it counts what the failed load had reserved, and lets this request stand before those
            # that could run and free blocks. Recompute reserves nothing; to offer again can block the engine for ever.
            return 0, False
        if state.hints.no_load:
            state.hit_end = computed // self._chunk_tokens
            return 0, False
        if self.ssd.waiting():
            return None, False
        now = self._clock()
        prefix = self._prefix(state)
        usable = (request.num_tokens - 1) // self._block_tokens * self._block_tokens
        first, limit = computed // self._chunk_tokens, min(len(prefix.keys), -(-usable // self._chunk_tokens))
        if first < limit and computed < usable and self.tiers.is_loading(prefix, first):
            if self._wait(state, now):
                count(self.tiers.chunks.counts, "load_waits", 1)
                return None, False
        else:
            state.wait_until = 0.0
        found = self.tiers.match(prefix, first, limit, now)
        end, reason = self.tiers.cut(prefix, first, found, computed, usable, now)
        external = min(end * self._chunk_tokens, usable) - computed
        state.cut = max(0, min(found * self._chunk_tokens, usable) - computed - max(0, external)), reason
        state.hit_end = end if external > 0 else first
        state.retried = external > 0 and state.load_failures > 0
        return max(0, external), external > 0

    def _wait(self, state: RequestState, now: float) -> bool:
        """Whether the request may be told to ask again: from the first ask on for as long as a load may take.

        Without prefix caching in HBM another request's load is of no use to this one.
        """
        if not self._shares_blocks:
            return False
        if not state.wait_until:
            state.wait_until = now + self._config.load_deadline
        return now < state.wait_until

    def allocated(self, request: Any, blocks: Any, external: int) -> bool:
        """vLLM allocated blocks for a hit that was offered; with `external` 0 there is nothing to load."""
        state = self._state(request)
        state.scheduled, state.retried, state.wait_until, state.due_tokens = False, False, 0.0, 0
        self._quiet_tokens = 0
        count(self.tiers.chunks.counts, "recomputed_tokens", *state.cut)
        state.cut = (0, "")
        if not state.arrived:
            state.arrived = True
            self.tiers.arrived(self._prefix(state), state.hit_end, self._clock(), state.hints)
        elif external > 0 or not any(state.sources):  # What is stored next goes behind a recent prefix.
            self.tiers.touch(state.prefix, state.hit_end, 0, self._clock())
        if external > 0 or not any(state.sources):
            self.tiers.cost.computing(state.asked_computed + external, request.num_tokens, self._clock())
        if external <= 0:
            return True
        computed, end_tokens = state.asked_computed, state.asked_computed + external
        first, end = computed // self._chunk_tokens, -(-end_tokens // self._chunk_tokens)
        tables = [blocks.get_block_ids()[group] for group in self.sizing.groups]
        chunks = [
            self._chunk_blocks(table, first, end, computed // self._block_tokens, end_tokens // self._block_tokens)
            for table in tables
        ]
        state.sources = self.tiers.tier_tokens(state.prefix, first, end)
        state.promoted, state.promote_end = first, self.tiers.promote_until(state.prefix, first, end, self._clock())
        job = self.tiers.plan_load(request.request_id, state.prefix, first, end, chunks, self._clock())
        self._loads.append((self.ssd.generation, job))
        return True

    def _chunk_blocks(self, table: Sequence[int], first: int, end: int, block_first: int, block_end: int) -> Ints:
        """Block ids of chunks first..end, NULL_BLOCK outside block_first..block_end: (chunks, blocks of a chunk)."""
        per_chunk = self._chunk_tokens // self._block_tokens
        blocks = np.full((end - first) * per_chunk, NULL_BLOCK, np.int32)
        start, low, high = first * per_chunk, max(first * per_chunk, block_first), min(end * per_chunk, block_end)
        blocks[low - start : high - start] = table[low:high]
        return blocks.reshape(-1, per_chunk)

    def hit_sources(self, request: Any, external: int) -> dict[Any, int]:
        """The last hit by vLLM's names of our tiers; the sum is `external`."""
        dram, ssd = self._state(request).sources
        ssd = min(ssd, external)
        return compat.hit_sources(external - ssd if dram else 0, ssd if dram else external)

    # Stores.

    def _plan_stores(self, scheduler_output: Any) -> None:
        """Look at requests whose next chunk may be complete, and at none in a step that can complete no chunk."""
        scheduled = scheduler_output.num_scheduled_tokens
        if self._quiet_tokens <= 0 or not scheduled.keys() <= self._looked_at.keys():
            self._quiet_tokens, self._looked_at = sys.maxsize, scheduled
            for state in map(self._requests.get, scheduled):
                if state is None:
                    continue
                if state.request.num_computed_tokens >= state.due_tokens:
                    self._look(state, scheduler_output.kv_connector_block_state)
                left = state.due_tokens - state.request.num_computed_tokens
                if left < self._quiet_tokens:
                    self._quiet_tokens = left
        decoding = scheduler_output.total_num_scheduled_tokens == len(scheduled)
        self._quiet_tokens -= 1 if decoding else max(scheduled.values(), default=0)
        self._prefill = None if decoding else self._prefill_of(scheduled)

    def _prefill_of(self, scheduled: Mapping[str, int]) -> Prefill:
        """What of a step is prefill: of requests that get more than one token."""
        tokens = attended = 0
        for request_id, number in scheduled.items():
            if number > 1 and (state := self._requests.get(request_id)) is not None:
                tokens += number
                attended += number * state.request.num_computed_tokens + number * number // 2
        return Prefill(tokens, attended)

    def _look(self, state: RequestState, block_state: Any) -> None:
        """Store and promote what a request has for it."""
        if not state.scheduled:
            # In its first step a hit in HBM may be on blocks that another request of this step has yet to write.
            state.scheduled = True
            return
        if state.no_store:
            state.due_tokens = sys.maxsize
            return
        confirmed = compat.confirmed_tokens(state.request)
        if confirmed >= (state.stored + 1) * self._chunk_tokens:
            tables = block_state.get_block_ids(state.request.request_id)
            if tables is not None:
                self._store(state, confirmed, tables)
        state.due_tokens = (state.stored + 1) * self._chunk_tokens
        if state.promoted < state.promote_end:
            state.due_tokens = 0
            if (tables := block_state.get_block_ids(state.request.request_id)) is not None:
                self._promote(state, confirmed, tables)

    def _store(self, state: RequestState, confirmed: int, tables: Sequence[Sequence[int]]) -> None:
        """Store what is confirmed and not stored, as far as slots and the bound on held blocks allow."""
        prefix = self._prefix(state)
        tables = [tables[group] for group in self.sizing.groups]
        blocks_max = min(len(table) for table in tables)
        limit = min(confirmed, blocks_max * self._block_tokens) // self._chunk_tokens
        limit = min(limit, len(prefix.keys))
        while True:
            first, end = state.stored, min(limit, state.stored + self._chunks_to_hold())
            if end <= first:
                return
            chunks = [self._chunk_blocks(table, first, end, 0, blocks_max) for table in tables]
            job, state.stored = self.tiers.plan_store(prefix, first, end, chunks, self._clock())
            if job is not None:
                self._hold(job)
                self._stores.append(job)
            if state.stored < end:
                return

    def _promote(self, state: RequestState, confirmed: int, tables: Sequence[Sequence[int]]) -> None:
        """Hand on what promotion wants of the chunks that were loaded, as far as the bound on held blocks allows, half
        of which is for stores alone."""
        tables = [tables[group] for group in self.sizing.groups]
        blocks_max = min(map(len, tables))
        limit = min(confirmed, blocks_max * self._block_tokens) // self._chunk_tokens
        first, end = state.promoted, min(limit, state.promote_end)
        chunks_max = self._chunks_to_hold(HELD_SHARE_MAX / 2)
        if first < end and chunks_max:
            chunks = [self._chunk_blocks(table, first, end, 0, blocks_max) for table in tables]
            state.promoted = self._promoting.add(self._prefix(state), first, chunks, chunks_max, self._clock())

    def _chunks_to_hold(self, share: float = HELD_SHARE_MAX) -> int:
        """Chunks whose blocks may be held now; one always may, however small HBM is."""
        held = self._held_blocks + self._promoting.held_blocks
        room = int(self._block_pool.num_gpu_blocks * share) - held
        chunks = max(0, room) // (self._chunk_tokens // self._block_tokens * len(self.sizing.groups))
        return chunks or int(not held)

    def _hold(self, job: StoreJob) -> None:
        """Until it has ended on all ranks."""
        held = [self._block_pool.blocks[block] for part in job.parts for block in part.blocks.ravel().tolist()]
        self._block_pool.touch(held)
        self._held[job.job_id] = Held(held, self.sizing.ranks)
        self._held_blocks += len(held)

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """Last chance to store; the blocks are held by us, so vLLM may free them at once."""
        state = self._requests.pop(request.request_id, None)
        if state is None or self._off:
            return
        if self._recording is not None and state.scheduled:
            prompt_tokens = request.num_prompt_tokens
            keys = self._prefix(state).keys[: prompt_tokens // self._chunk_tokens]
            if not self._recording.add(request.arrival_time, keys, prompt_tokens, request.num_output_tokens):
                count(self.tiers.chunks.counts, "recording_dropped", 1)
        if not state.no_store and state.scheduled and block_ids:
            confirmed = compat.confirmed_tokens(request)
            self._store(state, confirmed, block_ids)
            left = min(confirmed // self._chunk_tokens, len(state.prefix.keys)) - state.stored
            if left > 0 and min(map(len, block_ids)):
                reason = "no_slot" if self._chunks_to_hold() else "hold_limit"
                count(self.tiers.chunks.counts, "dropped_chunks", left, reason)
            if state.promoted < state.promote_end and min(map(len, block_ids)):
                self._promote(state, confirmed, block_ids)
                count_unpromoted(self.tiers, state.prefix, state.promoted, state.promote_end, "hold_limit")
        self.tiers.touch(state.prefix, len(state.prefix.keys), 0, self._clock())
        if not self._requests:
            self.tiers.cost.gpu_idle()

    # Once per step.

    def plan_step(self, scheduler_output: Any) -> None:
        """Plan stores, evictions and persists, and promotions into what is left of DRAM."""
        if not self._off:
            now = self._clock()
            self.ssd.step(now)
            # Those of this step wait for the next: together with its stores they would make it a long one.
            slots_wanted = self._promoting.slots_wanted()
            self._plan_stores(scheduler_output)
            self._persists += self.tiers.make_room(now, slots_wanted)
            for job in self._promoting.plan(now) if slots_wanted else ():
                self._hold(job)
                self._promotions.append(job)

    def take_metadata(self) -> SariaMetadata:
        """What was planned since the last call. Whatever was promised to vLLM is in it, also after a fault."""
        generation = self.ssd.generation
        metadata = SariaMetadata(generation, stores=self._stores, promotions=self._promotions, persists=self._persists)
        self._stores, self._promotions, self._persists = [], [], []
        metadata.prefill, self._prefill = self._prefill, None
        for planned, job in self._loads:
            (metadata.loads if planned == generation else metadata.refused).append(job)
        self._loads = []
        self.ssd.put_into(metadata)
        if self.tiers.chunks.extents is not None:
            metadata.retired = self.tiers.chunks.extents.retired[:]
            self.tiers.chunks.extents.retired.clear()
        return metadata

    def refuse_load(self, request: Any) -> None:
        """A hit was promised and could not be planned: the workers report its load as failed."""
        self._loads.append((-1, LoadJob(NO_JOB, request.request_id, ())))

    def release_blocks(self, result: JobResult) -> None:
        """Give back the HBM blocks of a store or promotion that has ended on all ranks."""
        held = self._held.get(result.job_id)
        if held is None:
            return
        held.ranks_left -= 1
        if not held.ranks_left:
            del self._held[result.job_id]
            self._held_blocks -= len(held.blocks)
            self._block_pool.free_blocks(reversed(held.blocks))

    def measured(self, metadata: SariaWorkerMetadata) -> None:
        """Take what ranks moved from and to drives, how fast DRAM reaches HBM, and what prefills took."""
        self.tiers.moved(metadata.moved, metadata.ingress_bytes_s, self._clock())
        for prefill in metadata.prefills:
            self.tiers.cost.prefill.learn(*prefill)

    def jobs_ended(self, results: Sequence[JobResult]) -> None:
        """Take ranks' results of jobs."""
        now = self._clock()
        self.tiers.finished([result for result in results if result.job_id != NO_JOB], now)
        for problem in self.tiers.take_problems():
            logger.error("SARIA: %s", problem)

    def loads_failed(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            if (state := self._requests.get(request_id)) is not None:
                state.load_failures += 1

    # State that vLLM asks for.

    def has_held_blocks(self) -> bool:
        return bool(self._held or self._promoting.waiting)

    def has_pending_work(self) -> bool:
        """Whether an idle engine must keep stepping: blocks are held, or the SSD tier opens (for a bounded time)."""
        return self.has_held_blocks() or self.ssd.waiting()

    def take_counts(self) -> Counts:
        counts = self.tiers.take_counts()
        if self.ssd.wear is not None:
            counts |= self.ssd.wear.counts
            self.ssd.wear.counts = {}
        return counts

    def reset_cache(self) -> bool:
        """Forget everything, before returning; False when not durably. The generation fences what is in flight."""
        durable = self.ssd.next_generation()
        self._promoting.clear()
        self.tiers.reset()
        for state in self._requests.values():
            state.no_store = True  # Its KV may come from the weights of before.
            state.promote_end = 0
        return durable

    def turn_off(self) -> None:
        """After a fault of ours: offer and store nothing more, let what is in flight end."""
        if not self._off:
            logger.error("SARIA: the tier is off from now on, requests are recomputed")
        self._off = True
        self._promoting.clear()
        count(self.tiers.chunks.counts, "internal_errors", 1)

    def shutdown(self) -> None:
        self.ssd.release()
        if self._recording is not None:
            self._recording.close()

    def _state(self, request: Any) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            self.new_request(request)
            state = self._requests[request.request_id]
        return state

    def _prefix(self, state: RequestState) -> Prefix:
        hashes = resolve_block_hashes(state.request.block_hashes, self._hash_tokens, self._chunk_tokens)
        keys = state.prefix.keys
        if keys and (len(hashes) < len(keys) or hashes[len(keys) - 1] != keys[-1]):
            # A streaming session dropped tokens; hashes are chained, so the last one tells.
            visit, state.prefix = state.prefix.visit, Prefix()
            state.prefix.visit = visit
            keys = state.prefix.keys
            state.stored = state.hit_end = state.due_tokens = state.promoted = state.promote_end = 0
        for position in range(len(keys), len(hashes)):
            keys.append(hashes[position])
        return state.prefix
