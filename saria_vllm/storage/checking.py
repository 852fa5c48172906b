"""Everything under `<ssd_path>/saria` checked: what is not as docs/format.md says is found, and dropped when asked.

A directory that an engine uses is only read, and what looks wrong there is looked at again before it is reported: the
engine makes, seals and removes files meanwhile. Dropping needs the engine directory's lease. Nothing is followed,
nothing that is not ours touched, and names are read one by one: a directory may hold millions.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from saria_vllm.errors import StorageError
from saria_vllm.storage import rates, segment_check, wear
from saria_vllm.storage.directories import (
    ENGINE_NAME,
    GENERATION_NAME,
    LEASE_NAME,
    NAMESPACE_NAME,
    NEW,
    PARTS_NAME,
    RANK_NAME,
    SHARING_NAME,
    TOP_NAME,
    is_leased,
    open_directory,
    open_path,
    open_regular,
    read_small,
    try_lease,
)
from saria_vllm.storage.drives import PROBE_NAME
from saria_vllm.storage.format import FORMAT_VERSION
from saria_vllm.storage.namespace import namespace_name, parse_generation, store_id
from saria_vllm.storage.recovery import data_name, journal_name, segment_of_name
from saria_vllm.storage.segment_check import Expected, Problem, SegmentView
from saria_vllm.types import align_up

CONFIRM_S = (0.2, 0.5, 2.0)
"""Pauses before another look at what an engine may just be changing."""

TEMPORARY_S = 60.0
"""A temporary file that is older belongs to nobody who still writes it."""

FOREIGN_NAMED_MAX = 3


class Finding(NamedTuple):
    """One thing that is wrong under an SSD path."""

    kind: str
    path: str
    """Of the file or directory, below the SSD path."""
    record: int | None
    what: str
    dropped: bool


@dataclass(slots=True)
class Totals:
    """What was looked at."""

    namespaces: int = 0
    engines: int = 0
    in_use: int = 0
    segments: int = 0
    records: int = 0
    bytes_read: int = 0
    useless_segments: int = 0
    """Of no use to the next engine, which removes them: no record at all, or only of generations before."""


class DirectoryCheck:
    """One check of an SSD path. `run` yields what is wrong as it is found.

    Args:
        drop: drop what is bad, where no engine is.
        progress: called often, after `totals` changed.
    """

    def __init__(self, path: str, drop: bool = False, progress: Callable[[], None] = lambda: None) -> None:
        self._path, self._drop, self._progress = path, drop, progress
        self._owner = 0
        self.totals = Totals()

    def run(self) -> Iterator[Finding]:
        """See the class.

        Raises:
            OSError: the path has no `saria` directory, or it cannot be listed.
            StorageError: that is a symlink, no directory, or another user's.
        """
        with open_path(self._path, (TOP_NAME,)) as top_fd:
            self._owner = os.fstat(top_fd).st_uid
            names = yield from self._names(top_fd, TOP_NAME, _is_top_name)
            for name in names:
                if NAMESPACE_NAME.fullmatch(name):
                    yield from self._inside(top_fd, name, TOP_NAME, self._namespace)
            for name in names:
                if not NAMESPACE_NAME.fullmatch(name):
                    yield from self._top_file(top_fd, name)

    # Directories

    def _inside(
        self, parent_fd: int, name: str, where: str, check: Callable[[int, str], Iterator[Finding]]
    ) -> Iterator[Finding]:
        """Check a sub-directory, unless there is none that is ours to enter."""
        at = f"{where}/{name}"
        try:
            mode = os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_mode
            fd = open_directory(parent_fd, name)
        except FileNotFoundError:
            return
        except (OSError, StorageError) as error:
            kind = "unreadable"
            if isinstance(error, StorageError):
                kind = "symlink" if stat.S_ISLNK(mode) else "owner" if stat.S_ISDIR(mode) else "special"
            what = {
                "symlink": "a symlink, which no reader follows", "special": "no directory",
                "owner": str(error).partition(": ")[2],
            }.get(kind, f"cannot be opened: {getattr(error, 'strerror', error)}")  # fmt: skip
            yield Finding(kind, at, None, what, False)
            return
        try:
            yield from check(fd, at)
        except FileNotFoundError:
            pass  # removed meanwhile
        except OSError as error:
            yield Finding("unreadable", at, None, f"cannot be read: {error.strerror or error}", False)
        finally:
            os.close(fd)

    def _names(self, fd: int, at: str, ours: Callable[[str], bool]) -> Generator[Finding, None, list[str]]:
        """Check a directory's mode and owner and what is in it. Returns the names that are ours, sorted."""
        yield from self._plain(os.path.dirname(at), segment_check.check_status(
            os.path.basename(at), os.fstat(fd), self._owner))  # fmt: skip
        names: list[str] = []
        foreign: list[str] = []
        count = 0
        with os.scandir(fd) as listing:
            for item in listing:
                if ours(item.name):
                    names.append(item.name)
                else:
                    count += 1
                    foreign += [item.name] if len(foreign) < FOREIGN_NAMED_MAX else []
        if count:
            shown = ", ".join(ascii(name) for name in sorted(foreign)) + (", ..." if count > len(foreign) else "")
            yield Finding("foreign", at, None, f"{count} name(s) that are not ours: {shown}", False)
        return sorted(names)

    def _plain(self, at: str, problems: Iterable[Problem], dropped: bool = False) -> Iterator[Finding]:
        for kind, name, record, what, drop in problems:
            yield Finding(kind, os.path.join(at, name), record, what, dropped and drop != segment_check.NOTHING)

    def _namespace(self, fd: int, at: str) -> Iterator[Finding]:
        self.totals.namespaces += 1
        busy: set[int] = set()
        names = yield from self._names(fd, at, _is_namespace_name)
        engines = [name for name in names if ENGINE_NAME.fullmatch(name)]
        parts = read_parts(fd, os.path.basename(at))
        used = False
        for name in engines:
            yield from self._inside(fd, name, at, lambda fd, at: self._engine(fd, at, parts, busy))
            used = used or int(name[1:]) in busy
        if parts is None and engines:
            yield from self._bad_file(fd, at, PARTS_NAME, "parts", "missing, damaged or another namespace's", used)
        if f"{PARTS_NAME}{NEW}" in names:
            yield from self._temporary(fd, at, f"{PARTS_NAME}{NEW}", used)

    def _top_file(self, top_fd: int, name: str) -> Iterator[Finding]:
        match = wear.FILE_NAME.fullmatch(name.removesuffix(NEW))
        if match is None or match[2] == "lease":
            yield from self._small_status(top_fd, TOP_NAME, name)
            return
        index = int(match[1])
        try:
            used = is_leased(top_fd, f"endurance-e{index}.lease")
        except OSError:
            used = True  # It cannot be asked.
        if name.endswith(NEW):
            yield from self._temporary(top_fd, TOP_NAME, name, used)
            return
        yield from self._small_status(top_fd, TOP_NAME, name)
        try:
            wear.read_state(self._path, index)
        except StorageError:
            what = "damaged: what was written to this drive is not known"
            yield from self._bad_file(top_fd, TOP_NAME, name, "endurance", what, used)

    # Small files

    def _small_status(self, fd: int, at: str, name: str) -> Iterator[Finding]:
        """Mode and owner of a small file, and whether it is one."""
        try:
            small_fd = open_regular(name, os.O_RDONLY, fd)
        except FileNotFoundError:
            return
        except OSError as error:
            kind, what = segment_check.describe(error)
            yield Finding(kind, f"{at}/{name}", None, what, False)
            return
        try:
            status = os.fstat(small_fd)
        finally:
            os.close(small_fd)
        yield from self._plain(at, segment_check.check_status(name, status, self._owner))

    def _bad_file(self, fd: int, at: str, name: str, kind: str, what: str, used: bool) -> Iterator[Finding]:
        """A small file of no use. Dropped unless an engine may use it, or it is no file."""
        yield Finding(kind, f"{at}/{name}", None, what, self._drop and not used and _unlink_file(fd, name))

    def _temporary(self, fd: int, at: str, name: str, used: bool) -> Iterator[Finding]:
        try:
            modified = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return
        if time.time() - modified > TEMPORARY_S:
            yield from self._bad_file(fd, at, name, "temporary", "left behind by a write that did not end", used)

    # Engine directories

    def _engine(self, fd: int, at: str, parts: Mapping[str, Any] | None, busy: set[int]) -> Iterator[Finding]:
        self.totals.engines += 1
        names = yield from self._names(fd, at, _is_engine_name)
        if LEASE_NAME not in names:
            yield Finding("lease", f"{at}/{LEASE_NAME}", None, "missing: no engine has this directory", False)
        with _leased(fd, self._drop) as leased:
            used = not leased and is_leased(fd)
            if used:
                busy.add(int(os.path.basename(at)[1:]))
                self.totals.in_use += 1
            yield from self._small_status(fd, at, LEASE_NAME)
            yield from self._small_status(fd, at, GENERATION_NAME)
            ranks = [name for name in names if RANK_NAME.fullmatch(name)]
            data = read_small(fd, GENERATION_NAME)
            generation = parse_generation(data) if data is not None else None
            if generation is None and (data is not None or ranks):
                what = "missing" if data is None else "damaged"
                what += ": the next engine uses nothing of what is here"
                yield Finding("generation", f"{at}/{GENERATION_NAME}", None, what, False)
            if f"{GENERATION_NAME}{NEW}" in names:
                yield from self._temporary(fd, at, f"{GENERATION_NAME}{NEW}", not leased)
            if parts is not None and parts.get("format") != FORMAT_VERSION:
                what = f"format version {parts.get('format')!r}, not {FORMAT_VERSION}: not looked into; saria inspect "
                yield Finding("version", at, None, what + "drops it", False)
                return
            number = generation.number if generation else None
            for name in ranks:
                check = _RankCheck(self, fd, at, parts, number, leased)
                yield from self._inside(fd, name, at, check.run)


