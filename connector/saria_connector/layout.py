"""What vLLM's KV cache looks like: which groups we serve, their sizes, and where their pages are.

KV is raw pages. A layout that is not recognised is refused at start: there is no third outcome beside byte-exact and
refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, MLAAttentionSpec

from saria_vllm import _native
from saria_vllm.engine.device_pages import DevicePages, Layer
from saria_vllm.errors import ConfigError, LayoutError
from saria_vllm.types import GroupShape

CHUNK_BYTES_MIN = 1 << 20
CHUNK_TOKENS_MAX = 256

UNPROVED = "SARIA_UNPROVED_GPU"


def served_groups(kv_cache_config: KVCacheConfig) -> list[int]:
    """vLLM ids of the groups to keep.

    Raises:
        LayoutError: a group needs what is not built yet; leaving it out would make hits impossible.
    """
    groups = list(kv_cache_config.prefix_cacheable_group_ids)
    if not groups:
        raise LayoutError("this model has no KV cache group that can be kept by prefix")
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        kinds = {type(spec) for spec in _layer_specs(group).values()}
        if group_id not in groups or not kinds <= {FullAttentionSpec, MLAAttentionSpec}:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise LayoutError(
                f"KV cache group {group_id} is {names}: SariaConnector serves full attention and MLA only so far; "
                "models with sliding-window or recurrent layers are not supported yet"
            )
        if any(getattr(spec, "non_causal", False) for spec in _layer_specs(group).values()):
            raise LayoutError("attention that is not causal: a prefix has no KV of its own, it cannot be reused")
        if group.is_eagle_group:
            raise LayoutError("a draft model with a KV cache of its own (EAGLE, MTP) is not supported yet")
        if getattr(group, "host_resident", False):
            raise LayoutError(f"KV cache group {group_id} lives in host memory: not supported")
    return groups


def _layer_specs(group: Any) -> dict[str, KVCacheSpec]:
    spec = group.kv_cache_spec
    by_layer = getattr(spec, "kv_cache_specs", {})
    return {name: by_layer.get(name, spec) for name in group.layer_names}


def refuse_parallelism(vllm_config: Any) -> None:
    """Raise LayoutError for what is not proved: pipeline and context parallel, several nodes."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise LayoutError(f"{name} = {getattr(parallel, name)} is not supported yet; SariaConnector accepts 1")
    if getattr(parallel, "nnodes", 1) > 1:
        raise LayoutError("an engine over more than one node is not supported")


def group_shapes(kv_cache_config: KVCacheConfig, groups: list[int], chunk_tokens: int) -> list[GroupShape]:
    """Sizes of the served groups on this rank.

    Args:
        chunk_tokens: as configured; 0 picks the smallest multiple of the block size that gives at least 1 MiB per rank,
            at most 256 tokens.

    Raises:
        ConfigError: the configured value is no multiple of the block size.
    """
    specs = [kv_cache_config.kv_cache_groups[group].kv_cache_spec for group in groups]
    block_tokens = [spec.block_size for spec in specs]
    if len(set(block_tokens)) != 1:
        raise LayoutError(f"KV cache groups with different block sizes {block_tokens} are not supported yet")
    block_bytes = [
        sum(spec.page_size_bytes for spec in _layer_specs(kv_cache_config.kv_cache_groups[group]).values())
        for group in groups
    ]
    blocks = max(1, min(-(-CHUNK_BYTES_MIN // min(block_bytes)), CHUNK_TOKENS_MAX // block_tokens[0]))
    if chunk_tokens:
        blocks, rest = divmod(chunk_tokens, block_tokens[0])
        if rest:
            raise ConfigError(f"chunk_tokens: {chunk_tokens} is not a multiple of the block size, {block_tokens[0]}")
    return [GroupShape(number, block_tokens[0], blocks, block_bytes[number]) for number in range(len(groups))]


def page_maps(
    kv_cache_config: KVCacheConfig, groups: list[int], kv_caches: Mapping[str, torch.Tensor]
) -> dict[int, _native.PageMap | DevicePages]:
    """Pages of each served group, after checking every registered tensor against vLLM's own description.

    Raises:
        LayoutError: names the layer and what was found.
    """
    places = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for number, layer in enumerate(tensor.layers):
            places[layer] = (tensor.offset + number * tensor.layer_stride, tensor.block_stride, tensor.size)
    maps: dict[int, _native.PageMap | DevicePages] = {}
    for number, group in enumerate(groups):
        layers = []
        for layer, spec in _layer_specs(kv_cache_config.kv_cache_groups[group]).items():
            if layer not in places or layer not in kv_caches:
                raise LayoutError(f"layer {layer} has no KV cache tensor of its own")
            offset, block_stride, _ = places[layer]
            _check_tensor(
                layer, kv_caches[layer], kv_cache_config.num_blocks, offset, block_stride, spec.page_size_bytes
            )
            layers.append(Layer(kv_caches[layer], offset, block_stride, spec.page_size_bytes))
        if layers[0].tensor.device.type == "cuda":
            maps[number] = DevicePages(layers, kv_cache_config.num_blocks)
            continue
        bases = [layer.tensor.untyped_storage().data_ptr() + layer.offset for layer in layers]
        strides, sizes = [layer.stride for layer in layers], [layer.page_bytes for layer in layers]
        maps[number] = _native.PageMap(bases, strides, sizes, kv_cache_config.num_blocks)
    return maps


def _check_tensor(layer: str, tensor: Any, num_blocks: int, offset: int, block_stride: int, page_bytes: int) -> None:
    """Every byte of block b must lie in [offset + b * block_stride, + page_bytes) of the tensor's storage."""

    def refuse(why: str) -> LayoutError:
        return LayoutError(f"KV cache of layer {layer} has a layout that is not recognised: {why}")

    if not isinstance(tensor, torch.Tensor):
        raise refuse(f"a {type(tensor).__name__}, not one tensor")
    unproved = tensor.device.type == "cuda" and os.environ.get(UNPROVED) == "1"
    if tensor.device.type != "cpu" and not unproved:
        raise LayoutError(
            f"KV cache on {tensor.device}: only CPUs are served so far. The copies for GPUs are written and have not "
            f"run on one: {UNPROVED}=1 in the environment tries them"
        )
    item = tensor.element_size()
    kernel_blocks, rest = divmod(tensor.shape[0] if tensor.dim() else 0, num_blocks)
    found = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {num_blocks} blocks of {page_bytes} bytes"
    if rest or not kernel_blocks:
        raise refuse(f"the first dimension does not count blocks: {found}")
    if tensor.storage_offset() * item != offset:
        raise refuse(f"starts at byte {tensor.storage_offset() * item} where vLLM describes {offset}: {found}")
    if tensor.stride(0) * item * kernel_blocks != block_stride:
        raise refuse(
            f"blocks are {tensor.stride(0) * item * kernel_blocks} bytes apart, described {block_stride}: {found}"
        )
    if block_stride < page_bytes:
        raise refuse(f"pages overlap, described {block_stride} bytes apart: {found}")
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    span = (last + (kernel_blocks - 1) * tensor.stride(0) + 1) * item
    content = tensor[0].numel() * item * kernel_blocks
    if not content <= span <= page_bytes:
        raise refuse(f"a block spans {span} bytes: {found}")
    if offset + (num_blocks - 1) * block_stride + page_bytes > tensor.untyped_storage().nbytes():
        raise refuse(f"pages reach beyond the storage of {tensor.untyped_storage().nbytes()} bytes: {found}")
