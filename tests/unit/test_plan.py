"""`saria plan`: sweeps, the frontier and the choice, the configuration to paste, and what it refuses."""

import itertools
import json
import random
import re
import shlex
import sys
from pathlib import Path

import msgspec
import pytest

from saria_vllm.cli import main
from saria_vllm.config import AdmissionConfig, EnduranceConfig, SariaConfig, parse_bytes
from saria_vllm.sim import planning
from saria_vllm.sim.arrivals import arrivals_with_ids, starts
from saria_vllm.sim.formats import Trace
from saria_vllm.sim.planning import (
    GIB,
    TIB,
    Grid,
    Planner,
    Row,
    custom_model,
    default_dram_bytes,
    default_drives,
    default_ssd_bytes,
    frontier,
    kv_transfer_config,
    recommend,
    size_text,
    usd_month,
    workload_tokens,
)
from saria_vllm.sim.profiles import HARDWARE, hardware, model
from saria_vllm.sim.simulator import SimConfig, Simulator
from saria_vllm.sim.timing import time_requests
from saria_vllm.sim.trace import Request, Session
from saria_vllm.sim.workload import synthetic_sessions

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
H100 = hardware("h100-sxm-pcie5")
SMALL = custom_model(1 << 20, 10_000.0, H100)
"""1 MiB per token, 64 MiB per chunk."""
SESSIONS = list(itertools.islice(synthetic_sessions(random.Random(5), input_tokens_max=50_000, requests_max=12), 6))
WORKLOAD = Trace(SESSIONS, "built-in", False, 0)
STARTS = starts(6, 600.0, 1)


def row(usd, ttft, life=9.0, **changes):
    made = Row(GIB, TIB, 1, "saria", 0.9, 0.8, 0.1, ttft, 2 * ttft, 0.1, 1.0, life, usd)
    return msgspec.structs.replace(made, **changes)


def planner(tell=lambda line: None, endurance=None, **base):
    return Planner(WORKLOAD, STARTS, H100, SMALL, SimConfig(64, 0, 0, **base), tell, endurance=endurance)


def grid(dram=(16, 128), ssd=(0, 32, 256), drives=(1, 2), **admissions):
    policies = admissions or {"saria": AdmissionConfig(policy="saria"), "all": AdmissionConfig(policy="full_duplicate")}
    return Grid([size * GIB for size in dram], [size * GIB for size in ssd], drives, policies)


@pytest.fixture
def simulated(monkeypatch):
    """What is simulated, in order."""
    configs = []

    class Noted(Simulator):
        def __init__(self, config):
            configs.append(config)
            super().__init__(config)

    monkeypatch.setattr(planning, "Simulator", Noted)
    return configs


# Sizes and prices.


def test_default_grids_come_from_the_hardware():
    h200 = hardware("h200")
    assert [size_text(size) for size in default_dram_bytes(h200)] == ["256GiB", "512GiB", "1TiB", "2TiB"]
    assert [size_text(size) for size in default_ssd_bytes(h200)] == ["none", "1.5TiB", "6.5TiB", "55.5TiB"]
    assert default_drives(h200) == [1, 2, 4, 8]
    for machine in HARDWARE.values():
        assert max(default_ssd_bytes(machine)) <= machine.drives * machine.drive_bytes
        assert default_ssd_bytes(machine)[2] <= machine.drive_bytes


