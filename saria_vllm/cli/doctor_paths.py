"""What `saria doctor` asks of each SSD path and its drive."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Collection
from typing import Any

from saria_vllm.cli.doctor_checks import Check, Machine
from saria_vllm.cli.inspect import wear
from saria_vllm.config import format_bytes
from saria_vllm.engine.cpus import cpu_list
from saria_vllm.errors import StorageError
from saria_vllm.policy.endurance import RATED_YEARS
from saria_vllm.storage.directories import TOP_NAME
from saria_vllm.storage.drives import Drive
from saria_vllm.storage.rates import kept_rate
from saria_vllm.storage.reclaim import usage
from saria_vllm.storage.smart import Smart, disks_under
from saria_vllm.storage.survey import leases_in

FREE_SHARE = 0.05
READ_MB_S, WRITE_MB_S = 500, 200
"""A drive that is slower is no NVMe drive, or not well."""

RATE_BLOCK_BYTES, RATE_DEPTH, RATE_S = 1 << 20, 16, 0.3
LIFE_USED_PERCENT = 90
OTHERS = 0o022

Measure = Callable[..., Any]
"""`saria_vllm.engine.drive_rates.measure`."""


def existing_part(path: str) -> str:
    """The path, or the deepest directory on the way to it that exists."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def permissions(path: str) -> Check:
    """Whether we can make and keep our files under a path, and nobody else can."""
    at = existing_part(path)
    status = os.stat(at)
    accepted = "give a directory of the user that runs vLLM, on the drive that is meant"
    if not stat.S_ISDIR(status.st_mode):
        return Check("permissions", "bad", f"{at} is no directory", accepted)
    if not os.access(at, os.R_OK | os.W_OK | os.X_OK):
        return Check("permissions", "bad", f"user {os.geteuid()} cannot write in {at}", accepted)
    if at != path:
        return Check("permissions", "ok", f"does not exist yet, and can be made in {at}")
    top = f"{path}/{TOP_NAME}"
    try:
        own = os.lstat(top)
    except FileNotFoundError:
        own = status
    if stat.S_ISLNK(own.st_mode) or not stat.S_ISDIR(own.st_mode):
        return Check(
            "permissions", "bad", f"{top} is a symlink or no directory", "remove it: symlinks are not followed"
        )
    if os.geteuid() not in (0, own.st_uid):
        return Check("permissions", "bad", f"{top} belongs to user {own.st_uid}", accepted)
    if own is not status and not os.access(top, os.R_OK | os.W_OK | os.X_OK):
        return Check("permissions", "bad", f"mode {stat.S_IMODE(own.st_mode):04o} of {top}", f"chmod 0700 {top}")
    if own.st_mode & OTHERS and not own.st_mode & stat.S_ISVTX:
        where = top if own is not status else path
        return Check("permissions", "warn", f"others may write in {where}", f"chmod go-w {where}")
    return Check("permissions", "ok", f"mode {stat.S_IMODE(own.st_mode):04o}, user {own.st_uid}")


def space(path: str, wanted_bytes: int | None, root: str = "/") -> Check:
    """Free space, whether what is wanted of this path fits beside what others keep there, and whether it is a
    drive's or the root file system's."""
    disk = os.statvfs(existing_part(path))
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    found = f"{format_bytes(free)} free of {format_bytes(size)}"
    if disk.f_flag & os.ST_RDONLY:
        return Check("space", "bad", "mounted read-only", "see the kernel's log: a failing file system is remounted so")
    ours = usage(path, (TOP_NAME,))[1]
    if wanted_bytes is not None and wanted_bytes > free + ours:
        what = f"{found}, {format_bytes(ours)} ours: less than this path's part of ssd_capacity"
        return Check("space", "warn", f"{what}, {format_bytes(wanted_bytes)}", "free space, or lower ssd_capacity")
    if os.stat(existing_part(path)).st_dev == os.stat(root).st_dev:
        advice = "mount the drive that is meant, or give a path on it: a full root disk stops more than this tier"
        return Check("space", "warn", f"{found}, of the root file system", advice)
    if free + ours < FREE_SHARE * size:
        return Check("space", "warn", found, "free space: a full drive makes the tier smaller and wears faster")
    return Check("space", "ok", found + (f", {format_bytes(ours)} ours" if ours else ""))


def direct(path: str) -> Check:
    """A real aligned write and read past the page cache, in a directory that is gone afterwards."""
    at = existing_part(path)
    advice = "use a local ext4 or XFS: buffered I/O takes memory and CPU from vLLM"
    with tempfile.TemporaryDirectory(prefix=".saria-doctor-", dir=at) as folder:
        try:
            drive = Drive(folder)
        except StorageError as error:
            return Check("O_DIRECT", "bad", str(error), "replace the drive: it returns other bytes than were written")
    if not drive.direct:
        return Check("O_DIRECT", "warn", drive.note.removeprefix(f"{folder}: "), advice)
    if drive.note:
        return Check("O_DIRECT", "warn", drive.note.removeprefix(f"{folder}: "), "free space")
    return Check("O_DIRECT", "ok", "an aligned write came back")


