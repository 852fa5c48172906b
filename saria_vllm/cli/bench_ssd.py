"""Read and write rates of the drive under a directory, through the SSD engines that serve, and what they cost in CPU.

Each round makes three passes (sequential reads, random reads, sequential writes) with each engine, and with fio where
asked, in turn: what the drive does meanwhile meets all of them. All use O_DIRECT, one queue, and one file, which has
no name and is gone when the command ends, however it ends. Figures are medians over the rounds; a ratio to fio is the
median of the rounds' own ratios. Rates are in MB/s (10^6 bytes). CPU time, in ms per GB, is that of the whole process
with its threads, and of fio what it says of its job, without its start. Engines use memory of the kind that reads land
in: huge pages, registered where the engine can. (What is written in service lies in the DRAM pool.) The command writes
at full speed: some GB per round.

Exit status: 0 fine, 1 the drive failed, 2 bad usage, or an engine that does not work here.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import msgspec

from saria_vllm.cli import UsageError
from saria_vllm.config import SsdEngineName, format_bytes, parse_bytes
from saria_vllm.engine.drive_rates import KINDS, Bench, Kind, Moved, ScratchFile, scratch_file
from saria_vllm.errors import ConfigError, StorageError

FIO = "fio"
FIO_WAIT_S = 60.0
"""How much longer than its pass fio may take."""

_FIO_RW: dict[Kind, str] = {"read": "read", "random_read": "randread", "write": "write"}
_ALIGNMENT = 4096
_BLOCK_BYTES_MAX = 1 << 30
_MEMORY_BYTES_MAX = 4 << 30
_DEPTH_MAX = 4096

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add = parser.add_argument
    add("--path", required=True, metavar="D", help="a directory on the drive; nothing in it is touched")
    add("--engine", action="append", choices=get_args(SsdEngineName), metavar="E", help="one of "
        f"{', '.join(get_args(SsdEngineName))}; may be repeated (default: auto)")  # fmt: skip
    add("--block-size", default="1MiB", metavar="SIZE", help="bytes of a transfer, as a record (default %(default)s)")
    add("--queue-depth", type=int, default=16, metavar="N", help="transfers in flight (default %(default)s)")
    add("--rounds", type=int, default=7, metavar="N", help="(default %(default)s)")
    add("--seconds", type=float, default=1.0, metavar="S", help="of each pass (default %(default)s)")
    add("--file-size", default="1GiB", metavar="SIZE", help="of the test file (default %(default)s)")
    add("--compare-fio", action="store_true", help="measure fio, with the same queue depth, in the same rounds")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    plan = _Plan.of(arguments)
    try:
        with _standard_output_kept():
            rows = _measure(plan)
    except StorageError as error:
        print(f"saria bench ssd: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(rows[0] if len(rows) == 1 else {"rows": rows}))
    else:
        _print_table(rows)
    return 0


class _Plan(msgspec.Struct, frozen=True):
    path: str
    engines: tuple[SsdEngineName, ...]
    block_bytes: int
    depth: int
    rounds: int
    seconds: float
    file_bytes: int
    fio: str
    """Path of fio, empty when it is not asked for."""

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> _Plan:
        """What the command line asks for.

        Raises:
            UsageError: something that cannot be.
        """
        try:
            block_bytes = parse_bytes(arguments.block_size, "--block-size")
            file_bytes = parse_bytes(arguments.file_size, "--file-size")
        except ConfigError as error:
            raise UsageError(str(error)) from None
        if block_bytes % _ALIGNMENT or block_bytes > _BLOCK_BYTES_MAX:
            raise UsageError(f"--block-size {arguments.block_size}: accepted: multiples of 4KiB up to 1GiB")
        depth, rounds, seconds = arguments.queue_depth, arguments.rounds, arguments.seconds
        if not 1 <= depth <= _DEPTH_MAX or depth * block_bytes > _MEMORY_BYTES_MAX:
            raise UsageError(
                f"--queue-depth {depth}: accepted: 1 to {_DEPTH_MAX}, and at most 4GiB of blocks in flight"
            )
        if not 1 <= rounds <= 1000:
            raise UsageError(f"--rounds {rounds}: accepted: 1 to 1000")
        if not 0.01 <= seconds <= 600:
            raise UsageError(f"--seconds {seconds:g}: accepted: 0.01 to 600")
        fio = (shutil.which(FIO) or "") if arguments.compare_fio else ""
        if arguments.compare_fio and not fio:
            raise UsageError("--compare-fio: fio is not installed (on Debian or Ubuntu: sudo apt install fio)")
        path = os.path.abspath(arguments.path)
        if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
            raise UsageError(f"--path {arguments.path}: accepted: a directory that this user can write in")
        engines = tuple(dict.fromkeys(arguments.engine or ["auto"]))
        blocks = max(file_bytes // block_bytes, 2 * depth)
        return cls(path, engines, block_bytes, depth, rounds, seconds, blocks * block_bytes, fio)


@contextmanager
def _standard_output_kept() -> Iterator[None]:
    """What libraries print meanwhile, as NIXL does, goes to standard error: standard output is for our result."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _measure(plan: _Plan) -> list[Row]:
    """One row per engine.

    Raises:
        StorageError: no room, or the drive fails.
        ConfigError: an engine does not work here.
    """
    with ExitStack() as stack:
        file = stack.enter_context(scratch_file(plan.path, plan.file_bytes))
        benches = [stack.enter_context(Bench(name, file, plan.block_bytes, plan.depth)) for name in plan.engines]
        _say(f"writing {format_bytes(plan.file_bytes)} into {plan.path}")
        benches[0].fill()
        found: list[dict[Kind, list[Moved]]] = [{kind: [] for kind in KINDS} for _ in range(len(benches) + 1)]
        contenders = len(benches) + bool(plan.fio)
        for turn in range(plan.rounds):
            for kind in KINDS:
                for step in range(contenders):
                    who = (turn + step) % contenders
                    one = benches[who].run(kind, plan.seconds) if who < len(benches) else _run_fio(plan, file, kind)
                    found[who][kind].append(one)
                    name = benches[who].name if who < len(benches) else FIO
                    _say(f"round {turn + 1} of {plan.rounds}: {name} {kind.replace('_', ' ')} {one.mb_s:.0f} MB/s")
        fio = found[-1] if plan.fio else None
        return [_row(plan, bench, moved, fio) for bench, moved in zip(benches, found, strict=False)]


