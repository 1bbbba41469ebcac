"""How near the simulator comes to the server that it was calibrated on, for traffic that it has not seen.

    python benchmarks/fidelity.py [--quick] [--json FILE] [--out DIR] [--model PATH]

For each scenario:

1. `paceline calibrate` on this machine, two minutes, policy decode_first: a shared machine of a quarter of an hour ago
   is another one.
2. The capacity by the calibrated simulator: what it completes per second with a backlog.
3. The scenario at a share of that capacity, three times for real: `paceline serve` and `paceline bench`'s own code.
4. The same schedule (same seed: arrivals, lengths) simulated with as many seeds of the step-time noise.
5. p50 and p95 of TTFT, ITL and E2E side by side. The error is that of the median simulated value against the median of
   the real ones. Its bound is 10 % below 85 % of capacity and 20 % at capacity, or the spread of the real repeats
   ((max - min) / median) where that is larger: nobody can predict better than the thing repeats itself.

Results go to --out one by one, and what is there is not measured again: an interrupted run is taken up by the same
command, and a new one wants a new folder. About 22 minutes on a quiet machine of two cores. --quick goes through all of
it with sizes that prove nothing. The table is also written as DIR/fidelity.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from _common import Report, arguments
from _server import default_model, server

from paceline.app.build import settings_from_arguments
from paceline.app.calibrating import calibrate, doubts
from paceline.core.config import SchedulerConfig
from paceline.cost.fit import Calibration, load_calibration
from paceline.cost.online import OnlineCost
from paceline.measure.analysis import run_metrics
from paceline.measure.plan import Arrivals, BenchPlan, ClientPlan, Length, Load, Prompts, Target
from paceline.measure.runner import run
from paceline.measure.summary import RunMetrics, measure_run
from paceline.simulate.drive import drive
from paceline.simulate.overheads import Overheads
from paceline.simulate.replica import Replica
from paceline.simulate.traffic import planned

KV_GIB = 2.0  # given, so that the simulated engine has the blocks of the real one whatever memory is free today
METRICS, PERCENTILES = ("ttft", "itl", "e2e"), (50.0, 95.0)
BELOW, AT_CAPACITY = 0.10, 0.20  # bounds of the error
BELOW_SHARE = 0.85  # of capacity
BACKLOG = 400  # requests that a capacity is measured with


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    calibrate_s: float
    seconds: float  # of arrivals in a run
    least_requests: int  # however long they take: a p95 of fewer says nothing
    repeats: int


FULL, QUICK = Size(120.0, 45.0, 60, 3), Size(15.0, 4.0, 4, 2)


@dataclass(frozen=True)
class Scenario:
    """Traffic and policy; the rate is `share` of what the engine can complete."""

    name: str
    policy: str
    share: float
    prompt: Length
    output: Length
    seed: int

    @property
    def bound(self) -> float:
        return BELOW if self.share <= BELOW_SHARE else AT_CAPACITY

    def plan(self, url: str, load: Load, salt: str = "") -> BenchPlan:
        """`salt` changes the words of the prompts and nothing else: no repeat finds another's in the cache."""
        return BenchPlan(
            target=Target(url=url, endpoint="completions", ignore_eos="on"),
            load=load,
            prompts=Prompts(input=self.prompt, output=self.output, salt=salt),
            client=ClientPlan(warmup_requests=4, self_check=False, keep_text=False),
            seed=self.seed,
        )


def lognormal(median: float, sigma: float, most: int, low: int = 4) -> Length:
    return Length(kind="lognormal", value=median, sigma=sigma, low=low, high=most)


CHAT = lognormal(160, 0.7, 900), lognormal(48, 0.6, 200)
DOCUMENTS = lognormal(480, 0.5, 1400), lognormal(20, 0.5, 64)
TALK = lognormal(48, 0.6, 200), lognormal(96, 0.5, 300)
SCENARIOS = (
    Scenario("chat, half load", "decode_first", 0.5, *CHAT, seed=11),
    Scenario("documents, prefill first, 70 %", "prefill_first", 0.7, *DOCUMENTS, seed=12),
    Scenario("long answers, slo, 80 %", "slo", 0.8, *TALK, seed=13),
    Scenario("chat, at capacity", "decode_first", 1.0, *CHAT, seed=14),
)


