"""Agent sessions read from a trace file: who asked what, when, and which blocks the prompt was made of.

The format is one JSON object per line (plain or gzip), the "WEKA compact" schema: each request names its
block ids as `keep` (leading ids equal to the previous request of its thread) and `add` (runs of ids after
them). Ids are local to a session; sessions whose tools and system prompt have the same lengths share those
blocks, so these get ids that are the same in all sessions.
"""

from __future__ import annotations

import gzip
import heapq
import io
import itertools
import os
import random
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple, TypeVar

import msgspec

from saria_vllm.errors import TraceError

T = TypeVar("T")

Run = tuple[int, int]
"""(first block id, number of consecutive ids)."""

_LOCAL_BITS = 32
_INDEX_BITS, _LENGTH_BITS = 16, 20
_BUFFER_BYTES = 1 << 16
_BOM = b"\xef\xbb\xbf"
_TOOLS = 1 << 60
_SYSTEM = 2 << 60

TOKENS_MAX = 1 << 26
"""Of a prompt, of an answer and of a block: each chunk of a prompt costs memory."""

TIME_MAX_S = 1e10
"""Some 300 years, in which unix seconds fit: what is written is counted by day."""


class Request(NamedTuple):
    """One request of a session: its prompt is `blocks()`, then less than one block of tokens without id."""

    session: str
    thread: int
    """0 is the main thread, others are sub-agents."""
    time_s: float
    """Seconds since the session began."""
    input_tokens: int
    output_tokens: int
    stop: str
    """Why the answer ended: "tool_use", "end_turn", or "unknown"."""
    runs: tuple[Run, ...]

    def blocks(self) -> list[int]:
        """Global block ids of the prompt in order; a prefix of equal ids is a prefix of equal tokens."""
        ids: list[int] = []
        for first, count in self.runs:
            ids.extend(range(first, first + count))
        return ids


class Session(NamedTuple):
    """One agent session, its requests in order of time."""

    session: str
    block_tokens: int
    tool_tokens: int
    system_tokens: int
    fork_of: str
    """The session whose first requests these repeat; empty when there is none."""
    requests: tuple[Request, ...]


class CompactAgent(msgspec.Struct):
    """Sizes of a sub-agent's own prompt, as a compact line has them."""

    th: int
    tool_tokens: int = 0
    system_tokens: int = 0


class CompactRequest(msgspec.Struct):
    """A request of a compact line; ids are local to the line."""

    t: float
    th: int
    input_tokens: int = msgspec.field(name="in")
    output_tokens: int = msgspec.field(name="out")
    keep: int
    add: list[tuple[int, int]]
    stop: str = "unknown"


class CompactSession(msgspec.Struct):
    """One line of the compact form."""

    id: str
    block_size: int
    tool_tokens: int
    system_tokens: int
    requests: list[CompactRequest]
    fork_of: str | None = None
    subagents: list[CompactAgent] = []


_COMPACT = msgspec.json.Decoder(CompactSession)


def read_sessions(source: str | os.PathLike[str] | IO[bytes]) -> Iterator[Session]:
    """Sessions of a trace in file order, from a path or an open binary file, plain or gzip.

    Raises:
        TraceError: the file cannot be read or is malformed; names file, line and what was expected.
    """
    if isinstance(source, str | os.PathLike):
        with open_trace(os.fspath(source)) as file:
            yield from _read(file, os.fspath(source))
    else:
        yield from _read(source, str(getattr(source, "name", "<stream>")))


def open_trace(name: str) -> IO[bytes]:
    """A trace file or pipe, to be read from its beginning.

    Raises:
        TraceError: there is none, or it may not be read.
    """
    try:
        return open(name, "rb")
    except (OSError, ValueError) as error:
        shown = name if name.isprintable() and name else repr(name)
        problem = getattr(error, "strerror", None) or error
        raise TraceError(f"{shown}: cannot be opened: {problem}; expected a trace file") from None


def _read(file: IO[bytes], name: str) -> Iterator[Session]:
    for number, line in trace_lines(file, name, "one JSON object per session"):
        yield decode_compact(line, number, f"{name}, line {number}")


