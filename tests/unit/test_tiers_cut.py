"""Where `Tiers` ends a hit: what it tells `LoadOrCompute` of it."""

from __future__ import annotations

from saria_vllm.config import AdmissionConfig
from saria_vllm.policy.index import Prefix
from saria_vllm.policy.tiers import Tiers
from saria_vllm.types import Moved
from tier_steps import KEYS, RECORD, end, evict_all, make_tiers, plan_load, store


def made(record_bytes: tuple[int, ...] = (RECORD,)) -> Tiers:
    """Chunks 0 to 3 on SSD, at 10 chunks a second, 4 to 7 in DRAM; a prefill computes 100 of them a second."""
    tiers = make_tiers(
        admission=AdmissionConfig(policy="saria", evictions=1), persist_records=20, segments_max=8,
        record_bytes=record_bytes,
    )  # fmt: skip
    store(tiers, KEYS[:4])
    end(tiers, *evict_all(tiers))
    store(tiers, KEYS[4:8])
    tiers.moved([Moved(0, 1000 * sum(record_bytes), 100.0, 0, 0.0)], 1e12, 0.0)
    for _ in range(20):
        tiers.cost.prefill.learn(160, 160 * 80, 0.1)
    return tiers


def cut(tiers: Tiers, keys: list[bytes], first: int = 0, computed: int | None = None) -> tuple[int, str]:
    computed = 16 * first if computed is None else computed
    return tiers.cut(Prefix(keys), first, len(keys), computed, 16 * len(keys), 0.0)


def test_chunks_on_ssd_at_the_end_are_computed() -> None:
    tiers = made()
    assert cut(tiers, KEYS[4:8] + KEYS[:4]) == (4, "cheaper")
    assert cut(tiers, KEYS[4:8] + KEYS[:4], first=2) == (4, "cheaper")
    assert cut(tiers, KEYS[4:8]) == (4, ""), "DRAM takes no time"
    assert cut(tiers, KEYS[:4], first=4) == (4, ""), "no hit at all"


def test_a_hit_is_whole_as_long_as_no_drive_was_measured() -> None:
    tiers = made()
    tiers.cost.measured(0.0, 0.0)
    assert cut(tiers, KEYS[4:8] + KEYS[:4]) == (8, "")


def test_bytes_of_all_groups_count() -> None:
    assert cut(made((RECORD, 3 * RECORD)), KEYS[4:8] + KEYS[:4]) == (4, "cheaper")


def test_what_hbm_has_of_the_first_chunks_need_not_be_computed() -> None:
    """Two chunks are loaded in 0.2 s; prefill takes half of that, and 3 ms for the last 5 tokens of them."""
    tiers = made()
    tiers.cost.measured(RECORD * 20.0, 1e12)
    prefix = Prefix(KEYS[:2])
    for _ in range(50):
        tiers.cost.prefill.learn(160, 160 * 80, 0.5)
    assert tiers.cut(prefix, 0, 2, 0, 32, 0.0) == (2, "")
    assert tiers.cut(prefix, 0, 2, 27, 32, 0.0) == (0, "cheaper")


def test_planned_loads_keep_the_drive_busy_until_they_end() -> None:
    """Four chunks take a drive 20 ms and a prefill 40 ms; five such loads are before it."""
    tiers = made()
    tiers.cost.measured(RECORD * 200.0, 1e12)
    assert cut(tiers, KEYS[:4]) == (4, "")
    loads = [plan_load(tiers, KEYS[:4]) for _ in range(5)]
    assert cut(tiers, KEYS[:4]) == (0, "cheaper")
    end(tiers, *loads[1:])
    assert cut(tiers, KEYS[:4]) == (4, "")
    tiers.reset()
    end(tiers, loads[0])
    assert tiers.cost._in_flight == (0, 0)