class _RankCheck:
    """One rank directory, of an engine whose lease we hold (`leased`) or not."""

    def __init__(
        self, parent: DirectoryCheck, engine_fd: int, engine_at: str, parts: Mapping[str, Any] | None,
        generation: int | None, leased: bool,
    ) -> None:  # fmt: skip
        self._parent, self._engine_fd, self._leased = parent, engine_fd, leased
        self._namespace, self._engine = engine_at.split("/")[-2:]
        self._sizes, self._generation = record_bytes(parts), generation

    def run(self, fd: int, at: str) -> Iterator[Finding]:
        """What is wrong in the directory `fd`, which is called `at`."""
        parent = self._parent
        names = yield from parent._names(fd, at, _is_rank_name)
        data = {segment for name in names if (segment := _segment(name, "data")) is not None}
        journals = {segment for name in names if (segment := _segment(name, "journal")) is not None}
        if PROBE_NAME in names:
            yield from parent._temporary(fd, at, PROBE_NAME, not self._leased)
        del names
        rank = int(os.path.basename(at)[1:])
        expected = Expected(
            store_id(self._namespace, int(self._engine[1:]), rank), rank, self._sizes, self._generation, parent._owner
        )
        suspects: list[SegmentView] = []
        generation_max = 0
        for segment in sorted(data):
            view = self._check(fd, segment, expected, count=True)
            if view is None:
                continue
            generation_max = max(generation_max, view.generation_max)
            if view.problems and self._may_change():
                suspects.append(view)
            else:
                yield from self._report(fd, at, view)
        for pause_s in CONFIRM_S:
            if suspects:
                time.sleep(pause_s)
                suspects = self._confirmed(fd, suspects, expected)
        for view in suspects:
            yield from self._report(fd, at, view)
        yield from self._orphans(fd, at, sorted(journals - data))
        yield from self._behind(at, generation_max)

    def _may_change(self) -> bool:
        return not self._leased and bool(is_leased(self._engine_fd))

    def _check(self, fd: int, segment: int, expected: Expected, count: bool) -> SegmentView | None:
        view, nbytes = segment_check.check(fd, segment, expected)
        if count and view is not None:
            totals = self._parent.totals
            totals.segments += 1
            totals.records += len(view.live)
            totals.useless_segments += not view.live and not view.problems
            totals.bytes_read += nbytes
            self._parent._progress()
        return view

    def _confirmed(self, fd: int, suspects: Iterable[SegmentView], expected: Expected) -> list[SegmentView]:
        """Those that are still wrong in the same way."""
        confirmed = []
        for before in suspects:
            view = self._check(fd, before.segment, expected, count=False)
            if view is not None:
                known = {problem[:3] for problem in before.problems}
                view.problems = [problem for problem in view.problems if problem[:3] in known]
                if view.problems:
                    confirmed.append(view)
        return confirmed

    def _report(self, fd: int, at: str, view: SegmentView) -> Iterator[Finding]:
        dropped, problems = False, view.problems
        if problems and self._leased:
            try:
                segment_check.drop(fd, view, problems)
                dropped = True
            except OSError as error:
                what = f"could not be dropped: {error.strerror or error}"
                yield Finding("unreadable", f"{at}/{data_name(view.segment)}", None, what, False)
        yield from self._parent._plain(at, problems, dropped)

    def _orphans(self, fd: int, at: str, segments: list[int]) -> Iterator[Finding]:
        """Journals without data. An engine makes data first and removes them first."""
        for pause_s in (0.0, *CONFIRM_S):
            if segments and self._may_change():
                time.sleep(pause_s)
            segments = [
                segment
                for segment in segments
                if _exists(fd, journal_name(segment)) and not _exists(fd, data_name(segment))
            ]
        for segment in segments:
            name = journal_name(segment)
            yield Finding(
                "orphan", f"{at}/{name}", None, "a journal without data", self._leased and _unlink_file(fd, name)
            )

    def _behind(self, at: str, generation_max: int) -> Iterator[Finding]:
        """Whether records are of a later generation than the current, which an engine makes durable first."""
        if self._generation is None or generation_max <= self._generation:
            return
        generation = parse_generation(read_small(self._engine_fd, GENERATION_NAME) or b"")
        if generation is None or generation.number < generation_max:
            what = f"there are records of generation {generation_max} in {at}, and the file says {self._generation}"
            yield Finding("generation", f"{os.path.dirname(at)}/{GENERATION_NAME}", None, what, False)


