"""The connector's configuration: one frozen struct, read from `kv_connector_extra_config`.

Unknown keys are rejected with the nearest valid name, sizes need a unit, paths must be absolute and usable. Capacities
are totals for the node, over all ranks, drives and local engines.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from stat import S_ISDIR
from typing import Any, Literal, get_args

import msgspec

from saria_vllm.errors import ConfigError, is_drive_fault

_UNITS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0}
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]+)\s*")

AdmissionPolicy = Literal["return", "saria", "score", "full_duplicate", "dram_only"]
PacingMode = Literal["priority", "matched", "off"]
SsdEngineName = Literal["auto", "io_uring", "io_uring_sqpoll", "posix", "nixl", "kvikio"]

PromotionMode = float | Literal["auto"]
"""A share from 0 to 1 of a prefix that belongs in DRAM, or the one with which both tiers end together, less under
pressure."""

SSD_PATHS_MAX = 64

PATH_BYTES_MAX = 3900
"""Linux takes 4095 of a whole path; our own names come below it."""

NAME_BYTES_MAX = 252
"""Linux takes 255 of one name; a recording's can get `.63` at its end."""

_RANGES = {
    "admission.evictions": (1, 255),
    "admission.reuses": (0, 65_535),
    "admission.ghosts_max": (1, 1_000_000_000),
    "io_threads": (0, 256),
}
"""Bounds of whole numbers; the index counts evictions in 8 bits and reuses in 16."""

DWPD_RANGE = (0.001, 100.0)
LOAD_DEADLINE_S = 30.0
LOAD_DEADLINE_RANGE_S = (0.1, 3600.0)
RATE_MIN = 10**6
"""Bytes per second; a smaller `pacing.ingress` is a fraction."""

_ACCEPTED = {
    "promotion": '"auto" or a number from 0 to 1',
    "ssd_engine": f"one of {', '.join(get_args(SsdEngineName))}",
    "io_cpus": "a list of CPU numbers",
    "namespace": "a string that UTF-8 can encode",
    "admission.policy": f"one of {', '.join(get_args(AdmissionPolicy))}",
    "admission.threshold": "a number above 0, and for `return` at most 1",
    "admission.second_chance": "a number from 0 to 1",
    "pacing.mode": f"one of {', '.join(get_args(PacingMode))}",
    "pacing.ingress": 'a rate such as "45GB/s", at least 1MB/s, or a part of the measured link, above 0 and up to 1',
    "pacing.epsilon": "a number from 0 to 1",
    "endurance.target_dwpd": "a number from {:g} to {:g}".format(*DWPD_RANGE),
    "endurance.hard_cap_dwpd": f"a number from target_dwpd to {DWPD_RANGE[1]:g}",
    **{key: f"a whole number from {low} to {high}" for key, (low, high) in _RANGES.items()},
}
"""What a key of the wrong type or an unknown choice should have been."""


def parse_bytes(value: object, key: str) -> int:
    """Bytes of a size such as "64GiB".

    Raises:
        ConfigError: not a string, no unit, an unknown unit, or not above zero.
    """
    accepted = f'a size above zero with a unit ({", ".join(_UNITS)}), such as "64GiB"'
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{key}: {value!r} is not {accepted}")
    nbytes = int(Fraction(match[1]) * _UNITS[match[2]])
    if nbytes <= 0:
        raise ConfigError(f"{key}: {value!r} is not {accepted}")
    return nbytes


def parse_rate(value: object, key: str) -> float:
    """Bytes per second of a rate such as "45GB/s".

    Raises:
        ConfigError: not a string, no unit, an unknown unit, or less than `RATE_MIN`.
    """
    size = value.strip().removesuffix("/s") if isinstance(value, str) and value.strip().endswith("/s") else None
    try:
        rate = parse_bytes(size, key)
    except ConfigError:
        rate = 0
    if rate < RATE_MIN:
        raise ConfigError(f'{key}: {value!r} is not a rate of at least 1MB/s with a unit, such as "45GB/s"')
    return float(rate)


def _deadline_s(value: object) -> float:
    """Seconds of a time such as "30s"."""
    least, most = LOAD_DEADLINE_RANGE_S
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    seconds = float(match[1]) * _SECONDS.get(match[2], 0.0) if match else 0.0
    if not least <= seconds <= most:
        accepted = f'a time from {least:g}s to {most:g}s with a unit ({", ".join(_SECONDS)}), such as "30s"'
        raise ConfigError(f"load_deadline: {value!r} is not {accepted}")
    return seconds


