"""How much goes back to DRAM: the share, what lowers it, and what a fixed one ignores."""

import pytest

from saria_vllm.policy.promotion import Promotion, chunks_to_promote, dram_share


@pytest.mark.parametrize(
    ("ssd_bytes_s", "ingress_bytes_s", "share"),
    [(25e9, 50e9, 0.5), (13e9, 52e9, 0.75), (7e9, 56e9, 0.875), (50e9, 50e9, 0.0), (60e9, 50e9, 0.0), (0.0, 50e9, 1.0)],
)
def test_the_share_lets_both_streams_end_together(ssd_bytes_s, ingress_bytes_s, share):
    ratio = ssd_bytes_s / ingress_bytes_s
    assert dram_share(ratio) == Promotion("auto", ratio).share(0.0) == share
    if 0 < share < 1:
        total = 1e9
        assert (1 - share) * total / ssd_bytes_s == pytest.approx(total / ingress_bytes_s)


@pytest.mark.parametrize(
    ("in_dram", "from_ssd", "share", "promoted"),
    [
        (0, 100, 0.5, 50),
        (20, 80, 0.5, 30),
        (50, 50, 0.5, 0),
        (60, 40, 0.5, 0),
        (0, 3, 0.5, 2),  # Rather one too many: SSD is the slower stream.
        (10, 90, 0.3, 20),  # 0.3 * 100 is a little more than 30 in floating point.
        (10, 90, 1.0, 90),
        (0, 7, 0.0, 0),
        (0, 0, 1.0, 0),
    ],
)
def test_only_what_the_share_lacks_is_promoted(in_dram, from_ssd, share, promoted):
    assert chunks_to_promote(in_dram, from_ssd, share) == promoted


def test_nothing_is_lowered_while_half_of_what_is_promoted_is_used():
    promotion = Promotion("auto", 0.5)
    promotion.used(5000, 1.0)
    promotion.evicted(5000, 1.0)
    assert promotion.used_share(1.0) > 0.5
    assert promotion.share(1.0) == 0.5


def test_copies_that_nobody_uses_lower_the_share_in_proportion():
    promotion = Promotion("auto", 0.5)
    promotion.used(1000, 0.0)
    promotion.evicted(3 * 2024, 0.0)  # With the 1024 believed at first: 2024 used of 8096.
    assert promotion.used_share(0.0) == 0.25
    assert promotion.share(0.0) == 0.25
    lower = promotion.share(0.0)
    promotion.evicted(10_000, 0.0)
    assert promotion.share(0.0) < lower


def test_pressure_is_forgotten_with_time():
    promotion = Promotion("auto", 0.5)
    promotion.evicted(1 << 20, 0.0)
    assert promotion.share(0.0) < 0.001
    assert promotion.share(5400.0) == pytest.approx(1 / 3)  # 2048 are left of them beside the 1024 believed at first.
    assert promotion.share(6000.0) == pytest.approx(0.5)


def test_time_that_goes_back_changes_nothing():
    promotion = Promotion("auto", 0.5)
    promotion.evicted(5000, 600.0)
    before = promotion.used_share(600.0)
    promotion.used(0, 0.0)
    assert promotion.used_share(600.0) == before


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_fixed_share_knows_no_pressure(share):
    promotion = Promotion(share, 0.9)
    promotion.evicted(1 << 20, 0.0)
    assert promotion.share(0.0) == share


def test_auto_goes_by_measured_rates_once_both_are_known():
    promotion = Promotion("auto", 0.5)
    promotion.measured(1e9, 0.0)
    promotion.measured(0.0, 4e9)
    assert promotion.share(0.0) == 0.5, "one rate says nothing"
    promotion.measured(1e9, 4e9)
    assert promotion.share(0.0) == 0.75
    promotion.measured(0.0, 0.0)
    assert promotion.share(0.0) == 0.75, "what is not known any more is believed on"
    promotion.measured(5e9, 4e9)
    assert promotion.share(0.0) == 0, "drives faster than the ingress need no DRAM"


def test_a_fixed_share_knows_no_rates():
    promotion = Promotion(0.25)
    promotion.measured(1e9, 4e9)
    assert promotion.share(0.0) == 0.25
