"""`paceline simulate --fleet FILE`: engines that differ, priced, one of which dies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.app.cli import make_app
from paceline.errors import ConfigError
from paceline.measure.folder import RunFolder

FLEET = """
router = "prefix_aware"
[[engines]]
name = "prefill"
role = "prefill"
price_per_chip_hour = 3.0
[[engines]]
name = "decode"
count = 2
role = "decode"
chip = "l40s"
price_per_chip_hour = 1.5
[[outages]]
engine = "decode-1"
at_s = 1.0
down_s = 1.0
"""
LOAD = ("--rate", "10", "-n", "30", "--input", "200", "--output", "50", "--policy", "decode_first", "--quiet")


def simulate(*words: str) -> str:
    done = CliRunner().invoke(make_app(), ["simulate", "run", "llama-3-8b", "--chip", "h100", *LOAD, *words])
    if isinstance(done.exception, ConfigError):
        raise done.exception
    return done.output


def test_a_fleet_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.toml").write_text(FLEET)
    said = simulate("--fleet", "fleet.toml", "--out", "run")
    folder = RunFolder(tmp_path / "run")
    assert len(folder.records()) == 30
    assert all(record.ok for record in folder.records())
    assert set(folder.manifest.engine["usage"]) == {"prefill-0", "decode-0", "decode-1, life 1", "decode-1, life 2"}
    assert folder.manifest.plan["price_per_hour"] == 6.0
    assert "1 outages" in said
    assert (tmp_path / "run" / "report.html").exists()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["cost"]["per_million_output"] > 0


def test_a_file_and_words_for_the_same_contradict(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    assert "are in the file" in " ".join(simulate("--fleet", str(path), "--replicas", "3").replace("│", " ").split())
    with pytest.raises(ConfigError, match="cannot read the fleet"):
        simulate("--fleet", str(tmp_path / "absent.toml"))
