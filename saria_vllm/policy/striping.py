"""What is known of each drive: how fast it is, whether it may be used now; and how new chunks are spread over them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from saria_vllm.metrics import Counts, count
from saria_vllm.policy.index import Mask
from saria_vllm.types import Moved

PAUSE_S = 10.0
"""How long a drive that failed gets no writes; twice as long each time it fails soon after coming back."""
PAUSE_MAX_S = 600.0

FULL_PAUSE_MAX_S = 60.0
"""The longest pause of a drive that was full: to ask again costs little, and somebody may make room at any time."""

READ_FAILED_S = 300.0
"""One bad file is no bad drive, but a second read that fails so soon is one."""

READS_PAUSE_S = 60.0
"""How long nothing is read from a drive that fails reads or held up a load; it doubles in the same way."""
READS_PAUSE_MAX_S = 3600.0

AVERAGE_S = 5.0
AVERAGE_BYTES = 512 << 20
"""Rates are averages over about so many seconds in which the drive was busy, or so many bytes: a slow drive that became
fast is given little and is hardly ever busy."""

LEARNT_BYTES = 8 << 20
"""A rate is not known before so much was moved."""

LEAST_SHARE = 1 / 32
"""Of the fastest drive's chunks, for the slowest: what nobody reads from is never found to be fast again."""


class _Rate:
    """Bytes per second of busy time, as a moving average."""

    __slots__ = ("_bytes", "_seconds")

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    def learn(self, nbytes: int, seconds: float) -> None:
        kept = math.exp(-seconds / AVERAGE_S - nbytes / AVERAGE_BYTES)
        self._bytes = kept * self._bytes + nbytes
        self._seconds = kept * self._seconds + seconds

    @property
    def known(self) -> float:
        """0 while it is not known, never 0 when it is."""
        enough = self._seconds > AVERAGE_S / 2 or (self._seconds > 0 and self._bytes >= LEARNT_BYTES)
        return max(1.0, self._bytes / self._seconds) if enough else 0.0


class _Pause:
    """A time without use. One that follows soon after another is twice as long."""

    __slots__ = ("_length", "until")

    def __init__(self) -> None:
        self._length, self.until = 0.0, -math.inf

    def begin(self, now: float, first: float, longest: float) -> bool:
        """False within a pause: that is the end of what was begun before it."""
        if now < self.until:
            return False
        soon = now < self.until + self._length
        self._length = min(longest, 2 * self._length) if soon else first
        self.until = now + self._length
        return True


