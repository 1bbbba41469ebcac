"""Time of a step that is no kernel's: launching work, the engine's own loop, answering people.

How much there is depends on the engine, not on the chip. A step's kernels captured in a graph leave gaps of a
microsecond or two between them; launched one by one from Python they may keep the chip waiting altogether. Every row is
scheduled, sampled, detokenised and streamed, beside the next step where the engine works ahead of the chip, after the
last one where it does not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds."""

    layer_s: float = 10e-6  # per layer and step: gaps between the kernels of a graph
    step_s: float = 0.3e-3  # per step: planning, inputs, sampling, the loop itself
    row_s: float = 12e-6  # per request and step
    request_s: float = 16e-3  # per request, once: HTTP, tokenisation, first stream chunk
    launch_s: float = 0.0  # per layer and step: launches without a graph, beside the chip; the longer of both counts

    def waits_s(self, layers: int, chip_s: float) -> float:
        """How long the chip waits for launches in a step that is `chip_s` of work for it."""
        return max(0.0, self.launch_s * layers - chip_s)


# Fitted on closed-loop servings of dense models on H100 and H200, three constants for each engine over all its rows
# (docs/efficiency.md). Ours is timed by `paceline calibrate`.
HOSTS: dict[str, Host] = {
    "vllm": Host(layer_s=6e-6, step_s=0.3e-3, row_s=4e-6),  # 0.14 and later: scheduling ahead of the chip
    "vllm-sync": Host(layer_s=6e-6, step_s=0.5e-3, row_s=40e-6),  # V1 before that
    "trtllm": Host(layer_s=15e-6, step_s=0.02e-3, row_s=9e-6),
    "sglang": Host(layer_s=4e-6, step_s=0.1e-3, row_s=17e-6),
    # Engines of 2023: PyTorch without graphs, a Python worker for each chip, sampling row by row.
    "eager": Host(layer_s=10e-6, step_s=0.5e-3, row_s=0.5e-3, launch_s=0.5e-3),
}
