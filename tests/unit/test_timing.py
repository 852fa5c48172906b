"""The model of time against cases worked out by hand."""

import random

import msgspec
import pytest

from saria_vllm.sim.planning import custom_model
from saria_vllm.sim.profiles import hardware, model
from saria_vllm.sim.simulator import SimRequest
from saria_vllm.sim.timing import Load, Rates, Reloads, _fair, request_times, time_requests, wear

KV = 1000
NODE = msgspec.structs.replace(
    hardware("h200"), gpus=1, ingress_bytes_s=1e6, dram_read_bytes_s=1e9, drives=1, drive_read_bytes_s=0.25e6,
    drive_latency_s=0.0,
)  # fmt: skip
"""The ingress takes 1,000 tokens a second, the drive gives 250, DRAM is no limit."""
MODEL = custom_model(KV, 1000.0, NODE)
"""A GPU prefills 1,000 tokens a second."""


def served(time_s=0.0, new=1000, dram=0, ssd=0):
    return SimRequest(time_s, new + dram + ssd, dram, ssd)


def times(*requests, node=NODE, coordinated=True):
    ttft, reload = request_times(requests, node, MODEL, coordinated)
    return [pytest.approx(value) for value in ttft], [pytest.approx(value) for value in reload]


@pytest.mark.parametrize(
    ("dram", "ssd", "coordinated", "apart"),
    [
        (1000, 0, 1.0, 1.0),
        (0, 500, 2.0, 2.0),
        (1000, 500, 2.0, 2.25),  # apart: .8 and .2 of the ingress until DRAM ends at 1.25 s, then 250 more at full rate
        (3000, 500, 3.5, 3.5),  # apart: SSD ends at 2.5 s; the ingress is never idle
        (1500, 500, 2.0, 2.375),
    ],
)
def test_one_reload(dram, ssd, coordinated, apart):
    assert times(served(dram=dram, ssd=ssd))[1] == [coordinated]
    assert times(served(dram=dram, ssd=ssd), coordinated=False)[1] == [apart]


def test_coordinated_is_the_formula_of_the_design():
    rng = random.Random(1)
    for _ in range(50):
        dram, ssd = rng.randrange(5000), rng.randrange(5000)
        node = msgspec.structs.replace(NODE, drive_read_bytes_s=rng.uniform(0.1e6, 2e6), drive_latency_s=0.01)
        slow = min(node.drive_read_bytes_s, node.ingress_bytes_s)
        expected = max(ssd * KV / slow, (ssd + dram) * KV / 1e6) + (0.01 if ssd else 0.0)
        assert times(served(dram=dram, ssd=ssd), node=node)[1] == [expected]
        assert request_times([served(dram=dram, ssd=ssd)], node, MODEL, False)[1][0] >= expected - 1e-9


def test_drives_add_up():
    assert times(served(ssd=500), node=msgspec.structs.replace(NODE, drives=2))[1] == [1.0]
    assert times(served(ssd=500), node=msgspec.structs.replace(NODE, drives=8))[1] == [0.5], "the ingress is the limit"


def test_two_engines_divide_the_drives_while_both_reload():
    node = msgspec.structs.replace(NODE, gpus=2)
    assert times(served(ssd=500), served(ssd=500), node=node)[1] == [4.0, 4.0]
    # The first has 250 alone, then both get 125 a second until it ends at 3; the second has the rest alone.
    assert times(served(ssd=500), served(1.0, ssd=500), node=node)[1] == [3.0, 3.0]


def test_two_engines_divide_dram_and_what_one_leaves_goes_to_the_other():
    node = msgspec.structs.replace(NODE, gpus=2, dram_read_bytes_s=1e6)
    assert times(served(dram=1000), served(dram=1000), node=node)[1] == [2.0, 2.0]
    assert _fair(10.0, [2.0, 9.0]) == [2.0, 8.0]
    assert _fair(10.0, [9.0, 0.0, 9.0]) == [5.0, 0.0, 5.0]
    assert _fair(30.0, [9.0, 2.0]) == [9.0, 2.0]
    rates = Rates(engines=2, ingress=10.0, dram=12.0, ssd=6.0)
    loads = [Load(0, 100.0, 100.0, 0.0), Load(1, 100.0, 0.0, 0.0)]
    assert rates.shared(loads, True) == [(6.0, 4.0), (0.0, 8.0)]


