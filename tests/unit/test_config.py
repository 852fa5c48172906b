"""Configuration: what is accepted, and that every refusal names key, value and what would do."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saria_vllm import config as config_module
from saria_vllm.config import (
    SCORE_THRESHOLD,
    AdmissionConfig,
    EnduranceConfig,
    SariaConfig,
    format_bytes,
    memory_limit_bytes,
    parse_bytes,
)
from saria_vllm.errors import ConfigError, SariaError

MINIMAL = {"dram_capacity": "1GiB"}
WITH_SSD = {"dram_capacity": "1GiB", "ssd_paths": ["/mnt/nvme0/saria"], "ssd_capacity": "2TiB"}


def refusal(extra: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        SariaConfig.from_extra(extra)
    return str(caught.value)


def machine_refusal(extra: dict[str, Any]) -> str:
    config = SariaConfig.from_extra(extra)
    with pytest.raises(ConfigError) as caught:
        config.check_machine()
    return str(caught.value)


# What is accepted.


def test_each_policy_has_a_threshold_of_its_own() -> None:
    def threshold(admission: object) -> float:
        return SariaConfig.from_extra({"dram_capacity": "1GiB", "admission": admission}).admission.threshold

    assert threshold("return") == threshold({}) == AdmissionConfig().threshold
    assert threshold("score") == threshold({"policy": "score"}) == SCORE_THRESHOLD
    assert threshold({"policy": "score", "threshold": 3}) == 3


def test_defaults() -> None:
    config = SariaConfig.from_extra(MINIMAL)
    assert config == SariaConfig(dram_capacity=1 << 30)
    assert config.admission == AdmissionConfig(policy="return", evictions=2, reuses=0, threshold=0.74)
    assert config.endurance == EnduranceConfig(target_dwpd=0.75, rated_capacity=0, hard_cap_dwpd=1.0)
    assert config.chunk_tokens == 0
    assert config.ssd_paths == ()


def test_everything_set() -> None:
    config = SariaConfig.from_extra(
        {
            **WITH_SSD,
            "chunk_tokens": 256,
            "admission": {"policy": "saria", "evictions": 3, "reuses": 4, "ghosts_max": 10},
            "endurance": {"target_dwpd": 2, "rated_capacity": "30TB", "hard_cap_dwpd": 2.5},
            "promotion": 0.25,
            "ssd_engine": "posix",
            "io_threads": 4,
            "io_cpus": [0],
            "trace_record": "/mnt//x/../trace.jsonl",
            "namespace": "blue",
        }
    )
    assert config.ssd_capacity == 2 << 40
    assert config.ssd_paths == ("/mnt/nvme0/saria",)
    assert config.admission == AdmissionConfig("saria", 3, 4, ghosts_max=10)
    assert config.endurance == EnduranceConfig(2.0, 30 * 10**12, 2.5)
    assert (config.chunk_tokens, config.ssd_engine, config.io_threads) == (256, "posix", 4)
    assert (config.io_cpus, config.namespace, config.promotion) == ((0,), "blue", 0.25)
    assert config.trace_record == "/mnt/trace.jsonl"
    assert "trace_record=/mnt/trace.jsonl" in config.describe()


def test_a_policy_name_alone_is_short_for_its_object() -> None:
    config = SariaConfig.from_extra({**MINIMAL, "admission": "full_duplicate"})
    assert config.admission == AdmissionConfig(policy="full_duplicate")


def test_endurance_can_be_turned_off() -> None:
    config = SariaConfig.from_extra({**WITH_SSD, "endurance": "off"})
    assert config.endurance is None
    assert "endurance=(off)" in config.describe()


def test_chunk_tokens_auto_is_the_default() -> None:
    assert SariaConfig.from_extra({**MINIMAL, "chunk_tokens": "auto"}) == SariaConfig.from_extra(MINIMAL)


def test_the_given_mapping_is_not_changed() -> None:
    extra = {**WITH_SSD, "admission": {"evictions": 3}}
    before = {**extra, "admission": dict(extra["admission"])}  # type: ignore[arg-type]
    SariaConfig.from_extra(extra)
    assert extra == before


def test_effective_values_are_one_line_with_totals_and_absolute_paths() -> None:
    line = SariaConfig.from_extra({**WITH_SSD, "ssd_paths": ["/mnt//nvme0/x/../saria/"]}).describe()
    assert "\n" not in line
    parts = ("dram_capacity=1.00GiB", "ssd_capacity=2.00TiB", "/mnt/nvme0/saria", "chunk_tokens=auto", "promotion=auto")
    assert [part for part in parts if part not in line] == []
    assert "endurance=(0.75 DWPD, at most 1, of the drives' size)" in line
    rated = SariaConfig.from_extra({**WITH_SSD, "endurance": {"rated_capacity": "3TiB"}}).describe()
    assert "of 3.00TiB" in rated
    assert "no SSD" in SariaConfig.from_extra(MINIMAL).describe()


def test_refusals_can_be_caught_as_ours_or_as_value_errors() -> None:
    assert issubclass(ConfigError, SariaError)
    assert issubclass(ConfigError, ValueError)


# B46: sizes need a unit and are totals for the node.


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1GB", 10**9),
        ("1GiB", 2**30),
        ("64GiB", 64 << 30),
        ("2TiB", 2 << 40),
        ("2TB", 2 * 10**12),
        ("1.5GiB", 3 << 29),
        ("0.1MB", 100_000),
        (" 64 GiB ", 64 << 30),
        ("512B", 512),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("9007199254740993B", 9007199254740993),
        ("0.3GB", 300_000_000),
    ],
)
def test_b46_parse_bytes_accepts_a_number_with_a_unit(text: str, nbytes: int) -> None:
    assert parse_bytes(text, "k") == nbytes


@pytest.mark.parametrize(
    "value",
    [
        "64", "1e9", "1e9B", 1.5, 64, 1 << 30, 0, "0", "0GiB", "0.1B", "-1GiB", -1, "10 %", "10%", "64gib", "64G",
        "64Gb", "64 Gi B", "GiB", "", " ", "1,5GiB", ".5GiB", "5.GiB", "1_000MB", "+1GiB", "1GiB/s", "1GiB 2", "infGiB",
        "nanGiB", "9" * 400 + "GiB", "\u0661GiB", None, True, [], {}, b"64GiB", "64GiB\x00",
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_b46_parse_bytes_refuses_what_has_no_clear_size(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(value, "dram_capacity")
    message = str(caught.value)
    assert message.startswith("dram_capacity: ")
    assert repr(value) in message
    assert "GiB" in message.replace(repr(value), "")
    assert "unit" in message


@pytest.mark.parametrize("key", ["dram_capacity", "ssd_capacity"])
@pytest.mark.parametrize("value", ["64", "1e9", 1.5, "0", "-1GiB", "10 %", 10**9, True, None])
def test_b46_capacities_without_a_unit_are_refused(key: str, value: object) -> None:
    message = refusal({**WITH_SSD, key: value})
    assert message.startswith(f"{key}: {value!r} is not a size")


def test_b46_dram_capacity_above_memory_is_refused() -> None:
    memory = memory_limit_bytes()
    assert 0 < memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    message = machine_refusal({"dram_capacity": f"{memory + 1}B"})
    assert message.startswith(f"dram_capacity: {format_bytes(memory + 1)} ")
    assert "memory" in message
    assert format_bytes(memory) in message
    SariaConfig.from_extra({"dram_capacity": f"{memory}B"}).check_machine()


def test_b46_ssd_capacity_above_the_disks_is_refused(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    size = disk.f_blocks * disk.f_frsize
    extra = {**MINIMAL, "ssd_paths": [str(tmp_path / "a"), str(tmp_path / "b")]}
    message = machine_refusal({**extra, "ssd_capacity": f"{size + 1}B"})
    assert message.startswith(f"ssd_capacity: {format_bytes(size + 1)} ")
    assert "ssd_paths" in message
    assert f"at most {format_bytes(size)}" in message, "two paths on one disk count it once"
    SariaConfig.from_extra({**extra, "ssd_capacity": f"{size}B"}).check_machine()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0B"), (1023, "1023B"), (1536, "1.50KiB"), (64 << 30, "64.00GiB"), (1 << 50, "1024.00TiB")],
)  # fmt: skip
def test_b46_sizes_are_shown_in_binary_units(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


# B49: unknown or renamed options.

TYPOS = {
    "dram_capacity": ["dram_capcity", "dramcapacity", "DRAM_CAPACITY", "dram-capacity", "dram_capacity_gb"],
    "ssd_paths": ["ssd_path", "ssdpaths", "ssd-paths", "SSD_PATHS"],
    "ssd_capacity": ["ssd_capacty", "sdd_capacity", "ssdCapacity"],
    "chunk_tokens": ["chunk_token", "chunktokens", "chunk_size_tokens"],
    "admission": ["admision", "admissions", "Admission"],
    "endurance": ["endurence", "Endurance", "endurances"],
    "promotion": ["promote", "promotions", "Promotion"],
    "pacing": ["paceing", "Pacing", "pacin"],
    "ssd_engine": ["ssd_engin", "sdd_engine", "ssdEngine"],
    "io_threads": ["io_thread", "iothreads", "io-threads"], "io_cpus": ["io_cpu", "iocpus"],
    "load_deadline": ["loaddeadline", "deadline", "load_timeout"],
    "trace_record": ["trace_recording", "tracerecord", "traceRecord"],
    "namespace": ["name_space", "namespaces"],
}  # fmt: skip

ADMISSION_TYPOS = {
    "policy": ["polcy", "Policy"],
    "evictions": ["eviction", "evictons"],
    "reuses": ["reuse", "re_uses"],
    "ghosts_max": ["ghost_max", "max_ghosts"],
    "threshold": ["treshold", "threshhold", "Threshold"],
    "second_chance": ["secondchance", "second_chances", "second-chance"],
}

ENDURANCE_TYPOS = {
    "target_dwpd": ["target_dpwd", "target-dwpd", "dwpd"],
    "rated_capacity": ["rate_capacity", "capacity"],
    "hard_cap_dwpd": ["hardcap_dwpd", "hard_cap"],
}


def test_b49_every_key_has_typos_here() -> None:
    assert set(TYPOS) == set(SariaConfig.__struct_fields__)
    assert set(ADMISSION_TYPOS) == set(AdmissionConfig.__struct_fields__)
    assert set(ENDURANCE_TYPOS) == set(EnduranceConfig.__struct_fields__)


@pytest.mark.parametrize(("key", "typo"), [(key, typo) for key, typos in TYPOS.items() for typo in typos])
def test_b49_a_mistyped_key_names_the_nearest_one(key: str, typo: str) -> None:
    message = refusal({**WITH_SSD, typo: "given"})
    assert message.startswith(f"{typo}: unknown key")
    assert "'given'" in message
    assert f"did you mean {key}?" in message
    assert all(name in message for name in SariaConfig.__struct_fields__)


@pytest.mark.parametrize(("key", "typo"), [(key, typo) for key, typos in ADMISSION_TYPOS.items() for typo in typos])
def test_b49_a_mistyped_nested_key_names_the_nearest_one(key: str, typo: str) -> None:
    message = refusal({**MINIMAL, "admission": {typo: 3}})
    assert message.startswith(f"admission.{typo}: unknown key, given 3; did you mean admission.{key}?")
    assert "admission.ghosts_max" in message.partition("accepted:")[2]


@pytest.mark.parametrize(("key", "typo"), [(key, typo) for key, typos in ENDURANCE_TYPOS.items() for typo in typos])
def test_b49_a_mistyped_endurance_key_names_the_nearest_one(key: str, typo: str) -> None:
    message = refusal({**MINIMAL, "endurance": {typo: 3}})
    assert message.startswith(f"endurance.{typo}: unknown key, given 3; did you mean endurance.{key}?")


def test_b49_a_key_that_is_no_string_is_unknown() -> None:
    assert refusal({**MINIMAL, 5: 1}).startswith("5: unknown key")  # type: ignore[dict-item]


def test_b49_a_missing_dram_capacity_says_what_to_give() -> None:
    message = refusal({})
    assert message.startswith("dram_capacity: missing")
    assert '"64GiB"' in message


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("chunk_tokens", "many", '"auto" or a whole number above zero'),
        ("chunk_tokens", "AUTO", '"auto"'),
        ("chunk_tokens", 0, "above zero"),
        ("chunk_tokens", -16, "above zero"),
        ("chunk_tokens", 16.0, "a whole number"),
        ("chunk_tokens", True, "a whole number"),
        ("chunk_tokens", None, "a whole number"),
        *(("promotion", wrong, '"auto" or a number from 0 to 1') for wrong in ("all", 1.5, -0.1, True, float("nan"))),
        ("ssd_engine", "uring", "one of auto, io_uring, io_uring_sqpoll, posix, nixl, kvikio"),
        ("ssd_engine", 1, "one of auto, io_uring, io_uring_sqpoll, posix, nixl, kvikio"),
        ("io_threads", "2", "a whole number from 0 to 256"),
        ("io_threads", 2.5, "a whole number from 0 to 256"),
        ("io_threads", True, "a whole number from 0 to 256"),
        ("io_threads", -1, "a whole number from 0 to 256"),
        ("io_threads", 257, "a whole number from 0 to 256"),
        ("io_cpus", "0-3", "a list of CPU numbers"),
        ("io_cpus", ["0"], "a list of CPU numbers"),
        ("io_cpus", [True], "a list of CPU numbers"),
        ("io_cpus", [0.5], "a list of CPU numbers"),
        ("io_cpus", 0, "a list of CPU numbers"),
        ("io_cpus", [-1], "0.."),
        ("io_cpus", [10**6], "0.."),
        ("io_cpus", [0, 0], "each CPU once"),
        ("namespace", 5, "a string"),
        ("namespace", None, "a string"),
        ("namespace", ["a"], "a string"),
        ("admission", 5, "return, saria, score, full_duplicate, dram_only"),
        ("admission", None, "or an object"),
        ("admission", ["saria"], "or an object"),
        ("endurance", "on", '"off" or an object'),
        ("endurance", False, '"off" or an object'),
        ("endurance", None, '"off" or an object'),
        ("endurance", 0.75, '"off" or an object'),
        ("trace_record", "trace.jsonl", "an absolute path"),
        ("trace_record", "~/trace.jsonl", "'~' and variables are not expanded"),
        ("trace_record", "", "an absolute path"),
        ("trace_record", None, "an absolute path"),
        ("trace_record", ["/mnt/a"], "an absolute path"),
        ("ssd_paths", "/mnt/a", "a list of absolute paths"),
        ("ssd_paths", [1], "a list of absolute paths"),
        ("ssd_paths", None, "a list of absolute paths"),
        ("ssd_paths", {"/mnt/a": 1}, "a list of absolute paths"),
    ],
)
def test_b49_a_value_of_a_wrong_type_or_range_is_refused(key: str, value: object, accepted: str) -> None:
    message = refusal({**WITH_SSD, key: value})
    assert message.startswith(f"{key}: {value!r}")
    assert accepted in message


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("policy", "lru", "one of return, saria, score, full_duplicate, dram_only"),
        ("policy", "SARIA", "one of return, saria"),
        ("policy", 2, "one of return, saria"),
        ("evictions", 0, "a whole number from 1 to 255"),
        ("evictions", 256, "a whole number from 1 to 255"),
        ("evictions", True, "a whole number from 1 to 255"),
        ("evictions", "2", "a whole number from 1 to 255"),
        ("evictions", 2.0, "a whole number from 1 to 255"),
        ("evictions", None, "a whole number from 1 to 255"),
        ("reuses", -1, "a whole number from 0 to 65535"),
        ("reuses", 65536, "a whole number from 0 to 65535"),
        ("reuses", False, "a whole number from 0 to 65535"),
        ("ghosts_max", 0, "a whole number from 1 to"),
        ("ghosts_max", "1M", "a whole number from 1 to"),
    ],
)
def test_b49_nested_values_are_named_with_their_path(key: str, value: object, accepted: str) -> None:
    message = refusal({**MINIMAL, "admission": {key: value}})
    assert message.startswith(f"admission.{key}: {value!r} is not {accepted}")


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("target_dwpd", 0, "a number from 0.001 to 100"),
        ("target_dwpd", -1.0, "a number from 0.001 to 100"),
        ("target_dwpd", 1000, "a number from 0.001 to 100"),
        ("target_dwpd", float("nan"), "a number from 0.001 to 100"),
        ("target_dwpd", True, "a number from 0.001 to 100"),
        ("target_dwpd", "0.75", "a number from 0.001 to 100"),
        ("target_dwpd", None, "a number from 0.001 to 100"),
        ("hard_cap_dwpd", 0.5, "a number from target_dwpd to 100; target_dwpd is 0.75"),
        ("hard_cap_dwpd", float("inf"), "a number from target_dwpd to 100"),
        ("hard_cap_dwpd", "1", "a number from target_dwpd to 100"),
        ("rated_capacity", 10**12, "a size above zero with a unit"),
        ("rated_capacity", "4", "a size above zero with a unit"),
        ("rated_capacity", "0TB", "a size above zero with a unit"),
        ("rated_capacity", None, "a size above zero with a unit"),
    ],
)
def test_b49_endurance_values_are_named_with_their_path(key: str, value: object, accepted: str) -> None:
    message = refusal({**MINIMAL, "endurance": {key: value}})
    given = repr(float(value)) if type(value) is int and key != "rated_capacity" else repr(value)
    assert message.startswith(f"endurance.{key}: {given} is not {accepted}")


def test_b49_a_target_above_the_default_cap_says_that_the_cap_is_too_low() -> None:
    message = refusal({**MINIMAL, "endurance": {"target_dwpd": 3}})
    assert message == ("endurance.hard_cap_dwpd: 1.0 is not a number from target_dwpd to 100; target_dwpd is 3")


@pytest.mark.parametrize("value", [0, -1, 1.01, "nan"])
def test_b49_a_threshold_that_is_no_probability_is_refused(value: object) -> None:
    value = float("nan") if value == "nan" else value
    message = refusal({**MINIMAL, "admission": {"policy": "return", "threshold": value}})
    assert message.endswith("is not a number above 0, and for `return` at most 1")


def test_b49_an_unknown_policy_name_lists_the_policies() -> None:
    message = refusal({**MINIMAL, "admission": "lru"})
    assert message == "admission.policy: 'lru' is not one of return, saria, score, full_duplicate, dram_only"


def test_b49_a_value_that_looks_like_an_error_path_is_still_named() -> None:
    message = refusal({**MINIMAL, "ssd_engine": "x - at `$.namespace`"})
    assert message.startswith("ssd_engine: 'x - at `$.namespace`' is not one of auto")


@pytest.mark.parametrize(
    "path",
    [
        "relative/path", "./x", "../x", "", "saria", "~/saria", "~", "~root/x", "$HOME/saria", "${HOME}/saria",
        "/mnt/$USER/saria", "/mnt/${POD}/saria", "/mnt/$(id)/x", "C:\\kv", "file:///mnt/a", "/mnt/a\0b",
    ],
)  # fmt: skip
def test_b49_relative_paths_tildes_and_variables_are_refused(path: str) -> None:
    message = refusal({**WITH_SSD, "ssd_paths": ["/mnt/ok", path]})
    assert message.startswith(f"ssd_paths: {path!r} is not an absolute path")
    assert "'~' and variables are not expanded" in message


def test_b49_paths_are_made_plain() -> None:
    config = SariaConfig.from_extra({**WITH_SSD, "ssd_paths": ["/mnt//a/", "//mnt/b/./c/..", "/cost$/1"]})
    assert config.ssd_paths == ("/mnt/a", "/mnt/b", "/cost$/1")


@pytest.mark.parametrize("paths", [["/mnt/a", "/mnt/a"], ["/mnt/a", "/mnt/./a/"], ["/mnt/a", "//mnt/a"]])
def test_b49_a_path_given_twice_is_refused(paths: list[str]) -> None:
    message = refusal({**WITH_SSD, "ssd_paths": paths})
    assert message.startswith(f"ssd_paths: {paths!r} names a path twice")


@pytest.mark.parametrize("tail", ["saria", "saria/deeper", "link/saria"])
def test_b49_a_path_in_the_directory_that_another_makes_is_refused(tmp_path: Path, tail: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    paths = [f"{tmp_path}/{tail}", str(tmp_path)]
    text = machine_refusal({**WITH_SSD, "ssd_paths": paths, "ssd_capacity": "1MiB"})
    assert text.startswith(f"ssd_paths: {paths[0]!r} is inside the saria directory of {paths[1]!r}")


@pytest.mark.parametrize("tail", ["", "/deeper/still"])
def test_b49_a_directory_by_two_names_is_refused(tmp_path: Path, tail: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("real")
    paths = [f"{tmp_path}/{name}{tail}" for name in ("other", "real", "link")]
    text = machine_refusal({**WITH_SSD, "ssd_paths": paths, "ssd_capacity": "1MiB"})
    assert f"{paths[1]!r} and {paths[2]!r} are one directory" in text
    SariaConfig.from_extra({**WITH_SSD, "ssd_paths": paths[:2], "ssd_capacity": "1MiB"}).check_machine()


def test_b49_too_many_paths_are_refused() -> None:
    paths = [f"/mnt/nvme{number}" for number in range(65)]
    assert "65 paths; accepted: at most 64" in refusal({**WITH_SSD, "ssd_paths": paths})
    assert len(SariaConfig.from_extra({**WITH_SSD, "ssd_paths": paths[:64]}).ssd_paths) == 64


@pytest.mark.parametrize("path", ["/mnt/\ud800/x", "/mnt/\udcff"])
def test_b49_a_path_that_cannot_be_encoded_is_refused(path: str) -> None:
    text = refusal({**WITH_SSD, "ssd_paths": [path]})
    assert "UTF-8" in text
    text.encode()


def test_b49_ssd_paths_and_capacity_go_together() -> None:
    message = refusal({**MINIMAL, "ssd_paths": ["/mnt/a"]})
    assert message.startswith("ssd_capacity: missing; accepted beside ssd_paths: a size with a unit")
    message = refusal({**MINIMAL, "ssd_capacity": "1TiB"})
    assert message.startswith("ssd_capacity: '1TiB' given without ssd_paths; accepted: both or neither")
    assert SariaConfig.from_extra({**MINIMAL, "ssd_paths": []}).ssd_paths == ()


def ssd_at(path: Path) -> dict[str, Any]:
    return {**MINIMAL, "ssd_paths": [str(path)], "ssd_capacity": "1MiB"}


def test_b49_a_missing_path_under_a_writable_directory_is_accepted_and_not_created(tmp_path: Path) -> None:
    SariaConfig.from_extra(ssd_at(tmp_path / "not" / "there" / "yet")).check_machine()
    assert list(tmp_path.iterdir()) == []
    SariaConfig.from_extra(ssd_at(tmp_path)).check_machine()


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


def below_a_file(tmp_path: Path) -> Path:
    return a_file(tmp_path) / "below"


def dangling_link(tmp_path: Path) -> Path:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    return tmp_path / "link"


@pytest.mark.parametrize("make", [a_file, below_a_file, dangling_link])
def test_b49_a_path_that_is_no_directory_is_refused(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    message = machine_refusal(ssd_at(path))
    assert message.startswith(f"ssd_paths: {str(path)!r}: ")
    assert "is not a directory; accepted: a directory that this user can write in" in message


def test_b49_an_unwritable_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`os.access` is replaced: root, as whom tests often run, may write in any directory."""
    asked: list[tuple[str, int]] = []

    def access(path: str, mode: int) -> bool:
        asked.append((path, mode))
        return False

    monkeypatch.setattr(config_module.os, "access", access)
    message = machine_refusal(ssd_at(tmp_path / "new"))
    assert message.startswith(f"ssd_paths: {str(tmp_path / 'new')!r}: cannot write in {str(tmp_path)!r}; accepted: ")
    assert asked == [(str(tmp_path), os.W_OK | os.X_OK)]


