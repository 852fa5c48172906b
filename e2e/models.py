"""Small models with random weights from a fixed seed, made once: `python e2e/models.py NAME...`.

Real safetensors weights, a byte-level tokenizer, nothing downloaded. A model's folder is named after a digest of
its definition, so a changed definition makes a new folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("SARIA_MODELS", Path(__file__).resolve().parent.parent / "models"))
VOCAB = 512
_FORMAT = 1
"""Raise it when the way of making a model changes."""

# initializer_range: large enough that greedy answers differ from prompt to prompt.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "max_position_embeddings": 16384,
}
_LLAMA = {"config": "LlamaConfig", "model": "LlamaForCausalLM"}

MODELS: dict[str, dict[str, Any]] = {
    # 0.7 M parameters, 2 KiB of KV per token in fp32: correctness tests.
    "llama-small": {
        **_LLAMA,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    # 40 M parameters, 40 KiB of KV per token in fp32: the demo.
    "llama-demo": {
        **_LLAMA,
        "hidden_size": 640,
        "intermediate_size": 1792,
        "num_hidden_layers": 8,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
        "head_dim": 64,
        "initializer_range": 0.04,
    },
    # 63 M parameters, 12 KiB of KV per token in fp32: sessions under emulated rates.
    "llama-sessions": {
        **_LLAMA,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "initializer_range": 0.035,
    },
    # 136 M parameters, 24 KiB of KV per token in fp32: TTFT measurements.
    "llama-136m": {
        **_LLAMA,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "initializer_range": 0.03,
        "max_position_embeddings": 32768,
    },
    # Multi-head latent attention: one latent page per block instead of keys and values.
    "deepseek-v2": {
        "config": "DeepseekV2Config",
        "model": "DeepseekV2ForCausalLM",
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
    },
    # Recurrent (gated delta net) and full attention layers.
    "qwen3-next": {
        "config": "Qwen3NextConfig",
        "model": "Qwen3NextForCausalLM",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    # Sliding window and full attention layers.
    "gemma3": {
        "config": "Gemma3TextConfig",
        "model": "Gemma3ForCausalLM",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 256,
    },
}


def ensure_model(name: str, root: Path = ROOT) -> Path:
    """Folder of a model, made if it is not there yet. Safe against being ended half way."""
    if name not in MODELS:
        raise SystemExit(f"unknown model {name!r}; there are {', '.join(MODELS)}")
    definition = {"format": _FORMAT, **_COMMON, **MODELS[name]}
    digest = hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()[:8]
    path = root / f"{name}-{digest}"
    if path.is_dir():
        return path
    root.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        print(f"making the model {name} (random weights) in {path}", file=sys.stderr, flush=True)
        _make(definition, part)
        part.chmod(0o755)
        try:
            part.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return path


def _make(definition: dict[str, Any], path: Path) -> None:
    import torch
    import transformers

    settings = {key: value for key, value in definition.items() if key not in ("format", "config", "model")}
    config = getattr(transformers, definition["config"])(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, definition["model"])(config).to(torch.bfloat16)
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)


def _tokenizer() -> Any:
    """One token per byte, then unused ones up to the vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<unused{index}>" for index in range(VOCAB - len(words))]
    core = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
    )
    return tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["llama-demo"], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--root", type=Path, default=ROOT)
    arguments = parser.parse_args()
    for wanted in arguments.names:
        print(ensure_model(wanted, arguments.root))
