"""`SariaConnector`: vLLM's view of SARIA. Each method hands over to the scheduler or worker half.

Call order in vLLM 0.32. Scheduler: on_new_request, get_num_new_matched_tokens (repeatedly), update_state_after_alloc,
build_connector_meta (each step), update_connector_output (each step), request_finished_all_groups. Worker:
handle_preemptions, bind, forward, start_load_kv, wait_for_save, get_transfer_results, build_connector_worker_meta.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from saria_connector.metadata import SariaMetadata, SariaWorkerMetadata
from saria_connector.scheduler import SchedulerSide
from saria_connector.stats import SariaPromMetrics, SariaStats
from saria_connector.worker import WorkerSide
from saria_vllm.config import SariaConfig
from saria_vllm.errors import SariaError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.saria")
T = TypeVar("T")


class SariaConnector(KVConnectorBase_V1, SupportsHMA):
    """A best-effort KV cache tier: a fault of ours becomes a cache miss, never a dead engine."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._faults: set[tuple[str, str]] = set()
        """Kinds of faults of ours that were logged: (call, exception type)."""
        try:
            config = SariaConfig.from_extra(self._kv_transfer_config.kv_connector_extra_config)
            config.check_machine()
            if role == KVConnectorRole.SCHEDULER:
                self._warn(vllm_config)
                self._scheduler = SchedulerSide(vllm_config, kv_cache_config, config)
            else:
                self._worker = WorkerSide(vllm_config, kv_cache_config, config)
        except SariaError as error:
            logger.error("SARIA cannot start: %s", error)
            raise

    def _warn(self, vllm_config: VllmConfig) -> None:
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning(
                'SARIA: kv_load_failure_policy is "fail": a request whose reload fails will end with an error. '
                'Set "kv_load_failure_policy": "recompute" in --kv-transfer-config to have it recomputed instead '
                "(under MultiConnector at the top level, which decides and which we do not see)."
            )
        if not vllm_config.cache_config.enable_prefix_caching:
            logger.warning("SARIA: prefix caching is off in HBM; every reuse will come from DRAM or SSD.")

    def _guard(self, default: T, call: Callable[..., T], *args: Any) -> T:
        """The one place where any exception of ours is caught; the engine gets `default`.

        The scheduler half goes off: it offers and stores nothing more. The worker half stays on, for what was asked of
        it must end. Every fault is counted; the first of its kind (call, exception type) is logged with its traceback.
        """
        try:
            return call(*args)
        except Exception as error:
            name = getattr(call, "__qualname__", repr(call))
            kind = name, type(error).__name__
            if kind not in self._faults:
                self._faults.add(kind)
                logger.exception(
                    "SARIA: internal error in %s; what it concerns is recomputed. More of this kind are only counted",
                    name,
                )
            side = self._scheduler or self._worker
            assert side is not None
            side.turn_off()
            return default

    # What vLLM asks of the class.

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        SariaConfig.from_extra(extra_config)  # The earliest moment at which vLLM shows us the configuration.
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return SariaStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        return SariaPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        assert self._scheduler is not None
        self._guard(None, self._scheduler.new_request, request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._guard((0, False), self._scheduler.matched_tokens, request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        planned = self._guard(False, self._scheduler.allocated, request, blocks, num_external_tokens)
        if not planned and num_external_tokens:
            self._scheduler.refuse_load(request)  # Else the request would wait for ever.

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A load writes every byte of its blocks, in every group."""
        assert self._scheduler is not None
        return tuple(self._scheduler.sizing.groups)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        assert self._scheduler is not None
        return self._guard({}, self._scheduler.hit_sources, request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None
        self._guard(None, self._scheduler.plan_step, scheduler_output)
        return self._scheduler.take_metadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler is not None
        if connector_output.failed_recving:
            self._scheduler.loads_failed(connector_output.failed_recving)
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, SariaWorkerMetadata):
            for result in metadata.results:
                self._scheduler.release_blocks(result)
            self._guard(None, self._scheduler.measured, metadata)
            self._guard(None, self._scheduler.jobs_ended, metadata.results)
            self._guard(None, self._scheduler.ssd.opened, metadata.opened)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._guard(None, self._scheduler.request_finished, request, block_ids)
        return False, None

    def has_pending_block_frees(self) -> bool:
        assert self._scheduler is not None
        return self._scheduler.has_held_blocks()

    def has_pending_push_work(self) -> bool:
        assert self._scheduler is not None
        return self._scheduler.has_pending_work()

    def reset_cache(self) -> bool:
        assert self._scheduler is not None
        return self._guard(False, self._scheduler.reset_cache)

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        try:
            self._worker.register_kv_caches(kv_caches)
        except SariaError as error:
            logger.error("SARIA cannot start: %s", error)
            raise

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin loads: vLLM calls `start_load_kv` after the forward where all loads are asynchronous, and they would
        wait for that. Nothing to fence: blocks that a store reads are held by us, blocks that a load writes by vLLM."""
        assert isinstance(kv_connector_metadata, SariaMetadata)
        self._start(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._start(self._metadata())

    def _start(self, metadata: SariaMetadata) -> None:
        assert self._worker is not None
        if not self._guard(False, self._worker.start, metadata):
            self._worker.fail_rest(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request is scheduled only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Stores are planned by chunk, not by layer."""

    def wait_for_save(self) -> None:
        assert self._worker is not None
        if not self._guard(False, self._worker.store, self._metadata()):
            self._worker.fail_rest(self._metadata())

    def _metadata(self) -> SariaMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, SariaMetadata)
        return metadata

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        return self._guard(KVConnectorTransferResults(), self._worker.transfer_results)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker is not None
        return self._guard(None, self._worker.worker_metadata)

    # Both sides.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is not None:
            counts = self._scheduler.take_counts()
        else:
            assert self._worker is not None
            counts, self._worker.counts = self._worker.counts, {}
        return SariaStats(data=counts) if counts else None

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()
