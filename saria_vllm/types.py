"""Words of the project as types (see docs/glossary.md). Imports nothing but msgspec and numpy.

These travel from the scheduler process to the workers and back, so they hold numbers, bytes, tuples and arrays only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

RECORD_ALIGN_BYTES = 4096
"""Slots and records are padded to this, so that O_DIRECT works from the DRAM pool itself."""

KEY_BYTES_MAX = 32
"""vLLM's block hashes are at most sha256 wide."""

_RECORD_BITS = 25
"""A segment has fewer records: it is no larger than 1 GiB, or two records."""

_MIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93], np.uint64)
"""Any odd numbers."""

NULL_BLOCK = -1
"""In a chunk's block list: leave this block alone (HBM has it already, or the hit ends before it)."""


def align_up(nbytes: int, alignment: int = RECORD_ALIGN_BYTES) -> int:
    """Smallest multiple of `alignment` that is at least `nbytes`."""
    return -(-nbytes // alignment) * alignment


class Extent(NamedTuple):
    """Where a chunk lies on SSD. The same on all ranks, though each rank's record has its own size."""

    drive: int
    """Index into `ssd_paths`."""
    segment: int
    """Segment id, never used twice within one engine directory."""
    record: int
    """Record number within the segment."""


class Slot(NamedTuple):
    """A cell of the DRAM pool. The address is slab * slab_bytes + cell * record_bytes of the slab's group."""

    slab: int
    cell: int


class GroupShape(msgspec.Struct, frozen=True):
    """Sizes of one KV cache group on one rank."""

    group: int
    """vLLM's KV cache group id."""
    block_tokens: int
    blocks_per_chunk: int
    block_bytes: int
    """Bytes of one block over all layers of the group on this rank."""

    @property
    def chunk_bytes(self) -> int:
        """Payload bytes of a chunk on one rank."""
        return self.block_bytes * self.blocks_per_chunk

    @property
    def record_bytes(self) -> int:
        """Chunk bytes padded to `RECORD_ALIGN_BYTES`: what a slot or an SSD record occupies."""
        return align_up(self.chunk_bytes)


class StoreItem(NamedTuple):
    """HBM -> DRAM copy of one chunk."""

    group: int
    slot: Slot
    blocks: tuple[int, ...]
    """One block id per block of the chunk."""


class StorePart(NamedTuple):
    """The chunks of one group in a store job, by column."""

    group: int
    slots: Ints
    """(chunks, 2): slab, cell."""
    blocks: Ints
    """(chunks, blocks_per_chunk): block ids."""


class StoreJob(NamedTuple):
    """One request's chunks to store or to promote. All or nothing: a job whose copy failed stored nothing."""

    job_id: int
    parts: tuple[StorePart, ...]

    @property
    def chunks(self) -> int:
        return sum(len(part.slots) for part in self.parts)

    @property
    def items(self) -> tuple[StoreItem, ...]:
        """Chunk by chunk, in the order that positions in results count."""
        return tuple(
            StoreItem(part.group, Slot(*slot), tuple(blocks))
            for part in self.parts
            for slot, blocks in zip(part.slots.tolist(), part.blocks.tolist(), strict=True)
        )


class LoadItem(NamedTuple):
    """Tier -> HBM copy of one chunk. Exactly one of `slot` and `extent` is set."""

    group: int
    blocks: tuple[int, ...]
    """One block id per block of the chunk, `NULL_BLOCK` where nothing is to be written."""
    slot: Slot | None
    extent: Extent | None
    key: bytes


class LoadPart(NamedTuple):
    """The chunks of one group in a load job, by column."""

    group: int
    keys: tuple[bytes, ...]
    blocks: Ints
    """(chunks, blocks_per_chunk): block ids, `NULL_BLOCK` where nothing is to be written."""
    slots: Ints
    """(chunks, 2): slab, cell; -1 where the chunk comes from SSD."""
    extents: Ints
    """(chunks, 3): drive, segment, record; -1 where the chunk comes from DRAM."""

    def item(self, position: int) -> LoadItem:
        drive, segment, record = self.extents[position].tolist()
        slab, cell = self.slots[position].tolist()
        return LoadItem(
            self.group,
            tuple(self.blocks[position].tolist()),
            Slot(slab, cell) if slab >= 0 else None,
            Extent(drive, segment, record) if drive >= 0 else None,
            self.keys[position],
        )


class LoadJob(NamedTuple):
    """One request's reload. Ends exactly once: loaded, or failed with the positions of the bad items."""

    job_id: int
    request_id: str
    parts: tuple[LoadPart, ...]

    @property
    def chunks(self) -> int:
        return sum(len(part.keys) for part in self.parts)

    def item(self, position: int) -> LoadItem:
        """The chunk at a position as results count them: part after part."""
        for part in self.parts:
            if position < len(part.keys):
                return part.item(position)
            position -= len(part.keys)
        raise IndexError(position)

    @property
    def items(self) -> tuple[LoadItem, ...]:
        return tuple(self.item(position) for position in range(self.chunks))


class PersistItem(NamedTuple):
    """DRAM -> SSD write of one chunk."""

    group: int
    slot: Slot
    extent: Extent
    key: bytes
    parent: bytes
    """Key of the chunk before it in the prefix, empty for a first chunk."""


class PersistJob(NamedTuple):
    """Chunks of one group to write to one drive, by column. Ends once, with the positions that failed."""

    job_id: int
    group: int
    keys: tuple[bytes, ...]
    parents: tuple[bytes, ...]
    slots: Ints
    """(chunks, 2): slab, cell."""
    extents: Ints
    """(chunks, 3): drive, segment, record."""

    @property
    def chunks(self) -> int:
        return len(self.keys)

    @property
    def drive(self) -> int:
        return int(self.extents[0, 0])

    @property
    def items(self) -> tuple[PersistItem, ...]:
        """Chunk by chunk, in the order that positions in results count."""
        return tuple(
            PersistItem(self.group, Slot(*slot), Extent(*extent), key, parent)
            for key, parent, slot, extent in zip(
                self.keys, self.parents, self.slots.tolist(), self.extents.tolist(), strict=True
            )
        )


class JobResult(msgspec.Struct, frozen=True, array_like=True):
    """The end of a store, promote, load or persist job on one rank."""

    job_id: int
    failed: tuple[int, ...] = ()
    """Positions of failed items in the job; empty when all went well."""
    reason: str = ""
    """Why the first of them failed: a label of `metrics.ERROR_REASONS`, or of `UNPROMOTED_REASONS`."""


class Moved(NamedTuple):
    """What one rank moved from and to one drive since it last said, and for how long it waited for that."""

    drive: int
    read_bytes: int
    read_s: float
    written_bytes: int
    write_s: float


class Prefill(NamedTuple):
    """What of a step is prefill."""

    tokens: int
    attended: int
    """Sum over these tokens of the tokens before each."""


class FoundChunk(NamedTuple):
    """A chunk found on SSD when an engine directory was reopened."""

    group: int
    key: bytes
    parent: bytes
    extent: Extent


class FoundChunks(msgspec.Struct, frozen=True, eq=False):
    """Chunks found on SSD, by column. A rank reports each once, in the order of segment, drive, record."""

    groups: Ints
    keys: npt.NDArray[np.uint8]
    """(chunks, KEY_BYTES_MAX): padded with zeros."""
    key_bytes: npt.NDArray[np.uint8]
    parents: npt.NDArray[np.uint8]
    """(chunks, KEY_BYTES_MAX): padded with zeros."""
    parent_bytes: npt.NDArray[np.uint8]
    extents: Ints
    """(chunks, 3): drive, segment, record."""

    @classmethod
    def of(cls, chunks: Sequence[FoundChunk]) -> FoundChunks:
        groups, keys, parents, extents = zip(*chunks, strict=True) if chunks else ((), (), (), ())
        columns = [_padded(texts) for texts in (keys, parents)]
        places = np.array(extents, np.int32).reshape(-1, 3)
        return cls(np.array(groups, np.int32), *columns[0], *columns[1], places)

    def __len__(self) -> int:
        return len(self.groups)

    def take(self, rows: npt.NDArray[np.bool_ | np.integer]) -> FoundChunks:
        """Those at some positions, or where a mask says so."""
        if rows.dtype == np.bool_ and rows.all():
            return self
        return FoundChunks(*(getattr(self, name)[rows] for name in self.__struct_fields__))

    def twins(self, worth: npt.NDArray[np.number]) -> npt.NDArray[np.int64]:
        """Positions of chunks that are at another position, too, where they are worth more; of equals the first stays.

        One number stands for a chunk and sorting brings equal ones together; only the keys of these are compared.
        """
        numbers = self.keys.view(np.uint64) @ _MIX + self.groups.astype(np.uint64)
        if (np.diff(np.sort(numbers)) != 0).all():
            return np.empty(0, np.int64)
        order = np.argsort(numbers, kind="stable")
        equal = np.diff(numbers[order]) == 0
        suspects = order[np.append(equal, False) | np.append(False, equal)]
        best: dict[tuple[int, bytes], int] = {}
        worse = []
        for at, key in zip(suspects.tolist(), self.take(suspects).key_list(), strict=True):
            other = best.setdefault((int(self.groups[at]), key), at)
            if worth[at] > worth[other]:
                best[int(self.groups[at]), key] = at
            if other != at:
                worse.append(other if worth[at] > worth[other] else at)
        return np.array(worse, np.int64)

    def also_in(self, other: FoundChunks) -> FoundChunks:
        """Those of which `other` says the same. Both are in order."""
        mine, theirs = self._places(), other._places()
        found, beside = self.take(_is_in(mine, theirs)), other.take(_is_in(theirs, mine))
        same = _same(found.keys, beside.keys) & _same(found.parents, beside.parents) & (found.groups == beside.groups)
        same &= (found.key_bytes == beside.key_bytes) & (found.parent_bytes == beside.parent_bytes)
        return found.take(same)

    def segments(self) -> set[tuple[int, int]]:
        """(drive, segment) of all of them."""
        places = self._places() >> _RECORD_BITS
        last = np.append(places[1:] != places[:-1], True)[: len(places)]
        return {(place & 0x7F, place >> 7) for place in places[last].tolist()}

    def _places(self) -> npt.NDArray[np.int64]:
        """Their extents as numbers of the same order: 31 bits of segment, 7 of drive, 25 of record."""
        drive, segment, record = self.extents.astype(np.int64).T
        places: npt.NDArray[np.int64] = (segment << 7 | drive) << _RECORD_BITS | record
        return places

    def key_list(self) -> list[bytes]:
        return _texts(self.keys, self.key_bytes)

    def parent_list(self, keys: Sequence[bytes]) -> list[bytes]:
        """Their parents: where most chunks lie before theirs, as eviction writes them to one drive, the same objects as
        `keys`, which are theirs."""
        before = _same(self.parents[:-1], self.keys[1:]) & (self.parent_bytes[:-1] == self.key_bytes[1:])
        before = np.append(before, False)[: len(keys)]
        if np.count_nonzero(before) <= len(keys) // 2:
            return _texts(self.parents, self.parent_bytes)
        parents, others = [*keys[1:], b""], (~before).nonzero()[0]
        for at, parent in zip(others.tolist(), _texts(self.parents[others], self.parent_bytes[others]), strict=True):
            parents[at] = parent
        return parents

    @property
    def items(self) -> tuple[FoundChunk, ...]:
        """Chunk by chunk."""
        keys = self.key_list()
        columns = zip(self.groups.tolist(), keys, self.parent_list(keys), self.extents.tolist(), strict=True)
        return tuple(FoundChunk(group, key, parent, Extent(*extent)) for group, key, parent, extent in columns)


def _padded(texts: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Keys padded with zeros, and their lengths."""
    padded = b"".join(text.ljust(KEY_BYTES_MAX, b"\0") for text in texts)
    return np.frombuffer(padded, np.uint8).reshape(-1, KEY_BYTES_MAX), np.array(list(map(len, texts)), np.uint8)


def _is_in(some: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of some ascending numbers are among other ascending numbers."""
    at = np.searchsorted(others, some)
    found: npt.NDArray[np.bool_] = at < len(others)
    found[found] = others[at[found]] == some[found]
    return found


def _same(some: npt.NDArray[np.uint8], others: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Which padded keys are equal, in place."""
    words: npt.NDArray[np.bool_] = some.view(np.uint64) == others.view(np.uint64)
    return words[:, 0] & words[:, 1] & words[:, 2] & words[:, 3]


def _texts(padded: npt.NDArray[np.uint8], lengths: npt.NDArray[np.uint8]) -> list[bytes]:
    """The inverse of `_padded`. Quick where most are as long as the longest."""
    longest = int(lengths.max(initial=1))
    texts: list[bytes] = np.ascontiguousarray(padded[:, :longest]).view(f"V{longest}").ravel().tolist()
    for at in (lengths != longest).nonzero()[0].tolist():
        texts[at] = texts[at][: lengths[at]]
    return texts


class OpenSsd(msgspec.Struct, frozen=True):
    """Scheduler -> worker: open the SSD tier in these engine directories."""

    directories: tuple[str, ...]
    """One engine directory per drive, `<ssd_path>/<namespace>/e<k>`, created and leased by the scheduler."""
    generation: int
    """Records of another generation are never used again."""
    segment_bytes: int
    """Upper bound of one segment's record area on one rank."""
    segments_max: int
    """Hard cap of segments on each drive, over all groups."""


class OpenedSsd(msgspec.Struct, frozen=True):
    """Worker -> scheduler: one rank's result of opening the SSD tier."""

    found: FoundChunks = FoundChunks.of([])
    next_segment: int = 0
    drives: tuple[bool, ...] = ()
    """Which drives can be used."""
    note: str = ""
    """Which engine was chosen, and why."""
    problem: str = ""
    """Why the tier is off, when it is."""
    read_bytes_s: tuple[float, ...] = ()
    """By drive: how fast this rank reads from it, 0 where that was not measured."""
