"""Rotary position embedding: the frequencies of each variant, and the rotation itself.

A paged cache stores keys after rotation, so the rotation of a position must never change once it has been written,
and must not depend on what else is in the batch. Most variants are functions of the position alone. Dynamic NTK is
not: its base grows with the length of the sequence. Here that length is fixed when the model is loaded, as the
longest context that the server accepts (`RopeConfig.max_model_len`). Up to `max_position_embeddings`, which is the
default for such a model, the frequencies are the original ones and the output equals that of transformers'
`generate`. A server opened to a longer context uses the frequencies of that context for every request, short ones
included; `generate` instead mixes rotations while a sequence grows (keys cached earlier keep the old base), which no
cache shared between requests can reproduce.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.errors import UnsupportedModel
from paceline.runtime.formats.config import ModelConfig, RopeConfig

_FIRST_TABLE = 1024  # positions

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


class RotaryEmbedding:
    """Cosines and sines for a step's positions; one per model, its result shared by all layers.

    They are looked up in a table, so a position has the same bits in any batch. It grows with the longest context.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        inv_freq, self.attention_scaling = inverse_frequencies(
            config.rope, config.head_dim, config.max_position_embeddings
        )
        self.inv_freq = inv_freq.to(device)  # [rotary_dim / 2], float32
        self._tables: dict[torch.dtype, Tensor] = {}  # [positions, 2, rotary_dim]: cos, sin

    def __call__(self, positions: Tensor, dtype: torch.dtype, end: int | None = None) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, rotary_dim] in `dtype`, for positions [T]. Computed in float32 whatever the dtype.

        `end` is beyond every position; a caller who knows it saves asking the device.
        """
        end = int(positions.max()) + 1 if end is None else end
        table = self._tables.get(dtype)
        if table is None or len(table) < end:
            table = self._tables[dtype] = self._table(max(_FIRST_TABLE, 1 << (end - 1).bit_length()), dtype)
        cos, sin = table.index_select(0, positions).unbind(1)
        return cos, sin

    def _table(self, end: int, dtype: torch.dtype) -> Tensor:
        positions = torch.arange(end, device=self.inv_freq.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inv_freq)  # [end, rotary_dim / 2]
        angles = torch.cat((angles, angles), dim=-1)
        return (torch.stack((angles.cos(), angles.sin()), dim=1) * self.attention_scaling).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading `rotary_dim` features of x [T, heads, head_dim] by cos and sin [T, rotary_dim].

    Pairs are (i, i + rotary_dim / 2), Hugging Face's layout. Features beyond rotary_dim pass through.
    """
    rotary_dim = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = x[..., :rotary_dim]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """(inverse frequencies [rotary_dim / 2] in float32 on the CPU, factor on cos and sin).

    Raises UnsupportedModel for a rope type that is not in ROPE_TYPES.
    """
    dim = int(head_dim * rope.partial_rotary_factor)
    if rope.rope_type == "default":
        inv_freq = _base_frequencies(rope.rope_theta, dim)
        if rope.freq_divisors:
            inv_freq = inv_freq / torch.tensor(rope.freq_divisors, dtype=torch.float32)
        return inv_freq, 1.0
    if rope.rope_type == "linear":
        return _base_frequencies(rope.rope_theta, dim) / (rope.factor or 1.0), 1.0
    if rope.rope_type == "dynamic":
        length = max(rope.max_model_len or 0, max_position_embeddings)
        factor = rope.factor or 1.0
        stretch = factor * length / max_position_embeddings - (factor - 1)
        return _base_frequencies(rope.rope_theta * stretch ** (dim / (dim - 2)), dim), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, dim, max_position_embeddings), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, dim, max_position_embeddings)
    raise UnsupportedModel(
        f"rope type {rope.rope_type!r} has no native implementation (known: {', '.join(ROPE_TYPES)})"
    )


def _base_frequencies(theta: float, dim: int) -> Tensor:
    """theta ** (-2i / dim) for i in [0, dim / 2)."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim))


def _llama3(rope: RopeConfig, dim: int, max_position_embeddings: int) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a linear blend (in turns per context) between."""
    inv_freq = _base_frequencies(rope.rope_theta, dim)
    factor, low, high = rope.factor or 1.0, rope.low_freq_factor or 1.0, rope.high_freq_factor or 4.0
    context = rope.original_max_position_embeddings or max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    blend = (context / wavelength - low) / (high - low)
    blended = (1 - blend) * inv_freq / factor + blend * inv_freq
    scaled = torch.where(wavelength > context / low, inv_freq / factor, blended)
    return torch.where(wavelength < context / high, inv_freq, scaled)


def _yarn(rope: RopeConfig, dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """NTK by parts: fast dimensions extrapolate, slow ones interpolate; and the attention factor of the paper."""
    theta, context = rope.rope_theta, rope.original_max_position_embeddings or max_position_embeddings
    factor = rope.factor if rope.factor is not None else max_position_embeddings / context

    def dimension_of(turns: float) -> float:
        """The dimension whose frequency makes `turns` turns over the original context."""
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(rope.beta_fast or 32.0), dimension_of(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp has no width: make it a step
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim)
    keep = 1 - ramp
    inv_freq = 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep
    return inv_freq, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    """What cos and sin are multiplied by: given, or inferred from the factor and the two mscales."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
