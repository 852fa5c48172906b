"""What `saria_vllm.metrics` names, through vLLM's KVConnectorStats, its log line and /metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from saria_vllm.metrics import COUNTERS, GAUGES

PREFIX = "vllm:saria_"


@dataclass
class SariaStats(KVConnectorStats):
    """Counter increments, and gauges that changed, by "name" or "name:label value"."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = value if _is_gauge(name) else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


def _is_gauge(key: str) -> bool:
    return key.partition(":")[0] in GAUGES


class SariaPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter or gauge per entry of the tables, with every label value present from the start but those
    of drives, which come with their first value."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[tuple[int, str], Any] = {}
        self._by_drive: dict[tuple[int, str], Callable[[str], Any]] = {}
        for name, metric in (COUNTERS | GAUGES).items():
            labels = [*labelnames, metric.label] if metric.label else labelnames
            named = {"name": PREFIX + name, "documentation": metric.help, "labelnames": labels}
            made: Any
            if _is_gauge(name):
                made = self._gauge_cls(multiprocess_mode="mostrecent", **named)
            else:
                made = self._counter_cls(**named)
            for engine, engine_values in per_engine_labelvalues.items():
                if metric.label == "drive":
                    self._by_drive[engine, name] = functools.partial(made.labels, *engine_values)
                    continue
                for value in metric.values or ("",):
                    key = f"{name}:{value}" if value else name
                    values = [*engine_values, value] if value else engine_values
                    self._metrics[engine, key] = made.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            name, _, drive = key.partition(":")
            if (engine_idx, name) in self._by_drive and (engine_idx, key) not in self._metrics:
                self._metrics[engine_idx, key] = self._by_drive[engine_idx, name](drive)
            metric = self._metrics[engine_idx, key]
            (metric.set if _is_gauge(key) else metric.inc)(value)