class Striping:
    """See the module's text. `now` is seconds of any one clock that never goes back."""

    def __init__(self, drives: int) -> None:
        self.labels = [str(drive) for drive in range(drives)]
        """By drive: what it is called in counters and messages."""
        self._reads, self._writes = [_Rate() for _ in range(drives)], [_Rate() for _ in range(drives)]
        self._due = [0.0] * drives
        """When the last chunk given to each drive has been read, in a time in which the fastest takes 1 per chunk."""
        self._write_pauses, self._read_pauses = [_Pause() for _ in range(drives)], [_Pause() for _ in range(drives)]
        self._read_failed = [-math.inf] * drives
        self.left_out: set[int] = set()
        self.counts: Counts = {}
        self.problems: list[str] = []
        """To be said; drained by the scheduler."""

    # Rates.

    def learn(self, moved: Moved) -> None:
        """What one rank read from or wrote to a drive while it was busy with that."""
        self.count(moved.drive, "drive_read_bytes", moved.read_bytes)
        self.count(moved.drive, "drive_written_bytes", moved.written_bytes)
        self._reads[moved.drive].learn(moved.read_bytes, moved.read_s)
        self._writes[moved.drive].learn(moved.written_bytes, moved.write_s)

    def seed(self, drive: int, read_bytes_s: float) -> None:
        """A drive was measured before anything was read from it. What is read soon outweighs that."""
        self._reads[drive].learn(LEARNT_BYTES, LEARNT_BYTES / read_bytes_s)

    def read_rates(self) -> list[float]:
        """By drive: bytes per second that one rank reads from it, 0 while that is not known."""
        return [rate.known for rate in self._reads]

    def weights(self) -> list[float]:
        """By drive: how much of what is written it should get, the fastest 1. By rates of reading, for that is what
        requests wait for; of writing while nothing was read; a drive that is not known counts as a usual one."""
        rates = self.read_rates()
        if not any(rates):
            rates = [rate.known for rate in self._writes]
        known = [rate for rate in rates if rate]
        if not known:
            return [1.0] * len(rates)
        usual, fastest = sum(known) / len(known), max(known)
        return [max(LEAST_SHARE, (rate or usual) / fastest) for rate in rates]

    def read_bytes_s(self, now: float) -> float:
        """What one rank gets from all drives that are read from, 0 while that is not known; a drive that is not known
        counts as a usual one."""
        rates = [rate.known for rate, pause in zip(self._reads, self._read_pauses, strict=True) if now >= pause.until]
        known = [rate for rate in rates if rate]
        return sum(known) / len(known) * len(rates) if known else 0.0

    def spread(self, count: int, room: Mapping[int, int]) -> npt.NDArray[np.int64]:
        """The drive of each of the next chunks in their order, so that those of any long run are read from all drives
        in the same time: at most `count`, and at most `room` on each drive."""
        weights = self.weights()
        many = [min(count, chunks) for chunks in room.values()]
        ends = [self._due[drive] + np.arange(1, n + 1) / weights[drive] for drive, n in zip(room, many, strict=True)]
        order = np.argsort(np.concatenate(ends), kind="stable")[:count]
        return np.repeat(np.array(list(room), np.int64), many)[order]

    def gave(self, chunks: Mapping[int, int]) -> None:
        """So many chunks went to each drive. Who got less than its share, for want of room or in a pause, does not
        catch up with it: that would be a run on one drive."""
        weights = self.weights()
        for drive, number in chunks.items():
            self._due[drive] += number / weights[drive]
        last = max(self._due)
        self._due = [max(due, last - 1 / weight) for due, weight in zip(self._due, weights, strict=True)]

    def count(self, drive: int, name: str, value: int) -> None:
        """Add to a counter of a drive."""
        count(self.counts, name, value, self.labels[drive])

    # Use.

    def failed(self, drive: int, reading: bool, now: float) -> None:
        """A write failed, or a read: write nothing there for a while. Nor read, if it was not the first such read."""
        self._pause(drive, self._write_pauses[drive].begin(now, PAUSE_S, PAUSE_MAX_S))
        if reading:
            if now < self._read_failed[drive] + READ_FAILED_S:
                self.late(drive, now)
            self._read_failed[drive] = now

    def full(self, drive: int, now: float) -> bool:
        """A write found no room: no more of them for a while. Whether a pause begins."""
        return self._pause(drive, self._write_pauses[drive].begin(now, PAUSE_S, FULL_PAUSE_MAX_S))

    def late(self, drive: int, now: float) -> None:
        """A drive held up a load: offer nothing from it for a while."""
        self._pause(drive, self._read_pauses[drive].begin(now, READS_PAUSE_S, READS_PAUSE_MAX_S))

    def _pause(self, drive: int, begins: bool) -> bool:
        self.count(drive, "drive_pauses", int(begins))
        return begins

    def leave_out(self, drive: int) -> None:
        """Never use a drive, or never again. What ranks that could open it have there is neither used nor retired."""
        self.left_out.add(drive)
        self._write_pauses[drive].until = self._read_pauses[drive].until = math.inf

    def lose(self, drive: int) -> None:
        """A drive's directory is gone: never use it again, and say so once."""
        if drive in self.left_out:
            return
        self.leave_out(drive)
        off = "" if len(self.left_out) < len(self.labels) else ". No drive is left: the SSD tier is off"
        self.problems.append(f"{self.labels[drive]}: our directory is gone; the drive is left out until a restart{off}")

    def writable(self, now: float) -> list[bool]:
        """By drive: whether it is written to."""
        return [now >= pause.until for pause in self._write_pauses]

    def unreadable(self, now: float) -> Mask | None:
        """By drive: whether its reads are paused. None when no drive's are."""
        if all(now >= pause.until for pause in self._read_pauses):
            return None
        return np.array([now < pause.until for pause in self._read_pauses])