def numa(machine: Machine, path: str, affinity: Collection[int]) -> Check:
    """Whether this process may run on the NUMA node that the drive hangs on."""
    device = os.stat(existing_part(path)).st_dev
    disks = disks_under(f"{machine.sys}/dev/block/{os.major(device)}:{os.minor(device)}")
    nodes = {node for disk in disks if (node := _node_of(f"{machine.sys}/block/{disk}")) is not None}
    if not nodes:
        return Check("NUMA", "ok", "the drive names no NUMA node")
    cpus: set[int] = set()
    for node in nodes:
        with open(f"{machine.sys}/devices/system/node/node{node}/cpulist", encoding="ascii") as file:
            cpus |= cpu_list(file.read())
    found = f"the drive is on node {', '.join(map(str, sorted(nodes)))}"
    if not cpus & set(affinity):
        advice = "give io_cpus of that node, or bind vLLM there"
        return Check("NUMA", "warn", f"{found}, of which this process may use no CPU", advice)
    return Check("NUMA", "ok", found)


def _node_of(link: str) -> int | None:
    folder = os.path.realpath(link)
    while len(folder) > 1:
        try:
            with open(f"{folder}/numa_node", encoding="ascii") as file:
                node = int(file.read())
            return node if node >= 0 else None
        except (OSError, ValueError):
            folder = os.path.dirname(folder)
    return None


def rates(path: str, measure: Measure) -> Check:
    """How fast the drive reads and writes now, through the engine that would serve."""
    found = measure("auto", existing_part(path), RATE_BLOCK_BYTES, RATE_DEPTH, RATE_S)
    read, write = found.read.mb_s, found.write.mb_s
    text = f"reads {read:,.0f} MB/s, writes {write:,.0f} MB/s ({found.engine})"
    kept, age_s = kept_rate(path, time.time())
    if kept:
        text += f"; an engine goes by {kept / 1e6:,.0f} MB/s until it has read, measured {age_s / 86_400:.1f} days ago"
    if read < READ_MB_S or write < WRITE_MB_S:
        advice = "see whether others use the drive, whether it is hot, full or remote; saria bench ssd says more"
        return Check("drive rates", "warn", text, advice)
    return Check("drive rates", "ok", text)


def smart(path: str, read_smart: Callable[[str], Smart | str]) -> Check:
    """What the drive says of its own wear."""
    found = read_smart(existing_part(path))
    if isinstance(found, str):
        return Check("SMART", "warn", f"cannot be read: {found}", "wear is known from our own account only")
    text = (
        f"{found.percentage_used} % of life used, {found.spare_percent} % spare, {found.written_bytes / 1e12:.1f} TB "
    )
    text += "written in all"
    if found.media_bytes and found.written_bytes:
        text += f", write amplification {found.media_bytes / found.written_bytes:.2f}"
    if found.critical_warning or found.percentage_used >= 100:
        if found.critical_warning:
            text += f"; critical warning {found.critical_warning:#x}"
        return Check("SMART", "bad", text, "replace the drive")
    if found.percentage_used >= LIFE_USED_PERCENT:
        return Check("SMART", "warn", text, "order its successor, or lower endurance.target_dwpd")
    return Check("SMART", "ok", text)


def endurance(path: str, now: float) -> Check:
    """What our engines wrote, and how long the drive lasts at that rate."""
    rows = wear(path, now)
    problems = [str(row["problem"]) for row in rows if "problem" in row]
    if problems:
        return Check(
            "endurance", "warn", "; ".join(problems), "saria fsck --drop-bad removes it; the budget begins anew"
        )
    if not rows:
        return Check("endurance", "ok", "nothing was written by SARIA yet")
    written, day = (sum(row[key] for row in rows) for key in ("written_bytes", "last_day_bytes"))
    found = f"{format_bytes(written)} written by SARIA, {format_bytes(day)} in the last 24 h"
    lives = [row["drive_life_years"] for row in rows if row["drive_life_years"] is not None]
    if not lives:
        return Check("endurance", "ok", found)
    years = 1 / sum(1 / life for life in lives)
    found += f"; at this rate the drive lasts {years:,.1f} years"
    if years < RATED_YEARS:
        return Check("endurance", "warn", found, f"below {RATED_YEARS:g} years: lower endurance.target_dwpd")
    return Check("endurance", "ok", found)


def leases(machine: Machine, path: str) -> tuple[Check, list[int]]:
    """Which engine directories are in use and by whom."""
    held = leases_in(path, machine.proc)
    pids = sorted({pid for _, _, holders in held for pid in holders})
    if not held:
        return Check("leases", "ok", "no engine uses this path now"), pids
    words = (
        f"{namespace[:8]}.../{engine} by {', '.join(f'pid {pid}' for pid in holders) or 'a process not seen from here'}"
        for namespace, engine, holders in held
    )
    return Check("leases", "ok", "; ".join(words)), pids
