"""Agent sessions whose KV does not fit in HBM, served four ways: `make demo`.

A small random-weight Llama is served by vLLM with an HBM for about one session. The same sessions are replayed
without a connector, and with SariaConnector under three admission policies. Reloads run at emulated rates, for DRAM and
SSD of a machine without a GPU are too alike: see INGRESS and DRIVE. One table and one picture come out;
afterwards sampled turns are asked again in every configuration with HBM emptied first, and the answers compared.

Exit status 0: saria hit SSD, wrote less than full_duplicate, and all answers are the same. 1: not so. 2: bad usage.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import demo_report
from models import ensure_model
from saria_vllm.cli.replay import FALLBACK_VOCAB, add_arguments, make_plan, replay, wanted_sessions
from saria_vllm.cli.replay_drive import ReplayPlan, ServerInfo, parse_counters
from saria_vllm.engine.emulated import ENVIRONMENT
from saria_vllm.errors import SariaError
from server import Server, ServerDied

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT.parent / "shared" / "traces" / "weka_small_48.jsonl.gz"

PLAIN = "no connector"
SARIA_ARMS = ("dram_only", "full_duplicate", "saria")
ARMS = (PLAIN, *SARIA_ARMS)

# Two tokens for each trace block of 64. Blocks are 128 tokens, 5 MiB of KV with this model, and a chunk is one block.
# HBM holds one longest prompt (18 blocks); DRAM about a third of what the sessions come to; SSD all of it.
MODEL = "llama-demo"
SCALE = 1 / 32
PROMPT_TOKENS_MAX = 2240
CONTEXT_TOKENS = 2304
HBM_BLOCKS = 20
DRAM = "136MiB"
SSD = "4GiB"
OUTPUT_TOKENS = 8
ARRIVAL_GAP_S = 2.0
INGRESS, DRIVE = "800MB/s", "400MB/s"
"""Of reloads: about five times what prefill makes of KV, and half of that."""
SAMPLE = 8
CHECK_TOKENS = 16
SETTLE_S = 20.0


def main() -> int:
    """Run the arms, print, compare."""
    arguments = _arguments()
    if set(arguments.arms) & set(SARIA_ARMS) and importlib.util.find_spec("saria_connector") is None:
        print("demo: saria_connector is not installed here; run `make demo`, or --arms 'no connector'", file=sys.stderr)
        return 2
    options = _replay_options(arguments)
    try:
        _check(options)
    except SariaError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = ensure_model(MODEL)
    results: list[dict[str, Any]] = []
    try:
        for number, arm in enumerate(arguments.arms, 1):
            _say(began, f"[{number}/{len(arguments.arms)}] {arm}: starting vLLM")
            results.append(_run_arm(arm, model, options, arguments.out, began))
    except (ServerDied, SariaError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    for result in results:
        demo_report.add_same_turns(result, results[0])
    demo_report.print_table(results)
    problems = demo_report.judge(results) if tuple(arguments.arms) == ARMS else []
    (arguments.out / "demo.json").write_text(json.dumps(results, indent=1))
    demo_report.draw(results, arguments.out / "demo.png")
    print(f"picture: {arguments.out / 'demo.png'}   numbers: {arguments.out / 'demo.json'}")
    print(f"the demo took {time.monotonic() - began:.0f} s")
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo", help="default %(default)s")
    parser.add_argument("--trace", type=Path, help="trace file (default: the shared one, else seeded sessions)")
    parser.add_argument("--seeded", action="store_true", help="use seeded sessions even where the trace is")
    parser.add_argument(
        "--arms", nargs="+", default=ARMS, choices=ARMS, help="only some configurations, without the verdict"
    )
    return parser.parse_args()


def _replay_options(arguments: argparse.Namespace) -> list[str]:
    trace = arguments.trace or (TRACE if TRACE.exists() and not arguments.seeded else None)
    sessions, turns = (6, 12) if trace else (8, 10)
    source = ["--trace", str(trace)] if trace else []
    print(
        f"{sessions} sessions of {turns} turns from {trace or 'the seeded generator'}, "
        f"every 64 tokens of the trace become {round(64 * SCALE)}; reloads at emulated rates: "
        f"ingress {INGRESS}, SSD {DRIVE}",
        flush=True,
    )
    return [
        *source, "--sessions", str(sessions), "--max-turns", str(turns), "--min-turns", str(turns),
        "--scale", str(SCALE), "--max-prompt-tokens", str(PROMPT_TOKENS_MAX), "--arrival-gap", str(ARRIVAL_GAP_S),
        "--output-tokens", str(OUTPUT_TOKENS), "--concurrency", "1",
    ]  # fmt: skip


def _check(options: list[str]) -> None:
    """What each replay does before its first request, so that nothing is started for a trace that cannot be replayed.

    Raises:
        SariaError: it cannot be read, or nothing of it fits.
    """
    arguments = parsed(options)
    make_plan(arguments, wanted_sessions(arguments), ServerInfo(MODEL, CONTEXT_TOKENS, FALLBACK_VOCAB[1]))


def parsed(options: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(options)


def _run_arm(arm: str, model: Path, options_of_replay: list[str], out: Path, began: float) -> dict[str, Any]:
    """Serve, replay, ask the sample again; SSD files are removed afterwards."""
    name = arm.replace(" ", "_")
    ssd = out / f"ssd-{name}"
    shutil.rmtree(ssd, ignore_errors=True)
    if arm in SARIA_ARMS:
        ssd.mkdir(mode=0o700)
    options = [
        "--max-model-len", str(CONTEXT_TOKENS), "--max-num-batched-tokens", str(CONTEXT_TOKENS),
        "--num-gpu-blocks-override", str(HBM_BLOCKS), "--block-size", "128", "--max-num-seqs", "4",
    ]  # fmt: skip
    try:
        env = {ENVIRONMENT: f"{INGRESS},{DRIVE}"}
        server = Server(model, options, log=out / f"{name}.log", connector=connector_config(arm, ssd), env=env)
        with server:
            _say(began, "replaying")
            plan, report = replay_all(server.url, options_of_replay)
            totals = settled(server)
            _say(began, f"asking {SAMPLE} turns again, HBM emptied before each")
            answers = _ask_again(server, plan, report["turns"])
            checked = settled(server)
    finally:
        shutil.rmtree(ssd, ignore_errors=True)
    return {"arm": arm, "report": report, "counters": totals, "answers": answers, "counters_after_check": checked}


def connector_config(arm: str, ssd: Path) -> dict[str, Any] | None:
    """`--kv-transfer-config` of a configuration."""
    if arm not in SARIA_ARMS:
        return None
    extra: dict[str, Any] = {"dram_capacity": DRAM, "admission": {"policy": arm}}
    if arm != "dram_only":
        extra |= {"ssd_paths": [str(ssd)], "ssd_capacity": SSD}
    return {
        "kv_connector": "SariaConnector",
        "kv_connector_module_path": "saria_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def replay_all(url: str, options: list[str]) -> tuple[ReplayPlan, dict[str, Any]]:
    """What `saria replay` does, keeping the prompts."""
    plan, report = replay(parsed(["--url", url, *options]))
    if report["failed"]:
        errors = [turn["error"] for turn in report["turns"] if turn["error"]]
        raise ServerDied(f"{report['failed']} requests failed, the first with: {errors[0]}")
    return plan, report


def settled(server: Server) -> dict[str, float]:
    """The server's counters once writes in the background are done: they are reported with the next step."""
    deadline = time.monotonic() + SETTLE_S
    before: dict[str, float] | None = None
    while True:
        server.complete([3, 4, 5], 1)
        now = parse_counters(server.metrics())
        if now == before or time.monotonic() > deadline:
            return now
        before = now
        time.sleep(0.5)


def _ask_again(server: Server, plan: ReplayPlan, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers to a sample of turns, each asked alone with nothing in HBM."""
    sessions = {session.session: session for session in plan.sessions}
    step = max(1, len(turns) // SAMPLE)
    answers = []
    for index in range(len(turns) - 1, -1, -step)[:SAMPLE]:
        turn = turns[index]
        prompt = plan.maker.prompt(sessions[turn["session"]].requests[turn["turn"]], turn["turn"])
        server.reset_prefix_cache()
        answer = server.complete(prompt, CHECK_TOKENS)
        answers.append({"turn": index, "token_ids": answer.token_ids, "cached_tokens": answer.cached_tokens})
    return answers


def _say(began: float, text: str) -> None:
    print(f"{time.monotonic() - began:5.0f} s  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
