"""Opening the SSD tier: claim this engine's directory, make room in it, have the workers scan it, index what all found.

Nothing of this holds up the engine: reclaiming and scanning run on threads while requests are told to ask again for a
bounded time, and whatever goes wrong leaves the tier off.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from saria_connector.fingerprint import changes, fingerprint_parts, process_only_reasons
from saria_connector.metadata import SariaMetadata
from saria_connector.sharing import Sharing
from saria_connector.sizing import Sizing
from saria_connector.wear import Wear
from saria_vllm.config import SariaConfig
from saria_vllm.errors import StorageError
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.tiers import Tiers
from saria_vllm.storage.format import records_per_segment
from saria_vllm.storage.namespace import EngineDirectory, last_claimed, namespace_name
from saria_vllm.storage.reclaim import Claimed, claim_with_room
from saria_vllm.types import FoundChunks, OpenedSsd, OpenSsd

logger = logging.getLogger("vllm.saria")

OPENING_S = 10.0
"""How long requests wait for the SSD tier to open."""

LEASE_WAIT_S = 3.0


class SsdOpening:
    """See the module's text. Also owns the generation, which the directory makes durable where there is one."""

    def __init__(self, config: SariaConfig, sizing: Sizing, tiers: Tiers, clock: Callable[[], float]) -> None:
        self._config, self._sizing, self._tiers, self._clock = config, sizing, tiers, clock
        self.generation = 0
        self.directory: EngineDirectory | None = None
        self.wear: Wear | None = None
        self.sharing: Sharing | None = None
        self._paths: tuple[str, ...] = ()
        """Those of the ssd paths that are used: what the drives' numbers stand for."""
        self._until = 0.0
        """Until when lookups wait; 0 once the tier is open or off."""
        self._reclaimer: threading.Thread | None = None
        self._message: OpenSsd | None = None
        """To be sent to the workers, with the generation of that moment."""
        self._generation_sent = 0
        """The generation that the workers look for."""
        self._reports: list[OpenedSsd] = []

    def claim(self, vllm_config: Any, kv_cache_config: Any) -> None:
        """Take this engine's directory, on the drives that let it. Without any the tier is off.

        Raises:
            StorageError: a path cannot be used, or no directory is free.
        """
        for reason in process_only_reasons(vllm_config):
            logger.warning("SARIA: what is persisted to SSD will not be used after a restart: %s", reason)
        sizing = self._sizing
        parts = fingerprint_parts(vllm_config, kv_cache_config, sizing.groups, sizing.shapes, self._config.namespace)
        preferred = getattr(vllm_config.parallel_config, "data_parallel_rank_local", 0) or 0
        before, name = last_claimed(self._config.ssd_paths), namespace_name(parts)
        claimed = self._lease(name, parts, preferred)
        if claimed.directory is None:
            self._off("; ".join(claimed.left_out))
            return
        for problem in claimed.left_out:
            logger.error("SARIA: a drive is left out until a restart: %s", problem)
        if before is not None and before[0] != name and not parts["this_process_only"]:
            self._log_change(*before, name, parts)
        self.directory, self._paths = claimed.directory, claimed.directory.paths
        self.generation = self.directory.generation
        self._until = self._clock() + OPENING_S
        if self._config.endurance is not None:
            paths, index = self.directory.paths, self.directory.index
            left_out = len(self._config.ssd_paths) - len(paths)
            try:
                self.wear = Wear(self._config.endurance, paths, left_out, index, sizing.engines, self._clock())
            except StorageError as error:
                self.release()
                self._off(str(error))
                return
            self._tiers.evictor.governors = self.wear.governors
        self.sharing = Sharing(self.directory, self._sizing, self._config.ssd_capacity, self.wear)

    @staticmethod
    def _log_change(before: str, old: dict[str, Any], now: str, new: dict[str, Any]) -> None:
        differs = changes(old, new)
        by_accident = len(differs) == 1 and differs[0].startswith("hash:")  # Of block hashes: algorithm and seed.
        logger.log(
            logging.WARNING if by_accident else logging.INFO,
            "SARIA: what was stored on SSD by the configuration used last, %s, is not used by this one, %s; %s%s",
            before,
            now,
            "; ".join(differs) or "nothing that is known differs",
            ": set the same PYTHONHASHSEED for all, or none with sha256" if by_accident else "",
        )

    def _lease(self, namespace: str, parts: dict[str, Any], preferred: int) -> Claimed:
        """The preferred engine directory; another one only when a few seconds do not free it.

        An engine that is still going down holds its lease for a moment, and its successor should find its cache.
        """
        give_up = time.monotonic() + LEASE_WAIT_S
        while True:
            claimed = claim_with_room(self._config.ssd_paths, namespace, parts, preferred)
            for path in claimed.removed:
                logger.warning("SARIA removed %s: its drive was full", path)
            directory = claimed.directory
            if directory is None or directory.index == preferred:
                return claimed
            if time.monotonic() > give_up:
                logger.warning("SARIA: another engine has e%d; this one uses e%d", preferred, directory.index)
                return claimed
            directory.release()
            time.sleep(0.2)

    def waiting(self) -> bool:
        """Whether the tier is about to open: requests wait, and an idle engine keeps stepping."""
        return self._until > self._clock()

    def put_into(self, metadata: SariaMetadata) -> None:
        """Tell the workers which directory is ours, and once to open it."""
        if self.directory is None:
            return
        metadata.namespace, metadata.engine_index = self.directory.namespace, self.directory.index
        if self._message is not None:
            metadata.open_ssd = msgspec.structs.replace(self._message, generation=self.generation)
            self._message, self._generation_sent = None, self.generation
        if self._reclaimer is None:
            self._reclaimer = threading.Thread(target=self._reclaim, args=(self.directory, self.sharing), daemon=True)
            try:
                self._reclaimer.start()
            except RuntimeError as error:  # Too many threads here.
                self._off(str(error))

    def _reclaim(self, directory: EngineDirectory, sharing: Sharing) -> None:
        """Make room under `ssd_capacity`, then let the workers open. On a thread: unlinking much takes seconds."""
        try:
            sharing.settle()
        except (OSError, StorageError) as error:  # What is there can be read; what there is room for is settled later.
            logger.warning("SARIA: nothing is written to SSD for now: %s", error)
        except Exception as error:
            self._off(f"{type(error).__name__}: {error}")
            return
        sizing = self._sizing
        self._message = OpenSsd(directory.directories, self.generation, sizing.segment_bytes, sizing.segments_max)

    def _off(self, problem: str) -> None:
        logger.error("SARIA: the SSD tier is off: %s", problem)
        self._until = 0.0

    def opened(self, reports: list[OpenedSsd]) -> None:
        """Take some ranks' reports; with the last one the tier is open."""
        self._reports += reports
        if self._reports and len(self._reports) == self._sizing.ranks:
            self._adopt(self._reports)
            self._reports = []

    def _adopt(self, reports: list[OpenedSsd]) -> None:
        problems = [report.problem for report in reports if report.problem]
        if problems:
            self._off(problems[0])
            return
        assert self.sharing is not None
        self._until = 0.0
        found = functools.reduce(FoundChunks.also_in, (report.found for report in reports))
        next_segment = max(report.next_segment for report in reports)
        sizing = self._sizing
        records = [records_per_segment(shape.record_bytes, sizing.segment_bytes) for shape in sizing.shapes]
        drives = len(self._paths)
        extents = ExtentAllocator(drives, self.sharing.segments_max, records, next_segment)
        extents.striping.labels = list(self._paths)
        for drive in range(drives):
            if not all(report.drives[drive] for report in reports):
                logger.error("SARIA: drive %s is left out until a restart", self._paths[drive])
                extents.striping.leave_out(drive)
        self._seed(extents, reports)
        seen = set[tuple[int, int]]().union(*(report.found.segments() for report in reports))
        self._tiers.open_ssd(extents, found, next_segment, seen)
        self._tiers.moved((), self._tiers.ingress_bytes_s, self._clock())
        if self.generation != self._generation_sent:
            self._tiers.reset()  # A reset came in between: what was found is of before, and its segments must go.
        if not self.sharing.segments_max and (extents := self._tiers.chunks.extents) is not None:
            extents.segments_max = extents.most_segments()  # Not settled yet: what is there may stay.
        self.sharing.start(self._tiers)
        logger.info("SARIA: the SSD tier is open, %d chunks found; %s", len(found), reports[0].note)

    @staticmethod
    def _seed(extents: ExtentAllocator, reports: list[OpenedSsd]) -> None:
        """Take what ranks measured of each drive; a load is as slow as its slowest rank."""
        for drive, rates in enumerate(zip(*(report.read_bytes_s for report in reports), strict=True)):
            if known := [rate for rate in rates if rate]:
                extents.striping.seed(drive, min(known))

    def next_generation(self) -> bool:
        """Begin a generation; False when not durably."""
        if self.directory is None:
            self.generation += 1
            if self._config.ssd_paths:
                logger.error("SARIA: after a restart the cache may not be reset: the SSD tier is off")
            return not self._config.ssd_paths
        try:
            self.directory.bump_generation()
            return True
        except StorageError as error:
            logger.error("SARIA: after a restart the cache may not be reset: %s", error)
            return False
        finally:
            self.generation = self.directory.generation

    def step(self, now: float) -> None:
        """Once per engine step, before anything is evicted."""
        if self.sharing is not None:
            self.sharing.step(now)
        if self.wear is not None:
            self.wear.step(now)

    def release(self) -> None:
        looked = self.sharing is None or self.sharing.close()
        self.sharing = None
        if self.wear is not None:
            self.wear.close(self._clock())
            self.wear = None
        if self.directory is not None:
            if looked:
                self.directory.release()
            self.directory = None