@pytest.mark.parametrize("good", [0, 1], ids=["always", "after its first answer"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOTCONN, errno.ESTALE])
def test_a_drive_that_fails_is_no_error_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, good: int
) -> None:
    """It is left out when it is opened."""
    real, asked = os.stat, []

    def failing(path: Any, *args: Any, **more: Any) -> os.stat_result:
        if isinstance(path, str) and path.startswith(str(tmp_path / "dead")):
            asked.append(path)
            if len(asked) <= good:
                return real(tmp_path, *args, **more)
            raise OSError(code, os.strerror(code), path)
        return real(path, *args, **more)

    monkeypatch.setattr(config_module.os, "stat", failing)
    paths = [str(tmp_path / name) for name in ("dead", "good")]
    (tmp_path / "dead").mkdir()
    for some in (paths, paths[:1]):
        asked.clear()
        SariaConfig.from_extra({**MINIMAL, "ssd_paths": some, "ssd_capacity": "1MiB"}).check_machine()


def test_a_read_only_drive_is_no_error_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = os.statvfs(tmp_path)
    read_only = os.statvfs_result((*disk[:8], disk.f_flag | os.ST_RDONLY, *disk[9:]))
    monkeypatch.setattr(config_module.os, "statvfs", lambda path: read_only)
    monkeypatch.setattr(config_module.os, "access", lambda path, mode: False)
    SariaConfig.from_extra(ssd_at(tmp_path)).check_machine()


