"""The DRAM pool: regions of ranks, bounds, memory that is not there, and files left by killed engines."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from saria_vllm.config import format_bytes
from saria_vllm.engine import pool as pool_module
from saria_vllm.engine.pool import FILE_PREFIX, DramPool
from saria_vllm.errors import ConfigError
from saria_vllm.types import Slot

SLAB = 64 * 1024
SHM = "/dev/shm"

pytestmark = pytest.mark.skipif(not os.path.isdir(SHM), reason="no /dev/shm")


@pytest.fixture
def name() -> Iterator[str]:
    yield (unique := f"test-{uuid.uuid4().hex}")
    assert not os.path.lexists(path_of(unique)), "the test left its pool file behind"


def path_of(name: str) -> str:
    return f"{SHM}/{FILE_PREFIX}{name}"


RANK = """
import ctypes, sys
from saria_vllm.engine.pool import DramPool
name, capacity, rank, world, slab = sys.argv[1], *map(int, sys.argv[2:])
pool = DramPool(name, capacity, rank, world, slab)
nbytes = pool.slabs * slab
ctypes.memset(pool.base, 65 + rank, nbytes)
print(pool.slabs, flush=True)
for line in sys.stdin:
    seen = ctypes.string_at(pool.base, nbytes)
    print("ok" if seen == bytes([65 + rank]) * nbytes else "spoiled", flush=True)
