"""Traces of several forms read into the same sessions, the form told from the content and not from the name.

  compact     one JSON object per session per line (`trace.py`)
  weka        kv-cache-tester: one JSON object per session with every request's `hash_ids`; a file, a file with one
              object per line, or a directory of trace_*.json
  mooncake    one request per line, global ids of 512-token blocks, real times in ms
  tracelab    rounds of `prefix` and `append` tokens, as CSV or JSON lines (`tracelab.py`)
  recorded    what the connector writes (`recording.py`)

Ids of Mooncake name whole prefixes: none of the 12,031 requests of its conversation trace has a block with a second
predecessor or length. So do the others by their making, which is what lets a chunk be named by its last block.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from saria_vllm.errors import TraceError
from saria_vllm.sim import recording, tracelab
from saria_vllm.sim.trace import (
    CompactAgent,
    CompactRequest,
    CompactSession,
    Request,
    Session,
    check_limits,
    check_once,
    compact_session,
    decode_compact,
    decoded,
    id_runs,
    open_trace,
    trace_lines,
)

MOONCAKE_BLOCK_TOKENS = 512
_MOONCAKE_IDS = 1 << 64

EXPECTED = "a trace: compact, weka (kv-cache-tester), mooncake, tracelab (CSV or JSON lines) or recorded"

Lines = Iterable[tuple[int, bytes]]


class Trace(NamedTuple):
    """What a trace file holds."""

    sessions: list[Session]
    form: str
    """"compact", "weka", "mooncake", "tracelab" or "recorded"."""
    absolute_times: bool
    """Request times are on one clock for all sessions; otherwise each session's clock begins with it."""
    skipped: int
    """Malformed lines (of a directory: files) that were left out."""


class _Skips:
    """Raises what is malformed, or counts it."""

    def __init__(self, skip_bad: bool) -> None:
        self.skip_bad = skip_bad
        self.count = 0
        self.first: TraceError | None = None

    def meet(self, error: TraceError) -> None:
        if not self.skip_bad:
            raise error
        self.count += 1
        self.first = self.first or error


def read_trace(path: str | os.PathLike[str], *, skip_bad: bool = False) -> Trace:
    """A trace file, plain or gzip, or a directory of kv-cache-tester's trace_*.json files.

    Sessions marked `fork_of` are kept: leave them out where two sessions with one beginning would count twice.

    Raises:
        TraceError: the file cannot be read, has no known form, or has a malformed line (with `skip_bad`: only
            malformed lines); names file, line and what was expected.
    """
    name = os.fspath(path)
    skips = _Skips(skip_bad)
    found = _directory(name, skips) if os.path.isdir(name) else _file(name, 1, skips)
    if not found.sessions:
        raise skips.first or TraceError(f"{name}: no sessions; expected {EXPECTED}")
    return found._replace(skipped=skips.count)


def _directory(name: str, skips: _Skips) -> Trace:
    names = sorted(str(entry) for entry in Path(name).glob("trace_*.json*") if entry.is_file())
    if not names:
        raise TraceError(f"{name}: no such file in this directory; expected trace_*.json of kv-cache-tester")
    sessions: list[Session] = []
    for number, each in enumerate(names, 1):
        try:
            found = _file(each, number, _Skips(False))
            if found.form != "weka" or len(found.sessions) != 1:
                raise TraceError(f"{each}, line 1: form {found.form!r}; expected one kv-cache-tester object")
            _check_blocks(sessions, found.sessions[0], f"{each}, line 1")
            sessions += found.sessions
        except TraceError as error:
            skips.meet(error)
    return Trace(sessions, "weka", False, 0)


