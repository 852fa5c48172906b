"""`saria bench reload`: the simulated node against what can be computed, the figures, the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from saria_vllm.cli import main, reload_mix, reload_wall
from saria_vllm.cli.reload_mix import ARMS, Mix, compare
from saria_vllm.cli.reload_time import Machine, Node, Reload, leftover_s, slowest_quarter
from saria_vllm.engine.reload_bench import ReloadBench
from saria_vllm.errors import StorageError

GB = 10**9
QUARTER, HALF = Machine(20 * GB, (5.0 * GB,)), Machine(20 * GB, (5.0 * GB,) * 2)


def quiet(_line: str) -> None:
    pass


def test_the_ideal_and_the_ways_that_need_no_simulation() -> None:
    reload = Reload(4 * GB, 2 * GB)
    assert (QUARTER.ideal_s(reload), HALF.ideal_s(reload)) == (0.4, 0.3)
    assert (QUARTER.serial_s(reload), QUARTER.two_hops_s(reload)) == pytest.approx((0.6, 0.7))


@pytest.mark.parametrize("machine", [QUARTER, HALF])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_a_coordinated_reload_takes_hardly_longer_than_the_ideal(machine: Machine, share: float) -> None:
    node = Node(machine, "priority")
    node.run([Reload(GB, GB)])
    reload = Reload(int(3 * GB * (1 - share)), int(3 * GB * share))
    (seconds,) = node.run([reload])
    assert 0.999 < seconds / machine.ideal_s(reload) < 1.05


def test_unpaced_and_half_and_half_take_what_the_model_says() -> None:
    node = Node(HALF, "off")
    assert node.run([Reload(5 * GB, 5 * GB)])[0] / 0.5 == pytest.approx(1.333, rel=0.01)
    assert node.run([Reload(0, 5 * GB)])[0] == pytest.approx(0.5, rel=0.001)
    assert node.run([Reload(5 * GB, 0)])[0] == pytest.approx(0.25)


def test_a_bystander_takes_hardly_longer_than_on_the_leftover_ingress() -> None:
    node, mixed = Node(HALF, "priority"), Reload(GB, 3 * GB)
    node.run([Reload(GB, GB)])
    took, bystander = node.run([mixed, Reload(2 * GB, 0)])
    assert leftover_s(HALF, mixed, 2 * GB) == pytest.approx(2 / (20 - 4 / 0.3))
    assert bystander == pytest.approx(leftover_s(HALF, mixed, 2 * GB), rel=0.1)
    assert took == pytest.approx(HALF.ideal_s(mixed), rel=0.1)
    assert leftover_s(HALF, Reload(3 * GB, GB), 2 * GB) == pytest.approx(0.2 + 0.1)  # Nothing is left until it ends.


def test_requests_that_come_later_are_timed_from_then_on() -> None:
    first, second = Node(HALF, "off").run([Reload(2 * GB, 0), Reload(2 * GB, 0, 0.05)])
    assert (first, second) == pytest.approx((0.1, 0.15), rel=0.01)


def test_the_slowest_quarter() -> None:
    assert slowest_quarter([8, 1, 2, 3, 4, 5, 6, 7]) == 7.5
    assert slowest_quarter([3]) == 3


def test_figures_are_of_the_arms() -> None:
    reloads = {
        "zero": [Reload(GB, 3 * GB)] * 2,
        "full": [Reload(3 * GB, GB)] * 2,
        "auto": [Reload(2 * GB, 2 * GB)] * 2,
    }
    figures, rows = compare(HALF, Mix(reloads, dict.fromkeys(reloads, (1, 1))), quiet)
    by_arm = {(row["arm"], row["promotion"]): row["slowest_quartile_s"] for row in rows}
    assert len(rows) == len(by_arm) == len(ARMS) * 3
    assert by_arm["two_hops", "full"] == pytest.approx(0.3)
    assert by_arm["one_after_the_other", "zero"] == pytest.approx(0.35)
    together = by_arm["coordinated", "auto"]
    assert 0.2 <= together < 0.21 < by_arm["overlapped", "auto"] < by_arm["one_after_the_other", "auto"]
    assert figures["slowest_quartile_gain_over_two_hop"] == pytest.approx(1 - together / 0.3)
    assert figures["slowest_quartile_gain_all_three"] == pytest.approx(1 - together / 0.35)
    assert figures["slowest_quartile_gain_promotion_alone"] == pytest.approx(1 - 0.3 / 0.35)
    assert 1 <= figures["coordinated_over_ideal_median"] <= figures["coordinated_over_ideal_p95"] < 1.05
    assert figures["half_and_half_gain_overlap_paced"] > 0.28
    assert figures["half_and_half_gain_ideal"] == pytest.approx(1 / 3)
    assert 1 <= figures["bystander_slowdown_p95"] < 1.15


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same figures every time; the targets are those of long runs (docs/benchmarks.md)."""
    monkeypatch.setattr(reload_mix, "HALF_BYTES", 1 << 28)
    words = ["bench", "reload", "--drives", "2", "--sessions", "6", "--requests", "4"]
    outputs = []
    for _ in range(2):
        assert main([*words, "--json"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    report = json.loads(outputs[0])
    assert report["by_drives"]["2"].items() <= report.items()
    assert len(report["rows"]) == 12
    assert report["mixed_requests"] > 0
    assert 1 <= report["coordinated_over_ideal_median"] < 1.1
    assert 0 < report["slowest_quartile_gain_all_three"] < 1


@pytest.mark.parametrize(
    "words",
    [
        ["--drives", "0"], ["--drives", "x"], ["--drives", "1,"], ["--sessions", "0"], ["--requests", "-1"],
        ["--dram-share", "0"], ["--dram-share", "nan"], ["--trace", "/nowhere"],
    ],
)  # fmt: skip
def test_bad_usage_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "reload", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_wall_time_moves_every_byte_through_the_executor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reload_wall, "CHUNKS", 16)
    monkeypatch.setattr(reload_wall, "ROUNDS", 1)
    rows = reload_wall.in_wall_time(str(tmp_path), 2, quiet)
    assert [(row["arm"], row["ssd_share"]) for row in rows] == [
        *((arm, share) for share in (0.25, 0.5, 0.75) for arm in ARMS[:3]),
        *(("coordinated", share) for share in (0.25, 0.5, 0.75)),
    ]
    assert all(row["seconds"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_wrong_bytes_are_noticed(tmp_path: Path) -> None:
    with ReloadBench(str(tmp_path), 4, 1e9, [1e9], "off") as bench:
        assert bench.load(range(2), range(2, 4)) > 0
        slots = bench._slots
        bench._slots = lambda numbers: slots([number ^ 1 for number in numbers])  # type: ignore[method-assign]
        with pytest.raises(StorageError, match="other bytes"):
            bench.load(range(2), range(2, 4))


def test_wall_time_needs_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "reload", "--wall", "/nowhere"]) == 2
    assert "--wall /nowhere: accepted" in capsys.readouterr().err
