"""Which SSD records are used: segments filled in order, retired whole, the oldest first."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from saria_vllm.policy.index import NO_ROWS, Mask, Rows
from saria_vllm.policy.striping import Striping
from saria_vllm.types import Extent, Ints

GROWTH_S = 60.0
"""On a drive that was full before its cap was reached one more segment is tried so often."""

LAST_SHARE = 0.25
"""Of a full drive's segments, the oldest: what is read while it is there may be written again before it is retired."""


class Segment:
    """One segment as the scheduler sees it: who lives there and who is using it."""

    __slots__ = ("busy", "drive", "given_up", "group", "id", "rows", "used")

    def __init__(self, drive: int, segment_id: int, group: int, records: int) -> None:
        self.drive, self.id, self.group = drive, segment_id, group
        self.rows = np.full(records, -1, np.int32)
        """Index row of each record, -1 where none is readable."""
        self.used = 0
        """Records handed out."""
        self.busy = 0
        """Writes and reads in flight; a busy segment is never retired."""
        self.given_up = False
        """From before a reset, or failed: nothing of it is used, and it is retired when its last job ends."""

    def give_up(self) -> Rows:
        """Returns the rows that lost their SSD copy."""
        lost: Rows = self.rows[self.rows >= 0]
        self.rows[:] = -1
        self.used = len(self.rows)
        self.given_up = True
        return lost


