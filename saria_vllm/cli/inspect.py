"""Show what SARIA keeps under DIR, one of `ssd_paths`, and drop namespaces that are no longer wanted.

A namespace holds the KV of one configuration. It counts as used when an engine claimed it, wrote to it or read from it;
reads are known from the access times of its files, which file systems keep to within a day (relatime) or not at all
(noatime). How often a chunk was hit is not kept on disk. A namespace that an engine uses is never dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import msgspec

from saria_vllm.cli import UsageError, not_an_ssd_path, printable
from saria_vllm.cli.simulate import aligned
from saria_vllm.config import EnduranceConfig, format_bytes
from saria_vllm.errors import StorageError
from saria_vllm.policy.endurance import DAY_S, EnduranceState, drive_life_years
from saria_vllm.storage.reclaim import remove_namespace
from saria_vllm.storage.survey import EngineView, NamespaceView, namespaces_in, view_namespace
from saria_vllm.storage.wear import device_bytes, engines_with_state, read_state

AGES = {"1d": DAY_S, "7d": 7 * DAY_S, "30d": 30 * DAY_S}
"""Of the hit history."""

_SHOWN = ("model", "revision", "dtype", "kv_dtype", "tensor_parallel", "vllm", "format", "label")
"""Of what a fingerprint was made of, for people; --json has all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", metavar="DIR", help="one of ssd_paths")
    add("--drop", action="append", default=[], metavar="NAMESPACE",
        help="remove this namespace: its name, or the beginning of it; may be given several times")  # fmt: skip
    add("--drop-older-than", metavar="AGE", help="remove namespaces that were last used longer ago, as 30d, 12h")
    add("--json", action="store_true", help="one JSON object on standard output")


def run(arguments: argparse.Namespace) -> int:
    path, now = os.path.abspath(arguments.directory), time.time()
    age_s = parse_age(arguments.drop_older_than) if arguments.drop_older_than is not None else None
    try:
        names = namespaces_in(path)
    except (OSError, StorageError) as error:
        raise not_an_ssd_path(path, error) from None
    chosen = {_choose(text, names) for text in arguments.drop}
    views, reads_known = _views(path, names)
    if age_s is not None:
        chosen |= {view.name for view in views if now - view.last_used > age_s}
    dropped, kept = _drop(path, [view for view in views if view.name in chosen])
    unread = chosen - {view.name for view in views}
    kept += [{"name": name, "why": "it cannot be read, or went"} for name in sorted(unread)]
    views = [view for view in views if view.name not in dropped]
    disk = os.statvfs(path)
    report = {
        "path": path,
        "total_bytes": disk.f_blocks * disk.f_frsize,
        "free_bytes": disk.f_bavail * disk.f_frsize,
        "reads_known": reads_known,
        "namespaces": [_namespace(view, now) for view in views],
        "wear": wear(path, now),
        "dropped": sorted(dropped),
        "not_dropped": kept,
    }
    print(json.dumps(report) if arguments.json else printable(_text(report)))
    return 1 if kept else 0


def parse_age(text: str) -> float:
    """Seconds of an age such as "30d".

    Raises:
        UsageError: it is none.
    """
    number, unit = text[:-1], {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}.get(text[-1:])
    if unit is None or not number.isdecimal() or not number.isascii() or len(number) > 9:
        raise UsageError(f"--drop-older-than {text}: expected a whole number with a unit (s, m, h, d), such as 30d")
    return int(number) * unit


def _choose(text: str, names: list[str]) -> str:
    found = [name for name in names if text and name.startswith(text)]
    if len(found) != 1:
        problem = "begins several names" if found else "is not there"
        raise UsageError(
            f"--drop {text}: {problem}; accepted: {', '.join(found or names) or 'nothing: there are none'}"
        )
    return found[0]


def _views(path: str, names: list[str]) -> tuple[list[NamespaceView], bool]:
    reads_known = not os.statvfs(path).f_flag & os.ST_NOATIME
    views = []
    for number, name in enumerate(names, 1):
        print(f"reading namespace {number} of {len(names)}", file=sys.stderr)
        try:
            views.append(view_namespace(path, name, reads_known))
        except (OSError, StorageError) as error:
            print(f"left out {name}: {error}", file=sys.stderr)
    return views, reads_known


def _drop(path: str, views: list[NamespaceView]) -> tuple[set[str], list[dict[str, str]]]:
    """Remove namespaces; those removed, and why others were not."""
    dropped, kept = set(), []
    for view in views:
        if view.in_use:
            kept.append({"name": view.name, "why": "an engine uses it"})
        elif remove_namespace(path, view.name):
            dropped.add(view.name)
        else:
            why = "an engine began to use it, or something in it is not ours or cannot be removed"
            kept.append({"name": view.name, "why": why})
    return dropped, kept


def _namespace(view: NamespaceView, now: float) -> dict[str, Any]:
    return {
        "name": view.name,
        "parts": view.parts,
        "bytes": view.nbytes,
        "in_use": view.in_use,
        "last_used_s": view.last_used or None,
        "engines": [_engine(engine, now) for engine in view.engines],
    }


