"""What hits and misses cost in time: reloads over a shared ingress, prefills on GPUs that requests queue for.

The node runs as many engines as its GPUs allow. A request goes to the engine with the least prefill ahead of it. An
engine reloads for one request at a time, in order of arrival, while its GPUs compute for others; prefills follow in the
order in which requests have all that they reuse. Engines that reload at the same time share the node's drives and DRAM
evenly.

Left out: decoding, which takes GPU time from prefill in reality, the copy's own latency, and SSD writes, which
compete with reads for a drive. Requests come when the trace says, however late the answer before was: times of a node
that cannot keep up grow without end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from saria_vllm.policy.endurance import DAY_S, drive_life_years
from saria_vllm.sim.profiles import Hardware, Model
from saria_vllm.sim.simulator import SimRequest


class Rates(msgspec.Struct, frozen=True):
    """What a node moves, in bytes of KV per second."""

    engines: int
    ingress: float
    """Of one engine."""
    dram: float
    """Of the node, for all engines that read at once; so is `ssd`."""
    ssd: float
    ssd_latency_s: float = 0.0

    @classmethod
    def of(cls, hardware: Hardware, model: Model) -> Rates:
        """A replicated KV goes to every GPU as a whole: more GPUs bring no ingress, and each reads DRAM for itself.
        From SSD it is read once for the node."""
        deployment = model.deployment_gpus(hardware)
        gpus = min(hardware.gpus, deployment)
        copies = gpus if model.kv_replicated else 1
        return cls(
            engines=max(1, hardware.gpus // deployment),
            ingress=hardware.ingress_bytes_s * gpus / copies,
            dram=hardware.dram_read_bytes_s / copies,
            ssd=hardware.drives * hardware.drive_read_bytes_s,
            ssd_latency_s=hardware.drive_latency_s,
        )

    @property
    def ssd_ingress_ratio(self) -> float:
        """B_ssd / B_ingress of an engine when all of the node's engines load at once."""
        return self.ssd / self.engines / self.ingress

    def shared(self, loads: Sequence[Load], coordinated: bool) -> list[tuple[float, float]]:
        """(SSD, DRAM) rate of loads that run at once, each on an engine of its own.

        Coordinated, DRAM copies take what the slow stream leaves of an engine's ingress, so that a load alone takes
        T = max(n_ssd / B_ssd, (n_ssd + n_dram) / B_ingress). Otherwise both streams push and an ingress that cannot
        take them gives each its share of what it asked for.
        """
        ssd = _fair(self.ssd, [self.ingress if load.ssd else 0.0 for load in loads])
        left = [self.ingress - (rate if coordinated else 0.0) for rate in ssd]
        dram = _fair(self.dram, [room if load.dram else 0.0 for load, room in zip(loads, left, strict=True)])
        squeeze = [min(1.0, self.ingress / (s + d)) if s + d else 1.0 for s, d in zip(ssd, dram, strict=True)]
        return [(s * by, d * by) for s, d, by in zip(ssd, dram, squeeze, strict=True)]


class Load(msgspec.Struct):
    """A reload that waits or runs: bytes left of each tier."""

    request: int
    dram: float
    ssd: float
    latency_s: float


class Reloads:
    """The reloads of all engines of a node, over time."""

    def __init__(self, rates: Rates, coordinated: bool) -> None:
        self._rates, self._coordinated = rates, coordinated
        self._queues: list[deque[Load]] = [deque() for _ in range(rates.engines)]
        self._now = 0.0

    def add(self, engine: int, load: Load) -> None:
        """Queue a load, at the time that `until` has reached."""
        self._queues[engine].append(load)

    def until(self, time_s: float) -> Iterator[tuple[float, int, int]]:
        """Go on to `time_s`. Yields (time, engine, request) of each load that ends, in order of time."""
        while running := [(engine, queue) for engine, queue in enumerate(self._queues) if queue]:
            loads = [queue[0] for _, queue in running]
            rates = self._rates.shared(loads, self._coordinated)
            step = min(
                left / rate
                for load, (ssd, dram) in zip(loads, rates, strict=True)
                for left, rate in ((load.ssd, ssd), (load.dram, dram))
                if left and rate
            )
            step = min(step, time_s - self._now)
            self._now += step
            for load, (ssd, dram) in zip(loads, rates, strict=True):
                load.ssd, load.dram = _less(load.ssd, ssd * step), _less(load.dram, dram * step)
            for engine, queue in running:
                if not (queue[0].ssd or queue[0].dram):
                    ended = queue.popleft()
                    yield self._now + ended.latency_s, engine, ended.request
            if self._now >= time_s:
                break
        self._now = max(self._now, time_s)