@dataclass(frozen=True)
class Kept:
    """Results by name; what is there is not measured again."""

    folder: Path

    def get(self, key: str, work: Callable[[], Any]) -> Any:
        """The result under this key, made now if there is none."""
        path = self.folder / f"{self.slug(key)}.json"
        if path.exists():
            return json.loads(path.read_text())
        print(f"  {key}", file=sys.stderr, flush=True)
        value = work()
        part = path.with_suffix(".part")
        part.write_text(json.dumps(value, indent=1))
        part.replace(path)  # a kill leaves the whole result or none
        return value

    def run_folder(self, key: str) -> Path:
        """A new folder for a run's records; one that an interruption left stays beside it."""
        number = 0
        while (path := self.folder / "runs" / f"{self.slug(key)}-{number}").exists():
            number += 1
        return path

    @staticmethod
    def slug(key: str) -> str:
        return "".join(letter if letter.isalnum() else "-" for letter in key)


def calibrated(scenario: Scenario, model: Path, kept: Kept, size: Size) -> Calibration:
    """The calibration before a scenario; made by the code of `paceline calibrate` if it is not there."""
    path = kept.folder / f"{kept.slug(f'calibration {scenario.name}')}.json"
    if not path.exists():
        print(f"  calibrating for {scenario.name}: {size.calibrate_s:g} s", file=sys.stderr, flush=True)
        settings = settings_from_arguments("fidelity", str(model), {"dtype": "float32", "kv_gib": KV_GIB})
        calibrate(settings, size.calibrate_s, seed=0, told=lambda _: None).save(path)
    return load_calibration(path)


def simulated(scenario: Scenario, load: Load, calibration: Calibration, seed: int) -> RunMetrics:
    """The scenario on the simulated engine: the server's scheduler, loop and settings, the calibrated times."""
    names = ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    config = SchedulerConfig(policy=scenario.policy, **{name: calibration.engine[name] for name in names})
    jitter = random.Random(f"{scenario.seed}:{seed}")
    replica = Replica("engine", config, calibration.cost, learns=OnlineCost(), jitter=jitter)
    replica.warm_up()
    overheads = Overheads(**asdict(calibration.overheads))
    return measure_run(drive(planned(scenario.plan("", load)), replica, overheads=overheads).records)


def capacity(scenario: Scenario, calibration: Calibration) -> float:
    """Requests per second that are completed while more wait than can run."""
    load = Load(arrivals=Arrivals.CONSTANT, rate=1000.0, requests=BACKLOG)
    metrics = simulated(scenario, load, calibration, seed=0)
    ends = sorted(one.record.closed_s or 0.0 for one in metrics.requests if one.ok)
    first, last = len(ends) // 5, 4 * len(ends) // 5  # neither filling up nor running dry
    return (last - first) / (ends[last] - ends[first])


def real(scenario: Scenario, load: Load, url: str, kept: Kept, repeat: int) -> dict[str, float | None]:
    """One repeat of the scenario against the server."""
    key = f"{scenario.name} {repeat}"
    folder = run(scenario.plan(url, load, salt=f"repeat-{repeat}"), kept.run_folder(key))
    return figures(run_metrics(folder))


def figures(metrics: RunMetrics) -> dict[str, float | None]:
    """What is compared, in seconds; failures count as infinitely late (None in the file)."""
    found: dict[str, float | None] = {"failed": metrics.failed}
    for name in METRICS:
        for q in PERCENTILES:
            entry = metrics.latencies[name].quantile(q, with_failures=True)
            value = None if entry is None else entry.value
            found[f"{name} p{q:g}"] = None if value is None or value == float("inf") else value
    return found


def measured(scenario: Scenario, load: Load, model: Path, kept: Kept, size: Size) -> list[dict[str, float | None]]:
    """All repeats against one server, started only where one is missing."""
    keys = [f"real {scenario.name} {repeat}" for repeat in range(size.repeats)]
    if all((kept.folder / f"{kept.slug(key)}.json").exists() for key in keys):
        return [kept.get(key, dict) for key in keys]
    flags = ["--policy", scenario.policy, "--kv-gib", str(KV_GIB), "--no-batches", "--log-format", "json"]
    with server(model, flags) as url:
        return [kept.get(key, partial(real, scenario, load, url, kept, n)) for n, key in enumerate(keys)]


