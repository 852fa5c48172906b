"""Reopening an SSD tier after a restart: from the first look at the drives to an index that can be asked.

    python e2e/bench_recovery.py [--directory out] [--chunks 1000000] [--drives 2] [--open 4] [--rounds 5] [--json]

Makes sparse segment files of 1 GiB in a sub-directory (records of 1 MiB, no payload), the last `--open` of each drive
with a journal in place of an index, and removes them. Each round is a process; "cold" ones have no page cache (root).
Parts: `open` is SegmentStore(), `recover` its scan on one rank, `send` pickling and unpickling what the worker
reports, `index` taking it into the scheduler's tiers. `total` is their sum; ranks scan side by side.
`cpu` is the processor time of it all, which is what a busy machine does not change much.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.admission import make_admission
from saria_vllm.policy.extents import ExtentAllocator
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.slots import SlotAllocator
from saria_vllm.policy.tiers import Tiers
from saria_vllm.storage import format as fmt
from saria_vllm.storage.recovery import data_name, journal_name
from saria_vllm.storage.segments import SegmentStore
from saria_vllm.types import GroupShape, OpenedSsd, OpenSsd

SHAPE = GroupShape(0, 16, 4, 256 << 10)
SEGMENT_BYTES = 1 << 30
STORE_ID = b"0123456789abcdef"
PARTS = ("open", "recover", "send", "index")
RECORDS = fmt.records_per_segment(SHAPE.record_bytes, SEGMENT_BYTES)


PREFIX_CHUNKS = 512
"""Chunks of a prefix: the first of each has no parent."""


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def make_files(directories: list[str], chunks: int, unsealed: int) -> dict[Path, bytes]:
    """Segments in turn over the drives, with chunks in turn over the drives as eviction writes them: prefix by prefix,
    the last chunk first. Returns the journals of those that are left open."""
    drives, journals = len(directories), {}
    firsts = range(0, chunks, PREFIX_CHUNKS)
    order = [number for first in firsts for number in reversed(range(first, min(chunks, first + PREFIX_CHUNKS)))]
    segments = drives * -(-chunks // (RECORDS * drives))
    for segment in range(segments):
        header = header_of(segment)
        salt, entries = fmt.salt_of(header), []
        start = segment // drives * RECORDS
        for record, number in enumerate(order[segment % drives :: drives][start : start + RECORDS]):
            parent = key_of(number - 1) if number % PREFIX_CHUNKS else b""
            entries.append(fmt.Entry(record, 1, number, start + record + 1, key_of(number), parent))
        rank = Path(directories[segment % drives], "r0")
        rank.mkdir(parents=True, exist_ok=True)
        with (rank / data_name(segment)).open("wb") as file:
            file.write(fmt.pack_header(header))
            file.truncate(fmt.data_file_bytes(SHAPE.record_bytes, RECORDS))
            file.seek(fmt.index_offset(header))
            file.write(fmt.pack_index(entries, header))
        if segment >= segments - unsealed * drives:
            journals[rank / journal_name(segment)] = b"".join(fmt.pack_entry(entry, salt) for entry in entries)
    return journals


def header_of(segment: int) -> fmt.Header:
    return fmt.Header(STORE_ID, 0, segment, 0, SHAPE.record_bytes, RECORDS)


def leave_open(journals: dict[Path, bytes]) -> None:
    """As a killed process does: a journal and no index."""
    for path, entries in journals.items():
        path.write_bytes(entries)
        with path.with_suffix(".data").open("r+b") as file:
            file.seek(fmt.index_offset(header_of(0)))
            file.write(bytes(fmt.index_bytes(RECORDS)))


def measure(directories: list[str], chunks: int) -> dict[str, float]:
    """Seconds of one reopening, in this process."""
    segments_max = chunks // RECORDS + 100
    times, cpu = [time.perf_counter()], time.process_time()
    store = SegmentStore(OpenSsd(tuple(directories), 1, SEGMENT_BYTES, segments_max), 0, {0: SHAPE}, STORE_ID)
    times.append(time.perf_counter())
    found = store.recover()
    times.append(time.perf_counter())
    sent = pickle.dumps(OpenedSsd(found, store.next_segment_id, (True,) * len(directories)), protocol=5)
    report: OpenedSsd = pickle.loads(sent)
    times.append(time.perf_counter())
    admission = make_admission(AdmissionConfig(), SHAPE.block_tokens * SHAPE.blocks_per_chunk)
    tiers = Tiers(
        [SHAPE], SlotAllocator(64, [32]), None, admission, ghosts_max=1_000_000, headroom=[1], persist_bytes_max=1 << 28
    )
    extents = ExtentAllocator(len(directories), segments_max, [RECORDS], report.next_segment)
    tiers.open_ssd(extents, report.found, report.next_segment, report.found.segments())
    times.append(time.perf_counter())
    cpu = time.process_time() - cpu
    assert tiers.chunks.counts["recovered_chunks"] == len(tiers.chunks.index) == chunks
    keys = Prefix(list(map(key_of, range(PREFIX_CHUNKS))))
    assert tiers.match(keys, 0, min(PREFIX_CHUNKS, chunks), 0.0) == min(PREFIX_CHUNKS, chunks)
    store.close()
    parts = dict(zip(PARTS, (after - before for before, after in itertools.pairwise(times)), strict=True))
    return {**parts, "total": times[-1] - times[0], "cpu": cpu}


def one_round(directories: list[str], chunks: int, cold: bool) -> dict[str, float]:
    if cold:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    command = [sys.executable, __file__, "--chunks", str(chunks), "--child", *directories]
    row: dict[str, float] = json.loads(subprocess.check_output(command))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("out"))
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--drives", type=int, default=2)
    parser.add_argument("--open", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments.chunks)))
        return
    top = arguments.directory / "recovery-bench"
    directories = [str(top / f"drive{number}") for number in range(arguments.drives)]
    try:
        journals = make_files(directories, arguments.chunks, arguments.open)
        rows: dict[str, list[dict[str, float]]] = {"warm": [], "cold": []}
        for _ in range(arguments.rounds):
            for name in ["warm", "cold"] if os.geteuid() == 0 else ["warm"]:
                leave_open(journals)
                rows[name].append(one_round(directories, arguments.chunks, name == "cold"))
                print(name, rows[name][-1], file=sys.stderr)
    finally:
        shutil.rmtree(top)
    report = {
        name: {part: round(median(row[part] for row in some), 3) for part in (*PARTS, "total", "cpu")}
        for name, some in rows.items()
        if some
    }
    if arguments.json:
        print(json.dumps({"chunks": arguments.chunks, "rounds": arguments.rounds, **report}))
        return
    print("| median s | " + " | ".join((*PARTS, "total", "cpu")) + " |\n|---|" + "---|" * 6)
    for name, medians in report.items():
        print(f"| {name} | " + " | ".join(f"{seconds:.3f}" for seconds in medians.values()) + " |")


if __name__ == "__main__":
    main()
