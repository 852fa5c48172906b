"""The HTTP side of `saria replay`: closed loops of sessions, streamed answers, the server's counters."""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import re
import time
from typing import Annotated, Any

import msgspec

from saria_vllm.cli import UsageError
from saria_vllm.errors import SariaError
from saria_vllm.sim.prompts import PromptMaker
from saria_vllm.sim.trace import Request, Session

METRIC_PREFIX = "vllm:saria_"
_CONNECT_S = 10.0
_LABEL = re.compile(r'(\w+)="(?:[^"\\]|\\.)*"')
_NOT_OURS = ("engine", "model_name")
_COUNTER_END = 2.0**63
"""Values from here on, like NaN and negative ones, are no counts."""
_SAID_MAX = 500
"""Characters kept of what a server or a library says of a failure."""

Counters = dict[str, float]
"""Values of the server's `vllm:saria_` lines by name and labels, summed over engines."""


class ServerError(SariaError):
    """The server is not there or does not answer as vLLM does."""


class ServerInfo(msgspec.Struct, frozen=True):
    """What the server says of its model; 0 where it says nothing."""

    model: str
    context_tokens: int
    vocab_size: int


_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class _Card(msgspec.Struct):
    """A model in /v1/models."""

    id: str
    max_model_len: _Count | None = None
    root: Any = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    completion_tokens: _Count | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    """What follows `data:` in a streamed answer."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


class ReplayPlan(msgspec.Struct, frozen=True):
    """All that a replay does, decided before the first request."""

    url: str
    model: str
    sessions: list[Session]
    starts: list[float]
    maker: PromptMaker
    output_tokens: int
    """Tokens of each answer; 0 means the trace's own number, scaled."""
    context_tokens: int
    concurrency: int
    think_scale: float
    timeout_s: float
    turns_left_out: int
    seed: int
    trace: str


class Turn(msgspec.Struct):
    """One request as it was served."""

    session: str
    turn: int
    thread: int
    prompt_tokens: int
    known_tokens: int
    """Leading tokens that had been sent before, by this or another session."""
    ttft_s: float = 0.0
    total_s: float = 0.0
    output_tokens: int = 0
    cached_tokens: int | None = None
    counters: Counters | None = None
    """How the server's counters moved meanwhile; None where there are none or several requests ran at once."""
    turn_class: str = ""
    error: str = ""


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError:
        raise UsageError("aiohttp is not installed: pip install aiohttp rich tokenizers") from None
    return aiohttp


