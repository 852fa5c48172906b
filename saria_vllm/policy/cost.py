"""Load or compute: at which boundary of a hit loading stops paying.

A request that loads its first k hit chunks and computes the others again waits for

    T(k) = max(waiting_ssd + n_ssd(k) / B_ssd, waiting + n(k) / B_ingress, waiting_gpu) + P(k)

n are bytes of one rank, `waiting` is how long loads and prefills that came before keep each of the three busy, P(k) is
the prefill of what was not loaded. The hit is cut at the k with the least T, if that saves enough: a load leaves the
GPU to other requests, a prefill does not. What is not known yet counts for loading. Sources of the rates: drives and
ingress as measured by the workers, prefill as in `PrefillTime`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

GAIN_MIN, GAIN_MIN_S = 0.1, 0.05
"""What a cut must save at least, of the time without it and in seconds."""

STEP_TOKENS_MIN = 128
"""Prefill tokens of a step from which on it says something: below, its time is that of reading weights."""

LEARNT_TOKENS = 1024
"""Prefill tokens before which nothing is known."""

AVERAGE_TOKENS = 65_536
"""What was learned counts 1/e after so many tokens more."""

CONTEXT_MAX = 2.0
"""Times the longest context seen in a prefill: beyond, nothing is said."""

DEADLINE_SHARE = 0.9
"""Of the deadline of a load, that its prediction may take."""

Floats = npt.NDArray[np.float64]


class PrefillTime:
    """Seconds of a prefill, learned from steps: a x tokens + b x attended.

    `attended` is the sum over tokens of the tokens before them: attention's part grows with the context, all else does
    not. Least squares over recent steps; neither a nor b is below 0.
    """

    def __init__(self) -> None:
        self._tokens = self._context = 0.0
        self._sums = np.zeros(5)
        """Of tokens^2, tokens x attended, attended^2, tokens x seconds, attended x seconds."""
        self._per_token = self._per_attended = 0.0

    def learn(self, tokens: int, attended: int, seconds: float) -> None:
        """A step computed so many prefill tokens."""
        if tokens < STEP_TOKENS_MIN or seconds <= 0:
            return
        self._tokens += tokens
        self._context = max(self._context, attended / tokens)
        self._sums *= math.exp(-tokens / AVERAGE_TOKENS)
        self._sums += (tokens**2, tokens * attended, attended**2, tokens * seconds, attended * seconds)
        nn, na, aa, nt, at = self._sums
        determinant = nn * aa - na * na
        a = b = -1.0
        if determinant > 1e-6 * nn * aa:
            a, b = (nt * aa - at * na) / determinant, (at * nn - nt * na) / determinant
        if b < 0:
            a, b = nt / nn, 0.0
        elif a < 0:
            a, b = 0.0, at / aa
        self._per_token, self._per_attended = float(a), float(b)

    @property
    def tokens_s(self) -> float:
        """Prefill tokens per second without a context; 0 while it is not known."""
        return 1 / self._per_token if self._tokens >= LEARNT_TOKENS and self._per_token else 0.0

    def seconds(self, begin: Floats, end: int) -> Floats:
        """Of prefills that begin at these positions and end before `end`; infinite while that is not known."""
        if self._tokens < LEARNT_TOKENS or end > CONTEXT_MAX * self._context:
            return np.where(begin < end, math.inf, 0.0)
        return self._per_token * (end - begin) + self._per_attended * (float(end) ** 2 - begin**2) / 2


class LoadOrCompute:
    """See the module's text.

    Args:
        deadline_s: after which a load ends as failed, and all of its hit is computed again: none is planned that would.
    """

    def __init__(self, deadline_s: float = math.inf) -> None:
        self._deadline_s = deadline_s
        self.prefill = PrefillTime()
        self._ssd_bytes_s = self._ingress_bytes_s = 0.0
        self._ssd_until = self._ingress_until = self._gpu_until = -math.inf
        self._in_flight = (0, 0)
        """Bytes of loads that have not ended: from SSD, and in all."""

    def measured(self, ssd_bytes_s: float, ingress_bytes_s: float) -> None:
        """What one rank gets from all drives together, and what DRAM and drives together bring into its HBM; 0 while
        that is not known."""
        self._ssd_bytes_s, self._ingress_bytes_s = ssd_bytes_s, ingress_bytes_s

    def begun(self, ssd_bytes: int, all_bytes: int, now: float) -> None:
        """A load of so many bytes on each rank was planned."""
        ssd, in_all = self._in_flight
        self._in_flight = ssd + ssd_bytes, in_all + all_bytes
        self._ssd_until = max(now, self._ssd_until) + ssd_bytes * _slowness(self._ssd_bytes_s)
        self._ingress_until = max(now, self._ingress_until) + all_bytes * _slowness(self._ingress_bytes_s)

    def ended(self, ssd_bytes: int, all_bytes: int) -> None:
        """A load of so many bytes has ended."""
        ssd, in_all = self._in_flight
        self._in_flight = ssd - ssd_bytes, in_all - all_bytes

    def _waiting_s(self, now: float) -> tuple[float, float]:
        """How long loads in flight keep the drives and the ingress busy: as predicted, which is too long where loads
        were faster, and no longer than all of their bytes take, which is too long where some have moved."""
        ssd, in_all = self._in_flight
        return (
            max(0.0, min(self._ssd_until - now, ssd * _slowness(self._ssd_bytes_s))),
            max(0.0, min(self._ingress_until - now, in_all * _slowness(self._ingress_bytes_s))),
        )

    def computing(self, begin: int, end: int, now: float) -> None:
        """A prefill of these positions of a prompt was queued."""
        seconds = float(self.prefill.seconds(np.array([float(begin)]), end)[0])
        if seconds < math.inf:
            self._gpu_until = max(now, self._gpu_until) + seconds

    def gpu_idle(self) -> None:
        """Nothing is to be computed, whatever was predicted."""
        self._gpu_until = -math.inf

    def cut(self, ssd_bytes: Floats, chunk_bytes: int, boundaries: Floats, now: float) -> tuple[int, str]:
        """How many leading chunks of a hit to load, and why not all: a label of `metrics.RECOMPUTE_REASONS`.

        Args:
            ssd_bytes: (chunks,) what of each comes from SSD, on one rank.
            chunk_bytes: of each chunk, on one rank.
            boundaries: (chunks + 1,) the token positions between them, ascending, in the prompt.
        """
        chunks = len(ssd_bytes)
        if not self._ssd_bytes_s and ssd_bytes.any():
            return chunks, ""
        ssd = np.concatenate(([0.0], np.cumsum(ssd_bytes)))
        ssd_waiting_s, waiting_s = self._waiting_s(now)
        ssd_s = np.where(ssd > 0, ssd_waiting_s + ssd * _slowness(self._ssd_bytes_s), 0.0)
        moved = np.arange(chunks + 1.0) * chunk_bytes
        load_s = np.maximum(ssd_s, waiting_s + moved * _slowness(self._ingress_bytes_s))
        load_s[0] = 0.0
        if load_s[-1] < GAIN_MIN_S:
            return chunks, ""
        in_time = int(np.searchsorted(load_s, self._deadline_s * DEADLINE_SHARE, side="right")) - 1
        begin_s = np.maximum(load_s[: in_time + 1], self._gpu_until - now)
        total_s = begin_s + self.prefill.seconds(boundaries[: in_time + 1], int(boundaries[-1]))
        best = in_time - int(np.argmin(total_s[::-1]))
        if best < in_time and total_s[in_time] - total_s[best] >= max(GAIN_MIN_S, GAIN_MIN * total_s[in_time]):
            return best, "cheaper"
        return in_time, "deadline" if in_time < chunks else ""


def _slowness(bytes_s: float) -> float:
    """Seconds per byte; none at a rate that is not known."""
    return 1 / bytes_s if bytes_s else 0.0
