"""Faults of ours in the worker half: what was promised ends, once, and the engine's thread sees no exception."""

import logging
import time

import numpy as np
import pytest

from saria_connector.connector import SariaConnector
from saria_connector.metadata import SariaMetadata
from saria_connector.worker import WorkerSide
from saria_vllm.engine.step_times import StepTimes
from saria_vllm.types import LoadJob, PersistJob, Prefill, StoreJob, StorePart


class Executor:
    """Fails at the named call; notes what it took."""

    def __init__(self, fails_at):
        self.fails_at, self.taken, self.refused = fails_at, [], []

    def _take(self, name, job):
        if name == self.fails_at:
            raise RuntimeError("a fault of ours")
        self.taken.append(name)

    def set_generation(self, generation):
        pass

    def submit_load(self, job):
        self._take(job.request_id, job)

    def refuse_load(self, job):
        self.refused.append(job.request_id)

    def submit_store(self, job):
        self._take(f"store {job.job_id}", job)

    def submit_promotion(self, job):
        self._take(f"promote {job.job_id}", job)

    def submit_persist(self, job):
        self._take(f"persist {job.job_id}", job)

    def poll(self):
        if self.fails_at == "poll":
            raise RuntimeError("a fault of ours")
        return [], [], {}, []

    def take_opened(self):
        return None

    def take_moved(self):
        return []

    ingress_bytes_s = 0.0


def store_job(number):
    return StoreJob(number, (StorePart(0, np.zeros((2, 2), np.int32), np.ones((2, 1), np.int32)),))


def connector_with(fails_at, prefill=None):
    connector = object.__new__(SariaConnector)
    connector._scheduler, connector._worker = None, object.__new__(WorkerSide)
    connector._faults = set()
    connector._worker._executor = Executor(fails_at)
    connector._worker._results, connector._worker.counts = [], {}
    connector._worker._step_times = StepTimes(on_gpu=False)
    connector._connector_metadata = SariaMetadata(
        prefill=prefill,
        loads=[LoadJob(n, f"r{n}", ()) for n in (1, 2, 3)],
        stores=[store_job(4), store_job(5)],
        promotions=[store_job(8), store_job(9)],
        persists=[
            PersistJob(n, 0, (b"k", b"l"), (b"", b"k"), np.zeros((2, 2), np.int32), np.zeros((2, 3), np.int32))
            for n in (6, 7)
        ],
    )
    return connector


def step(connector, early=True):
    if early:
        connector.handle_preemptions(connector._connector_metadata)
    connector.start_load_kv(None)
    connector.wait_for_save()
    connector.get_transfer_results(set())
    metadata = connector.build_connector_worker_meta()
    return [] if metadata is None else [(r.job_id, r.failed) for r in metadata.results]


@pytest.mark.parametrize(
    ("fails_at", "refused", "failed"),
    [
        ("nowhere", [], []),
        ("r1", ["r3", "r2"], [(n, (0, 1)) for n in (4, 5, 8, 9, 6, 7)]),
        ("r3", [], [(n, (0, 1)) for n in (4, 5, 8, 9, 6, 7)]),
        ("persist 6", [], [(n, (0, 1)) for n in (4, 5, 8, 9, 7)]),
        ("store 4", [], [(n, (0, 1)) for n in (5, 4, 8, 9)]),
        ("promote 9", [], [(9, (0, 1))]),
        ("poll", [], []),
    ],
)
def test_whatever_was_not_handed_on_ends_as_failed(fails_at, refused, failed):
    connector = connector_with(fails_at)
    assert step(connector) == failed
    executor = connector._worker._executor
    assert executor.refused == refused
    stats = connector.get_kv_connector_stats()
    assert (stats is None) == (fails_at == "nowhere")
    if stats is not None:
        assert stats.data["internal_errors"] == 1


@pytest.mark.parametrize("early", [True, False])
def test_loads_begin_before_the_forward_where_vllm_lets_them_and_once(early):
    connector = connector_with("nowhere", Prefill(500, 9000))
    taken = connector._worker._executor.taken
    if early:
        connector.handle_preemptions(connector._connector_metadata)
        assert taken == ["r1", "r2", "r3", "persist 6", "persist 7"]
        assert connector.build_connector_worker_meta() is None
    step(connector, early)
    assert taken == ["r1", "r2", "r3", "persist 6", "persist 7", "store 4", "store 5", "promote 8", "promote 9"]


def test_the_time_of_a_prefill_is_reported_once():
    connector = connector_with("nowhere", Prefill(500, 9000))
    connector.handle_preemptions(connector._connector_metadata)
    time.sleep(0.02)
    connector.wait_for_save()
    ((tokens, attended, seconds),) = connector.build_connector_worker_meta().prefills
    assert (tokens, attended) == (500, 9000) and 0.02 <= seconds < 10
    assert connector.build_connector_worker_meta() is None


def test_the_first_fault_of_a_kind_is_logged_and_the_others_are_counted(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # vLLM's own handlers would keep it from caplog.
    connector = connector_with("poll")
    monkeypatch.setattr(connector._worker, "worker_metadata", lambda: 1 / 0)
    for _ in range(3):
        connector.get_transfer_results(set())
        connector.build_connector_worker_meta()
    records = [record for record in caplog.records if "internal error" in record.getMessage()]
    assert [record.exc_info[0] for record in records] == [RuntimeError, ZeroDivisionError]
    assert "WorkerSide.transfer_results" in records[0].getMessage()
    assert connector.get_kv_connector_stats().data["internal_errors"] == 6
