"""How much of what was loaded from SSD goes back to DRAM: `auto` beside fixed ratios, on real agent sessions.

    python e2e/bench_promotion.py --trace ../shared/traces/weka_350.jsonl.gz [--promotion R]... [--admission P]
        [--starts 4h]... [--chunk-tokens 64] [--out FILE]

Each run is what `saria simulate` does with 2.2M tokens of DRAM and 32M of SSD replaced by LRU. SSDs are half as fast as
the ingress and both streams overlap ideally: a hit takes T = max(n_ssd / B_ssd, (n_ssd + n_dram) / B_ingress), in units
of the time in which a thousand tokens cross the ingress. Larger chunks are quicker and change little. Runs found in
FILE are not repeated.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from rows import Row, Rows
from saria_vllm.cli.simulate import parse_admission, parse_seconds
from saria_vllm.sim.arrivals import arrivals_with_ids, starts
from saria_vllm.sim.formats import Trace, read_trace
from saria_vllm.sim.simulator import SimConfig, Simulator

FIXED = ["0.0", "0.25", "0.5", "0.75", "1.0"]
STARTS = ["12h", "4h", "2h"]
DRAM_TOKENS, SSD_TOKENS, SSD_INGRESS_RATIO = 2_200_000, 32_000_000, 0.5


def simulate(trace: Trace, key: tuple[int, str, str, str], seed: int) -> Row:
    """`key`: tokens of a chunk, admission, starts, promotion."""
    chunk_tokens, admission, window, promotion = key
    began = time.monotonic()
    config = SimConfig(
        chunk_tokens, DRAM_TOKENS, SSD_TOKENS, parse_admission(admission),
        promotion if promotion == "auto" else float(promotion),
    )  # fmt: skip
    simulator = Simulator(config)
    start_s = starts(len(trace.sessions), parse_seconds(window), seed)
    served = simulator.run(arrivals_with_ids(trace, start_s, config.chunk_tokens))
    hits = np.array([(request.dram_tokens, request.ssd_tokens) for request in served], np.float64)
    times = np.sort(np.maximum(hits[:, 1] / SSD_INGRESS_RATIO, hits.sum(axis=1))[hits.any(axis=1)])[::-1] / 1000
    rates = simulator.result.rates()
    return {
        "transfer_mean": float(times.mean()),
        "slowest_5": float(times[: max(1, len(times) // 20)].mean()),
        "slowest_10": float(times[: max(1, len(times) // 10)].mean()),
        "dram_evicted_tokens": rates["dram_evicted_tokens"],
        "ssd_write_tokens": rates["ssd_write_tokens"],
        "hit_rate": rates["hit_rate"],
        "wall_s": time.monotonic() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--promotion", action="append", default=[])
    parser.add_argument("--admission", default="full_duplicate")
    parser.add_argument("--starts", action="append", default=[])
    parser.add_argument("--start-seed", type=int, default=1)
    parser.add_argument("--chunk-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("out/promotion.jsonl"))
    arguments = parser.parse_args()
    rows = Rows(arguments.out)
    trace = read_trace(arguments.trace)
    promotions = [text if text == "auto" else str(float(text)) for text in arguments.promotion] or [*FIXED, "auto"]
    for promotion in promotions:
        for window in arguments.starts or STARTS:
            wanted = (arguments.chunk_tokens, arguments.admission, window, promotion)
            if wanted in rows:
                continue
            row = simulate(trace, wanted, arguments.start_seed)
            rows.add(wanted, row)
            print(f"{wanted}: mean {row['transfer_mean']:.2f}, {row['wall_s']:.0f} s", file=sys.stderr, flush=True)
    report(rows, arguments.chunk_tokens, arguments.admission)


def report(rows: Rows, chunk_tokens: int, admission: str) -> None:
    print(
        "| starts | promotion | mean T | over best fixed | slowest 5 % | slowest 10 % | DRAM evictions, M tokens "
        "| hit % | written, M tokens |"
    )
    print("|---|" + "---|" * 8)
    for window in STARTS:
        found = {promotion: rows.get((chunk_tokens, admission, window, promotion)) for promotion in (*FIXED, "auto")}
        fixed = [row["transfer_mean"] for promotion, row in found.items() if row is not None and promotion != "auto"]
        for promotion, row in found.items():
            if row is None:
                continue
            best = f"{row['transfer_mean'] / min(fixed):.3f}" if fixed else "-"
            print(
                f"| {window} | {promotion} | {row['transfer_mean']:.2f} | {best} | {row['slowest_5']:.1f} "
                f"| {row['slowest_10']:.1f} | {row['dram_evicted_tokens'] / 1e6:.0f} | {100 * row['hit_rate']:.2f} "
                f"| {row['ssd_write_tokens'] / 1e6:.1f} |"
            )


if __name__ == "__main__":
    main()