class _Whole(io.RawIOBase):
    """A stream from its beginning, of which `head` was read: a pipe cannot seek."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head or self._rest.read(len(buffer))
        self._head = b""
        buffer[: len(data)] = data
        return len(data)


def trace_lines(file: IO[bytes], name: str, expected: str) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank with their numbers from 1, of a plain or gzip file or pipe.

    Raises:
        TraceError: the file is cut short, cannot be read or is empty; `expected` says what it should hold.
    """
    number = 0
    try:
        head = file.read(2)
        whole = io.BufferedReader(_Whole(head, file), _BUFFER_BYTES)
        lines: Any = gzip.GzipFile(fileobj=whole) if head == b"\x1f\x8b" else whole
        for line in lines:
            number += 1
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                yield number, line
    except (EOFError, OSError, zlib.error) as error:
        message = f"{name}, after line {number}: {error}; expected a whole gzip or JSON-lines file"
        raise TraceError(message) from None
    if number == 0:
        raise TraceError(f"{name}, line 1: the file is empty; expected {expected}")


def decoded(decoder: msgspec.json.Decoder[T], line: bytes, where: str, expected: str) -> T:
    """One line as `decoder` reads it.

    Raises:
        TraceError: it is not what was expected.
    """
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{where}: {error}; expected {expected}") from None


def check_limits(time_s: float, input_tokens: int, output_tokens: int, where: str) -> None:
    """Refuse what no request can be.

    Raises:
        TraceError: a time or a number of tokens is out of bounds; the message begins with `where`.
    """
    if abs(time_s) > TIME_MAX_S or max(input_tokens, output_tokens) > TOKENS_MAX:
        found = f"a request at {time_s:g} s of {input_tokens} tokens and {output_tokens} of answer"
        raise TraceError(f"{where}: {found}; expected at most {TIME_MAX_S:g} s and {TOKENS_MAX} tokens")


def check_once(runs: Iterable[Run], where: str) -> None:
    """Refuse a prompt that has a block twice: an id names the whole prefix up to it.

    Raises:
        TraceError: it has; the message begins with `where`.
    """
    for (first, count), (following, _) in itertools.pairwise(sorted(runs)):
        if following < first + count:
            raise TraceError(f"{where}: block id {following} is twice in one prompt; expected each once")


def decode_compact(line: bytes, number: int, where: str) -> Session:
    """The session of one compact line.

    Raises:
        TraceError: the line is malformed.
    """
    return compact_session(decoded(_COMPACT, line, where, "one JSON object per session"), number, where)


def compact_session(raw: CompactSession, number: int, where: str) -> Session:
    """A session with ids that are global: `number` names its own ids, equal prompt sizes share theirs.

    Raises:
        TraceError: a number is out of range; the message begins with `where`.
    """
    if not 0 < raw.block_size <= TOKENS_MAX:
        raise TraceError(f"{where}: block_size is {raw.block_size}; expected tokens above zero, at most {TOKENS_MAX}")
    if not raw.requests:
        raise TraceError(f"{where}: requests is empty; expected at least one")
    prompts = {0: (raw.tool_tokens, raw.system_tokens)}
    prompts.update({agent.th: (agent.tool_tokens, agent.system_tokens) for agent in raw.subagents})
    for tools, system in prompts.values():
        if min(tools, system) < 0 or tools + system >= min(1 << _LENGTH_BITS, raw.block_size << _INDEX_BITS):
            found = f"tool_tokens {tools} and system_tokens {system}"
            raise TraceError(f"{where}: {found}; expected at least 0, in all below {1 << _LENGTH_BITS}")
    heads = {thread: shared_head(tools, system, raw.block_size) for thread, (tools, system) in prompts.items()}
    local: dict[int, tuple[Run, ...]] = {}
    requests = []
    for index, item in enumerate(raw.requests):
        runs = _checked_runs(local.get(item.th, ()), item, raw.block_size, f"{where}: requests[{index}]")
        local[item.th] = runs
        head = heads.get(item.th, heads[0])
        shifted = tuple((first + (number << _LOCAL_BITS), count) for first, count in runs)
        blocks = _replace_head(shifted, head)
        requests.append(Request(raw.id, item.th, item.t, item.input_tokens, item.output_tokens, item.stop, blocks))
    requests.sort(key=lambda request: request.time_s)
    return Session(raw.id, raw.block_size, raw.tool_tokens, raw.system_tokens, raw.fork_of or "", tuple(requests))


