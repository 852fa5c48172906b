"""Machines and models to plan with: rates, sizes and prices, each with where it comes from.

Everything here is an assumption to start from, in the data's own words: vendors' figures, a share of them where
peaks are never reached, and prices of one day. Measured rates and real offers should replace them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from saria_vllm.errors import ConfigError

MFU = 0.4
"""Share of a GPU's peak that prefill reaches: an assumption, fit for large dense prefills, high for small MoE ones."""

WEIGHTS_SHARE_MAX = 0.7
"""Weights fill at most this share of HBM. With it GLM-5.2-FP8 needs 8 H200, as vLLM's recipe for it says."""


class Hardware(msgspec.Struct, frozen=True):
    """A node of equal GPUs with its memory and drives. Rates are bytes per second, for reading unless named."""

    name: str
    gpus: int
    """In the node; its DRAM and drives are shared by them evenly."""
    hbm_bytes: int
    """Of one GPU."""
    ingress_bytes_s: float
    """Host to HBM, of one GPU."""
    dram_read_bytes_s: float
    """Of the node."""
    drives: int
    drive_bytes: int
    drive_dwpd: float
    """Rated drive writes per day over five years."""
    drive_read_bytes_s: float
    drive_write_bytes_s: float
    drive_latency_s: float
    """Of one read."""
    bf16_flops: float
    """Dense peak of one GPU."""
    fp8_flops: float
    gpu_usd_hour: float
    """One GPU, rented."""
    dram_usd_gib_month: float
    ssd_usd_tb_month: float
    """1 TB = 1e12 bytes."""
    source: str