class TimingResult(msgspec.Struct, frozen=True):
    ttft_mean_s: float
    ttft_p99_s: float
    reload_mean_s: float
    reload_p95_s: float
    """Of requests with a hit; the wait for the ingress counts."""


def request_times(
    served: Iterable[SimRequest], hardware: Hardware, model: Model, coordinated: bool = True
) -> tuple[list[float], list[float]]:
    """Seconds to the first token, and seconds of the reload or 0, of served requests in their order."""
    rates = Rates.of(hardware, model)
    reloads = Reloads(rates, coordinated)
    arrived: list[float] = []
    prefill: list[float] = []
    ttft: list[float] = []
    reload: list[float] = []
    assigned, gpu_free = [0.0] * rates.engines, [0.0] * rates.engines

    def ready(at: float, engine: int, number: int) -> None:
        gpu_free[engine] = max(at, gpu_free[engine]) + prefill[number]
        reload[number] = at - arrived[number]
        ttft[number] = gpu_free[engine] - arrived[number]

    for number, request in enumerate(served):
        now = request.time_s
        for ended in reloads.until(now):
            ready(*ended)
        engine = min(range(rates.engines), key=assigned.__getitem__)
        cached = request.dram_tokens + request.ssd_tokens
        arrived.append(now)
        prefill.append(model.prefill_s(hardware, max(1, request.prompt_tokens - cached), cached))
        ttft.append(0.0)
        reload.append(0.0)
        assigned[engine] = max(now, assigned[engine]) + prefill[number]
        if cached:
            dram, ssd = request.dram_tokens * model.kv_bytes_token, request.ssd_tokens * model.kv_bytes_token
            reloads.add(engine, Load(number, dram, ssd, rates.ssd_latency_s if ssd else 0.0))
        else:
            ready(now, engine, number)
    for ended in reloads.until(float("inf")):
        ready(*ended)
    return ttft, reload


def time_requests(
    served: Iterable[SimRequest], hardware: Hardware, model: Model, coordinated: bool = True
) -> TimingResult:
    """Times of served requests, in their order; see the module's text."""
    ttft, reload = request_times(served, hardware, model, coordinated)
    reloads = [seconds for seconds in reload if seconds]
    return TimingResult(
        ttft_mean_s=float(np.mean(ttft)) if ttft else 0.0,
        ttft_p99_s=float(np.percentile(ttft, 99)) if ttft else 0.0,
        reload_mean_s=float(np.mean(reloads)) if reloads else 0.0,
        reload_p95_s=float(np.percentile(reloads, 95)) if reloads else 0.0,
    )


def wear(written_bytes: float, seconds: float, hardware: Hardware) -> tuple[float, float]:
    """(TB of 1e12 bytes per day, years until the node's drives have written what they are rated for) at the rate of a
    run; each is infinite where nothing bounds it."""
    bytes_day = 0.0
    if written_bytes:
        bytes_day = written_bytes * DAY_S / seconds if seconds else float("inf")
    rated_bytes_day = hardware.drives * hardware.drive_bytes * hardware.drive_dwpd
    return bytes_day / 1e12, drive_life_years(bytes_day, rated_bytes_day)


def _fair(total: float, wanted: Sequence[float]) -> list[float]:
    """`total` among those who want some: evenly, and what one leaves goes to the others."""
    given = [0.0] * len(wanted)
    waiting = sorted((number for number, want in enumerate(wanted) if want), key=wanted.__getitem__)
    for position, number in enumerate(waiting):
        given[number] = min(wanted[number], total / (len(waiting) - position))
        total -= given[number]
    return given


def _less(left: float, moved: float) -> float:
    """What is left, without the crumbs of rounding."""
    return left - moved if left - moved > 1 else 0.0
