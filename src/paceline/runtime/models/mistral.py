"""Mistral: Llama with a sliding window in every layer, which the config gives."""

from __future__ import annotations

from paceline.runtime.models.decoder import Decoder


class Mistral(Decoder):
    """The decoder as it is."""
