"""TraceLab rounds as sessions: each round says how many tokens it kept of what came before and how many it added.

A round's first `prefix` tokens are the leading tokens of the session's previous prompt and answer, the `append`
tokens after them are new. Ids are made up from that, for blocks of `BLOCK_TOKENS`: a block is kept where all of it
lies in the prefix. A prefix longer than the previous prompt and answer (as in a first round, whose prefix the
provider had from other sessions) is new to the session beyond them, and sessions share nothing.

JSON rows carry real times: a round is sent with its last input event. CSV rows do not: a round follows the one
before after that one's output at `OUTPUT_TOKEN_S` each (an assumption: 50 tokens/s) and its `tool_wait_after_ms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from saria_vllm.errors import TraceError
from saria_vllm.sim.trace import (
    TIME_MAX_S,
    Request,
    Run,
    Session,
    append_runs,
    check_limits,
    decoded,
    leading_runs,
)

BLOCK_TOKENS = 64
OUTPUT_TOKEN_S = 0.02

_SESSION_BITS = 32
_INPUTS = ("user_message", "tool_result")
_COLUMNS = ("round_idx", "prefix_len", "input_len", "output_len", "tool_wait_after_ms")

Lines = Iterable[tuple[int, bytes]]
Meet = Callable[[TraceError], None]
"""Told of a malformed line; raises it or counts it."""


class _Round(NamedTuple):
    order: int
    time_s: float
    prefix: int
    append: int
    output: int
    stop: str


class _Event(msgspec.Struct):
    event_type: str
    timestamp: str | None = None


class _Row(msgspec.Struct):
    session_id: str
    round_index: int
    prefix_tokens: int
    newly_append_tokens: int
    output_tokens: int
    timing_events: list[_Event]


_ROW = msgspec.json.Decoder(_Row)


def is_header(line: bytes) -> bool:
    """Whether this is the first line of a TraceLab CSV."""
    names = _fields(line)
    return {"round_idx", "prefix_len", "input_len"} <= set(names)


def csv_sessions(lines: Lines, name: str, meet: Meet) -> list[Session]:
    """Sessions of a CSV, in order of their first row; rounds in order of `round_idx`."""
    lines = iter(lines)
    number, header = next(lines)
    names = _fields(header)
    key = "session_id" if "session_id" in names else "id"
    missing = [column for column in (key, *_COLUMNS) if column not in names]
    if missing:
        raise TraceError(f"{name}, line {number}: no column {missing[0]}; expected {', '.join((key, *_COLUMNS))}")
    places = [names.index(column) for column in _COLUMNS]
    found: dict[str, list[tuple[_Round, float, str]]] = {}
    for number, line in lines:
        where = f"{name}, line {number}"
        try:
            fields = _fields(line)
            session = fields[names.index(key)]
            index, prefix, append, output, wait_ms = (float(fields[place]) for place in places)
            each = _Round(int(index), 0.0, int(prefix), int(append), int(output), "unknown")
            if (each.order, each.prefix, each.append, each.output) != (index, prefix, append, output):
                raise ValueError("a count is not whole")
            _check(each, where)
            if not 0 <= wait_ms <= TIME_MAX_S * 1000:
                raise ValueError(f"tool_wait_after_ms is {wait_ms:g}")
        except (IndexError, ValueError, OverflowError) as error:
            meet(TraceError(f"{where}: {error}; expected one number for each of {', '.join(_COLUMNS)}"))
        except TraceError as error:
            meet(error)
        else:
            found.setdefault(session, []).append((each, wait_ms / 1000, where))
    sessions = []
    for number, (session, rows) in enumerate(found.items(), 1):
        rows.sort(key=lambda row: row[0].order)
        timed, time_s = [], 0.0
        for each, wait_s, where in rows:
            if time_s > TIME_MAX_S:
                meet(TraceError(f"{where}: round {each.order} at {time_s:g} s; expected at most {TIME_MAX_S:g} s"))
                break
            timed.append(each._replace(time_s=time_s))
            time_s += each.output * OUTPUT_TOKEN_S + wait_s
        sessions.append(_session(session, number, timed))
    return sessions


def json_sessions(lines: Lines, name: str, meet: Meet) -> list[Session]:
    """Sessions of JSON rows, in order of their first row; rounds in order of time, then of `round_index`."""
    found: dict[str, list[_Round]] = {}
    for number, line in lines:
        where = f"{name}, line {number}"
        try:
            row = decoded(_ROW, line, where, "one TraceLab round")
            tool = any(event.event_type == "tool_call" for event in row.timing_events)
            sizes = (row.prefix_tokens, row.newly_append_tokens, row.output_tokens)
            each = _Round(row.round_index, _sent_s(row, where), *sizes, "tool_use" if tool else "end_turn")
            _check(each, where)
        except TraceError as error:
            meet(error)
        else:
            found.setdefault(row.session_id, []).append(each)
    sessions = []
    for number, (session, rounds) in enumerate(found.items(), 1):
        rounds.sort(key=lambda each: (each.time_s, each.order))
        began = rounds[0].time_s
        timed = [each._replace(time_s=each.time_s - began) for each in rounds]
        sessions.append(_session(session, number, timed))
    return sessions


def _sent_s(row: _Row, where: str) -> float:
    """When a round was sent: with its last input, or no later than its first output."""
    stamps = [(event.event_type in _INPUTS, event.timestamp) for event in row.timing_events if event.timestamp]
    try:
        times = [(is_input, datetime.fromisoformat(stamp)) for is_input, stamp in stamps]
    except ValueError as error:
        raise TraceError(f"{where}: {error}; expected ISO 8601 timestamps in timing_events") from None
    seconds = [(is_input, (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()) for is_input, time in times]
    inputs = [second for is_input, second in seconds if is_input]
    if not seconds:
        raise TraceError(f"{where}: timing_events has no timestamp; expected at least one")
    return max(inputs) if inputs else min(second for _, second in seconds)


def _check(each: _Round, where: str) -> None:
    if min(each.order, each.prefix, each.append, each.output) < 0 or each.prefix + each.append == 0:
        found = f"round {each.order} has prefix {each.prefix}, append {each.append}, output {each.output}"
        raise TraceError(f"{where}: {found}; expected none below 0 and a prompt above 0 tokens")
    check_limits(each.time_s, each.prefix + each.append, each.output, where)


def _session(session: str, number: int, rounds: list[_Round]) -> Session:
    context: tuple[Run, ...] = ()
    fresh = number << _SESSION_BITS
    requests = []
    for each in rounds:
        prompt = each.prefix + each.append
        keep = min(each.prefix // BLOCK_TOKENS, sum(count for _, count in context))
        new = (prompt + each.output) // BLOCK_TOKENS - keep
        context = append_runs(context, keep, [(fresh, new)] if new else [])
        fresh += new
        runs = leading_runs(context, prompt // BLOCK_TOKENS)
        requests.append(Request(session, 0, each.time_s, prompt, each.output, each.stop, runs))
    return Session(session, BLOCK_TOKENS, 0, 0, "", tuple(requests))


def _fields(line: bytes) -> list[str]:
    """Fields of a CSV line; numbers, ids and names, so without commas of their own."""
    return [field.strip().strip('"') for field in line.decode("utf-8", "replace").split(",")]
