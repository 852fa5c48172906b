"""Which DRAM, SSD and drives to give the tiers: every combination of sizes simulated, then timed and priced.

Every combination is simulated under the write budget that its drives have. The number of drives changes also how fast a
reload is, how long the drives live and what they cost; a budget that was ample stands for all larger ones, so most of
them need no simulation of their own. What is larger than the whole workload is simulated as large as that, and an SSD
that was never short of room stands for all larger ones.

The node is simulated as one cache: of several engines on it each has a share, as `dram_capacity` is shared out, and
this is right while sessions return to the engine that served them before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from saria_vllm.config import AdmissionConfig, EnduranceConfig
from saria_vllm.sim.arrivals import arrivals_with_ids
from saria_vllm.sim.formats import Trace
from saria_vllm.sim.profiles import MFU, Hardware, Model
from saria_vllm.sim.simulator import SEGMENTS, SimConfig, SimRequest, SimResult, Simulator
from saria_vllm.sim.timing import Rates, time_requests, wear

GIB, TIB = 1 << 30, 1 << 40

TTFT_SLACK = 0.05
"""A plan may have a mean TTFT this much above the best one's to be the cheaper choice."""


class Row(msgspec.Struct, frozen=True):
    """One combination. Life is infinite where nothing is written."""

    dram_bytes: int
    ssd_bytes: int
    drives: int
    admission: str
    hit_rate: float
    dram_hit_rate: float
    ssd_hit_rate: float
    ttft_mean_s: float
    ttft_p99_s: float
    reload_mean_s: float
    ssd_tb_per_day: float
    drive_life_years: float
    usd_month: float


class Grid(msgspec.Struct, frozen=True):
    """What is combined. An SSD size of 0 is no SSD, with no drives and no admission."""

    dram_bytes: Sequence[int]
    ssd_bytes: Sequence[int]
    drives: Sequence[int]
    admissions: dict[str, AdmissionConfig]


def default_dram_bytes(hardware: Hardware) -> list[int]:
    """Four sizes, from 32 to 256 GiB for each GPU."""
    return [hardware.gpus * gib * GIB for gib in (32, 64, 128, 256)]


