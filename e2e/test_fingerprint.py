"""What tells two sets of weights apart, and when KV on SSD must not outlive the process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install saria-vllm[cpu] or [vllm]")

import torch
from vllm.config import CacheConfig, KVTransferConfig, LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config.attention import AttentionConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from saria_connector import fingerprint, layout
from saria_connector.fingerprint import fingerprint_parts, process_only_reasons, weights_identity
from saria_vllm.storage.namespace import namespace_name

pytestmark = pytest.mark.vllm


def model(folder: Path | str, commit: str | None = None, streamed: str = "") -> Any:
    return SimpleNamespace(model=str(folder), model_weights=streamed, hf_config=SimpleNamespace(_commit_hash=commit))


def config(model_config: Any, algo: str = "sha256", lora: object = None, scales: bool = False) -> Any:
    cache = SimpleNamespace(prefix_caching_hash_algo=algo, calculate_kv_scales=scales)
    return SimpleNamespace(model_config=model_config, cache_config=cache, lora_config=lora)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes((2).to_bytes(8, "little") + b"{}" + os.urandom(1 << 20))
    os.utime(path, (1, 1))
    return path


def test_other_bytes_of_the_same_size_and_time_are_other_weights(weights: Path) -> None:
    before = weights_identity(model(weights.parent))
    assert before == weights_identity(model(weights.parent))
    data = weights.read_bytes()
    weights.write_bytes(data[:10] + bytes(byte ^ 1 for byte in data[10:]))
    os.utime(weights, (1, 1))
    assert weights_identity(model(weights.parent)) != before


def test_a_touched_file_and_a_new_file_are_other_weights(weights: Path) -> None:
    before = weights_identity(model(weights.parent))
    os.utime(weights, (2, 2))
    touched = weights_identity(model(weights.parent))
    (weights.parent / "more.bin").write_bytes(b"x")
    assert len({before, touched, weights_identity(model(weights.parent))}) == 3


def test_what_is_no_file_is_no_weight(weights: Path) -> None:
    before = weights_identity(model(weights.parent))
    (weights.parent / "folder.bin").mkdir()
    (weights.parent / "dangling.pt").symlink_to(weights.parent / "nowhere")
    (weights.parent / "loop.pt").symlink_to(weights.parent / "loop.pt")
    os.mkfifo(weights.parent / "pipe.gguf")
    assert weights_identity(model(weights.parent)) == before
    (weights.parent / "blob").write_bytes(b"more")
    (weights.parent / "linked.bin").symlink_to(weights.parent / "blob")
    assert weights_identity(model(weights.parent)) not in ("", before)


def test_weights_that_cannot_be_read_are_not_known(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise PermissionError(13, "not yours")

    for call in ("open", "stat", "iterdir"):
        with monkeypatch.context() as patch:
            if call == "stat":
                patch.setattr(Path, "is_dir", lambda _path: True)
            patch.setattr(Path, call, refuse)
            assert weights_identity(model(weights.parent)) == ""
            assert len(process_only_reasons(config(model(weights.parent)))) == 1


def test_weights_from_elsewhere_are_known_by_commit_or_not_at_all(weights: Path, tmp_path: Path) -> None:
    assert weights_identity(model("org/name", commit="abc")) == "abc"
    empty = tmp_path / "empty"
    empty.mkdir()
    for unknown in (model("org/name"), model(empty), model(weights.parent, streamed="s3://bucket/weights")):
        assert weights_identity(unknown) == ""
        assert len(process_only_reasons(config(unknown))) == 1


def test_reasons_for_a_namespace_of_one_process(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = model(weights.parent)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert process_only_reasons(config(known)) == []
    assert len(process_only_reasons(config(known, algo="xxhash", lora=object(), scales=True))) == 3
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert process_only_reasons(config(known, algo="xxhash")) == []


# The fingerprint of a real configuration.

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "torch_dtype": "float32",
}  # fmt: skip


@dataclass
class Setting:
    """All that a fingerprint is made from. The one vLLM configuration is real, and altered in place."""

    vllm: Any
    cache: KVCacheConfig
    chunk_tokens: int = 64
    label: str = ""

    def parts(self) -> dict[str, Any]:
        groups = layout.served_groups(self.cache)
        shapes = layout.group_shapes(self.cache, groups, self.chunk_tokens)
        return fingerprint_parts(self.vllm, self.cache, groups, shapes, self.label)

    def with_group(self, **changes: Any) -> None:
        group = self.cache.kv_cache_groups[0]
        group = replace(group, kv_cache_spec=replace(group.kv_cache_spec, **changes))
        self.cache = replace(self.cache, kv_cache_groups=[group])

    def with_layers(self, *names: str) -> None:
        group = replace(self.cache.kv_cache_groups[0], layer_names=list(names))
        self.cache = replace(self.cache, kv_cache_groups=[group])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + os.urandom(1 << 20))
    return folder


def real_config(llama: Path) -> VllmConfig:
    model = ModelConfig(model=str(llama), skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=2048)
    return VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=2048, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=32, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(
            kv_connector="SariaConnector", kv_role="kv_both", kv_connector_module_path="saria_connector",
            kv_connector_extra_config={"dram_capacity": "1GiB"},
        ),
    )  # fmt: skip


@pytest.fixture
def setting(llama: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    for name in ("PYTHONHASHSEED", "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_ATTENTION_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer0", "layer1"], spec)]
    cache = KVCacheConfig(64, [], groups, kv_cache_layout="LBHNC", hash_block_size=32)
    return Setting(real_config(llama), cache)


Change = Callable[[Setting, pytest.MonkeyPatch, Path], Any]
"""Alters a setting; the folder is for files."""


def of(path: str, value: Any) -> Change:
    """Another value at this path of the vLLM configuration."""
    owner, _, name = path.rpartition(".")

    def change(setting: Setting, _patch: pytest.MonkeyPatch, _folder: Path) -> None:
        target = setting.vllm
        for step in filter(None, owner.split(".")):
            target = getattr(target, step)
        assert getattr(target, name, None) != value
        setattr(target, name, value)

    return change


def copied(weights: bytes | None = None, **in_config: Any) -> Change:
    """A folder with the same model, but for this."""

    def change(setting: Setting, _patch: pytest.MonkeyPatch, folder: Path) -> None:
        shutil.copytree(setting.vllm.model_config.model, folder / "copy")
        (folder / "copy" / "config.json").write_text(json.dumps(LLAMA | in_config))
        if weights is not None:
            (folder / "copy" / "model.safetensors").write_bytes(weights)
        setting.vllm = real_config(folder / "copy")

    return change


MATTERS: dict[str, tuple[Change, set[str]]] = {
    "the format's version": (lambda _, patch, __: patch.setattr(fingerprint, "FORMAT_VERSION", 999), {"format"}),
    "namespace": (lambda setting, _, __: setattr(setting, "label", "other"), {"label"}),
    "where the model is": (copied(), {"model"}),
    "other weights": (copied(weights=bytes(1 << 20)), {"model", "weights"}),
    "another RoPE": (copied(rope_theta=5e5), {"model", "model_config"}),
    "another norm": (copied(rms_norm_eps=1e-5), {"model", "model_config"}),
    "revision": (of("model_config.revision", "main"), {"revision"}),
    "load format": (of("load_config.load_format", "dummy"), {"weights_load_format"}),
    "dtype": (of("model_config.dtype", torch.bfloat16), {"dtype"}),
    "quantization": (of("model_config.quantization", "fp8"), {"quantization"}),
    "KV dtype": (of("cache_config.cache_dtype", "fp8_e5m2"), {"kv_dtype"}),
    "KV scales": (of("cache_config.calculate_kv_scales", True), {"kv_scales", "this_process_only"}),
    "KV layout": (
        lambda setting, _, __: setattr(setting, "cache", replace(setting.cache, kv_cache_layout="LBNHC")),
        {"kv_layout"},
    ),
    "block size": (lambda setting, _, __: setting.with_group(block_size=64), {"kv_groups", "chunks"}),
    "heads": (lambda setting, _, __: setting.with_group(num_kv_heads=1), {"kv_groups", "chunks"}),
    "bytes that mean something else": (lambda setting, _, __: setting.with_group(dtype=torch.int32), {"kv_groups"}),
    "names of layers": (lambda setting, _, __: setting.with_layers("layer0", "layer2"), {"kv_groups"}),
    "the order of layers": (lambda setting, _, __: setting.with_layers("layer1", "layer0"), {"kv_groups"}),
    "chunk size": (lambda setting, _, __: setattr(setting, "chunk_tokens", 128), {"chunks"}),
    "attention backend": (
        of("attention_config", AttentionConfig(backend=AttentionBackendEnum.TRITON_ATTN)), {"attention_backend"}
    ),
    "attention backend by environment": (
        lambda _, patch, __: patch.setenv("VLLM_ATTENTION_BACKEND", "TORCH_SDPA"), {"attention_backend"}
    ),
    "layout of convolution states": (
        lambda _, patch, __: patch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS"), {"conv_state_layout"}
    ),
    "device": (lambda _, patch, __: patch.setattr(fingerprint, "device_identity", lambda: "another"), {"device"}),
    "vLLM": (lambda _, patch, __: patch.setattr(fingerprint, "vllm_version", "0.0.1"), {"vllm"}),
    "tensor parallel": (of("parallel_config.tensor_parallel_size", 2), {"tensor_parallel"}),
    "pipeline parallel": (of("parallel_config.pipeline_parallel_size", 2), {"pipeline_parallel"}),
    "hash": (of("cache_config.prefix_caching_hash_algo", "sha256_cbor"), {"hash"}),
    "hash seed": (lambda _, patch, __: patch.setenv("PYTHONHASHSEED", "1"), {"hash"}),
    "hashes of one process": (
        of("cache_config.prefix_caching_hash_algo", "xxhash"), {"hash", "this_process_only"}
    ),
    "LoRA": (of("lora_config", LoRAConfig(max_lora_rank=8)), {"this_process_only"}),
    "tokens of a hash": (
        lambda setting, _, __: setattr(setting, "cache", replace(setting.cache, hash_block_size=16)),
        {"hash_block_tokens"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MATTERS)
def test_what_decides_the_bytes_of_a_chunk_decides_the_fingerprint(
    setting: Setting, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: Path
) -> None:
    before = setting.parts()
    assert namespace_name(before) == namespace_name(Setting(real_config(llama), setting.cache).parts())
    cache, (change, expected) = setting.cache, MATTERS[name]
    with monkeypatch.context() as patch:
        change(setting, patch, tmp_path)
        after = setting.parts()
    assert namespace_name(after) != namespace_name(before)
    assert {part for part in before if before[part] != after[part]} == expected
    assert namespace_name(Setting(real_config(llama), cache).parts()) == namespace_name(before), "and back"


def test_every_part_of_the_fingerprint_is_one_that_matters(setting: Setting) -> None:
    assert set.union(*(parts for _, parts in MATTERS.values())) == set(setting.parts())


IRRELEVANT: dict[str, Change] = {
    "sequences": of("scheduler_config.max_num_seqs", 99),
    "batched tokens": of("scheduler_config.max_num_batched_tokens", 512),
    "longest request": of("model_config.max_model_len", 1024),
    "seed": of("model_config.seed", 7),
    "served name": of("model_config.served_model_name", "another"),
    "share of memory": of("cache_config.gpu_memory_utilization", 0.5),
    "size of HBM": lambda setting, _, __: setattr(setting, "cache", replace(setting.cache, num_blocks=999)),
    "data parallel": of("parallel_config.data_parallel_size", 2),
    "failure policy": of("kv_transfer_config.kv_load_failure_policy", "recompute"),
    "capacities": of("kv_transfer_config.kv_connector_extra_config", {"dram_capacity": "2GiB"}),
}


@pytest.mark.parametrize("name", IRRELEVANT)
def test_what_decides_no_byte_of_a_chunk_leaves_the_fingerprint(
    setting: Setting, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = setting.parts()
    IRRELEVANT[name](setting, monkeypatch, tmp_path)
    assert namespace_name(setting.parts()) == namespace_name(before)


def test_unknown_weights_have_a_fingerprint_of_one_process(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    before = setting.parts()
    assert before["weights"] and not before["this_process_only"]
    monkeypatch.setattr(fingerprint, "weights_identity", lambda _: "")
    first, second = setting.parts(), setting.parts()
    assert len({namespace_name(parts) for parts in (before, first, second)}) == 3
    assert {part for part in first if first[part] != second[part]} == {"this_process_only"}
