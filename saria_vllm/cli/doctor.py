"""Check this machine, the SSD paths and a configuration: a line each with ok, warn or bad, and what to do.

Writes and reads a few hundred MB under each path, in files that are gone afterwards, and changes nothing else. A check
that cannot be made says why and is a warning. The exit status is 1 when something is bad; warnings leave it at 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator

from saria_vllm.cli import UsageError, printable
from saria_vllm.cli import doctor_checks as checks
from saria_vllm.cli import doctor_paths as paths
from saria_vllm.cli.doctor_checks import Check, Machine, guarded
from saria_vllm.config import PacingConfig, SariaConfig
from saria_vllm.engine.drive_rates import measure
from saria_vllm.engine.io_uring import UringEngine
from saria_vllm.engine.link_rate import measure_memory
from saria_vllm.engine.nixl import has_device
from saria_vllm.engine.staging import Staging
from saria_vllm.storage.smart import read_smart

RING_DEPTH = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--path", action="append", default=[], metavar="D", help="an SSD path; may be given several times")
    add("--config", metavar="JSON", help="kv_connector_extra_config, or the whole of --kv-transfer-config: checked as "
        "the connector would, and its ssd_paths as with --path")  # fmt: skip
    add("--json", action="store_true", help="one JSON object on standard output")


def run(arguments: argparse.Namespace) -> int:
    found: list[tuple[str, Check]] = []
    for where, check in _all(arguments):
        found.append((where, check))
        if not arguments.json:
            print(_line(where, check), flush=True)
    worst = max((check.status for _, check in found), key=("ok", "warn", "bad").index)
    if arguments.json:
        rows = [{"path": where or None, **check._asdict()} for where, check in found]
        print(json.dumps({"status": worst, "checks": rows}))
    return 1 if worst == "bad" else 0


def _all(arguments: argparse.Namespace) -> Iterator[tuple[str, Check]]:
    machine = Machine()
    config: SariaConfig | None = None
    if arguments.config is not None:
        check, config = checks.configuration(_extra(arguments.config))
        yield "", check
    wanted = dict.fromkeys(map(os.path.abspath, [*arguments.path, *(config.ssd_paths if config else ())]))
    pids: list[int] = []
    for path in wanted:
        share = config.ssd_capacity // len(config.ssd_paths) if config and path in config.ssd_paths else None
        yield from ((path, check) for check in _of_path(machine, path, share, pids))
    for check in _of_machine(machine, config, pids):
        yield "", check


def _of_path(machine: Machine, path: str, share: int | None, pids: list[int]) -> Iterator[Check]:
    def leases() -> Check:
        check, holders = paths.leases(machine, path)
        pids.extend(holders)
        return check

    affinity = os.sched_getaffinity(0)
    yield from _run(
        {
            "permissions": lambda: paths.permissions(path),
            "space": lambda: paths.space(path, share),
            "O_DIRECT": lambda: paths.direct(path),
            "NUMA": lambda: paths.numa(machine, path, affinity),
            "drive rates": lambda: paths.rates(path, measure),
            "SMART": lambda: paths.smart(path, read_smart),
            "endurance": lambda: paths.endurance(path, time.time()),
            "leases": leases,
        }
    )


def _of_machine(machine: Machine, config: SariaConfig | None, pids: list[int]) -> Iterator[Check]:
    affinity, engine = os.sched_getaffinity(0), config.ssd_engine if config else "auto"
    cpus = config.io_cpus if config else ()
    count, pid = os.cpu_count() or 1, pids[0] if pids else None
    dram = config.dram_capacity if config else None
    yield from _run(
        {
            "io_uring": lambda: checks.io_uring(machine, _open_ring, engine.startswith("io_uring")),
            "memlock": lambda: checks.memlock(_registers),
            "shared memory": lambda: checks.shared_memory(machine, dram),
            "hugepages": lambda: checks.hugepages(machine),
            "cpu limit": lambda: checks.cpu_limit(machine, affinity),
            "link": lambda: checks.link(measure_memory, config.pacing if config else PacingConfig()),
            "I/O cores": lambda: checks.io_cores(machine, cpus, pid, affinity, count),
            "GDS": lambda: checks.gds(machine, has_device, checks.ask_python),
            "nixl": lambda: checks.nixl(checks.ask_python, engine == "nixl"),
            "kvikio": lambda: checks.kvikio(checks.ask_python, engine == "kvikio"),
            "vllm": lambda: checks.vllm(checks.ask_python),
        }
    )


def _run(named: dict[str, Callable[[], Check]]) -> Iterator[Check]:
    for name, check in named.items():
        print(f"checking {name}", file=sys.stderr)
        yield guarded(name, check)


def _open_ring() -> None:
    UringEngine(RING_DEPTH).close()


def _registers(nbytes: int) -> bool:
    """Whether io_uring takes so much memory, of the kind that its reads land in."""
    try:
        engine = UringEngine(RING_DEPTH)
    except OSError:
        return False
    try:
        return Staging(engine, nbytes // RING_DEPTH).registered
    finally:
        engine.close()


def _extra(text: str) -> object:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f'--config: {error}; expected a JSON object, such as \'{{"dram_capacity": "64GiB"}}\''
        ) from None
    if isinstance(raw, dict) and ("kv_connector" in raw or "kv_connector_extra_config" in raw):
        return raw.get("kv_connector_extra_config", {})
    return raw


def _line(where: str, check: Check) -> str:
    text = f"{check.status:4}  {where + ' ' if where else ''}{check.name}: {check.found}"
    return printable(text.replace("\n", "\\n")) + (f"\n      -> {check.advice}" if check.advice else "")
