"""What reloads and writes cost a request that is decoding beside them: `python e2e/bench_overhead.py`.

vLLM's threads on core 0; ours, the API server and the client on core 1. One request decodes; beside it, every second,
a request with an 8k-token prefix starts. Three arms, interleaved:

  plain    no connector; HBM holds every prefix, so nothing is computed beside one block, and nothing moves
  reload   our connector; HBM holds one prefix, so every request reloads its own from DRAM or SSD
  write    our connector; HBM holds every prefix, DRAM and SSD less than two, so every request stores and persists
           its own

Printed: inter-token time of the decoding request, time inside the connector's methods per engine step (both halves
summed), bytes moved.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_ttft import ttft_s
from models import ensure_model
from reloading import HERE, connector, counters, make_prompt
from server import Server

BLOCK_TOKENS = 128
PREFIXES = 3
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
        "model": server.model, "prompt": make_prompt(4242, 64), "max_tokens": 4000, "temperature": 0.0,
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
    def __init__(self, name: str, tokens: int, arguments: argparse.Namespace, folder: Path) -> None:
        self.name, self.folder, self.arguments = name, folder, arguments
        self.times = folder / "times"
        kv_mib = 12 * 2 * 4 * 64 * (2 if arguments.dtype == "bfloat16" else 4) * tokens / 2**20
        ssd = folder / "ssd"
        ssd.mkdir(parents=True)
        blocks = tokens // BLOCK_TOKENS + 2
        hbm_prefixes = 1 if name == "reload" else PREFIXES
        self.config: dict[str, Any] | None = None
        if name != "plain":
            tight = name == "write"
            self.config = connector(
                {
                    "dram_capacity": f"{int(kv_mib * (1.5 if tight else 2))}MiB",
                    "ssd_paths": [str(ssd)],
                    "ssd_capacity": f"{int(kv_mib * (1.3 if tight else 2 * PREFIXES))}MiB",
                    "admission": "full_duplicate",
                    "io_cpus": [1],
                }
            )
            self.config.update(kv_connector="TimedConnector", kv_connector_module_path="timed_connector")
        self.options = [
            "--max-model-len", "16384", "--max-num-batched-tokens", "2048", "--max-num-seqs", "4",
            "--num-gpu-blocks-override", str(hbm_prefixes * blocks + 16384 // BLOCK_TOKENS),
        ]  # fmt: skip

    def run(self, prefixes: list[list[int]]) -> tuple[list[float], dict[str, float], list[float]]:
        """Gaps in s, counter differences, and ms inside our methods by engine step."""
        self.times.unlink(missing_ok=True)
        env = {"SARIA_TIMES": str(self.times), "PYTHONPATH": os.pathsep.join([str(HERE), *_python_path()])}
        with Server(
            ensure_model("llama-136m"), self.options, log=self.folder / "server.log", connector=self.config,
            cpus="0", dtype=self.arguments.dtype, kv_space_gib=4, env=env,
        ) as server:  # fmt: skip
            for prefix in [*prefixes, *prefixes]:
                ttft_s(server, prefix)
            before = counters(server) if self.config else {}
            steps_before = _lines(self.times)
            gaps = decode_beside(server, prefixes, self.arguments.seconds)
            after = counters(server) if self.config else {}
        spent: dict[int, float] = defaultdict(float)
        for role, step, nanoseconds in _read(self.times)[steps_before:]:
            del role
            spent[step] += nanoseconds / 1e6
        return gaps, {name: value - before.get(name, 0) for name, value in after.items()}, list(spent.values())


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _lines(path: Path) -> int:
    return len(_read(path))


def _read(path: Path) -> list[tuple[str, int, int]]:
    if not path.exists():
        return []
    rows = (line.split() for line in path.read_text().splitlines())
    return [(role, int(step), int(nanoseconds)) for role, step, nanoseconds in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--arms", nargs="+", default=["plain", "reload", "write"])
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {1})
    prefixes = [make_prompt(seed, arguments.tokens + 5) for seed in range(PREFIXES)]
    medians: dict[str, list[float]] = defaultdict(list)
    steps: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="saria-bench-") as folder:
        for pair in range(arguments.pairs):
            for name in arguments.arms:
                arm = Arm(name, arguments.tokens, arguments, Path(folder) / f"{name}{pair}")
                gaps, moved, spent = arm.run(prefixes)
                medians[name].append(statistics.median(gaps))
                steps[name] += spent
                mib = {key: round(value / 2**20) for key, value in moved.items() if "bytes" in key and value}
                print(
                    f"pair {pair + 1} {name:8} tokens {len(gaps)}  inter-token median {1e3 * medians[name][-1]:.2f} ms"
                    f"  p99 {1e3 * quantile(gaps, 0.99):.2f} ms  MiB moved {mib}",
                    flush=True,
                )
    fine = True
    for name in ("reload", "write"):
        if name in medians and "plain" in medians:
            ratios = [ours / plain for ours, plain in zip(medians[name], medians["plain"], strict=True)]
            p99 = quantile(steps[name], 0.99)
            print(
                f"{name}: inter-token median over plain: median of {len(ratios)} pairs {statistics.median(ratios):.3f} "
                f"(min {min(ratios):.3f}, max {max(ratios):.3f}); inside our methods per step: median "
                f"{statistics.median(steps[name]):.3f} ms, p99 {p99:.3f} ms, max {max(steps[name]):.3f} ms, "
                f"n {len(steps[name])}"
            )
            fine &= statistics.median(ratios) <= INTER_TOKEN_MAX and p99 <= STEP_P99_MS_MAX
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
