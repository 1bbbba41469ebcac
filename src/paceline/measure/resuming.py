"""What an interrupted run has done already, and where on its axis the rest begins."""

from __future__ import annotations

from paceline.measure.plan import Arrivals, BenchPlan
from paceline.measure.records import ErrorClass, Manifest, RequestRecord
from paceline.measure.schedule import Arrival


def done_indexes(records: list[RequestRecord]) -> set[int]:
    """Arrivals that need not run again: answered to their last turn, or failed on their own."""
    return {
        r.index
        for r in records
        if r.error is not ErrorClass.CANCELLED and (r.error is not None or r.turn == r.turns - 1)
    }


def resume_point(
    plan: BenchPlan, arrivals: list[Arrival], done: set[int], manifest: Manifest, last_s: float
) -> float | None:
    """Where on the axis the rest begins; None: nothing is left."""
    left = [arrival for arrival in arrivals if arrival.index not in done]
    if plan.load.arrivals is not Arrivals.CLOSED:
        return min((arrival.at_s or 0.0 for arrival in left), default=None)
    used = max([last_s, *(s.ended_s or 0.0 for s in manifest.segments)])
    if plan.load.duration_s is not None:
        return used if used < plan.load.duration_s else None
    return used if left else None
