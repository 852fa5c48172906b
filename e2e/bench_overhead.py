"""What reloads, stores and promotions cost a request that is decoding beside them: `python e2e/bench_overhead.py`.

vLLM's processes on core 0; our threads and the client on core 1. One request decodes; beside it, every second, a
request starts with a 3k-token prefix that was asked for before and some tokens that were not. Two arms, in turn; the
server of the other is frozen meanwhile:

  plain    no connector; HBM holds every prefix, so only the new tokens are computed, and nothing moves
  moving   our connector, the same requests; HBM holds one prefix of the four that take turns, so each is reloaded: one
           that comes every other time mostly from DRAM, the others from SSD, half of which is promoted; what is new
           is stored, and persisted

Printed: inter-token time of the decoding request, time inside the connector's methods per engine step (both halves
summed), and the bytes moved per second. Exit status 1: a target was missed, or one of the ways was not used.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from models import ensure_model
from reloading import connector, counters, make_prompt, python_path
from server import Server

BLOCK_TOKENS = 128
TURNS = (0, 1, 0, 2, 0, 3)
"""Prefixes in the order in which they are asked for, again and again."""
PREFIXES = len(set(TURNS))
ANSWER_TOKENS = 16
"""Of a prefix request: what finds no free slot at once is stored while it decodes."""
NEW_TOKENS = 128
"""Of each request, after its prefix."""

DECODE_BLOCKS = 8
"""HBM blocks beside the prefixes: for the decoding request and the last block of the others."""

TOKEN_BYTES = {"bfloat16": 20 << 10, "float32": 40 << 10}
"""KV bytes per token of the model."""

MOVED = {
    "from DRAM": 'load_bytes{tier="dram"}',
    "from SSD": 'load_bytes{tier="ssd"}',
    "to DRAM": "store_bytes",
    "to SSD": "ssd_written_bytes",
}
USED = (*MOVED.values(), "promoted_chunks", "stored_chunks")
MOVED_MIN = 100e6
"""Bytes per second."""
INTER_TOKEN_MAX, INTER_TOKEN_P99_MAX = 1.1, 1.3
STEP_P99_MS_MAX = 1.0
TOKENS_MIN = 1000


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


fresh = itertools.count(10_000)
"""Seeds of what nobody asked before."""


def decode_beside(server: Server, prefixes: list[list[int]], seconds: float) -> tuple[list[float], int]:
    """Gaps between the tokens of one decoding request while a prefix request starts every second, and their number."""
    stop = threading.Event()
    number = 0

    def others() -> None:
        nonlocal number
        due = time.monotonic()
        while not stop.is_set():
            prefix, new = prefixes[TURNS[number % len(TURNS)]], make_prompt(next(fresh), NEW_TOKENS)
            server.complete(prefix + new, ANSWER_TOKENS)
            number, due = number + 1, due + 1.0
            stop.wait(max(0.0, due - time.monotonic()))

    body = {
        "model": server.model, "prompt": make_prompt(4242, 64), "max_tokens": 2000, "temperature": 0.0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    stamps: list[float] = []
    thread = threading.Thread(target=others)
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                stamps.append(time.perf_counter())
                if len(stamps) == 20:
                    thread.start()
                if len(stamps) > 20 and stamps[-1] - stamps[20] > seconds:
                    break
    stop.set()
    thread.join()
    return [after - before for before, after in itertools.pairwise(stamps[20:])], number


class Arm:
    """One server, filled once, frozen while another one is measured: one engine runs at a time."""

    def __init__(self, name: str, prefixes: list[list[int]], arguments: argparse.Namespace, folder: Path) -> None:
        self.name, self.prefixes, self.seconds = name, prefixes, arguments.seconds
        self.times = folder / "times"
        self.gaps: list[list[float]] = []
        self.requests: list[int] = []
        """Prefix requests beside the decoding one, by pair."""
        self.moved: list[dict[str, float]] = []
        """What our counters say of it, by pair."""
        self.windows: list[tuple[int, int]] = []
        """When each pair began and ended, as `time.time_ns`."""
        self.connected = name != "plain"
        ssd = folder / "ssd"
        ssd.mkdir(parents=True)
        self.token_bytes = TOKEN_BYTES[arguments.dtype]
        kv_mib = self.token_bytes * arguments.tokens / 2**20
        config = None
        if self.connected:
            config = connector(
                {
                    "dram_capacity": f"{int(kv_mib * 2.6)}MiB",
                    "ssd_paths": [str(ssd)],
                    "ssd_capacity": f"{int(kv_mib * 4 * PREFIXES)}MiB",
                    "admission": "full_duplicate",
                    "promotion": 0.5,
                    "endurance": "off",  # A day's writes would be spent within minutes.
                    "io_cpus": [1],
                }
            )
            config.update(kv_connector="TimedConnector", kv_connector_module_path="timed_connector")
        prefix_blocks = (arguments.tokens + NEW_TOKENS) // BLOCK_TOKENS + 2
        hbm_blocks = (1 if self.connected else PREFIXES + 1) * prefix_blocks + DECODE_BLOCKS
        options = [
            "--max-model-len", str(max(arguments.tokens + 512, 4096)), "--max-num-batched-tokens", "2048",
            "--max-num-seqs", "4", "--num-gpu-blocks-override", str(hbm_blocks),
        ]  # fmt: skip
        env = {"SARIA_TIMES": str(self.times), "PYTHONPATH": python_path()}
        self.server = Server(
            ensure_model("llama-demo"), options, log=folder / "server.log", connector=config,
            cpus="0", dtype=arguments.dtype, kv_space_gib=4, env=env,
        )  # fmt: skip

    def start(self) -> None:
        os.sched_setaffinity(0, {0})  # Inherited by all processes of the server; our threads choose for themselves.
        self.server.start()
        os.sched_setaffinity(0, {1})
        for prefix in [*self.prefixes, *self.prefixes]:
            self.server.complete(prefix, ANSWER_TOKENS)
        self.freeze(True)

    def end(self) -> None:
        if self.server.pids():
            self.server.kill()  # A frozen server hears nothing gentler.

    def freeze(self, frozen: bool) -> None:
        for pid in self.server.pids():
            os.kill(pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def measure(self) -> None:
        """One decoding request with the others beside it."""
        self.freeze(False)
        self.server.complete(self.prefixes[-1], ANSWER_TOKENS)
        before = counters(self.server) if self.connected else {}
        began_ns = time.time_ns()
        gaps, requests = decode_beside(self.server, self.prefixes, self.seconds)
        self.gaps.append(gaps)
        self.requests.append(requests)
        after = counters(self.server) if self.connected else {}
        self.windows.append((began_ns, time.time_ns()))
        self.moved.append({name: value - before.get(name, 0) for name, value in after.items()})
        self.freeze(True)

    def median_ms(self, pair: int) -> float:
        return 1e3 * statistics.median(self.gaps[pair])

    def moved_text(self, pair: int) -> str:
        """Requests of a pair, and the tokens that each of them moved from and to the tiers."""
        moved, requests = self.moved[pair], self.requests[pair]
        parts = []
        for words, name in MOVED.items():
            if nbytes := moved.get(name, 0):
                tokens = nbytes / self.token_bytes / requests
                parts.append(f"{words} {tokens:,.0f} tokens each ({nbytes / 2**20:,.0f} MiB)")
        dropped = {name: int(value) for name, value in moved.items() if name.startswith("dropped_chunks{") and value}
        return ", ".join([f"{requests} requests", *parts, *([f"chunks not kept {dropped}"] if dropped else [])])


class Inside(NamedTuple):
    """A step of one half inside the connector's methods, in ms."""

    half: str
    step: int
    wall: float
    own: float
    """Without the time that its thread could have run and waited for its core, which others had."""
    longest: str
    """The method that took longest of its own."""


