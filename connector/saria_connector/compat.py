"""Every difference between the vLLM versions we support (>= 0.30), in one place."""

from __future__ import annotations

from typing import Any

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32
    CacheHitSource = None  # type: ignore[assignment,misc]


def confirmed_tokens(request: Any) -> int:
    """Tokens whose KV is written and verified: nothing of a step in flight, no draft, no placeholder."""
    in_flight = getattr(request, "num_in_flight_tokens", None)
    if in_flight is None:
        in_flight = request.num_output_placeholders
    return max(0, request.num_computed_tokens - max(in_flight, request.num_output_placeholders))


def hit_sources(dram_tokens: int, ssd_tokens: int) -> dict[Any, int]:
    """Hit tokens by vLLM's name of the tier."""
    if CacheHitSource is None:
        return {}
    by_source = {CacheHitSource.HOST: dram_tokens, CacheHitSource.DISK: ssd_tokens}
    return {source: tokens for source, tokens in by_source.items() if tokens}