@dataclass(frozen=True)
class Compared:
    """One figure, real and simulated."""

    scenario: Scenario
    name: str
    real: tuple[float, ...]
    simulated: tuple[float, ...]

    @property
    def spread(self) -> float:
        return (max(self.real) - min(self.real)) / statistics.median(self.real)

    @property
    def error(self) -> float:
        return statistics.median(self.simulated) / statistics.median(self.real) - 1.0

    @property
    def bound(self) -> float:
        return max(self.scenario.bound, self.spread)

    @property
    def holds(self) -> bool:
        return abs(self.error) <= self.bound

    def row(self) -> str:
        """A line of the table, in milliseconds."""
        real_ms, simulated_ms = 1e3 * statistics.median(self.real), 1e3 * statistics.median(self.simulated)
        verdict = "yes" if self.holds else "NO"
        return (
            f"| {self.scenario.name} | {self.name} | {real_ms:.1f} | {self.spread:.1%} | {simulated_ms:.1f} "
            f"| {self.error:+.1%} | {self.bound:.1%} | {verdict} |"
        )


def compare(scenario: Scenario, model: Path, kept: Kept, size: Size, report: Report) -> list[Compared]:
    """A scenario, real and simulated. Figures that failures made infinite are left out, and the failures told."""
    calibration = calibrated(scenario, model, kept, size)
    median, p95 = calibration.cost.errors()
    steps = calibration.provenance["steps"]
    report.note(f"{scenario.name}: steps off by, unseen", f"{median:.1%} median, {p95:.1%} p95 of {steps}")
    for doubt in doubts(calibration):
        report.note(f"{scenario.name}: careful", doubt)
    most = kept.get(f"capacity {scenario.name}", lambda: capacity(scenario, calibration))
    rate = round(scenario.share * most, 3)
    requests = max(size.least_requests, round(rate * size.seconds))
    load = Load(arrivals=Arrivals.POISSON, rate=rate, requests=requests)
    reals = measured(scenario, load, model, kept, size)
    ours = [figures(simulated(scenario, load, calibration, seed)) for seed in range(max(5, size.repeats))]
    found = []
    for name in (f"{name} p{q:g}" for name in METRICS for q in PERCENTILES):
        columns = [tuple(value for run in runs if (value := run[name]) is not None) for runs in (reals, ours)]
        if all(columns):
            found.append(Compared(scenario, name, *columns))
    print(f"  {scenario.name}: {load.rate:g} requests/s of {most:.3g}, failed {sum(r['failed'] or 0 for r in reals):g}")
    return found


def main() -> int:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", type=Path, default=default_model(), help="a .gguf file or a folder")
        parser.add_argument("--out", type=Path, default=Path("results/fidelity"), help="where results are kept")

    args = arguments(__doc__, add)
    if not args.model.exists():
        print(f"fidelity: skipped, {args.model} is not there; run `paceline pull smollm2-135m` first")
        return 0
    size = QUICK if args.quick else FULL
    kept = Kept(args.out / "quick" if args.quick else args.out)
    kept.folder.mkdir(parents=True, exist_ok=True)
    report = Report("fidelity", args)
    rows: list[Compared] = []
    for scenario in SCENARIOS:
        for one in compare(scenario, args.model, kept, size, report):
            rows.append(one)
            report.add(f"{scenario.name}: {one.name}, real", one.real, "s")
            report.add(f"{scenario.name}: {one.name}, simulated", one.simulated, "s")
    head = "| traffic | figure | real, ms | its spread | simulated, ms | error | bound | inside |\n" + "|---" * 8 + "|"
    table = "\n".join([head, *(one.row() for one in rows)])
    (kept.folder / "fidelity.md").write_text(table + "\n")
    print(table)
    report.note("inside their bounds", f"{sum(one.holds for one in rows)} of {len(rows)}")
    report.note("median error", f"{statistics.median(abs(one.error) for one in rows):.1%}" if rows else "none")
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
