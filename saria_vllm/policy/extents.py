"""Which SSD records are used: segments filled in order, retired whole, the oldest first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from saria_vllm.policy.index import NO_ROWS, Mask, Rows
from saria_vllm.types import Extent, Ints

DRIVE_PAUSE_S = 10.0
"""How long a drive that failed a write gets no writes."""

READS_PAUSE_S = 60.0
"""How long nothing is read from a drive that held up a load until its deadline."""


class Segment:
    """One segment as the scheduler sees it: who lives there and who is using it."""

    __slots__ = ("busy", "drive", "group", "id", "orphan", "rows", "used")

    def __init__(self, drive: int, segment_id: int, group: int, records: int) -> None:
        self.drive, self.id, self.group = drive, segment_id, group
        self.rows = np.full(records, -1, np.int32)
        """Index row of each record, -1 where none is readable."""
        self.used = 0
        """Records handed out."""
        self.busy = 0
        """Writes and reads in flight; a busy segment is never retired."""
        self.orphan = False
        """From before a reset: retired when its last job ends."""


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
        self._paused_until = [0.0] * drives
        self._reads_paused_until = [0.0] * drives
        self._left_out: set[int] = set()
        self._next_segment = next_segment
        self._turn = 0
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

        The drives take turns, so that a prefix is read from all of them; each takes at most `room[drive]`. Fewer than
        `count` when no drive takes more.
        """
        taken, nth = [np.empty((0, 3), np.int32)], [np.empty(0, np.int64)]
        lost = [NO_ROWS]
        left = list(room)
        turns = [(self._turn + number) % self.drives for number in range(self.drives)]
        writable = self.writable(now)
        drives = [drive for drive in turns if writable[drive] and room[drive] > 0 and self._records[group]]
        self._turn += count
        while count and drives:
            share = -(-count // len(drives))
            for drive in tuple(drives):
                wanted = min(share, count, left[drive])
                extents = self._take_from(drive, group, wanted, lost)
                before = room[drive] - left[drive]
                taken.append(extents)
                nth.append(np.arange(before, before + len(extents)))
                left[drive] -= len(extents)
                count -= len(extents)
                if len(extents) < wanted or not left[drive]:
                    drives.remove(drive)
        in_turns = np.argsort(np.concatenate(nth), kind="stable")
        return np.concatenate(taken)[in_turns], np.concatenate(lost)

    def group_of(self, extent: Extent) -> int:
        """The group of an extent that is in use."""
        return self.segment(extent).group

    def _take_from(self, drive: int, group: int, count: int, lost: list[Rows]) -> Ints:
        runs = [np.empty((0, 3), np.int32)]
        while count and (segment := self._open.get((drive, group)) or self._new_segment(drive, group, lost)):
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

    def _new_segment(self, drive: int, group: int, lost: list[Rows]) -> Segment | None:
        segments, segments_max = self._by_drive[drive], self.segments_max
        if not segments_max:
            return None
        while len(segments) >= segments_max:
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
            if segment.orphan and not segment.busy:
                self._retire(segment)

    def pause(self, drive: int, now: float) -> None:
        """Send a drive that failed a write nothing for `DRIVE_PAUSE_S`."""
        self._paused_until[drive] = now + DRIVE_PAUSE_S

    def writable(self, now: float) -> list[bool]:
        """By drive: whether it is written to."""
        return [now >= until for until in self._paused_until]

    def pause_reads(self, drive: int, now: float) -> None:
        """Offer nothing from a drive that held up a load, for `READS_PAUSE_S`."""
        self._reads_paused_until[drive % self.drives] = now + READS_PAUSE_S

    def unreadable(self, now: float) -> Mask | None:
        """By drive: whether its reads are paused. None when no drive's are."""
        if max(self._reads_paused_until) <= now:
            return None
        return np.array(self._reads_paused_until) > now

    def leave_out(self, drive: int) -> None:
        """Never use a drive: some rank could not open it. What other ranks have there is neither used nor retired."""
        self._left_out.add(drive)
        self.pause(drive, math.inf)

    def adopt(self, extents: Ints, group: int, rows: Rows) -> Mask:
        """Take over records found on SSD. Returns which of them fit this configuration, each place once."""
        drive, segment, record = extents.T
        fits: Mask = (drive >= 0) & (drive < self.drives) & (record >= 0) & (record < self._records[group])
        fits &= ~np.isin(drive, list(self._left_out))
        for drive_number, number in {(d, n) for d, n, _ in extents[fits].tolist()}:
            segments = self._by_drive[drive_number]
            found = segments.get(number)
            if found is None:
                found = segments[number] = Segment(drive_number, number, group, self._records[group])
                found.used = self._records[group]
                self._next_segment = max(self._next_segment, number + 1)
            here = (fits & (drive == drive_number) & (segment == number)).nonzero()[0]
            if found.group != group:
                fits[here] = False
                continue
            _, first = np.unique(record[here], return_index=True)
            first = first[found.rows[record[here[first]]] == -1]
            fits[here] = False
            fits[here[first]] = True
            found.rows[record[here[first]]] = rows[here[first]]
        return fits

    def of_others(self, extents: Ints) -> Mask:
        """Which of the records lie in other engines' segments, on drives that are used."""
        drive = extents[:, 0]
        return (drive >= self.drives) & ~np.isin(drive % self.drives, list(self._left_out))

    def end_adoption(self, next_segment: int, seen: Iterable[tuple[int, int]]) -> None:
        """After `adopt`: oldest first again, no id is given out twice, `seen` segments without a use are retired."""
        unused = (place for place in set(seen) if place[1] not in self._by_drive[place[0]])
        self.retired += sorted(place for place in unused if place[0] not in self._left_out)
        self._by_drive = [dict(sorted(segments.items())) for segments in self._by_drive]
        self._next_segment = max(self._next_segment, next_segment)

    def drop_all(self, still_busy: Iterable[Extent]) -> ExtentAllocator:
        """A new allocator after a cache reset: every segment retired, now or when its last job ends."""
        fresh = ExtentAllocator(len(self._by_drive), self.segments_max, self._records, self._next_segment)
        fresh._paused_until, fresh._left_out = self._paused_until, self._left_out
        fresh._reads_paused_until = self._reads_paused_until
        busy = {(extent.drive, extent.segment) for extent in still_busy}
        for segments in self._by_drive:
            for segment in segments.values():
                if (segment.drive, segment.id) in busy:
                    segment.rows[:] = -1
                    segment.used = len(segment.rows)
                    segment.orphan = True
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