def default_ssd_bytes(hardware: Hardware) -> list[int]:
    """No SSD, a quarter of a drive, a drive, and all drives, in whole halves of a TiB."""
    sizes = (hardware.drive_bytes / 4, hardware.drive_bytes, hardware.drive_bytes * hardware.drives)
    return [0, *(max(1, int(size / TIB * 2)) * TIB // 2 for size in sizes)]


def default_drives(hardware: Hardware) -> list[int]:
    """Powers of two up to what the node has."""
    return [1 << power for power in range(hardware.drives.bit_length())]


def custom_model(kv_bytes_token: int, prefill_tokens_s: float, hardware: Hardware) -> Model:
    """A model of which only the KV's size is known, on one GPU that prefills at this rate."""
    return Model(
        name="custom",
        kv_bytes_token=kv_bytes_token,
        checkpoint_bytes=0,
        kv_replicated=False,
        weight_bytes=0,
        weights="bf16",
        active_params=hardware.bf16_flops * MFU / 2 / prefill_tokens_s,
        attention_flops_pair=0,
        attended_tokens_max=0,
        index_flops_pair=0,
        source="as given: KV bytes per token, and prefill tokens/s of one GPU",
    )


def usd_month(hardware: Hardware, dram_bytes: int, drives: int) -> float:
    """What DRAM and whole drives cost per month."""
    return (
        hardware.dram_usd_gib_month * dram_bytes / GIB
        + hardware.ssd_usd_tb_month * drives * hardware.drive_bytes / 1e12
    )


def workload_tokens(trace: Trace) -> int:
    """Tokens of all different blocks of a trace: a tier that holds them never evicts."""
    spans = {(session.block_tokens, first, count) for session in trace.sessions for request in session.requests
             for first, count in request.runs}  # fmt: skip
    tokens, end = 0, (0, -1)
    for block_tokens, first, count in sorted(spans):
        begin = max(first, end[1]) if end[0] == block_tokens else first
        tokens += max(0, first + count - begin) * block_tokens
        end = block_tokens, max(begin, first + count)
    return tokens


class _Run(msgspec.Struct):
    """One simulation."""

    config: SimConfig
    result: SimResult
    served: list[SimRequest]
    strictest: float
    """Of the write budget: 0 when it was ample all the time."""

    def stands_for(self, config: SimConfig) -> bool:
        """Whether a simulation of `config` would give the same."""
        had, counts = self.config, self.result.counts
        roomy = not {"retired_chunks", "dropped_chunks:ssd_full"} & set(counts)
        if roomy and 0 < had.ssd_tokens < config.ssd_tokens:
            had = msgspec.structs.replace(had, ssd_tokens=config.ssd_tokens)
        ample = not self.strictest and "dropped_chunks:over_budget" not in counts
        if ample and had.write_budget_tokens_day < (config.write_budget_tokens_day or math.inf):
            had = msgspec.structs.replace(
                had,
                write_budget_tokens_day=config.write_budget_tokens_day,
                write_cap_tokens_day=config.write_cap_tokens_day,
            )
        return had == config

    @property
    def seconds(self) -> float:
        return self.served[-1].time_s - self.served[0].time_s if self.served else 0.0


class Planner:
    """Sweeps a grid over one workload.

    Args:
        start_s: when each session of the trace starts.
        base: the chunk size, promotion and SSD eviction of every simulation.
        tell: called with a line after each simulation.
        ssd_ingress_ratio: for promotion `auto`; none: that of the hardware with as many drives.
        endurance: as configured; none: writes are not bounded.
    """

    def __init__(
        self, trace: Trace, start_s: Sequence[float], hardware: Hardware, model: Model, base: SimConfig,
        tell: Callable[[str], None], ssd_ingress_ratio: float | None = None,
        endurance: EnduranceConfig | None = None,
    ) -> None:  # fmt: skip
        self._trace, self._start_s, self._base, self._tell = trace, start_s, base, tell
        self._hardware, self._model, self._ssd_ingress_ratio = hardware, model, ssd_ingress_ratio
        self._endurance = endurance
        # A segment more than fits, for the last one is never full, and a request's own chunks beside the workload's.
        self._tokens_max = math.ceil(workload_tokens(trace) * (1 + 2 / SEGMENTS)) + SEGMENTS * base.chunk_tokens
        self._done: list[_Run] = []

    def sweep(self, grid: Grid) -> list[Row]:
        """All combinations, but those of more SSD than the drives hold."""
        runs = [(dram, ssd, name) for dram in grid.dram_bytes for ssd in sorted(grid.ssd_bytes)
                for name in (grid.admissions if ssd else ["dram_only"])]  # fmt: skip
        rows: list[Row] = []
        for number, (dram, ssd, name) in enumerate(runs, 1):
            drives = [count for count in grid.drives if ssd <= count * self._hardware.drive_bytes] if ssd else [0]
            if not drives:
                continue
            admission = grid.admissions[name] if ssd else AdmissionConfig(policy="dram_only")
            for count in sorted(drives):
                run = self._run(dram, ssd, admission, count)
                rows.append(self._row(run, dram, ssd, count, name))
            size = f"DRAM {size_text(dram)}, SSD {size_text(ssd)}, {name}"
            self._tell(f"{number}/{len(runs)} {size}: hit rate {rows[-1].hit_rate:.1%}")
        return rows

    def _ratio(self, drives: int) -> float:
        """B_ssd / B_ingress; one number where promotion does not depend on it, so that drives share a simulation."""
        if self._base.promotion != "auto" or not drives:
            return self._base.ssd_ingress_ratio
        if self._ssd_ingress_ratio is not None:
            return self._ssd_ingress_ratio
        return Rates.of(msgspec.structs.replace(self._hardware, drives=drives), self._model).ssd_ingress_ratio

    def _run(self, dram_bytes: int, ssd_bytes: int, admission: AdmissionConfig, drives: int) -> _Run:
        kv = self._model.kv_bytes_token
        dram, ssd = (min(nbytes // kv, self._tokens_max) for nbytes in (dram_bytes, ssd_bytes))
        config = msgspec.structs.replace(
            self._base, dram_tokens=dram, ssd_tokens=ssd, admission=admission, ssd_ingress_ratio=self._ratio(drives)
        )
        if self._endurance is not None and ssd:
            rated = drives * self._hardware.drive_bytes / kv
            config = msgspec.structs.replace(
                config,
                write_budget_tokens_day=self._endurance.target_dwpd * rated,
                write_cap_tokens_day=self._endurance.hard_cap_dwpd * rated,
            )
        for run in self._done:
            if run.stands_for(config):
                return run
        simulator = Simulator(config)
        served = list(simulator.run(arrivals_with_ids(self._trace, self._start_s, config.chunk_tokens)))
        strictest = max((governor.strictest for governor in simulator.tiers.evictor.governors), default=0.0)
        run = _Run(config, simulator.result, served, strictest)
        self._done.append(run)
        return run

    def _row(self, run: _Run, dram: int, ssd: int, drives: int, admission: str) -> Row:
        machine = msgspec.structs.replace(self._hardware, drives=drives)
        times = time_requests(run.served, machine, self._model)
        rates = run.result.rates()
        tb_day, years = wear(rates["ssd_write_tokens"] * self._model.kv_bytes_token, run.seconds, machine)
        return Row(
            dram_bytes=dram,
            ssd_bytes=ssd,
            drives=drives,
            admission=admission,
            hit_rate=rates["hit_rate"],
            dram_hit_rate=rates["dram_hit_rate"],
            ssd_hit_rate=rates["ssd_hit_rate"],
            ttft_mean_s=times.ttft_mean_s,
            ttft_p99_s=times.ttft_p99_s,
            reload_mean_s=times.reload_mean_s,
            ssd_tb_per_day=tb_day,
            drive_life_years=years,
            usd_month=usd_month(machine, dram, drives),
        )


def frontier(rows: Iterable[Row], life_years: float) -> list[Row]:
    """Rows that no other beats, from the cheapest on: none costs as little, answers as fast and, up to `life_years`,
    lets drives live as long."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.usd_month, row.ttft_mean_s, row.ssd_tb_per_day, row.ssd_bytes)):
        life = min(row.drive_life_years, life_years)
        if not any(
            other.ttft_mean_s <= row.ttft_mean_s and min(other.drive_life_years, life_years) >= life for other in best
        ):
            best.append(row)
    return best


def recommend(rows: Sequence[Row], life_years: float) -> tuple[Row, str]:
    """The choice, and the rule that made it."""
    living = [row for row in rows if row.drive_life_years >= life_years]
    if not living:
        longest = max(rows, key=lambda row: (row.drive_life_years, -row.usd_month))
        return longest, f"no drives live {life_years:g} years: the longest life"
    best = min(row.ttft_mean_s for row in living)
    near = [row for row in living if row.ttft_mean_s <= best * (1 + TTFT_SLACK)]
    chosen = min(near, key=lambda row: (row.usd_month, row.ttft_mean_s, row.ssd_tb_per_day, row.ssd_bytes))
    return chosen, (
        f"the cheapest whose mean TTFT is within {TTFT_SLACK:.0%} of the best, of those whose drives live at least "
        f"{life_years:g} years"
    )


def size_text(nbytes: int) -> str:
    """A size as the configuration reads it, exact: 512 GiB -> "512GiB"; "none" for 0."""
    if not nbytes:
        return "none"
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("TB", 10**12), ("GB", 10**9), ("MiB", 1 << 20)):
        if nbytes >= unit and nbytes * 2 % unit == 0:
            return f"{nbytes // unit}{'.5' if nbytes % unit else ''}{name}"
    return f"{nbytes}B"


def kv_transfer_config(row: Row, admission: AdmissionConfig, endurance: EnduranceConfig | None) -> dict[str, Any]:
    """What `vllm serve --kv-transfer-config` takes, with placeholders for the drives' directories."""
    extra: dict[str, Any] = {"dram_capacity": size_text(row.dram_bytes)}
    if row.ssd_bytes:
        plain = msgspec.to_builtins(AdmissionConfig())
        changed = {key: value for key, value in msgspec.to_builtins(admission).items() if value != plain[key]}
        extra["ssd_paths"] = [f"/mnt/nvme{number}/saria" for number in range(row.drives)]
        extra["ssd_capacity"] = size_text(row.ssd_bytes)
        extra["admission"] = {"policy": admission.policy, **changed}
        if endurance != EnduranceConfig():
            extra["endurance"] = "off" if endurance is None else {
                "target_dwpd": endurance.target_dwpd, "hard_cap_dwpd": endurance.hard_cap_dwpd
            }  # fmt: skip
    return {
        "kv_connector": "SariaConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "saria_connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
