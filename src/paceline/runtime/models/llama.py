"""Llama 1 to 3 and the many models of the same shape (SmolLM2 among them)."""

from __future__ import annotations

from paceline.runtime.models.decoder import Decoder


class Llama(Decoder):
    """The decoder as it is."""
