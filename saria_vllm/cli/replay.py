"""Drive an OpenAI-compatible vLLM server with agent sessions from a trace, and measure every turn.

Block ids of the trace become seeded tokens (the same id always the same tokens), so prompts share prefixes exactly
as the real sessions did. Each session is a closed loop: its next request follows its previous answer. Requests of
all sessions are sent in the order of the trace's own time line; with --think-scale above 0 the pauses between them
are real. With --concurrency 1 each turn is classed by the tier that served it, from the server's counters:

  first    the session's first turn
  hbm      most of what had been sent before was still in HBM
  dram     loaded from DRAM        ssd      loaded from SSD        mixed    loaded from both
  miss     less than half of what had been sent before came from any cache

Cached tokens need a server started with --enable-prompt-tokens-details.

Exit status: 0 all requests answered, 1 some failed or the server is not there, 2 bad usage.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from saria_vllm.cli import UsageError
from saria_vllm.cli.replay_drive import ReplayPlan, ServerError, ServerInfo, drive, server_info
from saria_vllm.cli.replay_report import print_report, summarise
from saria_vllm.sim.prompts import PromptMaker, fitting_scale
from saria_vllm.sim.trace import Session, read_sessions, session_starts
from saria_vllm.sim.workload import SESSIONS_MAX, synthetic_sessions

FALLBACK_VOCAB = (1000, 30_000)
NUMBER_MAX = 1_000_000_000
_SKIPPED_MAX = 100
"""Sessions looked at for each one wanted, before giving up."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="server (default %(default)s)")
    add("--model", help="model name to ask for (default: the first of /v1/models)")
    add("--trace", metavar="FILE", help="trace, plain or gzip (default: built-in seeded sessions)")
    add("--sessions", type=_above(0, SESSIONS_MAX), default=8, metavar="N",
        help="sessions to replay (default %(default)s)")  # fmt: skip
    add("--max-turns", type=_above(0), metavar="M", help="at most M turns of each session")
    add("--min-turns", type=_above(0), default=1, metavar="M",
        help="skip sessions with fewer turns that fit (default %(default)s)")  # fmt: skip
    add("--scale", type=_share, metavar="S", help="prompt length as a share of the trace's, above 0 to 1 "
        "(default: so that all prompts fit)")  # fmt: skip
    add("--max-prompt-tokens", type=_above(0), metavar="L", help="longest prompt (default: what the model takes); "
        "together with --scale a session ends before its first longer prompt")  # fmt: skip
    add("--concurrency", type=_above(0), default=1, metavar="C", help="requests in flight (default %(default)s)")
    add("--arrival-gap", type=_at_least_zero, default=15.0, metavar="SECONDS",
        help="mean time between session starts on the trace's time line (default %(default)s)")  # fmt: skip
    add("--think-scale", type=_at_least_zero, default=0.0, metavar="X",
        help="share of the trace's pauses really waited for (default %(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="seed of tokens, session starts and built-in sessions")
    add("--vocab", type=_vocab, metavar="LOW:HIGH", help="token ids to draw from (default: from the model's config)")
    add("--output-tokens", type=_output_tokens, default=16, metavar="N|trace",
        help="tokens to generate, or the trace's own number, scaled (default %(default)s)")  # fmt: skip
    add("--timeout", type=_above(0), default=600, metavar="SECONDS", help="per request (default %(default)s)")
    add("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Replay, print, and return the exit status."""
    try:
        _, report = replay(arguments)
    except ServerError as error:
        print(f"saria replay: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(report))
    else:
        print_report(report)
    return 1 if report["failed"] else 0


def replay(arguments: argparse.Namespace) -> tuple[ReplayPlan, dict[str, Any]]:
    """Replay; returns what was sent and the report.

    Raises:
        TraceError, UsageError: nothing was sent.
        ServerError: the server is not there.
    """
    sessions = wanted_sessions(arguments)

    async def go() -> tuple[ReplayPlan, dict[str, Any]]:
        info = await server_info(arguments.url, arguments.model)
        plan = make_plan(arguments, sessions, info)
        turns, before, after, seconds = await drive(plan)
        return plan, summarise(plan, turns, before, after, seconds)

    return asyncio.run(go())


def make_plan(arguments: argparse.Namespace, found: Iterable[Session], info: ServerInfo) -> ReplayPlan:
    """What will be sent: scaled to the model, cut where a prompt does not fit.

    Raises:
        UsageError: nothing fits.
    """
    output = 0 if arguments.output_tokens == "trace" else arguments.output_tokens
    room = (info.context_tokens or 1 << 30) - (output or 1)
    if room < 1:
        raise UsageError(f"--output-tokens {output}: the model takes {info.context_tokens} tokens in all")
    prompt_max = min(room, arguments.max_prompt_tokens or room)
    found = (session for session in found if len(session.requests) >= arguments.min_turns)
    if arguments.scale is None:
        found = list(itertools.islice(found, arguments.sessions))
    found = iter(found)
    first = next(found, None)
    if first is None:
        raise UsageError(f"no session has {arguments.min_turns} turns")
    found = itertools.chain([first], found)
    if arguments.scale is None:
        found = list(found)
        requests = itertools.chain.from_iterable(session.requests for session in found)
        scaled = fitting_scale(requests, first.block_tokens, prompt_max)
    else:
        scaled = max(1, round(first.block_tokens * arguments.scale))
    vocab = arguments.vocab or _model_vocab(info)
    maker = PromptMaker(arguments.seed, vocab, first.block_tokens, scaled)
    sessions, left_out = _fitting(found, maker, prompt_max, arguments)
    starts_rng = random.Random(f"{arguments.seed} starts")
    return ReplayPlan(
        url=arguments.url.rstrip("/"),
        model=info.model,
        sessions=sessions,
        starts=session_starts(starts_rng, len(sessions), arguments.arrival_gap),
        maker=maker,
        output_tokens=output,
        context_tokens=info.context_tokens or 1 << 30,
        concurrency=arguments.concurrency,
        think_scale=arguments.think_scale,
        timeout_s=arguments.timeout,
        turns_left_out=left_out,
        seed=arguments.seed,
        trace="built-in" if arguments.trace is None else arguments.trace,
    )


def _fitting(
    found: Iterable[Session], maker: PromptMaker, prompt_max: int, arguments: argparse.Namespace
) -> tuple[list[Session], int]:
    """The first sessions of which enough turns fit, each cut before its first prompt that does not; turns cut."""
    kept: list[Session] = []
    cut = 0
    for session in itertools.islice(found, arguments.sessions * _SKIPPED_MAX):
        if session.block_tokens != maker.block_tokens:
            raise UsageError(f"{session.session}: blocks of {session.block_tokens} tokens, not {maker.block_tokens}")
        fitting = itertools.takewhile(lambda request: maker.length(request) <= prompt_max, session.requests)
        requests = tuple(fitting)
        if len(requests) >= arguments.min_turns:
            kept.append(session._replace(requests=requests))
            cut += len(session.requests) - len(requests)
        if len(kept) == arguments.sessions:
            break
    if not kept:
        scaled = f"{maker.scaled_tokens} tokens for each block of {maker.block_tokens}"
        raise UsageError(f"no session has {arguments.min_turns} prompts of at most {prompt_max} tokens with {scaled}")
    if len(kept) < arguments.sessions:
        print(f"saria replay: only {len(kept)} sessions fit, replaying these", file=sys.stderr)
    return kept, cut


def wanted_sessions(arguments: argparse.Namespace) -> Iterator[Session]:
    """The sessions of the trace, or built-in ones without end, as long as they are wanted.

    Raises:
        TraceError: the trace cannot be read.
    """
    found: Iterable[Session]
    if arguments.trace is not None:
        # Read whole, so that a malformed line is reported before the first request.
        found = [session for session in read_sessions(arguments.trace) if not session.fork_of]
    else:
        found = synthetic_sessions(random.Random(f"{arguments.seed} sessions"))
    return (session._replace(requests=session.requests[: arguments.max_turns]) for session in found)


def _model_vocab(info: ServerInfo) -> tuple[int, int]:
    if info.vocab_size:
        return (min(16, info.vocab_size // 2), info.vocab_size)
    low, high = FALLBACK_VOCAB
    print(f"saria replay: vocabulary size not known, using token ids {low} to {high}; see --vocab", file=sys.stderr)
    return FALLBACK_VOCAB


def _above(low: int, most: int = NUMBER_MAX) -> Any:
    def parse(text: str) -> int:
        value = int(text)
        if not low < value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not above {low} and at most {most}")
        return value

    parse.__name__ = "whole number"
    return parse


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def _at_least_zero(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def _vocab(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if not (colon and low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH, two token ids, low below high")
    return int(low), int(high)


def _output_tokens(text: str) -> int | str:
    if text == "trace":
        return text
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{value} is not above 0 or 'trace'")
    return value