def _checked_runs(before: tuple[Run, ...], item: CompactRequest, block_tokens: int, where: str) -> tuple[Run, ...]:
    """Block runs of a request, with ids local to its session."""
    if item.t < 0 or item.th < 0 or item.input_tokens <= 0 or item.output_tokens < 0:
        found = f"t {item.t}, th {item.th}, in {item.input_tokens}, out {item.output_tokens}"
        raise TraceError(f"{where}: {found}; expected in above 0 and the others at least 0")
    check_limits(item.t, item.input_tokens, item.output_tokens, where)
    had = sum(count for _, count in before)
    if not 0 <= item.keep <= had:
        raise TraceError(f"{where}: keep is {item.keep}; expected 0 to {had}, the thread's blocks before")
    for first, count in item.add:
        if first < 0 or count <= 0 or first + count > 1 << _LOCAL_BITS:
            raise TraceError(f"{where}: add has {[first, count]}; expected [id of at least 0, count above 0]")
    runs = append_runs(before, item.keep, item.add)
    total = sum(count for _, count in runs)
    full, rest = divmod(item.input_tokens, block_tokens)
    if total not in (full, full + (rest > 0)):
        found = f"{total} block ids for {item.input_tokens} tokens"
        raise TraceError(f"{where}: {found}; expected {full}, or one more for the rest")
    check_once(runs, where)
    return runs


def id_runs(ids: Iterable[int]) -> list[Run]:
    """Ids as runs of consecutive ones."""
    runs: list[Run] = []
    first, end = 0, 0
    for each in ids:
        if each == end > first:
            end += 1
            continue
        if end > first:
            runs.append((first, end - first))
        first, end = each, each + 1
    if end > first:
        runs.append((first, end - first))
    return runs


def append_runs(before: Iterable[Run], keep: int, add: Iterable[Run]) -> tuple[Run, ...]:
    """Keep the first `keep` ids, then add; runs that continue each other become one."""
    runs = list(leading_runs(before, keep))
    for first, count in add:
        if runs and runs[-1][0] + runs[-1][1] == first:
            runs[-1] = (runs[-1][0], runs[-1][1] + count)
        else:
            runs.append((first, count))
    return tuple(runs)


def leading_runs(runs: Iterable[Run], count: int) -> tuple[Run, ...]:
    """The runs that cover the first `count` ids."""
    head: list[Run] = []
    for first, length in runs:
        if count <= 0:
            break
        head.append((first, min(length, count)))
        count -= length
    return tuple(head)


def shared_head(tool_tokens: int, system_tokens: int, block_tokens: int) -> tuple[Run, ...]:
    """Shared ids of the leading blocks: tools by (index, length), then system by (index, both lengths)."""
    tools = tool_tokens // block_tokens
    both = (tool_tokens + system_tokens) // block_tokens
    runs = []
    if tools:
        runs.append((_TOOLS | tool_tokens << _INDEX_BITS, tools))
    if both > tools:
        key = (tool_tokens << _LENGTH_BITS | system_tokens) << _INDEX_BITS
        runs.append(((_SYSTEM | key) + tools, both - tools))
    return tuple(runs)


def _replace_head(runs: tuple[Run, ...], head: tuple[Run, ...]) -> tuple[Run, ...]:
    total = sum(count for _, count in runs)
    shared = min(total, sum(count for _, count in head))
    tail: list[Run] = []
    skip = shared
    for first, count in runs:
        if skip < count:
            tail.append((first + skip, count - skip))
        skip = max(0, skip - count)
    return leading_runs(head, shared) + tuple(tail)


class Arrival(NamedTuple):
    """A request on the common time line of many sessions."""

    time_s: float
    session: int
    """Position in the list of sessions."""
    turn: int
    """Position in the session's requests."""


def session_starts(rng: random.Random, count: int, mean_gap_s: float) -> list[float]:
    """Start times of sessions as a Poisson process: the clock of a trace begins with each session."""
    starts, now = [], 0.0
    for _ in range(count):
        starts.append(now)
        now += rng.expovariate(1.0 / mean_gap_s) if mean_gap_s > 0 else 0.0
    return starts


def by_time(sessions: list[Session], starts: list[float]) -> Iterator[Arrival]:
    """All requests of all sessions in order of time; equal times in order of session."""

    def one(index: int) -> Iterator[Arrival]:
        for turn, request in enumerate(sessions[index].requests):
            yield Arrival(starts[index] + request.time_s, index, turn)

    return heapq.merge(*(one(index) for index in range(len(sessions))))
