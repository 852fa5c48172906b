"""What prefills take, on the CPU and on a double of a GPU's events."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest

from saria_vllm.engine import step_times
from saria_vllm.engine.step_times import STEPS_MAX, StepTimes
from saria_vllm.types import Prefill


def test_the_time_between_begin_and_end_is_told_once() -> None:
    times = StepTimes(on_gpu=False)
    times.begin(Prefill(256, 1000))
    time.sleep(0.01)
    times.end()
    ((tokens, attended, seconds),) = times.take()
    assert (tokens, attended) == (256, 1000) and 0.01 <= seconds < 5
    assert times.take() == []


def test_steps_without_prefill_are_not_timed() -> None:
    times = StepTimes(on_gpu=False)
    times.begin(None)
    times.end()
    times.end()
    assert times.take() == []


def test_a_step_that_did_not_end_is_forgotten() -> None:
    times = StepTimes(on_gpu=False)
    times.begin(Prefill(1, 1))
    times.begin(Prefill(2, 2))
    times.end()
    assert [tokens for tokens, _, _ in times.take()] == [2]


class Event:
    """A CUDA event of a stream whose work ends when `done` says so."""

    made: ClassVar[list[Event]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at, self.done = -1.0, False
        Event.made.append(self)

    def record(self) -> None:
        self.at = float(len(Event.made))

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, later: Event) -> float:
        assert self.at >= 0 and later.done
        return 1000 * (later.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StepTimes:
    class Cuda:
        pass

    fake: Any = Cuda()
    fake.Event = Event
    Event.made = []
    monkeypatch.setattr(step_times, "_cuda", fake)
    return StepTimes(on_gpu=True)


def test_on_a_gpu_a_step_is_told_when_it_has_run_there_in_order(gpu: StepTimes) -> None:
    for tokens in (128, 256):
        gpu.begin(Prefill(tokens, 0))
        gpu.end()
    Event.made[3].done = True
    assert gpu.take() == []
    Event.made[1].done = True
    assert gpu.take() == [(128, 0, 1.0), (256, 0, 1.0)]


def test_a_gpu_that_never_tells_makes_no_endless_queue(gpu: StepTimes) -> None:
    for _ in range(3 * STEPS_MAX):
        gpu.begin(Prefill(128, 0))
        gpu.end()
    assert len(Event.made) == 2 * STEPS_MAX