class Model(msgspec.Struct, frozen=True):
    """A model as it is served."""

    name: str
    kv_bytes_token: int
    """Bytes of KV of one token over all layers and all ranks, without copies on several ranks."""
    checkpoint_bytes: int
    """Recurrent state at one token boundary; 0 where there is none."""
    kv_replicated: bool
    """Tensor parallelism copies the KV to every rank instead of dividing it (MLA)."""
    weight_bytes: int
    weights: Literal["bf16", "fp8"]
    active_params: float
    """Parameters that one token uses."""
    attention_flops_pair: float
    """For one new token and one token it attends to, over all layers."""
    attended_tokens_max: int
    """Tokens that one token attends to at most; 0 for all before it."""
    index_flops_pair: float
    """To choose what to attend to, for one new token and one token before it."""
    source: str

    def deployment_gpus(self, hardware: Hardware) -> int:
        """GPUs of one engine: the smallest power of two whose HBM the weights fill to `WEIGHTS_SHARE_MAX` or less."""
        gpus = 1
        while gpus * hardware.hbm_bytes * WEIGHTS_SHARE_MAX < self.weight_bytes:
            gpus *= 2
        return gpus

    def prefill_s(self, hardware: Hardware, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds of an engine's GPUs to compute `new_tokens` after `cached_tokens`.

        2 * active parameters * tokens at the weights' peak, plus attention over all pairs at the bf16 peak, both
        times `MFU`. It leaves out collectives, the sampler and time in the queue.
        """
        pairs = new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2
        attended = pairs
        if self.attended_tokens_max:
            attended = min(pairs, float(new_tokens) * self.attended_tokens_max)
        peak = hardware.fp8_flops if self.weights == "fp8" else hardware.bf16_flops
        attention = attended * self.attention_flops_pair + pairs * self.index_flops_pair
        seconds = 2 * self.active_params * new_tokens / peak + attention / hardware.bf16_flops
        return seconds / (MFU * self.deployment_gpus(hardware))

    def prefill_tokens_s(self, hardware: Hardware, new_tokens: int = 8192, cached_tokens: int = 0) -> float:
        """Tokens per second of such a prefill."""
        return new_tokens / self.prefill_s(hardware, new_tokens, cached_tokens)


_PRICES = (
    "DRAM: 16 x 256 GB DDR5-6400 RDIMM for 70,800 USD (3dnews.ru/1134567, December 2025), 18.6 USD/GiB over 36 months; "
    "SSD: 30 TB TLC for 10,950 USD (CIO by vdura.com, Q1 2026), 356 USD/TB over 36 months; power and rack left out"
)
_INGRESS = "ingress: 87 % of PCIe 5.0 x16 (63 GB/s after encoding), an assumption for large pinned copies"
_DRAM = "; DRAM: 75 % of the peak of 2 x 8 channels of "
_GEN5_DRIVE = "drives: 8 x Micron 9550 PRO 7.68 TB (14.0 GB/s read, 10.0 GB/s write, 60 us, 1 DWPD; storagereview.com)"

HARDWARE: Mapping[str, Hardware] = {
    each.name: each
    for each in (
        Hardware(
            name="h100-sxm-pcie5",
            gpus=8,
            hbm_bytes=80 * 10**9,
            ingress_bytes_s=55e9,
            dram_read_bytes_s=460e9,
            drives=8,
            drive_bytes=3_840 * 10**9,
            drive_dwpd=1.0,
            drive_read_bytes_s=6.9e9,
            drive_write_bytes_s=4.2e9,
            drive_latency_s=90e-6,
            bf16_flops=989e12,
            fp8_flops=1979e12,
            gpu_usd_hour=3.00,
            dram_usd_gib_month=0.52,
            ssd_usd_tb_month=9.90,
            source="H100 SXM data sheet, dense; " + _INGRESS + _DRAM + "DDR5-4800 (DGX H100); "
            "drives: 8 x 3.84 TB PCIe 4.0 (DGX H100) of the CM6 class (6.9 GB/s read, 4.2 GB/s write, 90 us); "
            "GPU: 2.50-3.50 USD/h at specialised clouds (mercatus-ai.com, May 2026); " + _PRICES,
        ),
        Hardware(
            name="h200",
            gpus=8,
            hbm_bytes=141 * 10**9,
            ingress_bytes_s=55e9,
            dram_read_bytes_s=460e9,
            drives=8,
            drive_bytes=7_680 * 10**9,
            drive_dwpd=1.0,
            drive_read_bytes_s=14.0e9,
            drive_write_bytes_s=10.0e9,
            drive_latency_s=60e-6,
            bf16_flops=989e12,
            fp8_flops=1979e12,
            gpu_usd_hour=4.00,
            dram_usd_gib_month=0.52,
            ssd_usd_tb_month=9.90,
            source="H200 SXM data sheet, dense; " + _INGRESS + _DRAM + "DDR5-4800 (DGX H200); "
            + _GEN5_DRIVE + "; GPU: 3.50-4.50 USD/h at specialised clouds (mercatus-ai.com, May 2026); " + _PRICES,
        ),
        Hardware(
            name="b300",
            gpus=8,
            hbm_bytes=288 * 10**9,
            ingress_bytes_s=55e9,
            dram_read_bytes_s=614e9,
            drives=8,
            drive_bytes=7_680 * 10**9,
            drive_dwpd=1.0,
            drive_read_bytes_s=14.0e9,
            drive_write_bytes_s=10.0e9,
            drive_latency_s=60e-6,
            bf16_flops=2250e12,
            fp8_flops=4500e12,
            gpu_usd_hour=6.00,
            dram_usd_gib_month=0.52,
            ssd_usd_tb_month=9.90,
            source="HGX B300 data sheet (36 and 72 PFLOPS of 8 GPUs with sparsity, halved); " + _INGRESS + ": the GPU "
            "takes PCIe 6.0 but the host (Xeon 6776P) has 5.0" + _DRAM + "DDR5-6400; "
            + _GEN5_DRIVE + "; GPU: 5.00-7.25 USD/h at specialised clouds (ornnai.com, 2026); " + _PRICES,
        ),
    )
}  # fmt: skip

_GLM = (
    "zai-org/GLM-5.2 config.json as quoted in tenstorrent/tt-metal#49315: 78 layers, kv_lora_rank 512, rope 64, "
    "64 heads, index top 2048 with 32 heads x 128, 21 layers with an indexer of their own (0, 1, 2, then every 4th "
    "from 6); indexer keys are 128 fp8 + one 4-byte scale per layer and token; 39e9 active parameters "
    "(recipes.vllm.ai); 1,507 GB in bf16 (model card of Mapika/GLM-5.2-NVFP4), half of it in fp8; "
    "attention as absorbed MLA; the draft (MTP) layer is left out; "
)
_GLM_INDEX_BYTES = 21 * (128 + 4)
_GLM_ATTENTION_FLOPS = 78 * 64 * 2 * (512 + 64 + 512)
_GLM_INDEX_FLOPS = 21 * 32 * 2 * 128

MODELS: Mapping[str, Model] = {
    each.name: each
    for each in (
        Model(
            name="llama-3.3-70b",
            kv_bytes_token=80 * 8 * 128 * 2 * 2,
            checkpoint_bytes=0,
            kv_replicated=False,
            weight_bytes=141_200_000_000,
            weights="bf16",
            active_params=70.6e9,
            attention_flops_pair=80 * 64 * 128 * 4,
            attended_tokens_max=0,
            index_flops_pair=0,
            source="meta-llama/Llama-3.3-70B-Instruct config.json: 80 layers x 8 KV heads x 128 x (K, V) x 2 bytes",
        ),
        Model(
            name="glm-5.2-bf16",
            kv_bytes_token=78 * (512 + 64) * 2 + _GLM_INDEX_BYTES,
            checkpoint_bytes=0,
            kv_replicated=True,
            weight_bytes=1_507_000_000_000,
            weights="bf16",
            active_params=39e9,
            attention_flops_pair=_GLM_ATTENTION_FLOPS,
            attended_tokens_max=2048,
            index_flops_pair=_GLM_INDEX_FLOPS,
            source=_GLM + "weights and latent in bf16",
        ),
        Model(
            name="glm-5.2-fp8",
            kv_bytes_token=78 * 656 + _GLM_INDEX_BYTES,
            checkpoint_bytes=0,
            kv_replicated=True,
            weight_bytes=753_000_000_000,
            weights="fp8",
            active_params=39e9,
            attention_flops_pair=_GLM_ATTENTION_FLOPS,
            attended_tokens_max=2048,
            index_flops_pair=_GLM_INDEX_FLOPS,
            source=_GLM + "fp8 weights; latent in vLLM's fp8_ds_mla: 512 fp8, 4 fp32 scales and 64 bf16, 656 bytes",
        ),
        Model(
            name="qwen3-next",
            kv_bytes_token=12 * 2 * 256 * 2 * 2,
            checkpoint_bytes=36 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)) * 2,
            kv_replicated=False,
            weight_bytes=160_000_000_000,
            weights="bf16",
            active_params=3e9,
            attention_flops_pair=12 * 16 * 256 * 4,
            attended_tokens_max=0,
            index_flops_pair=0,
            source="Qwen/Qwen3-Next-80B-A3B config.json: 12 of 48 layers attend, 2 KV heads x 256, bf16; 36 layers of "
            "gated delta net with 32 x 128 x 128 state and 3 x 8192 convolution inputs, bf16; 80e9 parameters, 3e9 "
            "active; the recurrent layers' own work is left out",
        ),
    )
}


def hardware(name: str) -> Hardware:
    """The profile of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in HARDWARE:
        raise ConfigError(f"--hardware {name}: unknown profile; choose one of {', '.join(HARDWARE)}")
    return HARDWARE[name]


def model(name: str) -> Model:
    """The model of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in MODELS:
        raise ConfigError(f"--model {name}: unknown profile; choose one of {', '.join(MODELS)}")
    return MODELS[name]
