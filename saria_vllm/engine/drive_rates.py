"""How fast a drive reads and writes through an SSD engine, and what that costs in CPU."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

from saria_vllm.config import SsdEngineName, format_bytes
from saria_vllm.engine.ssd_engine import open_engine
from saria_vllm.engine.staging import Staging
from saria_vllm.errors import StorageError

Kind = Literal["read", "random_read", "write"]
KINDS: tuple[Kind, ...] = get_args(Kind)

FILE_BYTES = 256 << 20
"""Of `measure`."""

HANG_S = 30.0
"""A transfer that takes longer fails the measurement: a drive that hangs must not hang its user."""

_stuck: list[Bench] = []
"""What must not be released, since the kernel has not finished with it."""


class Moved(NamedTuple):
    """What one pass moved, and what it took: wall time, and CPU time of the whole process."""

    nbytes: int
    seconds: float
    cpu_s: float

    @property
    def mb_s(self) -> float:
        """10^6 bytes per second."""
        return self.nbytes / self.seconds / 1e6

    @property
    def cpu_ms_per_gb(self) -> float:
        """Milliseconds of CPU time per 10^9 bytes."""
        return self.cpu_s * 1e3 / (self.nbytes / 1e9)


class Rates(NamedTuple):
    """What `measure` found."""

    read: Moved
    write: Moved
    engine: str
    """Which engine it was, and why."""


def measure(name: SsdEngineName, directory: str, block_bytes: int, queue_depth: int, seconds: float) -> Rates:
    """Rates of the drive under `directory`, each measured for about `seconds`, in a file that is gone afterwards.

    Raises:
        ConfigError: the engine does not work here.
        StorageError: no room, no permission, no O_DIRECT, or the drive fails.
    """
    with (
        scratch_file(directory, max(FILE_BYTES, 2 * queue_depth * block_bytes)) as file,
        Bench(name, file, block_bytes, queue_depth) as bench,
    ):
        bench.fill()
        return Rates(bench.run("read", seconds), bench.run("write", seconds), bench.why)


class ScratchFile(NamedTuple):
    """A file without a name, opened with O_DIRECT."""

    fd: int
    nbytes: int


@contextmanager
def scratch_file(directory: str, nbytes: int) -> Iterator[ScratchFile]:
    """`nbytes` of room under `directory`, given back whatever happens: the file has no name.

    Raises:
        StorageError: no room, no permission, or no O_DIRECT.
    """
    try:
        free = os.statvfs(directory)
        if free.f_bavail * free.f_frsize < nbytes:
            room = format_bytes(free.f_bavail * free.f_frsize)
            raise StorageError(f"{directory}: {format_bytes(nbytes)} are needed for the test file, {room} are free")
        with tempfile.TemporaryFile(dir=directory, prefix="saria-bench-", buffering=0) as file:
            fd = file.fileno()
            os.posix_fallocate(fd, 0, nbytes)
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
            except OSError as error:
                raise StorageError(f"{directory}: its file system has no O_DIRECT") from error
            yield ScratchFile(fd, nbytes)
    except OSError as error:
        raise StorageError(f"{directory}: {error.strerror or error}") from error


class Bench:
    """Passes over a scratch file through an engine, with as many transfers in flight as it takes. A context manager:
    afterwards the engine is closed and nothing is in flight.

    All memory is the kind that reads land in: huge pages, registered with the engine.

    Raises:
        ConfigError: the engine does not work here.
    """

    def __init__(self, name: SsdEngineName, file: ScratchFile, block_bytes: int, queue_depth: int) -> None:
        self._file, self._block_bytes = file, block_bytes
        self._blocks = file.nbytes // block_bytes
        self._rng = random.Random(0)
        self._engine, self.why = open_engine(name, queue_depth)
        self.name = self._engine.name
        self._staging = Staging(self._engine, block_bytes)
        self.registered = self._staging.registered
        block = self._rng.randbytes(block_bytes)
        for buffer in range(queue_depth):
            ctypes.memmove(self._staging.address(buffer), block, block_bytes)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        """Wait for what a pass that failed left in flight; what hangs keeps its engine and its memory."""
        hangs = time.monotonic() + HANG_S
        while self._engine.in_flight and time.monotonic() < hangs:
            self._engine.reap(1.0)
        if self._engine.in_flight:
            _stuck.append(self)
        else:
            self._engine.close()

    def fill(self) -> None:
        """Write every block once."""
        self._pass("write", iter(range(self._blocks)))

    def read_all(self) -> Moved:
        """Read every block once; raises as `run`."""
        return self._pass("read", iter(range(self._blocks)))

    def run(self, kind: Kind, seconds: float) -> Moved:
        """One pass of about `seconds`, which ends when all its transfers have.

        Raises:
            StorageError: a transfer failed or was short.
        """
        return self._pass(kind, self._positions(kind, time.perf_counter() + seconds))

    def _positions(self, kind: Kind, until: float) -> Iterator[int]:
        position = -1
        while time.perf_counter() < until:
            position = self._rng.randrange(self._blocks) if kind == "random_read" else (position + 1) % self._blocks
            yield position

    def _pass(self, kind: Kind, positions: Iterator[int]) -> Moved:
        began, cpu_began, moved = time.perf_counter(), _cpu_s(), 0
        buffers = list(range(self._engine.depth))
        while True:
            while buffers and (position := next(positions, None)) is not None:
                self._submit(kind, buffers.pop(), position)
            if not self._engine.in_flight:
                break
            ended = self._reap(kind)
            moved += len(ended) * self._block_bytes
            buffers += ended
        return Moved(moved, time.perf_counter() - began, _cpu_s() - cpu_began)

    def _submit(self, kind: Kind, buffer: int, position: int) -> None:
        submit = self._engine.submit_write if kind == "write" else self._engine.submit_read
        address, nbytes = self._staging.address(buffer), self._block_bytes
        submit(self._file.fd, address, nbytes, position * nbytes, buffer)

    def _reap(self, kind: Kind) -> list[int]:
        """Buffers whose transfers ended."""
        hangs = time.monotonic() + HANG_S
        while not (ended := self._engine.reap(1.0)):
            if time.monotonic() > hangs:
                raise StorageError(f"a {kind.replace('_', ' ')} did not end within {HANG_S:g} s")
        for _, result in ended:
            if result != self._block_bytes:
                what = os.strerror(-result) if result < 0 else f"{result} of {self._block_bytes} bytes"
                raise StorageError(f"a {kind.replace('_', ' ')} through {self._engine.name} failed: {what}")
        return [buffer for buffer, _ in ended]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
