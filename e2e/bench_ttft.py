"""TTFT of a reload (DRAM, SSD, both) over TTFT cold, interleaved on one server: `python e2e/bench_ttft.py`.

One round takes a prompt that nobody has seen: cold; reloaded from DRAM; then, with another prompt having pushed it out
of DRAM, from SSD; and a prompt whose first half is on SSD and second half in DRAM. Every reload is proved by the bytes
that its tier moved, and every answer is compared with the first one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from models import ensure_model
from reloading import connector, counters, make_prompt
from server import Server

ANSWER_TOKENS = 4
TAIL_TOKENS = 5
TARGET = 0.12


def ttft_s(server: Server, prompt: Sequence[int]) -> tuple[float, list[int]]:
    """Seconds to the first token of a streamed greedy answer, and the answer."""
    body = {
        "model": server.model, "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0.0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    first, tokens = 0.0, []
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - began
            for choice in json.loads(line[6:])["choices"]:
                tokens += choice.get("token_ids") or []
    return first, tokens


class Rounds:
    def __init__(self, server: Server, tokens: int) -> None:
        self.server, self.tokens = server, tokens
        self.seconds: dict[str, list[float]] = {"cold": [], "dram": [], "ssd": [], "mixed": []}
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.wrong = 0

    def ask(self, kind: str, prompt: list[int], tiers: set[str]) -> None:
        """One request with an empty HBM; `tiers` are those that must have moved bytes, and no others."""
        self.server.reset_prefix_cache()
        before = counters(self.server)
        seconds, answer = ttft_s(self.server, prompt)
        after = counters(self.server)
        moved = {
            tier for tier in ("dram", "ssd")
            if after.get(f'load_bytes{{tier="{tier}"}}', 0) > before.get(f'load_bytes{{tier="{tier}"}}', 0)
        }  # fmt: skip
        if moved != tiers:
            raise SystemExit(f"{kind}: bytes came from {sorted(moved)}, wanted {sorted(tiers)}")
        self.wrong += self.answers.setdefault(tuple(prompt), answer) != answer
        if kind in self.seconds:
            self.seconds[kind].append(seconds)

    def round(self, number: int) -> None:
        """A cold, A from DRAM, B and a filler cold (they push A out), A from SSD, half A + new, the same again."""
        first, second = make_prompt(2 * number, self.tokens), make_prompt(2 * number + 1, self.tokens)
        half = first[: self.tokens // 2] + make_prompt(10_000 + number, self.tokens - self.tokens // 2)
        first, second, half = ([*p, *make_prompt(7, TAIL_TOKENS)] for p in (first, second, half))
        self.ask("cold", first, set())
        self.ask("dram", first, {"dram"})
        self.ask("cold", second, set())
        self.ask("filler", make_prompt(20_000 + number, self.tokens // 4), set())
        self.ask("ssd", first, {"ssd"})
        self.ask("half new", half, {"ssd"})
        self.ask("mixed", half, {"dram", "ssd"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    arguments = parser.parse_args()
    token_bytes = 12 * 2 * 4 * 64 * (2 if arguments.dtype == "bfloat16" else 4)
    prompt_mib = token_bytes * arguments.tokens / 2**20
    with tempfile.TemporaryDirectory(prefix="saria-bench-") as folder:
        ssd = Path(folder) / "ssd"
        ssd.mkdir()
        extra = {
            "dram_capacity": f"{int(prompt_mib * 1.35)}MiB",
            "ssd_paths": [str(ssd)],
            "ssd_capacity": f"{int(prompt_mib * 8 * arguments.rounds) + 256}MiB",
            "admission": "full_duplicate",
        }
        server = Server(
            ensure_model("llama-136m"),
            ["--max-model-len", "16384", "--max-num-batched-tokens", "2048", "--max-num-seqs", "4"],
            log=Path(folder) / "server.log",
            connector=connector(extra),
            dtype=arguments.dtype,
        )
        with server:
            ttft_s(server, make_prompt(123456, 2048))
            rounds = Rounds(server, arguments.tokens)
            for number in range(arguments.rounds):
                rounds.round(number)
                print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    cold = statistics.median(rounds.seconds["cold"])
    report = {
        "tokens": arguments.tokens,
        "dtype": arguments.dtype,
        "kv_mib": prompt_mib,
        "answers_wrong": rounds.wrong,
        **{
            kind: {
                "n": len(values),
                "ttft_s_median": statistics.median(values),
                "ttft_s_min": min(values),
                "ttft_s_max": max(values),
                "over_cold": statistics.median(values) / cold,
            }
            for kind, values in rounds.seconds.items()
        },
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        print(f"TTFT at {arguments.tokens} tokens ({prompt_mib:.0f} MiB of KV), {arguments.dtype}, llama-136m")
        for kind, values in rounds.seconds.items():
            row = report[kind]
            print(
                f"{kind:6} median {row['ttft_s_median']:.3f} s  min {min(values):.3f}  max {max(values):.3f}  "
                f"n {len(values)}  over cold {row['over_cold']:.3f}"
            )
        print(f"answers that differ from the first one: {rounds.wrong}")
    slow = any(report[kind]["over_cold"] > TARGET for kind in ("dram", "ssd", "mixed"))
    return int(slow or rounds.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