def _file(name: str, first_session: int, skips: _Skips) -> Trace:
    with open_trace(name) as file:
        lines = _until_bad(trace_lines(file, name, EXPECTED), skips)
        may_be_one_object = True
        while (found := next(lines, None)) is not None:
            number, line = found
            try:
                form = _form(line, f"{name}, line {number}")
            except TraceError as error:
                rest = list(lines)
                lines = iter(rest)
                whole = b"".join([line, *(each for _, each in rest)])
                if not (may_be_one_object and _is_json_object(whole)):
                    may_be_one_object = False
                    skips.meet(error)
                    continue
                form, line, lines = _form(whole, f"{name}, line {number}"), whole, iter(())
            return _FORMS[form](itertools.chain([(number, line)], lines), name, first_session, skips)
    return Trace([], "", False, 0)


def _until_bad(lines: Lines, skips: _Skips) -> Iterator[tuple[int, bytes]]:
    """The lines before the place, if any, where the file can no longer be read."""
    try:
        yield from lines
    except TraceError as error:
        skips.meet(error)


def _is_json_object(data: bytes) -> bool:
    try:
        return data.lstrip()[:1] == b"{" and isinstance(msgspec.json.decode(data), dict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


_ANY = msgspec.json.Decoder()


def _form(line: bytes, where: str) -> str:
    """The form of a file by its first line."""
    if tracelab.is_header(line):
        return "csv"
    first = decoded(_ANY, line, where, EXPECTED)
    keys = set(first) if isinstance(first, dict) else set()
    if "saria_trace" in keys:
        return "recorded"
    if "requests" in keys:
        requests = first["requests"]
        item = requests[0] if isinstance(requests, list) and requests else {}
        known = isinstance(item, dict) and ("hash_ids" in item or item.get("type") == "subagent")
        return "weka" if known else "compact"
    if {"timestamp", "hash_ids"} <= keys:
        return "mooncake"
    if {"prefix_tokens", "newly_append_tokens"} <= keys:
        return "rounds"
    found = f"keys {sorted(keys)[:6]}" if keys else "no JSON object"
    raise TraceError(f"{where}: {found}; expected {EXPECTED}")


def _each(
    lines: Lines, name: str, skips: _Skips, parse: Callable[[bytes, int, str], Session], first_session: int
) -> list[Session]:
    sessions: list[Session] = []
    for number, line in lines:
        where = f"{name}, line {number}"
        try:
            session = parse(line, first_session + len(sessions), where)
            _check_blocks(sessions, session, where)
            sessions.append(session)
        except TraceError as error:
            skips.meet(error)
    return sessions


def _check_blocks(before: list[Session], session: Session, where: str) -> None:
    """Refuse another size of blocks: their ids do not stand for the same tokens."""
    if before and session.block_tokens != before[0].block_tokens:
        found = f"blocks of {session.block_tokens} tokens"
        raise TraceError(f"{where}: {found}; expected {before[0].block_tokens}, as in the sessions before")


def _compact(lines: Lines, name: str, first_session: int, skips: _Skips) -> Trace:
    return Trace(_each(lines, name, skips, decode_compact, first_session), "compact", False, 0)


class _WekaRequest(msgspec.Struct):
    t: float
    type: str
    input_tokens: int = msgspec.field(name="in", default=0)
    output_tokens: int = msgspec.field(name="out", default=0)
    hash_ids: list[int] = []
    stop: str | None = None
    tool_tokens: int = 0
    system_tokens: int = 0
    requests: list[_WekaRequest] = []


class _WekaSession(msgspec.Struct):
    id: str
    block_size: int
    requests: list[_WekaRequest]
    tool_tokens: int = 0
    system_tokens: int = 0
    hash_id_scope: str = "local"


_WEKA = msgspec.json.Decoder(_WekaSession)


def _weka(lines: Lines, name: str, first_session: int, skips: _Skips) -> Trace:
    return Trace(_each(lines, name, skips, _weka_session, first_session), "weka", False, 0)


def _weka_session(line: bytes, number: int, where: str) -> Session:
    raw = decoded(_WEKA, line, where, "one kv-cache-tester object")
    agents: list[CompactAgent] = []
    requests = _flatten(raw.requests, 0, 0.0, agents, where)
    if raw.hash_id_scope == "global":
        # The same id means the same tokens in every session already.
        session = CompactSession(raw.id, raw.block_size, 0, 0, requests)
        return compact_session(session, 0, where)
    session = CompactSession(raw.id, raw.block_size, raw.tool_tokens, raw.system_tokens, requests, None, agents)
    return compact_session(session, number, where)


def _flatten(
    entries: list[_WekaRequest], thread: int, began_s: float, agents: list[CompactAgent], where: str
) -> list[CompactRequest]:
    """Requests of a thread and of its sub-agents, each a thread of its own, with times from the session's start."""
    # A sub-agent's times count from its own start in kv-cache-tester, from the session's in some later sets.
    shift = began_s if thread and min((entry.t for entry in entries), default=0.0) < began_s else 0.0
    found: list[CompactRequest] = []
    for entry in entries:
        time_s = entry.t + shift
        if entry.type == "subagent":
            agents.append(CompactAgent(len(agents) + 1, entry.tool_tokens, entry.system_tokens))
            found += _flatten(entry.requests, agents[-1].th, time_s, agents, where)
            continue
        add = id_runs(entry.hash_ids)
        stop = entry.stop or "unknown"
        found.append(CompactRequest(time_s, thread, entry.input_tokens, entry.output_tokens, 0, add, stop))
    return found


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


_MOONCAKE = msgspec.json.Decoder(_Mooncake)


def _mooncake(lines: Lines, name: str, first_session: int, skips: _Skips) -> Trace:
    return Trace(_each(lines, name, skips, _mooncake_request, first_session), "mooncake", True, 0)


def _mooncake_request(line: bytes, number: int, where: str) -> Session:
    """One line: a session of its own, since the file does not say which requests belong together."""
    raw = decoded(_MOONCAKE, line, where, "one Mooncake request")
    if raw.timestamp < 0 or raw.input_length <= 0 or raw.output_length < 0 or min(raw.hash_ids, default=0) < 0:
        found = f"timestamp {raw.timestamp:g}, input_length {raw.input_length}, output_length {raw.output_length}"
        raise TraceError(f"{where}: {found}; expected input_length above 0 and the others and ids at least 0")
    check_limits(raw.timestamp / 1000, raw.input_length, raw.output_length, where)
    if max(raw.hash_ids, default=0) >= _MOONCAKE_IDS:
        raise TraceError(f"{where}: hash_ids has {max(raw.hash_ids)}; expected ids of at most 64 bits")
    full, rest = divmod(raw.input_length, MOONCAKE_BLOCK_TOKENS)
    if len(raw.hash_ids) not in (full, full + (rest > 0)):
        found = f"{len(raw.hash_ids)} hash_ids for {raw.input_length} tokens"
        raise TraceError(f"{where}: {found}; expected {full}, or one more for the rest of {MOONCAKE_BLOCK_TOKENS}")
    name = f"request {number}"
    runs = tuple(id_runs(raw.hash_ids))
    check_once(runs, where)
    request = Request(name, 0, raw.timestamp / 1000, raw.input_length, raw.output_length, "unknown", runs)
    return Session(name, MOONCAKE_BLOCK_TOKENS, 0, 0, "", (request,))


def _rounds_csv(lines: Lines, name: str, first_session: int, skips: _Skips) -> Trace:
    return Trace(tracelab.csv_sessions(lines, name, skips.meet), "tracelab", False, 0)


def _rounds_json(lines: Lines, name: str, first_session: int, skips: _Skips) -> Trace:
    return Trace(tracelab.json_sessions(lines, name, skips.meet), "tracelab", False, 0)


def _recorded(lines: Lines, name: str, first_session: int, skips: _Skips) -> Trace:
    return Trace(recording.sessions(lines, name, skips.meet), "recorded", True, 0)


_FORMS: dict[str, Callable[[Lines, str, int, _Skips], Trace]] = {
    "compact": _compact,
    "weka": _weka,
    "mooncake": _mooncake,
    "csv": _rounds_csv,
    "rounds": _rounds_json,
    "recorded": _recorded,
}
