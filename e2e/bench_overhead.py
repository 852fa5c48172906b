"""What reloads and writes cost a request that is decoding beside them: `python e2e/bench_overhead.py`.

vLLM's processes on core 0; our threads and the client on core 1. One request decodes; beside it, every second,
a request with an 8k-token prefix starts. Three arms, interleaved; the servers of the others are frozen meanwhile:

  plain    no connector; HBM holds every prefix, so nothing is computed beside one block, and nothing moves
  reload   our connector; HBM holds one prefix, so every request reloads its own from DRAM and SSD
  write    our connector; HBM holds every prefix, DRAM and SSD less than two, so every request stores and persists
           most of its own

Printed: inter-token time of the decoding request, time inside the connector's methods per engine step (both halves
summed), bytes moved.
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
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench_ttft import ttft_s
from models import ensure_model
from reloading import HERE, connector, counters, make_prompt
from server import Server

BLOCK_TOKENS = 128
PREFIXES = 2
DECODE_BLOCKS = 24
"""HBM blocks beside the prefixes: for the decoding request and the last block of the others."""

TOKEN_BYTES = {dtype: 12 * 2 * 4 * 64 * size for dtype, size in (("bfloat16", 2), ("float32", 4))}
"""KV bytes per token of llama-136m."""
INTER_TOKEN_MAX = 1.15
STEP_P99_MS_MAX = 2.0


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def decode_beside(server: Server, prefixes: list[list[int]], seconds: float) -> list[float]:
    """Gaps between the tokens of one decoding request while a prefix request starts every second."""
    stop = threading.Event()

    def others() -> None:
        number, due = 0, time.monotonic()
        while not stop.is_set():
            ttft_s(server, prefixes[number % len(prefixes)])
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
    return [after - before for before, after in itertools.pairwise(stamps[20:])]


class Arm:
    """One server, filled once, frozen while another one is measured: one engine runs at a time."""

    def __init__(self, name: str, prefixes: list[list[int]], arguments: argparse.Namespace, folder: Path) -> None:
        self.name, self.prefixes, self.seconds = name, prefixes, arguments.seconds
        self.times = folder / "times"
        self.gaps: list[list[float]] = []
        self.steps: list[float] = []
        self.connected = name != "plain"
        ssd = folder / "ssd"
        ssd.mkdir(parents=True)
        kv_mib = TOKEN_BYTES[arguments.dtype] * arguments.tokens / 2**20
        config = None
        if self.connected:
            tight = name == "write"
            config = connector(
                {
                    "dram_capacity": f"{int(kv_mib * 1.4)}MiB",
                    "ssd_paths": [str(ssd)],
                    "ssd_capacity": f"{int(kv_mib * (1.2 if tight else 2 * PREFIXES))}MiB",
                    "admission": "full_duplicate",
                    "io_cpus": [1],
                }
            )
            config.update(kv_connector="TimedConnector", kv_connector_module_path="timed_connector")
        prefix_blocks = arguments.tokens // BLOCK_TOKENS + 2
        hbm_blocks = (1 if name == "reload" else PREFIXES) * prefix_blocks + DECODE_BLOCKS
        options = [
            "--max-model-len", str(arguments.tokens + 512), "--max-num-batched-tokens", "2048", "--max-num-seqs", "4",
            "--num-gpu-blocks-override", str(hbm_blocks),
        ]  # fmt: skip
        env = {"SARIA_TIMES": str(self.times), "PYTHONPATH": os.pathsep.join([str(HERE), *_python_path()])}
        self.server = Server(
            ensure_model("llama-136m"), options, log=folder / "server.log", connector=config,
            cpus="0", dtype=arguments.dtype, kv_space_gib=4, env=env,
        )  # fmt: skip

    def start(self) -> None:
        os.sched_setaffinity(0, {0})  # Inherited by all processes of the server; our threads choose for themselves.
        self.server.start()
        os.sched_setaffinity(0, {1})
        for prefix in [*self.prefixes, *self.prefixes]:
            ttft_s(self.server, prefix)
        self.freeze(True)

    def freeze(self, frozen: bool) -> None:
        for pid in self.server.pids():
            os.kill(pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def measure(self) -> dict[str, float]:
        """One decoding request with the others beside it; returns what our counters say of it."""
        self.freeze(False)
        ttft_s(self.server, self.prefixes[-1])
        before = counters(self.server) if self.connected else {}
        lines_before = len(_read(self.times))
        self.gaps.append(decode_beside(self.server, self.prefixes, self.seconds))
        after = counters(self.server) if self.connected else {}
        spent: dict[int, float] = defaultdict(float)
        for step, nanoseconds in _read(self.times)[lines_before:]:
            spent[step] += nanoseconds / 1e6
        self.steps += spent.values()
        self.freeze(True)
        return {name: value - before.get(name, 0) for name, value in after.items()}

    def median_ms(self, pair: int) -> float:
        return 1e3 * statistics.median(self.gaps[pair])


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _read(path: Path) -> list[tuple[int, int]]:
    """(step, nanoseconds) of both halves."""
    if not path.exists():
        return []
    rows = (line.split() for line in path.read_text().splitlines())
    return [(int(step), int(nanoseconds)) for _, step, nanoseconds in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16", choices=list(TOKEN_BYTES))
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {1})
    prefixes = [make_prompt(seed, arguments.tokens + 5) for seed in range(PREFIXES)]
    with tempfile.TemporaryDirectory(prefix="saria-bench-") as folder, contextlib.ExitStack() as stack:
        arms = {name: Arm(name, prefixes, arguments, Path(folder) / name) for name in ("plain", "reload", "write")}
        for arm in arms.values():
            stack.callback(arm.server.kill)
            arm.start()
            print(f"{arm.name} is filled", file=sys.stderr, flush=True)
        for pair in range(arguments.pairs):
            for arm in arms.values():
                moved = arm.measure()
                mib = {name: round(value / 2**20) for name, value in moved.items() if "bytes" in name and value}
                print(
                    f"pair {pair + 1} {arm.name:6} tokens {len(arm.gaps[pair])}  "
                    f"inter-token median {arm.median_ms(pair):.2f} ms  "
                    f"p99 {1e3 * quantile(arm.gaps[pair], 0.99):.2f} ms  MiB moved {mib}",
                    flush=True,
                )
    met = [summary(arms["plain"], arms[name]) for name in ("reload", "write")]
    return int(not all(met))


def summary(plain: Arm, arm: Arm) -> bool:
    """Print an arm's figures over the plain ones; whether they meet the targets."""
    ratios = [arm.median_ms(pair) / plain.median_ms(pair) for pair in range(len(arm.gaps))]
    p99 = quantile(arm.steps, 0.99)
    print(
        f"{arm.name}: inter-token median over plain: median of {len(ratios)} pairs {statistics.median(ratios):.3f} "
        f"(min {min(ratios):.3f}, max {max(ratios):.3f}); inside our methods per step: median "
        f"{statistics.median(arm.steps):.3f} ms, p99 {p99:.3f} ms, max {max(arm.steps):.3f} ms, n {len(arm.steps)}"
    )
    return statistics.median(ratios) <= INTER_TOKEN_MAX and p99 <= STEP_P99_MS_MAX


if __name__ == "__main__":
    sys.exit(main())
