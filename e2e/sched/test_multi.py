"""Under MultiConnector, where another connector may win."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from harness import Engine, prompt, saria

pytestmark = pytest.mark.vllm
Make = Callable[..., Engine]

STUB = {"kv_connector": "StubConnector", "kv_role": "kv_both", "kv_connector_module_path": "stub_connector"}


def both(order: str) -> dict[str, Any]:
    ours = saria(chunk_tokens=16)
    children = [ours, STUB] if order == "ours first" else [STUB, ours]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }


@pytest.mark.parametrize("order", ["ours first", "stub first"])
def test_b36_the_connector_that_loses_loads_nothing_and_still_stores(make: Make, order: str) -> None:
    engine = make(connector=both(order))
    first = engine.serve("cold", prompt(100), 5)
    engine.flush_hbm()
    # The stub wins: it is first, or we have nothing.
    tokens = prompt(100) if order == "stub first" else prompt(100, seed=1)
    engine.add("stub wins", tokens, 5, params={"stub_tokens": 64})
    engine.steps_of(3)
    assert engine.offered("stub wins") == [96 if order == "stub first" else 0]
    assert not engine.begun("load") and not engine.side.tiers.jobs.live
    engine.end_other_load("stub wins")
    engine.run()
    assert not engine.begun("load") and engine.counted("loads:loaded") == 0
    assert engine.stored_chunks("stub wins") == 6
    if order == "stub first":
        assert engine.outputs["stub wins"] == first
    engine.flush_hbm()
    engine.serve("ours wins", tokens, 5)
    assert [job.request_id for job in engine.begun("load")] == ["ours wins"]
    assert engine.outputs["ours wins"] == engine.outputs["stub wins"]


@pytest.mark.parametrize("order", ["ours first", "stub first"])
def test_b36_real_blocks_and_no_tokens(make: Make, order: str) -> None:
    engine = make(connector=both(order))
    engine.serve("cold", prompt(100))
    engine.flush_hbm()
    request = engine.add("again", prompt(100))
    assert engine.saria.get_num_new_matched_tokens(request, 0) == (96, True)
    blocks = engine.scheduler.kv_cache_manager.empty_kv_cache_blocks
    engine.saria.update_state_after_alloc(request, blocks, 0)
    assert not engine.side._loads and not engine.side.tiers.jobs.live
    engine.run()


@pytest.mark.parametrize("order", ["ours first", "stub first"])
@pytest.mark.parametrize("moment", ["in flight", "landed"])
def test_b36_abort_while_another_connector_loads_stores_no_block_it_has_not_filled(
    make: Make, order: str, moment: str
) -> None:
    engine = make(connector=both(order))
    engine.add("stub wins", prompt(100), params={"stub_tokens": 64})
    engine.steps_of(3)
    for block in engine.table("stub wins"):
        engine.worker.hbm[block] = [-1] * 16
    if moment == "landed":
        engine.end_other_load("stub wins")
    engine.abort("stub wins")
    engine.steps_of(3)
    if moment == "in flight":
        engine.worker.other_received.add("stub wins")
    engine.run()
    assert not engine.begun("store")


@pytest.mark.parametrize("order", ["ours first", "stub first"])
def test_b36_statistics_go_through_multi_connector(make: Make, order: str) -> None:
    import prometheus_client

    engine = make(connector=both(order))
    engine.serve("cold", prompt(100))
    engine.flush_hbm()
    engine.serve("again", prompt(100))
    assert engine.stats and all(set(stats) == {"SariaConnector"} for stats in engine.stats)
    total = MultiConnector.build_kv_connector_stats(engine.stats[0])
    assert total is not None
    for stats in engine.stats[1:]:
        more = MultiConnector.build_kv_connector_stats(stats)
        assert more is not None
        total = total.aggregate(more)
    assert total.reduce()["SariaConnector"]["hit_tokens:dram"] == 96
    registry = prometheus_client.CollectorRegistry()
    kinds = {
        kind: partial(kind, registry=registry)
        for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    }
    metrics = MultiConnector.build_prom_metrics(engine.config, kinds, ["engine"], {0: ["0"]})  # type: ignore[arg-type]
    metrics.observe(total.to_dict())
    value = registry.get_sample_value("vllm:saria_hit_tokens_total", {"engine": "0", "tier": "dram"})
    assert value == 96


@pytest.mark.parametrize("order", ["ours first", "stub first"])
def test_b36_reset_through_multi_connector(make: Make, order: str) -> None:
    engine = make(connector=both(order))
    engine.serve("cold", prompt(100))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.serve("again", prompt(100))
    assert engine.offered("again") == [0]
