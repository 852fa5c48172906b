"""Who owns which directory: namespaces by fingerprint, engine directories under a lease, and their generation."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from saria_vllm.errors import NO_ROOM, DriveError, StorageError, is_drive_fault
from saria_vllm.storage.directories import (
    ENGINE_NAME,
    GENERATION_NAME,
    LEASE_NAME,
    NAMESPACE_NAME,
    PARTS_NAME,
    RANK_NAME,
    TOP_NAME,
    names_in,
    open_path,
    overwrite,
    read_small,
    try_lease,
    write_durably,
)

ENGINES_MAX = 1024
"""Engine directories that `claim` tries before it gives up."""

_GENERATION_MAX = 2**63

_ACCEPTED = "a directory that this user can write in, with nothing else in the place of SARIA's own files"


def namespace_name(parts: Mapping[str, Any]) -> str:
    """32 hex characters: the fingerprint of a configuration. The order of keys does not matter.

    Raises:
        TypeError: a part is not made of strings, numbers, lists and mappings.
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"saria-namespace").hexdigest()


def store_id(namespace: str, engine_index: int, rank: int) -> bytes:
    """16 bytes that name one rank's files of one engine: part of every header and checksum seed."""
    text = json.dumps([namespace, engine_index, rank])
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"saria-store").digest()


RESETS_MAX = 1 << 32
"""Generations that one process can begin."""


