"""The endurance budget of this engine: a governor of SSD writes for each drive, its state on that drive, and what the
drive says of its wear.

The state is encoded on the engine's thread and written on another one, when `SAVE_S` of steps went by or `SAVE_SHARE`
of a day's budget was written, and at shutdown, which vLLM often leaves out: it kills its engine process at once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from saria_vllm.config import EnduranceConfig, format_bytes
from saria_vllm.errors import StorageError
from saria_vllm.metrics import Counts, count
from saria_vllm.policy.endurance import (
    DAY_S,
    DriveBudget,
    EnduranceState,
    Governor,
    drive_life_years,
    life_left_years,
)
from saria_vllm.policy.surcharge import Reading
from saria_vllm.storage.smart import Smart, read_smart
from saria_vllm.storage.wear import (
    device_bytes,
    engines_with_state,
    lease_state,
    on_one_device,
    other_states,
    read_state,
    write_state,
)

logger = logging.getLogger("vllm.saria")

SAVE_S = 30.0
SAVE_SHARE = 0.001
"""A crash forgets at most this, and what is written while the state is."""

REPORT_S = 3600.0

SMART_S = 600.0
"""How often a drive is asked about its wear."""

CLOSE_S = 5.0
"""How long a shutdown waits for a drive that hangs."""


class DriveWear:
    """The budget of one drive. `now` is the clock of the steps; the state on disk is in seconds of the wall clock, and
    its days begin at midnight UTC.

    Args:
        preferred: number of this engine's state on the drive, unless another has it.
        engines: engines that are known to share the drive.
        whole: the drive's budget.

    Raises:
        StorageError: the path cannot be used.
    """

    def __init__(self, path: str, preferred: int, whole: DriveBudget, engines: int, now: float) -> None:
        self._path, self._whole, self._engines = path, whole, engines
        self.index, self._lease = lease_state(path, preferred)
        try:
            self._shared = self.look()
        except StorageError:
            self.release()
            raise
        target, cap = whole.budget_bytes_day / self._shared.engines, whole.cap_bytes_day / self._shared.engines
        self.governor = Governor(target, cap, now, now - time.time() % DAY_S)
        self.begun = now
        """Since when all that was written is known."""
        self._restore(now)
        self.governor.share(self._shared, now)
        self._saved_bytes = self.governor.written_bytes
        """Written when the state was last saved."""
        self._save_at = now + SAVE_S
        self._writer: threading.Thread | None = None
        self._problem = ""

    def _restore(self, now: float) -> None:
        try:
            data = read_state(self._path, self.index)
            state = None if data is None else msgspec.json.decode(data, type=EnduranceState)
        except (StorageError, msgspec.DecodeError) as error:
            logger.warning("SARIA: what was written to SSD before is not known: %s", error)
            return
        if state is not None:
            wall_s = time.time()
            self.governor.restore(state, now, wall_s)
            self.begun -= max(0.0, wall_s - min((begin for begin, _ in state.bins), default=wall_s))

    @property
    def engines(self) -> int:
        """That write to the drive, this one included."""
        return self._shared.engines

    def look(self) -> DriveBudget:
        """Who else writes to the drive, and how much. To be told to `shared`; may take as long as the drive does.

        Raises:
            StorageError: the path cannot be used.
        """
        living, states = other_states(self._path, self.index)
        wall_s = time.time()
        today = last_day = 0
        for data in states:
            try:
                bins = msgspec.json.decode(data, type=EnduranceState).bins
            except msgspec.DecodeError:
                continue
            # When a clock went back by days, what an engine wrote and died before must not count until then.
            bins = [(begin, nbytes) for begin, nbytes in bins if begin < wall_s + DAY_S]
            last_day += sum(nbytes for begin, nbytes in bins if begin > wall_s - DAY_S)
            today += sum(nbytes for begin, nbytes in bins if begin >= wall_s - wall_s % DAY_S)
        engines = max(self._engines, 1 + living)
        return self._whole._replace(engines=engines, others_today_bytes=today, others_last_day_bytes=last_day)

    def shared(self, shared: DriveBudget, now: float) -> None:
        """Go by what `look` saw."""
        if shared.engines != self._shared.engines:
            logger.info("SARIA: %d engine(s) share the write budget of %s", shared.engines, self._path)
        self._shared = shared
        self.governor.share(shared, now)

    def step(self, now: float) -> None:
        """Once per engine step."""
        unsaved = self.governor.written_bytes - self._saved_bytes
        due = now >= self._save_at or unsaved >= SAVE_SHARE * self.governor.budget_bytes_day
        if unsaved and due and (self._writer is None or not self._writer.is_alive()):
            self._save_at = now + SAVE_S
            self.save(now)

    def save(self, now: float) -> None:
        """Write the state, after what is being written."""
        self._saved_bytes = self.governor.written_bytes
        state = msgspec.json.encode(self.governor.state(now, time.time()))
        writer = threading.Thread(target=self._write, args=(self._writer, state), daemon=True)
        try:
            writer.start()
        except RuntimeError:  # Too many threads here.
            return
        self._writer = writer

    def _write(self, before: threading.Thread | None, state: bytes) -> None:
        if before is not None:
            before.join()
        try:
            write_state(self._path, self.index, state)
        except StorageError as error:
            if str(error) != self._problem:
                logger.warning("SARIA: what was written to SSD will be forgotten at the next start: %s", error)
            self._problem = str(error)

    def wait(self, until: float) -> None:
        """For what is being written, until this monotonic time; then the state is another engine's to take."""
        if self._writer is not None:
            self._writer.join(max(0.0, until - time.monotonic()))
            if self._writer.is_alive():
                logger.warning("SARIA: a drive hangs; the last minute of what was written will be forgotten")
                return
        self.release()

    def release(self) -> None:
        """Nothing is written to the state any more. Idempotent."""
        if self._lease >= 0:
            os.close(self._lease)
            self._lease = -1


