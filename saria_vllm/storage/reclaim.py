"""Who may occupy how much: one capacity for all engines on our paths, and what nobody leases removed when over it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from saria_vllm.errors import DriveError, StorageError
from saria_vllm.storage.directories import (
    ENGINE_NAME,
    GENERATION_NAME,
    LEASE_NAME,
    NAMESPACE_NAME,
    NEW,
    PARTS_NAME,
    RANK_NAME,
    TOP_NAME,
    is_leased,
    names_in,
    open_directory,
    open_path,
    read_small,
    remove,
    sharing_lock,
    try_lease,
)
from saria_vllm.storage.drives import PROBE_NAME
from saria_vllm.storage.namespace import EngineDirectory, granted, parse_generation
from saria_vllm.storage.recovery import segment_of_name

_BLOCK_BYTES = 512

_DEPTH_MAX = 16
"""Directories within each other that are looked into; our own are four."""


class _Other(NamedTuple):
    """An engine directory that is not ours."""

    modified: float
    """Seconds since the epoch of the last change to a file in it."""
    nbytes: int
    path: str
    """The ssd path."""
    names: tuple[str, ...]


class Claimed(NamedTuple):
    """What `claim_with_room` came to."""

    directory: EngineDirectory | None
    """None when no drive can be used."""
    left_out: list[str]
    """A message for each path that `directory` is not on."""
    removed: list[str]
    """Engine directories that went because their drive was full."""


def claim_with_room(ssd_paths: Sequence[str], namespace: str, parts: Mapping[str, Any], preferred: int) -> Claimed:
    """`EngineDirectory.claim` on those of the paths whose drives let it.

    A drive that is too full to claim a directory loses others' unleased ones, one by one: those that were reset in
    their process first, since a claim drops what they hold, then the least recently modified. Of `namespace` only the
    former go. Nothing goes before all that is wrong with the other paths was looked for.

    Raises:
        StorageError: as from `EngineDirectory.claim`, but for what a drive does.
    """
    removed: list[str] = []
    while True:
        directory, faults = _claim_good(ssd_paths, namespace, parts, preferred)
        freed = [gone for fault in faults if fault.full and (gone := _free_some(fault.path, namespace))]
        if not freed:
            return Claimed(directory, [str(fault) for fault in faults], removed)
        removed += freed
        if directory is not None:
            directory.release()


def _claim_good(
    ssd_paths: Sequence[str], namespace: str, parts: Mapping[str, Any], preferred: int
) -> tuple[EngineDirectory | None, list[DriveError]]:
    paths = list(ssd_paths)
    faults: list[DriveError] = []
    while paths:
        try:
            return EngineDirectory.claim(paths, namespace, parts, preferred), faults
        except DriveError as fault:
            faults.append(fault)
            paths.remove(fault.path)
    return None, faults


def _free_some(path: str, namespace: str) -> str | None:
    """Remove the engine directory under a path that is missed least; None when none can be removed."""
    others = [(not _process_only(other), other) for other in _survey(path)[1]]
    for used, other in sorted(others):
        if not (used and namespace in other.names) and _remove(other):
            return os.path.join(path, *other.names)
    return None


def _process_only(other: _Other) -> bool:
    try:
        with open_path(other.path, other.names) as fd:
            generation = parse_generation(read_small(fd, GENERATION_NAME) or b"")
    except (OSError, StorageError):
        return False
    return generation is not None and generation.process_only


def share_capacity(
    ssd_paths: Sequence[str], keep: EngineDirectory, capacity_bytes: int, held_bytes: int = 0, engines: int = 1
) -> tuple[int, list[str]]:
    """Settle how much of `capacity_bytes`, all of the existing paths together, `keep` may occupy: what nobody leases
    stays within half of it, and living engines, `engines` of them or more, have even shares of the rest.

    What each engine may occupy stands in its leases, and is changed by who holds the lock only: the sum of these and of
    what is not leased never exceeds the capacity, whoever comes and goes. An engine that may have less than it has,
    `held_bytes` or what lies in its directory, keeps that until it is gone: it calls this again then.

    Removes engine directories that nobody leases, the least recently modified first, while they hold more than half or
    while all that lies under the paths' `saria` directories exceeds the capacity. Never touches `keep`, names that are
    not ours, or symlinks.

    Returns the bytes for `keep` (its own included, at least 0), and the directories removed. A path that cannot be read
    counts as empty, and a directory that cannot be removed stays.

    Raises:
        StorageError, OSError: nothing was settled; what was stands.
    """
    with sharing_lock(path for path in ssd_paths if os.path.isdir(os.path.join(path, TOP_NAME))):
        own = set(keep.directories)
        total, others = 0, []
        for path in ssd_paths:
            nbytes, found = _survey(path)
            total += nbytes
            others += [other for other in found if os.path.join(path, *other.names) not in own]
        own_bytes = sum(usage(path, keep.names)[1] for path in ssd_paths)
        grants = [(other, _granted(other)) for other in sorted(others)]
        living = {other.names for other, grant in grants if grant is not None}
        promised = sum(max(0, grant - other.nbytes) for other, grant in grants if grant is not None)
        left_behind = sum(other.nbytes for other, grant in grants if grant is None)
        removed = []
        for other, grant in grants:
            if total <= capacity_bytes and left_behind <= capacity_bytes // 2:
                break
            if grant is None and _remove(other):
                removed.append(os.path.join(other.path, *other.names))
                total -= other.nbytes
                left_behind -= other.nbytes
        share = (capacity_bytes - left_behind) // max(engines, 1 + len(living))
        ours = max(0, min(share, capacity_bytes - (total - own_bytes) - promised))
        keep.grant(max(ours, own_bytes, held_bytes))
        return ours, removed


def _granted(other: _Other) -> int | None:
    """How much the living owner of an engine directory may come to occupy on its path; None when nobody leases it."""
    try:
        with open_path(other.path, other.names) as fd:
            return granted(read_small(fd, LEASE_NAME) or b"") if is_leased(fd) else None
    except (OSError, StorageError):
        return None


def remove_namespace(path: str, namespace: str) -> bool:
    """Remove what nobody leases of a namespace under an SSD path, as `share_capacity` would. False when something of
    it stays."""
    try:
        with open_path(path, (TOP_NAME, namespace)) as fd:
            engines = names_in(fd, ENGINE_NAME)
    except (OSError, StorageError):
        return False
    gone = [_remove(_Other(0.0, 0, path, (TOP_NAME, namespace, engine))) for engine in engines]
    return all(gone) and (bool(engines) or _remove_parts(path, namespace))


def _survey(path: str) -> tuple[int, list[_Other]]:
    """Bytes under a path's `saria` directory, and the engine directories there."""
    found: list[_Other] = []
    try:
        with open_path(path, (TOP_NAME,)) as top_fd:
            namespaces = names_in(top_fd, NAMESPACE_NAME)
            total = _tree(top_fd)[1]
    except (OSError, StorageError):
        return 0, []
    for namespace in namespaces:
        try:
            with open_path(path, (TOP_NAME, namespace)) as fd:
                engines = names_in(fd, ENGINE_NAME)
        except (OSError, StorageError):
            continue
        for engine in engines:
            names = (TOP_NAME, namespace, engine)
            modified, nbytes = usage(path, names)
            found.append(_Other(modified, nbytes, path, names))
    return total, found


