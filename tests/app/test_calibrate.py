"""`paceline calibrate`: the design of its traffic, a real calibration of the default model, refits from recordings."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.app.processes import running
from typer.testing import CliRunner

from paceline.app.calibrating import ClientTimes, Recording, build, doubts, overheads_of
from paceline.app.calibration_load import BEGINNINGS, BURSTS, LEVELS, Limits, beginnings, sizes, spread, stages
from paceline.app.cli import make_app
from paceline.core.shape import StepShape
from paceline.cost.fit import FEWEST_ROWS, Overheads, load_calibration
from paceline.cost.recorded import RequestTimes, StepRow
from paceline.errors import ConfigError, EngineError, PacelineError

RUNNER = CliRunner()


def failure(*arguments: str) -> PacelineError:
    error = RUNNER.invoke(make_app(), ["calibrate", *arguments]).exception
    assert isinstance(error, PacelineError), error
    return error


@given(st.integers(16, 4096), st.floats(5.0, 600.0), st.integers(1, 300), st.integers(100, 100_000))
def test_the_design_fits_what_the_server_takes(longest: int, seconds: float, most: int, kv_tokens: int) -> None:
    limits = Limits(max_model_len=2 * longest, budget=longest, max_num_seqs=most, kv_tokens=kv_tokens)
    design = stages(seconds, longest, limits)
    assert sum(stage.seconds for stage in design) == pytest.approx(seconds)
    streams = [stage.streams for stage in design]
    assert streams == sorted(streams)
    assert streams[-1] <= max(1, most - 1), "one place is left for the probe"
    for stage in design:
        assert stage.probes
        for probe in stage.probes:
            assert probe.new + probe.cached <= 2 * longest
            assert probe.cached % 16 == 0, "only whole blocks are cached"
    alone = {probe.new for probe in design[0].probes}
    assert {2, longest} <= alone


@given(st.integers(0, 100_000), st.integers(16, 4096))
def test_beginnings_are_whole_blocks_and_cost_what_they_may(tokens: int, longest: int) -> None:
    found = beginnings(tokens, longest)
    assert len(found) <= BEGINNINGS
    assert sum(found) <= tokens
    assert all(16 <= length <= longest and length % 16 == 0 for length in found)
    assert list(found) == sorted(found)


def test_sizes_and_levels_cover_their_range() -> None:
    assert sizes(64) == (2, 3, 4, 6, 8, 12, 17, 24, 34, 48, 64)
    assert spread(LEVELS, 3) == [1, 16, 256]
    assert spread(LEVELS, 99) == list(LEVELS)
    assert all(count * size <= 1024 for count, size in BURSTS)


def test_overheads_come_from_requests_that_both_sides_saw() -> None:
    recording = Recording()
    for number in range(60):
        name, sent_s, tokens = f"cmpl-{number}-0", float(number), 10 * (number % 7)
        before_s = 0.002 + 1e-5 * tokens
        seen = RequestTimes(tokens, None, sent_s + before_s, idle=number % 3 > 0)
        if not seen.idle:
            seen.submitted_s += 0.3  # it waited for the end of a step, which is no overhead
        seen.tokens = [(sent_s + 0.5, number % 5), (sent_s + 0.6, number % 5)]
        arrived = tuple(committed + 0.001 + 0.0002 * place for committed, place in seen.tokens)
        if number % 10 == 9:
            arrived = (arrived[-1],)  # the server put both into one event
        recording.requests[name] = seen
        recording.clients[name] = ClientTimes(sent_s, arrived)
    recording.clients["cmpl-unknown-0"] = ClientTimes(3.0, (9.0,))
    found = overheads_of(recording)
    assert found.before_s == pytest.approx(0.002, rel=0.01)
    assert found.before_token_s == pytest.approx(1e-5, rel=0.01)
    assert found.after_s == pytest.approx(0.001, rel=0.01)
    assert found.after_row_s == pytest.approx(0.0002, rel=0.01)
    assert overheads_of(Recording()) == Overheads()


def test_a_busy_machine_is_told() -> None:
    shape = StepShape().plus(10, 1)
    steady = [StepRow(shape, 0.02) for _ in range(100)]
    slow = [StepRow(shape, 0.2 if number % 10 == 0 else 0.02) for number in range(100)]
    assert not any("machine" in doubt for doubt in doubts(build(Recording(rows=steady), {}, {})))
    assert "10% of the steps" in doubts(build(Recording(rows=slow), {}, {}))[0]


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    nothing, other = tmp_path / "empty", tmp_path / "notes.txt"
    nothing.mkdir()
    other.write_text("hello\n")
    known = [
        (("--seconds", "1"), ConfigError, "--seconds is 1"),
        (("--out", str(tmp_path)), ConfigError, "a file in a folder that exists"),
        (("--out", str(tmp_path / "no" / "c.json")), ConfigError, "a file in a folder that exists"),
        (("no-such-model", "--out", str(tmp_path / "c.json")), PacelineError, "no-such-model"),
        (("--from", ""), ConfigError, "--from is empty"),
        (("--from", str(nothing)), ConfigError, "holds no recorded steps"),
        (("--from", str(other)), ConfigError, "neither a call log nor"),
        (("--from", str(tmp_path / "none.jsonl")), ConfigError, "cannot read"),
        (("--from", "http://127.0.0.1:9"), EngineError, "127.0.0.1:9"),
    ]
    for arguments, kind, message in known:
        error = failure(*arguments)
        assert isinstance(error, kind), error
        assert message in str(error)


@pytest.mark.parametrize("option", ["--out", "--keep"])
def test_an_empty_path_is_a_mistake_of_the_command_line(option: str) -> None:
    found = RUNNER.invoke(make_app(), ["calibrate", option, ""])
    assert found.exit_code != 0
    assert "the path is empty" in found.output


def test_a_real_calibration_and_what_can_be_refitted_from_it(model_file: str, tmp_path: Path) -> None:
    out, keep = tmp_path / "calibration.json", tmp_path / "kept"
    flags = ["--threads", "1", "--kv-gib", "0.2", "--max-model-len", "512", "--seconds", "6"]
    made = RUNNER.invoke(make_app(), ["calibrate", model_file, "-o", str(out), "--keep", str(keep), "--json", *flags])
    assert made.exit_code == 0, made.output
    calibration = load_calibration(out)
    assert calibration.provenance["steps"] >= FEWEST_ROWS
    assert calibration.engine["max_model_len"] == 512
    assert calibration.overheads.before_s + calibration.overheads.before_token_s > 0.0
    assert calibration.overheads.after_s + calibration.overheads.after_row_s > 0.0
    decode, prefill = StepShape().plus(64, 1), StepShape().plus(0, 200)
    assert 0.0 < calibration.cost.predict(decode).seconds < calibration.cost.predict(prefill).seconds

    again = RUNNER.invoke(make_app(), ["calibrate", "--from", str(keep), "-o", str(out)])
    assert again.exit_code == 0, again.output
    refitted = load_calibration(out)
    assert refitted.cost.to_row() == calibration.cost.to_row(), "the same steps give the same fit"
    assert (
        calibration.cost.toll.sent_range_s[0] <= calibration.cost.toll.sent_s <= calibration.cost.toll.sent_range_s[1]
    )
    assert refitted.overheads == calibration.overheads, "what the source does not tell stays"
    told = " ".join(again.output.split())  # figures are long or short, and lines break accordingly
    assert "steps; a step that the fit has not seen" in told
    assert "for each token that is sent meanwhile" in told


def test_ctrl_c_keeps_what_was_measured(model_file: str, tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    flags = ["--threads", "1", "--kv-gib", "0.2", "--max-model-len", "512", "--seconds", "20"]
    with running("calibrate", model_file, "-o", str(out), *flags) as one:
        one.wait_for("calibrating: bursts")
        one.signal(signal.SIGINT)
        assert one.wait(60) == 130, one.err
    assert json.loads(out.read_text())["provenance"]["interrupted"] is True
    assert "it was stopped early" in one.out
