"""Gates: their language, their statistics, and that nothing passes which was not shown."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.measure import gate_parser
from paceline.measure.gates import Status, evaluate, joint_confidence, parse_gate
from paceline.measure.records import ErrorClass
from paceline.measure.slo import format_seconds, parse_duration, parse_slos
from paceline.measure.summary import RunMetrics, measure_run
from tests.measure.making import failed, records_of, run_of, streamed

INF = math.inf


def status(text: str, run: RunMetrics, baseline: RunMetrics | None = None) -> Status:
    return evaluate(parse_gate(text), run, baseline).status


@pytest.mark.parametrize(
    ("text", "kind", "metric", "q", "bound"),
    [
        ("p95 ttft <= 500ms", "percentile", "ttft", 95.0, 0.5),
        ("  P95   TTFT<=0.5 s ", "percentile", "ttft", 95.0, 0.5),
        ("ttft p99.9 < 2s", "percentile", "ttft", 99.9, 2.0),
        ("p95(ttft) ≤ 500ms", "percentile", "ttft", 95.0, 0.5),
        ("median itl <= 800us", "percentile", "itl", 50.0, 0.0008),
        ("p90 itl_p99 <= 100ms", "percentile", "itl_p99", 90.0, 0.1),
        ("p95 ttft_service <= 1s", "percentile", "ttft_service", 95.0, 1.0),
        ("mean tpot <= 40ms", "mean", "tpot", None, 0.04),
        ("max e2e <= 1min", "max", "e2e", None, 60.0),
        ("goodput >= 95%", "share", "goodput", None, 0.95),
        ("goodput(ttft<=500ms, tpot<=50ms) >= 0.95", "share", "goodput", None, 0.95),
        ("error_rate <= 1%", "share", "error_rate", None, 0.01),
        ("success >= 99.5%", "share", "success", None, 0.995),
        ("timeouts <= 0", "count", "timeouts", None, 0.0),
        ("violations(ttft > 1s) <= 3", "count", "violations", None, 3.0),
        ("output_throughput >= 900 tok/s", "rate", "output_throughput", None, 900.0),
        ("plateau.output_throughput >= 900", "rate", "output_throughput", None, 900.0),
    ],
)
def test_language(text: str, kind: str, metric: str, q: float | None, bound: float) -> None:
    gate = parse_gate(text)
    assert (gate.kind, gate.metric, gate.q) == (kind, metric, q)
    assert gate.bound.value == pytest.approx(bound)


@pytest.mark.parametrize(
    ("text", "factor", "offset"),
    [
        ("p95 ttft <= baseline", 1.0, 0.0),
        ("p95 ttft <= baseline + 10%", 1.1, 0.0),
        ("p95 ttft <= baseline - 5%", 0.95, 0.0),
        ("p95 ttft <= 1.1 * baseline", 1.1, 0.0),
        ("p95 ttft <= 1.1x baseline", 1.1, 0.0),
        ("p95 ttft <= baseline * 1.1", 1.1, 0.0),
        ("p95 ttft <= 110% of baseline", 1.1, 0.0),
        ("p95 ttft <= baseline + 20ms", 1.0, 0.02),
        ("goodput >= baseline - 2%", 0.98, 0.0),
    ],
)
def test_relative_bounds(text: str, factor: float, offset: float) -> None:
    bound = parse_gate(text).bound
    assert bound.relative
    assert [bound.factor, bound.offset] == pytest.approx([factor, offset])


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("p95 ttft <= 500", "unit"),
        ("p95 ttft == 500ms", "<= or >="),
        ("p95 ttft", "not a gate"),
        ("p95 warp <= 1s", "unknown latency"),
        ("speed <= 1s", "cannot read"),
        ("p95 ttft >= 500ms", "above"),
        ("goodput <= 95%", "below"),
        ("goodput >= 950", "95%"),
        ("0ms <= p95 ttft <= 1s", "more than one"),
        ("p100 ttft <= 1s", "cannot read"),
        ("p0 ttft <= 1s", "max"),
        ("violations <= 3", "say of what"),
        ("plateau.goodput >= 95%", "plateau"),
        ("p95 ttft <= baseline ^ 2", "baseline + 10%"),
        ("mean(ttft, tpot) <= 1s", "unknown latency"),
        ("goodput(ttft<=1s, ttft<=2s) >= 95%", "more than one objective"),
        ("", "not a gate"),
    ],
)
def test_bad_gates_say_what_is_wrong(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint.replace("+", r"\+")):
        parse_gate(text)


def test_gates_of_the_documentation_can_be_read() -> None:
    """Every gate in the table of docs/measuring.md and in the parser's own docstring."""
    text = (Path(__file__).parents[2] / "docs" / "measuring.md").read_text()
    table = text[text.index("## Gates") : text.index("claims that at most")]
    found = [gate for gate in re.findall(r"`([^`]+)`", table) if re.search(r"[<>]=", gate)]
    assert len(found) >= 12
    doc = gate_parser.__doc__ or ""
    found += [re.split(r"\s{3,}", line.strip())[0] for line in doc.splitlines() if re.search(r"[<>]=", line)]
    for gate in found:
        parse_gate(gate)


