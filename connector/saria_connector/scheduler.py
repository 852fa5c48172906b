"""The scheduler half: turns vLLM's questions and events into calls of `Tiers`, and its plans into metadata."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.kv_cache_interface import KVCacheConfig

from saria_connector import compat
from saria_connector.fingerprint import fingerprint_parts, process_only_reasons
from saria_connector.metadata import SariaMetadata
from saria_connector.sizing import Sizing
from saria_vllm.config import SariaConfig, format_bytes
from saria_vllm.errors import StorageError
from saria_vllm.metrics import Counts, count
from saria_vllm.policy.admission import make_admission
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.policy.tiers import Tiers
from saria_vllm.storage.format import records_per_segment
from saria_vllm.storage.namespace import EngineDirectory, namespace_name
from saria_vllm.storage.reclaim import reclaim_others
from saria_vllm.types import NULL_BLOCK, FoundChunk, JobResult, LoadJob, OpenedSsd, OpenSsd, PersistJob, StoreJob

logger = logging.getLogger("vllm.saria")

WAIT_S = 10.0
"""How long a request is told to ask again: while the SSD tier opens, or while another request loads its chunks."""

LEASE_WAIT_S = 3.0

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
        "asked_computed", "hit_end", "keys", "load_failures", "no_store", "request", "retried", "scheduled", "sources",
        "stored", "wait_until",
    )  # fmt: skip

    def __init__(self, request: Any) -> None:
        self.request = request
        self.keys: list[bytes] = []
        """Keys of the request's full chunks, as far as they were needed."""
        self.asked_computed = 0
        """Tokens in HBM when the last hit was offered."""
        self.hit_end = 0
        """Chunks that were reused, from HBM or a tier."""
        self.stored = 0
        """Chunks that need no more looking at for storing."""
        self.sources = (0, 0)
        """Tokens of the last hit by (DRAM, SSD)."""
        self.load_failures = 0
        self.retried = False
        """Whether a hit was offered after a failed load, and not taken yet."""
        self.wait_until = 0.0
        self.scheduled = False
        """Whether it was in a step since blocks were allocated: before that a load, ours or another connector's, may be
        in flight, and vLLM counts its tokens as computed already."""
        params = request.kv_transfer_params or {}
        # KV pulled from a remote prefill may be overwritten bytes after an expired lease: never keep it.
        self.no_store = bool(params.get("do_remote_prefill"))


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
        batch_chunks = -(-vllm_config.scheduler_config.max_num_batched_tokens // self._chunk_tokens) + 1
        slots = SlotAllocator(sizing.slabs, [sizing.slab_bytes // shape.record_bytes for shape in sizing.shapes])
        region = sizing.slabs * sizing.slab_bytes
        self.tiers = Tiers(
            sizing.shapes,
            slots,
            None,
            make_admission(config.admission),
            ghosts_max=config.admission.ghosts_max,
            headroom=[max(1, min(batch_chunks, slots.total(g) // 4)) for g in range(len(sizing.shapes))],
            persist_bytes_max=min(PERSIST_BYTES_MAX, region // 4),
            ranks=sizing.ranks,
        )
        self._requests: dict[str, RequestState] = {}
        self._loads: list[tuple[int, LoadJob]] = []
        """(generation, job) to send with the next step."""
        self._stores: list[StoreJob] = []
        self._persists: list[PersistJob] = []
        self._held: dict[int, Held] = {}
        """HBM blocks by the store job that still reads them."""
        self._held_blocks = 0
        self._block_pool: Any = None
        self._generation = 0
        self._off = False
        self._directory: EngineDirectory | None = None
        self._reclaimer: threading.Thread | None = None
        self._open: OpenSsd | None = None
        """To be sent to the workers, with the generation of that moment."""
        self._open_generation = 0
        """The generation that the workers look for."""
        self._segments_max = 0
        self._opening_until = 0.0
        """Until when lookups wait for the SSD tier to open; 0 once it is open or off."""
        self._opened: list[OpenedSsd] = []
        if config.ssd_paths:
            self._claim(vllm_config, kv_cache_config)
        self._log_start()

    # Start.

    def _claim(self, vllm_config: Any, kv_cache_config: KVCacheConfig) -> None:
        config, sizing = self._config, self.sizing
        for reason in process_only_reasons(vllm_config):
            logger.warning("SARIA: what is persisted to SSD will not be used after a restart: %s", reason)
        parts = fingerprint_parts(vllm_config, kv_cache_config, sizing.groups, sizing.shapes, config.namespace)
        preferred = getattr(vllm_config.parallel_config, "data_parallel_rank_local", 0) or 0
        self._directory = self._lease(namespace_name(parts), parts, preferred)
        self._generation = self._directory.generation
        self._opening_until = self._clock() + WAIT_S

    def _lease(self, namespace: str, parts: dict[str, Any], preferred: int) -> EngineDirectory:
        """The preferred engine directory; another one only when a few seconds do not free it.

        An engine that is still going down holds its lease for a moment, and its successor should find its cache.
        """
        give_up = time.monotonic() + LEASE_WAIT_S
        while True:
            directory = EngineDirectory.claim(self._config.ssd_paths, namespace, parts, preferred)
            if directory.index == preferred:
                return directory
            if time.monotonic() > give_up:
                logger.warning("SARIA: another engine has e%d; this one uses e%d", preferred, directory.index)
                return directory
            directory.release()
            time.sleep(0.2)

    def _reclaim(self, directory: EngineDirectory) -> None:
        """Make room under `ssd_capacity`, then let the workers open. On a thread: unlinking much takes seconds."""
        config, sizing = self._config, self.sizing
        per_segment = sizing.segment_bytes * sizing.ranks * len(config.ssd_paths)
        segments_max = sizing.segments_max
        try:
            ours, removed = reclaim_others(config.ssd_paths, directory, config.ssd_capacity)
        except Exception as error:
            self._ssd_off(f"{type(error).__name__}: {error}")
            return
        for path in removed:
            logger.warning("SARIA removed %s to stay within ssd_capacity", path)
        if ours < per_segment * (segments_max - 1):
            segments_max = ours // per_segment
            logger.warning("SARIA: other engines use ssd_capacity; %s are left for this one", format_bytes(ours))
        self._segments_max = segments_max
        self._open = OpenSsd(directory.directories, self._generation, sizing.segment_bytes, segments_max)

    def _ssd_off(self, problem: str) -> None:
        logger.error("SARIA: the SSD tier is off: %s", problem)
        self._opening_until = 0.0

    def _log_start(self) -> None:
        sizing = self.sizing
        logger.info(
            "SARIA: %s; this engine: %s DRAM, %s for each of %d rank(s); chunks of %d tokens = %s per rank; "
            "%d DRAM slots; SSD %s",
            self._config.describe(),
            format_bytes(sizing.dram_bytes),
            format_bytes(sizing.slabs * sizing.slab_bytes),
            sizing.ranks,
            self._chunk_tokens,
            "+".join(format_bytes(shape.record_bytes) for shape in sizing.shapes),
            sum(self.tiers.slots.total(group) for group in range(len(sizing.shapes))),
            ", ".join(self._directory.directories) if self._directory else "off",
        )

    def bind_block_pool(self, block_pool: Any) -> None:
        self._block_pool = block_pool

    # Lookup and load.

    def new_request(self, request: Any) -> None:
        self._requests[request.request_id] = RequestState(request)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that a tier can load; None means ask again. Changes nothing that matters."""
        state = self._state(request)
        state.asked_computed, state.sources = computed, (0, 0)
        if self._off or request.skip_reading_prefix_cache or state.load_failures >= LOAD_FAILURES_MAX:
            return 0, False
        if state.retried:
            # vLLM had no room: it counts what the failed load had reserved, and lets this request stand before those
            # that could run and free blocks. Recompute reserves nothing; to offer again can block the engine for ever.
            return 0, False
        now = self._clock()
        if self._opening_until > now:
            return None, False
        keys = self._keys(state)
        usable = (request.num_tokens - 1) // self._block_tokens * self._block_tokens
        first, limit = computed // self._chunk_tokens, min(len(keys), -(-usable // self._chunk_tokens))
        if first < limit and computed < usable and self.tiers.is_loading(keys[first]):
            if self._wait(state, now):
                count(self.tiers.counts, "load_waits", 1)
                return None, False
        else:
            state.wait_until = 0.0
        end = self.tiers.match(keys, first, limit)
        external = min(end * self._chunk_tokens, usable) - computed
        state.hit_end = end if external > 0 else first
        state.retried = external > 0 and state.load_failures > 0
        return max(0, external), external > 0

    def _wait(self, state: RequestState, now: float) -> bool:
        """Whether the request may be told to ask again: for a bounded time from the first ask on.

        Without prefix caching in HBM another request's load is of no use to this one.
        """
        if not self._shares_blocks:
            return False
        if not state.wait_until:
            state.wait_until = now + WAIT_S
        return now < state.wait_until

    def allocated(self, request: Any, blocks: Any, external: int) -> bool:
        """vLLM allocated blocks for a hit that was offered; with `external` 0 there is nothing to load."""
        state = self._state(request)
        state.scheduled, state.retried, state.wait_until = False, False, 0.0
        if external <= 0:
            if not any(state.sources):  # All of the hit is in HBM: what is stored next goes behind a recent prefix.
                self.tiers.touch(state.keys, state.hit_end, 0)
            return True
        computed, end_tokens = state.asked_computed, state.asked_computed + external
        first, end = computed // self._chunk_tokens, -(-end_tokens // self._chunk_tokens)
        tables = [blocks.get_block_ids()[group] for group in self.sizing.groups]
        chunks = [
            self._chunk_blocks(table, first, end, computed // self._block_tokens, end_tokens // self._block_tokens)
            for table in tables
        ]
        state.sources = self.tiers.tier_tokens(state.keys, first, end)
        job = self.tiers.plan_load(request.request_id, state.keys, first, end, chunks)
        self._loads.append((self._generation, job))
        return True

    def _chunk_blocks(
        self, table: Sequence[int], first: int, end: int, block_first: int, block_end: int
    ) -> list[tuple[int, ...]]:
        """Block ids of chunks first..end, NULL_BLOCK outside block_first..block_end."""
        per_chunk = self._chunk_tokens // self._block_tokens
        return [
            tuple(
                table[block] if block_first <= block < block_end else NULL_BLOCK
                for block in range(chunk * per_chunk, (chunk + 1) * per_chunk)
            )
            for chunk in range(first, end)
        ]

    def hit_sources(self, request: Any, external: int) -> dict[Any, int]:
        """The last hit by vLLM's names of our tiers; the sum is `external`."""
        dram, ssd = self._state(request).sources
        ssd = min(ssd, external)
        return compat.hit_sources(external - ssd if dram else 0, ssd if dram else external)

    # Stores.

    def _plan_stores(self, scheduler_output: Any) -> None:
        block_state = scheduler_output.kv_connector_block_state
        chunk_tokens = self._chunk_tokens
        for request_id in scheduler_output.num_scheduled_tokens:
            state = self._requests.get(request_id)
            if state is None:
                continue
            if not state.scheduled:
                # In its first step a hit in HBM may be on blocks that another request of this step has yet to write.
                state.scheduled = True
                continue
            if state.no_store:
                continue
            confirmed = compat.confirmed_tokens(state.request)
            if confirmed < (state.stored + 1) * chunk_tokens:
                continue
            tables = block_state.get_block_ids(request_id)
            if tables is not None:
                self._store(state, confirmed, tables)

    def _store(self, state: RequestState, confirmed: int, tables: Sequence[Sequence[int]]) -> None:
        """Store what is confirmed and not stored, as far as slots and the bound on held blocks allow."""
        keys = self._keys(state)
        tables = [tables[group] for group in self.sizing.groups]
        blocks_max = min(len(table) for table in tables)
        limit = min(confirmed, blocks_max * self._block_tokens) // self._chunk_tokens
        limit = min(limit, len(keys))
        while True:
            first, end = state.stored, min(limit, state.stored + self._chunks_to_hold())
            if end <= first:
                return
            chunks = [self._chunk_blocks(table, first, end, 0, blocks_max) for table in tables]
            job, state.stored = self.tiers.plan_store(keys, first, end, chunks)
            if job is not None:
                self._hold(job)
            if state.stored < end:
                return

    def _chunks_to_hold(self) -> int:
        """Chunks whose blocks may be held now; one always may, however small HBM is."""
        room = int(self._block_pool.num_gpu_blocks * HELD_SHARE_MAX) - self._held_blocks
        chunks = max(0, room) // (self._chunk_tokens // self._block_tokens * len(self.sizing.groups))
        return chunks or int(not self._held)

    def _hold(self, job: StoreJob) -> None:
        held = [self._block_pool.blocks[block] for item in job.items for block in item.blocks]
        self._block_pool.touch(held)
        self._held[job.job_id] = Held(held, self.sizing.ranks)
        self._held_blocks += len(held)
        self._stores.append(job)

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """Last chance to store; the blocks are held by us, so vLLM may free them at once."""
        state = self._requests.pop(request.request_id, None)
        if state is None or self._off:
            return
        if not state.no_store and state.scheduled and block_ids:
            confirmed = compat.confirmed_tokens(request)
            self._store(state, confirmed, block_ids)
            left = min(confirmed // self._chunk_tokens, len(state.keys)) - state.stored
            if left > 0 and min(map(len, block_ids)):
                reason = "no_slot" if self._chunks_to_hold() else "hold_limit"
                count(self.tiers.counts, "dropped_chunks", left, reason)
        self.tiers.touch(state.keys, len(state.keys), state.hit_end)

    # Once per step.

    def plan_step(self, scheduler_output: Any) -> None:
        """Plan stores, evictions and persists."""
        if not self._off:
            self._plan_stores(scheduler_output)
            self._persists += self.tiers.make_room(self._clock())

    def take_metadata(self) -> SariaMetadata:
        """What was planned since the last call. Whatever was promised to vLLM is in it, also after a fault."""
        metadata = SariaMetadata(self._generation, stores=self._stores, persists=self._persists)
        self._stores, self._persists = [], []
        for generation, job in self._loads:
            (metadata.loads if generation == self._generation else metadata.refused).append(job)
        self._loads = []
        if self._directory is not None:
            metadata.namespace, metadata.engine_index = self._directory.namespace, self._directory.index
            if self._open is not None:
                metadata.open_ssd = msgspec.structs.replace(self._open, generation=self._generation)
                self._open, self._open_generation = None, self._generation
            if self._reclaimer is None:
                self._reclaimer = threading.Thread(target=self._reclaim, args=(self._directory,), daemon=True)
                try:
                    self._reclaimer.start()
                except RuntimeError as error:  # Too many threads here.
                    self._ssd_off(str(error))
        if self.tiers.extents is not None:
            metadata.retired = self.tiers.extents.retired[:]
            self.tiers.extents.retired.clear()
        return metadata

    def refuse_load(self, request: Any) -> None:
        """A hit was promised and could not be planned: the workers report its load as failed."""
        self._loads.append((-1, LoadJob(NO_JOB, request.request_id, ())))

    def release_blocks(self, result: JobResult) -> None:
        """Give back the HBM blocks of a store that has ended on all ranks."""
        held = self._held.get(result.job_id)
        if held is None:
            return
        held.ranks_left -= 1
        if not held.ranks_left:
            del self._held[result.job_id]
            self._held_blocks -= len(held.blocks)
            self._block_pool.free_blocks(reversed(held.blocks))

    def job_ended(self, result: JobResult) -> None:
        """Take one rank's result of a job."""
        if result.job_id != NO_JOB:
            self.tiers.finished(result, self._clock())

    def ssd_opened(self, reports: list[OpenedSsd]) -> None:
        """Take some ranks' reports; with the last one the SSD tier is open."""
        self._opened += reports
        if self._opened and len(self._opened) == self.sizing.ranks:
            self._adopt(self._opened)
            self._opened = []

    def loads_failed(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            if (state := self._requests.get(request_id)) is not None:
                state.load_failures += 1

    def _adopt(self, reports: list[OpenedSsd]) -> None:
        problems = [report.problem for report in reports if report.problem]
        if problems:
            self._ssd_off(problems[0])
            return
        self._opening_until = 0.0
        found: set[FoundChunk] = set.intersection(*(set(report.found) for report in reports))
        next_segment = max(report.next_segment for report in reports)
        records = [records_per_segment(shape.record_bytes, self.sizing.segment_bytes) for shape in self.sizing.shapes]
        drives = len(self._config.ssd_paths)
        self.tiers.extents = ExtentAllocator(drives, self._segments_max, records, next_segment)
        for drive in range(drives):
            if not all(report.drives[drive] for report in reports):
                logger.error("SARIA: drive %s is left out until a restart", self._config.ssd_paths[drive])
                self.tiers.extents.leave_out(drive)
        seen = {chunk.extent[:2] for report in reports for chunk in report.found}
        oldest_first = sorted(found, key=lambda chunk: (chunk.extent.segment, chunk.extent.record))
        self.tiers.adopt(oldest_first, next_segment, seen)
        if self._generation != self._open_generation:
            self.tiers.reset()  # A reset came in between: what was found is of before, and its segments must go.
        logger.info("SARIA: the SSD tier is open, %d chunks found; %s", len(found), reports[0].note)

    # State that vLLM asks for.

    def has_held_blocks(self) -> bool:
        return bool(self._held)

    def has_pending_work(self) -> bool:
        """Whether an idle engine must keep stepping: blocks are held, or the SSD tier opens (for a bounded time)."""
        return bool(self._held) or self._opening_until > self._clock()

    def take_counts(self) -> Counts:
        counts = self.tiers.counts
        self.tiers.counts = {}
        return counts

    def reset_cache(self) -> bool:
        """Forget everything, before returning; False when not durably. The generation fences what is in flight."""
        durable = True
        if self._directory is None:
            self._generation += 1
        else:
            try:
                self._directory.bump_generation()
            except StorageError as error:
                logger.error("SARIA: after a restart the cache may not be reset: %s", error)
                durable = False
            self._generation = self._directory.generation
        self.tiers.reset()
        for state in self._requests.values():
            state.no_store = True  # Its KV may come from the weights of before.
        return durable

    def turn_off(self) -> None:
        """After a fault of ours: offer and store nothing more, let what is in flight end."""
        logger.error("SARIA: the tier is off from now on, requests are recomputed")
        self._off = True
        count(self.tiers.counts, "internal_errors", 1)

    def shutdown(self) -> None:
        if self._directory is not None:
            self._directory.release()
            self._directory = None

    def _state(self, request: Any) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = RequestState(request)
        return state

    def _keys(self, state: RequestState) -> list[bytes]:
        hashes = resolve_block_hashes(state.request.block_hashes, self._hash_tokens, self._chunk_tokens)
        keys = state.keys
        if keys and (len(hashes) < len(keys) or hashes[len(keys) - 1] != keys[-1]):
            keys.clear()  # A streaming session dropped tokens that it had; hashes are chained, so the last one tells.
            state.stored = state.hit_end = 0
        for position in range(len(keys), len(hashes)):
            keys.append(hashes[position])
        return keys
