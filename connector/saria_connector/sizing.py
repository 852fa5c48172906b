"""Sizes that both halves derive from the same configuration, each on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from saria_connector import layout
from saria_vllm.config import SariaConfig, format_bytes
from saria_vllm.errors import ConfigError
from saria_vllm.policy.extents import choose_segments
from saria_vllm.policy.slots import choose_slab_bytes
from saria_vllm.types import GroupShape

SLOTS_MIN = 4
"""A DRAM tier that holds fewer chunks is a mistake."""


@dataclass(frozen=True)
class Sizing:
    groups: list[int]
    """vLLM's ids of the served groups; our group numbers are positions in this list."""
    shapes: list[GroupShape]
    engines: int
    """Data-parallel engines on this node, which share its capacities and its endurance budget evenly."""
    ranks: int
    """Ranks of this engine, all on this node."""
    dram_bytes: int
    """DRAM of this engine, over its ranks."""
    slab_bytes: int
    slabs: int
    """Of one rank."""
    segment_bytes: int
    """Of one rank; 0 without an SSD tier."""
    segments_max: int
    """Of one rank and drive."""

    @property
    def chunk_tokens(self) -> int:
        return self.shapes[0].block_tokens * self.shapes[0].blocks_per_chunk

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: KVCacheConfig, config: SariaConfig) -> Sizing:
        """Raises ConfigError or LayoutError when a tier cannot be built."""
        layout.refuse_parallelism(vllm_config)
        parallel = vllm_config.parallel_config
        engines, ranks = max(1, getattr(parallel, "data_parallel_size_local", 1)), parallel.world_size
        groups = layout.served_groups(kv_cache_config)
        shapes = layout.group_shapes(kv_cache_config, groups, config.chunk_tokens)
        records = [shape.record_bytes for shape in shapes]
        region = config.dram_capacity // engines // ranks
        if config.chunk_tokens and max(records) > region:
            block_tokens, block_bytes = shapes[0].block_tokens, sum(shape.block_bytes for shape in shapes)
            most = max(1, region // (2 * SLOTS_MIN * block_bytes)) * block_tokens
            raise ConfigError(
                f"chunk_tokens: {config.chunk_tokens} tokens are more than a rank's share of dram_capacity: "
                f'{format_bytes(region)}; accepted: "auto" or at most {most}'
            )
        slab_bytes = choose_slab_bytes(records, region) if max(records) <= region else 0
        slabs = region // slab_bytes if slab_bytes else 0
        if not slabs or min(slabs * (slab_bytes // size) for size in records) < SLOTS_MIN * len(shapes):
            need = SLOTS_MIN * sum(records) * 2 * engines * ranks
            raise ConfigError(
                f"dram_capacity: {format_bytes(config.dram_capacity)} holds fewer than {SLOTS_MIN} chunks of "
                f"{format_bytes(max(records))} per rank; accepted: at least {format_bytes(need)}"
            )
        segment_bytes = segments_max = 0
        if config.ssd_paths:
            budget = config.ssd_capacity // engines // ranks // len(config.ssd_paths)
            segment_bytes, segments_max = choose_segments(budget, records)
            if not segment_bytes:
                need = 4 * len(records) * (max(records) + 65536) * engines * ranks * len(config.ssd_paths)
                raise ConfigError(
                    f"ssd_capacity: {format_bytes(config.ssd_capacity)} is too small for chunks of "
                    f"{format_bytes(max(records))}; accepted: at least {format_bytes(need)}"
                )
        dram_bytes = config.dram_capacity // engines
        return cls(groups, shapes, engines, ranks, dram_bytes, slab_bytes, slabs, segment_bytes, segments_max)
