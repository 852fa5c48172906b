"""Reloads from DRAM and SSD together, in simulated time: the pacer that serves over given rates.

Agent sessions (built-in, or of --trace) are served by the simulator with promotion 0, 1 and auto; what requests then
find in each tier is reloaded, one request at a time, in four ways: two hops (SSD to DRAM, then all from DRAM to HBM),
one tier after the other, both at once unpaced, and both at once coordinated by the pacer. One drive reads a quarter of
the ingress. Copies that run unpaced take half of their rate from the drives (saria_vllm/engine/emulated.py says how).

Figures are ratios: to the ideal max(n_ssd / B_ssd, (n_ssd + n_dram) / B_ingress), where B_ingress is what reloads may
use; and gains, the part of another way's time that is saved, in the mean of the slowest fourth of requests. The gain
over two hops is that over two hops with the promotion that suits them best. The three
mechanisms are promotion (auto), overlap (both tiers at once) and coordination (the pacer). Bystanders need DRAM only
and run beside a mixed request; their slowdown is over their time alone on the ingress that it leaves. With several
--drives the worst of each figure comes first.

--wall D does it again in wall time, beside: requests of 256 MiB, a quarter, half and three quarters of them on SSD,
through the executor that serves, over rates that are emulated, since DRAM and SSD of most machines are too alike.
256 MiB are written under D, and every byte that comes back is looked at. Two hops are two loads there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from typing import Any

from saria_vllm.cli.reload_mix import ARMS, DRIVE_SHARE, INGRESS, PROMOTIONS, Row, compare, simulate
from saria_vllm.cli.reload_time import Machine
from saria_vllm.cli.reload_wall import check_directory, in_wall_time
from saria_vllm.cli.simulate import aligned, require_matplotlib
from saria_vllm.errors import ConfigError, StorageError
from saria_vllm.sim.formats import Trace, read_trace
from saria_vllm.sim.workload import SESSIONS_MAX, synthetic_sessions

DRIVES_MAX = 16
REQUESTS_MAX = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add = parser.add_argument
    add("--drives", default="1,2", metavar="N,N", help="how many drives, each a quarter of the ingress (default 1,2)")
    add("--trace", metavar="FILE", help="WEKA, Mooncake, TraceLab or recorded by the connector (default: built-in)")
    add("--sessions", type=int, default=60, metavar="N", help="the first N sessions (default %(default)s)")
    add("--requests", type=int, default=150, metavar="N", help="so many of their requests (default %(default)s)")
    add("--dram-share", type=float, default=0.035, metavar="R", help="what DRAM holds of all different tokens; by "
        "default (%(default)s) half of what the built-in sessions ask for again, without promotion")  # fmt: skip
    add("--wall", metavar="D", help="a directory on a drive: again in wall time, over emulated rates")
    add("--plot", metavar="PNG", help="a picture of the slowest quarter in each arm")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, print, and return the exit status."""
    counts, trace = _counts(arguments.drives), _trace(arguments)
    if arguments.plot is not None:
        require_matplotlib("--plot")
    if arguments.wall is not None:
        check_directory(arguments.wall)
    by_drives, rows = {}, []
    for drives in counts:
        machine = Machine(INGRESS, (INGRESS * DRIVE_SHARE,) * drives)
        mix = simulate(trace, arguments.dram_share, machine.ssd / machine.ingress, arguments.requests, _say)
        if not mix.reloads["auto"]:
            raise ConfigError("no request of these sessions hits: more --sessions are needed")
        by_drives[drives], found = compare(machine, mix, _say)
        rows += found
    report = {**_worst(list(by_drives.values())), "by_drives": by_drives, "rows": rows}
    if arguments.wall is not None:
        try:
            report["wall"] = [row for drives in counts for row in in_wall_time(arguments.wall, drives, _say)]
        except (StorageError, OSError) as error:
            print(f"saria bench reload: {error}", file=sys.stderr)
            return 1
    print(json.dumps(report) if arguments.json else _text(report))
    if arguments.plot is not None:
        _plot(rows, arguments.plot)
    return 0


