"""`SariaConnector` that writes down how long its methods take, per engine step: for `bench_overhead.py` only.

Each process appends one line per step to $SARIA_TIMES: "<role> <step> <when it ended> <nanoseconds inside> <of them,
how long the thread could run and waited for its core> <method that took longest without that>". A step of the
scheduler half ends with `build_connector_meta`, one of the worker half with `build_connector_worker_meta`; equal
numbers mean one step.
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
        self._step, self._waited_ns = 0, 0
        self._own_ns = dict.fromkeys(names, 0)
        self._schedstat = -1
        self._lines: list[str] = []
        for name in names:
            setattr(self, name, self._timed(name, getattr(self, name)))

    def _timed(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            waited, began = self._queued_ns(), time.perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                spent, waited = time.perf_counter_ns() - began, self._queued_ns() - waited
                self._own_ns[name] += spent - waited
                self._waited_ns += waited
                if name == self._last:
                    self._end_step()

        return call

    def _queued_ns(self) -> int:
        """How long this thread has waited in its core's run queue so far, behind others that ran."""
        if self._schedstat < 0:
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        return int(os.pread(self._schedstat, 64, 0).split()[1])

    def _end_step(self) -> None:
        own_ns, longest = self._own_ns, max(self._own_ns, key=self._own_ns.__getitem__)
        spent_ns = sum(own_ns.values()) + self._waited_ns
        self._lines.append(f"{self._role_name} {self._step} {time.time_ns()} {spent_ns} {self._waited_ns} {longest}\n")
        self._step, self._waited_ns = self._step + 1, 0
        self._own_ns = dict.fromkeys(own_ns, 0)
        if len(self._lines) >= 20:
            self.flush()

    def flush(self) -> None:
        with open(os.environ["SARIA_TIMES"], "a") as file:
            file.writelines(self._lines)
        self._lines.clear()

    def shutdown(self) -> None:
        self.flush()
        super().shutdown()
