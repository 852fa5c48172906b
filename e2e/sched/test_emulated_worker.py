"""SARIA_EMULATED_RATES in the worker half: its copies, its drives and what it measures go by these rates."""

import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from saria_connector.metadata import SariaMetadata
from saria_connector.worker import WorkerSide
from saria_vllm.config import SariaConfig
from saria_vllm.engine.emulated import ENVIRONMENT, EmulatedEngine
from saria_vllm.errors import ConfigError
from saria_vllm.types import LoadJob, LoadPart

BLOCKS, CHUNK_BYTES = 64, 1 << 20
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=1024, dtype=torch.float32)
INGRESS = 200e6


@pytest.fixture
def make(tmp_path, request):
    """Makes worker halves with 16 MiB of DRAM and two drives, whose KV cache is registered."""

    hbm = torch.zeros((BLOCKS, CHUNK_BYTES // 4))  # Page maps know its address, and do not keep it.

    def make():
        described = KVCacheTensor(
            size=BLOCKS * CHUNK_BYTES,
            layers=["l"],
            layer_stride=BLOCKS * CHUNK_BYTES,
            block_stride=CHUNK_BYTES,
            offset=0,
        )
        parallel = SimpleNamespace(rank=0, world_size=1)
        transfer = SimpleNamespace(engine_id=request.node.name)
        config = SariaConfig(
            dram_capacity=16 << 20, ssd_paths=(f"{tmp_path}/a", f"{tmp_path}/b"), ssd_capacity=1 << 30, chunk_tokens=16
        )
        worker = WorkerSide(
            SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer),
            KVCacheConfig(BLOCKS, [described], [KVCacheGroupSpec(["l"], SPEC)]),
            config,
        )
        worker.register_kv_caches({"l": hbm})
        request.addfinalizer(worker._executor.close)
        return worker

    assert SPEC.page_size_bytes == CHUNK_BYTES
    return make


def load_s(worker, chunks):
    """Seconds that so many chunks take from DRAM."""
    cells = worker._sizing.slab_bytes // CHUNK_BYTES
    slots = np.array([divmod(number, cells) for number in range(chunks)], np.int32)
    blocks = np.arange(chunks, dtype=np.int32)[:, None]
    part = LoadPart(0, (b"k",) * chunks, blocks, slots, np.full((chunks, 3), -1, np.int32))
    began = time.monotonic()
    worker.start(SariaMetadata(generation=1, loads=[LoadJob(1, "r", (part,))]))
    while not (loads := worker._executor.poll()[1]):
        assert time.monotonic() < began + 20
        time.sleep(0.001)
    assert loads[0].failed == []
    return time.monotonic() - began


def test_loads_and_what_is_measured_go_by_the_emulated_rates(make, monkeypatch, caplog):
    monkeypatch.setenv(ENVIRONMENT, "200MB/s,100MB/s,50MB/s")
    with caplog.at_level(logging.WARNING, "vllm.saria"):
        worker = make()
    assert "SARIA_EMULATED_RATES is set: loads are as slow as 200MB/s,100MB/s,50MB/s say" in caplog.text
    executor = worker._executor
    assert 0.5 * INGRESS < executor._ends._pacer.link < 1.01 * INGRESS
    assert load_s(worker, 8) >= 8 * CHUNK_BYTES / INGRESS
    assert executor._io_threads == 1 and executor._first_rates is None, (
        "one queue per drive; its file says its real rate"
    )
    engines = [executor._open_engine("posix", 4)[0] for _ in range(2)]
    assert [type(engine) for engine in engines] == [EmulatedEngine] * 2
    assert [engine._drive for engine in engines] == [0, 1]
    for engine in engines:
        engine.close()


def test_nothing_is_emulated_unless_asked_for(make, monkeypatch, caplog):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    worker = make()
    assert "SARIA_EMULATED_RATES" not in caplog.text
    assert worker._executor._ends._pacer.link > INGRESS
    engine, _ = worker._executor._open_engine("posix", 4)
    assert not isinstance(engine, EmulatedEngine) and worker._executor._first_rates is not None
    engine.close()


def test_a_wrong_value_ends_the_start_and_says_what_is_accepted(make, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "800MB/s,fast")
    with pytest.raises(ConfigError, match=r"^SARIA_EMULATED_RATES: 'fast' is not a rate of .* such as \"45GB/s\"$"):
        make()