def last_claimed(ssd_paths: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
    """Name and parts of the namespace of which an engine directory was claimed last; None when none can be read."""
    last, found = -1.0, None
    for path in ssd_paths:
        try:
            with open_path(path, (TOP_NAME,)) as fd:
                names = names_in(fd, NAMESPACE_NAME)
        except (OSError, StorageError):
            continue
        for name in names:
            try:
                with open_path(path, (TOP_NAME, name)) as fd:
                    parts = json.loads(read_small(fd, PARTS_NAME) or b"")
                    leases = [f"{engine}/{LEASE_NAME}" for engine in names_in(fd, ENGINE_NAME)]
                    times = [os.stat(lease, dir_fd=fd, follow_symlinks=False).st_mtime for lease in leases]
            except (OSError, StorageError, ValueError, RecursionError):
                continue
            claimed = max(times, default=0.0)
            if isinstance(parts, dict) and claimed > last:
                last, found = claimed, (name, parts)
    return found


class Generation(NamedTuple):
    """A generation as one path's file has it."""

    number: int
    process_only: bool
    """It began with a reset in a running process: its KV does not belong to the weights on disk."""


def pack_generation(generation: Generation) -> str:
    """Contents of a `generation` file: one line of JSON."""
    number, process_only = generation
    crc = zlib.crc32(f"{number} {int(process_only)}".encode())
    return json.dumps({"generation": number, "process_only": process_only, "crc": crc}) + "\n"


def parse_generation(data: bytes) -> Generation | None:
    """Read a `generation` file; None when it is damaged. Never raises."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict):
        return None
    number, process_only = raw.get("generation"), raw.get("process_only")
    if type(number) is not int or not 0 < number <= _GENERATION_MAX or type(process_only) is not bool:
        return None
    generation = Generation(number, process_only)
    return generation if pack_generation(generation).encode() == data else None


class EngineDirectory:
    """`<ssd_path>/saria/<namespace>/e<k>` on every path, owned by this process until `release` or its death.

    The lease is a flock: a child that was forked, not spawned, after the claim shares it and keeps it alive.
    """

    def __init__(self, paths: tuple[str, ...], namespace: str, index: int, leases: tuple[int, ...]) -> None:
        self._paths = paths
        self._leases = leases
        self._generation = 0
        self._granted = -1
        self.namespace = namespace
        self.index = index
        """k: which of the namespace's engine directories this is."""

    @classmethod
    def claim(
        cls, ssd_paths: Sequence[str], namespace: str, parts: Mapping[str, Any], preferred: int
    ) -> EngineDirectory:
        """Take the first k >= `preferred` that no living engine holds on any of the paths.

        Raises:
            DriveError: a drive is full, read-only, gone or fails. Nothing is held.
            StorageError: a path cannot be used, a component below it is a symlink or another user's, or no
                directory is free. The message names the path; nothing is held.
        """
        assert NAMESPACE_NAME.fullmatch(namespace), namespace
        paths = tuple(ssd_paths)
        for path in paths:
            _make_namespace(path, namespace, parts)
        for index in range(preferred, preferred + ENGINES_MAX):
            leases = _lease_all(paths, namespace, index)
            if leases is None:
                continue
            claimed = cls(paths, namespace, index, leases)
            try:
                claimed._start_generation()
            except StorageError:
                claimed.release()
                raise
            return claimed
        raise StorageError(f"{list(paths)}: no free engine directory from e{preferred} on")

    @property
    def paths(self) -> tuple[str, ...]:
        """The ssd paths that it is on."""
        return self._paths

    @property
    def directories(self) -> tuple[str, ...]:
        """One engine directory per path, in the order of the paths."""
        return tuple(os.path.join(path, *self.names) for path in self._paths)

    @property
    def generation(self) -> int:
        """The current generation, the same on all paths."""
        return self._generation

    def bump_generation(self) -> int:
        """Begin a new generation, for this process only: a later claim begins another. Durable when it returns.

        Raises:
            StorageError: not durable on the paths that the message names. It holds in this process all the same.
        """
        self._generation += 1
        failures = []
        for path in self._paths:
            try:
                self._write_generation(Generation(self._generation, process_only=True), path, in_place=True)
            except StorageError as error:
                failures.append(str(error))
        if failures:
            raise StorageError("generation not durable: " + "; ".join(failures))
        return self._generation

    def grant(self, nbytes: int) -> None:
        """Say to the other engines, on each path, how much this one may come to occupy, all paths together. For the
        holder of `sharing_lock`.

        Raises:
            OSError: not said; what was said before stands.
        """
        assert self._leases
        for fd in self._leases if nbytes != self._granted else ():
            os.pwrite(fd, b"%020d" % -(-nbytes // len(self._leases)), 0)
        self._granted = nbytes

    def release(self) -> None:
        """Give the directory back. Idempotent."""
        leases, self._leases = self._leases, ()
        for fd in leases:
            os.close(fd)

    @property
    def names(self) -> tuple[str, ...]:
        """The components of an engine directory below its path."""
        return (TOP_NAME, self.namespace, f"e{self.index}")

    def _start_generation(self) -> None:
        stored = {path: self._read_generation(path) for path in self._paths}
        known = [generation for generation, _ in stored.values() if generation is not None]
        number = max((generation.number for generation in known), default=1)
        if any(generation.process_only for generation in known):
            number += RESETS_MAX  # There may be records of later resets, too, which could not be written down.
        if any(doubtful for _, doubtful in stored.values()):
            number += int.from_bytes(os.urandom(6), "little")
        self._generation = number
        current = Generation(self._generation, process_only=False)
        behind = [path for path in self._paths if stored[path][0] != current]
        # The furthest behind first: if it cannot be written, the others keep the generation of what they hold.
        for path in sorted(behind, key=lambda path: stored[path][0] or Generation(0, False)):
            self._write_generation(current, path)

    def _read_generation(self, path: str) -> tuple[Generation | None, bool]:
        """What a path says, and whether that is doubtful: damaged, or missing beside records."""
        with _naming(path), open_path(path, self.names) as fd:
            data = read_small(fd, GENERATION_NAME)
            generation = parse_generation(data) if data is not None else None
            return generation, generation is None and (data is not None or bool(names_in(fd, RANK_NAME)))

    def _write_generation(self, generation: Generation, path: str, in_place: bool = False) -> None:
        """`in_place`: also where there is no room for a new file."""
        text = pack_generation(generation)
        with _naming(path), open_path(path, self.names) as fd:
            try:
                write_durably(fd, GENERATION_NAME, text)
            except OSError as error:
                if not in_place or error.errno not in NO_ROOM:
                    raise
                overwrite(fd, GENERATION_NAME, text)  # What a crash makes of it is damaged, and ends all that is here.


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn what is raised below an ssd path into the errors of `EngineDirectory.claim`."""
    try:
        yield
    except StorageError as error:
        raise StorageError(f"ssd_paths: {path!r}: {error}; accepted: {_ACCEPTED}") from None
    except OSError as error:
        problem = f"{error.filename}: {error.strerror or error}"
        if is_drive_fault(error):
            raise DriveError(problem, path, error.errno in NO_ROOM) from error
        if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
            problem = f"{error.filename}: not a regular file"
        raise StorageError(f"ssd_paths: {path!r}: {problem}; accepted: {_ACCEPTED}") from error


def granted(lease: bytes) -> int:
    """What a lease file says that its holder may come to occupy on its path, in bytes; 0 when it says nothing."""
    return int(lease) if lease.isdigit() and len(lease) == 20 else 0


def _make_namespace(path: str, namespace: str, parts: Mapping[str, Any]) -> None:
    names = (TOP_NAME, namespace)
    with _naming(path), open_path(path, names, create=True) as fd:
        if read_small(fd, PARTS_NAME) is None:
            try:
                write_durably(fd, PARTS_NAME, json.dumps(parts, indent=1, sort_keys=True) + "\n")
            except (FileExistsError, FileNotFoundError):
                pass  # another engine of this namespace writes the same at this moment


def _lease_all(paths: Sequence[str], namespace: str, index: int) -> tuple[int, ...] | None:
    """Leases of one engine directory on all paths, or none at all. One order for all, so that somebody always wins."""
    leases: list[int] = []
    complete = False
    try:
        for path in sorted(paths):
            names = (TOP_NAME, namespace, f"e{index}")
            with _naming(path), open_path(path, names, create=True) as fd:
                lease = try_lease(fd)
            if lease is None:
                return None
            leases.append(lease)
        complete = True
        return tuple(leases)
    finally:
        if not complete:
            for lease in leases:
                os.close(lease)