def inside(arm: Arm) -> list[Inside]:
    """The steps that ended while the arm was measured."""
    steps = []
    for line in arm.times.read_text().splitlines():
        half, step, ended_ns, spent_ns, waited_ns, longest = line.split()
        if any(began <= int(ended_ns) <= ended for began, ended in arm.windows):
            spent, waited = int(spent_ns) / 1e6, int(waited_ns) / 1e6
            steps.append(Inside(half, int(step), spent, spent - waited, longest))
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--dtype", default="float32", choices=list(TOKEN_BYTES))
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {1})
    prefixes = [make_prompt(seed, arguments.tokens + 5) for seed in range(PREFIXES)]
    with tempfile.TemporaryDirectory(prefix="saria-bench-") as folder, contextlib.ExitStack() as stack:
        arms = {name: Arm(name, prefixes, arguments, Path(folder) / name) for name in ("plain", "moving")}
        for arm in arms.values():
            stack.callback(arm.end)
            arm.start()
            print(f"{arm.name} is filled", file=sys.stderr, flush=True)
        for pair in range(arguments.pairs):
            for arm in arms.values():
                arm.measure()
                print(
                    f"pair {pair + 1} {arm.name:6} inter-token median {arm.median_ms(pair):.2f} ms  "
                    f"p99 {1e3 * quantile(arm.gaps[pair], 0.99):.2f} ms  n {len(arm.gaps[pair])}  "
                    f"{arm.moved_text(pair)}",
                    flush=True,
                )
        met = summary(arms["plain"], arms["moving"])
    return int(not met)


