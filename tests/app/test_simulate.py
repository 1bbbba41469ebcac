"""`paceline simulate`, as people call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.app.cli import make_app
from paceline.core.calllog import read_calls
from paceline.core.step import StepPlan, StepResult
from paceline.errors import ConfigError, ModelNotFound
from paceline.measure.folder import RunFolder
from paceline.simulate.backend import SimulatedBackend

ENGINE = ("llama-3-8b", "--chip", "h100")
SMALL = ("--input", "200", "--output", "20", "-q")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str, code: int | None = 0) -> str:
    result = CliRunner().invoke(make_app(), ["simulate", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code is None or result.exit_code == code, result.output
    return result.stdout


def test_a_run_is_a_folder_with_its_report(tmp_path: Path) -> None:
    said = run(*ENGINE, "--rate", "5", "-n", "60", *SMALL, "--slo", "ttft<=1s", "--price-per-hour", "2", "--out", "one")
    assert "60 requests succeeded" in said
    assert "hardware by" in said
    assert "times as fast" in said
    folder = RunFolder(tmp_path / "one")
    assert folder.manifest.kind == "simulated"
    assert folder.manifest.target["chip"].startswith("h100")
    usage = folder.manifest.engine["usage"]["engine"]
    assert usage["outside_share"] == 0.0
    assert set(usage["limit_share"]) >= {"memory", "host"}
    assert (tmp_path / "one" / "report.html").is_file()


def test_json_and_a_seed_give_the_same_again() -> None:
    words = (*ENGINE, "--rate", "20", "-n", "40", *SMALL, "--json", "--jitter", "--seed", "7")
    one, two = (json.loads(run(*words, "--out", name)) for name in ("a", "b"))
    assert one["metrics"]["latencies"] == two["metrics"]["latencies"]
    assert one["manifest"]["kind"] == "simulated"
    other = json.loads(run(*words[:-1], "8", "--out", "c"))
    assert other["metrics"]["latencies"] != one["metrics"]["latencies"]


def test_an_interrupted_family_keeps_the_part_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _ctrl_c(monkeypatch, run=2, step=300)
    load = ("--rate", "5", "-n", "60", *SMALL)
    said = run(*ENGINE, *load, "--compare", "policy=decode_first,vllm,sglang", "--out", "family", code=3)
    assert "interrupted" in said
    members = json.loads((tmp_path / "family" / "summary.json").read_text())["members"]
    assert [(one["policy"], one["ended"]) for one in members] == [("decode_first", "complete"), ("vllm", "interrupted")]
    assert 0 < members[1]["succeeded"] < 60
    assert "Interrupted: vllm at 5 is a part of its run" in (tmp_path / "family" / "report.html").read_text()


def test_an_interrupted_search_says_what_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _ctrl_c(monkeypatch, run=2, step=200)
    load = ("--policy", "vllm", "-n", "60", *SMALL, "--slo", "ttft<=1s", "--low", "5")
    said = run("capacity", *ENGINE, *load, "--out", "search", code=2)
    assert "at least 5 requests/s" in said
    found = json.loads((tmp_path / "search" / "capacity.json").read_text())
    assert (found["limited_by"], found["failed_at"]) == ("user", None)
    assert "held, unconfirmed" in found["why"]


def _ctrl_c(monkeypatch: pytest.MonkeyPatch, *, run: int, step: int) -> None:
    """Ctrl-C while the `step`th step of the `run`th run is computed."""
    execute, seen = SimulatedBackend.execute, list[SimulatedBackend]()

    def impatient(backend: SimulatedBackend, plan: StepPlan) -> StepResult:
        if backend not in seen:
            seen.append(backend)
        if len(seen) == run and plan.step == step:
            raise KeyboardInterrupt
        return execute(backend, plan)

    monkeypatch.setattr(SimulatedBackend, "execute", impatient)


def test_a_call_log_comes_out_and_goes_in(tmp_path: Path) -> None:
    run(*ENGINE, "--rate", "5", "-n", "20", *SMALL, "--policy", "vllm", "--call-log", "calls.jsonl", "--out", "one")
    _, calls = read_calls(tmp_path / "calls.jsonl")
    assert sum(call["call"] == "submit" for call in calls) == 20
    said = run(*ENGINE, "--trace", "calls.jsonl", "--policy", "slo", "-q", "--out", "two")
    assert "20 requests succeeded" in said
    with pytest.raises(ConfigError, match="its own times"):
        run(*ENGINE, "--trace", "calls.jsonl", "--rate", "3")


def test_a_family_is_compared(tmp_path: Path) -> None:
    said = run(
        *ENGINE, "--rate", "5", "-n", "30", *SMALL, "--compare", "policy=slo,decode_first", "--rates", "5,20",
        "--out", "family",
    )  # fmt: skip
    assert said.count("decode_first") == 2
    found = json.loads((tmp_path / "family" / "summary.json").read_text())
    assert [(row["policy"], row["load"]) for row in found["members"]] == [
        ("slo", 5.0), ("slo", 20.0), ("decode_first", 5.0), ("decode_first", 20.0),
    ]  # fmt: skip
    page = (tmp_path / "family" / "report.html").read_text()
    assert "First token against the rest" in page
    assert RunFolder(tmp_path / "family" / "slo-20").manifest.labels["policy"] == "slo"


def test_capacity(tmp_path: Path) -> None:
    said = run(
        "capacity", *ENGINE, "-n", "200", *SMALL, "--slo", "ttft<=1s,itl_p95<=30ms", "--low", "8",
        "--resolution", "0.5", "--confirmations", "0", "--policy", "vllm", "--out", "search",
    )  # fmt: skip
    assert "capacity:" in said
    found = json.loads((tmp_path / "search" / "capacity.json").read_text())
    assert found["best"] is not None
    assert found["failed_at"] > found["best"] >= 8
    assert (tmp_path / "search" / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        (("llama-3-9b", "--chip", "h100"), ModelNotFound, "did you mean llama-3-8b"),
        (("llama-3-8b", "--chip", "h1000"), ConfigError, "h100"),
        (("llama-3-8b",), ConfigError, "--chip must be given"),
        (("llama-3-70b", "--chip", "l4"), ConfigError, "What would"),
        (("llama-3-8b", "--chip", "h100", "--tp", "3"), ConfigError, "does not divide"),
        (("llama-3-8b", "--chip", "h100", "--model", "llama-3-8b"), ConfigError, "given twice"),
        (("llama-3-8b", "--chip", "h100", "--pp", "3"), ConfigError, "--uneven-stages"),
    ],
)
def test_what_cannot_be_is_one_line(words: tuple[str, ...], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        run(*words, "--rate", "1", "-n", "5")


def test_a_trace_names_the_classes_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"input_tokens": 9, "output_tokens": 2, "class": "gold"}\n')
    words = (*ENGINE, "--trace", "t.jsonl", "--rate", "1", "-n", "2", "-q")
    with pytest.raises(
        ConfigError, match=r"t.jsonl:1: class is 'gold'; it must be one of interactive, standard, batch"
    ):
        run(*words)
    assert "2 requests succeeded" in run(*words, "--classes", '{"gold": {}}')


def test_what_a_real_engine_would_not_do_is_noted() -> None:
    load = ("--rate", "1", "-n", "3", "--output", "2", "-q")
    said = run(
        *ENGINE, *load, "--input", "9000", "--slo", "ttft<=1s", "--slo", "itl_p99<=50ms", "--out", "a", code=None
    )
    assert "requests of up to 9,002 tokens: the model was made for 8,192" in said
    assert "judged by ttft <= 1s, but class standard promises 5s and slo works for that" in said
    assert """--classes '{"standard": {"itl_ms": 50.0}}' tells it""" in said
    told = ("--classes", '{"standard": {"ttft_ms": 1000, "itl_ms": 50}}')
    assert "note:" not in run(
        *ENGINE, *load, *told, "--input", "900", "--slo", "ttft<=1s, itl_p99<=50ms", "--out", "b", code=None
    )
    assert "note:" not in run(*ENGINE, *load, "--policy", "vllm", "--slo", "ttft<=1s", "--out", "c", code=None)
    run(*ENGINE, *load, "--trace", "t.jsonl", "--prompts", "p.txt", code=64)


def test_infinite_loads() -> None:
    with pytest.raises(ConfigError, match="impossible rate"):
        run(*ENGINE, "--rate", "inf")
    load = ("--rate", "40", "-n", "2500", "--input", "4000", "--policy", "vllm", "-q")
    said = run(*ENGINE, *load, "--overload-after", "5s", code=2)
    assert "cannot take this load" in said


@pytest.mark.parametrize(
    "words",
    [
        (*ENGINE,),
        (*ENGINE, "--rate", "1", "--compare", "seed=1,2"),
        (*ENGINE, "--rate", "1", "--rates", "1,2"),
        (*ENGINE, "--rate", "1", "--class-share", "batch"),
        (*ENGINE, "--rate", "1", "--class-share", "nobody=1"),
        (*ENGINE, "--rate", "1", "--class-share", "batch=nan"),
        (*ENGINE, "--rate", "1", "--class-share", "batch=-1"),
        (*ENGINE, "--rate", "1", "--class-share", "batch=0"),
        (*ENGINE, "--rate", "1", "--max-tokens", "0"),
        (*ENGINE, "--rate", "1", "--request-overhead", "-1"),
        (*ENGINE, "--rate", "1", "--response-overhead", "nan"),
        (*ENGINE, "--rate", "1", "--overload-after", "0s"),
        (*ENGINE, "--rate", "1", "--overload-after", "inf"),
        (*ENGINE, "--rate", "1", "--num-blocks", "0"),
        (*ENGINE, "--rate", "1", "--out", ""),
        (*ENGINE, "--trace", ""),
        (*ENGINE, "--rate", "1", "--fleet", ""),
        ("--calibration", "", "--rate", "1"),
        ("capacity", *ENGINE),
    ],
)
def test_a_command_line_that_cannot_be_read(words: tuple[str, ...]) -> None:
    run(*words, code=64)


@pytest.mark.parametrize(
    ("words", "engines"),
    [
        (("--replicas", "2", "--router", "round_robin"), {"engine-0", "engine-1"}),
        (("--prefill", "1", "--decode", "1"), {"prefill-0", "decode-0"}),
    ],
)
def test_a_fleet(tmp_path: Path, words: tuple[str, ...], engines: set[str]) -> None:
    said = run(*ENGINE, *words, "--rate", "20", "-n", "40", *SMALL, "--out", "fleet", code=None)
    assert "40 requests succeeded" in said
    assert set(RunFolder(tmp_path / "fleet").manifest.engine["usage"]) == engines
    with pytest.raises(ConfigError, match="router is 'best'"):
        run(*ENGINE, "--replicas", "2", "--router", "best", "--rate", "1")
    run(*ENGINE, *words, "--rate", "1", "--compare", "policy=slo", code=64)
