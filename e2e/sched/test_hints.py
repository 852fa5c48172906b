"""What a request's `kv_transfer_params` say to us, and what becomes of it when it is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import Engine, prompt
from saria_vllm.policy.admission import Return
from saria_vllm.policy.hints import Hints

pytestmark = pytest.mark.vllm
Make = Callable[..., Engine]


def said(**hints: Any) -> dict[str, Any]:
    return {"saria": hints}


def spied(engine: Engine) -> list[Hints]:
    """Hints that admission is told, in order."""
    admission, told = engine.side.tiers._admission, []
    arrived = admission.arrived

    def noted(index: Any, rows: Any, now: float, hints: Hints) -> int:
        told.append(hints)
        return arrived(index, rows, now, hints)

    admission.arrived = noted  # type: ignore[method-assign]
    return told


def test_no_store_stores_nothing_and_still_loads(make: Make) -> None:
    engine = make(blocks=100)
    engine.serve("secret", prompt(100), 30, params=said(no_store=True))
    assert not engine.begun("store") and engine.stored_chunks("secret") == 0
    engine.serve("cold", prompt(100, seed=1))
    engine.flush_hbm()
    stored = len(engine.begun("store"))
    engine.serve("warm", prompt(100, seed=1) + prompt(60), 3, params=said(no_store=True))
    assert engine.offered("warm") == [96]
    assert len(engine.begun("store")) == stored


def test_no_load_is_offered_nothing_and_still_stores(make: Make) -> None:
    engine = make(blocks=100)
    engine.serve("cold", prompt(100))
    engine.flush_hbm()
    engine.serve("fresh", prompt(100) + prompt(60, seed=1), params=said(no_load=True))
    assert engine.offered("fresh") == [0] and not engine.begun("load")
    assert engine.stored_chunks("fresh") == 10
    engine.serve("hbm", prompt(100) + prompt(60, seed=1), params=said(no_load=True))
    assert engine.answers[-1] == ("hbm", 144, 0), "what HBM has is used"


def test_no_load_does_not_wait_for_the_load_of_another(make: Make) -> None:
    engine = make(blocks=100)
    engine.serve("cold", prompt(100))
    engine.flush_hbm()
    engine.worker.auto_loads = False
    engine.add("loads", prompt(100))
    engine.steps_of(3)
    engine.serve_some("fresh", prompt(100, seed=2), params=said(no_load=True))
    engine.add("same", prompt(100), params=said(no_load=True))
    engine.steps_of(4)
    assert engine.outputs["same"] and engine.counted("load_waits") == 0
    engine.worker.auto_loads = True
    engine.worker.end_all()
    engine.run()


def test_session_and_last_reach_admission_once_per_request(make: Make) -> None:
    engine = make(blocks=100)
    told = spied(engine)
    engine.serve("1", prompt(100), 40, params=said(session="a7"))
    engine.add("2", prompt(130), 40, params=said(session="a7", last=True))
    engine.steps_of(3)
    engine.preempt_all()
    engine.run()
    engine.serve("3", prompt(50, seed=1))
    assert told == [Hints("a7"), Hints("a7", True), Hints()]
    assert engine.counted("hints_ignored") == 0


def test_what_has_ended_is_not_written_and_what_goes_on_is(make: Make, tmp_path: Path) -> None:
    engine = make(
        blocks=400, block_bytes=65536, dram_capacity="4MiB", ssd_paths=[str(tmp_path)], ssd_capacity="64MiB",
        endurance="off",
    )  # fmt: skip
    engine.serve("opens the SSD tier", prompt(8))
    for number in range(12):
        engine.now += 5.0
        over = number % 2 == 0
        engine.serve(f"r{number}", prompt(161, seed=number), params=said(session=f"s{number}", last=over))
    engine._report_rest()
    assert engine.counted("admission:session_ended") >= 20
    assert engine.counted("persisted_chunks") >= 20
    index = engine.side.tiers.chunks.index
    for number in range(0, 12, 2):
        rows = index.find(0, engine.keys(engine.requests[f"r{number}"]))
        assert not index.ssd[rows[rows >= 0]].any(), f"r{number} was the last of its session"


WRONG: list[Any] = [
    {"saria": {"session": 7}}, {"saria": {"session": ["a"]}}, {"saria": {"last": "yes"}}, {"saria": {"no_store": 1}},
    {"saria": {"sesion": "a"}}, {"saria": "a"}, {"saria": [{"last": True}]}, {"saria": {"session": "x" * 100_000}},
]  # fmt: skip


def test_wrong_hints_are_ignored_counted_and_said_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(blocks=100)
    told = spied(engine)
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.addHandler(caplog.handler)
    try:
        for number, params in enumerate(WRONG):
            engine.serve(f"r{number}", prompt(100, seed=number), 3, params=params)
    finally:
        vllm_logger.removeHandler(caplog.handler)
    assert all(len(engine.outputs[f"r{number}"]) == 3 for number in range(len(WRONG)))
    assert engine.stored_chunks("r0") == 6
    assert told == [Hints()] * len(WRONG)
    assert engine.counted("hints_ignored") == len(WRONG) and engine.counted("internal_errors") == 0
    messages = [record.getMessage() for record in caplog.records if "hints_ignored" in record.getMessage()]
    assert len(set(messages)) == 1 and len(messages[0]) < 300


def test_right_hints_beside_wrong_ones_are_taken(make: Make) -> None:
    engine = make(blocks=100)
    told = spied(engine)
    engine.serve("r", prompt(100), params=said(session="a7", last=3, no_store=True, other=1))
    assert told == [Hints("a7", no_store=True)]
    assert engine.counted("hints_ignored") == 2 and not engine.begun("store")


def test_a_session_id_changes_no_hit(make: Make) -> None:
    engine = make(blocks=100)
    engine.serve("1", prompt(100), params=said(session="A", last=True))
    engine.flush_hbm()
    engine.serve("2", prompt(100) + prompt(50, seed=1), params=said(session="B"))
    engine.flush_hbm()
    engine.serve("3", prompt(100))
    assert engine.offered("2") == [96] and engine.offered("3") == [96]
    assert isinstance(engine.side.tiers._admission, Return)