def test_b49_a_recording_needs_a_directory_and_no_link(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        return machine_refusal({**MINIMAL, "trace_record": str(path)})

    new = tmp_path / "new"
    assert refused(new / "t").startswith(
        f"trace_record: {str(new / 't')!r}: {str(new)!r} is not a directory; accepted:"
    )
    assert "is not a directory" in refused(a_file(tmp_path) / "t")
    assert "is a symlink or no regular file" in refused(dangling_link(tmp_path))
    assert "is a symlink or no regular file" in refused(tmp_path)
    assert "is a symlink or no regular file" in refused(Path("/dev/null"))
    for path in (new, a_file(tmp_path)):
        SariaConfig.from_extra({**MINIMAL, "trace_record": str(path)}).check_machine()
    assert not new.exists()


def test_b49_a_recording_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`os.access` is replaced: root, as whom tests often run, may write in any directory."""
    path = a_file(tmp_path)
    monkeypatch.setattr(config_module.os, "access", lambda asked, mode: asked != str(path))
    assert "cannot be read and written" in machine_refusal({**MINIMAL, "trace_record": str(path)})
    monkeypatch.setattr(config_module.os, "access", lambda asked, mode: False)
    assert f"cannot write in {str(tmp_path)!r}" in machine_refusal({**MINIMAL, "trace_record": str(path)})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write in any directory")
def test_b49_a_directory_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert "cannot write in" in machine_refusal(ssd_at(tmp_path / "new"))
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("root", ["/proc", "/sys"])
def test_b49_a_path_on_a_file_system_without_room_is_refused(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write there, as `os.access` tells."""
    if not os.path.isdir(root) or os.statvfs(root).f_blocks:
        pytest.skip(f"{root} is not what it is on Linux")
    monkeypatch.setattr(config_module.os, "access", lambda path, mode: True)
    message = machine_refusal({**MINIMAL, "ssd_paths": [f"{root}/saria"], "ssd_capacity": "1MiB"})
    assert message.startswith(f"ssd_paths: '{root}/saria': '{root}' is on a file system without space of its own")
    assert "accepted: a directory that this user can write in" in message


def test_container_memory_limits_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit, real_open = tmp_path / "max", open
    monkeypatch.setattr(config_module, "open", lambda path: real_open(limit if "max" in path else path), raising=False)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit.write_text(f"{1 << 20}\n")
    assert memory_limit_bytes() == 1 << 20
    limit.write_text("max\n")
    assert memory_limit_bytes() <= host
    limit.write_text(f"{1 << 62}\n")
    assert memory_limit_bytes() <= host
