"""Admission policies on real agent sessions: hit rate and SSD writes at three densities, three draws of starts each.

    python e2e/bench_policy.py --trace ../shared/traces/weka_350.jsonl.gz [--policy P]... [--jobs 2] [--out FILE]

Each run is `saria simulate` with 64-token chunks, 2.2M tokens of DRAM, 32M of SSD replaced by LRU and full promotion;
"gap" is the share of the hit rate between `saria` and the oracle that a policy closes. P may have more options of
`simulate` behind it, such as "return --hints stop". Runs found in FILE are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

from rows import Row, Rows

POLICIES = [
    "dram_only", "full_duplicate", "saria", "score", "return", "return:threshold=0.66", "return:threshold=0.8",
    "return --hints session", "return --hints stop", "return --hints both", "oracle",
]  # fmt: skip
STARTS, SEEDS = ["12h", "4h", "2h"], [1, 2, 3]


def simulate(trace: str, key: tuple[str, str, int]) -> Row:
    policy, starts, seed = key
    command = [
        sys.executable, "-m", "saria_vllm.cli", "simulate", "--trace", trace, "--starts", starts,
        "--start-seed", str(seed), "--dram-tokens", "2200000", "--ssd-tokens", "32000000",
        "--json", "--admission", *policy.split(),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    row: Row = json.loads(done.stdout)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--policy", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/policy.jsonl"))
    arguments = parser.parse_args()
    rows = Rows(arguments.out)
    policies = arguments.policy or POLICIES
    wanted = [(policy, starts, seed) for seed in SEEDS for policy in policies for starts in STARTS]
    missing = [key for key in wanted if key not in rows]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for key, row in zip(missing, pool.map(lambda key: simulate(arguments.trace, key), missing), strict=True):
            rows.add(key, row)
            print(f"{key}: hit {row['hit_rate']:.2%}, {row['ssd_write_tokens'] / 1e6:.1f}M written", file=sys.stderr)
    report(rows)


def report(rows: Rows) -> None:
    policies = list(dict.fromkeys(policy for policy, _, _ in rows))

    def average(policy: str, name: str, starts: str) -> float:
        return mean(rows[policy, starts, seed][name] for seed in SEEDS if (policy, starts, seed) in rows)

    def overall(policy: str, name: str) -> float:
        return mean(average(policy, name, starts) for starts in STARTS)

    print(
        "| policy | " + " | ".join(f"{starts} hit % / written M" for starts in STARTS) + " | writes / saria | gap % |"
    )
    print("|---|" + "---|" * (len(STARTS) + 2))
    for policy in policies:
        cells = [
            f"{100 * average(policy, 'hit_rate', starts):.1f} / {average(policy, 'ssd_write_tokens', starts) / 1e6:.1f}"
            for starts in STARTS
        ]
        hit, writes = overall(policy, "hit_rate"), overall(policy, "ssd_write_tokens")
        if {"saria", "oracle"} <= set(policies):
            low, high = overall("saria", "hit_rate"), overall("oracle", "hit_rate")
            cells += [f"{writes / overall('saria', 'ssd_write_tokens'):.3f}", f"{100 * (hit - low) / (high - low):.1f}"]
        print(f"| `{policy}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
