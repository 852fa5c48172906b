"""The endurance budget of this engine: the governor that bounds its SSD writes, and its state on the first SSD path.

The state is encoded on the engine's thread and written on another one, when `SAVE_S` of steps went by or `SAVE_SHARE`
of a day's budget was written, and at shutdown, which vLLM often leaves out: it kills its engine process at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import msgspec

from saria_vllm.config import EnduranceConfig, format_bytes
from saria_vllm.errors import StorageError
from saria_vllm.policy.endurance import DAY_S, EnduranceState, Governor, drive_life_years
from saria_vllm.storage.wear import device_bytes, read_state, write_state

logger = logging.getLogger("vllm.saria")

SAVE_S = 30.0
SAVE_SHARE = 0.001
"""A crash forgets at most this, and what is written while the state is."""

REPORT_S = 3600.0

CLOSE_S = 5.0
"""How long a shutdown waits for a drive that hangs."""


class Wear:
    """See the module's text. `now` is the clock of the steps; the state on disk is in seconds of the wall clock.

    Raises:
        StorageError: an SSD path cannot be looked at.
    """

    def __init__(
        self, config: EnduranceConfig, ssd_paths: Sequence[str], engine_index: int, engines: int, now: float
    ) -> None:
        self._path, self._index = ssd_paths[0], engine_index
        self._rated_bytes = (config.rated_capacity or device_bytes(ssd_paths)) / engines
        target, cap = config.target_dwpd * self._rated_bytes, config.hard_cap_dwpd * self._rated_bytes
        self.governor = Governor(target, cap, now)
        self._begun = now
        """Since when all that was written is known."""
        self._restore(now)
        self._saved_bytes = self.governor.written_bytes
        """Written when the state was last saved."""
        self._save_at, self._report_at = now + SAVE_S, now + REPORT_S
        self._writer: threading.Thread | None = None
        self._problem = ""
        logger.info(
            "SARIA: this engine may write %s to SSD per day and at most %s in any 24 h (of drives rated %s, shared by "
            "%d engine(s)); %s now; written so far: %s",
            *map(format_bytes, (int(target), int(cap), int(self._rated_bytes * engines))),
            engines,
            format_bytes(self.governor.room(now)),
            format_bytes(self.governor.written_bytes),
        )

    def _restore(self, now: float) -> None:
        try:
            data = read_state(self._path, self._index)
            state = None if data is None else msgspec.json.decode(data, type=EnduranceState)
        except (StorageError, msgspec.DecodeError) as error:
            logger.warning("SARIA: what was written to SSD before is not known: %s", error)
            return
        if state is not None:
            wall_s = time.time()
            self.governor.restore(state, now, wall_s)
            self._begun -= max(0.0, wall_s - min((begin for begin, _ in state.bins), default=wall_s))

    def step(self, now: float) -> None:
        """Once per engine step."""
        unsaved = self.governor.written_bytes - self._saved_bytes
        due = now >= self._save_at or unsaved >= SAVE_SHARE * self.governor.budget_bytes_day
        if unsaved and due and (self._writer is None or not self._writer.is_alive()):
            self._save_at = now + SAVE_S
            self._saved_bytes = self.governor.written_bytes
            self._writer = threading.Thread(target=self._write, args=(self._encoded(now),), daemon=True)
            try:
                self._writer.start()
            except RuntimeError:  # Too many threads here.
                self._writer = None
        if now >= self._report_at:
            self._report_at = now + REPORT_S
            self._report(now)

    def _encoded(self, now: float) -> bytes:
        return msgspec.json.encode(self.governor.state(now, time.time()))

    def _write(self, state: bytes) -> None:
        try:
            write_state(self._path, self._index, state)
        except StorageError as error:
            if str(error) != self._problem:
                logger.warning("SARIA: what was written to SSD will be forgotten at the next start: %s", error)
            self._problem = str(error)

    def _report(self, now: float) -> None:
        """Say what was written and how long the drives last at this rate, taken over an hour at least."""
        day = self.governor.last_day_bytes(now)
        if not day:
            return
        rate = day * DAY_S / min(max(now - self._begun, REPORT_S), DAY_S)
        logger.info(
            "SARIA: this engine wrote %s to SSD in the last 24 h, %s in all; at this rate drives that are rated for "
            "one write per day last %.1f years",
            format_bytes(day),
            format_bytes(self.governor.written_bytes),
            drive_life_years(rate, self._rated_bytes),
        )

    def close(self, now: float) -> None:
        """Write the state for the next process."""
        self._report(now)
        if self._writer is not None:
            self._writer.join(CLOSE_S)
            if self._writer.is_alive():
                logger.warning("SARIA: a drive hangs; the last minute of what was written will be forgotten")
                return
        self._write(self._encoded(now))
