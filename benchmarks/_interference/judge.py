"""What the records of a run say. Pure: values in, values out; times in seconds on the schedule's axis.

A failed request counts as infinitely late wherever it should have had a latency.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from paceline.measure.metrics import counted, measure
from paceline.measure.records import ErrorClass, RequestRecord
from paceline.measure.slo import Slo
from paceline.measure.stats import percentile, spearman

HOLDS = 0.95  # share of requests inside all their targets
UNSTABLE = 0.1  # of the period, by which each newcomer waits longer than the one before him: the queue grows for good
WINDOW = 20  # requests in a row that say whether attainment is back


def steady_gaps(records: Iterable[RequestRecord], start_s: float, end_s: float) -> list[float]:
    """Time between tokens, of those that came between `start_s` and `end_s`. A stream that failed is one gap of +inf.

    A stream that the end of the run cut off counts as far as it came.
    """
    gaps = []
    for record in records:
        cut_off = record.error is ErrorClass.CANCELLED
        request = measure(msgspec.structs.replace(record, error=None) if cut_off else record)
        if not request.ok:
            gaps.append(math.inf)
        gaps += [
            gap.seconds / gap.tokens for gap in request.gaps for _ in range(gap.tokens) if start_s <= gap.at_s <= end_s
        ]
    return gaps


def first_tokens(records: Iterable[RequestRecord]) -> list[float]:
    """Time to first token of each, in order of arrival."""
    requests = sorted(map(measure, counted(records)), key=lambda request: request.record.scheduled_s)
    return [math.inf if request.ttft_s is None else request.ttft_s for request in requests]


def streams_row(
    steady: Iterable[RequestRecord], newcomers: Sequence[RequestRecord], period_s: float, apart_s: float = 0.0
) -> dict[str, Any]:
    """The figures of one run of the first part.

    Gaps count while newcomers disturb: from the first one's arrival to the last one's end. `apart_s`: the newcomers'
    zero on the streams' axis.
    """
    start_s = min(record.scheduled_s for record in newcomers) + apart_s
    end_s = max(record.closed_s or math.inf for record in newcomers) + apart_s
    gaps, firsts = steady_gaps(steady, start_s, end_s), first_tokens(newcomers)
    return {
        "itl_p50_s": at(gaps, 50),
        "itl_p99_s": at(gaps, 99),
        "ttft_p50_s": at(firsts, 50),
        "ttft_p95_s": at(firsts, 95),
        "gaps": len(gaps),
        "newcomers": len(firsts),
        "grows": grows(firsts, period_s),
        "failed": sum(not record.ok for record in newcomers),
    }


def at(values: Sequence[float], q: float) -> float:
    """A percentile; +inf when nothing was measured."""
    found = percentile(values, q)
    return math.inf if found is None else found


def grows(ttfts_s: Sequence[float], period_s: float) -> bool:
    """Whether the queue of newcomers grows without end, from their times to first token in order of arrival.

    When each needs longer than the period, each waits longer than the one before him by the difference. So: the median
    slope between any two of them (Theil and Sen's) is over a tenth of the period for each arrival, and their order is
    that of arrival (Spearman's rho above 0.65), which a mere jitter does not give. Fewer than 4 say nothing.
    """
    if len(ttfts_s) < 4:
        return False
    if not all(map(math.isfinite, ttfts_s)):
        return True
    slopes = [(b - a) / (j - i) for i, a in enumerate(ttfts_s) for j, b in enumerate(ttfts_s) if j > i]
    return statistics.median(slopes) > UNSTABLE * period_s and spearman(range(len(ttfts_s)), ttfts_s) > 0.65


def best_inside(results: Mapping[str, Mapping[str, Any]], itl_s: float) -> str | None:
    """The preset whose newcomers come first among those that hold the streams' p99 inside the target."""
    inside = {name: row for name, row in results.items() if name != "slo" and row["itl_p99_s"] <= itl_s}
    return min(inside, key=lambda name: inside[name]["ttft_p95_s"]) if inside else None


def nearest(results: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The preset that disturbs the streams least, where none is inside the target."""
    rivals = [name for name in results if name != "slo"]
    return min(rivals, key=lambda name: (results[name]["itl_p99_s"], results[name]["ttft_p95_s"])) if rivals else None


def best_of_each(goodputs: Mapping[str, Mapping[str, Any]], preset_of: Mapping[str, str]) -> dict[str, str]:
    """The setting of each preset that is good for most; of equals, the one with the shortest gaps."""
    best: dict[str, str] = {}
    for name, row in goodputs.items():
        preset = preset_of[name]
        if preset not in best or _merit(row) > _merit(goodputs[best[preset]]):
            best[preset] = name
    return best


def _merit(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["goodput"], -row["itl_p99_s"]


def outcomes(records: Iterable[RequestRecord], slos: Sequence[Slo]) -> list[tuple[float, bool]]:
    """(scheduled time, whether it was inside all its targets) of every request sent, in order of time."""
    found = []
    for request in map(measure, counted(records)):
        answers = [slo.holds(request) for slo in slos]
        found.append((request.record.scheduled_s, request.ok and all(answer is not False for answer in answers)))
    return sorted(found)


def share(found: Sequence[tuple[float, bool]]) -> float:
    """The share of good ones; 0 of none."""
    return sum(good for _, good in found) / len(found) if found else 0.0


def recovery_s(found: Sequence[tuple[float, bool]], end_s: float, width: int = WINDOW) -> float | None:
    """How long after a burst that ended at `end_s` attainment was back; None: not in this run.

    A window of `width` requests in a row, by scheduled time, moves over those scheduled after the burst. Attainment is
    back with the first good request whose window has 95 % inside their targets.
    """
    after = [(at_s, good) for at_s, good in found if at_s >= end_s]
    for first in range(len(after) - width + 1):
        window = after[first : first + width]
        if window[0][1] and share(window) >= HOLDS:
            return window[0][0] - end_s
    return None


def attainment(found: Sequence[tuple[float, bool]], width: int = WINDOW) -> list[tuple[float, float]]:
    """(scheduled time of its last request, share inside the targets) of each window of `width` requests in a row."""
    windows = (found[first : first + width] for first in range(len(found) - width + 1))
    return [(window[-1][0], share(window)) for window in windows]


def lost(records: Iterable[RequestRecord]) -> int:
    """Requests that ended in an error other than a refusal (429): dropped, cut off, failed or never answered."""
    return sum(
        not record.ok and not (record.error is ErrorClass.REJECTED and record.status == 429) for record in records
    )


AGAIN = 2  # added to the number of an attempt that is repeated


def highest(
    holds: Callable[[float, int], bool], start: float, *, floor: float, resolution: float = 0.1
) -> float | None:
    """The highest rate that holds, to `resolution`; None when not even `floor` does.

    `holds(rate, attempt)` runs once; attempts at one rate have arrivals of their own. From `start` the rate goes up or
    down in growing steps until it is bracketed, then the bracket is halved on the logarithm. A second run must confirm
    the answer, else the search goes on below it. A run that does not hold is repeated once, with arrivals of its own: a
    slow moment of the machine is no limit. A hundred times `start` is as high as anybody looks.
    """

    def once_of_two(rate: float, attempt: int) -> bool:
        return holds(rate, attempt) or holds(rate, attempt + AGAIN)

    rate, high = start, None
    while True:
        low, high = _bracket(once_of_two, rate, high, floor, (1 + resolution) ** 2)
        if low is None or high is None:
            return low
        while high / low > (1 + resolution) * (1 + 1e-9):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if once_of_two(middle, 0) else (low, middle)
        if once_of_two(low, 1):
            return low
        if low <= floor:
            return None
        rate, high = max(floor, low / (1 + resolution)), low


def _bracket(
    holds: Callable[[float, int], bool], rate: float, high: float | None, floor: float, step: float
) -> tuple[float | None, float | None]:
    """A rate that holds and a higher one that does not, from `rate` in growing steps; None for one there is not."""
    low, most = None, 100 * rate
    while low is None or high is None:
        if holds(rate, 0):
            low = rate
            if rate >= most:
                break
            rate = min(rate * step, most)
        else:
            high = rate
            if rate <= floor:
                break
            rate = max(floor, rate / step)
        step = step * step
    return low, high


def finite(value: Any) -> Any:
    """Nested values with what JSON has no number for (infinite, undefined) as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, (list, tuple)) else value