def test_durations() -> None:
    assert parse_duration("1.5 s") == 1.5
    assert parse_duration("2min") == 120
    assert parse_duration(format_seconds(0.1474)) == pytest.approx(0.1474)
    assert format_seconds(INF) == "∞"
    for bad in ("500", "ms", "-5ms", "5 parsec", "nan s"):
        with pytest.raises(ConfigError, match="not a duration"):
            parse_duration(bad)


@pytest.mark.parametrize(
    ("n", "violations", "expected"),
    [
        (299, 0, Status.PASS),  # the smallest n that can show a p99
        (298, 0, Status.UNDECIDED),
        (2000, 5, Status.PASS),
        (2000, 20, Status.UNDECIDED),  # exactly at the bound
        (2000, 60, Status.FAIL),
        (50, 40, Status.FAIL),  # too few to pass, not too few to fail
    ],
)
def test_p99_gate_is_a_binomial_test(n: int, violations: int, expected: Status) -> None:
    rng = random.Random(0)
    slow = set(rng.sample(range(n), violations))
    run = run_of([600.0 if i in slow else 100.0 for i in range(n)])
    result = evaluate(parse_gate("p99 ttft <= 500ms"), run)
    assert result.status is expected, result.why
    assert (result.n, result.violations) == (n, violations)
    assert result.too_few is (expected is Status.UNDECIDED and n < 299)


def test_clustered_violations_are_not_taken_for_many() -> None:
    """The same 50 violations of 2,000: scattered they pass p95, in one stall they show one event."""
    rng = random.Random(1)
    scattered = set(rng.sample(range(2000), 50))
    assert status("p95 ttft <= 500ms", run_of([600.0 if i in scattered else 100.0 for i in range(2000)])) is Status.PASS
    stalled = run_of([600.0 if 1000 <= i < 1050 else 100.0 for i in range(2000)])
    result = evaluate(parse_gate("p95 ttft <= 500ms"), stalled)
    assert result.status is Status.UNDECIDED
    assert "clustered" in result.why


def test_error_probability_of_the_gate() -> None:
    """A server exactly at its bound passes in about one run in twenty, not more."""
    rng = random.Random(2)
    gate = parse_gate("p90 ttft <= 500ms")
    passes = 0
    for _ in range(150):
        run = run_of([600.0 if rng.random() < 0.1 else 100.0 for _ in range(300)], tokens=1)
        passes += evaluate(gate, run).status is Status.PASS
    assert passes <= 16  # 5 % of 150 is 7.5; 16 is beyond three standard deviations


def test_half_failed_fails_although_every_success_is_fast() -> None:
    run = run_of([100.0, INF] * 50)
    result = evaluate(parse_gate("p95 ttft <= 500ms"), run)
    assert result.status is Status.FAIL
    assert result.value == INF
    assert "50 failed" in result.why
    assert status("p95 itl <= 1s", run) is Status.FAIL
    assert status("mean ttft <= 500ms", run) is Status.FAIL
    assert status("max ttft <= 500ms", run) is Status.FAIL
    assert status("error_rate <= 1%", run) is Status.FAIL
    assert status("success >= 99%", run) is Status.FAIL
    assert status("goodput(ttft<=1s) >= 95%", run) is Status.FAIL


@pytest.mark.parametrize(
    "text",
    [
        "p50 ttft <= 500ms",
        "p95 tpot <= 1s",
        "p99 itl <= 1s",
        "mean ttft <= 1s",
        "max ttft <= 1s",
        "goodput(ttft<=1s) >= 50%",
        "success >= 50%",
        "error_rate <= 50%",
        "timeouts <= 0",
        "violations(ttft > 1s) <= 5",
        "output_throughput >= 1",
        "plateau.output_throughput >= 1",
    ],
)
def test_fail_closed_on_nothing(text: str) -> None:
    assert status(text, measure_run([])) is Status.FAIL


def test_undefined_is_a_violation_and_inapplicable_is_left_out() -> None:
    empty = [streamed([50, 51], kinds="FD", n=0, at_s=float(i)) for i in range(100)]
    assert status("p50 ttft <= 500ms", measure_run(empty)) is Status.FAIL
    single = [streamed([100], n=1, at_s=float(i)) for i in range(100)]
    many = [streamed([100, 120, 140], n=3, at_s=200.0 + i) for i in range(100)]
    result = evaluate(parse_gate("p90 tpot <= 50ms"), measure_run(single + many))
    assert (result.status, result.n) == (Status.PASS, 100)
    unknown = [streamed([100, 120], at_s=float(i)) for i in range(100)]
    assert status("p90 tpot <= 50ms", measure_run(unknown)) is Status.FAIL


