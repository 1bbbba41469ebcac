"""Rotary embeddings against transformers' own, over random configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from paceline.errors import UnsupportedModel
from paceline.runtime.formats.config import ModelConfig, RopeConfig, config_from_hf
from paceline.runtime.layers.rope import RotaryEmbedding, apply_rope, inverse_frequencies

factors = st.floats(1.0, 40.0)
thetas = st.floats(100.0, 5e6)


def yarn(draw: st.DrawFn) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "yarn", "factor": draw(factors)}
    optional = {
        "attention_factor": st.floats(0.5, 2.0),
        "beta_fast": st.floats(8.0, 64.0),
        "beta_slow": st.floats(0.5, 4.0),
        "mscale": st.floats(0.1, 2.0),
        "mscale_all_dim": st.floats(0.1, 2.0),
        "truncate": st.booleans(),
        "original_max_position_embeddings": st.integers(64, 8192),
    }
    return rope | {name: draw(value) for name, value in optional.items() if draw(st.booleans())}


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config.json's content, in the older form or in the newer one."""
    kind = draw(st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3"]))
    rope: dict[str, Any] = {"rope_type": kind}
    if kind in ("linear", "dynamic"):
        rope["factor"] = draw(factors)
    elif kind == "yarn":
        rope = yarn(draw)
    elif kind == "llama3":
        low = draw(st.floats(0.5, 2.0))
        rope |= {"factor": draw(factors), "low_freq_factor": low, "high_freq_factor": low + draw(st.floats(0.5, 6.0))}
        rope["original_max_position_embeddings"] = draw(st.integers(64, 8192))
    raw: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": draw(st.sampled_from([4, 8, 32, 64, 80, 128])),
        "max_position_embeddings": draw(st.integers(64, 16_384)),
    }
    theta = draw(thetas)
    if draw(st.booleans()):
        return raw | {"rope_parameters": {"rope_theta": theta, **rope}}
    if draw(st.booleans()):
        rope["type"] = rope.pop("rope_type")
    return raw | {"rope_theta": theta, "rope_scaling": None if kind == "default" else rope}


def theirs(raw: dict[str, Any]) -> LlamaRotaryEmbedding:
    fields = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    return LlamaRotaryEmbedding(LlamaConfig(**fields))


@settings(max_examples=150, deadline=None)
@given(configs())
def test_equals_transformers(raw: dict[str, Any]) -> None:
    config = config_from_hf(raw)
    limit = config.max_position_embeddings
    positions = torch.tensor([0, 1, 2, 17, limit // 2, limit - 1])
    cos, sin = RotaryEmbedding(config)(positions, torch.float32)
    want_cos, want_sin = theirs(raw)(torch.zeros(1, 1, config.head_dim), positions[None])
    torch.testing.assert_close(cos, want_cos[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin, want_sin[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["default", "llama3", "yarn"])
def test_frequencies_are_bit_equal_for_common_settings(kind: str) -> None:
    """Where positions are long, one unit in the last place of a frequency is visible in the angle."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 500_000.0}
    if kind == "llama3":
        rope |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        rope |= {"factor": 4.0}
    if kind != "default":
        rope["original_max_position_embeddings"] = 8192
    raw = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 512,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 131_072,
        "rope_parameters": rope,
    }
    ours = RotaryEmbedding(config_from_hf(raw))
    assert torch.equal(ours.inv_freq, theirs(raw).inv_freq)


def dynamic(limit: int | None) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=32,
        hidden_size=64,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
        rope=RopeConfig(rope_type="dynamic", factor=2.0, max_model_len=limit),
        layer_types=("full_attention",),
    )


def test_dynamic_ntk_depends_on_the_served_length_and_never_on_the_batch() -> None:
    plain, same, longer = (RotaryEmbedding(dynamic(limit)) for limit in (None, 100, 256))
    assert torch.equal(plain.inv_freq, same.inv_freq)
    assert not torch.allclose(plain.inv_freq, longer.inv_freq)
    short = longer(torch.tensor([5]), torch.float32)[0]
    assert torch.equal(short[0], longer(torch.tensor([5, 255]), torch.float32)[0][0])
    raw = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
    reference = theirs(raw | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}})
    want = reference(torch.zeros(1, 1, 16), torch.arange(256)[None])[0][0]  # its base grows to 256 tokens here
    torch.testing.assert_close(longer(torch.arange(256), torch.float32)[0], want, rtol=1e-5, atol=1e-5)


def test_unknown_types_are_named() -> None:
    with pytest.raises(UnsupportedModel, match="'longrope'"):
        inverse_frequencies(RopeConfig(rope_type="longrope"), 64, 1024)


def test_divisors_scale_the_default_frequencies() -> None:
    plain, _ = inverse_frequencies(RopeConfig(), 8, 1024)
    divided, _ = inverse_frequencies(RopeConfig(freq_divisors=(1.0, 2.0, 4.0, 8.0)), 8, 1024)
    torch.testing.assert_close(divided * torch.tensor([1.0, 2.0, 4.0, 8.0]), plain)


def test_rotation_equals_transformers() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(7, 4, 16), torch.randn(7, 2, 16)
    cos, sin = RotaryEmbedding(dynamic(None))(torch.arange(7), torch.float32)
    want_q, want_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    torch.testing.assert_close(apply_rope(q, cos, sin), want_q[0].transpose(0, 1))
    torch.testing.assert_close(apply_rope(k, cos, sin), want_k[0].transpose(0, 1))


def test_a_partial_rotation_leaves_the_rest_alone() -> None:
    x = torch.randn(3, 2, 16)
    cos, sin = RotaryEmbedding(dynamic(None))(torch.arange(3), torch.float32)
    rotated = apply_rope(x, cos[:, :8], sin[:, :8])
    assert torch.equal(rotated[..., 8:], x[..., 8:])
    assert not torch.equal(rotated[1:, :, :8], x[1:, :, :8])


def test_half_precision_is_computed_in_float32() -> None:
    rope = RotaryEmbedding(dynamic(None))
    positions = torch.tensor([100_000])
    cos, _ = rope(positions, torch.bfloat16)
    exact, _ = rope(positions, torch.float32)
    assert cos.dtype == torch.bfloat16
    assert torch.equal(cos, exact.to(torch.bfloat16))
