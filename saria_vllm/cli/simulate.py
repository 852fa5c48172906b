"""Replay a trace through the policy code that the connector runs: hits, SSD writes and, with a hardware profile, time.

Sizes are tokens. Without --admission the shipped default runs; with several, each gets a row and an offline oracle is
added: what somebody who knew the future would reach.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from saria_vllm.config import (
    DWPD_RANGE,
    AdmissionConfig,
    AdmissionPolicy,
    EnduranceConfig,
    PromotionMode,
    SariaConfig,
    parse_bytes,
)
from saria_vllm.errors import ConfigError
from saria_vllm.policy.endurance import DAY_S, drive_life_years
from saria_vllm.sim.arrivals import COPIES_MAX, arrivals, repeated, starts, with_ids
from saria_vllm.sim.formats import Trace, read_trace
from saria_vllm.sim.hinting import HintMode, ThreadHints
from saria_vllm.sim.oracle import Oracle
from saria_vllm.sim.profiles import HARDWARE, MODELS, hardware, model
from saria_vllm.sim.simulator import SSD_INGRESS_RATIO, Arrival, SimConfig, SimRequest, SimResult, Simulator
from saria_vllm.sim.timing import Rates, time_requests, wear

GHOSTS_UNBOUNDED = 1 << 40
KV_BYTES_MAX = 1 << 30
STARTS_MAX_S = 36_500 * DAY_S

TIER_CHUNKS_MAX = 1 << 25
"""Of a simulated tier: some gigabytes of our own memory."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", required=True, help="trace file: WEKA, Mooncake, TraceLab or recorded by the connector"
    )
    parser.add_argument("--skip-bad", action="store_true", help="count malformed lines and go on")
    parser.add_argument("--sessions", type=int, default=0, help="only the first N sessions")
    parser.add_argument("--starts", default="4h", help="sessions start within this time, as 4h, 90m, 30s (default 4h)")
    parser.add_argument("--start-seed", type=int, default=1)
    parser.add_argument("--repeat-days", type=int, default=1, metavar="N",
        help="the trace again every 24 h as other sessions, without an oracle; ghosts are bounded as they are served"
        )  # fmt: skip
    parser.add_argument("--load-step", action="append", default=[], metavar="DAY:FACTOR",
        help="from that day on (the first is 0) so many copies of the sessions, as 3:3; may be given several times"
        )  # fmt: skip
    parser.add_argument("--chunk-tokens", type=int, default=64)
    parser.add_argument("--dram-tokens", type=int, required=True)
    parser.add_argument("--ssd-tokens", type=int, default=0)
    parser.add_argument(
        "--admission",
        action="append",
        default=[],
        metavar="P[:KEY=VALUE,...]",
        help=f"one of {', '.join(get_args(AdmissionPolicy))}, oracle; may be given several times",
    )
    parser.add_argument("--hints", choices=get_args(HintMode), default="none",
        help="what clients say of their requests: session names the thread of the trace, stop says which is the last "
        "of its thread (default none)")  # fmt: skip
    parser.add_argument("--promotion", default="1.0", metavar="auto|R",
        help="share of a hit that belongs in DRAM afterwards, 0 to 1; auto: what the rates say, less under pressure "
        "(default 1.0)")  # fmt: skip
    parser.add_argument("--ssd-ingress-ratio", type=float, metavar="R",
        help="for --promotion auto: bandwidth of the drives over that of the ingress (default: of --hardware and "
        f"--model, else {SSD_INGRESS_RATIO})")  # fmt: skip
    parser.add_argument("--ssd-eviction", choices=["lru", "segment"], default="lru", help="segment is what serves")
    parser.add_argument("--hardware", help=f"one of {', '.join(HARDWARE)}")
    parser.add_argument("--model", help=f"one of {', '.join(MODELS)}")
    parser.add_argument("--kv-bytes-per-token", type=int, metavar="N",
        help="over all layers and ranks, in place of the model's")  # fmt: skip
    parser.add_argument("--rated-capacity", metavar="SIZE",
        help="of all drives together, as 3.84TB: SSD writes are held to a budget; needs --model or "
        "--kv-bytes-per-token")  # fmt: skip
    parser.add_argument("--target-dwpd", type=float, default=EnduranceConfig().target_dwpd,
        help="budget in writes of the rated capacity per day (default %(default)g)")  # fmt: skip
    parser.add_argument("--hard-cap-dwpd", type=float, default=EnduranceConfig().hard_cap_dwpd,
        help="what no 24 hours exceed (default %(default)g)")  # fmt: skip
    parser.add_argument("--coordination", choices=["on", "off"], default="on",
        help="of DRAM and SSD streams on the ingress (default on)")  # fmt: skip
    parser.add_argument("--plot", metavar="PNG", help="a picture of hit rates and writes")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    trace = read_trace(arguments.trace, skip_bad=arguments.skip_bad)
    if arguments.sessions:
        trace = trace._replace(sessions=trace.sessions[: arguments.sessions])
    if trace.skipped:
        print(f"skipped {trace.skipped} malformed lines", file=sys.stderr)
    names, days = arguments.admission or ["default"], _copies_by_day(arguments)
    rows = [
        _row(arguments, trace, name)
        for name in (*names, *(["oracle"] if len(names) > 1 and "oracle" not in names and len(days) == 1 else []))
    ]
    if arguments.json:
        print(msgspec.json.encode(rows[0] if len(rows) == 1 else {"rows": rows}).decode())
    else:
        print(_table(rows))
    if arguments.plot is not None:
        _plot(rows, arguments.plot)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    least = {"chunk_tokens": 1, "dram_tokens": 1, "ssd_tokens": 0, "sessions": 0, "start_seed": 0, "repeat_days": 1}
    for key, low in least.items():
        if getattr(arguments, key) < low:
            raise ConfigError(
                f"--{key.replace('_', '-')} {getattr(arguments, key)}: expected a number of at least {low}"
            )
    if arguments.dram_tokens < arguments.chunk_tokens:
        raise ConfigError(
            f"--dram-tokens {arguments.dram_tokens}: expected at least a chunk of {arguments.chunk_tokens}"
        )
    if 0 < arguments.ssd_tokens < arguments.chunk_tokens:
        raise ConfigError(
            f"--ssd-tokens {arguments.ssd_tokens}: expected 0 or at least a chunk of {arguments.chunk_tokens}"
        )
    most = TIER_CHUNKS_MAX * arguments.chunk_tokens
    for key in ("dram_tokens", "ssd_tokens"):
        if getattr(arguments, key) > most:
            found = f"--{key.replace('_', '-')} {getattr(arguments, key)}"
            raise ConfigError(f"{found}: expected at most {TIER_CHUNKS_MAX:,} chunks, {most}")
    parse_promotion(arguments.promotion)
    check_ssd_ingress_ratio(arguments.ssd_ingress_ratio)
    _check_profiles(arguments)
    if arguments.plot is not None:
        require_matplotlib("--plot")
    parse_seconds(arguments.starts)
    _copies_by_day(arguments)
    for name in arguments.admission:
        if name != "oracle":
            parse_admission(name, also=", oracle")


