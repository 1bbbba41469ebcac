"""What a run looks like while it runs: the numbers of the live view. Rough on purpose; the report's are exact."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.measure.jobs import Said

WINDOW_S = 5.0


@dataclass(slots=True)
class Progress:
    """A snapshot for people. Rates are over the last few seconds; quantiles over what ended in them."""

    stage: str = ""  # probing | fitting lengths | self-check | warming up | preparing | running | stopping | done
    elapsed_s: float = 0.0
    planned: int = 0
    planned_s: float | None = None
    sent: int = 0
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    waiting: int = 0
    rate: float | None = None  # sent per second
    tokens_per_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    gap_p50_s: float | None = None
    gap_p95_s: float | None = None
    lag_p99_s: float | None = None
    note: str = ""


def quantile(values: list[float], q: float) -> float | None:
    """Nearest-rank quantile of a small sample, for display; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


@dataclass(slots=True)
class Gauge:
    """Folds the workers' lines into one Progress."""

    progress: Progress
    _latest: dict[int, Said] = field(default_factory=dict)
    _recent: deque[tuple[float, Said]] = field(default_factory=deque)
    _totals: deque[tuple[float, int, int]] = field(default_factory=deque)  # time, sent, tokens

    def take(self, said: Said) -> Progress:
        sample = said.sample
        assert sample is not None
        self._latest[said.worker] = said
        self._recent.append((sample.t_s, said))
        while self._recent[0][0] < sample.t_s - WINDOW_S:
            self._recent.popleft()
        samples = [line.sample for line in self._latest.values() if line.sample is not None]
        progress = self.progress
        progress.elapsed_s = max(s.t_s for s in samples)
        for name in ("sent", "done", "failed", "in_flight", "waiting"):
            setattr(progress, name, sum(getattr(s, name) for s in samples))
        self._rates(progress, sum(s.tokens for s in samples))
        ttft = [value for _, line in self._recent for value in line.ttft_s]
        gaps = [value for _, line in self._recent for value in line.gap_s]
        lags = [value for _, line in self._recent if line.sample is not None for value in line.sample.lags_s]
        progress.ttft_p50_s, progress.ttft_p95_s = quantile(ttft, 0.5), quantile(ttft, 0.95)
        progress.gap_p50_s, progress.gap_p95_s = quantile(gaps, 0.5), quantile(gaps, 0.95)
        progress.lag_p99_s = quantile(lags, 0.99)
        return progress

    def _rates(self, progress: Progress, tokens: int) -> None:
        totals = self._totals
        totals.append((progress.elapsed_s, progress.sent, tokens))
        while len(totals) > 1 and totals[1][0] < progress.elapsed_s - WINDOW_S:
            totals.popleft()
        since = totals[-1][0] - totals[0][0]
        if since > 0.2:
            progress.rate = (totals[-1][1] - totals[0][1]) / since
            progress.tokens_per_s = (totals[-1][2] - totals[0][2]) / since
