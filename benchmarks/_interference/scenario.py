"""What the machine itself gives, measured first; the promises and the rates that follow from it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SCALE = 8  # lengths of the trace are divided by this for a machine of this size
COMMON_LOAD = 0.8  # at which each preset's setting is chosen: of what the machine could do without any targets
STREAMS, STREAM_IN = 8, 32


@dataclass(frozen=True)
class Size:
    """How much is measured. Times in seconds."""

    stream_out: int = 200
    long_in: int = 1000
    long_out: int = 16
    sweep_newcomers: int = 5  # of each variant's first run
    newcomers: int = 8  # of the runs that are told
    rounds: int = 3
    requests: int = 90  # of a run at one rate
    least_requests: int = 45  # of one at a low rate
    most_s: float = 75.0  # at which a low rate's run stops
    calm_s: float = 20.0
    burst_s: float = 10.0
    after_s: float = 60.0
    window: int = 20  # requests in a row that say whether attainment is back
    quiet_requests: int = 24  # of the tenant who does not flood
    flood_slots: int = 32
    steady_s: float = 60.0  # of the parts with traffic that stays the same
    batch_requests: int = 400


FULL = Size()
SMOKE = Size(
    stream_out=40,
    long_in=300,
    long_out=4,
    sweep_newcomers=3,
    newcomers=4,
    rounds=1,
    requests=10,
    least_requests=5,
    most_s=8.0,
    calm_s=3.0,
    burst_s=2.0,
    after_s=6.0,
    window=4,
    quiet_requests=6,
    flood_slots=8,
    steady_s=8.0,
    batch_requests=40,
)


@dataclass(frozen=True)
class Scenario:
    """What was measured, and what follows from it."""

    prefill_s: float  # of a long prompt alone, to its first token
    gap_s: float  # between tokens of eight undisturbed streams
    long_in: int

    @property
    def itl_s(self) -> float:
        return 3 * self.gap_s

    @property
    def period_s(self) -> float:
        """Between two long prompts."""
        return 2 * self.prefill_s

    @property
    def ttft_s(self) -> float:
        """A newcomer may take four times what its prefill takes alone."""
        return 4 * self.prefill_s

    @property
    def promise(self) -> dict[str, float]:
        """As a class of traffic states it."""
        return {"ttft_ms": round(1000 * self.ttft_s, 3), "itl_ms": round(1000 * self.itl_s, 3)}

    @property
    def classes(self) -> dict[str, dict[str, float]]:
        """Whoever is promised anything is promised this: what the built-in classes say is for another machine."""
        return {"interactive": self.promise, "standard": self.promise}

    @property
    def slos(self) -> tuple[str, str]:
        """A request is good inside both: its first token, and 95 % of its gaps."""
        return f"ttft <= {1000 * self.ttft_s:.0f}ms", f"itl_p95 <= {1000 * self.itl_s:.0f}ms"

    def most_per_s(self, lengths: list[tuple[int, int]]) -> float:
        """Requests a second if nobody minded: prefill by the token, decodes as cheap as in a batch of eight."""
        prefills_s = sum(tokens_in for tokens_in, _ in lengths) * self.prefill_s / self.long_in
        decodes_s = sum(tokens_out for _, tokens_out in lengths) * self.gap_s / STREAMS
        return len(lengths) / (prefills_s + decodes_s)


TYPICAL = Scenario(prefill_s=1.9, gap_s=0.035, long_in=FULL.long_in)  # two AVX2 cores: for an estimate of the time


def trace_lengths(path: Path, limit: int = 2000) -> Iterator[tuple[int, int]]:
    """Scaled (input, output) lengths of the conversation trace, in its order."""
    with path.open() as file:
        for number, row in enumerate(csv.DictReader(file)):
            if number >= limit:
                return
            yield max(1, int(row["ContextTokens"]) // SCALE), max(1, int(row["GeneratedTokens"]) // SCALE)
