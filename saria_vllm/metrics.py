"""Every counter and gauge by name: the one table that code, /metrics and docs use."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    """Values of the label; others are counted under the last one. None where it is a drive's ssd path."""


TIERS = ("dram", "ssd")
ERROR_REASONS = (
    "read_failed", "checksum", "not_found", "write_failed", "disk_full", "vanished", "stale", "deadline", "other",
)  # fmt: skip
DRIVE_ERRORS = ("read_failed", "checksum", "write_failed", "disk_full", "vanished", "deadline")
"""Those of them that a drive is to blame for."""
DROP_REASONS = ("no_slot", "hold_limit", "persist_queue_full", "ssd_full", "ssd_off", "over_budget", "not_admitted")

UNPROMOTED_REASONS = ("no_slot", "hold_limit", "too_late", "other")
RECOMPUTE_REASONS = ("cheaper", "deadline")

COUNTERS: dict[str, Metric] = {
    "hit_tokens": Metric("Prompt tokens loaded into HBM from a tier", "tier", TIERS),
    "recomputed_tokens": Metric(
        "Prompt tokens that a tier has and that were computed: loading takes longer, or would miss its deadline",
        "reason",
        RECOMPUTE_REASONS,
    ),
    "load_bytes": Metric("Bytes of chunks read from a tier and copied into HBM, over all ranks", "tier", TIERS),
    "loads": Metric("Request reloads that ended", "result", ("loaded", "failed")),
    "paced_ms": Metric("Milliseconds in which copies from DRAM gave way to SSD reads or kept to the ingress limit"),
    "load_waits": Metric("Times a request was told to wait for another's load of the same chunk"),
    "stored_chunks": Metric("Chunks copied from HBM into DRAM"),
    "promoted_chunks": Metric("Chunks loaded from SSD and copied from HBM into DRAM"),
    "unpromoted_chunks": Metric(
        "Chunks loaded from SSD that were to be copied into DRAM and were not", "reason", UNPROMOTED_REASONS
    ),
    "store_bytes": Metric("Bytes copied from HBM into DRAM, over all ranks"),
    "evicted_chunks": Metric("Chunks that left DRAM", "outcome", ("persisted", "already_on_ssd", "dropped")),
    "admission": Metric(
        "Admission decisions",
        "reason",
        (
            "every_chunk",
            "never",
            "not_yet",
            "eviction_count",
            "reuse_count",
            "score_high",
            "score_low",
            "return_likely",
            "return_unlikely",
            "branch_left",
            "session_ended",
            "second_chance",
            "other",
        ),
    ),
    "persisted_chunks": Metric("Chunks written to SSD"),
    "ssd_written_bytes": Metric("Bytes written to SSD, over all ranks"),
    "drive_read_bytes": Metric("Bytes read from a drive by us, over all ranks", "drive"),
    "drive_written_bytes": Metric("Bytes written to a drive by us, over all ranks", "drive"),
    "drive_errors": Metric("Chunks that a drive failed to read or write, or not in time", "drive"),
    "drive_pauses": Metric("Times a drive that failed, was full or held up a load was left alone for a while", "drive"),
    "buffered_drives": Metric("Drives opened whose file system refuses O_DIRECT, over all ranks: I/O is cached there"),
    "drive_charged_bytes": Metric("Bytes of a drive's write budget used up by others and by the drive itself", "drive"),
    "second_chance_bytes": Metric("Bytes sent to SSD again before their segment went, over all ranks"),
    "retired_chunks": Metric("Chunks that left SSD with their segment"),
    "recovered_chunks": Metric("Chunks found on SSD when the engine started"),
    "shared_chunks": Metric("Chunks found in what other engines of the same configuration wrote to SSD"),
    "shared_hits": Metric("Chunks loaded from what other engines wrote to SSD"),
    "dropped_chunks": Metric("Chunks not kept", "reason", DROP_REASONS),
    "recording_dropped": Metric("Finished requests that trace_record left out: its queue was full, or it has ended"),
    "hints_ignored": Metric("Hints in requests' kv_transfer_params that were not understood"),
    "errors": Metric("Failed reads and writes of chunks", "reason", ERROR_REASONS),
    "internal_errors": Metric("Faults of ours that were turned into cache misses"),
}

GAUGES: dict[str, Metric] = {
    "drive_read_bytes_s": Metric("Bytes per second at which one rank was lately seen to read a drive", "drive"),
    "ingress_bytes_s": Metric("Bytes per second that loads may bring into one rank's HBM"),
    "prefill_tokens_s": Metric("Tokens per second of a prefill at the beginning of a prompt, as lately seen"),
}
"""What was measured: they travel with the counters when they change, and the last value counts."""

Counts = dict[str, int]
"""Counter increments, and gauges that changed, by "name" or "name:label value"."""


def count(counts: Counts, name: str, value: int, label: str = "") -> None:
    """Add to a counter of `COUNTERS`; an unknown label value counts as the last known one."""
    if not value:
        return
    metric = COUNTERS[name]
    if metric.label:
        name = f"{name}:{label if label in metric.values or not metric.values else metric.values[-1]}"
    counts[name] = counts.get(name, 0) + value
