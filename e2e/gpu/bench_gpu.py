"""Rates of the ways from a drive to a GPU, in one interleaved run: `python e2e/gpu/bench_gpu.py --path D`.

NIXL's GDS_MT and GDS and KvikIO straight into memory of the GPU, io_uring into pinned memory with a copy behind each
read; and the checksum on the device over a plain copy there. Ways that do not work here are named and left out. Exit
status: 0 measured, 1 no GPU here.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from saria_vllm.engine.checksum import checksums_torch
from saria_vllm.engine.drive_rates import ScratchFile, scratch_file
from saria_vllm.engine.io_uring import UringEngine
from saria_vllm.engine.kvikio import KvikioEngine
from saria_vllm.engine.nixl import NixlEngine
from saria_vllm.engine.ssd_engine import SsdEngine
from saria_vllm.errors import ConfigError

MIB = 1 << 20


class Way:
    """One engine and its ring; with `pinned` a host ring, and a copy to the device behind each read."""

    def __init__(self, torch: Any, name: str, engine: SsdEngine, block_bytes: int, pinned: bool) -> None:
        self.name, self._torch, self._engine = name, torch, engine
        self._ring = torch.zeros(engine.depth, block_bytes, dtype=torch.uint8, device="cuda")
        self._host = torch.zeros(engine.depth, block_bytes, dtype=torch.uint8, pin_memory=True) if pinned else None
        target = self._ring if self._host is None else self._host
        engine.register_memory(target.data_ptr(), target.numel(), -1 if pinned else torch.cuda.current_device())
        self._addresses = [row.data_ptr() for row in target]

    def mb_s(self, file: ScratchFile, block_bytes: int, seconds: float, rng: random.Random) -> float:
        """Random reads for about so long, until the last is on the device."""
        began, moved, free = time.perf_counter(), 0, list(range(self._engine.depth))
        while True:
            while free and time.perf_counter() - began < seconds:
                buffer, position = free.pop(), rng.randrange(file.nbytes // block_bytes)
                self._engine.submit_read(
                    file.fd, self._addresses[buffer], block_bytes, position * block_bytes, buffer
                )  # fmt: skip
            if not self._engine.in_flight:
                break
            ended = self._engine.reap(1.0)
            for buffer, result in ended:
                assert result == block_bytes, f"{self.name}: {result}"
                if self._host is not None:
                    self._ring[buffer].copy_(self._host[buffer], non_blocking=True)
            if self._host is not None and ended:
                self._torch.cuda.current_stream().synchronize()
            moved += len(ended) * block_bytes
            free += [buffer for buffer, _ in ended]
        return moved / (time.perf_counter() - began) / 1e6

    def close(self) -> None:
        self._engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="a directory on the drive")
    parser.add_argument("--block-mib", type=int, default=1)
    parser.add_argument("--queue-depth", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("no GPU here: torch is not installed", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("no GPU here: torch finds no CUDA device", file=sys.stderr)
        return 1
    block_bytes = arguments.block_mib * MIB
    with scratch_file(arguments.path, 1 << 30) as file:
        fill(file)
        ways = open_ways(torch, arguments.queue_depth, block_bytes)
        rates: dict[str, list[float]] = {way.name: [] for way in ways}
        rng = random.Random(0)
        for turn in range(arguments.rounds):
            for step in range(len(ways)):
                way = ways[(turn + step) % len(ways)]
                rates[way.name].append(way.mb_s(file, block_bytes, arguments.seconds, rng))
        for way in ways:
            way.close()
    for name, values in rates.items():
        spread = f"{min(values):.0f} to {max(values):.0f}"
        print(f"{name:12} random reads, median {statistics.median(values):.0f} MB/s ({spread})")
    print_checksum(torch, block_bytes, arguments.rounds)
    return 0


def fill(file: ScratchFile) -> None:
    """Write the file once, so that reads meet the drive."""
    block = memoryview(bytearray(os.urandom(MIB)))
    path = f"/proc/self/fd/{file.fd}"
    with open(path, "r+b", buffering=0) as writer:
        for _ in range(file.nbytes // MIB):
            writer.write(block)
        os.fsync(writer.fileno())


def open_ways(torch: Any, depth: int, block_bytes: int) -> list[Way]:
    makers: list[tuple[str, Callable[[], SsdEngine], bool]] = [
        ("nixl GDS_MT", lambda: NixlEngine(depth, ("GDS_MT",)), False),
        ("nixl GDS", lambda: NixlEngine(depth, ("GDS",)), False),
        ("kvikio", lambda: KvikioEngine(depth), False),
        ("io_uring", lambda: UringEngine(depth), True),
    ]
    ways = []
    for name, make, pinned in makers:
        try:
            ways.append(Way(torch, name, make(), block_bytes, pinned))
        except (ConfigError, OSError) as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
    return ways


def print_checksum(torch: Any, block_bytes: int, rounds: int) -> None:
    """Checksum of 64 records on the device, and a copy of them there, in turn."""
    records = torch.randint(0, 256, (64, block_bytes), dtype=torch.uint8, device="cuda")
    other, seeds = torch.empty_like(records), list(range(64))
    seconds: dict[str, list[float]] = {"checksum on the device": [], "copy on the device": []}
    calls: tuple[Callable[[], object], ...] = (lambda: checksums_torch(records, seeds), lambda: other.copy_(records))
    for turn in range(rounds + 1):
        for name, call in zip(seconds, calls, strict=True):
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    for name, values in seconds.items():
        print(f"{name}: median {records.numel() / statistics.median(values) / 1e9:.1f} GB/s")


if __name__ == "__main__":
    sys.exit(main())
