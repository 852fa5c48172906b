"""Predict the return: which chunks that leave DRAM will be asked for again.

What is known of a chunk is the request that touched it last: how long ago, how long its prompt was, whether a later
request left its branch, whether its line of requests came back after an eviction before. From these a logistic
regression tells the probability of a return. It learns online, without a training set: chunks evicted together are one
example, positive when they are asked for again, negative after half an hour without; late returns correct that.

The regression is fitted by an extended Kalman filter (recursive least squares on the logit), so a hundred examples are
enough to be useful.

Where clients name their sessions, nothing needs to be guessed of branches: what a session's request does not share with
the next one is dead, and so is all of a session that has ended, but for what other sessions share. A client that asks
for such chunks after all is not believed any more.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from saria_vllm.policy.hints import NO_HINTS, Hints
from saria_vllm.policy.index import Mask

Floats = npt.NDArray[np.float64]

LENGTH_BUCKETS = 24
_UNIT_TOKENS = 64.0
"""Lengths are counted in this many tokens, whatever the size of a chunk."""

FEATURES = 4 + 1 + LENGTH_BUCKETS + 4 + 3

_PRIOR_VARIANCE = 0.3
_LEARNING_RATE = 0.1
_EXAMPLE_TOKENS = 16_384.0
"""An example of so many evicted tokens has the full learning rate; it grows with the square root."""

_FORGETTING = 1e-6
"""Variance that comes back with every example, so that the model follows a load that changes."""

NO_RETURN_S = 1800.0
"""An evicted chunk counts as not returning when it was not asked for within this time."""

VISITS_MAX = 1 << 16
"""Requests that are remembered. What the last of an older one touched is taken for dead."""

BURSTS_MAX = 1 << 14
"""Examples that are remembered while they wait for their answer."""


class LogisticModel:
    """Logistic regression with the weights' covariance."""

    def __init__(self) -> None:
        self.weights: Floats = np.zeros(FEATURES)
        self.weights[:2] = 2.0, -1.0  # Most come back soon, few after an hour: where every load starts.
        self._covariance: Floats = np.eye(FEATURES) * _PRIOR_VARIANCE

    def probability(self, features: Floats) -> Floats:
        """Of rows of features."""
        return 1 / (1 + np.exp(-(features @ self.weights)))

    def learn(self, features: Floats, returned: bool, tokens: float) -> None:
        """One example of so many tokens."""
        predicted = 1 / (1 + math.exp(-float(features @ self.weights)))
        rate = _LEARNING_RATE * math.sqrt(tokens / _EXAMPLE_TOKENS)
        curvature = max(predicted * (1 - predicted), 0.02) * rate
        gain = self._covariance @ features
        scale = 1 + curvature * float(features @ gain)
        self.weights += gain * (rate * (returned - predicted) / scale)
        self._covariance -= np.outer(gain, gain) * (curvature / scale)
        self._covariance.flat[:: FEATURES + 1] += _FORGETTING * _PRIOR_VARIANCE


class Line:
    """A line of requests: those of a session that was named, else requests each of which continues the one before: what
    an agent's session looks like from here."""

    __slots__ = ("believed", "returns", "session", "shared")

    def __init__(self, session: str) -> None:
        self.session = session
        """Empty where none was named."""
        self.believed = True
        """False once something was asked for that was dead by its client's word."""
        self.returns = 0
        """Requests of it that found something evicted."""
        self.shared = 0
        """Leading chunks that another line has, too."""


class Visit:
    """A request as far as its chunks' fate depends on it."""

    __slots__ = ("begun", "chunks", "dead_from", "ended", "left_at", "left_chunks", "line", "on_ssd", "time")

    def __init__(self, time: float, chunks: int, line: Line, ended: bool, on_ssd: int) -> None:
        self.time, self.chunks, self.line, self.ended, self.on_ssd = time, chunks, line, ended, on_ssd
        self.begun = 0
        """How many of its leading chunks are wanted on SSD, with all groups: under a budget the last of them was
        written, which is of no use without the others."""
        self.left_at = -1
        """Chunks that a later request shared before it took another branch, -1 when none did."""
        self.left_chunks = 0
        """Length of that request."""
        self.dead_from = -1
        """Depth from which its chunks are dead by its client's word, -1 for nowhere."""


