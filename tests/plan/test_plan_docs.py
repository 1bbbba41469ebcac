"""docs/plan.md: each console block is run and compared, `...` standing for what changes with the cost model."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.app.cli import make_app
from paceline.plan.registry import QUESTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text("utf-8")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
BLOCKS = [
    (command, said)
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for command, said in re.findall(r"^\$ (.*(?:\\\n.*)*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]


def test_the_page_has_its_examples() -> None:
    assert len([said for _, said in BLOCKS if said.strip()]) >= 10


@pytest.mark.parametrize(("command", "said"), BLOCKS, ids=[command[14:60] for command, _ in BLOCKS])
def test_the_examples_say_what_the_page_says(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    program, *words = shlex.split(command)
    assert program == "paceline"
    found = CliRunner().invoke(make_app(), words)
    assert found.exit_code == 0, found.output
    if said.strip() and not doctest.OutputChecker().check_output(said, found.output, FLAGS):
        pytest.fail(f"$ {command}\n{found.output}")


def test_python_on_the_page() -> None:
    test = doctest.DocTestParser().get_doctest(PAGE, {}, "plan.md", "plan.md", 0)
    assert test.examples
    assert doctest.DocTestRunner(optionflags=FLAGS).run(test).failed == 0


def test_every_question_has_its_row() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert listed == list(QUESTIONS)
