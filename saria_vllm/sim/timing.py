"""What hits and misses cost in time: reloads over a shared ingress, prefills on GPUs that requests queue for."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from saria_vllm.sim.profiles import Hardware, Model
from saria_vllm.sim.simulator import SimRequest

DAY_S = 86_400.0
RATED_YEARS = 5.0
"""What a drive's rated writes per day are meant for."""


class Rates(msgspec.Struct, frozen=True):
    """What one engine's reloads run at, in bytes per second."""

    ingress: float
    dram: float
    ssd: float
    ssd_latency_s: float
    kv_bytes_token: int

    @classmethod
    def of(cls, hardware: Hardware, model: Model) -> Rates:
        """Each engine has its share of the node's DRAM and drives. A replicated KV goes to every GPU as a whole, so
        more GPUs bring no ingress."""
        gpus = min(hardware.gpus, model.deployment_gpus(hardware))
        share = gpus / hardware.gpus
        return cls(
            ingress=hardware.ingress_bytes_s * (1 if model.kv_replicated else gpus),
            dram=hardware.dram_read_bytes_s * share,
            ssd=hardware.drives * hardware.drive_read_bytes_s * share,
            ssd_latency_s=hardware.drive_latency_s,
            kv_bytes_token=model.kv_bytes_token,
        )

    def reload_s(self, dram_tokens: float, ssd_tokens: float, coordinated: bool = True) -> float:
        """Seconds of one reload that has the ingress to itself.

        Coordinated, both tiers run side by side: T = max(n_ssd / B_ssd, n_dram / B_dram, (n_ssd + n_dram) / B_ingress).
        Otherwise one tier after the other.
        """
        dram, ssd = dram_tokens * self.kv_bytes_token, ssd_tokens * self.kv_bytes_token
        latency = self.ssd_latency_s if ssd else 0.0
        if coordinated:
            return latency + max(ssd / self.ssd, dram / self.dram, (dram + ssd) / self.ingress)
        return latency + ssd / min(self.ssd, self.ingress) + dram / min(self.dram, self.ingress)


class TimingResult(msgspec.Struct, frozen=True):
    ttft_mean_s: float
    ttft_p99_s: float
    reload_mean_s: float
    reload_p95_s: float
    """Of requests with a hit; the wait for the ingress counts."""


def time_requests(
    served: Iterable[SimRequest], hardware: Hardware, model: Model, coordinated: bool = True
) -> TimingResult:
    """Times of served requests, in their order.

    The node runs as many engines as its GPUs allow. A request goes to the engine that is free first; its reload waits
    for that engine's ingress, its prefill for the reload and the GPUs. Answers are not modelled: decoding shares the
    GPUs with prefill in reality, so a loaded server is slower than this.
    """
    rates = Rates.of(hardware, model)
    engines = max(1, hardware.gpus // model.deployment_gpus(hardware))
    ingress_free, gpu_free = [0.0] * engines, [0.0] * engines
    ttft, reloads = [], []
    for request in served:
        engine = min(range(engines), key=lambda number: (gpu_free[number], number))
        cached, now = request.dram_tokens + request.ssd_tokens, request.time_s
        ready = now
        if cached:
            ready = max(now, ingress_free[engine]) + rates.reload_s(
                request.dram_tokens, request.ssd_tokens, coordinated
            )
            ingress_free[engine] = ready
            reloads.append(ready - now)
        new = max(1, request.prompt_tokens - cached)
        end = max(ready, gpu_free[engine]) + model.prefill_s(hardware, new, cached)
        gpu_free[engine] = end
        ttft.append(end - now)
    return TimingResult(
        ttft_mean_s=float(np.mean(ttft)) if ttft else 0.0,
        ttft_p99_s=float(np.percentile(ttft, 99)) if ttft else 0.0,
        reload_mean_s=float(np.mean(reloads)) if reloads else 0.0,
        reload_p95_s=float(np.percentile(reloads, 95)) if reloads else 0.0,
    )


def tb_per_day(written_bytes: float, seconds: float) -> float:
    """Terabytes (1e12 bytes) per day."""
    return written_bytes / 1e12 * DAY_S / seconds if seconds else 0.0


def drive_life_years(tb_day: float, rated_bytes: float, dwpd: float) -> float:
    """Years until drives of `rated_bytes` in all have written what they are rated for, `dwpd` a day for
    `RATED_YEARS`; infinite when nothing is written."""
    return rated_bytes / 1e12 * dwpd * RATED_YEARS / tb_day if tb_day else float("inf")
