"""Reports: every file of every kind of folder, well-formed, self-contained, honest about what is undefined."""

from __future__ import annotations

import csv
import io
import math
import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from paceline.errors import ConfigError
from paceline.measure import capacity, duel, sweep
from paceline.measure.analysis import analyse
from paceline.measure.compare import compare_saved, plan_cells
from paceline.measure.console import print_analysis
from paceline.measure.folder import RowWriter, RunFolder
from paceline.measure.plan import Arrivals, BenchPlan, Length, Load, Prompts, Target, Trace
from paceline.measure.records import Manifest, RequestRecord, ScrapeRecord, Segment, Usage, WorkerSample
from paceline.measure.report import svg, words
from paceline.measure.report.data import plain
from paceline.measure.report.write import Written, write_comparison, write_report
from tests.browser import needs_browser, screenshot
from tests.measure.making import records_of, run_of

INF = math.inf
VOID = {"meta", "br", "hr", "img", "input", "link", "path", "circle", "rect"}


class Balance(HTMLParser):
    """Every tag that is opened is closed, in order; collects what a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe", "object"):
            self.fetched.append(tag)
        self.fetched += [name for name, _ in attrs if name in ("src", "href", "style") or name.startswith("on")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)


def check_page(path: Path) -> str:
    """A page is whole, fetches nothing, and its figures are XML without a stray number; its text."""
    text = path.read_text()
    parser = Balance()
    parser.feed(text)
    assert not parser.wrong
    assert not parser.open
    assert not parser.fetched
    assert "prefers-color-scheme: dark" in text
    for figure in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        root = ET.fromstring(figure)
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for path_element in root.iter("path"):
            numbers = [float(n) for n in re.findall(r"-?\d+\.?\d*", path_element.attrib["d"])]
            assert all(-1 <= n <= max(width, height) + 1 for n in numbers)
        assert "nan" not in figure.lower().replace("an answer", "")
        assert ">inf" not in figure
    return re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)


def folder_of(
    path: Path,
    records: Sequence[RequestRecord],
    *,
    gates: tuple[str, ...] = (),
    slos: tuple[str, ...] = ("ttft<=500ms", "tpot<=50ms"),
    model: str = "tiny",
    ended: str = "complete",
    labels: dict[str, str] | None = None,
    load: Load | None = None,
) -> RunFolder:
    plan = BenchPlan(
        target=Target(url="http://127.0.0.1:1"),
        load=load or Load(rate=10, requests=len(records) or 1),
        prompts=Prompts(input=Length(kind="uniform", value=5, low=1, high=9)),
        slos=slos,
        gates=gates,
        price_per_hour=2.5,
    )
    manifest = Manifest(
        run_id=path.name,
        created="2026-06-01T10:00:00+00:00",
        plan=plan.to_dict(),
        seed=3,
        command=["paceline", "bench", "http://127.0.0.1:1"],
        target={"model": model, "engine": "mock", "url": "http://127.0.0.1:1"},
        client={"paceline": "0", "python": "3", "cpu": "abacus", "memory_bytes": 1 << 30},
        segments=[Segment(index=0, t0_ns=0, t0_wall="", ended=ended)],
        labels=labels or {},
    )
    folder = RunFolder.create(path, manifest)
    rows = RowWriter(folder.records_path(0))
    for record in records:
        rows.write(record)
    rows.close()
    health = RowWriter(folder.health_path(0))
    for i in range(40):
        health.write(WorkerSample(segment=0, worker=0, t_s=i * 0.25, in_flight=2, lags_s=(0.0002, 0.0005)))
    health.close()
    server = RowWriter(folder.server_path)
    for i in range(12):
        server.write(ScrapeRecord(t_s=float(i), values={"running": 2.0, "waiting": float(i % 3)}))
    server.close()
    return folder


def noisy(n: int = 400, seed: int = 0, scale: float = 1.0) -> list[RequestRecord]:
    rng = random.Random(seed)
    return records_of([scale * (100 + 60 * rng.random()) for _ in range(n)], itl_ms=20 * scale)


def with_failures(records: list[RequestRecord], count: int) -> list[RequestRecord]:
    every = [*records, *records_of([INF] * count)]
    return [msgspec.structs.replace(record, id=str(i), index=i) for i, record in enumerate(every)]


GATES = ("p95 ttft <= 500ms", "p95 ttft <= 120ms", "p99.9 ttft <= 1s", "goodput >= 95%", "output_throughput >= 1")


def test_a_run(tmp_path: Path) -> None:
    folder_of(tmp_path / "run", with_failures(noisy(), 3), gates=GATES)
    written = write_report(tmp_path / "run")
    assert [path.name for path in written.files] == ["report.html", "summary.json", "requests.csv", "junit.xml"]
    assert written.exit_code == 1
    page = check_page(tmp_path / "run" / "report.html")
    for said in ("FAIL", "tiny", "goodput", "p95 ttft &lt;= 120ms", "In flight", "What was asked", "rejected 3"):
        assert said in page, said
    assert page.count("<svg") >= 7


def test_a_trace_is_told_by_its_figures(tmp_path: Path) -> None:
    """Whoever reads the page has neither the trace nor a line about it: lengths, spacing and shares are on it."""
    records = [
        msgspec.structs.replace(
            record, prompt_tokens_wanted=100 + 10 * i, output_tokens_wanted=5 + i % 3, tenant="ab"[i % 2],
            usage=Usage(prompt_tokens=100 + 10 * i, completion_tokens=5),
        )
        for i, record in enumerate(noisy(101))
    ]  # fmt: skip
    folder = folder_of(tmp_path / "run", records)
    plan = BenchPlan.from_dict(folder.manifest.plan)
    plan = msgspec.structs.replace(
        plan, load=Load(arrivals=Arrivals.TRACE), trace=Trace(path="/secret/place/azure.csv", speed=2.0, limit=101)
    )
    folder.manifest.plan = plan.to_dict()
    folder.save_manifest()
    write_report(tmp_path / "run")
    page = check_page(tmp_path / "run" / "report.html")
    asked = page.split("What was asked")[1].split("<h2>")[0]
    for said in (
        "600",
        "1,100",
        "1,000",
        "output tokens",
        "between arrivals",
        "a 51, b 50",
        "azure.csv",
        "2 times as fast",
    ):
        assert said in asked, said
    assert "/secret/place" not in asked


@pytest.mark.parametrize("width", [60, 200])
def test_the_terminal_shows_small_amounts_as_amounts(tmp_path: Path, width: int) -> None:
    folder = folder_of(tmp_path / "run", noisy(400))
    out = io.StringIO()
    print_analysis(Console(file=out, width=width), analyse(folder, price_per_hour=0.01))
    shown = " ".join(out.getvalue().split())
    assert "e-0" not in shown
    assert re.search(r"cost 0\.0001\d: 0\.0000002\d a request", shown), shown


def read_summary(written: Written) -> Any:
    path = next(path for path in written.files if path.name == "summary.json")
    return msgspec.json.decode(path.read_bytes())


def test_summary_json(tmp_path: Path) -> None:
    folder_of(tmp_path / "run", with_failures(noisy(40), 10), gates=("p50 ttft <= 1s",))
    found = read_summary(write_report(tmp_path / "run"))
    ttft = found["metrics"]["latencies"]["ttft"]
    assert ttft["n"] == 40
    assert ttft["quantiles"][3]["thin"] is True
    assert ttft["quantiles"][3]["high"] is None
    assert ttft["tail"][3]["value"] == "inf"
    assert found["metrics"]["errors"] == {"rejected": 10}
    assert found["gates"][0]["status"] == "PASS"
    assert found["verdict"]["exit_code"] == 0
    assert found["manifest"]["seed"] == 3
    assert found["cost"]["price_per_hour"] == 2.5
    assert "requests" not in found["metrics"]


def test_undefined_is_null_and_empty_never_zero(tmp_path: Path) -> None:
    lone = records_of([100.0] * 30, tokens=1)
    folder_of(tmp_path / "run", lone, gates=("p50 tpot <= 1s",))
    written = write_report(tmp_path / "run")
    tpot = read_summary(written)["metrics"]["latencies"]["tpot"]
    assert (tpot["n"], tpot["n_not_applicable"], tpot["mean"]) == (0, 30, None)
    assert all(entry["value"] is None for entry in tpot["quantiles"])
    rows = list(csv.DictReader(io.StringIO((tmp_path / "run" / "requests.csv").read_text())))
    assert len(rows) == 30
    assert {row["tpot_s"] for row in rows} == {""}
    assert float(rows[0]["ttft_s"]) == pytest.approx(0.1)
    assert written.exit_code == 1  # nothing to judge: the gate fails closed
    check_page(tmp_path / "run" / "report.html")


def test_csv_of_failures(tmp_path: Path) -> None:
    folder_of(tmp_path / "run", records_of([100.0, INF, 100.0]))
    write_report(tmp_path / "run")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "run" / "requests.csv").read_text())))
    assert [row["error"] for row in rows] == ["", "rejected", ""]
    assert rows[1]["ttft_s"] == ""
    assert rows[0]["output_tokens"] == "5"


def junit(path: Path) -> dict[str, str]:
    root = ET.fromstring(path.read_text())
    suite = root[0]
    cases = {case.attrib["name"]: case[0].tag if len(case) else "passed" for case in suite}
    for kind, counter in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert int(suite.attrib[counter]) == sum(tag == kind for tag in cases.values())
    assert int(suite.attrib["tests"]) == len(cases)
    return cases


def test_junit(tmp_path: Path) -> None:
    folder_of(tmp_path / "run", noisy(), gates=GATES[:2])
    write_report(tmp_path / "run")
    assert junit(tmp_path / "run" / "junit.xml") == {
        "run is valid": "passed",
        "p95 ttft <= 500ms": "passed",
        "p95 ttft <= 120ms": "failure",
    }
    folder_of(tmp_path / "few", noisy(50), gates=("p99 ttft <= 1s",))
    write_report(tmp_path / "few")
    assert set(junit(tmp_path / "few" / "junit.xml").values()) == {"skipped"}
    write_report(tmp_path / "few", undecided_fails=True)
    assert set(junit(tmp_path / "few" / "junit.xml").values()) == {"failure"}
    folder_of(tmp_path / "bad", noisy(50), gates=("p50 ttft <= 1s",), ended="failed: worker died")
    written = write_report(tmp_path / "bad")
    assert written.exit_code == 3
    assert set(junit(tmp_path / "bad" / "junit.xml").values()) == {"error"}


@pytest.mark.parametrize("ttft", [[], [INF] * 5, [100.0], [100.0, 100.0]])
def test_almost_nothing(tmp_path: Path, ttft: list[float]) -> None:
    folder_of(tmp_path / "run", records_of(ttft), gates=("p50 ttft <= 1s",))
    written = write_report(tmp_path / "run")
    assert written.exit_code in (1, 2, 3)
    check_page(tmp_path / "run" / "report.html")


def test_names_from_outside_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    records = [msgspec.structs.replace(r, error_message=evil) for r in records_of([100.0, INF, 100.0] * 10)]
    folder_of(tmp_path / "run", records, model=evil)
    write_report(tmp_path / "run")
    page = check_page(tmp_path / "run" / "report.html")
    assert evil not in page
    assert "&lt;script&gt;" in page


def test_other_gates_price_and_place(tmp_path: Path) -> None:
    folder_of(tmp_path / "run", noisy(), gates=("p95 ttft <= 1ms",))
    assert write_report(tmp_path / "run").exit_code == 1
    folder_of(tmp_path / "base", noisy(seed=1))
    written = write_report(
        tmp_path / "run",
        tmp_path / "elsewhere",
        gates=["p95 ttft <= baseline + 20%"],
        baseline=tmp_path / "base",
        price_per_hour=10.0,
    )
    assert written.exit_code == 0
    assert written.files[0].parent.name == "elsewhere"
    assert read_summary(written)["cost"]["price_per_hour"] == 10.0
    with pytest.raises(ConfigError, match="--baseline"):
        write_report(tmp_path / "run", gates=["p95 ttft <= baseline"])
    with pytest.raises(ConfigError, match="price"):
        write_report(tmp_path / "run", price_per_hour=-1)


def test_a_sweep(tmp_path: Path) -> None:
    points: list[tuple[float, str]] = []
    for i, rate in enumerate((1.0, 2.0, 4.0, 8.0)):
        folder_of(tmp_path / f"p{i}", noisy(120, seed=i, scale=1 + i * i), load=Load(rate=rate, requests=120))
        points.append((rate, f"p{i}"))
    folder_of(tmp_path / "p4", records_of([INF] * 20), load=Load(rate=16, requests=20))
    points.append((16.0, "p4"))
    (tmp_path / sweep.INDEX).write_bytes(msgspec.json.encode(sweep.SweepIndex(axis="rate", points=points)))
    written = write_report(tmp_path)
    page = check_page(tmp_path / "report.html")
    for said in ("First token against the rest", "Latency against throughput", "Goodput", "none of 20 requests"):
        assert said in page
    data = read_summary(written)
    assert [point["value"] for point in data["points"]] == [1.0, 2.0, 4.0, 8.0, 16.0]
    (tmp_path / sweep.INDEX).write_bytes(msgspec.json.encode(sweep.SweepIndex(axis="rate", points=[])))
    with pytest.raises(ConfigError, match="without a single point"):
        write_report(tmp_path)


def test_a_capacity_search(tmp_path: Path) -> None:
    folder_of(tmp_path / "t0", noisy(100))
    trials = (capacity.Trial(2.0, 0, capacity.Answer.HOLDS, "all gates hold", folder="t0"),)
    for best, code in ((2.0, 0), (None, 1)):
        found = capacity.Capacity(best, 4.0, trials, "4/s does not hold")
        (tmp_path / capacity.INDEX).write_bytes(msgspec.json.encode(found))
        written = write_report(tmp_path)
        assert written.exit_code == code
        page = check_page(tmp_path / "report.html")
        assert ("2 requests/s" if best else "none") in page
        assert "all gates hold" in page


def test_a_comparison(tmp_path: Path) -> None:
    cells = []
    for cell in plan_cells(6, 2):
        slower = cell.arm == "B" and not cell.same_arm
        folder_of(tmp_path / cell.name, noisy(60, seed=cell.seed, scale=1.3 if slower else 1.0), slos=())
        cells.append((cell, cell.name))
    index = duel.DuelIndex(cells=cells, cache="cold", smallest_effect=0.03, names=("old", "new"))
    (tmp_path / duel.INDEX).write_bytes(msgspec.json.encode(index))
    written = write_report(tmp_path)
    assert written.exit_code == 1
    page = check_page(tmp_path / "report.html")
    assert "new is slower in p50 ttft" in page
    assert read_summary(written)["verdict"] == "slower"


def test_two_saved_runs(tmp_path: Path) -> None:
    comparison = compare_saved(run_of([100.0] * 90, every_s=0.5), run_of([100.0] * 90, every_s=0.5))
    write_comparison(comparison, tmp_path)
    assert "Two saved runs" in check_page(tmp_path / "report.html")


def test_a_folder_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        write_report(tmp_path)


@settings(max_examples=400)
@given(
    st.floats(-1e3, 1e6, allow_nan=False),
    st.floats(0, 1e6, allow_nan=False),
    st.lists(st.floats(-1e7, 1e7, allow_nan=False), min_size=1, max_size=20),
)
def test_axes_keep_everything_inside(low: float, width: float, values: list[float]) -> None:
    for axis in (
        svg.Axis.linear(low, low + width, "x"),
        svg.Axis.linear(low, low + width, "x", tight=True),
        svg.Axis.log(abs(low), abs(low) + width, "x"),
    ):
        assert all(0.0 <= axis.place(value) <= 1.0 for value in values)
        assert len(axis.ticks) <= 30
        dust = 1e-3 * abs(axis.high) if axis.logarithmic else 1e-6 * (axis.high - axis.low)
        for tick, _ in axis.ticks:
            assert axis.low - dust <= tick <= axis.high + dust


def test_the_last_point_of_a_thinned_line_stays() -> None:
    assert svg.thin([(float(i), 0.0) for i in range(10_000)])[-1] == (9999.0, 0.0)


def test_words() -> None:
    n = words.NBSP
    assert words.duration(0.1474) == f"147{n}ms"
    assert words.duration(1.524) == f"1.52{n}s"
    assert words.duration(200) == f"3{n}min 20{n}s"
    assert words.duration(0.9996) == f"1{n}s"
    assert words.duration(None) == "–"
    assert words.duration(INF) == "∞"
    assert words.between(0.012, 0.0151) == f"12 … 15.1{n}ms"
    assert words.between(0.9, None) == f"900{n}ms … ?"
    assert words.money(0.0000961) == "0.000096"
    assert words.money(1234.5) == "1,234"
    assert plain({"a": (INF, None, float("nan"))}) == {"a": ["inf", None, None]}


@needs_browser
def test_drawn_by_a_browser_in_light_and_dark(tmp_path: Path) -> None:
    folder_of(tmp_path / "run", noisy(), gates=GATES)
    write_report(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").as_uri()
    light, dark = (screenshot(page, tmp_path / f"{dark}.png", dark=dark) for dark in (False, True))
    assert min(len(light), len(dark)) > 50_000  # a blank page of this size has a few kilobytes
    assert light != dark
