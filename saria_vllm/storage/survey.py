"""What lies under an SSD path, for people: namespaces, engines, segments, chunks, last use. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saria_vllm.errors import StorageError
from saria_vllm.storage.checking import read_parts, record_bytes
from saria_vllm.storage.directories import (
    ENGINE_NAME,
    GENERATION_NAME,
    LEASE_NAME,
    NAMESPACE_NAME,
    RANK_NAME,
    TOP_NAME,
    is_leased,
    lease_holders,
    names_in,
    open_path,
    read_small,
)
from saria_vllm.storage.format import FORMAT_VERSION
from saria_vllm.storage.namespace import parse_generation, store_id
from saria_vllm.storage.reclaim import usage
from saria_vllm.storage.recovery import segment_of_name
from saria_vllm.storage.segment_check import Expected, look


@dataclass(slots=True)
class SegmentUse:
    """A segment's bytes on disk, when it was last written and, where that is known, read (epoch seconds, else 0)."""

    nbytes: int
    modified: float
    read: float


@dataclass(slots=True)
class EngineView:
    """One engine directory."""

    index: int
    in_use: bool
    pids: list[int]
    """Who holds the lease; empty where the kernel does not say."""
    claimed: float
    """When an engine took it last, epoch seconds; 0 when that is not known."""
    generation: int | None = None
    """None when the file is missing or damaged."""
    process_only: bool = False
    ranks: int = 0
    open_segments: int = 0
    chunks: int = 0
    """Records that a reader would use, of all ranks."""
    segments: list[SegmentUse] = field(default_factory=list)
    unreadable: int = 0
    """Files that no reader would accept; `saria fsck` names them."""

    @property
    def nbytes(self) -> int:
        """On disk, of segments and their journals."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def last_used(self) -> float:
        """The latest of claims, writes and, where they are known, reads; epoch seconds."""
        times = [time for segment in self.segments for time in (segment.modified, segment.read)]
        return max([self.claimed, *times])


@dataclass(slots=True)
class NamespaceView:
    """One namespace."""

    name: str
    parts: dict[str, Any] | None
    """What the fingerprint was made of; None when that is missing or damaged."""
    engines: list[EngineView]
    nbytes: int
    """On disk, of all below it."""
    modified: float
    """Of the last change to a file below it, epoch seconds; 0 when there is none."""

    @property
    def in_use(self) -> bool:
        """Whether a living engine holds the lease of one of its directories."""
        return any(engine.in_use for engine in self.engines)

    @property
    def last_used(self) -> float:
        """Epoch seconds."""
        return max([self.modified, *(engine.last_used for engine in self.engines)])


def namespaces_in(path: str) -> list[str]:
    """Names of the namespaces under an SSD path, sorted.

    Raises:
        OSError, StorageError: as from `open_path`.
    """
    with open_path(path, (TOP_NAME,)) as fd:
        return names_in(fd, NAMESPACE_NAME)


def view_namespace(path: str, namespace: str, reads_known: bool, proc: str = "/proc") -> NamespaceView:
    """One namespace, with the structure of every segment.

    Args:
        reads_known: whether the file system keeps access times; without, no read is known.

    Raises:
        OSError, StorageError: it went, or is not ours to read.
    """
    with open_path(path, (TOP_NAME, namespace)) as fd:
        parts = read_parts(fd, namespace)
        indexes = sorted(int(name[1:]) for name in names_in(fd, ENGINE_NAME))
    engines = []
    for index in indexes:
        try:
            engines.append(_view_engine(path, namespace, index, parts, reads_known, proc))
        except (FileNotFoundError, StorageError):
            pass  # it went; or it is no engine directory, or not ours: saria fsck says so
    modified, nbytes = usage(path, (TOP_NAME, namespace))
    return NamespaceView(namespace, parts, engines, nbytes, modified)


def _view_engine(
    path: str, namespace: str, index: int, parts: Mapping[str, Any] | None, reads_known: bool, proc: str
) -> EngineView:
    names = (TOP_NAME, namespace, f"e{index}")
    with open_path(path, names) as fd:
        in_use = is_leased(fd)
        view = EngineView(index, in_use, [], 0.0)
        try:
            view.claimed = os.stat(LEASE_NAME, dir_fd=fd, follow_symlinks=False).st_mtime
        except OSError:
            pass  # no lease
        view.pids = _holders(fd, proc) if in_use else []
        generation = parse_generation(read_small(fd, GENERATION_NAME) or b"")
        if generation is not None:
            view.generation, view.process_only = generation
        ranks = names_in(fd, RANK_NAME)
        owner = os.fstat(fd).st_uid
    view.ranks = len(ranks)
    if parts is not None and parts.get("format", FORMAT_VERSION) != FORMAT_VERSION:
        return view
    for name in ranks:
        rank = int(name[1:])
        store = store_id(namespace, index, rank)
        expected = Expected(store, rank, record_bytes(parts), view.generation, owner)
        with open_path(path, (*names, name)) as fd:
            _view_rank(fd, expected, view, reads_known)
    return view


def _view_rank(fd: int, expected: Expected, view: EngineView, reads_known: bool) -> None:
    with os.scandir(fd) as listing:
        found = [known for item in listing if (known := segment_of_name(item.name)) is not None]
    for segment in sorted(number for number, kind in found if kind == "data"):
        seen = look(fd, segment, expected)
        if seen is None:
            continue
        view.segments.append(SegmentUse(seen.nbytes, seen.modified, seen.read if reads_known else 0.0))
        view.chunks += len(seen.live)
        view.unreadable += seen.header is None
        view.open_segments += seen.header is not None and not seen.sealed


def leases_in(path: str, proc: str = "/proc") -> list[tuple[str, str, list[int]]]:
    """(namespace, engine, process ids) of every lease that is held under an SSD path; none where nothing is there.

    Raises:
        OSError: as from open(2), but ENOENT.
    """
    held = []
    try:
        namespaces = namespaces_in(path)
    except FileNotFoundError:
        return []
    for namespace in namespaces:
        try:
            with open_path(path, (TOP_NAME, namespace)) as fd:
                engines = names_in(fd, ENGINE_NAME)
        except (FileNotFoundError, StorageError):
            continue  # it went, or is not one
        for engine in engines:
            try:
                with open_path(path, (TOP_NAME, namespace, engine)) as fd:
                    if is_leased(fd):
                        held.append((namespace, engine, _holders(fd, proc)))
            except (FileNotFoundError, StorageError):
                continue
    return held


def _holders(engine_fd: int, proc: str) -> list[int]:
    """`lease_holders`, none where the kernel does not list locks either."""
    try:
        return lease_holders(engine_fd, proc)
    except OSError:
        return []
