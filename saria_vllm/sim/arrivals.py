"""Many sessions as one stream of requests in order of time, with the chunks that each prompt is made of."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from saria_vllm.errors import ConfigError
from saria_vllm.policy.endurance import DAY_S
from saria_vllm.sim.formats import Trace
from saria_vllm.sim.trace import Request, Run

_COPY_BITS = 72
"""Ids of a trace are below 2 to this power; those of a copy have its number above it."""

COPIES_MAX = 1 << 16


def starts(n_sessions: int, window_s: float, seed: int | Sequence[int]) -> list[float]:
    """Seconds at which sessions start: one uniform draw each, in file order, from 0 to `window_s`."""
    rng = np.random.default_rng(seed)
    return [float(rng.uniform(0, window_s)) for _ in range(n_sessions)]


def arrivals(trace: Trace, start_s: Sequence[float]) -> Iterator[tuple[float, int, Request]]:
    """(time in seconds, position of its session, request) in order of time; equal times in order of session.

    A session's first request comes at its start, the others as much later as in the trace. Where the trace has
    real times those are used, and `start_s` is not looked at.
    """
    order: list[tuple[int, Request]] = []
    times: list[float] = []
    for number, session in enumerate(trace.sessions):
        shift = 0.0 if trace.absolute_times else start_s[number] - session.requests[0].time_s
        for request in session.requests:
            order.append((number, request))
            times.append(shift + request.time_s)
    for place in sorted(range(len(order)), key=times.__getitem__):
        number, request = order[place]
        yield times[place], number, request


def repeated(
    trace: Trace, copies_by_day: Sequence[int], start_s: Callable[[int], Sequence[float]]
) -> Iterator[tuple[float, int, Request]]:
    """The trace again every 24 h, on each day as many copies as given, in order of time.

    No two copies share an id, not even of tools and system prompts: their sessions are other sessions. `start_s` gives
    the starts of the copy with a number; copies are numbered through, and session n of copy c is c * sessions + n.
    Held are the copies that are under way.
    """
    assert sum(copies_by_day) <= COPIES_MAX
    under_way: list[tuple[float, int, Request, Iterator[tuple[float, int, Request]]]] = []

    def copy(number: int, begin_s: float) -> Iterator[tuple[float, int, Request]]:
        base = number << _COPY_BITS
        for time_s, session, request in arrivals(trace, start_s(number)):
            runs = tuple((first + base, count) for first, count in request.runs)
            yield begin_s + time_s, number * len(trace.sessions) + session, request._replace(runs=runs)

    def advance(stream: Iterator[tuple[float, int, Request]]) -> None:
        following = next(stream, None)
        if following is not None:
            heapq.heappush(under_way, (*following, stream))

    number = 0
    for day in range(len(copies_by_day) + 1):
        while under_way and (day == len(copies_by_day) or under_way[0][0] < day * DAY_S):
            time_s, session, request, stream = heapq.heappop(under_way)
            yield time_s, session, request
            advance(stream)
        for _ in range(copies_by_day[day] if day < len(copies_by_day) else 0):
            advance(copy(number, day * DAY_S))
            number += 1


def arrivals_with_ids(
    trace: Trace, start_s: Sequence[float], chunk_tokens: int
) -> Iterator[tuple[float, int, Request, list[int]]]:
    """`arrivals` through `with_ids`."""
    return with_ids(trace, arrivals(trace, start_s), chunk_tokens)


def with_ids(
    trace: Trace, stream: Iterable[tuple[float, int, Request]], chunk_tokens: int
) -> Iterator[tuple[float, int, Request, list[int]]]:
    """`arrivals` or `repeated`, each with `chunk_ids` of its request.

    The list is the caller's to keep, not to change: the next request of the thread is built from it. Held are the
    last prompts of sessions that are under way, never the whole stream.

    Raises:
        ConfigError: chunks and blocks do not fit each other.
    """
    left: dict[int, int] = {}
    threads: dict[int, dict[int, tuple[tuple[Run, ...], list[int]]]] = {}
    for time_s, number, request in stream:
        session = trace.sessions[number % len(trace.sessions)]
        split, join = _ratio(chunk_tokens, session.block_tokens)
        before = threads.setdefault(number, {})
        runs, ids = _extended(before.get(request.thread, ((), [])), _split(request.runs, split))
        left[number] = left.get(number, len(session.requests)) - 1
        if left[number]:
            before[request.thread] = runs, ids
        else:
            del threads[number], left[number]
        yield time_s, number, request, _full_chunks(ids, request, chunk_tokens, join)


def chunk_ids(request: Request, chunk_tokens: int, block_tokens: int) -> list[int]:
    """Global ids of the full chunks of a prompt, in order; a prefix of equal ids is a prefix of equal tokens.

    A chunk of several blocks has its last block's id, which names the whole prefix up to it. A block of k chunks
    with id i makes chunks i * k to i * k + k - 1.

    Raises:
        ConfigError: neither of chunk and block is a multiple of the other.
    """
    split, join = _ratio(chunk_tokens, block_tokens)
    _, ids = _extended(((), []), _split(request.runs, split))
    return _full_chunks(ids, request, chunk_tokens, join)


def _ratio(chunk_tokens: int, block_tokens: int) -> tuple[int, int]:
    """(chunks in a block, blocks in a chunk), one of which is 1."""
    if chunk_tokens > 0 and chunk_tokens % block_tokens == 0:
        return 1, chunk_tokens // block_tokens
    if chunk_tokens > 0 and block_tokens % chunk_tokens == 0:
        return block_tokens // chunk_tokens, 1
    found = f"chunks of {chunk_tokens} tokens for a trace of {block_tokens}-token blocks"
    raise ConfigError(f"{found}; expected a multiple or a divisor of {block_tokens}")


def _split(runs: tuple[Run, ...], split: int) -> tuple[Run, ...]:
    return runs if split == 1 else tuple((first * split, count * split) for first, count in runs)


def _extended(before: tuple[tuple[Run, ...], list[int]], runs: tuple[Run, ...]) -> tuple[tuple[Run, ...], list[int]]:
    """The ids of `runs`, built from what they share with a list that is there already."""
    shared = 0
    for had, has in zip(before[0], runs, strict=False):
        if had[0] != has[0]:
            break
        shared += min(had[1], has[1])
        if had[1] != has[1]:
            break
    ids = before[1][:shared]
    for first, count in runs:
        if shared < count:
            ids.extend(range(first + shared, first + count))
        shared = max(0, shared - count)
    return runs, ids


def _full_chunks(ids: list[int], request: Request, chunk_tokens: int, join: int) -> list[int]:
    full = min(request.input_tokens // chunk_tokens, len(ids) // join)
    if join == 1:
        return ids if full == len(ids) else ids[:full]
    return ids[join - 1 : full * join : join]