class Burst:
    """Chunks of one visit that were evicted at one time: one example."""

    __slots__ = ("answered", "chunks", "features", "returned", "time")

    def __init__(self, features: Floats, time: float) -> None:
        self.features, self.time = features, time
        self.chunks = self.returned = 0
        self.answered = False
        """Whether it was counted as not returning."""


class Returns:
    """Visits, what they say about evicted chunks, and what came of it. Chunks are told by depth: rows stay outside."""

    def __init__(self, chunk_tokens: int) -> None:
        self._scale = chunk_tokens / _UNIT_TOKENS
        self._chunk_tokens = chunk_tokens
        self.model = LogisticModel()
        self._visits: OrderedDict[int, Visit] = OrderedDict()
        self._sessions: dict[str, int] = {}
        """The last visit of each named session; forgotten with it."""
        self._bursts: OrderedDict[int, Burst] = OrderedDict()
        self._unanswered: OrderedDict[int, Burst] = OrderedDict()
        self._now_bursts: dict[tuple[int, bool, bool], int] = {}
        self._now = -math.inf
        self._last_visit = self._last_burst = 0

    def last_visit(self, session: str) -> int:
        """Number of a session's last visit, 0 when none is remembered."""
        return self._sessions.get(session, 0)

    def visit(
        self,
        chunks: int,
        known: int,
        last_visit: int,
        returned: dict[int, int],
        now: float,
        hints: Hints = NO_HINTS,
        kept: int = 0,
        on_ssd: int = 0,
    ) -> int:
        """A request of so many chunks came, the first `known` of which were seen before, the last of these by
        `last_visit`. `returned` counts chunks by the burst in which they were evicted; `kept` chunks are those of the
        session's visit before; the leading `on_ssd` are on SSD. Returns the visit's number."""
        before = self._visits.get(last_visit) if known else None
        mine = self._visits.get(self.last_visit(hints.session)) if hints.session else None
        earlier, common = (mine, kept) if hints.session else (before, known)
        continues = earlier is not None and (common == earlier.chunks or common >= earlier.chunks / 2)
        line = earlier.line if earlier is not None and (continues or hints.session) else Line(hints.session)
        if returned and continues:
            line.returns += 1
        self._note_shared(line, before, known)
        self._note_left(line, before, mine, chunks, known, kept)
        for number, count in returned.items():
            self._learn_return(number, count)
        self._answer_late(now)
        self._last_visit += 1
        visit = self._visits[self._last_visit] = Visit(now, chunks, line, hints.last, on_ssd)
        if hints.last and line.believed:
            visit.dead_from = line.shared
        if hints.session:
            self._sessions[line.session] = self._last_visit
        if len(self._visits) > VISITS_MAX:
            number, oldest = self._visits.popitem(last=False)
            if self._sessions.get(oldest.line.session) == number:
                del self._sessions[oldest.line.session]
        return self._last_visit

    def _note_shared(self, line: Line, before: Visit | None, known: int) -> None:
        if before is None:
            line.shared = max(line.shared, known)  # By whom is forgotten.
        elif before.line is not line:
            line.shared = max(line.shared, known)
            before.line.shared = max(before.line.shared, known)
        elif 0 <= before.dead_from < known:
            line.believed = False

    def _note_left(
        self, line: Line, before: Visit | None, mine: Visit | None, chunks: int, known: int, kept: int
    ) -> None:
        """Of a named session only its next request tells what was left, of others the tree of prefixes."""
        if line.session and line.believed:
            if mine is not None:
                mine.dead_from = max(kept, line.shared)
            return
        if before is None or (before.line.session and before.line.believed):
            return
        if known < chunks and known < before.chunks and not 0 <= before.left_at <= known:
            before.left_at, before.left_chunks = known, chunks

    def _learn_return(self, number: int, count: int) -> None:
        burst = self._bursts.get(number)
        if burst is None:
            return
        burst.returned += count
        for _ in range(1 + burst.answered):  # The second time takes back what it was counted as.
            self.model.learn(burst.features, True, burst.returned * self._chunk_tokens)

    def _answer_late(self, now: float) -> None:
        while self._unanswered:
            number, burst = next(iter(self._unanswered.items()))
            if burst.time + NO_RETURN_S >= now:
                break
            del self._unanswered[number]
            burst.answered = True
            if burst.chunks > burst.returned:
                self.model.learn(burst.features, False, (burst.chunks - burst.returned) * self._chunk_tokens)

    def evicted(self, visit: int, left: bool, again: bool, chunks: int, now: float) -> tuple[float, int]:
        """Chunks leave DRAM that `visit` touched last; `left`: behind the point where its branch was left; `again`: not
        for the first time. Returns the probability that they are asked for again, and the number of their burst."""
        if now != self._now:
            self._now = now
            self._now_bursts.clear()
        key = visit, left, again
        number = self._now_bursts.get(key, 0)
        burst = self._bursts.get(number)
        if burst is None:
            self._last_burst = number = self._last_burst + 1
            burst = self._bursts[number] = self._unanswered[number] = Burst(
                self._features(visit, left, again, now), now
            )
            self._now_bursts[key] = number
            if len(self._bursts) > BURSTS_MAX:
                self._unanswered.pop(self._bursts.popitem(last=False)[0], None)
        burst.chunks += chunks
        return float(self.model.probability(burst.features)), number

    def stayed(self, bursts: npt.NDArray[np.integer]) -> None:
        """Chunks of these bursts, 0 for none, did not leave DRAM then."""
        for number, chunks in zip(*(found.tolist() for found in np.unique(bursts, return_counts=True)), strict=True):
            if number in self._bursts:
                self._bursts[number].chunks -= chunks

    def begin(self, visit: int, depths: npt.NDArray[np.int32], room: int) -> Mask:
        """Which chunks of a visit to begin with: those that are on SSD with all before them when `room` is used up."""
        known = self._visits[visit]
        reached: Mask = depths < known.on_ssd + room
        known.begun = max(known.begun, 1 + int(depths[reached].max(initial=-1)))
        return reached

    def begun(self, visit: int) -> int:
        """How many of its leading chunks are wanted on SSD, because the last of them was written under a budget."""
        return self._visits[visit].begun

    def left_at(self, visit: int) -> int:
        """Depth from which the visit's chunks are on a branch that was left; -1 for nowhere, and -2 for a visit that is
        not remembered."""
        known = self._visits.get(visit)
        return -2 if known is None else known.left_at

    def dead_from(self, visit: int) -> int:
        """Depth from which the visit's chunks are dead by its client's word, -1 for nowhere."""
        known = self._visits.get(visit)
        return -1 if known is None or not known.line.believed else known.dead_from

    def ended(self, visit: int) -> bool:
        """Whether it was the last of its session."""
        return self._visits[visit].ended

    def _features(self, number: int, left: bool, again: bool, now: float) -> Floats:
        visit = self._visits[number]
        features = np.zeros(FEATURES)
        age = math.log2(max(now - visit.time, 1.0) / 64)
        length = max(visit.chunks * self._scale, 1.0)
        features[:5] = 1, age / 2, max(0.0, age - 3) / 2, max(0.0, -age) / 2, math.log2(max(length, 16) / 512) / 2
        bucket = min(max(math.floor(math.log2(length) * 3), 15), 14 + LENGTH_BUCKETS) - 15
        features[5 + bucket] = 1
        rest = 5 + LENGTH_BUCKETS
        if left:
            tail = visit.left_at >= visit.chunks / 2
            features[rest] = tail
            if not tail:
                ratio = visit.left_chunks / visit.chunks
                features[rest + 1] = 1
                features[rest + 2] = min(2.0, max(-2.0, math.log2(ratio))) / 2
                features[rest + 3] = ratio > 0.9 and visit.left_chunks < 1.1 * visit.chunks + 16 / self._scale
        returns = visit.line.returns
        features[rest + 4 : rest + 7] = again, returns > 0, min(returns, 4) / 2
        return features
