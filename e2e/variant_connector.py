"""`SariaConnector` with a mechanism taken out, or as other tiers load: for `bench_sessions.py` only.

$SARIA_VARIANT names, apart by commas:

  no_recompute   hits are loaded whole, whatever that takes
  serial         a load copies from DRAM only when all of its SSD reads have ended, and nothing is paced
  two_hops       what came from SSD crosses DRAM, too: serial, and a load ends as much later as its SSD part takes the
                 ingress
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from saria_connector.connector import SariaConnector
from saria_vllm.config import parse_rate
from saria_vllm.engine.emulated import ENVIRONMENT
from saria_vllm.engine.executor import LOOK_S, Executor
from saria_vllm.engine.jobs import LoadState
from saria_vllm.engine.pacer import Pacer, Turn


class VariantConnector(SariaConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._variant = set(filter(None, os.environ.get("SARIA_VARIANT", "").split(",")))
        assert self._variant <= {"no_recompute", "serial", "two_hops"}, self._variant
        if self._scheduler is not None and "no_recompute" in self._variant:
            self._scheduler.tiers.cost.cut = lambda ssd_bytes, *_: (len(ssd_bytes), "")  # type: ignore[method-assign]

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None and self._worker._executor is not None
        executor = self._worker._executor
        if self._variant & {"serial", "two_hops"}:
            executor._ends._pacer = SerialPacer(executor._ends._pacer.link)
        if "two_hops" in self._variant:
            SecondHop(executor, parse_rate(os.environ[ENVIRONMENT].split(",")[0], ENVIRONMENT))


class SerialPacer(Pacer):
    """One tier after the other."""

    def __init__(self, link: float) -> None:
        super().__init__("off", link=link)

    def choose(self, now: float) -> Turn:
        loads = self._loads
        self._loads = {load: waiting for load, waiting in loads.items() if not waiting.ssd}
        try:
            turn = super().choose(now)
        finally:
            self._loads = loads
        held = any(waiting.dram for waiting in loads.values())
        return turn._replace(wait_s=LOOK_S) if turn.wait_s == math.inf and held else turn


class SecondHop:
    """Holds back loads that have ended, for as long as their SSD part takes the ingress."""

    def __init__(self, executor: Executor, ingress_bytes_s: float) -> None:
        self._executor, self._ingress_bytes_s = executor, ingress_bytes_s
        self._poll = executor.poll
        self._held: list[tuple[float, LoadState]] = []
        executor.poll = self.poll  # type: ignore[method-assign]

    def poll(self) -> Any:
        results, loads, counts, messages = self._poll()
        now = time.monotonic()
        for state in loads:
            nbytes = sum(
                int((part.extents[:, 0] >= 0).sum()) * self._executor._shapes[part.group].record_bytes
                for part in state.job.parts
            )
            self._held.append((now + nbytes / self._ingress_bytes_s, state))
        ended = [state for until, state in self._held if until <= now]
        self._held = [(until, state) for until, state in self._held if until > now]
        return results, ended, counts, messages
