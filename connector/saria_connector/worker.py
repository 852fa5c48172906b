"""The worker half: registers pages, hands jobs to the executor, reports their ends. No decisions."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.kv_cache_interface import KVCacheConfig

from saria_connector import layout
from saria_connector.metadata import SariaMetadata, SariaWorkerMetadata
from saria_connector.sizing import Sizing
from saria_vllm.config import SariaConfig, format_rate
from saria_vllm.engine.executor import Executor
from saria_vllm.engine.link_rate import measure_link
from saria_vllm.engine.pool import DramPool
from saria_vllm.engine.ssd_engine import open_engine
from saria_vllm.metrics import Counts, count
from saria_vllm.storage.namespace import store_id
from saria_vllm.types import JobResult

logger = logging.getLogger("vllm.saria")


class WorkerSide:
    """See `SariaConnector` for when vLLM calls what."""

    def __init__(self, vllm_config: Any, kv_cache_config: KVCacheConfig, config: SariaConfig) -> None:
        self._config, self._kv_cache_config = config, kv_cache_config
        self._sizing = Sizing.of(vllm_config, kv_cache_config, config)
        self._rank = vllm_config.parallel_config.rank
        # Of the engine and of this configuration: under MultiConnector there may be several of us in one engine.
        identity = f"{vllm_config.kv_transfer_config.engine_id} {config!r}"
        self._pool_name = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
        self._executor: Executor | None = None
        self._results: list[JobResult] = []
        self.counts: Counts = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        sizing = self._sizing
        maps = layout.page_maps(self._kv_cache_config, sizing.groups, kv_caches)
        if self._config.ssd_paths:
            open_engine(self._config.ssd_engine, 2)[0].close()  # A configured engine that cannot work is an error now.
        pool = DramPool(self._pool_name, sizing.dram_bytes, self._rank % sizing.ranks, sizing.ranks, sizing.slab_bytes)
        shapes, pacing, link = {shape.group: shape for shape in sizing.shapes}, self._config.pacing, 0.0
        if pacing.mode != "off":  # No request has come yet: what the blocks hold does not matter.
            group, shape = next(iter(shapes.items()))
            link = measure_link(pool, maps[group], shape, self._kv_cache_config.num_blocks)
            logger.info(
                "SARIA rank %d: DRAM to HBM was measured at %s; pacing %s",
                self._rank, format_rate(link), pacing.describe(),
            )  # fmt: skip
        self._executor = Executor(
            pool,
            maps,
            shapes,
            ssd_engine=self._config.ssd_engine,
            io_threads=self._config.io_threads,
            cpus=self._config.io_cpus,
            pacing=pacing,
            link=link,
        )

    def start(self, metadata: SariaMetadata) -> bool:
        """Submit everything of this step but the stores. What is handed on leaves the metadata."""
        executor = self._executor
        assert executor is not None
        executor.set_generation(metadata.generation)
        if metadata.open_ssd is not None:
            rank_id = store_id(metadata.namespace, metadata.engine_index, self._rank)
            executor.open_ssd(metadata.open_ssd, self._rank, rank_id)
        for drive, segment in metadata.retired:
            executor.retire(drive, segment)
        metadata.loads.reverse()  # The first to come is the first to load.
        while metadata.loads:
            executor.submit_load(metadata.loads.pop())
        while metadata.refused:
            executor.refuse_load(metadata.refused.pop())
        metadata.persists.reverse()
        while metadata.persists:
            executor.submit_persist(metadata.persists.pop())
        return True

    def store(self, metadata: SariaMetadata) -> bool:
        """Submit the stores: after the forward, when their blocks have their final bytes."""
        assert self._executor is not None
        metadata.stores.reverse()
        while metadata.stores:
            self._executor.submit_store(metadata.stores[-1])
            metadata.stores.pop()
        return True

    def fail_rest(self, metadata: SariaMetadata) -> None:
        """After a fault of ours: end as failed what was not handed on. The job that was being submitted ends at its
        deadline if it is a load."""
        assert self._executor is not None
        for load in metadata.loads + metadata.refused:
            self._executor.refuse_load(load)
        for job in (*metadata.stores, *metadata.persists):
            self._results.append(JobResult(job.job_id, tuple(range(job.chunks)), "other"))
        metadata.loads, metadata.refused, metadata.stores, metadata.persists = [], [], [], []

    def turn_off(self) -> None:
        """Count a fault of ours. What was asked of this half ends all the same: the other half decides."""
        count(self.counts, "internal_errors", 1)

    def transfer_results(self) -> KVConnectorTransferResults:
        transfers = KVConnectorTransferResults()
        if self._executor is None:
            return transfers
        results, loads, counts, messages = self._executor.poll()
        self._results += results
        for state in loads:
            transfers.finished_recving.add(state.job.request_id)
            if state.failed:
                transfers.failed_recving.add(state.job.request_id)
            self._results.append(JobResult(state.job.job_id, tuple(state.failed), state.reason))
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0) + value
        for message in messages:
            logger.warning("SARIA rank %d: %s", self._rank, message)
        return transfers

    def worker_metadata(self) -> SariaWorkerMetadata | None:
        opened = self._executor.take_opened() if self._executor else None
        if not self._results and opened is None:
            return None
        moved = self._executor.take_moved() if self._executor else []
        results, self._results = self._results, []
        return SariaWorkerMetadata(results, [opened] if opened else [], moved)

    def shutdown(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = None
