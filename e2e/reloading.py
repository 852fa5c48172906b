"""What the reload tests share: prompts, a server with our connector, and proof of which tier was read."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from models import VOCAB
from saria_vllm.cli.replay_drive import parse_counters
from saria_vllm.storage.format import (
    HEADER_BYTES,
    Entry,
    Header,
    index_offset,
    parse_header,
    parse_index,
    parse_journal,
)
from server import Answer, Server, ServerDied

HERE = Path(__file__).parent


def python_path() -> str:
    """For servers that use a connector of this folder."""
    return os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))


@dataclass(frozen=True)
class Kind:
    """A model and how to serve it."""

    model: str
    chunk_tokens: int
    prefix_chunks: int
    dram_capacity: str
    """Holds two prompts, not three."""
    launcher: tuple[str, ...] = ("-m", "vllm.entrypoints.cli.main")
    arguments: tuple[str, ...] = ()
    compare_with_local_hit: bool = False
    """Whether the right answer is that of a local prefix hit rather than of a cold run (MLA: other kernels)."""


KINDS = {
    "llama": Kind("llama-small", 128, 5, "6MiB"),
    "mla": Kind(
        "deepseek-v2",
        64,
        10,
        "16MiB",
        launcher=(str(HERE / "serve_prefix_caching.py"),),
        arguments=("--enable-prefix-caching",),
        compare_with_local_hit=True,
    ),
}


def make_prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(tokens)]


def connector(extra: Mapping[str, Any], policy: str = "recompute") -> dict[str, Any]:
    """A `--kv-transfer-config` with our connector."""
    return {
        "kv_connector": "SariaConnector",
        "kv_connector_module_path": "saria_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": dict(extra),
    }


def counters(server: Server) -> dict[str, float]:
    """Our counters once they stand still: the last step's arrive a moment after the answer."""
    last: dict[str, float] = {}
    for _ in range(50):
        now = parse_counters(server.metrics())
        if now == last:
            break
        last = now
        time.sleep(0.2)
    return last


Right = tuple[tuple[int, ...], tuple[float, ...]]


def said(answer: Answer) -> Right:
    """Tokens and their log-probabilities, to the last bit: in tokens alone random models hardly notice wrong KV."""
    return tuple(answer.token_ids), tuple(answer.logprobs)


@dataclass
class Reload:
    answer: Answer
    moved: dict[str, float] = field(default_factory=dict)
    """Counter differences over the request."""

    def bytes_from(self, tier: str) -> float:
        return self.moved.get(f'load_bytes{{tier="{tier}"}}', 0.0)

    def errors(self, reason: str) -> float:
        return self.moved.get(f'errors{{reason="{reason}"}}', 0.0)


def reload(server: Server, prompt: Sequence[int], max_tokens: int = 16) -> Reload:
    """Ask with an HBM that has forgotten everything, and tell what the tiers did."""
    server.reset_prefix_cache()
    before = counters(server)
    answer = server.complete(prompt, max_tokens)
    after = counters(server)
    return Reload(answer, {name: value - before.get(name, 0.0) for name, value in after.items()})


def data_files(ssd: Path) -> list[Path]:
    return sorted(ssd.rglob("seg-*.data"))


Record = tuple[Path, Header, Entry]
"""A chunk as one rank has it: the segment's file, its header, its entry."""


def records(ssd: Path) -> dict[bytes, Record]:
    """What lies in the segments below a directory, by chunk key."""
    found: dict[bytes, Record] = {}
    for path in data_files(ssd):
        data = path.read_bytes()
        header = parse_header(data[:HEADER_BYTES])
        journal = path.with_suffix(".journal")
        # A segment that is still open has no index, and one that is sealed no journal.
        entries = parse_journal(journal.read_bytes(), header) if journal.exists() else []
        entries = entries or parse_index(data[index_offset(header) :], header)
        found.update({entry.key: (path, header, entry) for entry in entries})
    return found


def whole_prefixes(found: Mapping[bytes, Record], chunks: int) -> list[list[Record]]:
    """Prefixes of so many chunks that nothing follows, each from its first chunk."""
    prefixes = []
    parents = {entry.parent for _, _, entry in found.values()}
    for key in found.keys() - parents:
        keys = [key]
        while (parent := found[keys[0]][2].parent) in found:
            keys.insert(0, parent)
        if len(keys) == chunks and not parent:
            prefixes.append([found[key] for key in keys])
    return prefixes


def flip_a_bit(file: BinaryIO, offset: int) -> None:
    file.seek(offset)
    byte = file.read(1)
    file.seek(offset)
    file.write(bytes([byte[0] ^ 1]))


def disk_bytes(folder: Path) -> int:
    """Bytes on disk of everything in a folder, as du(1) counts them."""
    total = 0
    for path in [folder, *folder.rglob("*")]:
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            pass  # It went while we looked.
    return total


@contextmanager
def watched(folder: Path, every_s: float = 0.05) -> Iterator[list[int]]:
    """Samples of `disk_bytes` while the block runs."""
    samples: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(every_s):
            samples.append(disk_bytes(folder))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def pool_bytes(server: Server) -> int:
    """Memory that a server's DRAM pools take, over all its processes."""
    pools = {}
    for descriptor in itertools.chain.from_iterable(Path(f"/proc/{pid}/fd").iterdir() for pid in server.pids()):
        if os.readlink(descriptor).startswith("/dev/shm/saria-pool-"):
            pools[descriptor.stat().st_ino] = descriptor.stat().st_blocks * 512
    return sum(pools.values())


@contextmanager
def killed_while_asked(server: Server, prompts: Iterator[Sequence[int]], threads: int = 2) -> Iterator[None]:
    """Ask prompt after prompt while the block runs, and `kill -9` at its end, in the middle of them."""
    stop, lock = threading.Event(), threading.Lock()

    def ask() -> None:
        while not stop.is_set():
            with lock:
                prompt = next(prompts)
            try:
                server.complete(prompt, 1)
            except ServerDied:
                return

    asking = [threading.Thread(target=ask) for _ in range(threads)]
    for thread in asking:
        thread.start()
    try:
        yield
    finally:
        server.kill()
        stop.set()
        for thread in asking:
            thread.join()
