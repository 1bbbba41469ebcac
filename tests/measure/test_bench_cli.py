"""`paceline bench` from the outside: exit codes, one line for what cannot run, nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from paceline.measure.cli import app
from paceline.measure.mockapi import MockConfig, MockProcess
from paceline.measure.options import BenchOptions, to_plan
from paceline.measure.plan import Arrivals, BenchPlan, Length


def bench(*args: str) -> Result:
    """The command in this process; its two streams apart."""
    return CliRunner().invoke(app, list(args), prog_name="bench")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


FAST = ["--no-self-check", "--warmup", "1", "--input", "20", "--output", "3", "--no-report"]


CODES = {"PASS": 0, "FAIL": 1, "UNDECIDED": 2, "DEGRADED": 2, "INVALID": 3}


def verdict_of(stdout: str) -> str:
    (word,) = [line.split()[0] for line in stdout.splitlines() if line.split() and line.split()[0] in CODES]
    return word


def test_a_run_ends_with_its_verdict(tmp_path: Path) -> None:
    """In a process of its own, off a terminal."""
    gate = "p50 ttft <= 10s"
    with MockProcess(MockConfig(ttft_ms=20, itl_ms=2)) as mock:
        args = [mock.url, "--rate", "40", "-n", "40", "--gate", gate, "--out", "r", *FAST]
        command = [sys.executable, "-m", "paceline.measure.cli", *args]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert any(line.startswith(gate) and "PASS" in line for line in done.stdout.splitlines()), done.stdout + done.stderr
    # A busy machine may make the run itself DEGRADED or INVALID; word and exit code always belong together.
    verdict = verdict_of(done.stdout)
    assert done.returncode == CODES[verdict]
    assert verdict in ("PASS", "DEGRADED", "INVALID")
    assert "TTFT" in done.stdout
    assert "bench http" in done.stderr  # progress goes to the other stream, as plain lines
    assert "\x1b" not in done.stdout + done.stderr
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert manifest["plan"]["gates"] == [gate]
    assert manifest["command"][-len(FAST) :] == FAST
    for other, status in (("p50 ttft <= 1ms", "FAIL"), ("p99 ttft <= 10s", "UNDECIDED")):
        judged = bench("report", "r", "--gate", other, "--out", "judged")
        word = judged.stdout.split(":")[0]
        assert word in (status, "DEGRADED", "INVALID")
        assert judged.exit_code == CODES[word]
        assert json.loads((tmp_path / "judged" / "summary.json").read_text())["gates"][0]["status"] == status


def test_json_alone_on_standard_output(tmp_path: Path) -> None:
    with MockProcess(MockConfig(ttft_ms=5, itl_ms=1)) as mock:
        done = bench(mock.url, "--rate", "50", "-n", "10", "--out", "r", "--json", *FAST)
    found = json.loads(done.stdout)
    assert found["verdict"]["exit_code"] == done.exit_code
    assert found["metrics"]["latencies"]["ttft"]["n"] == 10
    again = bench("compare", "r", "r", "--json", "--no-report")
    assert json.loads(again.stdout)["exit_code"] == again.exit_code


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["http://127.0.0.1:9", "--rate", "1", "-n", "1"], "cannot reach"),
        (["http://no-such-host.invalid", "--rate", "1", "-n", "1"], "cannot reach"),
        (["https://127.0.0.1:9", "--rate", "1", "-n", "1"], "cannot reach"),
        (["http://127.0.0.1:9", "--rate", "0", "-n", "1"], "impossible rate"),
        (["http://127.0.0.1:9", "--rate", "nan", "-n", "1"], "impossible rate"),
        (["http://127.0.0.1:9", "--rate", "1", "--duration", "0s"], "duration must be above 0"),
        (["http://127.0.0.1:9", "--trace", "none.csv"], "cannot read the trace"),
        (["http://127.0.0.1:9", "--trace", "empty.jsonl"], "is empty"),
        (["http://127.0.0.1:9", "--trace", "broken.jsonl"], "broken.jsonl:2: not JSON"),
        (["http://127.0.0.1:9", "--trace", "broken.csv"], "cannot tell the format"),
        (["http://127.0.0.1:9", "--rate", "1e9", "--duration", "1s"], "impossible rate"),
        (["http://127.0.0.1:9", "--rate", "1", "-n", "1", "--tenant-key", "a=env:HOME"], "no request of the load is"),
        (["ftp://x", "--rate", "1", "-n", "1"], "not an http"),
        (["http://127.0.0.1:9", "--rate", "1", "-n", "1", "--api-key-env", "NOT_SET_ANYWHERE"], "holds no key"),
        (["report", "."], "holds no run"),
        (["resume", "."], "not a run folder"),
        (["rerun", "."], "not a run folder"),
        (["http://127.0.0.1:9", "--rate", "1", "-n", "1", "--baseline", "."], "not a run folder"),
    ],
)
def test_what_cannot_run_is_one_line_exit_3_and_leaves_nothing(tmp_path: Path, args: list[str], message: str) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"at_s": 0, "input_tokens": 5}\n{"at_s": 1, "input_tok')
    (tmp_path / "broken.csv").write_text("a,b\n1,2\n")
    done = bench(*args, *([] if args[0] in ("report", "resume", "rerun") else ["-q"]))
    assert done.exit_code == 3, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.csv", "broken.jsonl", "empty.jsonl"]


def test_a_key_or_a_certificate_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG", "sk-wrong-0123456789")
    monkeypatch.setenv("RIGHT", "sk-right-0123456789")
    load = ["--rate", "1", "-n", "1", "-q"]
    with MockProcess(MockConfig(ttft_ms=1, itl_ms=1, api_key="sk-right-0123456789")) as mock:
        for args, message in (
            ([mock.url], "a key is needed"),
            ([mock.url, "--api-key-env", "WRONG"], "the key was refused"),
            ([mock.url, "--api-key-env", "RIGHT", "--model", "nosuch"], "'nosuch' does not exist"),
            ([mock.url.replace("http:", "https:")], "TLS to https"),
        ):
            done = bench(*args, *load)
            assert (done.exit_code, done.stderr.count("\n")) == (3, 1), done.stderr
            assert message in done.stderr
            assert "sk-" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "args",
    [
        ["http://h", "--nonsense"],
        ["http://h"],
        ["http://h", "--rate", "x"],
        ["http://h", "--rate", "1", "--concurrency", "2"],
        ["http://h", "--rate", "1", "--input", "many"],
        ["http://h", "--rate", "1", "--gate", "fast please"],
        ["http://h", "--rate", "1", "--slo", "ttft<=500"],
        ["http://h", "--rate", "1", "--extra", "[1]"],
        ["http://h", "--rate", "1", "--tenant-key", "a=sk-the-key-itself"],
        ["sweep", "http://h"],
        ["sweep", "http://h", "--rates", "a,b"],
        ["capacity", "http://h"],
        ["compare", "http://h", "."],
    ],
)
def test_command_lines_that_cannot_be_read_end_with_64(tmp_path: Path, args: list[str]) -> None:
    done = bench(*args)
    assert done.exit_code == 64, done.stdout + done.stderr
    assert "sk-" not in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_sweep_capacity_compare_and_rerun_against_the_mock(tmp_path: Path) -> None:
    with MockProcess(MockConfig(ttft_ms=10, itl_ms=1)) as mock:
        swept = bench("sweep", mock.url, "--rates", "20,40", "-n", "20", "--out", "s", *FAST)
        assert "20" in swept.stdout, swept.stderr
        assert sorted(p.name for p in (tmp_path / "s").iterdir()) == [
            "point-00-rate-20",
            "point-01-rate-40",
            "sweep.json",
        ]
        none = bench(
            *("capacity", mock.url, "--slo", "ttft<=1ms", "-n", "60", "--low", "20", "--out", "c"),
            *FAST,
        )
        assert "none" in none.stdout, none.stdout + none.stderr
        assert none.exit_code in (1, 3)
        assert json.loads((tmp_path / "c" / "capacity.json").read_text())["best"] is None
        pairs = ["--pairs", "1", "--aa-pairs", "1", "-n", "10", "--rate", "40"]
        same = bench("compare", mock.url, mock.url, *pairs, "--out", "d", *FAST)
        assert same.exit_code == 2, same.stdout + same.stderr  # one pair can decide nothing
        assert "undecided" in same.stdout
        again = bench("rerun", "s/point-00-rate-20", "--out", "again", "--no-report")
        assert (tmp_path / "again" / "manifest.json").exists(), again.stderr
        saved = bench("compare", "s/point-00-rate-20", "again", "--no-report")
        assert saved.exit_code in (0, 1, 2), saved.stderr


def test_every_option_reaches_the_plan() -> None:
    options = BenchOptions(
        rate=3.0,
        max_concurrency=7,
        duration="2min",
        arrivals="gamma",
        burstiness=0.5,
        input="lognormal:300:0.5",
        think="uniform:100:900",
        retries=2,
        retry_cap="500ms",
        extra='{"top_k": 5}',
        gate=["p95 ttft <= 500ms"],
        slo=["ttft<=500ms,itl_p99<=100ms"],
        insecure=True,
    )
    plan = to_plan("http://h", options)
    assert plan.load.arrivals is Arrivals.GAMMA
    assert (plan.load.rate, plan.load.max_concurrency, plan.load.duration_s) == (3.0, 7, 120.0)
    assert plan.prompts.input == Length(kind="lognormal", value=300, sigma=0.5)
    assert plan.prompts.think == Length(kind="uniform", value=500, low=100, high=900)
    assert (plan.client.retries, plan.client.retry_cap_s) == (2, 0.5)
    assert plan.target.extra == {"top_k": 5}
    assert not plan.target.verify_tls
    assert msgspec.convert(msgspec.to_builtins(plan), BenchPlan) == plan


def test_a_run_without_a_bound_takes_a_minute() -> None:
    assert to_plan("http://h", BenchOptions(rate=1.0)).load.duration_s == 60.0
    assert to_plan("http://h", BenchOptions(concurrency=2, requests=5)).load.duration_s is None


def test_a_trace_plays_at_its_own_times_unless_a_rate_is_given() -> None:
    trace = Path("t.csv")
    assert to_plan("http://h", BenchOptions(trace=trace)).load.arrivals is Arrivals.TRACE
    assert to_plan("http://h", BenchOptions(trace=trace, rate=2.0)).load.arrivals is Arrivals.POISSON
    assert to_plan("http://h", BenchOptions(trace=trace, concurrency=2)).load.arrivals is Arrivals.CLOSED
