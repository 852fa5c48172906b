"""Configuration: times."""

from __future__ import annotations

import pytest

from saria_vllm.config import LOAD_DEADLINE_S, SariaConfig
from saria_vllm.errors import ConfigError

MINIMAL = {"dram_capacity": "1GiB"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30.0), ("100ms", 0.1), ("0.1s", 0.1), ("2.5 s", 2.5), ("2m", 120.0), ("60m", 3600.0), (" 1s ", 1.0)],
)
def test_a_deadline_is_a_time_with_a_unit(text: str, seconds: float) -> None:
    config = SariaConfig.from_extra({**MINIMAL, "load_deadline": text})
    assert config.load_deadline == pytest.approx(seconds)
    assert f"load_deadline={config.load_deadline:g}s" in config.describe()


def test_the_deadline_without_a_word() -> None:
    assert SariaConfig.from_extra(MINIMAL).load_deadline == LOAD_DEADLINE_S == 30.0


@pytest.mark.parametrize(
    "value",
    [30, 30.0, None, True, "", "30", "30x", "30S", "-1s", "0s", "99ms", "61m", "1h", "nans", "1e3s", ["30s"], {}],
)
def test_b49_what_is_no_deadline_is_refused_with_what_is(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SariaConfig.from_extra({**MINIMAL, "load_deadline": value})
    expected = 'is not a time from 0.1s to 3600s with a unit (ms, s, m), such as "30s"'
    assert str(caught.value) == f"load_deadline: {value!r} {expected}"