class DriveSmart:
    """Asks a drive about its wear, on a thread: a drive that hangs is not asked again.

    Args:
        paths: the ssd paths on its device, the asking one first.
        drive: the budget that it is about.
    """

    def __init__(self, paths: Sequence[str], drive: DriveWear) -> None:
        self.paths, self._drive, self._governor = paths, drive, drive.governor
        self._ask_at = 0.0
        self._asking: threading.Thread | None = None
        self._answer: tuple[Smart | str, int] | None = None
        self._said: set[object] = set()
        self._host: deque[tuple[float, int]] = deque()
        """(when, bytes written by hosts) over the last 24 hours."""
        self.smart: Smart | None = None
        """The last answer."""

    def step(self, now: float) -> int:
        """Once per engine step. Returns the bytes that are charged to the budget."""
        charged = 0
        if self._answer is not None:
            (smart, ours), self._answer = self._answer, None
            charged = self._take(smart, ours, now)
        if now >= self._ask_at and (self._asking is None or not self._asking.is_alive()):
            self._ask_at = now + SMART_S
            asking = threading.Thread(target=self._ask, args=(self._governor.written_bytes,), daemon=True)
            try:
                asking.start()
            except RuntimeError:  # Too many threads here.
                return charged
            self._asking = asking
        return charged

    def _ask(self, mine: int) -> None:
        smart = read_smart(self.paths[0])
        ours = mine
        for path in self.paths if isinstance(smart, Smart) else ():
            for engine in engines_with_state(path):
                if (path, engine) != (self.paths[0], self._drive.index):
                    ours += _written_by(path, engine)
        self._answer = smart, ours

    def _take(self, smart: Smart | str, ours: int, now: float) -> int:
        if isinstance(smart, str):
            if smart not in self._said:
                self._said.add(smart)
                logger.info("SARIA: SSD wear is known by our own count only: %s", smart)
            return 0
        self.smart = smart
        self._host.append((now, smart.written_bytes))
        while self._host[0][0] < now - DAY_S:
            self._host.popleft()
        if smart.critical_warning not in (0, *self._said):
            self._said.add(smart.critical_warning)
            logger.warning("SARIA: %s warns of its state: %#x", ", ".join(smart.disks), smart.critical_warning)
        reading = Reading(smart.written_bytes, smart.media_bytes, ours, self._governor.written_bytes)
        # Under a RAID a byte is written more than once: what others wrote cannot be told then.
        share = 1 / self._drive.engines / len(self.paths) if len(smart.disks) == 1 else 0.0
        return self._governor.learn(reading, share, now)

    def report(self, rated_bytes_day: float) -> None:
        """Say what the drive said, and how long it lasts at the rate of all its hosts, once that is known."""
        if self.smart is None:
            return
        (first, before), (last, after) = self._host[0], self._host[-1]
        rate = max(0, after - before) * DAY_S / (last - first) if last - first >= REPORT_S / 2 else 0.0
        years = life_left_years(self.smart.percentage_used, self.smart.written_bytes, rate, rated_bytes_day)
        logger.info(
            "SARIA: %s: %d %% of its life used, %d %% spare, %s written by all hosts; own write amplification %s; at "
            "the present rate it lasts %.1f more years",
            ", ".join(self.smart.disks),
            self.smart.percentage_used,
            self.smart.spare_percent,
            format_bytes(self.smart.written_bytes),
            f"{self._governor.surcharge.amplification:.2f}" if self.smart.media_bytes else "not said",
            years,
        )


