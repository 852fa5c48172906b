"""`trace_record`: finished requests go to a thread that hashes their keys and appends lines for the simulator.

The engine's thread only queues. What a full queue does not take is left out; a device that fails ends the recording,
never the engine. Other engines of the same path, and other chunk sizes, write to PATH.1, PATH.2 and so on.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

import msgspec

from saria_vllm.config import format_bytes
from saria_vllm.sim.recording import SALT_BYTES_MAX, VERSION, Recorder

logger = logging.getLogger("vllm.saria")

FILE_BYTES_MAX = 256 << 20
"""Of one file, over restarts: about 23 million chunks, which the simulator still holds in memory."""

FILES_MAX = 64
"""Names that are tried."""

QUEUE_KEYS_MAX = 1 << 17
"""Chunk keys of the requests that wait for the thread, about 10 MB; a request counts as one more."""

CLOSE_S = 5.0
"""How long a shutdown waits for what is queued."""

_HEADER_BYTES_MAX = 4096

Finished = tuple[float, Sequence[bytes], int, int]
"""Arrival (seconds of the wall clock), chunk keys of the prompt, its tokens, tokens of the answer."""


class _Header(msgspec.Struct):
    saria_trace: int
    chunk_tokens: int


class Recording:
    """See the module's text."""

    def __init__(self, path: str, chunk_tokens: int) -> None:
        self._path, self._chunk_tokens = path, chunk_tokens
        self._started = time.time()
        self._queue: SimpleQueue[Finished | None] = SimpleQueue()
        self._queued, self._taken = 0, 0
        """Keys in all: the engine's thread counts the former, ours the latter."""
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # Too many threads here.
            self._end(str(error))

    def add(self, arrived_s: float, keys: Sequence[bytes], input_tokens: int, output_tokens: int) -> bool:
        """Record a finished request; False when it is left out. `keys` must not change any more."""
        waiting = self._queued - self._taken
        if self._ended or (waiting and waiting + len(keys) >= QUEUE_KEYS_MAX):
            return False
        self._queued += 1 + len(keys)
        self._queue.put((arrived_s, keys, input_tokens, output_tokens))
        return True

    def close(self) -> None:
        """Write what is queued, within bounds."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    def _end(self, problem: str) -> None:
        self._ended = True
        logger.error("SARIA: trace_record is off: %s", problem)

    def _run(self) -> None:
        try:
            fd, nbytes = _open(self._path, self._chunk_tokens)
            try:
                self._append_all(fd, nbytes)
            finally:
                os.close(fd)
        except Exception as error:
            self._end(f"{type(error).__name__}: {error}")

    def _append_all(self, fd: int, nbytes: int) -> None:
        recorder = Recorder(os.urandom(SALT_BYTES_MAX), self._chunk_tokens, bytes_max=FILE_BYTES_MAX - nbytes)
        _append(fd, recorder.header(self._started, appending=nbytes > 0))
        while not recorder.full:
            finished = self._queue.get()
            if finished is None:
                return
            arrived_s, keys, input_tokens, output_tokens = finished
            _append(fd, recorder.record(arrived_s - self._started, keys, input_tokens, output_tokens))
            self._taken += 1 + len(keys)
        self._end(f"the recording has reached {format_bytes(FILE_BYTES_MAX)}")


def _open(path: str, chunk_tokens: int) -> tuple[int, int]:
    """Descriptor and bytes of the first file that is new or a recording of this chunk size, and nobody else's now.

    Raises:
        OSError: no such file can be opened, or the first is full.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for name in (path, *(f"{path}.{number}" for number in range(1, FILES_MAX))):
        fd = os.open(name, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) and (not status.st_size or _is_ours(fd, chunk_tokens)):
                if status.st_size + _HEADER_BYTES_MAX > FILE_BYTES_MAX:
                    raise OSError(f"{name} has reached {format_bytes(FILE_BYTES_MAX)}")
                logger.info("SARIA: requests are recorded in %s", name)
                return fd, status.st_size
        except BlockingIOError:
            pass
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
    raise OSError(f"{path} to {path}.{FILES_MAX - 1} are other engines', other recordings or other files")


def _is_ours(fd: int, chunk_tokens: int) -> bool:
    first = os.pread(fd, _HEADER_BYTES_MAX, 0).partition(b"\n")[0]
    try:
        header = msgspec.json.decode(first, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return (header.saria_trace, header.chunk_tokens) == (VERSION, chunk_tokens)


def _append(fd: int, line: bytes) -> None:
    """Append a line, or cut off what came through of it and raise."""
    before = os.fstat(fd).st_size
    try:
        if os.write(fd, line) != len(line):
            raise OSError("no room for a whole line")
    except OSError:
        os.ftruncate(fd, before)
        raise
