"""The worker half: registers pages, hands jobs to the executor, reports their ends. No decisions."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.kv_cache_interface import KVCacheConfig

from saria_connector import layout
from saria_connector.metadata import SariaMetadata, SariaWorkerMetadata
from saria_connector.sizing import Sizing
from saria_vllm.config import SariaConfig, format_rate
from saria_vllm.engine.device_pages import DevicePages, pin, round_trip
from saria_vllm.engine.emulated import ENVIRONMENT, EmulatedMachine
from saria_vllm.engine.executor import Executor
from saria_vllm.engine.first_rates import Calibration, FirstRates
from saria_vllm.engine.link_rate import measure_link
from saria_vllm.engine.pool import DramPool
from saria_vllm.engine.ssd_engine import open_engine
from saria_vllm.engine.step_times import StepTimes
from saria_vllm.errors import LayoutError
from saria_vllm.metrics import Counts, count
from saria_vllm.storage.namespace import store_id
from saria_vllm.types import JobResult

logger = logging.getLogger("vllm.saria")


class WorkerSide:
    """See `SariaConnector` for when vLLM calls what."""

    _on_device: Sequence[DevicePages] = ()
    """Where the KV cache is on a GPU."""

    def __init__(self, vllm_config: Any, kv_cache_config: KVCacheConfig, config: SariaConfig) -> None:
        self._config, self._kv_cache_config = config, kv_cache_config
        self._sizing = Sizing.of(vllm_config, kv_cache_config, config)
        self._rank = vllm_config.parallel_config.rank
        # Of the engine and of this configuration: under MultiConnector there may be several of us in one engine.
        identity = f"{vllm_config.kv_transfer_config.engine_id} {config!r}"
        self._pool_name = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
        self._executor: Executor | None = None
        self._results: list[JobResult] = []
        self._step_times = StepTimes(on_gpu=False)
        self.counts: Counts = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        sizing, opener, io_threads = self._sizing, open_engine, self._config.io_threads
        first_rates: FirstRates | None = Calibration(self._rank, sizing.ranks)
        maps: dict[int, Any] = layout.page_maps(self._kv_cache_config, sizing.groups, kv_caches)
        if self._config.ssd_paths:
            open_engine(self._config.ssd_engine, 2)[0].close()  # A configured engine that cannot work is an error now.
        pool = DramPool(self._pool_name, sizing.dram_bytes, self._rank % sizing.ranks, sizing.ranks, sizing.slab_bytes)
        self._on_device = [pages for pages in maps.values() if isinstance(pages, DevicePages)]
        if self._on_device:
            self._prepare_device(pool)
        self._step_times = StepTimes(any(pages.on_gpu for pages in self._on_device))
        if rates := os.environ.get(ENVIRONMENT):
            logger.warning("SARIA: %s is set: loads are as slow as %s say", ENVIRONMENT, rates)
            machine = EmulatedMachine.of(rates, len(self._config.ssd_paths))
            maps, opener = {group: machine.pages(of) for group, of in maps.items()}, machine.open_engine
            io_threads, first_rates = 1, None
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
            io_threads=io_threads,
            cpus=self._config.io_cpus,
            pacing=pacing,
            link=link,
            load_deadline_s=self._config.load_deadline,
            opener=opener,
            first_rates=first_rates,
        )

    def _prepare_device(self, pool: DramPool) -> None:
        """Pin the pool, and see that copies work, before there is anything to lose."""
        logger.warning("SARIA: a KV cache on a GPU: this has not been proved. Compare answers before you rely on it")
        if not pin(pool.base, pool.region_bytes):
            logger.warning("SARIA: CUDA does not pin the DRAM tier: copies are slower")
        for pages, shape in zip(self._on_device, self._sizing.shapes, strict=True):
            blocks = range(1, min(1 + shape.blocks_per_chunk, self._kv_cache_config.num_blocks))
            if not round_trip(pages, list(blocks), pool.base):
                raise LayoutError("a record copied to the KV cache and back came back as another")

    def start(self, metadata: SariaMetadata) -> bool:
        """Submit everything of this step but stores and promotions. What is handed on leaves the metadata."""
        executor = self._executor
        assert executor is not None
        if metadata.started:
            return True
        metadata.started = True
        self._step_times.begin(metadata.prefill)
        for pages in self._on_device if metadata.loads else ():
            pages.fence(stores=False)
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
        """Submit stores and promotions: after the forward, when their blocks have their final bytes."""
        assert self._executor is not None
        self._step_times.end()
        for pages in self._on_device if metadata.stores or metadata.promotions else ():
            pages.fence(stores=True)
        for jobs, submit in (
            (metadata.stores, self._executor.submit_store),
            (metadata.promotions, self._executor.submit_promotion),
        ):
            jobs.reverse()
            while jobs:
                submit(jobs[-1])
                jobs.pop()
        return True

    def fail_rest(self, metadata: SariaMetadata) -> None:
        """After a fault of ours: end as failed what was not handed on. The job that was being submitted ends at its
        deadline if it is a load."""
        assert self._executor is not None
        for load in metadata.loads + metadata.refused:
            self._executor.refuse_load(load)
        for job in (*metadata.stores, *metadata.promotions, *metadata.persists):
            self._results.append(JobResult(job.job_id, tuple(range(job.chunks)), "other"))
        for jobs in (metadata.loads, metadata.refused, metadata.stores, metadata.promotions, metadata.persists):
            jobs.clear()

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
        prefills = self._step_times.take()
        if not self._results and opened is None and not prefills:
            return None
        moved = self._executor.take_moved() if self._executor else []
        ingress_bytes_s = self._executor.ingress_bytes_s if self._executor else 0.0
        results, self._results = self._results, []
        return SariaWorkerMetadata(results, [opened] if opened else [], moved, ingress_bytes_s, prefills)

    def shutdown(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = None
