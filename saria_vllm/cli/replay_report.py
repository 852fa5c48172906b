"""What a replay found: one JSON-ready object, and tables for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from saria_vllm.cli import UsageError
from saria_vllm.cli.replay_drive import Counters, ReplayPlan, Turn
from saria_vllm.config import format_bytes

CLASSES = ("first", "hbm", "dram", "ssd", "mixed", "miss", "later")
_ERRORS_SHOWN = 5


def summarise(plan: ReplayPlan, turns: list[Turn], before: Counters, after: Counters, seconds: float) -> dict[str, Any]:
    """The report: settings, totals, TTFT by class and by turn number, and every turn."""
    good = [turn for turn in turns if not turn.error]
    moved = {key: value - before.get(key, 0.0) for key, value in after.items()}
    by_turn: dict[int, list[Turn]] = defaultdict(list)
    for turn in good:
        by_turn[turn.turn].append(turn)
    cached = [turn.cached_tokens for turn in good if turn.cached_tokens is not None]
    return {
        "url": plan.url,
        "model": plan.model,
        "trace": plan.trace,
        "seed": plan.seed,
        "concurrency": plan.concurrency,
        "tokens_per_block": plan.maker.scaled_tokens,
        "trace_block_tokens": plan.maker.block_tokens,
        "sessions": len(plan.sessions),
        "requests": len(turns),
        "failed": len(turns) - len(good),
        "turns_left_out": plan.turns_left_out,
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(turn.prompt_tokens for turn in good),
        "cached_tokens": sum(cached) if cached else None,
        "hit_tokens": {tier: int(moved.get(f'hit_tokens{{tier="{tier}"}}', 0)) for tier in ("dram", "ssd")}
        if moved
        else None,
        "ssd_written_bytes": int(moved.get("ssd_written_bytes", 0)) if moved else None,
        "counters": moved or None,
        "ttft": ttft(turn.ttft_s for turn in good),
        "classes": {
            name: _row([turn for turn in good if turn.turn_class == name])
            for name in CLASSES
            if any(turn.turn_class == name for turn in good)
        },
        "by_turn": [{"turn": number, **_row(rows)} for number, rows in sorted(by_turn.items())],
        "turns": [msgspec.to_builtins(turn) for turn in turns],
    }


def _row(turns: Sequence[Turn]) -> dict[str, Any]:
    cached = [turn.cached_tokens for turn in turns if turn.cached_tokens is not None]
    counters = [turn.counters for turn in turns if turn.counters is not None]
    return {
        "ttft": ttft(turn.ttft_s for turn in turns),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "cached_tokens": sum(cached) if cached else None,
        "hit_tokens": {
            tier: int(sum(moved.get(f'hit_tokens{{tier="{tier}"}}', 0) for moved in counters))
            for tier in ("dram", "ssd")
        }
        if counters
        else None,
        "ssd_written_bytes": int(sum(moved.get("ssd_written_bytes", 0) for moved in counters)) if counters else None,
    }


def ttft(seconds: Iterable[float]) -> dict[str, Any]:
    """Mean, median and 90th percentile in seconds, and their number."""
    values = sorted(seconds)
    if not values:
        return {"n": 0, "mean": None, "p50": None, "p90": None}
    return {
        "n": len(values),
        "mean": round(sum(values) / len(values), 4),
        "p50": round(quantile(values, 0.5), 4),
        "p90": round(quantile(values, 0.9), 4),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Quantile of sorted values, linear between neighbours."""
    position = share * (len(values) - 1)
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def print_report(report: dict[str, Any]) -> None:
    """Tables on standard output."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        raise UsageError("rich is not installed: pip install aiohttp rich tokenizers") from None
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    console.print(
        f"{report['requests']} requests of {report['sessions']} sessions in {report['seconds']:.1f} s, "
        f"{report['failed']} failed; a trace block of {report['trace_block_tokens']} tokens "
        f"is {report['tokens_per_block']} tokens here",
        highlight=False,
    )
    for title, name, rows in (
        ("By class", "class", list(report["classes"].items())),
        ("By turn", "turn", [(str(row["turn"] + 1), row) for row in report["by_turn"]]),
    ):
        table = Table(title=title, title_justify="left")
        table.add_column(name)
        heads = ("n", "TTFT mean ms", "p50", "p90", "prompt tokens", "cached", "from DRAM", "from SSD", "SSD written")
        for head in heads:
            table.add_column(head, justify="right")
        for label, row in rows:
            table.add_row(label, *_cells(row))
        console.print(table)
    if report["turns_left_out"]:
        console.print(f"{report['turns_left_out']} turns left out: their prompts do not fit")
    if report["hit_tokens"] is not None:
        console.print(
            f"from DRAM {report['hit_tokens']['dram']:,} tokens, from SSD {report['hit_tokens']['ssd']:,} tokens, "
            f"written to SSD {format_bytes(report['ssd_written_bytes'])}",
            highlight=False,
        )
    errors = [turn for turn in report["turns"] if turn["error"]]
    for turn in errors[:_ERRORS_SHOWN]:
        console.print(f"failed: {turn['session']} turn {turn['turn'] + 1}: {turn['error']}", markup=False)


def _cells(row: dict[str, Any]) -> list[str]:
    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value * 1000:.0f}"

    def number(value: int | None) -> str:
        return "-" if value is None else f"{value:,}"

    hits = row["hit_tokens"] or {"dram": None, "ssd": None}
    written = row["ssd_written_bytes"]
    return [
        str(row["ttft"]["n"]),
        ms(row["ttft"]["mean"]),
        ms(row["ttft"]["p50"]),
        ms(row["ttft"]["p90"]),
        number(row["prompt_tokens"]),
        number(row["cached_tokens"]),
        number(hits["dram"]),
        number(hits["ssd"]),
        "-" if written is None else format_bytes(written),
    ]