class ExtentAllocator:
    """Hands out records under a hard cap of segments per drive.

    Extents whose drive number is not below `drives` lie in segments of other engines (`storage/foreign.py`): they are
    read like any other, but neither written nor kept from their owner, who may retire them at any time.

    Args:
        drives: number of drives.
        segments_max: cap of segments on each drive, over all groups.
        records_per_segment: by group.
    """

    def __init__(self, drives: int, segments_max: int, records_per_segment: list[int], next_segment: int = 0) -> None:
        self.segments_max = segments_max
        """May be changed at any time, also by another thread; `shrink` makes it true."""
        self._records = records_per_segment
        self._by_drive: list[dict[int, Segment]] = [{} for _ in range(drives)]
        """Segments of each drive, oldest first."""
        self._open: dict[tuple[int, int], Segment] = {}
        self._full: dict[int, tuple[int, float]] = {}
        """Of a drive that was full below the cap: the segments there was room for, and when that was."""
        self.striping = Striping(drives)
        self._next_segment = next_segment
        self.retired: list[tuple[int, int]] = []
        """(drive, segment) whose files must go; drained by the scheduler before newer writes are sent."""

    def segment(self, extent: Extent) -> Segment:
        """The segment of an extent that is in use."""
        return self._by_drive[extent.drive][extent.segment]

    def segments(self) -> int:
        return sum(map(len, self._by_drive))

    @property
    def drives(self) -> int:
        return len(self._by_drive)

    def shrink(self) -> Rows:
        """Retire the oldest segments beyond the cap that are not in use; the others stay until this is called again, or
        room is asked for. Returns the rows that lost their SSD copy."""
        lost = [NO_ROWS]
        for segments in self._by_drive:
            over = len(segments) - self.segments_max
            if over > 0:
                for segment in [segment for segment in segments.values() if not segment.busy][:over]:
                    lost.append(segment.rows[segment.rows >= 0])
                    self._retire(segment)
        return np.concatenate(lost)

    def most_segments(self) -> int:
        """How many segments the fullest drive has, or may come to have."""
        return max(self.segments_max, *map(len, self._by_drive))

    def take(self, group: int, count: int, room: Sequence[int], now: float) -> tuple[Ints, Rows]:
        """Records to write as rows of (drive, segment, record), and the rows that lost their SSD copy to make room.

        A prefix is spread over all drives, see `Striping`; each takes at most `room[drive]`. Fewer than `count` when no
        drive takes more.
        """
        taken, lost = [np.empty((0, 3), np.int32)], [NO_ROWS]
        writable = self.striping.writable(now)
        left = {drive: room[drive] for drive in range(self.drives) if writable[drive] and self._records[group]}
        given = dict.fromkeys(left, 0)
        while count and (left := {drive: chunks for drive, chunks in left.items() if chunks > 0}):
            order = self.striping.spread(count, left)
            extents, had = np.empty((len(order), 3), np.int32), np.zeros(len(order), np.bool_)
            for drive in tuple(left):
                mine = (order == drive).nonzero()[0]
                found = self._take_from(drive, group, len(mine), self._cap(drive, now), lost)
                extents[mine[: len(found)]] = found
                had[mine[: len(found)]] = True
                given[drive] += len(found)
                left[drive] = left[drive] - len(found) if len(found) == len(mine) else 0
            taken.append(extents[had])
            count -= int(had.sum())
        self.striping.gave(given)
        return np.concatenate(taken), np.concatenate(lost)

    def group_of(self, extent: Extent) -> int:
        """The group of an extent that is in use."""
        return self.segment(extent).group

    def _cap(self, drive: int, now: float) -> int:
        """Segments that a drive may have now."""
        if drive not in self._full:
            return self.segments_max
        segments, since = self._full[drive]
        return min(self.segments_max, segments + int((now - since) / GROWTH_S))

    def _take_from(self, drive: int, group: int, count: int, cap: int, lost: list[Rows]) -> Ints:
        runs = [np.empty((0, 3), np.int32)]
        while count and (segment := self._open.get((drive, group)) or self._new_segment(drive, group, cap, lost)):
            some = min(count, len(segment.rows) - segment.used)
            run = np.empty((some, 3), np.int32)
            run[:, 0], run[:, 1], run[:, 2] = drive, segment.id, np.arange(segment.used, segment.used + some)
            runs.append(run)
            segment.used += some
            segment.busy += some
            count -= some
            if segment.used == len(segment.rows):
                del self._open[drive, group]
        return np.concatenate(runs)

    def _new_segment(self, drive: int, group: int, cap: int, lost: list[Rows]) -> Segment | None:
        segments = self._by_drive[drive]
        if not cap:
            return None
        while len(segments) >= cap:
            idle = [segment for segment in segments.values() if not segment.busy]
            if not idle:
                return None
            full = (segment for segment in idle if self._open.get((drive, segment.group)) is not segment)
            oldest = next(full, idle[0])
            lost.append(oldest.rows[oldest.rows >= 0])
            self._retire(oldest)
        segment = Segment(drive, self._next_segment, group, self._records[group])
        self._next_segment += 1
        segments[segment.id] = self._open[drive, group] = segment
        return segment

    def going(self) -> Ints:
        """By drive: the oldest segment that does not go soon, as the oldest `LAST_SHARE` of a full drive do; -1 for a
        drive that is not full."""
        oldest = np.full(self.drives, -1, np.int32)
        for drive, mine in enumerate(self._by_drive):
            if len(mine) >= self.segments_max:
                last = math.ceil(len(mine) * LAST_SHARE)
                oldest[drive] = next(itertools.islice(mine, last, None), -1)
        return oldest

    def untroubled(self, group: int, now: float) -> int:
        """How many records of a group can be taken, from whatever drives, before a segment is retired for one."""
        left = [sys.maxsize]
        for drive, may in enumerate(self.writable(now)):
            if may:
                segment = self._open.get((drive, group))
                more = self._records[group] * max(0, self._cap(drive, now) - len(self._by_drive[drive]))
                left.append(more + (len(segment.rows) - segment.used if segment else 0))
        return min(left)

    def _retire(self, segment: Segment) -> None:
        del self._by_drive[segment.drive][segment.id]
        if self._open.get((segment.drive, segment.group)) is segment:
            del self._open[segment.drive, segment.group]
        self.retired.append((segment.drive, segment.id))

    def filled(self, extents: Ints, rows: Rows) -> None:
        """These records, rows of (drive, segment, record), can be read from now on."""
        for drive, segment in {(drive, segment) for drive, segment, _ in extents.tolist()}:
            mine = (extents[:, 0] == drive) & (extents[:, 1] == segment)
            self._by_drive[drive][segment].rows[extents[mine, 2]] = rows[mine]

    def forget(self, extent: Extent) -> None:
        """The record is never read again; its room comes back with its segment."""
        if extent.drive < self.drives:
            self.segment(extent).rows[extent.record] = -1

    def hold(self, extents: Ints) -> None:
        """Begin reading records, rows of (drive, segment, record): their segments stay."""
        for drive, segment, count in _by_segment(extents[extents[:, 0] < self.drives]):
            self._by_drive[drive][segment].busy += count

    def release(self, extents: Ints) -> None:
        """End reads, or a write, of records."""
        for drive, number, count in _by_segment(extents[extents[:, 0] < self.drives]):
            segment = self._by_drive[drive][number]
            assert segment.busy >= count
            segment.busy -= count
            if segment.given_up and not segment.busy:
                self._retire(segment)

    def failed(self, extents: Ints, reading: bool, now: float) -> Rows:
        """A drive failed to read or write these records: pause it, and give up their segments. Nothing is read from or
        written to those any more, and they are retired when their last job ends. Returns the rows that lost their SSD
        copy."""
        drive = int(extents[0, 0])
        found = [self._by_drive[drive].get(number) for _, number, _ in _by_segment(extents)]
        segments = [segment for segment in found if segment is not None and not segment.given_up]
        if segments:
            self.striping.failed(drive, reading, now)
        return np.concatenate([NO_ROWS, *map(self._give_up, segments)])

    def _give_up(self, segment: Segment) -> Rows:
        lost = segment.give_up()
        if self._open.get((segment.drive, segment.group)) is segment:
            del self._open[segment.drive, segment.group]
        if not segment.busy:
            self._retire(segment)
        return lost

    def given_up(self, extents: Ints) -> Mask:
        """Which records, rows of (drive, segment, record), are in segments that were given up."""
        given_up = np.zeros(len(extents), np.bool_)
        for drive, number, _ in _by_segment(extents):
            if self._by_drive[drive][number].given_up:
                given_up |= (extents[:, 0] == drive) & (extents[:, 1] == number)
        return given_up

    def full(self, extents: Ints, now: float) -> Rows:
        """A drive had no room for these records, though it is below its cap: others use it, too. It is paused, and its
        oldest segment makes room for one; more than there were are tried later, one by one. Those of the records'
        segments that have nothing to read go, too: their files may not even be there. Returns the rows that lost their
        SSD copy."""
        drive = int(extents[0, 0])
        segments = self._by_drive[drive]
        lost = [self._give_up(segments[number]) for _, number, _ in _by_segment(extents)
                if number in segments and not (segments[number].rows >= 0).any()]  # fmt: skip
        if self.striping.full(drive, now):
            kept = [segment for segment in segments.values() if not segment.given_up]
            self._full[drive] = max(1, len(kept)), now
            lost += [self._give_up(segment) for segment in [segment for segment in kept if not segment.busy][:1]]
        return np.concatenate([NO_ROWS, *lost])

    def lose_drive(self, drive: int) -> Rows:
        """A drive's directory is gone: use it no more. Returns the rows that lost their SSD copy."""
        self.striping.lose(drive)
        return np.concatenate([NO_ROWS, *map(self._give_up, tuple(self._by_drive[drive].values()))])

    def writable(self, now: float) -> list[bool]:
        """By drive: whether it is written to."""
        return self.striping.writable(now)

    def pause_reads(self, drive: int, now: float) -> None:
        """Offer nothing from a drive that held up a load for a while."""
        self.striping.late(drive % self.drives, now)

    def unreadable(self, now: float) -> Mask | None:
        """By drive: whether its reads are paused. None when no drive's are."""
        return self.striping.unreadable(now)

    def adopt(self, extents: Ints, group: int, rows: Rows) -> Mask:
        """Take over records found on SSD, best by segment. Returns which fit this configuration, each place once."""
        drive, segment, record = extents.T.astype(np.int64)
        fits: Mask = (drive >= 0) & (drive < self.drives) & (record >= 0) & (record < self._records[group])
        fits &= ~np.isin(drive, list(self.striping.left_out))
        places = drive << 32 | segment
        order = fits.nonzero()[0]
        for here in np.split(order, np.diff(places[order]).nonzero()[0] + 1) if order.size else []:
            drive_number, number, mine = int(drive[here[0]]), int(segment[here[0]]), record[here]
            segments = self._by_drive[drive_number]
            found = segments.get(number)
            if found is None:
                found = segments[number] = Segment(drive_number, number, group, self._records[group])
                found.used = self._records[group]
                self._next_segment = max(self._next_segment, number + 1)
            if found.group != group:
                fits[here] = False
                continue
            free = found.rows[mine] == -1
            if not free.all() or (mine[1:] <= mine[:-1]).any():
                _, first = np.unique(mine, return_index=True)
                fits[here] = False
                here = here[first[free[first]]]
                fits[here] = True
            found.rows[record[here]] = rows[here]
        return fits

    def of_others(self, extents: Ints) -> Mask:
        """Which of the records lie in other engines' segments, on drives that are used."""
        drive = extents[:, 0]
        return (drive >= self.drives) & ~np.isin(drive % self.drives, list(self.striping.left_out))

    def end_adoption(self, next_segment: int, seen: Iterable[tuple[int, int]]) -> None:
        """After `adopt`: oldest first again, no id is given out twice, `seen` segments without a use are retired."""
        unused = (place for place in set(seen) if place[1] not in self._by_drive[place[0]])
        self.retired += sorted(place for place in unused if place[0] not in self.striping.left_out)
        self._by_drive = [dict(sorted(segments.items())) for segments in self._by_drive]
        self._next_segment = max(self._next_segment, next_segment)

    def drop_all(self, still_busy: Iterable[Extent]) -> ExtentAllocator:
        """A new allocator after a cache reset: every segment retired, now or when its last job ends."""
        fresh = ExtentAllocator(len(self._by_drive), self.segments_max, self._records, self._next_segment)
        fresh.striping, fresh._full = self.striping, self._full
        busy = {(extent.drive, extent.segment) for extent in still_busy}
        for segments in self._by_drive:
            for segment in segments.values():
                if (segment.drive, segment.id) in busy:
                    segment.give_up()
                    fresh._by_drive[segment.drive][segment.id] = segment
                else:
                    self.retired.append((segment.drive, segment.id))
        fresh.retired = self.retired
        return fresh


