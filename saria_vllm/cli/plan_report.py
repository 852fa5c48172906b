"""The report of `saria plan` for people: tables, and one HTML file with plots."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from typing import Any

from saria_vllm.errors import ConfigError

HEADS = ("DRAM", "SSD", "drives", "admission", "hit", "TTFT mean s", "p99 s", "TB/day", "drive life years", "USD/month")


def cells(rows: list[dict[str, Any]], chosen: dict[str, Any]) -> list[list[str]]:
    """A table of rows, the chosen one with a star."""
    found = [list(HEADS)]
    for row in rows:
        life = "-" if row["drive_life_years"] is None else f"{row['drive_life_years']:,.1f}"
        day = "-" if row["ssd_tb_per_day"] is None else f"{row['ssd_tb_per_day']:.2f}"
        found.append(
            [
                ("* " if row == chosen else "  ") + row["dram"], row["ssd"], str(row["drives"]), row["admission"],
                f"{row['hit_rate']:.1%}", f"{row['ttft_mean_s']:.3f}", f"{row['ttft_p99_s']:.2f}", day, life,
                f"{row['usd_month']:,.0f}",
            ]
        )  # fmt: skip
    return found


def write_html(path: str, report: dict[str, Any]) -> None:
    """One file that needs nothing else.

    Raises:
        ConfigError: it cannot be written.
    """
    rows, front, chosen = report["rows"], report["frontier"], report["recommended"]
    parts = [
        _STYLE,
        "<h1>saria plan</h1>",
        _paragraph("{sessions} sessions, {requests:,} requests, {prompt_tokens:,} prompt tokens ({trace}), "
                   "starting {starts}".format(**report["workload"])),
        _paragraph(f"{report['model']} with {report['kv_bytes_token']:,} bytes of KV per token on "
                   f"{report['hardware']}; " + "; ".join(report["notes"])),
        "<h2>Recommended</h2>",
        _paragraph(report["rule"]),
        _table([chosen], chosen),
        "<pre>" + html.escape(json.dumps(report["kv_transfer_config"], indent=2)) + "</pre>",
        "<h2>Frontier</h2>",
        _table(front, chosen),
        _picture(_plot_cost(rows, front, chosen)),
        _picture(_plot_tiers(rows)),
        "<h2>All combinations</h2>",
        _table(rows, chosen),
    ]  # fmt: skip
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(parts))
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written: {error.strerror}; expected a file to create") from None


_STYLE = """<!doctype html><meta charset="utf-8"><title>saria plan</title>
<style>body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em}table{border-collapse:collapse}
td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}
tr.chosen{background:#fff3c4}pre{background:#f4f4f4;padding:1em;overflow:auto}img{max-width:100%}</style>"""


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _table(rows: list[dict[str, Any]], chosen: dict[str, Any]) -> str:
    head, *body = cells(rows, chosen)
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
    for row, line in zip(rows, body, strict=True):
        mark = ' class="chosen"' if row == chosen else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>")
    return "\n".join(lines) + "</table>"


def _picture(figure: Any) -> str:
    from matplotlib import pyplot

    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    pyplot.close(figure)
    return f'<p><img alt="plot" src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"></p>'


def _names(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["admission"] for row in rows))


def _plot_cost(rows: list[dict[str, Any]], front: list[dict[str, Any]], chosen: dict[str, Any]) -> Any:
    """TTFT against cost, and against bytes written, by admission."""
    from matplotlib import pyplot

    figure, (cost, writes) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for axis, key, label in ((cost, "usd_month", "USD per month"), (writes, "ssd_tb_per_day", "TB written per day")):
        for name in _names(rows):
            mine = [row for row in rows if row["admission"] == name and row[key] is not None]
            axis.scatter([row[key] for row in mine], [row["ttft_mean_s"] for row in mine], s=18, label=name)
        if chosen[key] is not None:
            axis.scatter([chosen[key]], [chosen["ttft_mean_s"]], s=160, marker="*", color="black", label="recommended")
        axis.set_xlabel(label)
        axis.set_ylabel("mean TTFT, s")
        axis.legend()
    cost.plot([row["usd_month"] for row in front], [row["ttft_mean_s"] for row in front], color="grey", linewidth=1)
    figure.tight_layout()
    return figure


def _plot_tiers(rows: list[dict[str, Any]]) -> Any:
    """Hit rate and writes by DRAM size, a line for each SSD size and admission."""
    from matplotlib import pyplot

    figure, (hits, writes) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    lines: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        name = "no SSD" if row["ssd"] == "none" else f"{row['ssd']}, {row['admission']}"
        lines.setdefault(name, {})[row["dram_bytes"]] = row
    for name, by_size in lines.items():
        sizes = sorted(by_size)
        gib = [size / 2**30 for size in sizes]
        hits.plot(gib, [100 * by_size[size]["hit_rate"] for size in sizes], marker="o", label=name)
        writes.plot(gib, [by_size[size]["ssd_tb_per_day"] or 0 for size in sizes], marker="o", label=name)
    gib = sorted({row["dram_bytes"] / 2**30 for row in rows})
    for axis, label in ((hits, "hit tokens, % of prompt tokens"), (writes, "TB written to SSD per day")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(gib, [f"{size:g}" for size in gib])
        axis.set_xlabel("DRAM, GiB; with the most drives")
        axis.set_ylabel(label)
    hits.legend(fontsize=7)
    figure.tight_layout()
    return figure