def _check_profiles(arguments: argparse.Namespace) -> None:
    kv = arguments.kv_bytes_per_token
    check_kv_bytes(kv)
    if arguments.hardware is None and arguments.model is not None and arguments.rated_capacity is None:
        raise ConfigError("--hardware and --model: expected both or neither")
    if arguments.hardware is not None and arguments.model is None:
        raise ConfigError("--hardware and --model: expected both or neither")
    if arguments.hardware is not None:
        hardware(arguments.hardware)
    if arguments.model is not None:
        model(arguments.model)
    if arguments.rated_capacity is None:
        return
    if arguments.model is None and kv is None:
        raise ConfigError(f"--rated-capacity: needs --model, one of {', '.join(MODELS)}, or --kv-bytes-per-token")
    parse_bytes(arguments.rated_capacity, "--rated-capacity")
    target, cap = arguments.target_dwpd, arguments.hard_cap_dwpd
    least, most = DWPD_RANGE
    if not least <= target <= cap <= most:
        found = f"--target-dwpd {target:g} and --hard-cap-dwpd {cap:g}"
        raise ConfigError(f"{found}: expected numbers from {least:g} to {most:g}, the cap at least the target")


def _copies_by_day(arguments: argparse.Namespace) -> list[int]:
    if arguments.repeat_days > COPIES_MAX:
        raise _too_many_copies(arguments.repeat_days)
    copies = [1] * arguments.repeat_days
    steps: dict[int, int] = {}
    for text in arguments.load_step:
        match = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", text)
        if match is None or not int(match[1]) < len(copies) or not int(match[2]):
            raise ConfigError(
                f"--load-step {text}: expected DAY:FACTOR, such as 3:3, with a day from 0 to {len(copies) - 1} and a "
                "factor of at least 1"
            )
        steps[int(match[1])] = int(match[2])
    for day, factor in sorted(steps.items()):
        copies[day:] = [factor] * (len(copies) - day)
    if sum(copies) > COPIES_MAX:
        raise _too_many_copies(sum(copies))
    return copies


def _too_many_copies(copies: int) -> ConfigError:
    return ConfigError(f"--repeat-days and --load-step: {copies} copies; expected at most {COPIES_MAX}")


def _kv_bytes_token(arguments: argparse.Namespace) -> int:
    return arguments.kv_bytes_per_token or model(arguments.model).kv_bytes_token