async def server_info(url: str, model: str | None) -> ServerInfo:
    """Ask /v1/models, and read the vocabulary size where the model's folder is on this machine.

    Raises:
        ServerError: nobody answers there, or the model is not served.
    """
    aiohttp = _aiohttp()
    address = f"{url.rstrip('/')}/v1/models"
    try:
        timeout = aiohttp.ClientTimeout(total=_CONNECT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(address) as response:
            response.raise_for_status()
            cards = msgspec.json.decode(await response.read(), type=_Models).data
    except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
        raise ServerError(f"no OpenAI-compatible server answers at {address}: {_said(error)}") from None
    found = [card for card in cards if model in (None, card.id)]
    if not found:
        raise ServerError(f"{address} has no model {model!r}; it serves {[card.id for card in cards]}")
    card = found[0]
    return ServerInfo(card.id, card.max_model_len or 0, _vocab_size(card.root or ""))


def _vocab_size(root: Any) -> int:
    try:
        with open(os.path.join(root, "config.json"), encoding="utf-8") as file:
            return max(0, int(json.load(file)["vocab_size"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0


def _said(what: object) -> str:
    """A text from elsewhere in one line that can be printed and encoded."""
    return " ".join(str(what)[:_SAID_MAX].split()).encode(errors="backslashreplace").decode()


def parse_counters(text: str) -> Counters:
    """The `vllm:saria_` counters of a /metrics page, engines and models summed; gauges are left out."""
    counters: Counters = {}
    for line in text.splitlines():
        if not line.startswith(METRIC_PREFIX):
            continue
        name, _, value = line.rpartition(" ")
        name, _, labels = name.partition("{")
        if not name.endswith("_total"):
            continue
        name = name[len(METRIC_PREFIX) :].removesuffix("_total")
        own = [match[0] for match in _LABEL.finditer(labels) if match[1] not in _NOT_OURS]
        key = name + (f"{{{','.join(own)}}}" if own else "")
        try:
            number = float(value)
        except ValueError:
            continue
        if 0 <= number < _COUNTER_END:
            counters[key] = counters.get(key, 0.0) + number
    return counters


async def drive(plan: ReplayPlan) -> tuple[list[Turn], Counters, Counters, float]:
    """Replay the plan. Returns the turns in order of sending, counters before and after, and the seconds it took."""
    aiohttp = _aiohttp()
    timeout = aiohttp.ClientTimeout(total=plan.timeout_s)
    connector = aiohttp.TCPConnector(limit=plan.concurrency + 1)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        before = await _read_counters(http, plan.url)
        driver = _Driver(plan, http)
        started = time.perf_counter()
        with _progress(plan) as advance:
            await driver.run(advance)
        seconds = time.perf_counter() - started
        return driver.turns, before, await _read_counters(http, plan.url), seconds


class _Driver:
    """Sends the turn that is due first, `concurrency` at a time, one per session."""

    def __init__(self, plan: ReplayPlan, http: Any) -> None:
        self.plan = plan
        self.http = http
        self.turns: list[Turn] = []
        self.due = [(start * (plan.think_scale or 1.0), index, 0) for index, start in enumerate(plan.starts)]
        heapq.heapify(self.due)
        self.sessions_open = len(self.due)
        self.changed = asyncio.Condition()
        self.seen: set[int] = set()
        self.began = time.perf_counter()

    async def run(self, advance: Any) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.plan.concurrency, len(self.plan.sessions))):
                group.create_task(self._work(advance))

    async def _work(self, advance: Any) -> None:
        while True:
            async with self.changed:
                await self.changed.wait_for(lambda: self.due or not self.sessions_open)
                if not self.due:
                    return
                due, index, number = heapq.heappop(self.due)
            if self.plan.think_scale:
                await asyncio.sleep(max(0.0, due - self._now()))
            requests = self.plan.sessions[index].requests
            sent = self._now()
            turn = await self._ask(requests[number], number)
            advance(turn)
            async with self.changed:
                if number + 1 < len(requests):
                    gap = requests[number + 1].time_s - requests[number].time_s
                    if self.plan.think_scale:
                        next_due = max(self._now(), sent + gap * self.plan.think_scale)
                    else:
                        next_due = due + gap
                    heapq.heappush(self.due, (next_due, index, number + 1))
                else:
                    self.sessions_open -= 1
                self.changed.notify_all()

    def _now(self) -> float:
        return time.perf_counter() - self.began

    async def _ask(self, request: Request, number: int) -> Turn:
        maker = self.plan.maker
        prompt = maker.prompt(request, number)
        blocks = request.blocks()
        known = next((i for i, block in enumerate(blocks) if block not in self.seen), len(blocks))
        self.seen.update(blocks)
        turn = Turn(request.session, number, request.thread, len(prompt), known * maker.scaled_tokens)
        self.turns.append(turn)
        wanted = self.plan.output_tokens
        wanted = wanted or max(1, request.output_tokens * maker.scaled_tokens // maker.block_tokens)
        wanted = min(wanted, self.plan.context_tokens - len(prompt))
        alone = self.plan.concurrency == 1
        before = await _read_counters(self.http, self.plan.url) if alone else {}
        try:
            await stream_answer(self.http, self.plan.url, self.plan.model, prompt, wanted, turn)
        except Exception as error:  # Whatever it is: this turn failed, and the report is of all of them.
            turn.error = f"{type(error).__name__}: {_said(error)}"
        if alone:
            after = await _read_counters(self.http, self.plan.url)
            turn.counters = {key: value - before.get(key, 0.0) for key, value in after.items()} or None
        turn.turn_class = classify(turn)
        return turn


def classify(turn: Turn) -> str:
    """The class of a turn (see `saria replay --help`); "" when the server does not tell enough, or it failed."""
    if turn.error:
        return "failed"
    if turn.turn == 0:
        return "first"
    counters = turn.counters or {}
    dram, ssd = (counters.get(f'hit_tokens{{tier="{tier}"}}', 0.0) for tier in ("dram", "ssd"))
    cached = dram + ssd if turn.cached_tokens is None else turn.cached_tokens
    if turn.cached_tokens is None and not counters:
        return "later"
    if cached < turn.known_tokens / 2:
        return "miss"
    if dram and ssd:
        return "mixed"
    return "dram" if dram else "ssd" if ssd else "hbm" if cached else "miss"


async def stream_answer(http: Any, url: str, model: str, prompt: list[int], output_tokens: int, turn: Turn) -> None:
    """Ask for one greedy answer of exactly `output_tokens` tokens and fill in the turn.

    Raises:
        ServerError: an error answer, an error inside the stream, or an answer without tokens.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    async with http.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise ServerError(f"HTTP {response.status}: {(await response.read()).decode(errors='replace')}")
        async for raw in response.content:
            line = raw.strip()
            if not line.startswith(b"data:") or line == b"data: [DONE]":
                continue
            event = _parse_event(line[5:])
            if event.error is not None:
                raise ServerError(f"in the stream: {event.error}")
            if event.choices:
                if not turn.ttft_s:
                    turn.ttft_s = time.perf_counter() - began
                reason = event.choices[0].finish_reason
                if reason not in (None, "length", "stop"):
                    raise ServerError(f"the answer ended with {reason!r}")
            if event.usage is not None:
                turn.output_tokens = event.usage.completion_tokens or 0
                details = event.usage.prompt_tokens_details
                turn.cached_tokens = details.cached_tokens if details is not None else None
    turn.total_s = time.perf_counter() - began
    if not turn.ttft_s:
        raise ServerError("the answer has no tokens")


def _parse_event(data: bytes) -> _Event:
    try:
        return _EVENTS.decode(data)
    except (ValueError, RecursionError) as error:
        text = data.decode(errors="replace")
        raise ServerError(f"in the stream, not an event of this API ({error}): {text[:_SAID_MAX]}") from None


async def _read_counters(http: Any, url: str) -> Counters:
    aiohttp = _aiohttp()
    try:
        async with http.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(total=_CONNECT_S)) as response:
            page = await response.read()
            return parse_counters(page.decode(errors="replace")) if response.status == 200 else {}
    except (aiohttp.ClientError, OSError, ValueError):
        return {}


class _progress:
    """A progress bar on standard error; gives a function to call after each turn."""

    def __init__(self, plan: ReplayPlan) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:
            raise UsageError("rich is not installed: pip install aiohttp rich tokenizers") from None
        self.total = sum(len(session.requests) for session in plan.sessions)
        self.bar = Progress(
            TextColumn("replay"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
        )

    def __enter__(self) -> Any:
        self.bar.start()
        task = self.bar.add_task("", total=self.total)

        def advance(turn: Turn) -> None:
            text = "failed" if turn.error else f"{turn.turn_class} {turn.ttft_s * 1000:.0f} ms"
            self.bar.update(task, advance=1, description=text)

        return advance

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
