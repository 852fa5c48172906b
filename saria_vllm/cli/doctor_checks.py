"""What `saria doctor` asks of the machine. A check is a function of injectable roots and answers with a `Check`."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

from saria_vllm.config import PacingConfig, SariaConfig, format_bytes, format_rate
from saria_vllm.engine.cpus import cpu_list, io_cpus
from saria_vllm.engine.nixl import VERSION_MIN as NIXL_MIN
from saria_vllm.engine.ssd_thread import STAGING_BYTES
from saria_vllm.errors import ConfigError

Status = Literal["ok", "warn", "bad"]

VLLM_MIN, VLLM_TESTED = (0, 30), (0, 32)
RESERVED_SHARE = 0.05
"""Of memory: huge pages that are reserved and free, and that neither vLLM nor we use."""

PROBE_S = 120.0
"""How long a package may take to be imported: the first time, on a cold disk, minutes."""


CHECK_S = PROBE_S + 30
"""For any one check."""


class Check(NamedTuple):
    """One line of the report."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """What to do; empty when there is nothing to be done."""


class Ended(NamedTuple):
    """A process that was asked something."""

    status: int | None
    """None when it did not end in time, and was ended."""
    out: str
    err: str


class Machine(NamedTuple):
    """Where to look."""

    proc: str = "/proc"
    sys: str = "/sys"
    dev: str = "/dev"


Ask = Callable[[str], Ended]
"""Runs Python code in a process of its own."""


def ask_python(code: str) -> Ended:
    """Run Python code in a process of its own, which cannot hurt this one and is ended when it hangs."""
    command = [sys.executable, "-c", code]
    try:
        ended = subprocess.run(
            command, timeout=PROBE_S, capture_output=True, stdin=subprocess.DEVNULL, check=False, text=True,
            errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Ended(None, "", f"no answer within {PROBE_S:g} s")
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def guarded(name: str, check: Callable[[], Check], limit_s: float = CHECK_S) -> Check:
    """A check's answer, or why it could not be made. One that hangs is left behind: a drive can hang for ever."""
    answers: list[Check] = []

    def run() -> None:
        try:
            answers.append(check())
        except Exception as error:  # A doctor that dies of a symptom helps nobody.
            what = f"{getattr(error, 'filename', None) or ''} {getattr(error, 'strerror', None) or error}".strip()
            answers.append(Check(name, "warn", f"could not be checked: {type(error).__name__}: {what}"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if answers:
        return answers[0]
    return Check(name, "bad", f"no answer within {limit_s:g} s", "see the kernel's log: the drive or the system hangs")


def _read(path: str) -> str | None:
    """A small text file, stripped; None when it is not there."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20).strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _cgroup_values(machine: Machine, name: str) -> list[str]:
    """A cgroup file's contents in this process's group and all above it."""
    own = next((line[3:] for line in (_read(f"{machine.proc}/self/cgroup") or "").split("\n") if line[:3] == "0::"), "")
    found, at = [], os.path.normpath("/" + own)
    while True:
        if (value := _read(f"{machine.sys}/fs/cgroup{at.rstrip('/')}/{name}")) is not None:
            found.append(value)
        if at in ("/", "//"):
            return found
        at = os.path.dirname(at)


def _listed(cpus: Collection[int]) -> str:
    shown = sorted(cpus)
    return ",".join(map(str, shown[:8])) + (f",... ({len(shown)} in all)" if len(shown) > 8 else "")


# The machine


def io_uring(machine: Machine, open_ring: Callable[[], None], needed: bool = False) -> Check:
    """Whether the kernel, and the container's filter, allow io_uring."""
    try:
        open_ring()
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, str(error.errno))
        disabled = _read(f"{machine.proc}/sys/kernel/io_uring_disabled")
        status = _read(f"{machine.proc}/self/status") or ""
        if disabled in ("1", "2"):
            advice = "set sysctl kernel.io_uring_disabled=0"
        elif re.search(r"^Seccomp:\s*2", status, re.MULTILINE):
            advice = "a seccomp filter is on, as containers have: allow io_uring_setup, _enter and _register in it"
        elif error.errno == errno.ENOMEM:
            advice = "raise the memlock limit (ulimit -l)"
        else:
            advice = "it takes Linux 5.6 or newer"
        return Check("io_uring", "bad" if needed else "warn", f"refused with {code}: posix is used instead", advice)
    return Check("io_uring", "ok", "works")


def memlock(
    registers: Callable[[int], bool], getrlimit: Callable[[int], tuple[int, int]] = resource.getrlimit
) -> Check:
    """Whether an SSD thread may lock the memory that its reads land in: for that RLIMIT_MEMLOCK counts, unless we have
    CAP_IPC_LOCK."""
    soft = getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    thread = format_bytes(STAGING_BYTES)
    if registers(STAGING_BYTES):
        return Check("memlock", "ok", f"{found}, and an SSD thread gets its {thread}")
    advice = "set ulimit -l unlimited (containers: --ulimit memlock=-1): reads cost more CPU without"
    return Check("memlock", "warn", f"only {found} may be locked", advice)


def _memory_bytes(machine: Machine) -> tuple[int, bool]:
    """Bytes that we may use, and whether a cgroup is what limits them."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", _read(f"{machine.proc}/meminfo") or "", re.MULTILINE)
    if match is None:
        raise ValueError("no MemTotal in meminfo")
    total = int(match[1]) * 1024
    limits = [int(value) for value in _cgroup_values(machine, "memory.max") if value.isdecimal()]
    return min([total, *limits]), bool(limits) and min(limits) < total


def shared_memory(machine: Machine, dram_bytes: int | None) -> Check:
    """Whether the DRAM tier, which is a file in /dev/shm, fits there and into memory."""
    memory, limited = _memory_bytes(machine)
    disk = os.statvfs(f"{machine.dev}/shm")
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    of = f"{format_bytes(memory)} of memory" + (" (the cgroup's limit)" if limited else "")
    found = f"{format_bytes(free)} free of {format_bytes(size)}, beside {of}"
    grow = "enlarge it: mount -o remount,size=... /dev/shm (containers: --shm-size)"
    if dram_bytes is not None and dram_bytes > min(free, memory):
        advice = grow if dram_bytes > free else "lower dram_capacity"
        return Check("shared memory", "bad", f"{found}: less than dram_capacity {format_bytes(dram_bytes)}", advice)
    if dram_bytes is None and size < memory // 4:
        return Check("shared memory", "warn", f"{found}: dram_capacity cannot be larger than /dev/shm", grow)
    return Check("shared memory", "ok", found)


def hugepages(machine: Machine) -> Check:
    """Huge pages: those that are reserved are lost to us, transparent ones help the DRAM pool."""
    memory, reserved = _memory_bytes(machine)[0], 0
    folder = f"{machine.sys}/kernel/mm/hugepages"
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        match = re.fullmatch(r"hugepages-(\d+)kB", name)
        if match is not None:
            reserved += int(match[1]) * 1024 * int(_read(f"{folder}/{name}/free_hugepages") or 0)
    modes = []
    for name in ("enabled", "shmem_enabled"):
        text = _read(f"{machine.sys}/kernel/mm/transparent_hugepage/{name}") or ""
        chosen = re.search(r"\[(\w+)\]", text)
        modes.append(f"{name}={chosen[1] if chosen else 'unknown'}")
    found = f"transparent: {' '.join(modes)}; reserved and free: {format_bytes(reserved)}"
    if reserved > RESERVED_SHARE * memory:
        advice = "nothing of vLLM or SARIA uses reserved ones: lower vm.nr_hugepages"
        return Check("hugepages", "warn", found, advice)
    return Check("hugepages", "ok", found)


def cpu_limit(machine: Machine, affinity: Collection[int]) -> Check:
    """Whether a cgroup gives less CPU time than there are CPUs: its threads then stand still together."""
    allowed = [float(len(affinity))]
    for value in _cgroup_values(machine, "cpu.max"):
        quota, _, period = value.partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            allowed.append(int(quota) / int(period))
    if min(allowed) < len(affinity):
        found = (
            f"a cgroup gives the time of {min(allowed):g} CPUs on {len(affinity)}: all threads stop when it is used up"
        )
        return Check("cpu limit", "warn", found, "raise it, or give whole CPUs (containers: --cpuset-cpus, not --cpus)")
    return Check("cpu limit", "ok", f"{len(affinity)} CPUs, no limit below them")


def link(measure: Callable[[], float], pacing: PacingConfig) -> Check:
    """How fast loads from DRAM are, and what pacing makes of it."""
    rate = measure()
    found = f"DRAM to HBM: {format_rate(rate)} alone; pacing {pacing.describe()}"
    if pacing.mode != "off" and pacing.ingress > max(1, rate):
        return Check("link", "warn", found, "pacing.ingress is more than the link can do: nothing is held back by it")
    return Check("link", "ok", found)


def io_cores(
    machine: Machine, configured: Collection[int], engine_pid: int | None, affinity: Collection[int], count: int
) -> Check:
    """Whether the SSD threads' CPUs are the engine's own. Of a running engine when its process is known, else of one
    that would be started like this process."""
    engine, whose = set(affinity), "this process"
    if engine_pid is not None:
        status = _read(f"{machine.proc}/{engine_pid}/status") or ""
        match = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
        if match is not None:
            engine, whose = cpu_list(match[1]), f"the engine (pid {engine_pid})"
    everywhere = set(range(count))
    chosen = io_cpus(configured, engine, count)
    found = f"SSD threads on CPUs {_listed(chosen)}, {whose} on {_listed(engine)}"
    shared = chosen & engine
    if configured and shared:
        advice = "bind vLLM to other CPUs (taskset, VLLM_CPU_OMP_THREADS_BIND), or take these out of io_cpus"
        return Check("I/O cores", "warn", f"{found}: {_listed(shared)} are both's", advice)
    if engine != everywhere == chosen and not configured:
        advice = "leave the SSD threads CPUs that vLLM is not bound to, and name them in io_cpus"
        return Check("I/O cores", "warn", found, advice)
    return Check("I/O cores", "ok", found)


def gds(machine: Machine, has_device: Callable[[], bool], ask: Ask) -> Check:
    """The parts that GPUDirect Storage needs. Nothing of it is loaded into this process."""
    if _read(f"{machine.proc}/driver/nvidia/version") is None:
        return Check("GDS", "ok", "no NVIDIA driver here: SSD reads land in host memory")
    missing = []
    if not has_device():
        missing.append("libcuda with a GPU that answers")
    if ask("import ctypes; ctypes.CDLL('libcufile.so.0')").status != 0:
        missing.append("libcufile")
    if not os.path.isdir(f"{machine.sys}/module/nvidia_fs"):
        missing.append("the kernel module nvidia-fs")
    if missing:
        return Check(
            "GDS", "warn", f"missing: {', '.join(missing)}", "GDS needs all of them; without, host memory is used"
        )
    return Check("GDS", "ok", "driver, libcuda, libcufile and nvidia-fs are there")


# Packages


def _package(name: str, code: str, ask: Ask) -> tuple[str | None, Check | None]:
    """A package's version, or the check that ends here."""
    ended = ask(code)
    if ended.status == 0 and ended.out.strip():
        return ended.out.strip().split("\n")[-1], None
    problem = (ended.err.strip().split("\n") or [""])[-1][:200]
    if f"No module named '{name}'" in problem:
        return None, None
    return None, Check(name, "warn", f"is installed and cannot be imported: {problem or f'status {ended.status}'}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def nixl(ask: Ask, needed: bool = False) -> Check:
    """Whether NIXL can be imported, and is new enough. Importing it closes a process's log handlers."""
    code = (
        "from nixl import _api\nfrom importlib import metadata\n"
        "print(metadata.version(_api.__name__.partition('.')[0]))"
    )
    version, problem = _package("nixl", code, ask)
    advice = "pip install 'nixl>=1.5'"
    if version is None:
        if problem is not None or not needed:
            return problem or Check("nixl", "ok", "is not installed, and optional")
        return Check("nixl", "bad", "is not installed, and configured", advice)
    if _numbers(version) < NIXL_MIN:
        least = ".".join(map(str, NIXL_MIN))
        return Check("nixl", "bad" if needed else "warn", f"{version} is older than {least}", advice)
    return Check("nixl", "ok", version)


def kvikio(ask: Ask, needed: bool = False) -> Check:
    """Whether kvikio can be imported."""
    version, problem = _package("kvikio", "import kvikio; print(kvikio.__version__)", ask)
    if needed and version is None and problem is None:
        return Check("kvikio", "bad", "is not installed, and configured", "pip install kvikio-cu13")
    return problem or Check("kvikio", "ok", version or "is not installed, and optional")


def vllm(ask: Ask) -> Check:
    """Whether vLLM and our connector can be imported together, and vLLM's version."""
    least = ".".join(map(str, VLLM_MIN))
    code = "import vllm, saria_connector\nprint(vllm.__version__)"
    version, problem = _package("vllm", code, ask)
    if version is None:
        install = f"install vLLM {least} or newer into this environment"
        return problem._replace(status="bad") if problem else Check("vllm", "bad", "is not installed", install)
    if _numbers(version) < VLLM_MIN:
        return Check("vllm", "bad", f"{version} is older than {least}", f"install vLLM {least} or newer")
    if _numbers(version)[:2] != VLLM_TESTED:
        tested = ".".join(map(str, VLLM_TESTED))
        return Check("vllm", "warn", f"{version}; {tested} is the version tested", "try it before you rely on it")
    return Check("vllm", "ok", version)


# The configuration


def configuration(extra: object) -> tuple[Check, SariaConfig | None]:
    """A `kv_connector_extra_config`, read and checked against this machine as the connector does at its start."""
    if not isinstance(extra, dict):
        return Check(
            "config", "bad", f"{type(extra).__name__} is no JSON object", "give kv_connector_extra_config"
        ), None
    try:
        config = SariaConfig.from_extra(extra)
    except ConfigError as error:
        return Check("config", "bad", str(error), "see the README's table of keys"), None
    try:
        config.check_machine()
    except ConfigError as error:
        return Check("config", "bad", str(error), "vLLM would not start with it on this machine"), config
    return Check("config", "ok", config.describe()), config