def _counts(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) <= 2 and 0 < int(word) <= DRIVES_MAX for word in words):
        raise ConfigError(f"--drives {text}: expected numbers from 1 to {DRIVES_MAX}, such as 1,2")
    return sorted({int(word) for word in words})


def _trace(arguments: argparse.Namespace) -> Trace:
    for key, most in (("sessions", SESSIONS_MAX), ("requests", REQUESTS_MAX)):
        if not 1 <= getattr(arguments, key) <= most:
            raise ConfigError(f"--{key} {getattr(arguments, key)}: expected a number from 1 to {most}")
    if not 0 < arguments.dram_share <= 1:
        raise ConfigError(f"--dram-share {arguments.dram_share:g}: expected a number above 0, up to 1")
    if arguments.trace is None:
        sessions = synthetic_sessions(random.Random("bench reload"))
        return Trace(list(itertools.islice(sessions, arguments.sessions)), "built-in", False, 0)
    trace = read_trace(arguments.trace)
    return trace._replace(sessions=trace.sessions[: arguments.sessions])


def _worst(figures: list[Row]) -> Row:
    """Of gains the least, of all else the most, but for counts: their sum."""
    worst: Row = {}
    for key in figures[0]:
        values = [figure[key] for figure in figures]
        worst[key] = min(values) if "_gain_" in key else sum(values) if isinstance(values[0], int) else max(values)
    return worst


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _text(report: Row) -> str:
    drives = list(report["by_drives"])
    heads = ["", "worst", *(f"{count} drive{'s' if count > 1 else ''}" for count in drives)]
    figures = [heads]
    for key in report["by_drives"][drives[0]]:
        values = [report[key], *(report["by_drives"][count][key] for count in drives)]
        figures.append([key.replace("_", " "), *(_shown(key, value) for value in values)])
    arms = [["drives", "arm", "promotion", "mean s", "p95 s", "slowest quarter s", "of tokens in DRAM"]]
    for row in report["rows"]:
        seconds = [f"{row[key]:.4f}" for key in ("mean_s", "p95_s", "slowest_quartile_s")]
        arm = row["arm"].replace("_", " ")
        arms.append([str(row["drives"]), arm, row["promotion"], *seconds, f"{row['dram_token_share']:.0%}"])
    tables = [figures, arms]
    if "wall" in report:
        tables.append([["drives", "arm in wall time", "on SSD", "s", "over ideal"]])
        for row in report["wall"]:
            times = [f"{row['ssd_share']:.0%}", f"{row['seconds']:.3f}", f"{row['over_ideal']:.3f}"]
            tables[-1].append([str(row["drives"]), row["arm"].replace("_", " "), *times])
    return "\n\n".join(map(aligned, tables))


def _shown(key: str, value: Any) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.1%}" if "_gain_" in key else f"{value:.3f}"


def _plot(rows: list[Row], path: str) -> None:
    from matplotlib import pyplot

    counts = sorted({row["drives"] for row in rows})
    figure, axes = pyplot.subplots(1, len(counts), figsize=(5 * len(counts), 4), squeeze=False)
    for axis, drives in zip(axes[0], counts, strict=True):
        for place, promotion in enumerate(PROMOTIONS):
            found = [row for row in rows if (row["drives"], row["promotion"]) == (drives, promotion)]
            at = [ARMS.index(row["arm"]) + 0.27 * (place - 1) for row in found]
            axis.bar(at, [row["slowest_quartile_s"] for row in found], 0.25, label=f"promotion {promotion}")
        axis.set_xticks(range(len(ARMS)), [arm.replace("_", " ") for arm in ARMS], rotation=20)
        axis.set_title(f"SSD at {drives * DRIVE_SHARE:g} of ingress")
        axis.set_ylabel("slowest quarter, s")
    axes[0][0].legend()
    figure.tight_layout()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror}; expected a file to create") from None
    finally:
        pyplot.close(figure)
