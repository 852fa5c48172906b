"""Hardware and model profiles: the arithmetic that plans stand on."""

import msgspec
import pytest

from saria_vllm.errors import ConfigError, SariaError
from saria_vllm.sim.profiles import HARDWARE, MFU, MODELS, hardware, model


@pytest.mark.parametrize(
    ("name", "kv_bytes_token", "checkpoint_bytes"),
    [
        ("llama-3.3-70b", 327_680, 0),
        ("glm-5.2-bf16", 78 * 1152 + 2772, 0),
        ("glm-5.2-fp8", 78 * 656 + 2772, 0),
        ("qwen3-next", 24_576, 36 * (1_048_576 + 49_152)),
    ],
)
def test_bytes_of_kv(name, kv_bytes_token, checkpoint_bytes):
    assert (model(name).kv_bytes_token, model(name).checkpoint_bytes) == (kv_bytes_token, checkpoint_bytes)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("llama-3.3-70b", (4, 2, 1)), ("glm-5.2-bf16", (32, 16, 8)),
        ("glm-5.2-fp8", (16, 8, 4)), ("qwen3-next", (4, 2, 1)),
    ],
)  # fmt: skip
def test_gpus_of_a_deployment(name, gpus):
    assert tuple(model(name).deployment_gpus(hardware(each)) for each in ("h100-sxm-pcie5", "h200", "b300")) == gpus


def test_prefill_is_linear_work_plus_attention():
    llama, h200 = model("llama-3.3-70b"), hardware("h200")
    pairs = 1000 * 50_000 + 1000 * 1001 / 2
    flops = 2 * 70.6e9 * 1000 + pairs * 80 * 64 * 128 * 4
    assert llama.prefill_s(h200, 1000, 50_000) == pytest.approx(flops / (2 * MFU * 989e12))
    assert llama.prefill_tokens_s(h200, 1000, 50_000) == pytest.approx(1000 / llama.prefill_s(h200, 1000, 50_000))


def test_sparse_attention_attends_to_no_more_than_it_chooses():
    glm, h200 = model("glm-5.2-fp8"), hardware("h200")
    chosen = 1000 * 2048 * glm.attention_flops_pair
    index = (1000 * 50_000 + 1000 * 1001 / 2) * glm.index_flops_pair
    seconds = 2 * 39e9 * 1000 / 1979e12 + (chosen + index) / 989e12
    assert glm.prefill_s(h200, 1000, 50_000) == pytest.approx(seconds / (8 * MFU))
    short = (100 * 101 / 2) * (glm.attention_flops_pair + glm.index_flops_pair) / 989e12 + 2 * 39e9 * 100 / 1979e12
    assert glm.prefill_s(h200, 100) == pytest.approx(short / (8 * MFU))


def test_every_profile_is_whole_frozen_and_says_where_it_comes_from():
    for each in (*HARDWARE.values(), *MODELS.values()):
        assert len(each.source) > 60
        with pytest.raises(AttributeError):
            each.name = "other"
    for each in HARDWARE.values():
        values = {key: value for key, value in msgspec.structs.asdict(each).items() if key not in ("name", "source")}
        assert all(value > 0 for value in values.values()), each.name
        assert each.drive_read_bytes_s * each.drives < each.ingress_bytes_s * each.gpus < each.dram_read_bytes_s * 1.2
    assert list(HARDWARE) == ["h100-sxm-pcie5", "h200", "b300"]
    assert list(MODELS) == ["llama-3.3-70b", "glm-5.2-bf16", "glm-5.2-fp8", "qwen3-next"]


def test_an_unknown_name_is_answered_with_the_choices():
    with pytest.raises(ConfigError) as caught:
        hardware("h300")
    assert str(caught.value) == "--hardware h300: unknown profile; choose one of h100-sxm-pcie5, h200, b300"
    with pytest.raises(SariaError, match=r"--model gpt: unknown profile; choose one of llama-3.3-70b, glm-5.2"):
        model("gpt")
