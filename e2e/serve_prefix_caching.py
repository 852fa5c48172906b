"""`vllm serve` with HBM prefix caching for MLA on a CPU without AMX, where vLLM turns it off although its kernels can.

Only for tests: an MLA reload must be compared with a local prefix hit, which runs the same kernels.
"""

from __future__ import annotations

import sys

from vllm.platforms.cpu import CpuPlatform

original = CpuPlatform.check_and_update_config.__func__


def keep_prefix_caching(cls: type[CpuPlatform], vllm_config: object) -> None:
    wanted = vllm_config.cache_config.enable_prefix_caching  # type: ignore[attr-defined]
    original(cls, vllm_config)
    vllm_config.cache_config.enable_prefix_caching = wanted  # type: ignore[attr-defined]


CpuPlatform.check_and_update_config = classmethod(keep_prefix_caching)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
