"""The endurance budget of this engine: a governor of SSD writes for each drive, and its state on that drive.

The state is encoded on the engine's thread and written on another one, when `SAVE_S` of steps went by or `SAVE_SHARE`
of a day's budget was written, and at shutdown, which vLLM often leaves out: it kills its engine process at once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

import msgspec

from saria_vllm.config import EnduranceConfig, format_bytes
from saria_vllm.errors import StorageError
from saria_vllm.policy.endurance import DAY_S, DriveBudget, EnduranceState, Governor, drive_life_years
from saria_vllm.storage.wear import device_bytes, lease_state, other_states, read_state, write_state

logger = logging.getLogger("vllm.saria")

SAVE_S = 30.0
SAVE_SHARE = 0.001
"""A crash forgets at most this, and what is written while the state is."""

REPORT_S = 3600.0

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
        for drive in self.drives:
            drive.step(now)
        if now >= self._report_at:
            self._report_at = now + REPORT_S
            self._report(now)

    def _report(self, now: float) -> None:
        """Say what was written and how long the drives last at this rate, taken over an hour at least."""
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
