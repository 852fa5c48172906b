"""Copies between records in host memory and a KV cache that lies on a device, through torch.

The same calls as `_native.PageMap`, for a GPU. Records cross the link as a whole, in as few copies as their places
allow, into a staging tensor; one indexed copy per run of like layers then spreads them over the pages, instead of a
copy per page. Runs on tensors of the CPU, too, which is how its logic is tested. **Not proved on a GPU yet.**
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from saria_vllm import _native
from saria_vllm.types import align_up

_WORD_BYTES = 8

_cuda: Any = torch.cuda
"""Half of it has no types."""


class Layer(NamedTuple):
    """Where the pages of one layer are: page b is `page_bytes` at `offset + b * stride` of the tensor's storage."""

    tensor: torch.Tensor
    offset: int
    stride: int
    page_bytes: int


class DevicePages:
    """See the module's text. Each thread that copies has a stream of its own and waits for what it queued.

    Args:
        layers: of one KV cache group, on one device.

    Raises:
        ValueError: no layer, or no block.
    """

    def __init__(self, layers: Sequence[Layer], num_blocks: int) -> None:
        if not layers or num_blocks < 1 or any(layer.page_bytes < 1 for layer in layers):
            raise ValueError(f"{len(layers)} layers, {num_blocks} blocks: nothing to copy")
        self.block_bytes = sum(layer.page_bytes for layer in layers)
        self._blocks, self._device = num_blocks, layers[0].tensor.device
        numbers = [number for layer in layers for number in layer[1:]]
        whole_words = not any(number % _WORD_BYTES for number in numbers)
        self._word = torch.int64 if whole_words else torch.uint8
        self._word_bytes = _WORD_BYTES if whole_words else 1
        self._runs = [self._view(run) for run in _runs(layers)]
        self._local = threading.local()
        self._behind: dict[bool, Any] = {}

    @property
    def on_gpu(self) -> bool:
        """Whether copies are queued on a stream."""
        return self._device.type == "cuda"

    def _view(self, run: Sequence[Layer]) -> torch.Tensor:
        """Pages of like layers that are evenly apart: (layers, blocks, words)."""
        first, size = run[0], self._word_bytes
        storage = first.tensor.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        memory = memory[: storage.nbytes() // size * size].view(self._word)
        apart = run[1].offset - first.offset if len(run) > 1 else 0
        shape = len(run), self._blocks, first.page_bytes // size
        return memory.as_strided(shape, (apart // size, first.stride // size, 1), first.offset // size)

    def fence(self, stores: bool) -> None:
        """Copies of this kind that begin from now on come behind what the caller's stream has queued: blocks that a
        load writes may still be read by an earlier step, those that a store reads still be written by this one."""
        if self._device.type == "cuda":
            event = _cuda.Event()
            event.record(_cuda.current_stream(self._device))
            self._behind[stores] = event

    def gather(self, dst: int, blocks: Sequence[int]) -> None:
        """See `_native.PageMap`."""
        self.gather_many([dst], [blocks])

    def gather_many(self, dsts: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """See `_native.PageMap`."""
        ids, payload = self._checked(dsts, blocks, 0), len(blocks[0]) * self.block_bytes
        with self._queue(stores=True):
            where = ids.to(self._device)
            parts = [run.index_select(1, where).transpose(0, 1).reshape(len(ids), -1) for run in self._runs]
            rows = torch.cat(parts, dim=1).view(len(dsts), -1).view(torch.uint8)
            for first, count in _neighbours(dsts, payload):
                host = _host_bytes(dsts[first], count * payload)
                host.copy_(rows[first : first + count].reshape(-1), non_blocking=True)

    def scatter(self, src: int, blocks: Sequence[int]) -> None:
        """See `_native.PageMap`."""
        self.scatter_many([src], [blocks])

    def scatter_many(self, srcs: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """See `_native.PageMap`."""
        ids, payload = self._checked(srcs, blocks, None), len(blocks[0]) * self.block_bytes
        record_bytes = align_up(payload)
        with self._queue(stores=False):
            rows = torch.empty(len(srcs), record_bytes, dtype=torch.uint8, device=self._device)
            for first, count in _neighbours(srcs, record_bytes):
                nbytes = (count - 1) * record_bytes + payload
                rows.view(-1)[first * record_bytes :][:nbytes].copy_(_host_bytes(srcs[first], nbytes), True)
            self._spread(rows[:, :payload], ids)

    def scatter_verify(self, src: int, nbytes: int, seed: int, blocks: Sequence[int]) -> int:
        """See `_native.PageMap`. The sum is taken on the host, from where the bytes are copied."""
        if nbytes % 4096 or nbytes < len(blocks) * self.block_bytes:
            raise ValueError(f"{nbytes} bytes: no multiple of 4096, or less than the payload")
        self.scatter_many([src], [blocks])
        return _native.checksum(src, nbytes, seed)

    def _spread(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Write records (records, payload bytes) into the pages of these blocks, but for negative ones."""
        pages = rows.reshape(len(ids), self.block_bytes).view(self._word)
        if (keep := ids >= 0).all():
            where = ids.to(self._device)
        else:
            kept = keep.nonzero()[:, 0]
            where, pages = ids[kept].to(self._device), pages.index_select(0, kept.to(self._device))
        at = 0
        for run in self._runs:
            layers, _, words = run.shape
            run.index_copy_(1, where, pages[:, at : at + layers * words].reshape(-1, layers, words).transpose(0, 1))
            at += layers * words

    def _checked(self, places: Sequence[int], blocks: Sequence[Sequence[int]], least: int | None) -> torch.Tensor:
        """Block ids of all records, one after the other."""
        if not places or len(places) != len(blocks):
            raise ValueError("one block list per record is needed")
        if len({len(some) for some in blocks}) != 1 or not blocks[0]:
            raise ValueError("records of one size are needed")
        ids = [block for some in blocks for block in some]
        for block in ids:
            if block >= self._blocks or (least is not None and block < least):
                raise IndexError(f"block {block} is outside 0..{self._blocks - 1}")
        return torch.tensor(ids, dtype=torch.int64)

    @contextmanager
    def _queue(self, stores: bool) -> Iterator[None]:
        """This thread's stream, behind the last fence; what was queued has ended when it is left."""
        if self._device.type != "cuda":
            yield
            return
        stream = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = _cuda.Stream(self._device)
        if (event := self._behind.get(stores)) is not None:
            stream.wait_event(event)
        with _cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()


def round_trip(pages: DevicePages, blocks: Sequence[int], addr: int) -> bool:
    """Whether a record written to these blocks comes back as it was. Their bytes are the same afterwards; the memory of
    three records at `addr` is not."""
    nbytes = align_up(pages.block_bytes * len(blocks))
    before, out, back = (_host_bytes(addr + number * nbytes, pages.block_bytes * len(blocks)) for number in range(3))
    pages.gather(addr, blocks)
    try:
        for seed in (1, 2):  # Nothing is there by chance.
            out.copy_(torch.randint(0, 256, out.shape, generator=torch.Generator().manual_seed(seed)))
            pages.scatter(addr + nbytes, blocks)
            pages.gather(addr + 2 * nbytes, blocks)
            if not torch.equal(out, back):
                return False
    finally:
        pages.scatter(addr, blocks)
    pages.gather(addr + nbytes, blocks)
    return torch.equal(before, out)


def pin(addr: int, nbytes: int) -> bool:
    """Have CUDA lock host memory for the rest of the process, so that copies need no staging of the driver's. False
    where it refuses: copies work as well, and slower."""
    return int(_cuda.cudart().cudaHostRegister(addr, nbytes, 0)) == 0


def _runs(layers: Sequence[Layer]) -> Iterator[list[Layer]]:
    """Consecutive layers of one storage that differ in their offset only, and by the same each."""
    run: list[Layer] = []
    for layer in layers:
        if run and not _goes_on(run, layer):
            yield run
            run = []
        run.append(layer)
    yield run


def _goes_on(run: Sequence[Layer], layer: Layer) -> bool:
    last = run[-1]
    alike = (last.stride, last.page_bytes) == (layer.stride, layer.page_bytes)
    same = last.tensor.untyped_storage().data_ptr() == layer.tensor.untyped_storage().data_ptr()
    apart = layer.offset - last.offset
    return alike and same and apart > 0 and (len(run) < 2 or apart == last.offset - run[-2].offset)


def _neighbours(places: Sequence[int], nbytes: int) -> Iterator[tuple[int, int]]:
    """Runs of records that follow each other in host memory: position of the first, and how many."""
    first = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + nbytes:
            yield first, at - first
            first = at


def _host_bytes(addr: int, nbytes: int) -> torch.Tensor:
    """Memory of the host that the caller keeps valid."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(addr), dtype=torch.uint8)