@pytest.mark.parametrize("coordinated", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_jumping_from_end_to_end_is_going_in_small_steps(seed, coordinated):
    rng = random.Random(seed)
    rates = Rates(3, *(rng.uniform(low, high) for low, high in ((1.0, 5.0), (2.0, 10.0), (0.5, 6.0))))
    wanted = sorted((rng.uniform(0, 5), rng.randrange(3), rng.choice([0.0, 3.0]), rng.uniform(0, 2)) for _ in range(8))
    loads = [(at, engine, Load(number, dram * 1e6, ssd * 1e6, 0.0)) for number, (at, engine, dram, ssd) in
             enumerate(wanted)]  # fmt: skip
    rates = msgspec.structs.replace(rates, ingress=rates.ingress * 1e6, dram=rates.dram * 1e6, ssd=rates.ssd * 1e6)
    step, now, queues, expected = 0.002, 0.0, [[], [], []], {}
    waiting = [(at, engine, msgspec.structs.replace(load)) for at, engine, load in loads]
    while len(expected) < len(loads):
        while waiting and waiting[0][0] <= now:
            _, engine, load = waiting.pop(0)
            queues[engine].append(load)
        running = [queue[0] for queue in queues if queue]
        now += step
        for load, (ssd, dram) in zip(running, rates.shared(running, coordinated), strict=True):
            load.ssd, load.dram = max(0.0, load.ssd - ssd * step), max(0.0, load.dram - dram * step)
        for queue in queues:
            if queue and not (queue[0].ssd or queue[0].dram):
                expected[queue.pop(0).request] = now
    reloads, found = Reloads(rates, coordinated), {}
    for at, engine, load in loads:
        found |= {number: end for end, _, number in reloads.until(at)}
        reloads.add(engine, load)
    found |= {number: end for end, _, number in reloads.until(float("inf"))}
    assert found == {number: pytest.approx(end, abs=12 * step) for number, end in expected.items()}


def test_requests_of_an_engine_reload_in_turn():
    assert times(served(dram=1000), served(dram=1000))[1] == [1.0, 2.0]


def test_requests_queue_for_a_gpu_and_take_the_one_with_the_least_work():
    assert times(served(new=2000), served(0.5))[0] == [2.0, 2.5]
    node = msgspec.structs.replace(NODE, gpus=2)
    assert times(served(new=2000), served(0.5), served(0.6, new=100), node=node)[0] == [2.0, 1.0, 1.0]


def test_a_reload_runs_while_the_gpu_is_busy():
    assert times(served(new=2000), served(0.5, dram=1000)) == ([2.0, 2.5], [0.0, 1.0])


def test_no_prefill_waits_for_anothers_reload():
    assert times(served(dram=1000), served(0.1, new=500)) == ([2.0, 0.5], [1.0, 0.0])


def test_a_cached_prompt_still_costs_its_last_token():
    assert times(SimRequest(0.0, 1000, 1000, 0))[0] == [1.001]


def test_rates_of_a_node():
    h200, glm = hardware("h200"), model("glm-5.2-fp8")
    sharded = Rates.of(h200, model("llama-3.3-70b"))
    assert (sharded.engines, sharded.ingress, sharded.dram, sharded.ssd) == (4, 110e9, 460e9, 112e9)
    assert sharded.ssd_ingress_ratio == pytest.approx(8 * 14 / (8 * 55))
    replicated = Rates.of(h200, glm)
    assert (replicated.engines, replicated.ingress, replicated.dram) == (1, 55e9, 460e9 / 8), "each GPU reads all of it"
    assert replicated.ssd == 112e9


def test_statistics():
    found = time_requests([served(dram=1000), served(10.0, dram=3000), served(20.0)], NODE, MODEL)
    assert found.ttft_mean_s == pytest.approx((2 + 4 + 1) / 3)
    assert found.ttft_p99_s == pytest.approx(4 - 0.02 * (4 - 2))
    assert found.reload_mean_s == pytest.approx(2.0)
    assert found.reload_p95_s == pytest.approx(1 + 0.95 * 2)
    assert time_requests([], NODE, MODEL).ttft_mean_s == 0.0


def test_b_1145_mib_per_second_are_103_7_tb_a_day_and_end_a_4_tb_drive_in_seventy_days():
    node = msgspec.structs.replace(NODE, drive_bytes=4 * 10**12, drive_dwpd=1.0)
    tb_day, years = wear(1145 * 2**20 * 3600, 3600.0, node)
    assert tb_day == pytest.approx(103.7, abs=0.05)
    assert years * 365 == pytest.approx(70.4, abs=0.2)
    assert wear(0, 3600.0, node) == (0.0, float("inf"))
    assert wear(1, 0.0, node) == (float("inf"), 0.0)
    assert wear(1145 * 2**20 * 3600, 3600.0, msgspec.structs.replace(node, drives=2))[1] == pytest.approx(2 * years)