def format_bytes(nbytes: int) -> str:
    """A size for people, in binary units: 1536 -> "1.50KiB"."""
    size, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{nbytes}B" if unit == "B" else f"{size:.2f}{unit}"


def format_rate(bytes_s: float) -> str:
    """A rate for people: 3.1e9 -> "3.10GB/s"."""
    return f"{bytes_s / 1e9:.2f}GB/s" if bytes_s >= 1e9 else f"{bytes_s / 1e6:.0f}MB/s"


SCORE_THRESHOLD = 0.01
"""Scores are no probabilities: most are far below 1."""


class AdmissionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a chunk is worth an SSD write."""

    policy: AdmissionPolicy = "return"
    evictions: int = 2
    """`saria`: persist on this DRAM eviction of a chunk (k)."""
    reuses: int = 0
    """`saria`: persist before eviction once a chunk was reused this often (N); 0 turns it off."""
    threshold: float = 0.74
    """`return`: persist from this probability of a return on, where no write budget moves it; `score`: from this score
    on, by default `SCORE_THRESHOLD`."""
    ghosts_max: int = 1_000_000
    """Chunks whose history is remembered after their bytes are gone; about 250 bytes each."""
    second_chance: float = 0.1
    """Chunks that were read are written again before their SSD segment goes, up to this share of all other writes; 0
    turns that off."""


class EnduranceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many bytes may be written to the SSDs, in writes of all drives' rated capacity per day (DWPD)."""

    target_dwpd: float = 0.75
    """What is written per day in the long run; what is unused is carried over, up to a day's worth."""
    rated_capacity: int = 0
    """Bytes of all drives together; 0 means the size of the block devices under `ssd_paths`."""
    hard_cap_dwpd: float = 1.0
    """What no 24 hours exceed."""


class PacingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How copies from DRAM give way to SSD reads; see `saria_vllm.engine.pacer`."""

    mode: PacingMode = "priority"
    ingress: float = 0.7
    """What all loads of a rank may move: bytes per second, or up to 1 as a part of the measured link."""
    epsilon: float = 0.05
    """So much faster than matched is the matched rate."""

    def describe(self) -> str:
        """In words: "priority, up to 70% of the link"."""
        most = f"{self.ingress:.0%} of the link" if self.ingress <= 1 else format_rate(self.ingress)
        return self.mode if self.mode == "off" else f"{self.mode}, up to {most}"


class SariaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Effective configuration. Sizes are bytes, for the node."""

    dram_capacity: int
    ssd_paths: tuple[str, ...] = ()
    ssd_capacity: int = 0
    chunk_tokens: int = 0
    """Tokens in a chunk; 0 means "auto"."""
    admission: AdmissionConfig = AdmissionConfig()
    endurance: EnduranceConfig | None = EnduranceConfig()
    """None means "off": no bound on what is written."""
    promotion: PromotionMode = "auto"
    """How much of a prefix that was loaded from SSD belongs in DRAM afterwards."""
    pacing: PacingConfig = PacingConfig()
    load_deadline: float = LOAD_DEADLINE_S
    """Seconds after which a load ends as failed, and its request is recomputed."""
    ssd_engine: SsdEngineName = "auto"
    io_threads: int = 0
    """SSD threads per drive; 0 means automatic."""
    io_cpus: tuple[int, ...] = ()
    """CPUs for the SSD and copy threads; empty means automatic."""
    trace_record: str = ""
    """File to which a recording of the requests is appended, for the simulator; empty means none."""
    namespace: str = ""
    """Extra text in the namespace fingerprint, to keep equal-looking deployments apart."""

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> SariaConfig:
        """Read `kv_connector_extra_config`.

        Raises:
            ConfigError: names the key, the value and what is accepted.
        """
        _reject_unknown(extra, cls, "")
        raw = dict(extra)
        if "dram_capacity" not in raw:
            raise ConfigError('dram_capacity: missing; accepted: a size with a unit, such as "64GiB"')
        raw["dram_capacity"] = parse_bytes(raw["dram_capacity"], "dram_capacity")
        if raw.get("chunk_tokens") == "auto":
            raw["chunk_tokens"] = 0
        elif "chunk_tokens" in raw and not _is_int_above(raw["chunk_tokens"], 0):
            raise ConfigError(f'chunk_tokens: {raw["chunk_tokens"]!r} is not "auto" or a whole number above zero')
        raw["ssd_paths"] = _ssd_paths(raw.get("ssd_paths", ()))
        if raw["ssd_paths"]:
            if "ssd_capacity" not in raw:
                raise ConfigError(
                    'ssd_capacity: missing; accepted beside ssd_paths: a size with a unit, such as "2TiB"'
                )
            raw["ssd_capacity"] = parse_bytes(raw["ssd_capacity"], "ssd_capacity")
        elif "ssd_capacity" in raw:
            raise ConfigError(
                f"ssd_capacity: {raw['ssd_capacity']!r} given without ssd_paths; accepted: both or neither"
            )
        admission = raw.get("admission", {})
        if isinstance(admission, str):
            admission = {"policy": admission}
        if not isinstance(admission, Mapping):
            policies = ", ".join(get_args(AdmissionPolicy))
            raise ConfigError(f"admission: {admission!r} is not a policy ({policies}) or an object")
        _reject_unknown(admission, AdmissionConfig, "admission.")
        if admission.get("policy") == "score":
            admission = {"threshold": SCORE_THRESHOLD, **admission}
        raw["admission"] = admission
        raw["endurance"] = _endurance(raw.get("endurance", {}))
        if "pacing" in raw:
            raw["pacing"] = _pacing(raw["pacing"])
        if "load_deadline" in raw:
            raw["load_deadline"] = _deadline_s(raw["load_deadline"])
        if "trace_record" in raw:
            raw["trace_record"] = _path(raw["trace_record"], "trace_record")
        try:
            config = msgspec.convert(raw, cls, strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(_explain(error, raw)) from None
        config._check_ranges()
        return config

    def _check_ranges(self) -> None:
        threshold = self.admission.threshold
        if not 0 < threshold <= (1 if self.admission.policy == "return" else float(1 << 30)):
            raise ConfigError(f"admission.threshold: {threshold} is not {_ACCEPTED['admission.threshold']}")
        share = self.admission.second_chance
        if not 0 <= share <= 1:
            raise ConfigError(f"admission.second_chance: {share} is not {_ACCEPTED['admission.second_chance']}")
        if self.promotion != "auto" and not 0 <= self.promotion <= 1:
            raise ConfigError(f"promotion: {self.promotion} is not {_ACCEPTED['promotion']}")
        if not (0 < self.pacing.ingress <= 1 or self.pacing.ingress >= RATE_MIN):
            raise ConfigError(f"pacing.ingress: {self.pacing.ingress} is not {_ACCEPTED['pacing.ingress']}")
        if not 0 <= self.pacing.epsilon <= 1:
            raise ConfigError(f"pacing.epsilon: {self.pacing.epsilon} is not {_ACCEPTED['pacing.epsilon']}")
        for key, (low, high) in _RANGES.items():
            struct: msgspec.Struct = self.admission if key.startswith("admission.") else self
            value = getattr(struct, key.removeprefix("admission."))
            if not low <= value <= high:
                raise ConfigError(f"{key}: {value} is not {_ACCEPTED[key]}")
        if self.endurance is not None:
            target, cap = self.endurance.target_dwpd, self.endurance.hard_cap_dwpd
            least, most = DWPD_RANGE
            if not least <= target <= most:
                raise ConfigError(f"endurance.target_dwpd: {target} is not {_ACCEPTED['endurance.target_dwpd']}")
            if not target <= cap <= most:
                accepted = f"{_ACCEPTED['endurance.hard_cap_dwpd']}; target_dwpd is {target:g}"
                raise ConfigError(f"endurance.hard_cap_dwpd: {cap} is not {accepted}")
        cpus = os.cpu_count() or 1
        if any(not 0 <= cpu < cpus for cpu in self.io_cpus):
            raise ConfigError(f"io_cpus: {list(self.io_cpus)} names a CPU outside 0..{cpus - 1}")
        if len(set(self.io_cpus)) < len(self.io_cpus):
            raise ConfigError(f"io_cpus: {list(self.io_cpus)} names a CPU twice; accepted: each CPU once")

    def check_machine(self) -> None:
        """Check the capacities and paths against this machine, changing nothing. A drive that fails or is read-only is
        no error of the configuration.

        Raises:
            ConfigError: names the key, the value and what is accepted.
        """
        memory = memory_limit_bytes()
        if self.dram_capacity > memory:
            raise ConfigError(
                f"dram_capacity: {format_bytes(self.dram_capacity)} is more than this machine's memory; "
                f"accepted: at most {format_bytes(memory)}, less what the engine needs"
            )
        accepted = "a directory that this user can write in, or a path to be created in one"
        disks: dict[int, tuple[int, int]] = {}
        """Bytes and paths by device."""
        places: dict[tuple[int, int, str], str] = {}
        """Paths by the directory that they are in truth: links and second mounts lead to one by several names."""
        for path in self.ssd_paths:
            if _fails(path):
                continue
            existing = path
            while not os.path.lexists(existing):
                existing = os.path.dirname(existing)
            try:
                place, stat = os.stat(existing), os.statvfs(existing)
                is_directory = S_ISDIR(place.st_mode)
            except FileNotFoundError:  # A link to nothing.
                is_directory = False
            except OSError:  # It fails now and then.
                continue
            if not is_directory:
                raise ConfigError(f"ssd_paths: {path!r}: {existing!r} is not a directory; accepted: {accepted}")
            if not os.access(existing, os.W_OK | os.X_OK) and not stat.f_flag & os.ST_RDONLY:
                raise ConfigError(f"ssd_paths: {path!r}: cannot write in {existing!r}; accepted: {accepted}")
            if not stat.f_blocks:
                raise ConfigError(
                    f"ssd_paths: {path!r}: {existing!r} is on a file system without space of its own; "
                    f"accepted: {accepted}, on a disk"
                )
            other = places.setdefault((place.st_dev, place.st_ino, os.path.relpath(path, existing)), path)
            if other != path:
                raise ConfigError(f"ssd_paths: {other!r} and {path!r} are one directory; accepted: each directory once")
            disks[place.st_dev] = stat.f_blocks * stat.f_frsize, disks.get(place.st_dev, (0, 0))[1] + 1
        self._check_nesting()
        most = min((size * len(self.ssd_paths) // paths for size, paths in disks.values()), default=self.ssd_capacity)
        if self.ssd_capacity > most:
            raise ConfigError(
                f"ssd_capacity: {format_bytes(self.ssd_capacity)} is more than the disks under ssd_paths hold, each "
                f"path getting an equal share; accepted: at most {format_bytes(most)}"
            )
        if self.trace_record:
            self._check_trace_record()
        for cpu in self.io_cpus:
            if not _cpu_allowed(cpu):
                raise ConfigError(f"io_cpus: {cpu} is a CPU that this process may not use; accepted: those it may")

    def _check_nesting(self) -> None:
        """What lies in one path's `saria` directory counts against the capacity as another configuration's."""
        tops = {path: os.path.join(os.path.realpath(path), "saria", "") for path in self.ssd_paths}
        for path, own in tops.items():
            for other, top in tops.items():
                if own != top and own.startswith(top):
                    raise ConfigError(
                        f"ssd_paths: {path!r} is inside the saria directory of {other!r}; accepted: paths apart"
                    )

    def _check_trace_record(self) -> None:
        path, parent = self.trace_record, os.path.dirname(self.trace_record)
        accepted = "a file that this user can append to, or a new one in a directory that exists"
        if not os.path.isdir(parent):
            raise ConfigError(f"trace_record: {path!r}: {parent!r} is not a directory; accepted: {accepted}")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise ConfigError(f"trace_record: {path!r}: cannot write in {parent!r}; accepted: {accepted}")
        if os.path.lexists(path):
            if os.path.islink(path) or not os.path.isfile(path):
                raise ConfigError(f"trace_record: {path!r} is a symlink or no regular file; accepted: {accepted}")
            if not os.access(path, os.R_OK | os.W_OK):
                raise ConfigError(f"trace_record: {path!r} cannot be read and written; accepted: {accepted}")

    def describe(self) -> str:
        """Effective values in one line."""
        ssd = "no SSD"
        if self.ssd_paths:
            ssd = f"ssd_capacity={format_bytes(self.ssd_capacity)} on {list(self.ssd_paths)}"
        policy = msgspec.to_builtins(self.admission)
        endurance = "off"
        if self.endurance is not None:
            rated = self.endurance.rated_capacity
            endurance = f"{self.endurance.target_dwpd:g} DWPD, at most {self.endurance.hard_cap_dwpd:g}, of "
            endurance += format_bytes(rated) if rated else "the drives' size"
        return (
            f"dram_capacity={format_bytes(self.dram_capacity)} {ssd} "
            f"chunk_tokens={self.chunk_tokens or 'auto'} admission={policy} endurance=({endurance}) "
            f"promotion={self.promotion} pacing=({self.pacing.describe()}) load_deadline={self.load_deadline:g}s "
            f"ssd_engine={self.ssd_engine} io_threads={self.io_threads or 'auto'} "
            f"io_cpus={list(self.io_cpus) or 'auto'} trace_record={self.trace_record or 'off'} "
            f"namespace={self.namespace!r}"
        )


def _cpu_allowed(cpu: int) -> bool:
    """Whether a thread of ours may run on a CPU: a container may show more than it gives."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {cpu})
    except OSError:
        return False
    os.sched_setaffinity(0, before)
    return True


def _fails(path: str) -> bool:
    """Whether a path, or what there is of it, cannot be looked at because its drive fails."""
    while True:
        try:
            os.stat(path)
            os.statvfs(path)
            return False
        except FileNotFoundError:
            pass
        except OSError as error:
            if is_drive_fault(error):
                return True
        if path == "/":
            return False
        path = os.path.dirname(path)


def memory_limit_bytes() -> int:
    """Memory of this machine, or of this container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def _is_int_above(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > low


def _path(value: object, key: str) -> str:
    """A path made plain."""
    if isinstance(value, str) and not _is_utf8(value):
        raise ConfigError(f"{key}: {value!r} is not text that UTF-8 can encode; accepted: absolute paths")
    if not isinstance(value, str) or not os.path.isabs(value) or "\0" in value or re.search(r"\$[A-Za-z_{(]", value):
        raise ConfigError(f"{key}: {value!r} is not an absolute path ('~' and variables are not expanded)")
    plain = "/" + os.path.normpath(value).lstrip("/")
    if len(plain.encode()) > PATH_BYTES_MAX or max(len(name.encode()) for name in plain.split("/")) > NAME_BYTES_MAX:
        accepted = f"at most {PATH_BYTES_MAX} bytes, and {NAME_BYTES_MAX} between slashes"
        raise ConfigError(f"{key}: {value!r} is too long; accepted: {accepted}")
    return plain


def _ssd_paths(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(path, str) for path in value):
        raise ConfigError(f"ssd_paths: {value!r} is not a list of absolute paths")
    if len(value) > SSD_PATHS_MAX:
        raise ConfigError(f"ssd_paths: {len(value)} paths; accepted: at most {SSD_PATHS_MAX}")
    paths = tuple(_path(path, "ssd_paths") for path in value)
    if len(set(paths)) != len(paths):
        raise ConfigError(f"ssd_paths: {list(value)!r} names a path twice")
    return paths


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_encodable(value: object) -> bool:
    """Whether every text in a value is UTF-8, keys too."""
    if isinstance(value, Mapping):
        return all(map(_is_encodable, value)) and all(map(_is_encodable, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_encodable, value))
    return not isinstance(value, str) or _is_utf8(value)


def _endurance(value: object) -> dict[str, Any] | None:
    if value == "off":
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f'endurance: {value!r} is not "off" or an object')
    _reject_unknown(value, EnduranceConfig, "endurance.")
    raw = dict(value)
    if "rated_capacity" in raw:
        raw["rated_capacity"] = parse_bytes(raw["rated_capacity"], "endurance.rated_capacity")
    return raw


def _pacing(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        value = {"mode": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"pacing: {value!r} is not a mode ({', '.join(get_args(PacingMode))}) or an object")
    _reject_unknown(value, PacingConfig, "pacing.")
    raw, ingress = dict(value), value.get("ingress")
    if isinstance(ingress, int | float) and ingress > 1:
        raise ConfigError(f"pacing.ingress: {ingress!r} is not {_ACCEPTED['pacing.ingress']}")  # Of which unit?
    if isinstance(ingress, str) and ingress.endswith("/s"):
        try:
            raw["ingress"] = parse_rate(ingress, "pacing.ingress")
        except ConfigError:
            raise ConfigError(f"pacing.ingress: {ingress!r} is not {_ACCEPTED['pacing.ingress']}") from None
    return raw


def _reject_unknown(raw: Mapping[str, Any], struct: type[msgspec.Struct], prefix: str) -> None:
    known = struct.__struct_fields__
    for key, value in raw.items():
        if key in known and not _is_encodable(value) and (accepted := _ACCEPTED.get(f"{prefix}{key}")):
            raise ConfigError(f"{prefix}{key}: {value!r} is not {accepted}")  # msgspec would fail to say so.
        if key not in known:
            word = str(key).lower().replace("-", "_")
            near = difflib.get_close_matches(word, known, n=1, cutoff=0.0)
            shown = str(key).encode(errors="backslashreplace").decode()
            raise ConfigError(
                f"{prefix}{shown}: unknown key, given {value!r}; did you mean {prefix}{near[0]}? "
                f"accepted: {', '.join(prefix + name for name in known)}"
            )


def _explain(error: msgspec.ValidationError, raw: Mapping[str, Any]) -> str:
    """Say it in words of the configuration: the error's path is `$.key`, `$.key[0]` or `$.admission.key`."""
    path = str(error).rpartition("`$.")[2].rstrip("`").partition("[")[0]
    value: Any = raw
    for key in path.split("."):
        value = value[key]
    return f"{path}: {value!r} is not {_ACCEPTED[path]}"