pool.close()
"""


class Rank:
    """One rank in a process of its own; it fills its region with its letter."""

    def __init__(self, name: str, capacity: int, rank: int, world: int) -> None:
        arguments = [name, *map(str, (capacity, rank, world, SLAB))]
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def check(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.line()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def end(self) -> int:
        self.process.communicate()
        return self.process.returncode


def test_a_slot_lies_where_the_types_say(name: str) -> None:
    pool = DramPool(name, 4 * SLAB + 5, 0, 1, SLAB)
    assert pool.slabs == 4
    assert pool.base % 4096 == 0
    assert pool.address(Slot(0, 0), 8192) == pool.base
    assert pool.address(Slot(3, 7), 8192) == pool.base + 3 * SLAB + 7 * 8192
    assert pool.address(Slot(3, 0), SLAB) == pool.base + 3 * SLAB
    ctypes.memset(pool.base, 1, 4 * SLAB)
    assert ctypes.string_at(pool.address(Slot(3, 7), 8192), 8192) == bytes([1]) * 8192
    pool.close()
    pool.close()


@pytest.mark.parametrize(
    ("slab", "cell", "record_bytes"),
    [(4, 0, 4096), (-1, 0, 4096), (0, 16, 4096), (0, -1, 4096), (0, 0, SLAB + 4096), (0, 0, 0), (0, 5, 12288)],
)
def test_a_slot_out_of_bounds_has_no_address(name: str, slab: int, cell: int, record_bytes: int) -> None:
    pool = DramPool(name, 4 * SLAB, 0, 1, SLAB)
    with pytest.raises(IndexError):
        pool.address(Slot(slab, cell), record_bytes)
    pool.close()


def test_one_rank_has_its_file_unlinked_at_once(name: str) -> None:
    pool = DramPool(name, SLAB, 0, 1, SLAB)
    assert not os.path.lexists(path_of(name))
    pool.close()


def test_two_ranks_have_regions_of_one_file_that_is_gone_when_both_have_it(name: str) -> None:
    capacity = 7 * SLAB  # 3.5 slabs each
    first = Rank(name, capacity, 0, 2)
    assert first.line() == "3"
    status = os.stat(path_of(name))
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 < capacity  # only its own share is allocated so far
    second = Rank(name, capacity, 1, 2)
    assert second.line() == "3"
    assert not os.path.lexists(path_of(name))
    assert first.check() == "ok"
    assert second.check() == "ok"
    assert first.end() == second.end() == 0


def test_ranks_that_start_together_meet(name: str) -> None:
    ranks = [Rank(name, 8 * SLAB, rank, 4) for rank in range(4)]
    assert [rank.line() for rank in ranks] == ["2"] * 4
    assert [rank.check() for rank in ranks] == ["ok"] * 4
    assert not os.path.lexists(path_of(name))
    assert [rank.end() for rank in ranks] == [0] * 4


@pytest.mark.parametrize("other_name", [False, True])
def test_a_killed_engines_file_is_reclaimed_by_the_next_pool(name: str, other_name: bool) -> None:
    killed = Rank(name, 4 * SLAB, 0, 2)
    assert killed.line() == "2"
    killed.kill()
    assert os.path.lexists(path_of(name))
    if other_name:
        DramPool(f"{name}-next", SLAB, 0, 1, SLAB).close()
    else:
        ranks = [Rank(name, 6 * SLAB, rank, 2) for rank in (1, 0)]  # another size than the killed one had
        assert [rank.line() for rank in ranks] == ["3", "3"]
        assert [rank.check() for rank in ranks] == ["ok", "ok"]
        assert [rank.end() for rank in ranks] == [0, 0]
    assert not os.path.lexists(path_of(name))


def test_a_live_engines_file_is_left_alone(name: str) -> None:
    live = Rank(name, 4 * SLAB, 0, 2)
    assert live.line() == "2"
    DramPool(f"{name}-next", SLAB, 0, 1, SLAB).close()
    for capacity, rank, world in ((4 * SLAB, 0, 2), (4 * SLAB, 1, 4), (8 * SLAB, 1, 2), (4 * SLAB, 0, 1)):
        with pytest.raises(ConfigError, match="live engine"):
            DramPool(name, capacity, rank, world, SLAB)
    assert os.path.lexists(path_of(name))
    mate = DramPool(name, 4 * SLAB, 1, 2, SLAB)
    assert live.check() == "ok"
    mate.close()
    assert live.end() == 0


def test_every_rank_keeps_the_file_alive(name: str) -> None:
    first = Rank(name, 6 * SLAB, 0, 3)
    assert first.line() == "2"
    second = Rank(name, 6 * SLAB, 1, 3)
    assert second.line() == "2"
    first.kill()
    DramPool(f"{name}-next", SLAB, 0, 1, SLAB).close()  # it sweeps
    assert os.path.lexists(path_of(name))
    third = Rank(name, 6 * SLAB, 2, 3)
    assert third.line() == "2"
    assert [second.check(), third.check()] == ["ok", "ok"]
    assert not os.path.lexists(path_of(name))
    assert second.end() == third.end() == 0


def test_a_rank_that_leaves_before_the_others_came_takes_the_file_along(name: str) -> None:
    pool = DramPool(name, 4 * SLAB, 0, 2, SLAB)
    assert os.path.lexists(path_of(name))
    pool.close()
    assert not os.path.lexists(path_of(name))


def test_more_than_shm_holds_is_refused_without_allocating(name: str) -> None:
    stats = os.statvfs(SHM)
    available = stats.f_bavail * stats.f_frsize
    if not available:
        pytest.skip("/dev/shm is not limited")
    wanted = available // SLAB * SLAB + 4 * SLAB
    with pytest.raises(ConfigError) as caught:
        DramPool(name, wanted, 0, 1, SLAB)
    for part in ("dram_capacity", format_bytes(wanted), path_of(name), "available"):
        assert part in str(caught.value)
    assert os.statvfs(SHM).f_bavail * stats.f_frsize > available // 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EIO])
def test_a_failed_allocation_leaves_no_file(name: str, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(code, os.strerror(code))

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(OSError if code == errno.EIO else ConfigError):
            DramPool(name, 4 * SLAB, 0, 2, SLAB)
    assert not os.path.lexists(path_of(name))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_limit_on_the_size_of_files_is_named(name: str) -> None:
    """Memory is there: to ask for less of it or for a larger /dev/shm would lead nowhere."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLAB, hard))
    try:
        with pytest.raises(ConfigError, match="RLIMIT_FSIZE") as caught:
            DramPool(name, 4 * SLAB, 0, 1, SLAB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "available" not in str(caught.value)


def test_memory_is_allocated_up_front(name: str) -> None:
    pool = DramPool(name, 16 * SLAB, 0, 2, SLAB)
    assert os.stat(path_of(name)).st_blocks * 512 >= 8 * SLAB
    pool.close()


@pytest.mark.parametrize("trap", ["symlink", "dangling", "directory", "fifo"])
def test_what_is_not_a_file_of_ours_is_not_touched(name: str, trap: str, tmp_path: os.PathLike[str]) -> None:
    victim = os.path.join(tmp_path, "victim")
    if trap == "symlink":
        with open(victim, "w") as file:
            file.write("precious")
        os.symlink(victim, path_of(name))
    elif trap == "dangling":
        os.symlink(victim, path_of(name))
    elif trap == "directory":
        os.mkdir(path_of(name))
    else:
        os.mkfifo(path_of(name))
    DramPool(f"{name}-next", SLAB, 0, 1, SLAB).close()  # it sweeps, and leaves this
    with pytest.raises(ConfigError, match="dram_capacity"):
        DramPool(name, SLAB, 0, 1, SLAB)
    if trap == "symlink":
        with open(victim) as file:
            assert file.read() == "precious"
    else:
        assert not os.path.exists(victim)
    if trap == "directory":
        os.rmdir(path_of(name))
    else:
        os.unlink(path_of(name))


def test_without_shm_one_rank_gets_a_memfd_and_two_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "SHM_DIRECTORY", "/nonexistent")
    pool = DramPool(name, 2 * SLAB, 0, 1, SLAB)
    ctypes.memset(pool.base, 1, 2 * SLAB)
    pool.close()
    with pytest.raises(ConfigError, match="/nonexistent"):
        DramPool(name, 2 * SLAB, 0, 2, SLAB)


def test_a_share_of_less_than_a_slab_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"dram_capacity.*slab"):
        DramPool(name, 2 * SLAB - 1, 0, 2, SLAB)


@pytest.mark.parametrize(
    ("bad_name", "rank", "world", "slab"),
    [("a/b", 0, 1, SLAB), ("", 0, 1, SLAB), ("a", 1, 1, SLAB), ("a", -1, 1, SLAB), ("a", 0, 65, SLAB), ("a", 0, 1, 99)],
)
def test_nonsense_is_refused(bad_name: str, rank: int, world: int, slab: int) -> None:
    with pytest.raises(ValueError):
        DramPool(bad_name, 1 << 30, rank, world, slab)


def test_closing_gives_descriptors_and_memory_back(name: str) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), os.statvfs(SHM).f_bavail

    DramPool(name, SLAB, 0, 1, SLAB).close()
    fds, free = count()
    pool = DramPool(name, 1 << 26, 0, 1, 1 << 21)
    assert count()[1] < free
    pool.close()
    assert count()[0] == fds
    assert count()[1] > free - (1 << 25) // os.statvfs(SHM).f_frsize
