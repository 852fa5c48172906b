"""One thread that reads and writes SSD records. Reads come first; writes and retirements keep their order."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from saria_vllm import _native
from saria_vllm.engine.cpus import pin_this_thread
from saria_vllm.engine.jobs import Ends, LoadState, PersistState
from saria_vllm.engine.pool import DramPool
from saria_vllm.engine.ssd_engine import SsdEngine
from saria_vllm.engine.staging import Staging
from saria_vllm.errors import NO_ROOM, NOT_THE_DRIVE, SariaError
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import GroupShape

REAP_S = 0.002
"""How long a thread with I/O in flight waits before it looks for new work."""

STAGING_BYTES = 32 << 20
"""Staging memory of one thread, at least two records."""

DEPTH_MAX = 32


class Read(NamedTuple):
    state: LoadState
    position: int


class Write(NamedTuple):
    state: PersistState
    position: int


class Retire(NamedTuple):
    drive: int
    segment: int


def _drive_of(op: Read | Write | Retire) -> int:
    match op:
        case Read(state, position):
            extent = state.job.item(position).extent
            assert extent is not None
            return extent.drive
        case Write(writing, position):
            return writing.items[position].extent.drive
        case Retire(drive, _):
            return drive


class _InFlight(NamedTuple):
    op: Read | Write
    buffer: int
    """Staging buffer number of a read, -1 for a write."""
    checksum: int
    """Of a read: what it must be. Of a write: what the slot's bytes have."""
    fd: int
    """To be released when it has ended."""