def _run_fio(plan: _Plan, file: ScratchFile, kind: Kind) -> Moved:
    """One pass with fio over the same file.

    Raises:
        StorageError: it fails.
    """
    command = [
        plan.fio, "--name=saria", f"--filename=/proc/{os.getpid()}/fd/{file.fd}", f"--rw={_FIO_RW[kind]}",
        f"--bs={plan.block_bytes}", f"--size={file.nbytes}", f"--iodepth={plan.depth}", "--direct=1", "--overwrite=1",
        "--ioengine=io_uring", "--time_based", f"--runtime={round(plan.seconds * 1000)}ms", "--output-format=json",
    ]  # fmt: skip
    try:
        ended = subprocess.run(command, capture_output=True, timeout=plan.seconds + FIO_WAIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StorageError(f"fio: {error}") from error
    try:
        job = json.loads(ended.stdout)["jobs"][0]
        done = job["write" if kind == "write" else "read"]
        seconds = done["io_bytes"] / done["bw_bytes"]
        moved = Moved(done["io_bytes"], seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3)
    except (ValueError, TypeError, LookupError, ZeroDivisionError):
        moved = None
    if ended.returncode or moved is None:
        words = ended.stderr.decode(errors="replace").strip().splitlines()
        raise StorageError(f"fio failed: {words[-1] if words else f'exit status {ended.returncode}'}")
    return moved


def _row(plan: _Plan, bench: Bench, moved: dict[Kind, list[Moved]], fio: dict[Kind, list[Moved]] | None) -> Row:
    row: Row = {
        "engine": bench.name,
        "why": bench.why,
        "block_bytes": plan.block_bytes,
        "queue_depth": plan.depth,
        "rounds": plan.rounds,
        "file_bytes": plan.file_bytes,
        "memory_registered": bench.registered,
        **_figures(moved),
    }
    if fio is not None:
        for kind in KINDS:
            ratios = [ours.mb_s / theirs.mb_s for ours, theirs in zip(moved[kind], fio[kind], strict=True)]
            row[f"{kind}_ratio_to_fio"] = round(statistics.median(ratios), 3)
            row["spread"][f"{kind}_ratio_to_fio"] = [round(min(ratios), 3), round(max(ratios), 3)]
        row["fio"] = _figures(fio)
    return row


def _figures(moved: dict[Kind, list[Moved]]) -> Row:
    """Medians, and the least and the most of each under `spread`."""
    samples = {f"{kind}_mb_s": [one.mb_s for one in moved[kind]] for kind in KINDS}
    samples["cpu_ms_per_gb"] = [_sum(passes).cpu_ms_per_gb for passes in zip(*moved.values(), strict=True)]
    samples |= {f"{kind}_cpu_ms_per_gb": [one.cpu_ms_per_gb for one in moved[kind]] for kind in KINDS}
    row: Row = {name: round(statistics.median(values), 1) for name, values in samples.items()}
    return row | {"spread": {name: [round(min(values), 1), round(max(values), 1)] for name, values in samples.items()}}


def _sum(passes: tuple[Moved, ...]) -> Moved:
    return Moved(*(sum(values) for values in zip(*passes, strict=True)))


def _print_table(rows: list[Row]) -> None:
    """A line per engine, and one for fio."""
    heads = (
        "",
        "read MB/s",
        "random",
        "write",
        "CPU ms/GB: read",
        "random",
        "write",
        "over fio: read",
        "random",
        "write",
    )
    lines = [list(heads)]
    fio = rows[0].get("fio")
    for name, row in [(row["engine"], row) for row in rows] + ([(FIO, fio)] if fio else []):
        cells = [f"{row[f'{kind}_mb_s']:.0f}" for kind in KINDS]
        cells += [f"{row[f'{kind}_cpu_ms_per_gb']:.1f}" for kind in KINDS]
        cells += [f"{row[key]:.2f}" if (key := f"{kind}_ratio_to_fio") in row else "-" for kind in KINDS]
        lines.append([name, *cells])
    if not fio:
        lines = [line[:-3] for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    block_bytes, depth, rounds = (rows[0][key] for key in ("block_bytes", "queue_depth", "rounds"))
    print(f"blocks of {format_bytes(block_bytes)}, {depth} in flight, medians of {rounds} rounds")
    for line in lines:
        print("  ".join(cell.rjust(width) if number else cell.ljust(width)
                        for number, (cell, width) in enumerate(zip(line, widths, strict=True))))  # fmt: skip
    for row in rows:
        print(row["why"])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
