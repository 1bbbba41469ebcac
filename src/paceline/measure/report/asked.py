"""What was asked of the server, in figures: how long prompts and answers were to be, and how far apart they came.

The plan says "log-normal" or names a trace that the reader does not have; these are the numbers that were really sent.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath

from paceline.measure.analysis import Analysis
from paceline.measure.plan import Arrivals
from paceline.measure.records import RequestRecord
from paceline.measure.report import words
from paceline.measure.report.html import Cell, Entry, facts, paragraph, table
from paceline.measure.stats import mean, percentile

_QUANTILES = (50.0, 90.0, 99.0)


def asked(analysis: Analysis) -> Iterable[str]:
    """The sentence, the distributions, and where a trace came from."""
    yield paragraph(words.load(analysis.plan))
    rows = [row for row in _distributions(analysis) if row]
    if rows:
        yield table(["", "n", "mean", "min", "p50", "p90", "p99", "max"], rows)
    yield facts(_source(analysis))


def _distributions(analysis: Analysis) -> Iterable[list[Entry]]:
    records = [record for record in analysis.records if record.sent]
    yield _row("prompt tokens", *_prompt_lengths(records), words.count)
    wanted = [float(r.output_tokens_wanted) for r in records if r.output_tokens_wanted]
    forced = bool(records) and all(r.length_forced for r in records)
    yield _row("output tokens", wanted, "as forced" if forced else "at most, as asked", words.count)
    if analysis.plan.load.arrivals is not Arrivals.CLOSED:
        due = sorted(r.scheduled_s for r in records if not r.turn)
        gaps = [after - before for before, after in itertools.pairwise(due)]
        yield _row("between arrivals", gaps, "as scheduled", words.duration)
    talks = [float(turns) for turns in {r.index: r.turns for r in records}.values()]
    if any(turns > 1 for turns in talks):
        yield _row("turns", talks, "of a conversation", words.count)


def _prompt_lengths(records: Sequence[RequestRecord]) -> tuple[list[float], str]:
    """Lengths by the server's own count where it tells, else as they were wanted; which of the two."""
    told = [float(r.usage.prompt_tokens) for r in records if r.usage is not None and r.usage.prompt_tokens is not None]
    if told:
        return told, "as the server counted"
    return [float(r.prompt_tokens_wanted) for r in records if r.prompt_tokens_wanted], "as wanted"


def _row(name: str, values: list[float], note: str, show: Callable[[float | None], str]) -> list[Entry]:
    if not values:
        return []
    quantiles = [show(percentile(values, q)) for q in _QUANTILES]
    figures = [f"{len(values):,}", show(mean(values)), show(min(values)), *quantiles, show(max(values))]
    return [Cell(name, note, "left"), *figures]


def _source(analysis: Analysis) -> Iterable[tuple[str, str]]:
    plan, records = analysis.plan, analysis.records
    if plan.trace is not None:
        trace = plan.trace
        parts = [PurePath(trace.path).name, "" if trace.format == "auto" else trace.format]
        parts += [f"{trace.speed:g} times as fast" if trace.speed != 1.0 else ""]
        parts += [f"without its first {trace.skip:,} rows" if trace.skip else ""]
        parts += [f"at most {trace.limit:,} rows" if trace.limit is not None else ""]
        yield "trace", ", ".join(part for part in parts if part)
    elif plan.prompts.file is not None:
        yield "prompts", PurePath(plan.prompts.file).name
    for name, labels in (
        ("classes", [record.traffic_class for record in records]),
        ("tenants", [record.tenant for record in records]),
    ):
        if any(labels):
            counts = Counter(label or "none" for label in labels)
            yield name, ", ".join(f"{label} {count:,}" for label, count in sorted(counts.items()))
