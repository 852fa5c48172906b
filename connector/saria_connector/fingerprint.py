"""What must be equal for KV on SSD to be usable: the namespace fingerprint. Unlike fingerprints never mix."""

from __future__ import annotations

import hashlib
import os
import platform
import uuid
from pathlib import Path
from typing import Any

from vllm import __version__ as vllm_version
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from saria_vllm.storage.format import FORMAT_VERSION
from saria_vllm.types import GroupShape

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_HEADER_BYTES_MAX = 16 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Of each weight file: two fine-tunes of one model differ in their bytes even where sizes and times are equal."""


def fingerprint_parts(
    vllm_config: Any, kv_cache_config: KVCacheConfig, groups: list[int], shapes: list[GroupShape], label: str
) -> dict[str, Any]:
    """Everything that decides the bytes and meaning of a stored chunk, by name, for people and for the hash."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    weights = weights_identity(model)
    return {
        "format": FORMAT_VERSION,
        "label": label,
        "model": str(model.model),
        "revision": str(model.revision),
        "weights": weights,
        "weights_load_format": str(vllm_config.load_config.load_format),
        "model_config": _digest(model.hf_config.to_json_string()),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "kv_scales": bool(getattr(cache, "calculate_kv_scales", False)),
        "kv_layout": str(kv_cache_config.kv_cache_layout),
        "kv_groups": [_group_identity(kv_cache_config.kv_cache_groups[group]) for group in groups],
        "chunks": [[s.block_tokens, s.blocks_per_chunk, s.block_bytes] for s in shapes],
        "attention_backend": _attention_backend(vllm_config),
        "conv_state_layout": os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT", ""),
        "device": device_identity(),
        "vllm": vllm_version,
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "hash": [str(cache.prefix_caching_hash_algo), os.environ.get("PYTHONHASHSEED", "")],
        "this_process_only": uuid.uuid4().hex if not weights or process_only_reasons(vllm_config) else "",
        "hash_block_tokens": kv_cache_config.hash_block_size,
    }


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two configurations, in words, at most 200 characters each."""
    return [
        f"{name}: {_short(before.get(name))} -> {_short(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and name != "this_process_only"
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def process_only_reasons(vllm_config: Any) -> list[str]:
    """Why KV on SSD would mean nothing, or something else, to the next process; usually empty."""
    cache, reasons = vllm_config.cache_config, []
    if str(cache.prefix_caching_hash_algo).startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        reasons.append("xxhash block hashes are random in each process: set PYTHONHASHSEED, or use sha256")
    if getattr(cache, "calculate_kv_scales", False):
        reasons.append("KV scales are computed at run time")
    if getattr(vllm_config, "lora_config", None) is not None:
        reasons.append("LoRA adapters are named by path, and may have changed at the next start")
    if not weights_identity(vllm_config.model_config):
        reasons.append("the weights are neither readable in a local directory nor of a known commit")
    return reasons


def _digest(text: str | bytes) -> str:
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=16).hexdigest()


def _group_identity(group: Any) -> list[str]:
    return [repr(group.kv_cache_spec), _digest("\n".join(group.layer_names))]


def _attention_backend(vllm_config: Any) -> str:
    attention = getattr(vllm_config, "attention_config", None)
    configured = getattr(attention, "backend", None) or os.environ.get("VLLM_ATTENTION_BACKEND", "")
    return str(configured or "default for this vLLM, device and model")


def device_identity() -> str:
    """Device kind and instruction set: they select kernels, and kernels select layouts and rounding."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    isa = [flag for flag in flags if flag.startswith(("amx", "avx", "sve", "asimd", "bf16", "i8mm"))]
    device = f"{current_platform.device_type} {current_platform.get_device_name()}"
    return f"{device}; host {platform.machine()} {' '.join(sorted(isa))}"


def weights_identity(model_config: Any) -> str:
    """What tells two sets of weights apart without reading them; empty when nothing does.

    In a local directory a hash of names, sizes, times, safetensors headers and samples of the bytes; else the commit
    that the configuration was resolved to. Weights that are streamed from elsewhere have neither, nor have those
    that cannot be read.
    """
    folder = Path(str(model_config.model))
    if getattr(model_config, "model_weights", ""):
        return ""
    if not folder.is_dir():
        return str(getattr(model_config.hf_config, "_commit_hash", None) or "")
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES and path.is_file())
        return _digest("".join(_file_identity(path) for path in files)) if files else ""
    except OSError:
        return ""


def _file_identity(path: Path) -> str:
    digest, stat = hashlib.blake2b(digest_size=16), path.stat()
    digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    with path.open("rb") as stream:
        if path.suffix == ".safetensors":
            length = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(length, _HEADER_BYTES_MAX)))
        for sample in range(_SAMPLES):
            stream.seek(stat.st_size * sample // _SAMPLES)
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
