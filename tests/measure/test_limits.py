"""Descriptors, ports and the client's own tokenizer."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from paceline.errors import ConfigError
from paceline.measure import limits
from paceline.measure.folder import RowWriter, RunFolder
from paceline.measure.limits import check_limits
from paceline.measure.records import Manifest, RequestRecord, Usage
from paceline.measure.recount import load_tokenizer, recount


def test_too_few_descriptors_are_raised_or_refused() -> None:
    """In a process of its own, since a lowered hard limit cannot be raised again."""
    code = """
import resource
from paceline.measure.limits import check_limits
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))
print(check_limits(1500, 1)["open_files"] >= 1564)
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
try:
    check_limits(1500, 1)
except Exception as error:
    print(error)
print(check_limits(1500, 4)["open_files"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    raised, refused, shared = done.stdout.splitlines()
    assert raised == "True"
    assert "1500 connections" in refused
    assert "ulimit -n" in refused
    assert shared == "1024"


def test_more_connections_than_ports_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ports_available", lambda: 10)
    with pytest.raises(ConfigError, match="ephemeral ports"):
        check_limits(11, 1)
    assert check_limits(10, 1)["ephemeral_ports"] == 10
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0


def tokenizer_file(folder: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = folder / "words.json"
    tokenizer.save(str(path))
    return path


def test_answers_without_usage_are_counted_by_the_named_tokenizer(tmp_path: Path) -> None:
    manifest = Manifest(run_id="x", created="2026-01-01T00:00:00+00:00", plan={}, seed=0)
    folder = RunFolder.create(tmp_path / "run", manifest)
    writer = RowWriter(folder.records_path(0))
    told = RequestRecord(id="r0", index=0, scheduled_s=0.0, text="a b", usage=Usage(completion_tokens=9))
    untold = RequestRecord(
        id="r1",
        index=1,
        scheduled_s=1.0,
        kinds="ccc",
        text="a b ab",
        row_chars=(2, 1, 3),
        row_choices=(0, 1, 0),
        row_reads=(0, 0, 0),
        read_s=(1.5,),
        read_bytes=(9,),
    )
    for record in (told, untold):
        writer.write(record)
    writer.close()
    name = recount(folder, folder.records(), tokenizer_file(tmp_path))
    assert name == "words.json"
    # "a " and " ab" are choice 0, "b" is choice 1: two words and one.
    assert [r.client_tokens for r in folder.records()] == [None, 3]


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot read"):
        load_tokenizer(tmp_path)
