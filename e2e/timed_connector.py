"""`SariaConnector` that writes down how long its methods take, per engine step: for `bench_overhead.py` only.

Each process appends one line "<role> <step> <nanoseconds> <of which it ran> <method that ran longest>" per step to
$SARIA_TIMES; where it ran for less than that it waited, for a core above all. A step of the scheduler half ends
with `build_connector_meta`, one of the worker half with `build_connector_worker_meta`; equal numbers mean one step.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from saria_connector.connector import SariaConnector

SCHEDULER = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "get_external_cache_hit_sources",
    "request_finished_all_groups", "has_pending_block_frees", "has_pending_push_work", "update_connector_output",
    "get_kv_connector_stats", "build_connector_meta",
)  # fmt: skip
WORKER = (
    "handle_preemptions", "start_load_kv", "wait_for_save", "get_transfer_results", "get_kv_connector_stats",
    "build_connector_worker_meta",
)  # fmt: skip


class TimedConnector(SariaConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        names = SCHEDULER if role == KVConnectorRole.SCHEDULER else WORKER
        self._role_name, self._last = role.name.lower(), names[-1]
        self._step, self._spent_ns = 0, 0
        self._ran_ns = dict.fromkeys(names, 0)
        self._lines: list[str] = []
        for name in names:
            setattr(self, name, self._timed(name, getattr(self, name)))

    def _timed(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            began, ran = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self._ran_ns[name] += time.thread_time_ns() - ran
                self._spent_ns += time.perf_counter_ns() - began
                if name == self._last:
                    self._end_step()

        return call

    def _end_step(self) -> None:
        ran_ns, longest = self._ran_ns, max(self._ran_ns, key=self._ran_ns.__getitem__)
        self._lines.append(f"{self._role_name} {self._step} {self._spent_ns} {sum(ran_ns.values())} {longest}\n")
        self._step, self._spent_ns = self._step + 1, 0
        self._ran_ns = dict.fromkeys(ran_ns, 0)
        if len(self._lines) >= 200:
            self.flush()

    def flush(self) -> None:
        with open(os.environ["SARIA_TIMES"], "a") as file:
            file.writelines(self._lines)
        self._lines.clear()

    def shutdown(self) -> None:
        self.flush()
        super().shutdown()
