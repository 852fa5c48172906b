"""Seeded agent sessions with the statistics of real ones, for machines without the trace files."""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from saria_vllm.sim.trace import Request, Run, Session, append_runs, shared_head

BLOCK_TOKENS = 64
PROMPTS = 12
"""Kinds of (tools, system prompt) in one workload: sessions of one product version share them."""

SESSIONS_MAX = 100_000
"""Most sessions that a command makes, or sends to a server: some GB."""

_ROUNDS_MAX = 1000


@functools.cache
def statistics() -> Mapping[str, Any]:
    """Quantiles of 692 real sessions (`weka_stats.json`, derived from kv-cache-tester, Apache-2.0)."""
    data = importlib.resources.files("saria_vllm.sim").joinpath("weka_stats.json").read_bytes()
    stats: Mapping[str, Any] = msgspec.json.decode(data)
    return stats


def draw(rng: random.Random, quantiles: Mapping[str, float]) -> float:
    """A sample whose quantiles are those given ({"p1": .., "p50": ..}), linear between, flat at the ends."""
    marks, values = _curve(tuple((key, value) for key, value in quantiles.items() if key[0] == "p"))
    u = rng.random() * 100
    right = bisect_right(marks, u)
    if right == 0:
        return values[0]
    if right == len(marks):
        return values[-1]
    low, high = marks[right - 1], marks[right]
    return values[right - 1] + (values[right] - values[right - 1]) * (u - low) / (high - low)


@functools.cache
def _curve(points: tuple[tuple[str, float], ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    pairs = sorted((float(key[1:]), float(value)) for key, value in points)
    return tuple(mark for mark, _ in pairs), tuple(value for _, value in pairs)


def synthetic_sessions(
    rng: random.Random,
    *,
    requests_min: int = 6,
    requests_max: int = 60,
    input_tokens_max: int = 131_072,
) -> Iterator[Session]:
    """Endless sessions, each a main thread with `requests_min` to `requests_max` requests.

    A session ends before its prompt would pass `input_tokens_max`. Equal states of `rng` give equal sessions.
    """
    stats = statistics()
    prompts = [(int(draw(rng, stats["tool_tokens"])), int(draw(rng, stats["system_tokens"]))) for _ in range(PROMPTS)]
    for number in itertools.count(1):
        for _ in range(_ROUNDS_MAX):
            tools, system = rng.choice(prompts)
            wanted = round(draw(rng, stats["requests_per_session"]))
            first = max(int(draw(rng, stats["first_input_tokens"])), tools + system)
            if requests_min <= wanted <= requests_max and first <= input_tokens_max:
                requests = _requests(rng, number, wanted, first, (tools, system), input_tokens_max)
                if len(requests) >= requests_min:
                    break
        else:
            raise ValueError(f"no session fits {requests_min}..{requests_max} requests of {input_tokens_max} tokens")
        yield Session(f"synthetic_{number:04d}", BLOCK_TOKENS, tools, system, "", tuple(requests))


def _requests(
    rng: random.Random, number: int, count: int, first_tokens: int, prompt: tuple[int, int], tokens_max: int
) -> list[Request]:
    stats = statistics()
    head = shared_head(*prompt, BLOCK_TOKENS)
    head_blocks = sum(length for _, length in head)
    fresh = number << 32
    runs: tuple[Run, ...] = head
    tokens, now = first_tokens, 0.0
    requests: list[Request] = []
    for turn in range(count):
        if tokens > tokens_max:
            break
        before = sum(length for _, length in runs)
        keep = before
        if turn and rng.random() < stats["pullback_prob(>5% of prev prompt dropped)"]:
            dropped = draw(rng, stats["pullback_fraction_dropped"])
            keep = max(head_blocks, int(before * (1 - dropped)))
            tokens = max(tokens - (before - keep) * BLOCK_TOKENS, keep * BLOCK_TOKENS)
        added = tokens // BLOCK_TOKENS - keep
        runs = append_runs(runs, keep, [(fresh, added)] if added > 0 else [])
        fresh += max(0, added)
        output = round(draw(rng, stats["output_tokens"]))
        stop = rng.choices(list(stats["stop_share"]), list(stats["stop_share"].values()))[0]
        requests.append(Request(f"synthetic_{number:04d}", 0, round(now, 3), tokens, output, stop, runs))
        now += draw(rng, stats["api_time_s"]) + draw(rng, stats["idle_after_s"][stop])
        tokens += round(draw(rng, stats["append_tokens_per_turn(no pullback)"]))
    return requests