def _written_by(path: str, engine: int) -> int:
    """What another engine, or this one to another path, has written, by its last word."""
    try:
        data = read_state(path, engine)
        return msgspec.json.decode(data, type=EnduranceState).written_bytes if data is not None else 0
    except (StorageError, msgspec.DecodeError):
        return 0


class Wear:
    """The budgets of all drives in use; see the module's text.

    Args:
        left_out: how many configured drives are not in use: their part of the rated capacity is not written to others.

    Raises:
        StorageError: an SSD path cannot be looked at.
    """

    def __init__(
        self, config: EnduranceConfig, ssd_paths: Sequence[str], left_out: int, engine_index: int, engines: int,
        now: float,
    ) -> None:  # fmt: skip
        sizes = device_bytes(ssd_paths)
        rated = config.rated_capacity * len(ssd_paths) / (len(ssd_paths) + left_out) or sum(sizes)
        scale = rated / sum(sizes)
        self.drives: list[DriveWear] = []
        try:
            for path, size in zip(ssd_paths, sizes, strict=True):
                whole = DriveBudget(config.target_dwpd * scale * size, config.hard_cap_dwpd * scale * size)
                self.drives.append(DriveWear(path, engine_index, whole, engines, now))
        except StorageError:
            for drive in self.drives:
                drive.release()
            raise
        self._rated_bytes = rated
        self._rated_by_drive = [rated * size / sum(sizes) for size in sizes]
        """Bytes per day that each drive, or what the path has of it, is rated for."""
        self.smarts = []
        for drive, path, beside in zip(self.drives, ssd_paths, on_one_device(ssd_paths), strict=True):
            paths = [path, *(other for other in beside if other != path)]
            self.smarts.append(DriveSmart(paths, drive))
        self._labels = list(ssd_paths)
        self.counts: Counts = {}
        self._report_at = now + REPORT_S
        logger.info(
            "SARIA: this engine may write %s to SSD per day and at most %s in any 24 h (of drives rated %s, shared by "
            "%d engine(s)); %s left today; written so far: %s",
            format_bytes(int(sum(governor.budget_bytes_day for governor in self.governors))),
            format_bytes(int(sum(governor.cap_bytes_day for governor in self.governors))),
            format_bytes(int(rated)),
            max(drive.engines for drive in self.drives),
            format_bytes(sum(governor.room(now) for governor in self.governors)),
            format_bytes(self.written_bytes),
        )

    @property
    def governors(self) -> list[Governor]:
        """By drive."""
        return [drive.governor for drive in self.drives]

    @property
    def written_bytes(self) -> int:
        """In all, to all drives."""
        return sum(governor.written_bytes for governor in self.governors)

    def step(self, now: float) -> None:
        """Once per engine step."""
        for drive, smart, label in zip(self.drives, self.smarts, self._labels, strict=True):
            drive.step(now)
            count(self.counts, "drive_charged_bytes", smart.step(now), label)
        if now >= self._report_at:
            self._report_at = now + REPORT_S
            self._report(now)

    def _report(self, now: float) -> None:
        """Say what was written and how long the drives last at this rate, taken over an hour at least."""
        for smart, rated in zip(self.smarts, self._rated_by_drive, strict=True):
            smart.report(rated * len(smart.paths))
        day = sum(governor.last_day_bytes(now) for governor in self.governors)
        if not day:
            return
        begun = min(drive.begun for drive in self.drives)
        rate = day * DAY_S / min(max(now - begun, REPORT_S), DAY_S)
        logger.info(
            "SARIA: this engine wrote %s to SSD in the last 24 h, %s in all; at this rate drives that are rated for "
            "one write per day last %.1f years",
            format_bytes(day),
            format_bytes(self.written_bytes),
            drive_life_years(rate, self._rated_bytes / max(drive.engines for drive in self.drives)),
        )

    def close(self, now: float) -> None:
        """Write the states for the next process."""
        self._report(now)
        until = time.monotonic() + CLOSE_S
        for drive in self.drives:
            drive.save(now)
        for drive in self.drives:
            drive.wait(until)