def depth_for(record_bytes: int) -> int:
    """Records in flight on one thread."""
    return max(2, min(DEPTH_MAX, STAGING_BYTES // record_bytes))


class SsdThread:
    """Owns one engine and its staging buffers. `submit` may be called from any thread."""

    def __init__(
        self,
        name: str,
        store: SegmentStore,
        engine: SsdEngine,
        pool: DramPool,
        maps: Mapping[int, _native.PageMap],
        shapes: Mapping[int, GroupShape],
        ends: Ends,
        cpus: set[int],
    ) -> None:
        self._store, self._engine, self._pool, self._maps, self._shapes = store, engine, pool, maps, shapes
        self._ends, self._cpus = ends, cpus
        self._staging = Staging(engine, max(shape.record_bytes for shape in shapes.values()))
        if (forget := engine.register_files()) is not None:
            store.before_close(forget)
        self._buffers = list(range(engine.depth))
        self._in_flight: dict[int, _InFlight] = {}
        self._next_tag = 0
        self._reads: deque[Read] = deque()
        self._writes: deque[Write | Retire] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._starved = False
        """The next read waits for a descriptor."""
        self._broken = False
        """The engine failed to say what ended: it gets no more work."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, ops: Iterable[Read | Write | Retire]) -> None:
        """Queue operations: all of a step in one call, for each call wakes the thread."""
        with self._wake:
            closing = self._closing
            if not closing:
                for op in ops:
                    queue: deque[Any] = self._reads if isinstance(op, Read) else self._writes
                    queue.append(op)
                self._wake.notify()
        if closing:
            for op in ops:
                self._fail(op, "other")

    def close(self, timeout_s: float) -> bool:
        """Stop: writes in flight end, all else fails. Idempotent. False when that took longer than `timeout_s`; files
        and memory are in use then."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pin_this_thread(self._cpus)
        while True:
            with self._wake:
                while not (self._reads or self._writes or self._in_flight or self._closing):
                    self._wake.wait()
                if self._closing:
                    break
                if self._starved and not self._in_flight:
                    self._wake.wait(REAP_S)
            self._starved = False
            self._fill()
            self._reap(REAP_S)
        for op in (*self._reads, *self._writes):
            self._fail(op, "other")
        while self._in_flight:
            self._reap(1.0)
        self._engine.close()

    def _fill(self) -> None:
        while len(self._in_flight) < self._engine.depth and not (self._closing or self._starved):
            op: Read | Write | Retire
            if self._reads:
                op = self._reads.popleft()
            elif self._writes:
                op = self._writes.popleft()
            else:
                return
            self._guard(op, self._start, op)

    def _guard(self, op: Read | Write | Retire, step: Callable[..., None], *args: object) -> None:
        """Whatever goes wrong fails this operation, never the thread."""
        try:
            step(*args)
        except OSError as error:
            self._fail(op, self._reason(op, error), error)
        except SariaError as error:
            self._fail(op, "not_found", error)
        except Exception as error:
            self._ends.count("internal_errors", 1)
            self._fail(op, "other", error)

    def _reason(self, op: Read | Write | Retire, error: OSError) -> str:
        """What a failed operation says about its drive."""
        if error.errno in NO_ROOM:
            return "disk_full"
        if error.errno in NOT_THE_DRIVE:
            return "other"
        if isinstance(op, Retire):
            return "other"
        reason = "read_failed" if isinstance(op, Read) else "write_failed"
        return reason if self._store.is_there(_drive_of(op)) else "vanished"

    def _start(self, op: Read | Write | Retire) -> None:
        if self._broken and not isinstance(op, Retire):
            raise OSError(errno.EIO, f"the {self._engine.name} engine failed")
        match op:
            case Read(state, position):
                if not self._ends.is_wanted(state):
                    self._ends.items(state, (position,), "stale")
                    return
                item = state.job.item(position)
                assert item.extent is not None
                nbytes = self._shapes[item.group].record_bytes
                try:
                    fd, offset, checksum = self._store.read_target(item.group, item.extent)
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._store.reading:
                        raise
                    self._reads.appendleft(op)  # Reads in flight have the descriptors, and will give them back.
                    self._starved = True
                    return
                buffer = self._buffers[-1]
                address = self._staging.address(buffer)
                self._submit(self._engine.submit_read, _InFlight(op, buffer, checksum, fd), address, nbytes, offset)
                self._buffers.pop()
            case Write(writing, position):
                write = writing.items[position]
                nbytes = self._shapes[write.group].record_bytes
                address = self._pool.address(write.slot, nbytes)
                fd, offset = self._store.write_target(write.group, write.extent)
                if writing.generation != self._ends.generation:  # The record might be stamped newer than its bytes.
                    self._store.release(fd)
                    self._fail(op, "stale")
                    return
                try:
                    checksum = _native.checksum(address, nbytes, self._store.seed(write.extent, write.key))
                except Exception:
                    self._store.release(fd)
                    raise
                self._submit(self._engine.submit_write, _InFlight(op, -1, checksum, fd), address, nbytes, offset)
            case Retire(drive, segment):
                self._store.retire(drive, segment)

    def _submit(self, submit: Callable[..., None], flight: _InFlight, address: int, nbytes: int, offset: int) -> None:
        self._next_tag += 1
        self._in_flight[self._next_tag] = flight
        try:
            submit(flight.fd, address, nbytes, offset, self._next_tag)
        except Exception:
            if self._engine.in_flight < len(self._in_flight):
                del self._in_flight[self._next_tag]
                self._store.release(flight.fd)
                raise
            # Else it has begun all the same, and `reap` will say how it ended.

    def _reap(self, timeout_s: float) -> None:
        if self._broken:
            return
        try:
            ended = self._engine.reap(timeout_s)
        except Exception as error:
            self._break(error)
            return
        for tag, result in ended:
            flight = self._in_flight.pop(tag)
            self._guard(flight.op, self._end, flight, result)
            self._store.release(flight.fd)
            if flight.buffer >= 0:
                self._buffers.append(flight.buffer)

    def _break(self, error: Exception) -> None:
        """Fail what is in flight and all that comes: no transfer's end can be known. Failing is safe while the memory
        and the descriptors stay: a read ends in staging memory that is not used again, a write in a record that is
        never committed."""
        self._broken = True
        self._ends.count("internal_errors", 1)
        flights, self._in_flight = self._in_flight, {}
        for flight in flights.values():
            self._fail(flight.op, "read_failed" if isinstance(flight.op, Read) else "write_failed", error)

    def _end(self, flight: _InFlight, result: int) -> None:
        if result < 0:
            raise OSError(-result, "SSD I/O failed")
        match flight.op:
            case Read(state, position):
                item = state.job.item(position)
                assert item.extent is not None
                nbytes = self._shapes[item.group].record_bytes
                if result != nbytes:
                    raise OSError(errno.EIO, f"short read: {result} of {nbytes} bytes")
                if self._closing:  # The pages in HBM may be gone.
                    self._fail(flight.op, "other")
                    return
                address = self._staging.address(flight.buffer)
                seed = self._store.seed(item.extent, item.key)
                if not self._ends.may_write(state):
                    return
                try:
                    found = self._maps[item.group].scatter_verify(address, nbytes, seed, item.blocks)
                finally:
                    self._ends.wrote(state)
                if found != flight.checksum:
                    self._store.forget(item.extent)
                    self._fail(flight.op, "checksum")
                    return
                self._ends.count("load_bytes", nbytes, "ssd")
                self._ends.items(state, (position,))
            case Write(writing, position):
                write = writing.items[position]
                nbytes = self._shapes[write.group].record_bytes
                if result != nbytes:
                    raise OSError(errno.EIO, f"short write: {result} of {nbytes} bytes")
                self._store.commit(write.group, write.extent, write.key, write.parent, flight.checksum)
                self._ends.count("ssd_written_bytes", nbytes)
                self._ends.written(writing, position)

    def _fail(self, op: Read | Write | Retire, reason: str, error: Exception | None = None) -> None:
        kind, where = type(op).__name__.lower(), self._store.directory(_drive_of(op))
        what = f"{kind} on SSD failed ({reason}) in {where}" + (f": {error}" if error else "")
        self._ends.say_once(f"ssd {kind} {reason} {where}", what + "; such failures are counted from now on")
        match op:
            case Read(state, position):
                self._ends.items(state, (position,), reason)
            case Write(writing, position):
                write = writing.items[position]
                try:
                    self._store.abandon(write.group, write.extent)
                    self._store.forget(write.extent)  # In case that it failed behind its commit.
                except Exception:
                    self._ends.count("internal_errors", 1)
                self._ends.written(writing, position, reason)
