"""The configuration of pacing: values, refusals, words."""

from __future__ import annotations

import pytest

from saria_vllm.config import PacingConfig, SariaConfig
from test_config import MINIMAL, refusal

PACING_TYPOS = {
    "mode": ["mod", "Mode"],
    "ingress": ["ingres", "ingress_limit", "Ingress"],
    "epsilon": ["epsilom", "eps"],
}


def test_b49_every_pacing_key_has_typos_here() -> None:
    assert set(PACING_TYPOS) == set(PacingConfig.__struct_fields__)


@pytest.mark.parametrize(("key", "typo"), [(key, typo) for key, typos in PACING_TYPOS.items() for typo in typos])
def test_b49_a_mistyped_pacing_key_names_the_nearest_one(key: str, typo: str) -> None:
    message = refusal({**MINIMAL, "pacing": {typo: 3}})
    assert message.startswith(f"pacing.{typo}: unknown key, given 3; did you mean pacing.{key}?")


@pytest.mark.parametrize(
    ("value", "expected", "said"),
    [
        ({}, PacingConfig("priority", 0.7, 0.05), "pacing=(priority, up to 70% of the link)"),
        ("off", PacingConfig("off"), "pacing=(off)"),
        ({"mode": "matched", "ingress": 1, "epsilon": 0}, PacingConfig("matched", 1.0, 0.0), "up to 100% of the link"),
        ({"ingress": "45GB/s"}, PacingConfig(ingress=45e9), "pacing=(priority, up to 45.00GB/s)"),
        ({"ingress": "1MB/s"}, PacingConfig(ingress=1e6), "up to 1MB/s"),
    ],
)
def test_pacing(value: object, expected: PacingConfig, said: str) -> None:
    config = SariaConfig.from_extra({**MINIMAL, "pacing": value})
    assert config.pacing == expected
    assert said in config.describe()


@pytest.mark.parametrize(
    ("key", "value"),
    [("ingress", value) for value in (0.0, -0.5, 1.5, 45, 45e9, "45", "45GB", "fast", "1B/s", "0GB/s", True, None, [])]
    + [("epsilon", value) for value in (-0.1, 1.1, "5%", None)]
    + [("mode", value) for value in ("on", "", 1, None)],
)
def test_pacing_values_are_named_with_their_path(key: str, value: object) -> None:
    assert refusal({**MINIMAL, "pacing": {key: value}}).startswith(f"pacing.{key}: {value!r} is not ")


@pytest.mark.parametrize("value", ["on", 1, None, False, []])
def test_pacing_is_a_mode_or_an_object(value: object) -> None:
    assert refusal({**MINIMAL, "pacing": value}).startswith("pacing")