def usage(path: str, names: tuple[str, ...]) -> tuple[float, int]:
    """Latest change of a file (epoch seconds) and bytes on disk of all below `path`/`names`...; zeros if unreadable."""
    try:
        with open_path(path, names) as fd:
            return _tree(fd)
    except (OSError, StorageError):
        return 0.0, 0


def _tree(directory_fd: int, depth: int = _DEPTH_MAX) -> tuple[float, int]:
    """Latest change of a file (seconds), and bytes on disk, of all below a directory. Symlinks are not followed."""
    modified, nbytes = 0.0, 0
    for name in os.listdir(directory_fd):
        try:
            status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) and depth:
                child_fd = open_directory(directory_fd, name)
                try:
                    child_modified, child_bytes = _tree(child_fd, depth - 1)
                finally:
                    os.close(child_fd)
                modified = max(modified, child_modified)
                nbytes += child_bytes
        except (OSError, StorageError):
            continue  # it went while we looked, or is not ours to read
        if stat.S_ISREG(status.st_mode):
            modified = max(modified, status.st_mtime)
        nbytes += status.st_blocks * _BLOCK_BYTES
    return modified, nbytes


def _remove(other: _Other) -> bool:
    """Take the lease of an engine directory and remove it; False when it is leased or cannot be removed."""
    *parents, engine = other.names
    try:
        with open_path(other.path, tuple(parents)) as namespace_fd:
            gone = _remove_engine(namespace_fd, engine)
        _remove_parts(other.path, parents[-1])
        return gone
    except (OSError, StorageError):
        return False


def _remove_parts(path: str, namespace: str) -> bool:
    """Remove a namespace without engine directories; False when it is not gone."""
    with open_path(path, (TOP_NAME, namespace)) as fd:
        if names_in(fd, ENGINE_NAME):
            return False
        remove(fd, PARTS_NAME)
        remove(fd, f"{PARTS_NAME}{NEW}")
    with open_path(path, (TOP_NAME,)) as fd:
        return _rmdir(fd, namespace)


def _remove_engine(namespace_fd: int, engine: str) -> bool:
    engine_fd = open_directory(namespace_fd, engine)
    try:
        lease = try_lease(engine_fd)
        if lease is None:
            return False
        try:
            for rank in names_in(engine_fd, RANK_NAME):
                _remove_rank(engine_fd, rank)
            for name in (GENERATION_NAME, f"{GENERATION_NAME}{NEW}", LEASE_NAME):
                remove(engine_fd, name)
        finally:
            os.close(lease)
        return _rmdir(namespace_fd, engine)
    finally:
        os.close(engine_fd)


def _remove_rank(engine_fd: int, rank: str) -> None:
    rank_fd = open_directory(engine_fd, rank)
    try:
        for name in os.listdir(rank_fd):
            if name == PROBE_NAME or segment_of_name(name) is not None:
                remove(rank_fd, name)
    finally:
        os.close(rank_fd)
    _rmdir(engine_fd, rank)


def _rmdir(parent_fd: int, name: str) -> bool:
    """Remove a directory; False when something that is not ours keeps it."""
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except OSError:
        return False
    return True