def parse_seconds(text: str) -> float:
    """Seconds of a time such as "4h"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if match is None:
        raise ConfigError(f"--starts {text}: expected a number with a unit ({', '.join(_UNITS)}), such as 4h")
    seconds = float(match[1]) * _UNITS[match[2]]
    if seconds > STARTS_MAX_S:
        raise ConfigError(f"--starts {text}: expected at most {STARTS_MAX_S / DAY_S:g}d")
    return seconds


def parse_promotion(text: str) -> PromotionMode:
    """The mode of "auto" or of a share."""
    if text == "auto":
        return "auto"
    share = _number(text)
    if isinstance(share, str) or not 0 <= share <= 1:
        raise ConfigError(f"--promotion {text}: expected auto or a share from 0 to 1")
    return float(share)


def parse_admission(text: str, ghosts_max: int = GHOSTS_UNBOUNDED, also: str = "") -> AdmissionConfig:
    """The configuration of "NAME" or "NAME:KEY=VALUE,...", with this bound of ghosts unless it says another. `also`:
    more choices that the caller takes.

    Raises:
        ConfigError: an unknown policy or key, or a value that the connector would not take either.
    """
    policy, _, rest = text.partition(":")
    if policy != "default" and policy not in get_args(AdmissionPolicy):
        choices = ", ".join((*get_args(AdmissionPolicy), "default"))
        raise ConfigError(f"--admission {policy}: unknown policy; choose one of {choices}{also}")
    settings: dict[str, Any] = {} if policy == "default" else {"policy": policy}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        if key == "policy":
            raise ConfigError(f"--admission {text}: the policy stands before the colon; expected its settings after it")
        settings[key] = _number(value)
    try:
        config = SariaConfig.from_extra({"dram_capacity": "1GiB", "admission": settings}).admission
    except ConfigError as error:
        raise ConfigError(f"--admission {text}: {error}") from None
    return config if "ghosts_max" in settings else msgspec.structs.replace(config, ghosts_max=ghosts_max)


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _row(arguments: argparse.Namespace, trace: Trace, name: str) -> dict[str, Any]:
    copies, seed = _copies_by_day(arguments), arguments.start_seed

    def start_s(copy: int) -> list[float]:
        return starts(len(trace.sessions), parse_seconds(arguments.starts), [seed, copy] if copy else seed)

    def stream() -> Iterator[Arrival]:
        merged = arrivals(trace, start_s(0)) if copies == [1] else repeated(trace, copies, start_s)
        return with_ids(trace, merged, arguments.chunk_tokens)

    ghosts_max = GHOSTS_UNBOUNDED if copies == [1] else AdmissionConfig().ghosts_max
    admission = parse_admission("saria" if name == "oracle" else name, ghosts_max)
    config = SimConfig(
        arguments.chunk_tokens, arguments.dram_tokens, arguments.ssd_tokens, admission,
        parse_promotion(arguments.promotion), arguments.ssd_eviction, _ssd_ingress_ratio(arguments),
    )  # fmt: skip
    if arguments.rated_capacity is not None:
        rated_tokens = parse_bytes(arguments.rated_capacity, "--rated-capacity") / _kv_bytes_token(arguments)
        config = msgspec.structs.replace(
            config,
            write_budget_tokens_day=arguments.target_dwpd * rated_tokens,
            write_cap_tokens_day=arguments.hard_cap_dwpd * rated_tokens,
        )
    oracle = Oracle(stream()) if name == "oracle" else None
    simulator = Simulator(config, oracle, ThreadHints(trace, arguments.hints))
    total = sum(copies) * sum(len(session.requests) for session in trace.sessions)
    served = list(_progress(simulator.run(stream()), total, name))
    row: dict[str, Any] = {
        "admission": admission.policy if name == "default" else name,
        "hints": arguments.hints,
        "skipped_lines": trace.skipped,
        **simulator.result.rates(),
    }
    if arguments.hardware is not None:
        row.update(_time(arguments, served, row["ssd_write_tokens"]))
    if arguments.rated_capacity is not None:
        row.update(_wear(arguments, served, simulator.result))
    return row


def check_kv_bytes(nbytes: int | None) -> None:
    if nbytes is not None and not 1 <= nbytes <= KV_BYTES_MAX:
        found = f"--kv-bytes-per-token {nbytes}"
        raise ConfigError(f"{found}: expected a number of at least 1 and at most {KV_BYTES_MAX}")


def check_ssd_ingress_ratio(ratio: float | None) -> None:
    if ratio is not None and not ratio > 0:
        raise ConfigError(f"--ssd-ingress-ratio {ratio:g}: expected a number above 0")


def _ssd_ingress_ratio(arguments: argparse.Namespace) -> float:
    if arguments.ssd_ingress_ratio is not None:
        return float(arguments.ssd_ingress_ratio)
    if arguments.hardware is not None:
        return Rates.of(hardware(arguments.hardware), model(arguments.model)).ssd_ingress_ratio
    return SSD_INGRESS_RATIO


def _wear(arguments: argparse.Namespace, served: list[SimRequest], result: SimResult) -> dict[str, Any]:
    """Bytes by day beside their budget, and the life of drives of the given capacity at the mean of the run."""
    kv, rated = _kv_bytes_token(arguments), parse_bytes(arguments.rated_capacity, "--rated-capacity")
    seconds = served[-1].time_s - served[0].time_s if served else 0.0
    written = result.ssd_write_tokens * kv
    years = drive_life_years(written * DAY_S / seconds, rated) if written and seconds else None
    return {
        "kv_bytes_token": kv,
        "ssd_bytes_by_day": [tokens * kv for tokens in result.ssd_write_tokens_by_day],
        "ssd_bytes_24h_max": result.ssd_write_tokens_24h_max * kv,
        "write_budget_bytes_per_day": arguments.target_dwpd * rated,
        "write_cap_bytes_per_24h": arguments.hard_cap_dwpd * rated,
        "drive_life_years": years,
    }


def _time(arguments: argparse.Namespace, served: list[SimRequest], written_tokens: int) -> dict[str, Any]:
    machine = hardware(arguments.hardware)
    served_model = msgspec.structs.replace(model(arguments.model), kv_bytes_token=_kv_bytes_token(arguments))
    times = msgspec.structs.asdict(time_requests(served, machine, served_model, arguments.coordination == "on"))
    seconds = served[-1].time_s - served[0].time_s if served else 0.0
    tb_day, years = wear(written_tokens * served_model.kv_bytes_token, seconds, machine)
    return {
        **times,
        "kv_bytes_token": served_model.kv_bytes_token,
        "ssd_tb_per_day": tb_day if tb_day != float("inf") else None,
        "drive_life_years": years if years != float("inf") else None,
    }


def _progress(served: Iterator[SimRequest], total: int, name: str) -> Iterator[SimRequest]:
    """Pass on, and tell on standard error how far it is when that takes long."""
    said = time.monotonic()
    for number, request in enumerate(served):
        if time.monotonic() - said > 2:
            said = time.monotonic()
            print(f"{name}: {100 * number // total} % of {total} requests", file=sys.stderr)
        yield request


_COLUMNS = {
    "admission": ("admission", "{}"),
    "hit_rate": ("hit", "{:.1%}"),
    "dram_hit_rate": ("DRAM", "{:.1%}"),
    "ssd_hit_rate": ("SSD", "{:.1%}"),
    "ssd_write_tokens": ("written tokens", "{:,.0f}"),
    "ssd_writes_never_read_fraction": ("never read", "{:.1%}"),
    "dram_only_request_fraction": ("DRAM-only hits", "{:.1%}"),
    "ttft_mean_s": ("TTFT mean s", "{:.2f}"),
    "ttft_p99_s": ("p99 s", "{:.2f}"),
    "reload_mean_s": ("reload mean s", "{:.3f}"),
    "ssd_tb_per_day": ("TB/day", "{:.1f}"),
    "drive_life_years": ("drive life years", "{:.1f}"),
}


def _table(rows: list[dict[str, Any]]) -> str:
    columns = [key for key in _COLUMNS if key in rows[0]]
    cells = [[_COLUMNS[key][0] for key in columns]]
    cells += [["-" if row[key] is None else _COLUMNS[key][1].format(row[key]) for key in columns] for row in rows]
    return aligned(cells)


def aligned(cells: list[list[str]]) -> str:
    """A table: the first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def require_matplotlib(option: str) -> None:
    """Raises ConfigError, before any work, when nothing can be drawn."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(f"{option} needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")


def _plot(rows: list[dict[str, Any]], path: str) -> None:
    from matplotlib import pyplot

    figure, (hits, writes) = pyplot.subplots(1, 2, figsize=(10, 4))
    names = [row["admission"] for row in rows]
    dram = [100 * row["dram_hit_rate"] for row in rows]
    hits.bar(names, dram, label="DRAM")
    hits.bar(names, [100 * row["ssd_hit_rate"] for row in rows], bottom=dram, label="SSD")
    hits.set_ylabel("hit tokens, % of prompt tokens")
    hits.legend()
    writes.bar(names, [row["ssd_write_tokens"] / 1e6 for row in rows])
    writes.set_ylabel("written to SSD, million tokens")
    for axis in (hits, writes):
        axis.tick_params(axis="x", rotation=30)
    figure.tight_layout()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror}; expected a file to create") from None
    finally:
        pyplot.close(figure)
