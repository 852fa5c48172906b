"""What `saria bench reload` reloads, and what each way to do it makes of that."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from saria_vllm.cli.reload_time import Machine, Node, Reload, leftover_s, slowest_quarter
from saria_vllm.config import PromotionMode
from saria_vllm.sim.arrivals import arrivals_with_ids, starts
from saria_vllm.sim.formats import Trace
from saria_vllm.sim.planning import workload_tokens
from saria_vllm.sim.simulator import SimConfig, SimRequest, Simulator

PROMOTIONS: dict[str, PromotionMode] = {"zero": 0.0, "full": 1.0, "auto": "auto"}
ARMS = ("two_hops", "one_after_the_other", "overlapped", "coordinated")

INGRESS = 25e9
"""Bytes per second that reloads of one rank may use. Only the size of pieces depends on it."""

DRIVE_SHARE = 0.25
"""Of the ingress, that one drive reads."""

KV_BYTES_TOKEN = 40 << 10
"""On one rank."""

CHUNK_TOKENS = 64
STARTS_S = 4 * 3600.0

HALF_BYTES = 2 << 30
"""Of each tier, in the reload that is half and half."""

Row = dict[str, Any]


class Mix(NamedTuple):
    """One sample of requests by promotion: the same requests in each, with what each then finds in both tiers."""

    reloads: dict[str, list[Reload]]
    tokens: dict[str, tuple[int, int]]
    """Hit in DRAM and on SSD by all requests."""


def simulate(
    trace: Trace, dram_share: float, ssd_ingress_ratio: float, sample: int, tell: Callable[[str], None]
) -> Mix:
    """Serve the sessions under each promotion with so much DRAM, and take every n-th request."""
    served: dict[str, list[SimRequest]] = {}
    start_s, tokens = starts(len(trace.sessions), STARTS_S, 1), workload_tokens(trace)
    for name, promotion in PROMOTIONS.items():
        tell(f"sessions with promotion {name}")
        config = SimConfig(
            CHUNK_TOKENS,
            max(CHUNK_TOKENS, int(tokens * dram_share)),
            max(CHUNK_TOKENS, tokens * 2),
            promotion=promotion,
            ssd_eviction="segment",
            ssd_ingress_ratio=ssd_ingress_ratio,
        )
        served[name] = list(Simulator(config).run(arrivals_with_ids(trace, start_s, CHUNK_TOKENS)))
    hits = [
        number
        for number, requests in enumerate(zip(*served.values(), strict=True))
        if all(request.dram_tokens + request.ssd_tokens for request in requests)
    ]
    chosen = hits[:: max(1, len(hits) // sample)][:sample]
    return Mix(
        {name: [_reload(requests[number]) for number in chosen] for name, requests in served.items()},
        {name: (sum(r.dram_tokens for r in requests), sum(r.ssd_tokens for r in requests))
         for name, requests in served.items()},
    )  # fmt: skip


def _reload(request: SimRequest) -> Reload:
    return Reload(request.dram_tokens * KV_BYTES_TOKEN, request.ssd_tokens * KV_BYTES_TOKEN)


def compare(machine: Machine, mix: Mix, tell: Callable[[str], None]) -> tuple[Row, list[Row]]:
    """The figures of one machine, and a row for each arm."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for promotion, reloads in mix.reloads.items():
        for arm in ARMS:
            tell(f"{len(machine.drives)} drives, promotion {promotion}: {arm.replace('_', ' ')}")
            seconds[arm, promotion] = alone(machine, arm, reloads)
    mixed = [
        found / machine.ideal_s(reload)
        for name, reloads in mix.reloads.items()
        for found, reload in zip(seconds["coordinated", name], reloads, strict=True)
        if reload.dram_bytes and reload.ssd_bytes
    ]
    bystanders, beside = _bystanders(machine, mix.reloads["auto"])
    slow = {key: slowest_quarter(found) for key, found in seconds.items()}
    none = slow["one_after_the_other", "zero"]
    half = Reload(HALF_BYTES, HALF_BYTES)
    together = _warm(machine, "coordinated").run([half])[0]
    figures = {
        "coordinated_over_ideal_median": statistics.median(mixed),
        "coordinated_over_ideal_p95": _p95(mixed),
        "slowest_quartile_gain_over_two_hop": 1
        - slow["coordinated", "auto"] / min(slow["two_hops", name] for name in PROMOTIONS),
        "slowest_quartile_gain_all_three": 1 - slow["coordinated", "auto"] / none,
        "slowest_quartile_gain_promotion_alone": 1 - slow["one_after_the_other", "auto"] / none,
        "slowest_quartile_gain_overlap_alone": 1 - slow["overlapped", "zero"] / none,
        "slowest_quartile_gain_coordination_alone": 1 - slow["coordinated", "zero"] / slow["overlapped", "zero"],
        "half_and_half_gain_overlap_paced": 1 - together / machine.serial_s(half),
        "half_and_half_gain_overlap_unpaced": 1 - _warm(machine, "overlapped").run([half])[0] / machine.serial_s(half),
        "half_and_half_gain_ideal": 1 - machine.ideal_s(half) / machine.serial_s(half),
        "bystander_slowdown_p95": _p95(bystanders),
        "beside_bystander_over_ideal_p95": _p95(beside),
        "mixed_requests": len(mixed),
        "bystanders": len(bystanders),
    }
    rows = [
        {
            "drives": len(machine.drives),
            "arm": arm,
            "promotion": promotion,
            "mean_s": statistics.fmean(found),
            "p95_s": _p95(found),
            "slowest_quartile_s": slow[arm, promotion],
            "dram_token_share": mix.tokens[promotion][0] / max(1, sum(mix.tokens[promotion])),
        }
        for (arm, promotion), found in seconds.items()
    ]
    return figures, rows


def alone(machine: Machine, arm: str, reloads: Sequence[Reload]) -> list[float]:
    """Seconds of each reload, one after the other."""
    if arm == "two_hops":
        return [machine.two_hops_s(reload) for reload in reloads]
    if arm == "one_after_the_other":
        return [machine.serial_s(reload) for reload in reloads]
    node = _warm(machine, arm)
    return [node.run([reload])[0] for reload in reloads]


def _warm(machine: Machine, arm: str) -> Node:
    """A node that has read from its drives before."""
    node = Node(machine, "priority" if arm == "coordinated" else "off")
    node.run([Reload(HALF_BYTES, HALF_BYTES)])
    return node


def _bystanders(machine: Machine, reloads: Sequence[Reload]) -> tuple[list[float], list[float]]:
    """Each mixed reload beside one that needs DRAM only and comes with it: that one's time over its time alone on the
    leftover ingress, and the mixed one's over its ideal. The other is the next request's, as if all of it were in
    DRAM."""
    node, found, beside = _warm(machine, "coordinated"), [], []
    for mixed, other in zip(reloads, [*reloads[1:], reloads[0]], strict=True):
        nbytes = other.dram_bytes + other.ssd_bytes
        if mixed.dram_bytes and mixed.ssd_bytes:
            took, bystander = node.run([mixed, Reload(nbytes, 0)])
            found.append(bystander / leftover_s(machine, mixed, nbytes))
            beside.append(took / machine.ideal_s(mixed))
    return found, beside


def _p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
