"""`saria doctor`: both sides of every check, on made-up machines, and that none of them ends in a traceback."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from live_engine import NAME, LiveEngine, end, start
from saria_vllm.cli import doctor, doctor_checks, doctor_paths, main
from saria_vllm.cli.doctor_checks import Check, Ended, Machine
from saria_vllm.config import PacingConfig
from saria_vllm.policy.endurance import Governor
from saria_vllm.storage.rates import write_rate
from saria_vllm.storage.smart import Smart
from saria_vllm.storage.wear import device_bytes, write_state

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """An ordinary machine: 64 GiB, no container, no GPU."""
    made = Machine(*(str(tmp_path / name) for name in ("proc", "sys", "dev")))
    put(made.proc, "meminfo", f"MemTotal:       {64 * GIB // 1024} kB\nMemFree: 1 kB\n")
    put(made.proc, "self/cgroup", "0::/user.slice/x\n")
    put(made.proc, "self/status", "Name:\tpython\nSeccomp:\t0\n")
    put(made.proc, "sys/kernel/io_uring_disabled", "0\n")
    put(made.sys, "kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    put(made.sys, "kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "0\n")
    os.makedirs(f"{made.dev}/shm")
    return made


def put(root: str, name: str, text: str) -> None:
    path = Path(root) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def refused(code: int) -> Callable[[], None]:
    def open_ring() -> None:
        raise OSError(code, os.strerror(code))

    return open_ring


def says(check: Check, status: str, *words: str) -> None:
    """That a check came out so, and that it says what to do unless all is well."""
    assert check.status == status, check
    assert bool(check.advice) == (status != "ok"), check
    for word in words:
        assert word in f"{check.found} {check.advice}", check


# The machine.


def test_io_uring(machine: Machine) -> None:
    says(doctor_checks.io_uring(machine, lambda: None), "ok")
    says(doctor_checks.io_uring(machine, refused(errno.ENOSYS)), "warn", "ENOSYS", "5.6")
    says(doctor_checks.io_uring(machine, refused(errno.ENOMEM)), "warn", "ENOMEM", "memlock")
    put(machine.proc, "self/status", "Seccomp:\t2\n")
    says(doctor_checks.io_uring(machine, refused(errno.EPERM)), "warn", "EPERM", "seccomp", "io_uring_setup")
    says(doctor_checks.io_uring(machine, refused(errno.EPERM), needed=True), "bad", "EPERM")
    put(machine.proc, "sys/kernel/io_uring_disabled", "2\n")
    says(doctor_checks.io_uring(machine, refused(errno.EPERM)), "warn", "kernel.io_uring_disabled=0")


@pytest.mark.parametrize(
    ("soft", "status", "word"),
    [(resource.RLIM_INFINITY, "ok", "unlimited"), (64 << 20, "ok", "64.00MiB"), (65536, "warn", "ulimit -l")],
)
def test_memlock(soft: int, status: str, word: str) -> None:
    asked: list[int] = []

    def registers(nbytes: int) -> bool:
        asked.append(nbytes)
        return status == "ok"

    says(doctor_checks.memlock(registers, lambda which: (soft, soft)), status, word)
    assert asked == [32 << 20]


def test_memlock_is_what_the_kernel_says() -> None:
    try:
        doctor._open_ring()
    except OSError as error:
        pytest.skip(f"io_uring is not available: {error}")
    code = (
        "import os, resource\n"
        "from saria_vllm.cli.doctor import _registers\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (4 << 20,) * 2)\n"
        "if os.geteuid() == 0:\n    os.setuid(65534)\n"  # Without CAP_IPC_LOCK.
        "print(_registers(1 << 20), _registers(32 << 20))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", "False"]


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets the size of /dev/shm and what is free."""

    def set_size(size: int, free: int) -> None:
        answer = SimpleNamespace(f_blocks=size // 4096, f_bavail=free // 4096, f_frsize=4096, f_flag=0)
        monkeypatch.setattr(os, "statvfs", lambda path: answer)

    return set_size


def test_shared_memory(machine: Machine, shm: Callable[[int, int], None]) -> None:
    shm(32 * GIB, 30 * GIB)
    says(doctor_checks.shared_memory(machine, None), "ok", "30.00GiB", "64.00GiB")
    says(doctor_checks.shared_memory(machine, 30 * GIB), "ok")
    says(doctor_checks.shared_memory(machine, 31 * GIB), "bad", "31.00GiB", "--shm-size")
    put(machine.sys, "fs/cgroup/user.slice/x/memory.max", "max\n")
    put(machine.sys, "fs/cgroup/user.slice/memory.max", f"{8 * GIB}\n")
    says(doctor_checks.shared_memory(machine, 9 * GIB), "bad", "cgroup", "lower dram_capacity")
    says(doctor_checks.shared_memory(machine, 8 * GIB), "ok", "8.00GiB of memory (the cgroup's limit)")
    shm(64 << 20, 64 << 20)
    says(doctor_checks.shared_memory(machine, None), "warn", "64.00MiB", "--shm-size")


def test_hugepages(machine: Machine) -> None:
    says(doctor_checks.hugepages(machine), "ok", "enabled=madvise", "shmem_enabled=unknown")
    put(machine.sys, "kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "16\n")
    says(doctor_checks.hugepages(machine), "warn", "16.00GiB", "vm.nr_hugepages")


def test_cpu_limit(machine: Machine) -> None:
    put(machine.sys, "fs/cgroup/user.slice/x/cpu.max", "max 100000\n")
    says(doctor_checks.cpu_limit(machine, range(16)), "ok", "16")
    put(machine.sys, "fs/cgroup/user.slice/cpu.max", "450000 100000\n")
    says(doctor_checks.cpu_limit(machine, range(16)), "warn", "4.5 CPUs on 16", "--cpuset-cpus")
    says(doctor_checks.cpu_limit(machine, range(4)), "ok")


def test_io_cores(machine: Machine) -> None:
    def check(configured: Any, affinity: Any, count: int, pid: int | None = None) -> Check:
        return doctor_checks.io_cores(machine, configured, pid, affinity, count)

    says(check((), range(16), 16), "ok", "(16 in all)")  # Nothing is bound.
    says(check((), range(12), 16), "ok", "SSD threads on CPUs 12,13,14,15")
    says(check((14, 15), range(12), 16), "ok")
    says(check((11, 14), range(12), 16), "warn", "11 are both's", "VLLM_CPU_OMP_THREADS_BIND")
    says(check((), (0, 1), 4), "warn", "io_cpus")
    says(check((), (0, 1), 2), "ok")
    put(machine.proc, "77/status", "Name:\tx\nCpus_allowed_list:\t8-15\n")
    says(check((8,), range(4), 16, 77), "warn", "pid 77", "8 are both's")
    says(check((4,), range(16), 16, 77), "ok", "the engine (pid 77)")
    says(check((4,), range(8, 16), 16, 78), "ok", "this process")


def test_gds(machine: Machine) -> None:
    there, missing = Ended(0, "", ""), Ended(1, "", "OSError: libcufile.so.0")
    says(doctor_checks.gds(machine, lambda: True, lambda code: there), "ok", "no NVIDIA driver")
    put(machine.proc, "driver/nvidia/version", "NVRM version: 580\n")
    says(doctor_checks.gds(machine, lambda: False, lambda code: missing), "warn", "libcuda", "libcufile", "nvidia-fs")
    says(doctor_checks.gds(machine, lambda: True, lambda code: Ended(None, "", "hangs")), "warn", "libcufile")
    os.makedirs(f"{machine.sys}/module/nvidia_fs")
    says(doctor_checks.gds(machine, lambda: True, lambda code: there), "ok", "nvidia-fs are there")


# Packages.


def answer(out: str = "", err: str = "", status: int | None = 0) -> Callable[[str], Ended]:
    return lambda code: Ended(status, out, err)


def lacks(name: str) -> Callable[[str], Ended]:
    return answer(err=f"Traceback\nModuleNotFoundError: No module named '{name}'\n", status=1)


def test_nixl() -> None:
    says(doctor_checks.nixl(answer("noise\n1.5.1\n")), "ok", "1.5.1")
    says(doctor_checks.nixl(lacks("nixl")), "ok", "optional")
    says(doctor_checks.nixl(lacks("nixl"), needed=True), "bad", "pip install")
    says(doctor_checks.nixl(answer("0.9.0")), "warn", "older than 1.5.0")
    says(doctor_checks.nixl(answer("0.9.0"), needed=True), "bad", "older than 1.5.0")
    broken = doctor_checks.nixl(answer(err="OSError: libcuda.so.1: cannot open", status=1))
    assert broken.status == "warn" and "libcuda.so.1" in broken.found


def test_kvikio() -> None:
    says(doctor_checks.kvikio(answer("25.10\n")), "ok", "25.10")
    says(doctor_checks.kvikio(lacks("kvikio")), "ok", "optional")
    says(doctor_checks.kvikio(lacks("kvikio"), needed=True), "bad", "pip install")
    assert doctor_checks.kvikio(answer(err="no answer within 120 s", status=None)).status == "warn"
    assert "status -11" in doctor_checks.kvikio(answer(status=-11)).found


def test_vllm() -> None:
    says(doctor_checks.vllm(answer("0.32.0+cpu\n")), "ok", "0.32.0+cpu")
    says(doctor_checks.vllm(answer("0.30.1\n")), "warn", "0.32 is the version tested")
    says(doctor_checks.vllm(answer("0.29.9\n")), "bad", "older than 0.30")
    says(doctor_checks.vllm(lacks("vllm")), "bad", "install vLLM")
    broken = doctor_checks.vllm(lacks("saria_connector"))
    assert broken.status == "bad" and "saria_connector" in broken.found


def test_another_process_is_asked_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_checks.ask_python("print(6 * 7)") == Ended(0, "42\n", "")
    failed = doctor_checks.ask_python("import no_such_module")
    assert failed.status == 1 and "No module named 'no_such_module'" in failed.err
    monkeypatch.setattr(doctor_checks, "PROBE_S", 0.2)
    assert doctor_checks.ask_python("while True: pass").status is None


# The configuration.


def test_a_configuration_is_checked_as_the_connector_would(tmp_path: Path) -> None:
    check, config = doctor_checks.configuration({"dram_capacity": "1MiB"})
    assert (check.status, config is not None) == ("ok", True)
    check, config = doctor_checks.configuration({"dram_capcity": "1MiB"})
    says(check, "bad", "did you mean dram_capacity?")
    assert config is None
    too_much = {"dram_capacity": "1MiB", "ssd_paths": [str(tmp_path / "x")], "ssd_capacity": "900TiB"}
    check, config = doctor_checks.configuration(too_much)
    says(check, "bad", "ssd_capacity")
    assert config is not None
    assert doctor_checks.configuration([1])[0].status == "bad"


# Paths.


def test_permissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "d")
    says(doctor_paths.permissions(f"{path}/new/er"), "ok", f"can be made in {tmp_path}")
    os.mkdir(path, 0o700)
    says(doctor_paths.permissions(path), "ok", "0700")
    os.chmod(path, 0o777)
    says(doctor_paths.permissions(path), "warn", f"chmod go-w {path}")
    os.mkdir(f"{path}/saria", 0o700)
    says(doctor_paths.permissions(path), "ok", "0700")
    owner = os.stat(path).st_uid
    with monkeypatch.context() as change:
        change.setattr(os, "geteuid", lambda: owner + 1)
        says(doctor_paths.permissions(path), "bad", f"belongs to user {owner}")
        change.setattr(os, "access", lambda at, mode: False)
        says(doctor_paths.permissions(path), "bad", "cannot write")
        change.setattr(os, "geteuid", lambda: owner)
        change.setattr(os, "access", lambda at, mode: not at.endswith("/saria"))
        says(doctor_paths.permissions(path), "bad", f"mode 0700 of {path}/saria")
    os.rmdir(f"{path}/saria")
    os.symlink("/", f"{path}/saria")
    says(doctor_paths.permissions(path), "bad", "symlink")
    (tmp_path / "file").touch()
    says(doctor_paths.permissions(str(tmp_path / "file")), "bad", "no directory")


def test_space(tmp_path: Path, shm: Callable[[int, int], None]) -> None:
    path = str(tmp_path)
    shm(100 * GIB, 50 * GIB)
    says(doctor_paths.space(path, None, "/proc"), "ok", "50.00GiB free of 100.00GiB")
    says(doctor_paths.space(path, 50 * GIB, "/proc"), "ok")
    says(doctor_paths.space(path, 51 * GIB), "warn", "51.00GiB", "lower ssd_capacity")
    says(doctor_paths.space(path, None, path), "warn", "of the root file system", "mount the drive")
    shm(100 * GIB, 4 * GIB)
    says(doctor_paths.space(path, None, "/proc"), "warn", "free space")
    os.statvfs(path).f_flag |= os.ST_RDONLY
    says(doctor_paths.space(path, None, "/proc"), "bad", "read-only")


def test_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(doctor_paths.direct(str(tmp_path / "not yet")), "ok", "came back")
    assert os.listdir(tmp_path) == []
    drives = {
        "no O_DIRECT here": SimpleNamespace(direct=False, note="no O_DIRECT here"),
        "No space left": SimpleNamespace(direct=True, note="No space left"),
    }
    for word, drive in drives.items():
        monkeypatch.setattr(doctor_paths, "Drive", lambda folder, drive=drive: drive)
        says(doctor_paths.direct(str(tmp_path)), "warn", word)

    def lying(folder: str) -> None:
        raise doctor_paths.StorageError("a probe read back other bytes than were written")

    monkeypatch.setattr(doctor_paths, "Drive", lying)
    says(doctor_paths.direct(str(tmp_path)), "bad", "other bytes", "replace")
    assert os.listdir(tmp_path) == []


def numa_of(machine: Machine, path: Path, node: str) -> None:
    """A drive under `path` that hangs on a node."""
    device = os.stat(path).st_dev
    folder = Path(machine.sys) / "devices" / "pci0" / "nvme" / "nvme0" / "nvme0n1"
    folder.mkdir(parents=True)
    (folder / "size").write_text("100\n")
    (folder.parent / "numa_node").write_text(f"{node}\n")
    for name in ("dev/block", "block"):
        (Path(machine.sys) / name).mkdir(parents=True)
    (Path(machine.sys) / "dev/block" / f"{os.major(device)}:{os.minor(device)}").symlink_to(folder)
    (Path(machine.sys) / "block" / "nvme0n1").symlink_to(folder)


def test_numa(machine: Machine, tmp_path: Path) -> None:
    says(doctor_paths.numa(machine, str(tmp_path), {0}), "ok", "names no NUMA node")
    numa_of(machine, tmp_path, "1")
    put(machine.sys, "devices/system/node/node1/cpulist", "8-15\n")
    says(doctor_paths.numa(machine, str(tmp_path / "new"), range(12)), "ok", "node 1")
    says(doctor_paths.numa(machine, str(tmp_path), range(8)), "warn", "io_cpus")


def test_a_drive_without_a_node(machine: Machine, tmp_path: Path) -> None:
    numa_of(machine, tmp_path, "-1")
    says(doctor_paths.numa(machine, str(tmp_path), {0}), "ok", "names no NUMA node")


@pytest.mark.parametrize(("read", "write", "status"), [(3000, 2000, "ok"), (499, 2000, "warn"), (3000, 199, "warn")])
def test_drive_rates(tmp_path: Path, read: float, write: float, status: str) -> None:
    def measure(name: str, directory: str, block_bytes: int, depth: int, seconds: float) -> Any:
        assert (name, directory) == ("auto", str(tmp_path))
        return SimpleNamespace(read=SimpleNamespace(mb_s=read), write=SimpleNamespace(mb_s=write), engine="posix")

    says(doctor_paths.rates(str(tmp_path / "new"), measure), status, f"reads {read:,} MB/s, writes {write:,}")
    (tmp_path / "new" / "saria").mkdir(parents=True)
    write_rate(str(tmp_path / "new"), 0, 1, time.time() - 86_400, 5e8)
    at = tmp_path / "new"

    def again(*question: Any) -> Any:
        return measure("auto", str(tmp_path), *question[2:])

    says(doctor_paths.rates(str(at), again), status, "until it has read, measured 1.0 days ago")


def test_smart(tmp_path: Path) -> None:
    def check(**facts: Any) -> Check:
        known = {
            "disks": ("x",), "written_bytes": 2 * 10**12, "media_bytes": 3 * 10**12, "percentage_used": 5,
            "spare_percent": 100, "critical_warning": 0,
        }  # fmt: skip
        return doctor_paths.smart(str(tmp_path), lambda path: Smart(**{**known, **facts}))

    says(check(), "ok", "5 % of life used", "write amplification 1.50")
    assert "amplification" not in check(media_bytes=0).found
    says(check(percentage_used=90), "warn", "successor")
    says(check(percentage_used=101), "bad", "replace")
    says(check(critical_warning=4), "bad", "0x4")
    says(doctor_paths.smart(str(tmp_path), lambda path: "takes CAP_SYS_ADMIN"), "warn", "CAP_SYS_ADMIN")


def test_endurance(tmp_path: Path) -> None:
    path, now = str(tmp_path), time.time()
    says(doctor_paths.endurance(path, now), "ok", "nothing was written")
    size = device_bytes([path])[0]
    governor = Governor(1e9, 2e9, now - 3600)
    (tmp_path / "saria").mkdir()
    write_state(path, 0, msgspec.json.encode(governor.state(now, now)))
    says(doctor_paths.endurance(path, now), "ok", "0B written")
    for engine, status in ((0, "ok"), (1, "warn")):  # Two engines wear the drive twice as fast.
        governor = Governor(1e9, 2e9, now - 3600)
        governor.spend(int(0.7 * size), now - 60)
        write_state(path, engine, msgspec.json.encode(governor.state(now, now)))
        says(doctor_paths.endurance(path, now), status, "years")
    write_state(path, 2, b"{}")
    says(doctor_paths.endurance(path, now), "warn", "fsck")


def test_leases(tmp_path: Path) -> None:
    says(doctor_paths.leases(Machine(), str(tmp_path))[0], "ok", "no engine")
    process = start(tmp_path, "idle")
    try:
        check, pids = doctor_paths.leases(Machine(), str(tmp_path))
        says(check, "ok", f"{NAME[:8]}.../e0 by pid {process.pid}")
        assert pids == [process.pid]
        (tmp_path / "saria" / ("0" * 32)).symlink_to(tmp_path / "saria" / NAME)
        (tmp_path / "saria" / ("1" * 32) / "e0").mkdir(parents=True)
        (tmp_path / "saria" / ("1" * 32) / "e0" / "lease").symlink_to(tmp_path / "saria" / NAME / "e0" / "lease")
        assert doctor_paths.leases(Machine(), str(tmp_path)) == (check, pids), "what is not ours is not followed"
        unseen = Machine(proc=str(tmp_path / "proc"))
        says(doctor_paths.leases(unseen, str(tmp_path))[0], "ok", "a process not seen from here")
        put(unseen.proc, "locks", "")
        says(doctor_paths.leases(unseen, str(tmp_path))[0], "ok", "a process not seen from here")
        namespace = tmp_path / "saria" / NAME
        (namespace / "e0").rename(namespace / "e1")
        (namespace / "e0").symlink_to("e1")
        says(doctor_paths.leases(Machine(), str(tmp_path))[0], "ok", f"{NAME[:8]}.../e1 by pid {process.pid}")
    finally:
        end(process)
    says(doctor_paths.leases(Machine(), str(tmp_path))[0], "ok", "no engine")


def test_link() -> None:
    def measure() -> float:
        return 3e9

    says(doctor_checks.link(measure, PacingConfig()), "ok", "3.00GB/s", "priority, up to 70% of the link")
    says(doctor_checks.link(measure, PacingConfig(ingress=2e9)), "ok", "2.00GB/s")
    says(doctor_checks.link(measure, PacingConfig(ingress=45e9)), "warn", "45.00GB/s", "nothing is held back")
    says(doctor_checks.link(measure, PacingConfig("off", 45e9)), "ok", "pacing off")


# The command.


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package is imported, and no drive measured."""
    monkeypatch.setattr(doctor_checks, "ask_python", answer("0.32.0"))
    rates = SimpleNamespace(read=SimpleNamespace(mb_s=3000), write=SimpleNamespace(mb_s=2000), engine="posix")
    monkeypatch.setattr(doctor, "measure", lambda *arguments: rates)
    monkeypatch.setattr(doctor, "measure_memory", lambda: 3e9)


@pytest.mark.usefixtures("quick")
def test_the_report_has_every_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    engine = LiveEngine([str(tmp_path / "used")])
    engine.close()
    paths = [str(tmp_path / "used"), str(tmp_path / "new")]
    config = {"dram_capacity": "1MiB", "ssd_paths": paths[1:], "ssd_capacity": "1GiB"}
    whole = json.dumps({"kv_connector": "SariaConnector", "kv_connector_extra_config": config})
    assert main(["doctor", "--json", "--path", paths[0], "--config", whole]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.out.count("\n") == 1 and "checking io_uring" in captured.err
    of_path = ["permissions", "space", "O_DIRECT", "NUMA", "drive rates", "SMART", "endurance", "leases"]
    rest = [
        "io_uring", "memlock", "shared memory", "hugepages", "cpu limit", "link", "I/O cores", "GDS", "nixl",
        "kvikio", "vllm",
    ]  # fmt: skip
    names = [(None, "config"), *((path, name) for path in paths for name in of_path), *((None, name) for name in rest)]
    assert [(row["path"], row["name"]) for row in report["checks"]] == names
    for row in report["checks"]:
        assert row["status"] in ("ok", "warn"), row
        assert "could not be checked" not in row["found"], row
    assert report["status"] == max((row["status"] for row in report["checks"]), key=["ok", "warn"].index)
    assert sorted(os.listdir(tmp_path)) == ["used"]
    assert sorted(os.listdir(paths[0])) == ["saria"]


@pytest.mark.usefixtures("quick")
def test_what_is_bad_makes_the_exit_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "\x1b[31mfile").touch()
    assert main(["doctor", "--path", str(tmp_path / "\x1b[31mfile")]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out and "bad   " in out and "-> give a directory" in out
    assert main(["doctor", "--config", '{"dram_capacity": 5}']) == 1
    assert "bad   config: dram_capacity: 5 is not a size" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "nan"])
def test_what_is_no_json_is_bad_usage(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main(["doctor", "--config", text]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "expected a JSON object" in captured.err


def test_a_check_that_cannot_be_made_says_why() -> None:
    def missing() -> Check:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/sys/x")

    def wrong() -> Check:
        raise ValueError("no MemTotal in meminfo")

    found = [doctor_checks.guarded("x", check) for check in (missing, wrong)]
    assert [check.status for check in found] == ["warn", "warn"]
    assert found[0].found == "could not be checked: FileNotFoundError: /sys/x No such file or directory"
    assert "no MemTotal" in found[1].found
    says(doctor_checks.guarded("x", lambda: time.sleep(0.5) or Check("x", "ok", ""), 0.01), "bad", "no answer")


def test_an_empty_machine_gives_no_traceback(tmp_path: Path) -> None:
    nowhere = Machine(*(str(tmp_path / name) for name in "abc"))
    for name, check in {
        "io_uring": lambda: doctor_checks.io_uring(nowhere, refused(errno.EPERM)),
        "shared memory": lambda: doctor_checks.shared_memory(nowhere, None),
        "hugepages": lambda: doctor_checks.hugepages(nowhere),
        "cpu limit": lambda: doctor_checks.cpu_limit(nowhere, {0}),
        "I/O cores": lambda: doctor_checks.io_cores(nowhere, (), 1, {0}, 1),
        "GDS": lambda: doctor_checks.gds(nowhere, lambda: False, answer()),
        "NUMA": lambda: doctor_paths.numa(nowhere, str(tmp_path), {0}),
        "leases": lambda: doctor_paths.leases(nowhere, str(tmp_path))[0],
    }.items():
        found = doctor_checks.guarded(name, check)
        assert (found.name, found.status in ("ok", "warn")) == (name, True), found


def test_help_is_there_for_each_command() -> None:
    for command in ("doctor", "fsck", "inspect"):
        shown = subprocess.run(
            [os.sys.executable, "-m", "saria_vllm.cli", command, "--help"], capture_output=True, text=True, check=True
        )
        assert "--json" in shown.stdout