@pytest.mark.parametrize("name", ["llama-3.3-70b", "glm-5.2-fp8"])
def test_tokens_of_a_size_are_its_bytes_by_those_of_a_token(simulated, name):
    """Of a replicated KV, too: it lies in DRAM and on SSD once for the node."""
    served = model(name)
    assert served.kv_bytes_token == {"llama-3.3-70b": 327_680, "glm-5.2-fp8": 78 * 656 + 21 * 132}[name]
    Planner(WORKLOAD, STARTS, H100, served, SimConfig(64, 0, 0), print).sweep(grid(dram=(4,), ssd=(0, 8), drives=(1,)))
    sizes = {(config.dram_tokens, config.ssd_tokens) for config in simulated}
    assert sizes == {(4 * GIB // served.kv_bytes_token, ssd * GIB // served.kv_bytes_token) for ssd in (0, 8)}


def test_sizes_are_text_that_the_configuration_reads_back():
    assert [size_text(size) for size in (0, GIB, 3 * TIB // 2, 300 * 10**9, 5 << 20, 77)] == [
        "none", "1GiB", "1.5TiB", "300GB", "5MiB", "77B",
    ]  # fmt: skip
    rng = random.Random(3)
    sizes = [size for n in range(1, 50) for size in (rng.randrange(1, 1 << 46), n * GIB // 2, n * 10**9)]
    sizes += [1_234_567 << 20, 2_469_135 << 19, 999_999_999 * TIB]
    for size in sizes:
        assert parse_bytes(size_text(size), "x") == size


def test_what_a_month_costs():
    assert usd_month(H100, 512 * GIB, 0) == pytest.approx(512 * 0.52)
    assert usd_month(H100, 512 * GIB, 4) == pytest.approx(512 * 0.52 + 4 * 3.84 * 9.90)


def test_tokens_of_a_workload_are_its_different_blocks():
    def session(*runs, block_tokens=64):
        request = Request("s", 0, 0.0, 64 * sum(count for _, count in runs), 1, "unknown", runs)
        return Session("s", block_tokens, 0, 0, "", (request,))

    assert workload_tokens(Trace([session((1, 4)), session((3, 4), (100, 1))], "x", False, 0)) == 7 * 64
    assert workload_tokens(Trace([session((1, 9)), session((2, 3)), session((10, 1))], "x", False, 0)) == 10 * 64
    different = {block for session in WORKLOAD.sessions for request in session.requests for block in request.blocks()}
    assert workload_tokens(WORKLOAD) == 64 * len(different)


# The sweep.


def test_a_sweep_has_every_combination_that_drives_can_hold():
    rows = planner().sweep(grid(ssd=(0, 32, 4096), drives=(1, 2)))
    found = [(row.dram_bytes // GIB, row.ssd_bytes // GIB, row.drives, row.admission) for row in rows]
    assert found == [
        (dram, ssd, drives, name)
        for dram in (16, 128)
        for ssd, counts in ((0, [0]), (32, [1, 2]), (4096, [2]))
        for name in (("dram_only",) if not ssd else ("saria", "all"))
        for drives in counts
    ]


def test_auto_promotion_goes_by_the_drives_of_a_row(simulated):
    rows = planner(promotion="auto").sweep(
        grid(dram=(16,), ssd=(0, 32), drives=(1, 2), all=AdmissionConfig(policy="full_duplicate"))
    )
    one = H100.drive_read_bytes_s / (H100.gpus * H100.ingress_bytes_s)
    assert [config.ssd_ingress_ratio for config in simulated][1:] == pytest.approx([one, 2 * one])
    assert [row.drives for row in rows] == [0, 1, 2]
    simulated.clear()
    planner(promotion=0.5).sweep(
        grid(dram=(16,), ssd=(32,), drives=(1, 2), all=AdmissionConfig(policy="full_duplicate"))
    )
    assert len(simulated) == 1  # A fixed share knows no drives.


def test_a_row_has_the_write_budget_of_its_drives(simulated):
    """Ample, the default persists all that may help; scarce, it grows choosy, and more drives allow more."""
    sizes = grid(dram=(64,), ssd=(256,), drives=(1, 2), default=AdmissionConfig())
    unbounded, ample, scarce = (
        planner(endurance=endurance).sweep(sizes)
        for endurance in (None, EnduranceConfig(50.0, hard_cap_dwpd=60.0), EnduranceConfig(0.001))
    )
    day = 3.84e12 / 2**20
    budgets = {(config.write_budget_tokens_day / day, config.write_cap_tokens_day / day) for config in simulated}
    assert budgets == {(0, 0), (50, 60), (0.001, 1), (0.002, 2)}, "ample for one drive is for two"
    assert ample[0].ssd_tb_per_day > unbounded[0].ssd_tb_per_day > scarce[1].ssd_tb_per_day > scarce[0].ssd_tb_per_day
    assert ample[0].hit_rate >= unbounded[0].hit_rate > scarce[0].hit_rate


def test_a_budget_that_was_ample_stands_for_larger_ones(simulated):
    sizes = grid(dram=(64,), ssd=(256,), drives=(1, 2, 4), default=AdmissionConfig())
    large = msgspec.structs.replace(H100, drive_bytes=10**18)
    for target, simulations in ((0.75, 1), (1e-8, 3)):
        simulated.clear()
        plan = Planner(WORKLOAD, STARTS, large, SMALL, SimConfig(64, 0, 0), print, endurance=EnduranceConfig(target))
        assert len(plan.sweep(sizes)) == 3
        assert len(simulated) == simulations


def test_rows_are_what_the_simulator_and_the_model_of_time_say():
    drives = 2
    found = {(row.dram_bytes // GIB, row.ssd_bytes // GIB, row.admission): row
             for row in planner(promotion=0.5, ssd_eviction="segment").sweep(grid(drives=(drives,)))}  # fmt: skip
    policies = grid().admissions | {"dram_only": AdmissionConfig(policy="dram_only")}
    for (dram, ssd, name), row in found.items():
        config = SimConfig(64, dram * 1024, ssd * 1024, policies[name], 0.5, "segment")
        simulator = Simulator(config)
        served = list(simulator.run(arrivals_with_ids(WORKLOAD, STARTS, 64)))
        rates = simulator.result.rates()
        times = time_requests(served, msgspec.structs.replace(H100, drives=row.drives), SMALL)
        assert (row.hit_rate, row.dram_hit_rate) == (rates["hit_rate"], rates["dram_hit_rate"])
        assert (row.ttft_mean_s, row.ttft_p99_s) == (times.ttft_mean_s, times.ttft_p99_s)
        seconds = served[-1].time_s - served[0].time_s
        day = rates["ssd_write_tokens"] * (1 << 20) / 1e12 * 86_400 / seconds
        assert row.ssd_tb_per_day == pytest.approx(day)
        if day:
            assert row.drive_life_years == pytest.approx(5 * drives * 3.84 / day)
    assert len(found) == 10
    assert len({row.hit_rate for row in found.values()}) > 3


def test_drives_and_sizes_that_change_nothing_cost_no_simulation(simulated):
    policies = {"a": AdmissionConfig(policy="full_duplicate"), "same": AdmissionConfig(policy="full_duplicate")}
    rows = planner().sweep(grid(dram=(16,), ssd=(0, 4, 1000, 2000, 3000), drives=(1, 2, 4), **policies))
    assert len(rows) == 1 + 4 * 2 * 3
    assert len(simulated) == 3, "no SSD, one that retires, one with room for all"
    assert simulated[-1].ssd_tokens < 1000 * 1024, "no larger than the workload"


def test_more_drives_reload_faster_live_longer_and_cost_more():
    eager = AdmissionConfig(policy="saria", evictions=1)
    one, two, four = planner().sweep(grid(dram=(16,), ssd=(256,), drives=(1, 2, 4), eager=eager))
    assert one.hit_rate == two.hit_rate == four.hit_rate
    assert one.reload_mean_s > two.reload_mean_s > four.reload_mean_s
    assert two.drive_life_years == pytest.approx(2 * one.drive_life_years)
    assert four.usd_month - two.usd_month == pytest.approx(2 * (two.usd_month - one.usd_month))


def test_progress_is_told_for_each_simulation():
    lines = []
    planner(lines.append).sweep(grid(dram=(16,)))
    assert [line.split()[0] for line in lines] == [f"{n}/5" for n in range(1, 6)]
    assert lines[1].startswith("2/5 DRAM 16GiB, SSD 32GiB, saria: hit rate ")


# The choice.


def test_the_frontier_is_what_nothing_beats():
    cheap, middle, dear = row(100, 3.0), row(200, 2.0), row(300, 1.0)
    worse, equal_dearer = row(250, 2.5), row(201, 2.0)
    short_lived, longer = row(150, 1.5, life=1.0), row(320, 1.0, life=50.0)
    assert frontier([dear, worse, cheap, equal_dearer, middle], 5) == [cheap, middle, dear]
    assert frontier([cheap, short_lived, middle, dear], 5) == [cheap, short_lived, middle, dear], "middle lives longer"
    assert frontier([dear, longer], 5) == [dear], "life beyond what is asked for is worth nothing"
    assert frontier([dear, longer], 60) == [dear, longer]


def test_the_recommended_is_the_cheapest_near_the_best_that_lives():
    best, near, far = row(300, 1.00), row(200, 1.05), row(100, 1.06)
    chosen, rule = recommend([best, near, far], 5)
    assert chosen == near
    assert "cheapest whose mean TTFT is within 5% of the best" in rule and "at least 5 years" in rule
    assert recommend([best, near, far, row(50, 0.5, life=4.9)], 5)[0] == near
    assert recommend([best, near, far, row(50, 0.5, life=4.9)], 4)[0].usd_month == 50
    assert recommend([near, row(200, 1.05, ssd_tb_per_day=0.5)], 5)[0].ssd_tb_per_day == 0.5, "fewer writes at a tie"
    chosen, rule = recommend([row(1, 1.0, life=1.0), row(2, 9.0, life=3.0)], 5)
    assert chosen.usd_month == 2 and rule.startswith("no drives live 5 years")


def test_the_configuration_is_one_that_the_connector_takes():
    admission = AdmissionConfig(policy="saria", evictions=3)
    config = kv_transfer_config(
        row(1, 1.0, dram_bytes=512 * GIB, ssd_bytes=3 * TIB // 2, drives=2), admission, EnduranceConfig()
    )
    assert set(config) == {"kv_connector", "kv_role", "kv_connector_module_path", "kv_load_failure_policy",
                           "kv_connector_extra_config"}  # fmt: skip
    read = SariaConfig.from_extra(config["kv_connector_extra_config"])
    assert (read.dram_capacity, read.ssd_capacity, len(read.ssd_paths)) == (512 * GIB, 3 * TIB // 2, 2)
    assert read.admission == admission
    assert read.endurance == EnduranceConfig()
    for endurance in (None, EnduranceConfig(target_dwpd=2.0, hard_cap_dwpd=3.0)):
        config = kv_transfer_config(row(1, 1.0), admission, endurance)
        assert SariaConfig.from_extra(config["kv_connector_extra_config"]).endurance == endurance
    bare = kv_transfer_config(row(1, 1.0, dram_bytes=GIB, ssd_bytes=0, drives=0), AdmissionConfig(), None)
    assert bare["kv_connector_extra_config"] == {"dram_capacity": "1GiB"}


def test_b_1145_mib_per_second_end_a_4_tb_drive_in_seventy_days():
    node = msgspec.structs.replace(H100, drive_bytes=4 * 10**12, drive_dwpd=1.0)
    plan = Planner(WORKLOAD, STARTS, node, SMALL, SimConfig(64, 0, 0), print)
    result = planning.SimResult(ssd_write_tokens=1145 * 86_400)
    served = [planning.SimRequest(at, 100, 0, 0) for at in (0.0, 86_400.0)]
    found = plan._row(planning._Run(SimConfig(64, 0, 0), result, served, 0.0), GIB, TIB, 1, "full_duplicate")
    assert found.ssd_tb_per_day == pytest.approx(103.7, abs=0.05)
    assert found.drive_life_years * 365 == pytest.approx(70.4, abs=0.2)


# The command.


QUICK = ["--sessions", "4", "--starts", "10m", "--dram", "64GiB,256GiB", "--ssd", "none,1TiB", "--drives", "1,2",
         "--model", "llama-3.3-70b", "--hardware", "h100-sxm-pcie5"]  # fmt: skip
ROW_KEYS = {
    "dram", "ssd", "dram_bytes", "ssd_bytes", "drives", "admission", "hit_rate", "dram_hit_rate", "ssd_hit_rate",
    "ttft_mean_s", "ttft_p99_s", "reload_mean_s", "ssd_tb_per_day", "drive_life_years", "usd_month",
}  # fmt: skip


def plan(capsys, *options):
    status = main(["plan", *options])
    output = capsys.readouterr()
    return status, output.out, output.err


def test_json_is_one_object_and_progress_goes_elsewhere(capsys):
    status, out, err = plan(capsys, *QUICK, "--json")
    found = json.loads(out)
    assert status == 0
    assert {"rows", "frontier", "recommended", "kv_transfer_config", "rule"} <= set(found)
    assert all(set(row) == ROW_KEYS for row in found["rows"])
    assert len(found["rows"]) == 2 * (1 + 3 * 2)
    assert {row["admission"] for row in found["rows"]} == {"dram_only", "saria", "full_duplicate", "default"}
    assert all(row in found["rows"] for row in [*found["frontier"], found["recommended"]])
    assert found["kv_bytes_token"] == 327_680
    extra = found["kv_transfer_config"]["kv_connector_extra_config"]
    assert SariaConfig.from_extra(extra).dram_capacity == found["recommended"]["dram_bytes"]
    assert found["workload"]["sessions"] == 4
    assert "8/8 DRAM 256GiB" in err


def test_equal_commands_print_equal_plans(capsys):
    assert plan(capsys, *QUICK, "--json")[1] == plan(capsys, *QUICK, "--json")[1]


def test_text_has_the_frontier_the_choice_its_rule_and_what_to_paste(capsys):
    status, out, _ = plan(capsys, *QUICK)
    assert status == 0
    for text in ("Frontier, of 14 combinations", "TTFT mean s", "TB/day", "drive life years", "USD/month",
                 "the cheapest whose mean TTFT is within 5%", "for the node's 2 engines of 4 GPUs"):  # fmt: skip
        assert text in out
    words = shlex.split(out[out.index("vllm serve") :])
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "SariaConnector"
    assert re.search(r"^\* ", out, re.MULTILINE)


def test_options_reach_the_plan(capsys):
    options = ["--sessions", "3", "--dram", "64GiB", "--ssd", "none,0.5TiB", "--drives", "4", "--hardware", "b300"]
    _, out, _ = plan(capsys, *options, "--kv-bytes-per-token", "163840", "--admission", "saria:evictions=1", "--json")
    found = json.loads(out)
    assert (found["model"], found["kv_bytes_token"]) == ("custom", 163_840)
    assert [(row["ssd"], row["drives"], row["admission"]) for row in found["rows"]] == [
        ("none", 0, "dram_only"), ("512GiB", 4, "saria:evictions=1")
    ]  # fmt: skip
    _, out, _ = plan(capsys, *options, "--kv-bytes-per-token", "81920", "--model", "qwen3-next", "--json")
    assert json.loads(out)["kv_bytes_token"] == 81_920
    assert "recurrent state is not counted" in json.loads(out)["notes"][1]


def test_a_trace_is_planned_for(capsys, tmp_path):
    path = tmp_path / "mooncake.jsonl"
    lines = [{"timestamp": 1000 * n, "input_length": 2048, "output_length": 1, "hash_ids": [1, 2, 3, 9 + n]}
             for n in range(5)]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    _, out, _ = plan(capsys, "--trace", str(path), "--dram", "64GiB", "--ssd", "none", "--model", "llama-3.3-70b",
                     "--json")  # fmt: skip
    found = json.loads(out)
    assert found["rows"][0]["hit_rate"] == pytest.approx(4 * 3 * 512 / (5 * 2048))
    assert found["workload"]["starts"] == "as recorded"


def test_html_is_one_file_with_pictures(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    target = tmp_path / "plan.html"
    status, _, _ = plan(capsys, *QUICK, "--html", str(target))
    text = target.read_text()
    assert status == 0
    assert text.count('src="data:image/png;base64,') == 2
    assert not re.search(r'(src|href)="(?!data:)', text), "it needs nothing else"
    assert "SariaConnector" in text and 'class="chosen"' in text
    status, out, err = plan(capsys, *QUICK, "--html", str(tmp_path / "no" / "where.html"))
    assert status == 2
    assert "cannot be written" in err
    assert "SariaConnector" in out, "what was planned is not lost"


def test_html_without_matplotlib_is_refused_before_any_work(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = plan(capsys, *QUICK, "--html", str(tmp_path / "plan.html"))
    assert (status, out) == (2, "")
    assert err == "saria plan: --html needs matplotlib: pip install matplotlib\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--model: missing; choose one of llama-3.3-70b, glm-5.2-bf16, glm-5.2-fp8, qwen3-next, or give --kv-"),
        (["--model", "gpt"], "--model gpt: unknown profile; choose one of llama-3.3-70b"),
        (["--hardware", "h300"], "--hardware h300: unknown profile; choose one of h100-sxm-pcie5, h200, b300"),
        (["--kv-bytes-per-token", "0"], "--kv-bytes-per-token 0: expected a number of at least 1"),
        (
            ["--kv-bytes-per-token", "9", "--prefill-tokens-s", "0"],
            "--prefill-tokens-s 0: expected a number from 1 to 1",
        ),
        (["--kv-bytes-per-token", "9", "--prefill-tokens-s", "1e-310"], "--prefill-tokens-s 1e-310: expected a number"),
        (["--kv-bytes-per-token", "1" + "0" * 30], "0: expected a number of at least 1 and at most 1073741824"),
        (["--dram", "64"], "--dram: '64' is not a size above zero with a unit (B, KB"),
        (["--dram", "1MiB"], "--dram 1MiB: expected at least a chunk of 20,971,520 bytes"),
        (["--ssd", "1MiB"], "--ssd 1MiB: expected at least a chunk of 20,971,520 bytes"),
        (["--ssd", "100TiB"], "--ssd 100TiB: expected at most what the drives hold, 61.44TB"),
        (["--ssd", "8TiB", "--drives", "1"], "--ssd 8TiB: expected at most what the drives hold, 7.68TB"),
        (["--drives", "0"], "--drives 0: expected numbers from 1 to 1024, such as 1,2,4"),
        (["--drives", "9" * 5000], "9: expected numbers from 1 to 1024"),
        (["--dram", ""], "--dram: '' is not a size above zero with a unit"),
        (["--ssd", ""], "--ssd: '' is not a size above zero with a unit"),
        (["--drives", ""], "--drives : expected numbers from 1 to 1024"),
        (["--drives", "two"], "--drives two: expected numbers"),
        (["--admission", "lru"], "--admission lru: unknown policy; choose one of return, "),
        (["--sessions", "-1"], "--sessions -1: expected a number of at least 0"),
        (["--chunk-tokens", "0"], "--chunk-tokens 0: expected a number of at least 1"),
        (["--chunk-tokens", "48"], "expected a multiple or a divisor of 64"),
        (["--promotion", "2"], "--promotion 2: expected auto or a share from 0 to 1"),
        (["--ssd-ingress-ratio", "-1"], "--ssd-ingress-ratio -1: expected a number above 0"),
        (["--target-dwpd", "-1"], "--target-dwpd -1: expected 0 or a number from 0.001 to 100"),
        (["--target-dwpd", "5e-324"], "--target-dwpd 4.94066e-324: expected 0 or a number from 0.001 to 100"),
        (["--life-years", "-1"], "--life-years -1: expected a number of at least 0"),
        (["--starts", "36501d"], "--starts 36501d: expected at most 36500d"),
        (["--starts", "soon"], "--starts soon: expected a number with a unit"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl: cannot be opened"),
        (["--trace", ""], "'': cannot be opened"),
        (["--trace", "no\0name"], r"'no\x00name': cannot be opened"),
        (["--sessions", "1" + "0" * 30], "0: expected at most 100000 built-in sessions"),
    ],
)
def test_the_impossible_is_refused_in_one_line(capsys, options, message):
    known = [] if not options or options[0] in ("--model", "--kv-bytes-per-token") else ["--model", "llama-3.3-70b"]
    status, out, err = plan(capsys, *known, *options, "--sessions", "3") if "--sessions" not in options else plan(
        capsys, *known, *options
    )  # fmt: skip
    assert (status, out) == (2, "")
    assert err.startswith("saria plan: ") and err.count("\n") == 1
    assert message in err


def test_a_plan_of_the_built_in_workload_needs_a_model_only(capsys):
    status, out, _ = plan(capsys, "--model", "llama-3.3-70b", "--sessions", "3", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["hardware"] == "h200"
    assert found["workload"]["trace"] == "built-in"
    assert len(found["rows"]) == 4 * (1 + 3 * (4 + 4 + 1))


@pytest.mark.skipif(not (SHARED / "weka_small_48.jsonl.gz").exists(), reason="../shared/traces is not here")
def test_real_sessions_are_planned_for(capsys):
    trace = str(SHARED / "weka_small_48.jsonl.gz")
    status, out, _ = plan(capsys, "--trace", trace, "--sessions", "8", "--starts", "1h", "--model", "llama-3.3-70b",
                          "--dram", "64GiB,256GiB", "--ssd", "none,1.5TiB", "--drives", "1,4", "--json")  # fmt: skip
    found = json.loads(out)
    assert status == 0
    assert found["workload"]["sessions"] == 8
    hit = {(row["dram"], row["ssd"], row["admission"]): row["hit_rate"] for row in found["rows"]}
    small = {policy: rate for (dram, _, policy), rate in hit.items() if dram == "64GiB"}
    assert small["dram_only"] < small["saria"] < small["full_duplicate"]
