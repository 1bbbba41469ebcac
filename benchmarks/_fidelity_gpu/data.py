"""Where the measurements are, and figures of errors."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

DATA = Path(__file__).parents[3] / "shared" / "data"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread_of(errors: Sequence[float]) -> dict[str, float]:
    """How signed relative errors are distributed: their median, and the median, p75, p90 and p95 of their size."""
    sizes = [abs(error) for error in errors]
    return {
        "rows": float(len(errors)),
        "bias": statistics.median(errors),
        "median": statistics.median(sizes),
        **{f"p{round(100 * share)}": percentile(sizes, share) for share in (0.75, 0.90, 0.95)},
    }