def _by_segment(extents: Ints) -> Iterable[tuple[int, int, int]]:
    """(drive, segment, number of records) of rows of (drive, segment, record)."""
    if len(extents) == 1:
        return [(int(extents[0, 0]), int(extents[0, 1]), 1)]
    places = extents[:, 0].astype(np.int64) << 32 | extents[:, 1]
    found, counts = np.unique(places, return_counts=True)
    return [(place >> 32, place & 0xFFFFFFFF, n) for place, n in zip(found.tolist(), counts.tolist(), strict=True)]


SEGMENT_BYTES_MAX = 1 << 30
SEGMENTS_WANTED = 32
"""Segments per drive and rank to aim for: retiring one gives up this share of the tier."""

SEGMENT_OVERHEAD_BYTES = 64 << 10
"""Room that a segment needs beside one record, at least."""


def choose_segments(budget_bytes: int, record_bytes: Iterable[int]) -> tuple[int, int]:
    """(bytes of a segment, segments at most) for one rank and drive; (0, 0) when the budget is too small.

    Every group needs an open segment and a full one, and a segment at least one record.
    """
    sizes = list(record_bytes)
    smallest = max(sizes) + SEGMENT_OVERHEAD_BYTES
    wanted = max(SEGMENTS_WANTED, 2 * len(sizes))
    segment_bytes = max(smallest, min(SEGMENT_BYTES_MAX, budget_bytes // wanted))
    segments = budget_bytes // segment_bytes
    return (segment_bytes, segments) if segments >= 2 * len(sizes) else (0, 0)
