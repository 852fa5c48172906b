"""Check everything that SARIA keeps under DIR, one of `ssd_paths`: directories, small files, segments, every payload.

A directory that an engine uses is only read. `--drop-bad` drops what no engine would use, where no engine is: single
records by an entry in their journal, whole files where no reader would accept them; nothing else is touched. What does
not say `dropped` stays: modes, owners, foreign files and other format versions are yours to decide on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from typing import Any

import msgspec

from saria_vllm.cli import not_an_ssd_path
from saria_vllm.config import format_bytes
from saria_vllm.errors import StorageError
from saria_vllm.storage.checking import DirectoryCheck, Finding, Totals

FINDINGS_MAX = 10_000
"""Listed one by one; all are counted."""

REPORT_S = (0.5, 10.0)
"""Between two lines of progress, on a terminal and elsewhere."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", metavar="DIR", help="one of ssd_paths")
    add("--drop-bad", action="store_true", help="drop what no engine would use, where no engine is")
    add("--json", action="store_true", help="one JSON object on standard output")


def run(arguments: argparse.Namespace) -> int:
    path = os.path.abspath(arguments.directory)
    progress = _Progress()
    check = DirectoryCheck(path, arguments.drop_bad, lambda: progress.show(check.totals))
    listed: list[Finding] = []
    counts: Counter[str] = Counter()
    dropped = 0
    try:
        for finding in check.run():
            counts[finding.kind] += 1
            dropped += finding.dropped
            if len(listed) < FINDINGS_MAX:
                listed.append(finding)
                if not arguments.json:
                    print(_line(finding), flush=True)
    except (OSError, StorageError) as error:
        raise not_an_ssd_path(path, error) from None
    report = {
        "path": path,
        **msgspec.to_builtins(check.totals),
        "seconds": round(progress.seconds, 3),
        "found": sum(counts.values()),
        "dropped": dropped,
        "kinds": dict(sorted(counts.items())),
        "findings": [finding._asdict() for finding in listed],
    }
    print(json.dumps(report) if arguments.json else _summary(report))
    return 1 if counts else 0


class _Progress:
    """What was read and how fast, now and then, on standard error."""

    def __init__(self) -> None:
        self._began = self._shown = time.monotonic()
        self._every_s = REPORT_S[not sys.stderr.isatty()]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def show(self, totals: Totals) -> None:
        now = time.monotonic()
        if now - self._shown >= self._every_s:
            self._shown = now
            print(f"{totals.segments} segments, {_rate(totals.bytes_read, self.seconds)}", file=sys.stderr)


def _rate(nbytes: int, seconds: float) -> str:
    return f"{format_bytes(nbytes)} of payload read, {nbytes / 1e6 / max(seconds, 1e-9):,.0f} MB/s"


def _line(finding: Finding) -> str:
    where = finding.path + ("" if finding.record is None else f" record {finding.record}")
    # Names are others' to choose: nothing in them may steer a terminal.
    return f"{finding.kind}: {ascii(where)[1:-1]}: {finding.what}" + ("; dropped" if finding.dropped else "")


def _summary(report: dict[str, Any]) -> str:
    used = f", {report['in_use']} in use" if report["in_use"] else ""
    lines = [
        f"{report['namespaces']} namespace(s), {report['engines']} engine(s){used}, {report['segments']} segments, "
        f"{report['records']:,} good records; {_rate(report['bytes_read'], report['seconds'])}"
    ]
    if report["useless_segments"]:
        lines.append(f"{report['useless_segments']} segment(s) hold nothing of use: the next engine removes them")
    if report["found"] > FINDINGS_MAX:
        lines.append(f"only the first {FINDINGS_MAX} were listed")
    kinds = ", ".join(f"{count} {kind}" for kind, count in report["kinds"].items())
    lines.append(f"found {report['found']}: {kinds}; dropped {report['dropped']}" if kinds else "nothing is wrong")
    return "\n".join(lines)
