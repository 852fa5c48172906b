"""How long steps that compute prefill tokens take, on the device that computes them."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from saria_vllm.types import Prefill

_cuda: Any = torch.cuda

STEPS_MAX = 8
"""Steps whose end a GPU has not told yet; more are not timed."""


class StepTimes:
    """Between `begin`, before a step is computed, and `end`, after; on a GPU, where computing goes on behind both,
    between events on its stream."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._begun: tuple[Prefill, Any] | None = None
        self._ended: deque[tuple[Prefill, Any, Any]] = deque()

    def begin(self, prefill: Prefill | None) -> None:
        """None: nothing to time."""
        timed = prefill is not None and len(self._ended) < STEPS_MAX
        self._begun = (prefill, self._mark()) if timed and prefill is not None else None

    def end(self) -> None:
        if self._begun is not None:
            self._ended.append((*self._begun, self._mark()))
            self._begun = None

    def take(self) -> list[tuple[int, int, float]]:
        """(tokens, attended, seconds) of steps that have ended since the last call."""
        taken = []
        while self._ended and (not self._on_gpu or self._ended[0][2].query()):
            prefill, began, ended = self._ended.popleft()
            seconds = began.elapsed_time(ended) / 1000 if self._on_gpu else ended - began
            taken.append((*prefill, seconds))
        return taken

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = _cuda.Event(enable_timing=True)
        event.record()
        return event
