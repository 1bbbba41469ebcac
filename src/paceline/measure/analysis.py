"""From a run folder to its verdict: the one place that reads a folder and calls every part of the analysis.

analysis = analyse(RunFolder("runs/x"), baseline=RunFolder("runs/y"))
analysis.verdict.exit_code
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.measure import cost as costs
from paceline.measure import gates as gate_rules
from paceline.measure import verdict as verdicts
from paceline.measure.crosscheck import CrossCheck, crosscheck
from paceline.measure.folder import RunFolder
from paceline.measure.plan import Arrivals, BenchPlan
from paceline.measure.records import Manifest, RequestRecord, ScrapeRecord, WorkerSample
from paceline.measure.slo import parse_slos
from paceline.measure.summary import RunMetrics, measure_run
from paceline.measure.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Analysis:
    """Everything known about one run, ready to be written down."""

    manifest: Manifest
    plan: BenchPlan
    records: tuple[RequestRecord, ...]  # of the measured phase
    samples: tuple[WorkerSample, ...]
    scrapes: tuple[ScrapeRecord, ...]
    run: RunMetrics
    crosscheck: CrossCheck
    cost: costs.Cost | None
    verdict: Verdict
    baseline: str | None = None  # the name of the run that relative gates were held against


def run_metrics(folder: RunFolder, slos: Sequence[str] | None = None) -> RunMetrics:
    """The metrics of a run, under its own objectives or other ones."""
    plan = BenchPlan.from_dict(folder.manifest.plan)
    return _metrics(folder.records(), plan, slos)


def _metrics(records: Sequence[RequestRecord], plan: BenchPlan, slos: Sequence[str] | None) -> RunMetrics:
    return measure_run(
        records,
        slos=parse_slos(plan.slos if slos is None else slos),
        concurrency=plan.load.concurrency,
        open_loop=plan.load.arrivals is not Arrivals.CLOSED,
    )


def analyse(
    folder: RunFolder,
    *,
    baseline: RunFolder | None = None,
    gates: Sequence[str] | None = None,
    slos: Sequence[str] | None = None,
    price_per_hour: float | None = None,
) -> Analysis:
    """Judge a run by its own gates, objectives and price, or by other ones. Raises ConfigError for unreadable ones."""
    manifest = folder.manifest
    plan = BenchPlan.from_dict(manifest.plan)
    parsed = [gate_rules.parse_gate(text) for text in (plan.gates if gates is None else gates)]
    records, samples, scrapes = folder.records(), folder.samples(), folder.scrapes()
    run = _metrics(records, plan, slos)
    compared = None if baseline is None else run_metrics(baseline, slos)
    results = gate_rules.evaluate_all(parsed, run, compared)
    checked = crosscheck(run, scrapes)
    reasons = [
        *verdicts.findings(manifest, plan, records, run, samples, checked.cache_hit_share),
        *checked.reasons(),
    ]
    price = plan.price_per_hour if price_per_hour is None else price_per_hour
    return Analysis(
        manifest=manifest,
        plan=plan,
        records=tuple(records),
        samples=tuple(samples),
        scrapes=tuple(scrapes),
        run=run,
        crosscheck=checked,
        cost=None if price is None else costs.cost_of(run, price),
        verdict=verdicts.judge(reasons, results),
        baseline=None if baseline is None else baseline.manifest.run_id,
    )
