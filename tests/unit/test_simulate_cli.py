"""`saria simulate`: its JSON, its table, its picture, and what it says to impossible wishes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from saria_vllm.cli import main
from saria_vllm.cli.simulate import GHOSTS_UNBOUNDED, parse_admission, parse_seconds
from saria_vllm.config import AdmissionConfig
from saria_vllm.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
KEYS = [
    "requests", "prompt_tokens", "hit_rate", "dram_hit_rate", "ssd_hit_rate", "ssd_write_tokens",
    "ssd_second_chance_tokens", "ssd_write_amplification", "ssd_writes_never_read_fraction",
    "dram_only_request_fraction", "dram_evicted_tokens", "elapsed_s",
    "chunk_accesses_per_s",
]  # fmt: skip
TIMED = ["ttft_mean_s", "ttft_p99_s", "reload_mean_s", "reload_p95_s", "ssd_tb_per_day", "drive_life_years"]


def session(number, first, turns=5, gap_s=100.0):
    """A session of one thread whose prompt grows from four blocks by one a turn."""
    requests = [{"t": 0.0, "th": 0, "in": 260, "out": 3, "keep": 0, "add": [[first, 4]]}]
    requests += [
        {"t": gap_s * turn, "th": 0, "in": 260 + 64 * turn, "out": 3, "keep": 3 + turn, "add": [[first + 3 + turn, 1]]}
        for turn in range(1, turns)
    ]
    return {"id": f"s{number}", "block_size": 64, "tool_tokens": 0, "system_tokens": 0, "requests": requests}


@pytest.fixture
def trace(tmp_path):
    """Three sessions of five turns."""
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(session(number, 1)) for number in range(3)) + "\n")
    return str(path)


def simulate(capsys, trace, *options, dram="512"):
    status = main(["simulate", "--trace", trace, "--dram-tokens", dram, *options])
    output = capsys.readouterr()
    return status, output.out, output.err


def as_json(capsys, trace, *options, **more):
    status, out, _ = simulate(capsys, trace, *options, "--json", **more)
    assert status == 0
    return json.loads(out)


def test_the_keys_are_those_promised(capsys, trace):
    found = as_json(capsys, trace, "--ssd-tokens", "6400", "--starts", "1h")
    assert list(found) == ["admission", "hints", "skipped_lines", *KEYS]
    assert (found["requests"], found["prompt_tokens"]) == (15, 3 * sum(260 + 64 * turn for turn in range(5)))
    timed = as_json(capsys, trace, "--hardware", "h100-sxm-pcie5", "--model", "llama-3.3-70b")
    assert set(timed) == {"admission", "hints", "skipped_lines", *KEYS, *TIMED, "kv_bytes_token"}
    assert timed["kv_bytes_token"] == 327_680
    assert timed["drive_life_years"] is None, "nothing was written"


def test_hits_of_a_trace_that_fits(capsys, trace):
    found = as_json(capsys, trace, dram="64000")
    hits = 3 * sum(64 * (3 + turn) for turn in range(1, 5))
    assert found["hit_rate"] == pytest.approx(hits / found["prompt_tokens"])
    assert found["dram_hit_rate"] == found["hit_rate"]
    assert found["dram_evicted_tokens"] == found["ssd_write_tokens"] == 0
    assert found["elapsed_s"] > 0
    assert found["chunk_accesses_per_s"] == pytest.approx(3 * sum(range(4, 9)) / found["elapsed_s"])


def test_the_start_seed_decides(capsys, trace):
    def hits(seed):
        found = as_json(capsys, trace, "--starts", "500s", "--start-seed", seed)
        return {key: value for key, value in found.items() if key not in ("elapsed_s", "chunk_accesses_per_s")}

    assert hits("3") == hits("3")
    assert len({json.dumps(hits(str(seed))) for seed in range(4)}) > 1


def test_sessions_limits_the_sessions(capsys, trace):
    assert as_json(capsys, trace, "--sessions", "2")["requests"] == 10
    assert as_json(capsys, trace, "--sessions", "99")["requests"] == 15


def test_one_admission_is_a_row_and_several_are_rows_with_the_oracle(capsys, trace):
    assert as_json(capsys, trace, "--admission", "dram_only")["admission"] == "dram_only"
    several = ["--admission", "saria", "--admission", "saria:evictions=1", "--admission", "full_duplicate"]
    rows = as_json(capsys, trace, *several, "--ssd-tokens", "64000", "--starts", "500s")["rows"]
    assert [row["admission"] for row in rows] == ["saria", "saria:evictions=1", "full_duplicate", "oracle"]
    saria, eager, full, oracle = rows
    assert saria["ssd_write_tokens"] < full["ssd_write_tokens"]
    assert saria["hit_rate"] < eager["hit_rate"] <= full["hit_rate"]
    assert oracle["hit_rate"] == full["hit_rate"]
    assert oracle["ssd_writes_never_read_fraction"] == 0 < full["ssd_writes_never_read_fraction"]


def test_the_default_is_what_is_shipped(capsys, trace):
    found = as_json(capsys, trace)
    assert found["admission"] == AdmissionConfig().policy
    assert parse_admission("default") == AdmissionConfig(ghosts_max=GHOSTS_UNBOUNDED)


def test_chunk_tokens_and_promotion_and_eviction_reach_the_simulator(capsys, trace):
    wide = as_json(capsys, trace, "--chunk-tokens", "128", dram="64000")
    assert wide["hit_rate"] < as_json(capsys, trace, dram="64000")["hit_rate"]
    ssd = ["--ssd-tokens", "640", "--starts", "500s", "--admission", "full_duplicate"]
    runs = {(promotion, kind): as_json(capsys, trace, *ssd, "--promotion", promotion, "--ssd-eviction", kind)
            for promotion in ("0", "1") for kind in ("lru", "segment")}  # fmt: skip
    assert runs["0", "lru"]["dram_evicted_tokens"] < runs["1", "lru"]["dram_evicted_tokens"]
    assert runs["1", "lru"]["ssd_write_tokens"] != runs["1", "segment"]["ssd_write_tokens"]


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ([], "0.5"),
        (["--ssd-ingress-ratio", "0.25"], "0.75"),
        (["--hardware", "h200", "--model", "llama-3.3-70b", "--ssd-ingress-ratio", "2"], "0"),
    ],
)
def test_auto_promotes_what_the_rates_say(capsys, trace, options, share):
    ssd = ["--ssd-tokens", "64000", "--starts", "500s", "--admission", "full_duplicate"]
    auto = as_json(capsys, trace, *ssd, *options, "--promotion", "auto")
    fixed = as_json(capsys, trace, *ssd, *options, "--promotion", share)
    assert auto["dram_hit_rate"] == fixed["dram_hit_rate"]
    assert auto["dram_evicted_tokens"] == fixed["dram_evicted_tokens"]


def test_hints_are_said_and_reach_the_simulator(capsys, trace):
    ssd = ["--ssd-tokens", "64000", "--starts", "500s"]
    runs = {mode: as_json(capsys, trace, *ssd, "--hints", mode) for mode in ("none", "session", "stop", "both")}
    assert {mode: row["hints"] for mode, row in runs.items()} == {mode: mode for mode in runs}
    assert as_json(capsys, trace, *ssd)["hints"] == "none"
    assert runs["stop"]["ssd_write_tokens"] < runs["none"]["ssd_write_tokens"]


def test_coordination_makes_reloads_faster(capsys, trace):
    options = ["--ssd-tokens", "64000", "--starts", "500s", "--admission", "full_duplicate", "--promotion", "0.5",
               "--hardware", "h100-sxm-pcie5", "--model", "llama-3.3-70b"]  # fmt: skip
    on, off = (as_json(capsys, trace, *options, "--coordination", way) for way in ("on", "off"))
    assert on["reload_mean_s"] < off["reload_mean_s"]
    assert on["hit_rate"] == off["hit_rate"]
    assert as_json(capsys, trace, *options)["reload_mean_s"] == on["reload_mean_s"]


BUDGET = ["--ssd-tokens", "64000", "--starts", "500s", "--admission", "full_duplicate", "--kv-bytes-per-token", "1000"]


def test_a_rated_capacity_holds_writes_to_a_budget(capsys, trace):
    free = as_json(capsys, trace, *BUDGET)
    assert "ssd_bytes_by_day" not in free
    ample = as_json(capsys, trace, *BUDGET, "--rated-capacity", "1TB")
    assert ample["ssd_write_tokens"] == free["ssd_write_tokens"] > 0
    assert (ample["write_budget_bytes_per_day"], ample["write_cap_bytes_per_24h"]) == (0.75e12, 1e12)
    assert ample["ssd_bytes_by_day"] == [1000 * ample["ssd_write_tokens"]]
    assert ample["drive_life_years"] > 1000
    wear = ["--rated-capacity", "10MB", "--target-dwpd", "0.4", "--hard-cap-dwpd", "0.5"]
    tight = as_json(capsys, trace, *BUDGET, *wear)
    assert (tight["write_budget_bytes_per_day"], tight["write_cap_bytes_per_24h"]) == (4e6, 5e6)
    assert 0 < tight["ssd_bytes_24h_max"] == sum(tight["ssd_bytes_by_day"]) <= 0.05 * 4e6
    assert tight["ssd_write_tokens"] < free["ssd_write_tokens"]


def test_kv_bytes_are_the_models_unless_given(capsys, trace):
    rated = ["--rated-capacity", "3.84TB", "--model", "llama-3.3-70b"]
    assert as_json(capsys, trace, *rated)["kv_bytes_token"] == 327_680
    assert as_json(capsys, trace, *rated, "--hardware", "h200", "--kv-bytes-per-token", "99")["kv_bytes_token"] == 99


def test_days_repeat_as_other_sessions_and_the_load_steps(capsys, trace):
    once = as_json(capsys, trace, dram="640000")
    found = as_json(capsys, trace, "--repeat-days", "3", "--load-step", "1:2", dram="640000")
    assert found["requests"] == (1 + 2 + 2) * once["requests"]
    assert found["hit_rate"] == pytest.approx(once["hit_rate"]), "a day does not find what was there the day before"
    rows = as_json(capsys, trace, "--repeat-days", "2", "--admission", "saria", "--admission", "return")["rows"]
    assert [row["admission"] for row in rows] == ["saria", "return"]


def test_load_steps_may_be_given_in_any_order(capsys, trace):
    days = ["--repeat-days", "5", "--load-step"]
    found = [
        as_json(capsys, trace, *days, *steps)["requests"]
        for steps in (("1:2", "--load-step", "3:3"), ("3:3", "--load-step", "1:2"))
    ]
    assert found == [15 * (1 + 2 + 2 + 3 + 3)] * 2


def test_table_for_people(capsys, trace):
    _, out, _ = simulate(capsys, trace, "--admission", "saria", "--admission", "dram_only")
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["admission", "hit", "DRAM", "SSD"]
    assert [line.split()[0] for line in lines[1:]] == ["saria", "dram_only", "oracle"]
    assert len({len(line) for line in lines}) == 1
    _, out, _ = simulate(capsys, trace, "--hardware", "b300", "--model", "qwen3-next")
    for text in ("TTFT mean s", "p99 s", "reload mean s", "TB/day", "drive life years"):
        assert text in out


def test_a_reader_that_leaves_early_sees_no_traceback(trace):
    unread, output = os.pipe()
    os.close(unread)
    command = [sys.executable, "-m", "saria_vllm.cli", "simulate", "--trace", trace, "--dram-tokens", "512"]
    ended = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    os.close(output)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_plot_writes_a_picture(capsys, trace, tmp_path):
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    target = tmp_path / "picture.png"
    status, _, _ = simulate(capsys, trace, "--admission", "saria", "--admission", "dram_only", "--plot", str(target))
    assert status == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    status, out, err = simulate(capsys, trace, "--plot", str(tmp_path / "no" / "where.png"))
    assert status == 2
    assert "cannot be written" in err
    assert "return" in out, "what was simulated is not lost"


def test_plot_without_matplotlib_is_refused_before_any_work(capsys, monkeypatch, trace, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = simulate(capsys, trace, "--plot", str(tmp_path / "picture.png"))
    assert (status, out) == (2, "")
    assert err == "saria simulate: --plot needs matplotlib: pip install matplotlib\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dram-tokens", "0"], "--dram-tokens 0: expected a number of at least 1"),
        (["--dram-tokens", "1000000000000"], "--dram-tokens 1000000000000: expected at most 33,554,432 chunks, 21474"),
        (["--ssd-tokens", "2147483649"], "--ssd-tokens 2147483649: expected at most 33,554,432 chunks, 2147483648"),
        (["--dram-tokens", "63"], "--dram-tokens 63: expected at least a chunk of 64"),
        (["--ssd-tokens", "-1"], "--ssd-tokens -1: expected a number of at least 0"),
        (["--ssd-tokens", "10"], "--ssd-tokens 10: expected 0 or at least a chunk of 64"),
        (["--chunk-tokens", "0"], "--chunk-tokens 0: expected a number of at least 1"),
        (["--chunk-tokens", "48"], "chunks of 48 tokens for a trace of 64-token blocks; expected a multiple or a"),
        (["--sessions", "-2"], "--sessions -2: expected a number of at least 0"),
        (["--start-seed", "-2"], "--start-seed -2: expected a number of at least 0"),
        (["--promotion", "1.5"], "--promotion 1.5: expected auto or a share from 0 to 1"),
        (["--promotion", "nan"], "--promotion nan: expected auto or a share from 0 to 1"),
        (["--promotion", "all"], "--promotion all: expected auto or a share from 0 to 1"),
        (["--ssd-ingress-ratio", "0"], "--ssd-ingress-ratio 0: expected a number above 0"),
        (["--starts", "4"], "--starts 4: expected a number with a unit (s, m, h, d), such as 4h"),
        (["--hardware", "h200"], "--hardware and --model: expected both or neither"),
        (["--model", "llama-3.3-70b"], "--hardware and --model: expected both or neither"),
        (["--rated-capacity", "4TB"], "--rated-capacity: needs --model, one of llama-3.3-70b, "),
        (["--rated-capacity", "4", "--model", "llama-3.3-70b"], "--rated-capacity: '4' is not a size above zero"),
        (["--kv-bytes-per-token", "0"], "--kv-bytes-per-token 0: expected a number of at least 1"),
        (
            ["--rated-capacity", "4TB", "--kv-bytes-per-token", "9", "--target-dwpd", "2"],
            "--target-dwpd 2 and --hard-cap-dwpd 1: expected numbers from 0.001 to 100, the cap at least the target",
        ),
        (
            ["--rated-capacity", "4TB", "--kv-bytes-per-token", "9", "--target-dwpd", "5e-324"],
            "--target-dwpd 4.94066e-324 and --hard-cap-dwpd 1: expected numbers from 0.001 to 100",
        ),
        (["--rated-capacity", "", "--kv-bytes-per-token", "9"], "--rated-capacity: '' is not a size above zero"),
        (["--kv-bytes-per-token", "1" + "0" * 400], "0: expected a number of at least 1 and at most 1073741824"),
        (["--hardware", "", "--model", ""], "--hardware : unknown profile; choose one of h100-sxm-pcie5, h200, b300"),
        (["--starts", "9" * 400 + "h"], "9h: expected at most 36500d"),
        (["--starts", "36501d"], "--starts 36501d: expected at most 36500d"),
        (["--admission", "saria:policy=return"], "--admission saria:policy=return: the policy stands before the colon"),
        (["--repeat-days", "0"], "--repeat-days 0: expected a number of at least 1"),
        (["--load-step", "1:3"], "--load-step 1:3: expected DAY:FACTOR, such as 3:3, with a day from 0 to 0"),
        (["--load-step", "0:0"], "--load-step 0:0: expected DAY:FACTOR"),
        (["--repeat-days", "1" + "0" * 30], "0 copies; expected at most 65536"),
        (["--trace", ""], "'': cannot be opened"),
        (["--trace", "no\0name"], r"'no\x00name': cannot be opened"),
        (["--repeat-days", "70000"], "--repeat-days and --load-step: 70000 copies; expected at most 65536"),
        (["--hardware", "h300", "--model", "llama-3.3-70b"], "choose one of h100-sxm-pcie5, h200, b300"),
        (["--hardware", "h200", "--model", "gpt"], "choose one of llama-3.3-70b, glm-5.2-bf16, glm-5.2-fp8, qwen3-ne"),
        (["--admission", "lru"], "--admission lru: unknown policy; choose one of return, "),
        (["--admission", "saria:evictions=0"], "admission.evictions: 0 is not a whole number from 1 to 255"),
        (["--admission", "saria:evictions=two"], "admission.evictions: 'two' is not a whole number from 1 to 255"),
        (["--admission", "saria:eviction=2"], "admission.eviction: unknown key, given 2; did you mean admission.evic"),
    ],
)
def test_the_impossible_is_refused_in_one_line(capsys, trace, options, message):
    status, out, err = simulate(capsys, trace, *options)
    assert (status, out) == (2, "")
    assert err.startswith("saria simulate: ")
    assert err.count("\n") == 1
    assert message in err


def test_admission_settings_are_those_of_the_connector():
    found = parse_admission("saria:evictions=3,reuses=9")
    assert (found.evictions, found.reuses, found.ghosts_max) == (3, 9, GHOSTS_UNBOUNDED)
    assert parse_admission("saria:ghosts_max=500").ghosts_max == 500
    with pytest.raises(ConfigError, match="ghosts_max"):
        parse_admission("saria:ghosts_max=0")


def test_times_with_units():
    assert [parse_seconds(text) for text in ("30s", "90m", "4h", "1.5d")] == [30, 5400, 14_400, 129_600]


def test_a_malformed_line_is_named_and_can_be_skipped(capsys, trace):
    with open(trace, "a") as file:
        file.write('{"id": "bad", "block_size": 64}\n')
    status, out, err = simulate(capsys, trace)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "trace.jsonl, line 4: " in err
    assert "expected one JSON object per session" in err
    status, out, err = simulate(capsys, trace, "--skip-bad", "--json")
    assert status == 0
    assert (json.loads(out)["requests"], json.loads(out)["skipped_lines"]) == (15, 1)
    assert "skipped 1 malformed lines" in err


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x1f\x8bnot gzip", b"[]\n", None])
def test_a_file_that_is_no_trace(capsys, tmp_path, content):
    path = tmp_path / "trace"
    if content is not None:
        path.write_bytes(content)
    status, out, err = simulate(capsys, str(path))
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "expected" in err and Path(path).name in err
