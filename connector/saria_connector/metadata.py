"""What travels between the two halves once per step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from saria_vllm.types import JobResult, LoadJob, Moved, OpenedSsd, OpenSsd, PersistJob, Prefill, StoreJob


@dataclass
class SariaMetadata(KVConnectorMetadata):
    """Scheduler -> every worker."""

    generation: int = 0
    open_ssd: OpenSsd | None = None
    namespace: str = ""
    engine_index: int = 0
    loads: list[LoadJob] = field(default_factory=list)
    refused: list[LoadJob] = field(default_factory=list)
    """Loads to report as failed without touching a byte."""
    stores: list[StoreJob] = field(default_factory=list)
    promotions: list[StoreJob] = field(default_factory=list)
    persists: list[PersistJob] = field(default_factory=list)
    retired: list[tuple[int, int]] = field(default_factory=list)
    """(drive, segment) to unlink before anything is written."""
    prefill: Prefill | None = None
    """Of this step, if there is any."""
    started: bool = False
    """In a worker: whether all but stores and promotions was handed on."""


@dataclass
class SariaWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers -> scheduler: one entry per rank and job."""

    results: list[JobResult] = field(default_factory=list)
    opened: list[OpenedSsd] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    ingress_bytes_s: float = 0.0
    """At which DRAM reaches HBM on the slowest rank that knows; 0 while none does."""
    prefills: list[tuple[int, int, float]] = field(default_factory=list)
    """(tokens, attended, seconds) of steps."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, SariaWorkerMetadata)
        rates = [rate for rate in (self.ingress_bytes_s, other.ingress_bytes_s) if rate]
        return SariaWorkerMetadata(
            self.results + other.results,
            self.opened + other.opened,
            self.moved + other.moved,
            min(rates, default=0.0),
            self.prefills + other.prefills,
        )
