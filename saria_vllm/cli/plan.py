"""Find out which DRAM, SSD, drives and admission to serve with: sizes swept over a trace, timed and priced.

Every combination is simulated with the policy that the connector runs, and with the write budget of its drives. Printed
are the frontier (no other combination costs as little, answers as fast and wears drives as slowly), a recommendation
with its rule, and the JSON to paste after `vllm serve --kv-transfer-config`. Without --trace the workload is built-in
agent sessions. Rates and prices are those of the hardware profile (saria_vllm/sim/profiles.py says where each is from);
drives are paid whole.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from typing import Any, get_args

import msgspec

from saria_vllm.cli.plan_report import cells, write_html
from saria_vllm.cli.simulate import (
    aligned,
    check_kv_bytes,
    check_ssd_ingress_ratio,
    parse_admission,
    parse_promotion,
    parse_seconds,
    require_matplotlib,
)
from saria_vllm.config import DWPD_RANGE, AdmissionConfig, AdmissionPolicy, EnduranceConfig, parse_bytes
from saria_vllm.errors import ConfigError
from saria_vllm.sim.arrivals import starts
from saria_vllm.sim.formats import Trace, read_trace
from saria_vllm.sim.planning import (
    Grid,
    Planner,
    Row,
    custom_model,
    default_dram_bytes,
    default_drives,
    default_ssd_bytes,
    frontier,
    kv_transfer_config,
    recommend,
    size_text,
)
from saria_vllm.sim.profiles import HARDWARE, MODELS, Hardware, Model, hardware, model
from saria_vllm.sim.simulator import SimConfig
from saria_vllm.sim.workload import SESSIONS_MAX, synthetic_sessions

BUILT_IN_SESSIONS = 48
PREFILL_TOKENS_S = 10_000.0
PREFILL_RANGE = (1.0, 1e9)
ADMISSIONS = ("saria", "full_duplicate", "default")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", metavar="FILE", help="WEKA, Mooncake, TraceLab or recorded by the connector "
        "(default: built-in sessions)")  # fmt: skip
    add("--skip-bad", action="store_true", help="count malformed lines and go on")
    add("--sessions", type=int, default=0, metavar="N",
        help=f"only the first N sessions: a smaller load, and quicker (built-in: default {BUILT_IN_SESSIONS})"
        )  # fmt: skip
    add("--starts", default="4h", help="sessions start within this time, as 4h, 90m, 30s (default 4h)")
    add("--start-seed", type=int, default=1, help="of session starts and of built-in sessions")
    add("--hardware", default="h200", help=f"one of {', '.join(HARDWARE)} (default %(default)s)")
    add("--model", help=f"one of {', '.join(MODELS)}")
    add("--kv-bytes-per-token", type=int, metavar="N",
        help="bytes of KV of one token, over all layers and ranks; in place of the model's, or without --model for any "
        "other")  # fmt: skip
    add("--prefill-tokens-s", type=float, default=PREFILL_TOKENS_S, metavar="R",
        help="of one GPU, where there is no --model (default %(default)g)")  # fmt: skip
    add("--dram", metavar="SIZES", help="as 256GiB,512GiB (default: 32 to 256 GiB for each GPU)")
    add("--ssd", metavar="SIZES", help="as none,2TiB,8TiB (default: none, a quarter of a drive, a drive, all drives)")
    add("--drives", metavar="COUNTS", help="as 1,2,4 (default: powers of two up to the node's)")
    add("--admission", action="append", default=[], metavar="P[:KEY=VALUE,...]",
        help=f"one of {', '.join(get_args(AdmissionPolicy))}, default; may be given several times "
        f"(default {', '.join(ADMISSIONS)})")  # fmt: skip
    add("--chunk-tokens", type=int, default=64)
    add("--promotion", default="auto", metavar="auto|R", help="share of a hit that belongs in DRAM afterwards, 0 to 1; "
        "auto: what the rates of ingress and drives say, less under pressure (default auto, as it serves)")  # fmt: skip
    add("--ssd-ingress-ratio", type=float, metavar="R", help="for --promotion auto: bandwidth of the drives over that "
        "of the ingress (default: of the hardware with as many drives)")  # fmt: skip
    add("--ssd-eviction", choices=["lru", "segment"], default="segment", help="segment is what serves (default)")
    add("--target-dwpd", type=float, default=EnduranceConfig().target_dwpd, metavar="R",
        help="allowed writes of the drives' capacity per day; 0: any number (default %(default)g)")  # fmt: skip
    add("--life-years", type=float, default=5.0, help="drives must live this long (default %(default)g)")
    add("--html", metavar="FILE", help="a report with plots, in one file")
    add("--json", action="store_true", help="one JSON object on standard output")


def run(arguments: argparse.Namespace) -> int:
    machine, served_model = _profiles(arguments)
    grid = _grid(arguments, machine, served_model)
    window_s = parse_seconds(arguments.starts)
    promotion = parse_promotion(arguments.promotion)
    check_ssd_ingress_ratio(arguments.ssd_ingress_ratio)
    if arguments.html is not None:
        require_matplotlib("--html")
    trace = _trace(arguments)
    start_s = starts(len(trace.sessions), window_s, arguments.start_seed)
    endurance = _endurance(arguments.target_dwpd)
    base = SimConfig(arguments.chunk_tokens, 0, 0, promotion=promotion, ssd_eviction=arguments.ssd_eviction)
    planner = Planner(
        trace, start_s, machine, served_model, base, lambda line: print(line, file=sys.stderr),
        arguments.ssd_ingress_ratio, endurance,
    )  # fmt: skip
    rows = planner.sweep(grid)
    chosen, rule = recommend(rows, arguments.life_years)
    config = kv_transfer_config(chosen, grid.admissions.get(chosen.admission, AdmissionConfig()), endurance)
    report = {
        "workload": _workload(arguments, trace),
        "hardware": machine.name,
        "model": served_model.name,
        "kv_bytes_token": served_model.kv_bytes_token,
        "notes": _notes(machine, served_model),
        "rows": [_plain(row) for row in rows],
        "frontier": [_plain(row) for row in frontier(rows, arguments.life_years)],
        "recommended": _plain(chosen),
        "rule": rule,
        "kv_transfer_config": config,
    }
    print(json.dumps(report) if arguments.json else _text(report))
    if arguments.html is not None:
        write_html(arguments.html, report)
    return 0


def _endurance(target_dwpd: float) -> EnduranceConfig | None:
    least, most = DWPD_RANGE
    if target_dwpd != 0 and not least <= target_dwpd <= most:
        raise ConfigError(f"--target-dwpd {target_dwpd:g}: expected 0 or a number from {least:g} to {most:g}")
    cap = max(target_dwpd, EnduranceConfig().hard_cap_dwpd)
    return EnduranceConfig(target_dwpd=target_dwpd, hard_cap_dwpd=cap) if target_dwpd else None


def _profiles(arguments: argparse.Namespace) -> tuple[Hardware, Model]:
    machine = hardware(arguments.hardware)
    kv = arguments.kv_bytes_per_token
    check_kv_bytes(kv)
    least, most = PREFILL_RANGE
    if not least <= arguments.prefill_tokens_s <= most:
        found = f"--prefill-tokens-s {arguments.prefill_tokens_s:g}"
        raise ConfigError(f"{found}: expected a number from {least:g} to {most:g}")
    if arguments.model:
        known = model(arguments.model)
        return machine, known if kv is None else msgspec.structs.replace(known, kv_bytes_token=kv)
    if kv is None:
        raise ConfigError(f"--model: missing; choose one of {', '.join(MODELS)}, or give --kv-bytes-per-token")
    return machine, custom_model(kv, arguments.prefill_tokens_s, machine)


def _grid(arguments: argparse.Namespace, machine: Hardware, served_model: Model) -> Grid:
    if arguments.chunk_tokens < 1:
        raise ConfigError(f"--chunk-tokens {arguments.chunk_tokens}: expected a number of at least 1")
    if not arguments.life_years >= 0:
        raise ConfigError(f"--life-years {arguments.life_years:g}: expected a number of at least 0")
    for key in ("sessions", "start_seed"):
        if getattr(arguments, key) < 0:
            raise ConfigError(f"--{key.replace('_', '-')} {getattr(arguments, key)}: expected a number of at least 0")
    dram = _sizes(arguments.dram, "--dram") if arguments.dram is not None else default_dram_bytes(machine)
    drives = _counts(arguments.drives) if arguments.drives is not None else default_drives(machine)
    most = max(drives) * machine.drive_bytes
    ssd = _sizes(arguments.ssd, "--ssd") if arguments.ssd is not None else [
        size for size in default_ssd_bytes(machine) if size <= most
    ]  # fmt: skip
    chunk_bytes = arguments.chunk_tokens * served_model.kv_bytes_token
    for key, sizes in (("--dram", dram), ("--ssd", [size for size in ssd if size])):
        if sizes and min(sizes) < chunk_bytes:
            raise ConfigError(f"{key} {size_text(min(sizes))}: expected at least a chunk of {chunk_bytes:,} bytes")
    if max(ssd) > most:
        raise ConfigError(f"--ssd {size_text(max(ssd))}: expected at most what the drives hold, {most / 1e12:g}TB")
    names = arguments.admission or ADMISSIONS
    ghosts_max = AdmissionConfig().ghosts_max
    return Grid(dram, ssd, drives, {name: parse_admission(name, ghosts_max) for name in names})


def _sizes(text: str, key: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    none = ("none", "0") if key == "--ssd" else ()
    return sorted({0 if word in none else parse_bytes(word, key) for word in words})


def _counts(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) <= 4 and 0 < int(word) <= 1024 for word in words):
        raise ConfigError(f"--drives {text}: expected numbers from 1 to 1024, such as 1,2,4")
    return sorted({int(word) for word in words})


def _trace(arguments: argparse.Namespace) -> Trace:
    if arguments.trace is None:
        if arguments.sessions > SESSIONS_MAX:
            raise ConfigError(f"--sessions {arguments.sessions}: expected at most {SESSIONS_MAX} built-in sessions")
        sessions = synthetic_sessions(random.Random(f"{arguments.start_seed} plan"))
        return Trace(list(itertools.islice(sessions, arguments.sessions or BUILT_IN_SESSIONS)), "built-in", False, 0)
    trace = read_trace(arguments.trace, skip_bad=arguments.skip_bad)
    if trace.skipped:
        print(f"skipped {trace.skipped} malformed lines", file=sys.stderr)
    return trace._replace(sessions=trace.sessions[: arguments.sessions or None])


def _workload(arguments: argparse.Namespace, trace: Trace) -> dict[str, Any]:
    requests = [request for session in trace.sessions for request in session.requests]
    return {
        "trace": "built-in" if arguments.trace is None else arguments.trace,
        "sessions": len(trace.sessions),
        "requests": len(requests),
        "prompt_tokens": sum(request.input_tokens for request in requests),
        "starts": "as recorded" if trace.absolute_times else f"within {arguments.starts}",
    }


def _notes(machine: Hardware, served_model: Model) -> list[str]:
    gpus = served_model.deployment_gpus(machine)
    if gpus > machine.gpus:
        nodes = gpus // machine.gpus
        notes = [f"one engine takes {nodes} nodes: sizes and prices are of one, and the connector serves one node only"]
    else:
        engines = machine.gpus // gpus
        notes = [f"sizes are for the node's {engines} engines of {gpus} GPUs together"]
    if served_model.checkpoint_bytes:
        notes.append("recurrent state is not counted, and the connector does not serve such models yet")
    return [*notes, "to plan with: the connector itself serves vLLM on CPUs only yet"]


def _plain(row: Row) -> dict[str, Any]:
    """JSON-ready, and with sizes for people; what is infinite is null."""
    plain = {key: None if value == float("inf") else value for key, value in msgspec.structs.asdict(row).items()}
    return {"dram": size_text(row.dram_bytes), "ssd": size_text(row.ssd_bytes), **plain}


def _text(report: dict[str, Any]) -> str:
    workload, chosen = report["workload"], report["recommended"]
    pasted = json.dumps(report["kv_transfer_config"], indent=2)
    return "\n".join(
        [
            "{sessions} sessions, {requests:,} requests, {prompt_tokens:,} prompt tokens ({trace}), "
            "starting {starts}".format(**workload),
            f"{report['model']} with {report['kv_bytes_token']:,} bytes of KV per token on {report['hardware']}; "
            + "; ".join(report["notes"]),
            "",
            f"Frontier, of {len(report['rows'])} combinations (* recommended):",
            aligned(cells(report["frontier"], chosen)),
            "",
            f"Recommended is {report['rule']}:",
            aligned(cells([chosen], chosen)),
            "",
            "vllm serve MODEL --enable-prompt-tokens-details --kv-transfer-config '" + pasted + "'",
        ]
    )