@contextmanager
def _leased(engine_fd: int, wanted: bool) -> Iterator[bool]:
    """Hold the lease of an engine directory, if that is wanted and can be. Its time stays: an engine's last claim."""
    lease = None
    if wanted and _exists(engine_fd, LEASE_NAME):
        before = os.stat(LEASE_NAME, dir_fd=engine_fd, follow_symlinks=False)
        try:
            lease = try_lease(engine_fd)
        except OSError:
            pass  # no regular file: nobody can hold it
    try:
        yield lease is not None
    finally:
        if lease is not None:
            os.utime(lease, ns=(before.st_atime_ns, before.st_mtime_ns))
            os.close(lease)


def read_parts(namespace_fd: int, namespace: str) -> dict[str, Any] | None:
    """What a namespace's fingerprint was made of; None when that is missing, damaged or another's. Those of another
    format version are believed: their fingerprint may be made in another way.

    Raises:
        OSError: as from read(2).
    """
    try:
        parts = json.loads(read_small(namespace_fd, PARTS_NAME) or b"")
        known = isinstance(parts, dict) and (  # Also where its name is not asked for, it must be JSON: no NaN.
            namespace_name(parts) == namespace or parts.get("format", FORMAT_VERSION) != FORMAT_VERSION
        )
    except (ValueError, RecursionError):
        return None
    return parts if known else None


