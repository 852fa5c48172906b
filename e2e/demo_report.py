"""The demo's table, picture and verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from saria_vllm.config import format_bytes

CLASSES = {"first": "first", "hbm": "HBM", "dram": "DRAM hit", "ssd": "SSD hit", "mixed": "mixed", "miss": "miss"}
TIERS = ("dram", "ssd")

Result = dict[str, Any]


def add_same_turns(result: Result, plain: Result) -> None:
    """For each class: the mean TTFT that the very same turns had in the first configuration."""
    key = {(turn["session"], turn["turn"]): turn["ttft_s"] for turn in plain["report"]["turns"]}
    means: dict[str, float] = {}
    for name in CLASSES:
        times = [
            key[turn["session"], turn["turn"]]
            for turn in result["report"]["turns"]
            if turn["turn_class"] == name and (turn["session"], turn["turn"]) in key
        ]
        if times:
            means[name] = sum(times) / len(times)
    result["same_turns_plain_ttft_s"] = means


def hit_tokens(result: Result, tier: str) -> int:
    """Tokens that the replay loaded from a tier."""
    return int(result["counters"].get(f'hit_tokens{{tier="{tier}"}}', 0))


def written_bytes(result: Result) -> int:
    """Bytes that the replay wrote to SSD."""
    return int(result["counters"].get("ssd_written_bytes", 0))


def returning_ttft_s(result: Result) -> float:
    """Mean TTFT of all turns but the first of each session."""
    times = [turn["ttft_s"] for turn in result["report"]["turns"] if turn["turn"]]
    return sum(times) / len(times)


def print_table(results: list[Result]) -> None:
    """One row per configuration."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)
    title = (
        "mean TTFT in ms by class of turn, n turns (was: the very same turns without a connector); "
        "reloads at emulated rates"
    )
    table = Table(title=title, title_justify="left", padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    heads = ("first", "HBM", "DRAM\nhit", "SSD\nhit", "mixed", "miss", "all but\nfirst")
    for head in (*heads, "from DRAM\ntokens", "from SSD\ntokens", "written\nto SSD"):
        table.add_column(head, justify="right", no_wrap=True)
    plain = results[0]["arm"]
    for result in results:
        cells = [_class_cell(result, name, result["arm"] != plain) for name in CLASSES]
        cells.append(f"{returning_ttft_s(result) * 1000:.0f}")
        cells += [f"{hit_tokens(result, tier):,}" if result["counters"] else "-" for tier in TIERS]
        cells.append(format_bytes(written_bytes(result)) if result["counters"] else "-")
        table.add_row(result["arm"], *cells)
    console.print(table)
    _print_answers(console, results)


def _class_cell(result: Result, name: str, compare: bool) -> str:
    row = result["report"]["classes"].get(name)
    if row is None:
        return "-"
    text = f"[bold]{row['ttft']['mean'] * 1000:.0f}[/bold]\n[dim]n={row['ttft']['n']}[/dim]"
    if compare and name in result["same_turns_plain_ttft_s"]:
        text += f"\n[dim]was {result['same_turns_plain_ttft_s'][name] * 1000:.0f}[/dim]"
    return text


def _print_answers(console: Console, results: list[Result]) -> None:
    others = results[1:]
    if not others:
        return
    same = not any(differing(results[0], result) for result in others)
    reloaded = ", ".join(
        f"{result['arm']} DRAM {checked(result, 'dram'):,} + SSD {checked(result, 'ssd'):,}" for result in others
    )
    count = len(results[0]["answers"])
    console.print(f"answers identical: {'yes' if same else 'NO'}", style="bold" if same else "bold red")
    console.print(
        f"  ({count} turns asked again, one at a time, nothing in HBM; tokens reloaded for it: {reloaded})",
        highlight=False,
    )


def checked(result: Result, tier: str) -> int:
    """Tokens that asking again loaded from a tier."""
    key = f'hit_tokens{{tier="{tier}"}}'
    return int(result["counters_after_check"].get(key, 0) - result["counters"].get(key, 0))


def differing(plain: Result, other: Result) -> list[int]:
    """Numbers of the sampled turns whose answers are not those of the first configuration."""
    return [
        mine["turn"]
        for mine, theirs in zip(other["answers"], plain["answers"], strict=True)
        if mine["turn"] != theirs["turn"] or mine["token_ids"] != theirs["token_ids"]
    ]


def judge(results: list[Result]) -> list[str]:
    """What is wrong, in sentences; empty when all is well."""
    by_arm = {result["arm"]: result for result in results}
    saria, full = by_arm["saria"], by_arm["full_duplicate"]
    problems = []
    if hit_tokens(saria, "ssd") == 0:
        problems.append("the saria run had no SSD hits")
    if written_bytes(saria) >= written_bytes(full):
        problems.append(
            f"saria wrote {format_bytes(written_bytes(saria))}, full_duplicate {format_bytes(written_bytes(full))}"
        )
    for result in results[1:]:
        if wrong := differing(results[0], result):
            problems.append(f"{result['arm']}: the answers of turns {wrong} differ from those without a connector")
        if not any(checked(result, tier) for tier in TIERS):
            problems.append(f"{result['arm']}: asking again reloaded nothing, so the comparison proves nothing")
    return problems


def draw(results: list[Result], path: Path) -> None:
    """The table as a picture: TTFT by class, tokens by tier, bytes written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(15, 4.5), width_ratios=(3, 1.2, 1.2), layout="constrained"
    )
    names = [result["arm"] for result in results]
    colours = ("#9e9e9e", "#4c9be8", "#e8a33d", "#3aa76d")
    width = 0.8 / len(results)
    for number, result in enumerate(results):
        rows = result["report"]["classes"]
        for place, name in enumerate(CLASSES):
            if name not in rows:
                continue
            at = place + (number - (len(results) - 1) / 2) * width
            mean = rows[name]["ttft"]["mean"] * 1000
            left.bar(at, mean, width, color=colours[number % len(colours)])
            left.text(at, mean, f"n={rows[name]['ttft']['n']}", ha="center", va="bottom", fontsize=7)
        left.bar(0, 0, color=colours[number % len(colours)], label=result["arm"])
    left.set_xticks(range(len(CLASSES)), CLASSES.values())
    left.set_ylabel("ms")
    left.set_title("mean TTFT by class of turn")
    left.legend()
    dram = [hit_tokens(result, "dram") for result in results]
    ssd = [hit_tokens(result, "ssd") for result in results]
    middle.bar(names, dram, color="#4c9be8", label="DRAM")
    middle.bar(names, ssd, bottom=dram, color="#e8a33d", label="SSD")
    middle.set_title("tokens reloaded")
    middle.legend()
    right.bar(names, [written_bytes(result) / 2**20 for result in results], color="#b5544f")
    right.set_title("written to SSD, MiB")
    right.set_ylim(bottom=0)
    for axes in (middle, right):
        axes.tick_params(axis="x", rotation=25)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
