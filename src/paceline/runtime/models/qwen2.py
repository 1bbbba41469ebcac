"""Qwen2 and Qwen2.5: biases on q, k and v, and layers that may slide; the config gives both."""

from __future__ import annotations

from paceline.runtime.models.decoder import Decoder


class Qwen2(Decoder):
    """The decoder as it is."""
