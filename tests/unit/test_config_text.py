"""Configuration: text that no file name or UTF-8 can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from saria_vllm.config import AdmissionConfig, EnduranceConfig, SariaConfig
from saria_vllm.errors import ConfigError

MINIMAL = {"dram_capacity": "1GiB"}


def refusal(extra: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        SariaConfig.from_extra(extra)
    return str(caught.value)


SURROGATE = "\ud800"
TEXTS = {
    "top": ("ssd_engine", "io_threads", "io_cpus", "namespace", "chunk_tokens", "dram_capacity"),
    "admission": AdmissionConfig.__struct_fields__,
    "endurance": EnduranceConfig.__struct_fields__,
}


@pytest.mark.parametrize("value", [SURROGATE, [SURROGATE], {SURROGATE: 1}, {"a": [SURROGATE]}])
@pytest.mark.parametrize(("where", "key"), [(where, key) for where, keys in TEXTS.items() for key in keys])
def test_b49_text_that_cannot_be_encoded_is_refused(where: str, key: str, value: object) -> None:
    nested = where != "top"
    message = refusal({**MINIMAL, **({where: {key: value}} if nested else {key: value})})
    assert message.startswith(f"{where}.{key}: {value!r} is not " if nested else f"{key}: {value!r} is not ")
    message.encode()


@pytest.mark.parametrize("where", ["admission", "endurance"])
def test_b49_a_name_that_cannot_be_encoded_is_refused(where: str) -> None:
    for extra in ({where: {SURROGATE: 1}}, {SURROGATE: 1}, {where: SURROGATE}):
        message = refusal({**MINIMAL, **extra})
        assert "\\ud800" in message and ("accepted" in message or "is not" in message)
        message.encode()


@pytest.mark.parametrize("key", ["ssd_paths", "trace_record"])
@pytest.mark.parametrize("path", ["/mnt/" + "x" * 256, "/mnt/" + "\u00e9" * 128 + "/y", "/x" * 2000])
def test_b49_a_path_that_is_too_long_is_refused(key: str, path: str) -> None:
    message = refusal(
        {**MINIMAL, "ssd_capacity": "1MiB", "ssd_paths": ["/mnt/a"], key: [path] if key == "ssd_paths" else path}
    )
    assert message.startswith(f"{key}: {path!r} is too long; accepted: at most 3900 bytes, and 252 between slashes")


def test_b49_long_paths_are_accepted(tmp_path: Path) -> None:
    path = str(tmp_path) + ("/" + "x" * 252) * 10
    SariaConfig.from_extra({**MINIMAL, "ssd_paths": [path], "ssd_capacity": "1MiB"}).check_machine()
    recording = f"{tmp_path}/{'x' * 252}"
    SariaConfig.from_extra({**MINIMAL, "trace_record": recording}).check_machine()
    Path(f"{recording}.63").touch()
