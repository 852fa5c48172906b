"""A hand-cranked double of the worker half and the model: bytes are marks, and a test ends transfers one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from content import POISON, Content, Truth
from saria_connector.metadata import SariaMetadata, SariaWorkerMetadata
from saria_vllm.types import (
    NULL_BLOCK,
    Extent,
    FoundChunk,
    FoundChunks,
    JobResult,
    LoadJob,
    Moved,
    OpenedSsd,
    OpenSsd,
    PersistJob,
    Slot,
    StoreJob,
)


class Flight:
    """A job that this double has begun and not ended."""

    def __init__(self, job: Any, ranks: int, generation: int, content: list[Any]) -> None:
        self.job, self.generation, self.content = job, generation, content
        self.ranks_left = set(range(ranks))
        self.failed: set[int] = set()


class Step:
    """One scheduled step on its way through the worker."""

    def __init__(
        self, output: Any, metadata: SariaMetadata, tables: dict[str, list[int]], known: dict[str, int]
    ) -> None:
        self.output, self.metadata, self.tables, self.known = output, metadata, tables, known


class Worker:
    """See the module's text. `auto_*`: transfers of that kind end in the step that begins them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.block_tokens: int = engine.block_tokens
        self.ranks = 1
        self.auto_loads = self.auto_stores = self.auto_promotions = self.auto_persists = self.auto_open = True
        self.hbm: dict[int, list[int]] = {}
        self.dram: dict[tuple[int, Slot], Content] = {}
        self.ssd: dict[Extent, Content] = {}
        self.loads: dict[str, Flight] = {}
        self.stores: dict[int, Flight] = {}
        """Promotions too."""
        self.persists: dict[int, Flight] = {}
        self.generation = 0
        self.opened: OpenSsd | None = None
        self.computed: dict[str, int] = {}
        """Positions whose KV is right, by request."""
        self.known: dict[str, int] = {}
        """Tokens of a request that exist, delivered to the scheduler or not."""
        self.right_drafts: list[int] = []
        """How many drafts of each coming verification are right; all wrong when it has run out."""
        self.fail_items: set[bytes] = set()
        """Keys whose loads fail when they end by themselves."""
        self.reads: dict[bytes, int] = {}
        """Read attempts by key."""
        self.log: list[tuple[str, Any]] = []
        """What was begun: ("load", job), ("refused", job), ("store", job), ("promote", job), ("persist", job)."""
        self.other_received: set[str] = set()
        """Loads of another connector to report as ended."""
        self._results: list[JobResult] = []
        self._reports: list[OpenedSsd] = []
        self.ingress_bytes_s = 0.0
        self.read_bytes_s: tuple[float, ...] = ()
        """By drive, as measured when the tier opens."""
        self.moved: list[Moved] = []
        """To be reported with the next results."""
        self.token_s = 0.0
        """What a token of a prefill takes, without attention; 0: prefills are not timed."""
        self._prefills: list[tuple[int, int, float]] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()

    # One step.

    def execute(self, step: Step) -> ModelRunnerOutput:
        self._start(step.metadata)
        request_ids = list(step.output.num_scheduled_tokens)
        tokens = [self._forward(step, request_id) for request_id in request_ids]
        for request_id in request_ids:
            # Blocks are in HBM's prefix cache from the step on that computes them: a request of the same step may hit.
            self.engine.confirm(request_id, min(self.computed[request_id], step.known[request_id]))
        self._begin_stores(step.metadata)
        if (prefill := step.metadata.prefill) is not None and self.token_s:
            self._prefills.append((*prefill, prefill.tokens * self.token_s))
        self.check()
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: number for number, request_id in enumerate(request_ids)},
            sampled_token_ids=tokens,
            kv_connector_output=self._report(),
        )

    def _forward(self, step: Step, request_id: str) -> list[int]:
        output = step.output
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= {
            resumed: cached.num_computed_tokens[cached.req_ids.index(resumed)] for resumed in cached.resumed_req_ids
        }
        if request_id in starts:
            self.computed[request_id], self.known[request_id] = starts[request_id], step.known[request_id]
        truth: Truth = self.engine.truth(request_id)
        table, start = step.tables[request_id], self.computed[request_id]
        count = output.num_scheduled_tokens[request_id]
        drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
        self._check_prefix(table, truth, start)
        end = start + count - len(drafts)
        for position in range(start, end):
            self._write(table, position, truth.slice(position, position + 1)[0])
        self.computed[request_id] = end
        if end < self.known[request_id]:
            assert not drafts
            return []
        assert end == self.known[request_id], (request_id, end, self.known[request_id])
        right = self._verify(table, truth, end, drafts)
        self.computed[request_id] += right
        self.known[request_id] += right + 1
        return [truth.token(position) for position in range(end, end + right + 1)]

    def _verify(self, table: list[int], truth: Truth, end: int, drafts: list[int]) -> int:
        """Write the drafts' KV, right or not; how many are right. Placeholders stand for drafts only we know."""
        if not drafts:
            return 0
        wanted = self.right_drafts.pop(0) if self.right_drafts else 0
        known = any(draft != -1 for draft in drafts)
        given = drafts if known else self.drafts(truth, end, len(drafts), wanted)
        right, before = 0, truth.slice(end - 1, end)[0]
        for number, draft in enumerate(given):
            before = truth.mark_after(end + number, draft, before)
            self._write(table, end + number, before)
            if right == number and draft == truth.token(end + number):
                right += 1
        return right

    @staticmethod
    def drafts(truth: Truth, first: int, count: int, right: int) -> list[int]:
        return [truth.token(first + i) if i < right else truth.token(first + i) + 1 for i in range(count)]

    def _write(self, table: list[int], position: int, mark: int) -> None:
        block = table[position // self.block_tokens]
        assert self.engine.pool.blocks[block].ref_cnt > 0, f"the forward writes to free block {block}"
        readers = [flight for flight in self.stores.values() if block in _blocks(flight.job)]
        assert not readers, f"the forward writes to block {block} while a store reads it"
        self.hbm.setdefault(block, [POISON] * self.block_tokens)[position % self.block_tokens] = mark

    def _check_prefix(self, table: list[int], truth: Truth, end: int) -> None:
        """Attention reads the right bytes."""
        for number in range(-(-end // self.block_tokens)):
            first, last = number * self.block_tokens, min(end, (number + 1) * self.block_tokens)
            found = self.hbm[table[number]][: last - first]
            assert found == truth.slice(first, last), f"attention reads foreign KV in block {table[number]}"

    # Beginning jobs.

    def _start(self, metadata: SariaMetadata) -> None:
        """Before the forward."""
        self.generation = metadata.generation
        if metadata.open_ssd is not None:
            assert self.opened is None and metadata.open_ssd.generation == metadata.generation
            self.opened = metadata.open_ssd
            if self.auto_open:
                self.end_open([])
        for drive, segment in metadata.retired:
            self._retire(drive, segment)
        for load in metadata.loads:
            self._begin_load(load)
        for load in metadata.refused:
            self.log.append(("refused", load))
            self._received.add(load.request_id)
            self._failed.add(load.request_id)
            self._results += [JobResult(load.job_id, tuple(range(load.chunks or 1)), "stale")] * self.ranks
        for persist in metadata.persists:
            self._begin_persist(persist)

    def _begin_stores(self, metadata: SariaMetadata) -> None:
        """After the forward."""
        for store in metadata.stores:
            self._begin_store("store", store, self.auto_stores)
        for promotion in metadata.promotions:
            self._begin_store("promote", promotion, self.auto_promotions)

    def _retire(self, drive: int, segment: int) -> None:
        used = [item.extent for flight in self.loads.values() for item in flight.job.items]
        used += [item.extent for flight in self.persists.values() for item in flight.job.items]
        assert not any(extent and extent[:2] == (drive, segment) for extent in used), "a segment in use is retired"
        self.ssd = {extent: content for extent, content in self.ssd.items() if extent[:2] != (drive, segment)}

    def source(self, item: Any) -> Content:
        return self.dram[item.group, item.slot] if item.slot is not None else self.ssd[item.extent]

    def _begin_load(self, job: LoadJob) -> None:
        self.log.append(("load", job))
        assert job.request_id not in self.loads, "two loads of one request at a time"
        contents = [self.source(item) for item in job.items]
        for item, content in zip(job.items, contents, strict=True):
            self.reads[item.key] = self.reads.get(item.key, 0) + 1
            assert content.marks == self.engine.marks_of(item.key), "a load of another key's bytes"
            assert content.generation == self.generation, "a load of bytes from before a reset"
            assert any(block != NULL_BLOCK for block in item.blocks)
        for block in _blocks(job):
            self.hbm[block] = [POISON] * self.block_tokens
        self.loads[job.request_id] = Flight(job, self.ranks, self.generation, contents)
        if self.auto_loads:
            bad = [i for i, item in enumerate(job.items) if item.key in self.fail_items]
            self.end_load(job.request_id, failed=bad)

    def _begin_store(self, kind: str, job: StoreJob, ends: bool) -> None:
        self.log.append((kind, job))
        contents = []
        for item in job.items:
            marks = tuple(mark for block in item.blocks for mark in self.hbm[block])
            key = self.engine.key_in_slot(job.job_id, item.group, item.slot)
            if key is not None:
                assert marks == self.engine.marks_of(key), "a store reads bytes that are not its key's"
                assert marks[-1] in self.engine.confirmed, "a store of tokens that are not confirmed"
            contents.append(marks)
        self.stores[job.job_id] = Flight(job, self.ranks, self.generation, contents)
        if ends:
            self.end_store(job.job_id)

    def _begin_persist(self, job: PersistJob) -> None:
        self.log.append(("persist", job))
        contents = [self.dram[item.group, item.slot] for item in job.items]
        for item, content in zip(job.items, contents, strict=True):
            assert content.marks == self.engine.marks_of(item.key), "a persist of another key's bytes"
            assert item.extent.drive == job.drive
            self.ssd.pop(item.extent, None)
        self.persists[job.job_id] = Flight(job, self.ranks, self.generation, contents)
        if self.auto_persists:
            self.end_persist(job.job_id)

    # Ending jobs, by hand.

    def _end_rank(self, flight: Flight, rank: int | None, failed: Iterable[int], reason: str) -> bool:
        failed = tuple(failed)
        for ended in sorted(flight.ranks_left) if rank is None else [rank]:
            flight.ranks_left.remove(ended)
            self._results.append(JobResult(flight.job.job_id, failed, reason if failed else ""))
        flight.failed.update(failed)
        return not flight.ranks_left

    def end_load(self, request_id: str, failed: Iterable[int] = (), rank: int | None = None) -> None:
        """End a request's load on one rank or all. Its bytes are moved at this moment."""
        flight = self.loads[request_id]
        self._check_load(flight)
        if flight.generation != self.generation:
            failed = range(len(flight.job.items))
        if not self._end_rank(flight, rank, failed, "checksum"):
            return
        del self.loads[request_id]
        for position, item in enumerate(flight.job.items):
            if position not in flight.failed:
                content = self.source(item)
                assert content == flight.content[position], "a source changed under a load"
                for number, block in enumerate(item.blocks):
                    if block != NULL_BLOCK:
                        first = number * self.block_tokens
                        self.hbm[block] = list(content.marks[first : first + self.block_tokens])
        self._received.add(request_id)
        if flight.failed:
            self._failed.add(request_id)

    def end_store(self, job_id: int, failed: bool = False, rank: int | None = None, reason: str = "other") -> None:
        flight = self.stores[job_id]
        self._check_store(flight)
        if self._end_rank(flight, rank, range(len(flight.job.items)) if failed else (), reason):
            del self.stores[job_id]
        for item, marks in zip(flight.job.items, flight.content, strict=True):
            self.dram[item.group, item.slot] = Content(marks, flight.generation)

    def end_persist(
        self, job_id: int, failed: Iterable[int] = (), rank: int | None = None, reason: str = "write_failed"
    ) -> None:
        flight = self.persists[job_id]
        items = flight.job.items
        for item, content in zip(items, flight.content, strict=True):
            assert self.dram[item.group, item.slot] == content, "a slot changed under a persist"
        if self._end_rank(flight, rank, failed, reason):
            del self.persists[job_id]
            for position, item in enumerate(items):
                if position not in flight.failed:
                    self.ssd[item.extent] = flight.content[position]

    def end_open(self, found: list[FoundChunk], next_segment: int = 0, problem: str = "", ranks: int = 0) -> None:
        self._reports += [
            OpenedSsd(FoundChunks.of(found), next_segment, (True,) * 8, "", problem, self.read_bytes_s)
            for _ in range(ranks or self.ranks)
        ]

    def end_all(self) -> None:
        for request_id in list(self.loads):
            self.end_load(request_id)
        for job_id in list(self.stores):
            self.end_store(job_id)
        for job_id in list(self.persists):
            self.end_persist(job_id)

    def _report(self) -> KVConnectorOutput:
        metadata = None
        if self._results or self._reports or self._prefills:
            rates = self.moved, self.ingress_bytes_s, self._prefills
            metadata = self.engine.wrap(SariaWorkerMetadata(self._results, self._reports, *rates))
            self.moved, self._prefills = [], []
        output = KVConnectorOutput(
            finished_recving=(self._received | self.other_received) or None,
            failed_recving=self._failed,
            kv_connector_worker_meta=metadata,
        )
        self._results, self._reports, self._received, self._failed = [], [], set(), set()
        self.other_received = set()
        return output

    # Every step.

    def check(self) -> None:
        for flight in self.loads.values():
            self._check_load(flight)
        for flight in self.stores.values():
            self._check_store(flight)

    def _check_load(self, flight: Flight) -> None:
        table = self.engine.table(flight.job.request_id)
        for block in _blocks(flight.job):
            assert self.engine.pool.blocks[block].ref_cnt == 1, "a load writes to a block that is free or shared"
            assert block in table, "a load writes to a block that is not its request's"

    def _check_store(self, flight: Flight) -> None:
        for item, marks in zip(flight.job.items, flight.content, strict=True):
            found = tuple(mark for block in item.blocks for mark in self.hbm[block])
            assert found == marks, "bytes changed under a store"
            for block in item.blocks:
                assert self.engine.pool.blocks[block].ref_cnt > 0, "a store reads a free block"


def _blocks(job: LoadJob | StoreJob) -> list[int]:
    return [block for item in job.items for block in item.blocks if block != NULL_BLOCK]