def record_bytes(parts: Mapping[str, Any] | None) -> dict[int, int] | None:
    """Record sizes by group, as the fingerprint has them; None when it does not."""
    try:
        chunks = (parts or {})["chunks"]
        return {group: align_up(int(blocks) * int(nbytes)) for group, (_, blocks, nbytes) in enumerate(chunks)}
    except (KeyError, TypeError, ValueError):
        return None


def _exists(directory_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _unlink_file(directory_fd: int, name: str) -> bool:
    """False when it is a directory or cannot be removed."""
    try:
        os.unlink(name, dir_fd=directory_fd)
    except OSError:
        return False
    return True


def _segment(name: str, kind: str) -> int | None:
    found = segment_of_name(name)
    return found[0] if found is not None and found[1] == kind else None


def _is_top_name(name: str) -> bool:
    plain = name.removesuffix(NEW)
    known = NAMESPACE_NAME.fullmatch(name) or wear.FILE_NAME.fullmatch(plain) or rates.FILE_NAME.fullmatch(plain)
    return name == SHARING_NAME or known is not None


def _is_namespace_name(name: str) -> bool:
    return bool(ENGINE_NAME.fullmatch(name)) or name.removesuffix(NEW) == PARTS_NAME


def _is_engine_name(name: str) -> bool:
    return bool(RANK_NAME.fullmatch(name)) or name == LEASE_NAME or name.removesuffix(NEW) == GENERATION_NAME


def _is_rank_name(name: str) -> bool:
    return name == PROBE_NAME or segment_of_name(name) is not None
