"""Qwen3: no biases, queries and keys normalized head by head."""

from __future__ import annotations

from paceline.runtime.models.decoder import Decoder


class Qwen3(Decoder):
    """The decoder with norms on queries and keys."""

    qk_norm = True
