"""least_load: to where the least work is outstanding, in tokens.

A prompt of 30,000 tokens and one of 30 are one request each and a thousand times apart in work; counting tokens sees
that. A token still to be prefilled occupies the engine once; a sequence that generates slows every step by the KV it
makes the step read. `decode_weight` says how many prefill tokens a held token counts for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.policies.parts.knobs import knob
from paceline.route.policies.base import Ask, Load, Router, least


@dataclass
class LeastLoad(Router):
    """Outstanding tokens, or requests, over speed."""

    by: str = knob("tokens", one_of=("tokens", "requests"))
    # Reading the KV of one position takes about 1/700 of computing a token (128 KiB at 3.35 TB/s, 39 ns, against
    # 16 GFLOP at 600 TFLOP/s, 27 us, for 8 B parameters on an H100). It is read in every step, of which a newcomer
    # sees a handful before its first token: 7 of them make a hundredth.
    decode_weight: float = knob(0.01, least=0.0)

    def pick(self, ask: Ask, loads: Sequence[Load]) -> str:
        """The least loaded; of equals, the one with fewest requests."""
        return min(loads, key=self._load).name

    def _load(self, load: Load) -> tuple[float, int]:
        work = float(load.requests) if self.by == "requests" else outstanding(load, self.decode_weight)
        return work / load.speed, load.requests


def outstanding(load: Load, decode_weight: float) -> float:
    """Work under way at a replica, in prefill tokens."""
    return load.waiting_tokens + decode_weight * load.running_tokens


def lighter(loads: Sequence[Load], decode_weight: float) -> str:
    """The name with least outstanding work for its speed; of equals the first."""
    return least(loads, [outstanding(load, decode_weight) / load.speed for load in loads])
