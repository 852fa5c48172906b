"""Our counters through vLLM's KVConnectorStats, its log line and /metrics. Names come from `saria_vllm.metrics`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from saria_vllm.metrics import COUNTERS

PREFIX = "vllm:saria_"


@dataclass
class SariaStats(KVConnectorStats):
    """Counter increments by "name" or "name:label value"."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class SariaPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter per entry of the table, with every label value present from the start but those of drives,
    which come with their first increment."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[int, str], Any] = {}
        self._by_drive: dict[tuple[int, str], Callable[[str], Any]] = {}
        for name, metric in COUNTERS.items():
            labels = [*labelnames, metric.label] if metric.label else labelnames
            counter = self._counter_cls(name=PREFIX + name, documentation=metric.help, labelnames=labels)
            for engine, engine_values in per_engine_labelvalues.items():
                if metric.label == "drive":
                    self._by_drive[engine, name] = functools.partial(counter.labels, *engine_values)
                    continue
                for value in metric.values or ("",):
                    key = f"{name}:{value}" if value else name
                    values = [*engine_values, value] if value else engine_values
                    self._counters[engine, key] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            name, _, drive = key.partition(":")
            if (engine_idx, name) in self._by_drive and (engine_idx, key) not in self._counters:
                self._counters[engine_idx, key] = self._by_drive[engine_idx, name](drive)
            self._counters[engine_idx, key].inc(value)
