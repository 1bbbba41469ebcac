"""`paceline timeline` and the page that draws the steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.browser import needs_browser, rendered, screenshot
from tests.serve.live import live_server
from tests.text.conftest import default_tokenizer, default_tokenizer_dir
from typer.testing import CliRunner

from paceline.app.cli import make_app
from paceline.core.step import Bound, SchedulerStats
from paceline.engine.messages import EngineStats, StepSample
from paceline.errors import ConfigError, EngineError
from paceline.serve.timeline import Timeline, page
from paceline.text.tokenizer import Tokenizer

__all__ = ["default_tokenizer", "default_tokenizer_dir"]  # fixtures


def filled() -> Timeline:
    timeline = Timeline()
    timeline.note(EngineStats())  # a heartbeat brings no step
    for step in range(60):
        prefill = 80 if step % 10 == 0 else 0
        took_s = 0.05 + prefill * 0.001
        sample = StepSample(step, took_s, prefill + 8, 9, step * 0.1, prefill, 0.05, Bound.DEADLINE)
        timeline.note(EngineStats(SchedulerStats(num_running=8, num_waiting=2, kv_blocks_total=10), last_step=sample))
    return timeline


def test_rows_are_kept_up_to_a_number() -> None:
    timeline = Timeline(kept=3)
    assert timeline.last is None
    for step in range(5):
        timeline.note(EngineStats(last_step=StepSample(step, 0.1, 4, 4)))
    assert [row[0] for row in timeline.report(None)["rows"]] == [2, 3, 4]
    assert timeline.last is not None
    assert timeline.last["decode_tokens"] == 4
    assert timeline.last["predicted_s"] is None


def test_the_prefill_budget_is_that_of_the_newest_step_that_was_kept_from_being_larger() -> None:
    timeline = Timeline()
    assert timeline.prefill_budget(0.0) == {"last": None, "bound": None}
    for step, (prefill, bound) in enumerate(((64, Bound.DEADLINE), (512, Bound.BUDGET), (32, Bound.NOTHING))):
        sample = StepSample(step, 0.1, prefill + 4, 5, float(step), prefill, None, bound)
        timeline.note(EngineStats(last_step=sample))
    budget = timeline.prefill_budget(2.5)
    assert budget["bound"] == {"tokens": 512, "at_least": False, "bound_by": "budget", "step": 1, "age_s": 1.5}
    assert budget["last"] == {"tokens": 32, "at_least": True, "bound_by": "nothing", "step": 2, "age_s": 0.5}


@needs_browser
def test_a_still_is_drawn_by_a_browser(tmp_path: Path) -> None:
    still = tmp_path / "timeline.html"
    still.write_text(page(json.dumps(filled().report(0.1))))
    document = rendered(still.as_uri(), tmp_path / "profile")
    for shown in ("steps <b>60</b>", "step p95 <b>130 ms</b>", "waiting <b>2</b>", "bound by <b>deadline</b>"):
        assert shown in document
    light, dark = (screenshot(still.as_uri(), tmp_path / f"{dark}.png", dark=dark) for dark in (False, True))
    assert light != dark
    empty = tmp_path / "empty.html"
    empty.write_text(page(json.dumps(Timeline().report(None))))
    assert len(screenshot(empty.as_uri(), tmp_path / "empty.png")) < len(light), "columns are drawn"


def test_the_command_shows_a_servers_steps(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    runner = CliRunner()
    with live_server(default_tokenizer) as live:
        url = str(live.client.base_url)
        assert "no step yet" in runner.invoke(make_app(), ["timeline", url]).output
        assert live.chat().status_code == 200
        shown = runner.invoke(make_app(), ["timeline", url])
        assert shown.exit_code == 0
        assert "tightest promise between tokens: 100 ms" in shown.output
        rows = json.loads(runner.invoke(make_app(), ["timeline", url, "--json"]).output)["rows"]
        assert len(rows) > 1
        out = tmp_path / "page.html"
        assert runner.invoke(make_app(), ["timeline", url, "--out", str(out)]).exit_code == 0
        assert json.dumps(rows[0]) in out.read_text()
        assert isinstance(runner.invoke(make_app(), ["timeline", url, "--out", str(tmp_path)]).exception, ConfigError)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://"])
def test_no_server_is_one_line(url: str) -> None:
    error = CliRunner().invoke(make_app(), ["timeline", url]).exception
    assert isinstance(error, EngineError | ConfigError)
    assert url in str(error)