def _engine(view: EngineView, now: float) -> dict[str, Any]:
    reads = [segment for segment in view.segments if segment.read]
    history, newer = {}, 0.0
    for name, age_s in AGES.items():
        history[name] = sum(use.nbytes for use in reads if newer <= max(0.0, now - use.read) < age_s)
        newer = age_s
    history["older"] = sum(use.nbytes for use in reads if now - use.read >= newer)
    return {
        "index": view.index,
        "in_use": view.in_use,
        "pids": view.pids,
        "generation": view.generation,
        "process_only": view.process_only,
        "ranks": view.ranks,
        "segments": len(view.segments),
        "open_segments": view.open_segments,
        "unreadable_segments": view.unreadable,
        "chunks": view.chunks,
        "bytes": view.nbytes,
        "claimed_s": view.claimed or None,
        "written_s": max((use.modified for use in view.segments), default=None),
        "read_s": max((use.read for use in reads), default=None),
        "segment_bytes_by_last_read": history if len(reads) == len(view.segments) else None,
    }


def wear(path: str, now: float) -> list[dict[str, Any]]:
    """What the engines' own accounts say of an SSD path, and how long it lasts at the rate of the last day."""
    try:
        rated = device_bytes([path])[0]
        indexes = engines_with_state(path)
    except StorageError:
        return []
    found = []
    for index in indexes:
        row: dict[str, Any] = {"engine": index}
        try:
            state = msgspec.json.decode(read_state(path, index) or b"", type=EnduranceState)
        except (StorageError, msgspec.DecodeError) as error:
            found.append({**row, "problem": str(error)})
            continue
        day = sum(nbytes for begun, nbytes in state.bins if now - begun < DAY_S)
        life = drive_life_years(day, rated) if day else None
        found.append(
            {
                **row,
                "saved_s": state.saved_s,
                "written_bytes": state.written_bytes,
                "last_day_bytes": day,
                "kept_budget_bytes": state.kept_bytes,
                "default_budget_bytes_day": EnduranceConfig().target_dwpd * rated,
                "drive_bytes": rated,
                "drive_life_years": life,
            }
        )
    return found


def ago(seconds: float) -> str:
    """A duration for people: 90 -> "1.5 min"."""
    for unit, size in (("days", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _text(report: dict[str, Any]) -> str:
    now, total = time.time(), sum(view["bytes"] for view in report["namespaces"])
    lines = [
        f"{report['path']}: {len(report['namespaces'])} namespace(s), {format_bytes(total)} on disk; "
        f"{format_bytes(report['free_bytes'])} free of {format_bytes(report['total_bytes'])}"
    ]
    for view in report["namespaces"]:
        lines += ["", *_namespace_text(view, now)]
    if report["wear"]:
        lines += ["", *(_wear_text(row) for row in report["wear"])]
    if not report["reads_known"]:
        lines += ["", "Reads are not known: this file system keeps no access times (noatime)."]
    lines += [f"dropped {name}" for name in report["dropped"]]
    lines += [f"not dropped {row['name']}: {row['why']}" for row in report["not_dropped"]]
    return "\n".join(lines)


def _namespace_text(view: dict[str, Any], now: float) -> list[str]:
    parts, used = view["parts"], view["last_used_s"]
    of = "what it is of is not known: namespace.json is missing or damaged"
    if parts is not None:
        of = ", ".join(f"{key} {parts[key]}" for key in _SHOWN if parts.get(key) not in (None, ""))
    when = "in use" if view["in_use"] else f"last used {ago(now - used)} ago" if used else "never used"
    lines = [f"{view['name']}  {format_bytes(view['bytes'])}, {when}", f"  {ascii(of)[1:-1]}"]
    table = [["engine", "used by", "generation", "ranks", "segments", "chunks", "size", "claimed", "written", "read"]]
    for engine in view["engines"]:
        pids = ", ".join(f"pid {pid}" for pid in engine["pids"]) or "an engine"
        times = [
            f"{ago(now - engine[key])} ago" if engine[key] else "-" for key in ("claimed_s", "written_s", "read_s")
        ]
        segments = str(engine["segments"]) + (f" ({engine['open_segments']} open)" if engine["open_segments"] else "")
        table.append(
            [
                f"  e{engine['index']}", pids if engine["in_use"] else "-", str(engine["generation"] or "?"),
                str(engine["ranks"]), segments, f"{engine['chunks']:,}", format_bytes(engine["bytes"]), *times,
            ]
        )  # fmt: skip
    table[0][0] = "  engine"
    lines += aligned(table).split("\n") if view["engines"] else ["  no engine"]
    for engine in view["engines"]:
        if engine["segment_bytes_by_last_read"] and engine["segments"]:
            shares = (f"{name} {format_bytes(size)}" for name, size in engine["segment_bytes_by_last_read"].items())
            lines.append(f"  e{engine['index']} last read within {', '.join(shares)}")
        if engine["unreadable_segments"]:
            lines.append(f"  e{engine['index']}: {engine['unreadable_segments']} unreadable segment(s): see saria fsck")
    return lines


def _wear_text(row: dict[str, Any]) -> str:
    if "problem" in row:
        return f"wear e{row['engine']}: {row['problem']}"
    life = row["drive_life_years"]
    return (
        f"wear e{row['engine']}: {format_bytes(row['written_bytes'])} written in all, "
        f"{format_bytes(row['last_day_bytes'])} in the last 24 h; unused budget kept: "
        f"{format_bytes(int(row['kept_budget_bytes']))}; the default budget is "
        f"{format_bytes(int(row['default_budget_bytes_day']))} a day"
        + (f"; at this rate the drive lasts {life:,.1f} years" if life is not None else "")
    )