def spread(values: Sequence[float]) -> str:
    return f"median {statistics.median(values):.3f} ms, p99 {quantile(values, 0.99):.3f} ms, max {max(values):.3f} ms"


def summary(plain: Arm, arm: Arm) -> bool:
    """Print an arm's figures over the plain ones; whether they meet the targets."""
    medians, tails = (
        [quantile(arm.gaps[pair], share) / quantile(plain.gaps[pair], share) for pair in range(len(arm.gaps))]
        for share in (0.5, 0.99)
    )
    halves = inside(arm)
    wall, own = defaultdict(float), defaultdict(float)
    for half in halves:
        wall[half.step] += half.wall
        own[half.step] += half.own
    seconds = sum(sum(gaps) for gaps in arm.gaps)
    rate = sum(moved.get(name, 0.0) for moved in arm.moved for name in MOVED.values()) / seconds
    unused = [name for name in USED if not sum(moved.get(name, 0.0) for moved in arm.moved)]
    tokens = min(sum(map(len, one.gaps)) for one in (plain, arm))
    step_p99 = quantile(list(wall.values()), 0.99)
    ratios = [
        f"{statistics.median(values):.3f} (min {min(values):.3f}, max {max(values):.3f})" for values in (medians, tails)
    ]
    print(
        f"inter-token over plain, medians of {len(medians)} pairs: median {ratios[0]}, p99 {ratios[1]}; "
        f"{tokens:,} tokens at least in each arm; {rate / 1e6:.0f} MB/s moved; not used: {unused or 'nothing'}\n"
        f"inside our methods per step, n {len(wall)}: {spread(list(wall.values()))}; without waiting for the core: "
        f"{spread(list(own.values()))}"
    )
    for name in ("scheduler", "worker"):
        steps = sorted((half.own, half.longest) for half in halves if half.half == name)
        slowest = Counter(longest for _, longest in steps[-max(1, len(steps) // 100) :])
        methods = ", ".join(f"{method} {count}" for method, count in slowest.most_common())
        print(f"  {name} half of that: {spread([ms for ms, _ in steps])}; longest in the slowest 1 %: {methods}")
    medians_met = statistics.median(medians) <= INTER_TOKEN_MAX and statistics.median(tails) <= INTER_TOKEN_P99_MAX
    return medians_met and step_p99 <= STEP_P99_MS_MAX and rate >= MOVED_MIN and tokens >= TOKENS_MIN and not unused


if __name__ == "__main__":
    sys.exit(main())