def test_pooled_gaps_count_requests_not_gaps() -> None:
    """Twenty requests with fifty gaps each are a thousand gaps and still twenty requests."""
    run = run_of([100.0] * 20, tokens=51)
    result = evaluate(parse_gate("p99 itl <= 100ms"), run)
    assert (result.status, result.n, result.too_few) == (Status.UNDECIDED, 20, True)
    assert status("p99 itl <= 100ms", run_of([100.0] * 300, tokens=4)) is Status.PASS
    assert status("p50 itl <= 10ms", run_of([100.0] * 300, tokens=4)) is Status.FAIL


def test_mean_gate_uses_its_interval() -> None:
    rng = random.Random(3)
    run = run_of([100 + 20 * rng.random() for _ in range(400)])
    assert status("mean ttft <= 150ms", run) is Status.PASS
    assert status("mean ttft <= 90ms", run) is Status.FAIL
    assert status(f"mean ttft <= {run.latencies['ttft'].mean or 0:.9f}s", run) is Status.UNDECIDED
    assert status("mean ttft <= 1s", run_of([100.0] * 3)) is Status.UNDECIDED


def test_counts_maxima_and_rates() -> None:
    records = [*records_of([100.0] * 20), failed(ErrorClass.TIMEOUT, at_s=5.0)]
    run = measure_run(records)
    assert status("timeouts <= 0", run) is Status.FAIL
    assert status("timeouts <= 1", run) is Status.PASS
    assert status("rejected <= 0", run) is Status.PASS
    assert status("errors < 1", run) is Status.FAIL
    assert status("violations(ttft > 50ms) <= 20", run) is Status.FAIL  # the failed one violates it too
    assert status("violations(ttft > 50ms) <= 21", run) is Status.PASS
    assert status("output_throughput >= 10", run) is Status.PASS
    assert status("output_throughput >= 10000", run) is Status.FAIL


def test_goodput_of_the_runs_own_objectives() -> None:
    records = records_of([100.0] * 200)
    own = measure_run(records, slos=parse_slos("ttft<=500ms,tpot<=50ms"))
    assert status("goodput >= 95%", own) is Status.PASS
    assert status("goodput >= 100%", own) is Status.PASS
    with pytest.raises(ConfigError, match="needs objectives"):
        status("goodput >= 95%", measure_run(records))


def test_gates_of_a_class() -> None:
    chat = [streamed([100, 120], n=2, at_s=float(i), traffic_class="chat") for i in range(100)]
    batch = [streamed([9000, 9020], n=2, at_s=i + 0.5, traffic_class="batch") for i in range(100)]
    run = measure_run(chat + batch)
    assert status("p90 ttft[chat] <= 500ms", run) is Status.PASS
    assert status("p90 ttft[batch] <= 500ms", run) is Status.FAIL
    assert status("p90 ttft[none] <= 500ms", run) is Status.FAIL
    assert status("p90 ttft[chat] <= 500ms", measure_run(chat)) is Status.PASS


def test_against_a_baseline() -> None:
    rng = random.Random(4)
    ttft = [100 + 20 * rng.random() for _ in range(600)]

    def run(scale: float) -> RunMetrics:
        return run_of([scale * value for value in ttft])

    base = run(1.0)
    gate = "p95 ttft <= baseline + 10%"
    assert status(gate, run(1.0), base) is Status.PASS
    assert status(gate, run(1.3), base) is Status.FAIL
    assert status(gate, run(1.1), base) is Status.UNDECIDED
    assert status("p95 ttft <= baseline + 50ms", run(1.1), base) is Status.PASS
    assert status("mean ttft <= 1.05x baseline", run(1.0), base) is Status.PASS
    assert status("success >= baseline - 5%", run(1.0), base) is Status.PASS
    assert status("success >= baseline - 5%", run_of([100.0, INF] * 100), base) is Status.FAIL
    assert status(gate, run_of([100.0, INF] * 100), base) is Status.FAIL
    assert status(gate, base, measure_run([])) is Status.UNDECIDED
    assert status(gate, measure_run([]), base) is Status.FAIL
    with pytest.raises(ConfigError, match="--baseline"):
        status(gate, base)


def test_joint_confidence() -> None:
    gates = [parse_gate("p95 ttft <= 1s")] * 3
    assert joint_confidence(gates) == pytest.approx(0.85)
