"""What this engine shares with others on its SSD paths: capacity, write budgets, and what each has sealed.

A thread looks every few seconds; the engine's thread goes by what it saw, once per step. An idle engine takes no steps:
it gives up what it may still come to use, and what it has with its next step. What others sealed it takes over when a
request arrives, before that is looked up.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

from saria_connector.sizing import Sizing
from saria_connector.wear import Wear
from saria_vllm.config import format_bytes
from saria_vllm.errors import StorageError
from saria_vllm.policy.endurance import DriveBudget
from saria_vllm.policy.tiers import Tiers
from saria_vllm.storage.foreign import OthersFiles, Place
from saria_vllm.storage.namespace import EngineDirectory
from saria_vllm.storage.reclaim import share_capacity
from saria_vllm.types import FoundChunk

logger = logging.getLogger("vllm.saria")

LOOK_S = 5.0
"""Between two looks."""

MORE_S = 0.1
"""The same, while there is more to index."""

CLOSE_S = 5.0
"""How long a shutdown waits for a drive that hangs."""

SMALL_FILES_BYTES = 1 << 20
"""What leases, generations and the like may take beside the segments."""


class _News(NamedTuple):
    """What other engines sealed and retired since the last look."""

    found: list[FoundChunk]
    gone: list[Place]


class Sharing:
    """See the module's text. Until `settle` has said what this engine may occupy, it is nothing.

    Args:
        capacity_bytes: for all engines and paths together.
    """

    def __init__(self, directory: EngineDirectory, sizing: Sizing, capacity_bytes: int, wear: Wear | None) -> None:
        self._directory, self._sizing, self._capacity_bytes, self._wear = directory, sizing, capacity_bytes, wear
        self._per_segment = sizing.segment_bytes * sizing.ranks * len(directory.paths)
        self.segments_max = 0
        """On each drive of one rank."""
        self._said_segments = sizing.segments_max
        self._generation = directory.generation
        shapes = {shape.group: shape for shape in sizing.shapes}
        self._others = OthersFiles(directory.paths, directory.namespace, directory.index, sizing.ranks, shapes)
        self._news: _News | None = None
        self._more = False
        """Whether the last look left something to look at."""
        self._budgets: list[DriveBudget | None] | None = None
        """By drive; None for one that could not be looked at."""
        self._tiers: Tiers | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._said: set[str] = set()

    # On a thread.

    def settle(self) -> None:
        """Agree with the other engines on what this one may occupy.

        Raises:
            StorageError, OSError: nothing was agreed; what was stands.
        """
        extents = self._tiers.chunks.extents if self._tiers is not None else None
        held_bytes = extents.most_segments() * self._per_segment if extents is not None else 0
        paths, sizing = self._directory.paths, self._sizing
        ours, removed = share_capacity(paths, self._directory, self._capacity_bytes, held_bytes, sizing.engines)
        for path in removed:
            logger.warning("SARIA removed %s to stay within ssd_capacity", path)
        segments_max = sizing.segments_max
        if ours < self._per_segment * segments_max - SMALL_FILES_BYTES:
            segments_max = ours // self._per_segment
        if segments_max != self._said_segments:
            self._said_segments = segments_max
            logger.log(
                logging.INFO if segments_max else logging.WARNING,
                "SARIA: of ssd_capacity, shared with others, %s are for this engine%s",
                format_bytes(ours),
                "" if segments_max else ", so nothing is written to SSD for now: saria inspect shows who has the rest",
            )
        self.segments_max = segments_max
        if extents is not None:
            extents.segments_max = segments_max

    def look(self) -> bool:
        """Look at all that is shared; whether there is more to look at soon. Never raises for what a drive does."""
        for what in (self.settle, self._look_at_budgets):
            try:
                what()
            except (OSError, StorageError) as error:
                if str(error) not in self._said and len(self._said) < 10:
                    self._said.add(str(error))
                    logger.warning("SARIA: what other engines share with this one is not known: %s", error)
        return self._find()

    def _find(self) -> bool:
        """Look at what others sealed, once the last look's news was taken; whether there is more."""
        if self._directory.generation != self._generation:
            return False  # After a reset this engine has other weights than those whose KV is on disk.
        if self._news is None:
            found, gone, self._more = self._others.look()
            if found or gone:
                self._news = _News(found, gone)
        return self._more

    def _look_at_budgets(self) -> None:
        """One drive's fault does not hide what the others say."""
        budgets: list[DriveBudget | None] = []
        problem: StorageError | None = None
        for drive in self._wear.drives if self._wear is not None else ():
            try:
                budgets.append(drive.look())
            except StorageError as error:
                budgets.append(None)
                problem = error
        self._budgets = budgets
        if problem is not None:
            raise problem

    def _run(self) -> None:
        more, looked = False, time.monotonic()
        try:
            while not self._ended.wait(MORE_S if more else LOOK_S):
                if more and time.monotonic() < looked + LOOK_S:
                    more = self._find()
                else:
                    more, looked = self.look(), time.monotonic()
        except Exception:
            logger.exception("SARIA: a fault of ours; what other engines share is not looked at any more")

    # On the engine's thread.

    def start(self, tiers: Tiers) -> None:
        """The tier is open: look from now on."""
        self._tiers = tiers
        thread = threading.Thread(target=self._run, name="saria-sharing", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # Too many threads here.
            logger.error("SARIA: what other engines share with this one will not be known: %s", error)
            return
        self._thread = thread

    def step(self, now: float) -> None:
        """Go by what was seen: once per engine step, before anything is evicted."""
        budgets, self._budgets = self._budgets, None
        if budgets is not None and self._wear is not None:
            for drive, budget in zip(self._wear.drives, budgets, strict=True):
                if budget is not None:
                    drive.shared(budget, now)
        if self._tiers is not None:
            self._tiers.shrink_ssd()
        self.take_news()

    def take_news(self) -> None:
        """Index what others sealed."""
        news = self._news
        if self._tiers is None or news is None:
            return
        self._news = None  # The thread writes only where there is none: what it finds meanwhile is not lost.
        if self._directory.generation == self._generation:
            self._tiers.adopt_others(news.found, news.gone)

    def close(self) -> bool:
        """Look no more. False when a look hangs: the directory must stay ours then."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        return self._thread is None or not self._thread.is_alive()
