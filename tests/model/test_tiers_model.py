"""Hypothesis drives `Tiers` through every order of plans, rank results, failures and resets against a naive model.

The model is dicts and sets: which chunk is on which tier, and what bytes each slot and record of each rank hold. Bytes
are a `Content`: whose chunk they are, of which generation, and whether a bit has rotted. A job of the model moves
contents when it *runs* on a rank, at any time between its plan and its result, so a slot or record that is given to
somebody else too early shows up as a read of foreign content.
"""

from __future__ import annotations

import sys
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from flights import ADMISSIONS, EVICTIONS_MIN, TORN, Chunk, Content, Flight, Place, Plan
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.admission import make_admission
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.policy.tiers import Tiers
from saria_vllm.types import (
    Extent,
    FoundChunk,
    FoundChunks,
    GroupShape,
    JobResult,
    LoadJob,
    PersistJob,
    Slot,
    StoreJob,
    align_up,
)

PATHS = [
    [b"a0", b"a1", b"a2", b"a3", b"a4", b"a5"],
    [b"a0", b"a1", b"b2", b"b3", b"b4"],
    [b"a0", b"c1", b"c2"],
    [b"d0", b"d1", b"d2", b"d3"],
    [b"d0", b"e1", b"e2", b"e3", b"e4", b"e5", b"e6"],
]
"""Chunk keys of five requests that share prefixes."""
PARENT = {key: parent for path in PATHS for parent, key in zip([b"", *path], path, strict=False)}

DRIVES, SEGMENTS_MAX = 2, 2
CELLS, RECORDS = [4, 2], [3, 2]
"""Cells of a slab and records of a segment, by group."""

PICK = st.integers(0, 999)
"""Chooses one of as many as there are."""

SETTINGS = settings(max_examples=60, stateful_step_count=60, deadline=None)
"""A few seconds. To search longer: more examples."""


class TiersMachine(RuleBasedStateMachine):
    """Rules are what the connector and the workers do; the checks are the contract of `Tiers`."""

    groups = 1

    @initialize(
        ranks=st.sampled_from([1, 2]),
        slabs=st.integers(1, 3),
        headroom=st.integers(1, 4),
        admission=st.sampled_from(ADMISSIONS),
        persists_max=st.sampled_from([8, 1, 2]),
        ghosts_max=st.sampled_from([100, 1]),
        with_ssd=st.sampled_from([True, True, False]),
        second_chance=st.sampled_from([1.0, 0.3, 0.0]),
    )
    def build(
        self,
        ranks: int,
        slabs: int,
        headroom: int,
        admission: AdmissionConfig,
        persists_max: int,
        ghosts_max: int,
        with_ssd: bool,
        second_chance: float,
    ) -> None:
        slabs += self.groups - 1
        self.shapes = [GroupShape(g, 16, 1, (4096, 12288)[g]) for g in range(self.groups)]
        self.ranks, self.slabs, self.headroom = ranks, slabs, [headroom] * self.groups
        self.cells = CELLS[: self.groups]
        self.persist_bytes_max = persists_max * align_up(12288)
        self.ghosts_max = ghosts_max
        self.tiers = Tiers(
            self.shapes,
            SlotAllocator(slabs, self.cells),
            ExtentAllocator(DRIVES, SEGMENTS_MAX, RECORDS[: self.groups]) if with_ssd else None,
            make_admission(admission, 16),
            ghosts_max=ghosts_max,
            headroom=self.headroom,
            persist_bytes_max=self.persist_bytes_max,
            ranks=ranks,
            second_chance=second_chance,
        )
        self.evictions_min = EVICTIONS_MIN.get(admission.policy, admission.evictions)
        if admission.reuses or admission.policy in ("return", "score"):
            self.evictions_min = None
        self.evictions: Counter[Chunk] = Counter()
        """How often each was evicted."""
        self.second_chance, self.written_bytes = second_chance, 0
        self.granted: set[Chunk] = set()
        """Chunks on SSD with a second chance."""
        self.prefixes = {tuple(path): Prefix(path) for path in PATHS}
        self.now, self.generation = 0.0, 0
        self.flights: dict[int, Flight] = {}
        self.contents: list[dict[Place, Content]] = [{} for _ in range(ranks)]
        self.dram: dict[Chunk, tuple[str, Slot]] = {}
        """("busy" | "valid" | "bad", slot)."""
        self.ssd: dict[Chunk, tuple[str, Extent]] = {}
        """("busy" | "valid", extent)."""
        self.bad: set[Place] = set()
        """Places whose failure `Tiers` has been told."""
        self.segments_seen: set[tuple[int, int]] = set()
        self.retired: set[tuple[int, int]] = set()
        self.loose: set[Chunk] = set()
        """Chunks that were in DRAM while an ancestor was unknown: their order is repaired by the next touch."""

    # What the connector does.

    @rule(path=st.sampled_from(PATHS), first=st.sampled_from([0, 0, 1, 2, 3]), length=st.sampled_from([6, 3, 2, 1]))
    def store(self, path: list[bytes], first: int, length: int) -> None:
        end = min(first + length, len(path))
        wanted = [Chunk(g, path[i]) for g in range(self.groups) for i in range(first, end)]
        reused = path[: self.prefix(path).reused]
        expected = [
            c for c in wanted if c not in self.dram and (c not in self.ssd or c in self.granted or c.key not in reused)
        ]
        self.copy(self.tiers.plan_store, path, first, end, expected, [0] * self.groups)

    @rule(path=st.sampled_from(PATHS), first=st.sampled_from([0, 0, 1, 2]), length=st.sampled_from([6, 3, 2]))
    def promote(self, path: list[bytes], first: int, length: int) -> None:
        end = min(first + length, len(path))
        wanted = [Chunk(g, path[i]) for g in range(self.groups) for i in range(first, end)]
        expected = [chunk for chunk in wanted if chunk not in self.dram]
        self.copy(self.tiers.plan_promote, path, first, end, expected, self.headroom)

    def copy(
        self, plan: Plan, path: list[bytes], first: int, end: int, expected: list[Chunk], reserve: list[int]
    ) -> None:
        """Chunks go to DRAM as far as there is room beside a reserve."""
        if first >= end:
            return
        blocks = [1000 * g + np.arange(end - first, dtype=np.int32).reshape(-1, 1) for g in range(self.groups)]
        used = self.slots_in_use()
        job, went_on = plan(self.prefix(path), first, end, blocks, self.now)
        assert first <= went_on <= end
        planned = [Chunk(item.group, path[first + item.blocks[0] % 1000]) for item in job.items] if job else []
        assert planned == [chunk for chunk in expected if path.index(chunk.key) < went_on]
        for chunk, item in zip(planned, job.items if job else (), strict=True):
            place = (item.group, item.slot)
            assert place not in used, "a slot in use was handed out"
            used.add(place)
            self.bad.discard(place)
            self.dram[chunk] = ("busy", item.slot)
            for contents in self.contents:
                contents[place] = TORN
        if job is not None:
            self.flights[job.job_id] = Flight(job, self.generation, self.ranks, [chunk.key for chunk in planned])
            assert self.would_fit(reserve), "it took what stores need"
        if went_on < end:
            missing = [reserve[g] + expected.count(Chunk(g, path[went_on])) for g in range(self.groups)]
            assert not self.would_fit(missing), "it stopped although its next chunk fits"

    @rule(path=st.sampled_from(PATHS), first=st.sampled_from([0, 0, 1, 2]), length=st.sampled_from([6, 3, 2, 1]))
    def load(self, path: list[bytes], first: int, length: int) -> None:
        end = self.tiers.match(self.prefix(path), first, min(first + length, len(path)), self.now)
        if end <= first:
            return
        dram_tokens, ssd_tokens = self.tiers.tier_tokens(self.prefix(path), first, end)
        blocks = [1000 * g + np.arange(end - first, dtype=np.int32).reshape(-1, 1) for g in range(self.groups)]
        self.arrive(path, end)
        job = self.tiers.plan_load("request", self.prefix(path), first, end, blocks, self.now)
        assert [(item.group, item.key) for item in job.items] == [
            (g, key) for g in range(self.groups) for key in path[first:end]
        ]
        from_ssd = set()
        for item in job.items:
            chunk = Chunk(item.group, item.key)
            assert (item.slot is None) != (item.extent is None)
            if item.slot is not None:
                assert self.dram[chunk] == ("valid", item.slot)
            else:
                assert item.extent is not None
                assert self.ssd[chunk] == ("valid", item.extent)
                assert self.dram.get(chunk, ("none",))[0] != "valid", "DRAM is the faster tier"
                from_ssd.add(item.key)
            place = (item.group, item.slot or item.extent)
            assert place not in self.bad, "a bad place was offered again"
            for contents in self.contents:
                self.assert_holds(contents[place], chunk, self.generation)
        assert ssd_tokens == 16 * len(from_ssd)
        assert dram_tokens == 16 * (end - first - len(from_ssd))
        assert self.tiers.is_loading(self.prefix(path), first)
        self.flights[job.job_id] = Flight(job, self.generation, self.ranks)

    @rule(path=st.sampled_from(PATHS), reused=st.integers(0, 6))
    def arrive(self, path: list[bytes], reused: int) -> None:
        for group in range(self.groups):
            self.granted |= self.second_chances([Chunk(group, key) for key in path[:reused]])
        self.tiers.arrived(self.prefix(path), min(reused, len(path)), self.now)
        self.touched(path, len(path))

    @rule(seconds=st.sampled_from([0.0, 1.0, 20.0]), more=st.sampled_from([0, 0, 1, 3]))
    def make_room(self, seconds: float, more: int) -> None:
        self.now += seconds
        leased = {place for flight in self.flights.values() for place in flight.slots()}
        before = dict(self.dram)
        needed = not self.would_fit([coming + more for coming in self.coming()])
        refused = self.counted("dropped_chunks:not_admitted")
        persists = self.tiers.make_room(self.now, [more] * self.groups)
        self.check_admission(before, persists, self.counted("dropped_chunks:not_admitted") - refused)
        self.drain_retired()
        index = self.tiers.chunks.index
        for chunk, (state, slot) in before.items():
            row = index.rows[chunk.group].get(chunk.key)
            if row is None or not index.dram[row]:
                assert state == "valid"
                assert needed, "evicted without need"
                assert (chunk.group, slot) not in leased, "evicted under a job"
                del self.dram[chunk]
                self.granted.discard(chunk)
        for job in persists:
            for item in job.items:
                chunk, place = Chunk(item.group, item.key), (item.group, item.slot)
                assert before[chunk] == ("valid", item.slot)
                assert chunk in self.dram
                if chunk in self.ssd:
                    assert chunk in self.granted, "written twice"
                    assert self.ssd[chunk][0] == "valid"
                self.granted.discard(chunk)
                self.written_bytes += self.written(chunk)
                assert place not in self.bad, "a bad slot was persisted"
                assert item.parent == PARENT[item.key]
                assert item.extent.drive == job.drive, "a drive that hangs would hold up another"
                assert item.extent[:2] not in self.retired
                self.segments_seen.add(item.extent[:2])
                assert (item.group, item.extent) not in self.contents[0], "a record was handed out twice"
                self.ssd[chunk] = ("busy", item.extent)
                for contents in self.contents:
                    self.assert_holds(contents[place], chunk, self.generation)
                    contents[item.group, item.extent] = TORN
            self.flights[job.job_id] = Flight(job, self.generation, self.ranks)
        if not self.would_fit(coming := self.coming()):
            short = [g for g, more in enumerate(coming) if self.tiers.chunks.slots.free_in_own_slabs(g) < more]
            waiting = any(isinstance(flight.job, PersistJob) for flight in self.flights.values()) and self.would_fit(
                [-(-wanted // 2) for wanted in self.headroom]
            )
            assert waiting or not any(self.tiers.chunks.recency[g].oldest(1).size for g in short), "stopped too early"

    @precondition(lambda self: self.tiers.chunks.extents is None)
    @rule(chunks=st.lists(st.tuples(st.sampled_from(sorted(PARENT)), st.integers(0, 1)), max_size=8))
    def adopt(self, chunks: list[tuple[bytes, int]]) -> None:
        """Open the SSD tier on a directory with found chunks; some do not fit this configuration."""
        records, found, places = RECORDS[: self.groups], [], set()
        for number, (key, group) in enumerate(chunks):
            extent = Extent(number % DRIVES, 10 + (number // 4) * 2 + group, number % 4)
            found.append(FoundChunk(group, key, PARENT[key], extent))
            chunk = Chunk(group, key)
            if group >= self.groups or extent.record >= records[group] or chunk in self.ssd or extent in places:
                continue
            places.add(extent)
            self.ssd[chunk] = ("valid", extent)
            self.segments_seen.add((extent.drive, extent.segment))
            for contents in self.contents:
                contents[group, extent] = Content(group, key, self.generation)
        self.tiers.open_ssd(ExtentAllocator(DRIVES, SEGMENTS_MAX, records), FoundChunks.of(found), 20)

    @precondition(lambda self: self.generation < 2)
    @rule(luck=st.integers(0, 3))
    def sometimes_reset(self, luck: int) -> None:
        if luck == 3:
            self.reset()

    def reset(self) -> None:
        self.tiers.reset()
        self.generation += 1
        self.dram.clear()
        self.ssd.clear()
        self.granted.clear()
        self.loose.clear()
        self.evictions.clear()
        self.drain_retired()

    # What the workers and the hardware do.

    @precondition(lambda self: self.flights)
    @rule(job=PICK, rank=st.integers(0, 1), failing=st.sampled_from([(), (), (), (0,), (1, 2), (3,)]))
    def run_rank(self, job: int, rank: int, failing: tuple[int, ...]) -> None:
        """Any rank runs any job, and any item of it may fail."""
        flights = list(self.flights.values())
        flight = flights[job % len(flights)]
        rank = flight.ranks_left[rank % len(flight.ranks_left)]
        self.run_on(flight, rank, {position for position in failing if position < flight.job.chunks})

    @precondition(lambda self: self.flights)
    @rule(kind=st.sampled_from([StoreJob, PersistJob, LoadJob, object]))
    def run_all(self, kind: type) -> None:
        """Every job of a kind ends, and well unless it reads what has rotted."""
        for flight in list(self.flights.values()):
            if isinstance(flight.job, kind):
                for rank in list(flight.ranks_left):
                    self.run_on(flight, rank, set())

    @precondition(lambda self: any(self.contents))
    @rule(rank=st.integers(0, 1), place=PICK)
    def rot(self, rank: int, place: int) -> None:
        """A bit flips somewhere: who reads it must fail, and then never be sent there again."""
        contents = self.contents[rank % self.ranks]
        if contents:
            places = list(contents)
            rotten = places[place % len(places)]
            contents[rotten] = contents[rotten]._replace(sound=False)

    def run_on(self, flight: Flight, rank: int, failed: set[int]) -> None:
        job, contents = flight.job, self.contents[rank]
        if isinstance(job, StoreJob):
            for position, (group, slot) in enumerate(flight.slots()):
                assert contents[group, slot][:3] == TORN[:3], "somebody else wrote here"
                if position not in failed:
                    key = flight.store_keys[position]
                    contents[group, slot] = Content(group, key, flight.generation)
        elif isinstance(job, LoadJob):
            for position, item in enumerate(job.items):
                content = contents[item.group, item.slot or item.extent]
                self.assert_holds(content, Chunk(item.group, item.key), flight.generation)
                if not content.sound:
                    failed.add(position)
        else:
            for position, write in enumerate(job.items):
                content = contents[write.group, write.slot]
                self.assert_holds(content, Chunk(write.group, write.key), flight.generation)
                if position not in failed:
                    contents[write.group, write.extent] = content
        flight.ranks_left.remove(rank)
        flight.failed |= failed
        result = JobResult(job.job_id, tuple(sorted(failed)), "checksum" if failed else "")
        ended = self.tiers.finished([result], self.now) == 1
        assert ended == (not flight.ranks_left)
        if ended:
            del self.flights[job.job_id]
            self.ended(flight)
        self.drain_retired()

    def ended(self, flight: Flight) -> None:
        """The naive meaning of a job's end."""
        job, stale = flight.job, flight.generation != self.generation
        if isinstance(job, StoreJob):
            for key, (group, slot) in zip(flight.store_keys, flight.slots(), strict=True):
                if not stale and flight.failed:
                    del self.dram[Chunk(group, key)]
                elif not stale:
                    self.dram[Chunk(group, key)] = ("valid", slot)
        elif isinstance(job, LoadJob):
            for position in flight.failed:
                item = job.items[position]
                chunk = Chunk(item.group, item.key)
                self.bad.add((item.group, item.slot or item.extent))
                if stale:
                    continue
                if item.slot is not None:
                    self.dram[chunk] = ("bad", item.slot)
                elif self.ssd.get(chunk) == ("valid", item.extent):
                    del self.ssd[chunk]
                    self.granted.discard(chunk)
            if not stale:
                for item in job.items:
                    self.free_bad(Chunk(item.group, item.key))
        elif not stale:
            for position, write in enumerate(job.items):
                chunk = Chunk(write.group, write.key)
                evicting = self.evicted_meanwhile(chunk, write.slot)
                if position in flight.failed or self.dram[chunk][0] == "bad":
                    del self.ssd[chunk]
                    if position not in flight.failed:
                        self.bad.add((write.group, write.extent))
                else:
                    self.ssd[chunk] = ("valid", write.extent)
                if evicting:
                    del self.dram[chunk]
                self.free_bad(chunk)

    def evicted_meanwhile(self, chunk: Chunk, slot: Slot) -> bool:
        """An eviction that waited for this write frees the slot now; a load since then would have stopped it."""
        assert self.dram[chunk][1] == slot
        row = self.tiers.chunks.index.rows[chunk.group].get(chunk.key)
        gone = row is None or not self.tiers.chunks.index.dram[row]
        if gone and self.dram[chunk][0] == "valid":
            assert (chunk.group, slot) not in self.slots_of_flights()
            return True
        return False

    def free_bad(self, chunk: Chunk) -> None:
        """A bad DRAM copy goes when no load of the chunk and no write of it is in flight."""
        if self.dram.get(chunk, ("",))[0] != "bad" or self.ssd.get(chunk, ("",))[0] == "busy":
            return
        for flight in self.flights.values():
            current_load = flight.generation == self.generation and isinstance(flight.job, LoadJob)
            if current_load and any((item.group, item.key) == chunk for item in flight.job.items):
                return
        del self.dram[chunk]

    # Helpers.

    def prefix(self, path: list[bytes]) -> Prefix:
        """The same object all the time: what it remembers must never mislead."""
        return self.prefixes[tuple(path)]

    def assert_holds(self, content: Content, chunk: Chunk, generation: int) -> None:
        assert content[:3] == (chunk.group, chunk.key, generation), f"{chunk} would read {content}"

    def slots_of_flights(self) -> set[tuple[int, Slot]]:
        return {place for flight in self.flights.values() for place in flight.slots()}

    def slots_in_use(self) -> set[tuple[int, Slot]]:
        return self.slots_of_flights() | {(chunk.group, slot) for chunk, (_, slot) in self.dram.items()}

    def coming(self) -> list[int]:
        """Slots that the headroom still misses, by group, when what is being evicted is gone."""
        index = self.tiers.chunks.index
        evicting = [sum(int(index.evicting[row]) for row in rows.values()) for rows in index.rows]
        return [wanted - coming for wanted, coming in zip(self.headroom, evicting, strict=True)]

    def would_fit(self, wanted: list[int]) -> bool:
        """Whether that many more slots could be taken at once, counted from the slots in use."""
        used = self.slots_in_use()
        slabs: dict[int, int] = {}
        for group, slot in used:
            assert slabs.setdefault(slot.slab, group) == group, "a slab in two groups"
        empty = self.slabs - len(slabs)
        for group, more in enumerate(wanted):
            own = sum(owner == group for owner in slabs.values()) * self.cells[group]
            missing = more - (own - sum(g == group for g, _ in used))
            empty -= max(0, -(-missing // self.cells[group]))
        return empty >= 0

    def drain_retired(self) -> None:
        if self.tiers.chunks.extents is None:
            return
        busy = {(e.drive, e.segment) for flight in self.flights.values() for e in flight.extents()}
        for segment in self.tiers.chunks.extents.retired:
            assert segment not in self.retired, "retired twice"
            assert segment not in busy, "retired while busy"
            self.retired.add(segment)
            for chunk, (state, extent) in list(self.ssd.items()):
                if (extent.drive, extent.segment) == segment:
                    assert state == "valid"
                    del self.ssd[chunk]
                    self.granted.discard(chunk)
        self.tiers.chunks.extents.retired.clear()

    def check_admission(self, before: dict[Chunk, tuple[str, Slot]], persists: list[PersistJob], refused: int) -> None:
        """What leaves DRAM is written, or refused, by how often it was evicted."""
        index, least = self.tiers.chunks.index, self.evictions_min
        rows = {chunk: index.rows[chunk.group].get(chunk.key) for chunk in before}
        gone = [chunk for chunk, row in rows.items() if row is None or not index.dram[row]]
        written = {Chunk(item.group, item.key) for job in persists for item in job.items}
        if least is not None:
            assert all(self.evictions[chunk] + 1 >= least for chunk in written), "written too early"
            if self.ghosts_max >= len(PARENT) * self.groups:
                early = [c for c in gone if c not in self.ssd and self.evictions[c] + 1 < least]
                assert refused == len(early), "refused on an eviction that should write, or the other way round"
        self.evictions.update([*gone, *written])

    def counted(self, name: str) -> int:
        return self.tiers.chunks.counts.get(name, 0)

    def again_bytes(self) -> int:
        return self.counted("second_chance_bytes")

    def second_chances(self, chunks: list[Chunk]) -> set[Chunk]:
        """Which of these, of one group, get one: they go soon with their segments, and it is within the bound."""
        share, again = self.second_chance, self.again_bytes() + sum(map(self.written, self.granted))
        left = int((self.written_bytes - self.again_bytes()) * share) - again
        mine = [c for c in chunks if self.ssd.get(c, ("",))[0] == "valid" and c not in self.granted]
        mine = [chunk for chunk in mine if self.goes_soon(self.ssd[chunk][1])]
        return set(mine[: max(0, left // self.written(mine[0]))] if mine else ())

    def written(self, chunk: Chunk) -> int:
        """Bytes that a write of it is on all ranks."""
        return self.ranks * self.shapes[chunk.group].record_bytes

    def goes_soon(self, extent: Extent) -> bool:
        """Whether the drive is full and at most a quarter of its segments is older."""
        mine = sorted(segment for drive, segment in self.segments_seen - self.retired if drive == extent.drive)
        return len(mine) >= SEGMENTS_MAX and mine.index(extent.segment) < -(-len(mine) // 4)

    def touched(self, path: list[bytes], end: int) -> None:
        self.loose -= {Chunk(g, key) for g in range(self.groups) for key in path[:end]}

    # Checks after every step.

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "tiers"):
            return
        tiers, index = self.tiers, self.tiers.chunks.index
        tiers.check()
        for path in PATHS:
            offered = 0
            while offered < len(path) and all(self.loadable(Chunk(g, path[offered])) for g in range(self.groups)):
                offered += 1
            assert tiers.match(self.prefix(path), 0, len(path), self.now) == offered
        for group, rows in enumerate(index.rows):
            known = {key for key, row in rows.items() if index.dram[row] or index.ssd[row]}
            assert known == {c.key for c in [*self.dram, *self.ssd] if c.group == group}
            assert {key for key, row in rows.items() if index.again[row]} == {
                c.key for c in self.granted if c.group == group
            }
        assert sum(tiers.chunks.slots.used) == len(self.slots_in_use())
        assert len(tiers.chunks.ghosts) <= self.ghosts_max
        assert self.again_bytes() <= self.second_chance * (self.written_bytes - self.again_bytes())
        for drive in range(DRIVES):
            writing = [
                self.shapes[flight.job.group].record_bytes
                for flight in self.flights.values()
                if isinstance(flight.job, PersistJob) and flight.job.drive == drive
                for _ in flight.job.items
            ]
            assert sum(writing) <= max(self.persist_bytes_max // DRIVES, *writing, 0)
        if tiers.chunks.extents is not None:
            assert tiers.chunks.extents.segments() <= DRIVES * SEGMENTS_MAX + 4
        self.check_children_before_parents()

    def loadable(self, chunk: Chunk) -> bool:
        return self.dram.get(chunk, ("",))[0] == "valid" or self.ssd.get(chunk, ("",))[0] == "valid"

    def check_children_before_parents(self) -> None:
        """No listed chunk is older than a listed descendant, as long as its whole prefix was always known."""
        index = self.tiers.chunks.index
        for group, rows in enumerate(index.rows):
            age = {index.key[row]: place for place, row in enumerate(self.tiers.chunks.recency[group].order())}
            for key in sorted(rows, key=lambda key: key[1:]):
                above = PARENT[key]
                while above and above in rows:
                    above = PARENT[above]
                if above or Chunk(group, PARENT[key]) in self.loose:
                    self.loose.add(Chunk(group, key))
            self.loose = {chunk for chunk in self.loose if chunk.group != group or chunk.key in rows}
            for key, place in age.items():
                above = PARENT[key]
                while above and Chunk(group, key) not in self.loose:
                    assert above not in age or age[above] > place, f"{above!r} would be evicted before {key!r}"
                    above = PARENT[above]

    def teardown(self) -> None:
        """Let everything in flight end, forget everything: every slot and segment is free, each freed once."""
        if not hasattr(self, "tiers") or sys.exc_info()[0] is not None:
            return
        self.reset()
        self.check()
        for flight in list(self.flights.values()):
            for rank in list(flight.ranks_left):
                self.run_on(flight, rank, set())
        tiers = self.tiers
        tiers.check()
        assert tiers.chunks.slots.used == [0] * self.groups
        assert [tiers.chunks.slots.free(g) for g in range(self.groups)] == [self.slabs * cells for cells in self.cells]
        assert len(tiers.chunks.index) == len(tiers.chunks.ghosts) == len(tiers.jobs.live) == 0
        if tiers.chunks.extents is not None:
            assert tiers.chunks.extents.segments() == 0
            assert self.segments_seen <= self.retired


class TwoGroupsMachine(TiersMachine):
    """Two groups of different size share the slabs; every chunk needs both."""

    groups = 2


@pytest.mark.parametrize("machine", [TiersMachine, TwoGroupsMachine])
def test_tiers_against_the_naive_model(machine: type[TiersMachine]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)
