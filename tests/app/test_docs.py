"""Documentation that runs: examples are executed, tables are compared, paths exist."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.app.processes import Running, environment, running

from paceline.app.cli import EXIT_CODES, INTERRUPTED
from paceline.app.config import ConfigFile, read_file, resolve
from paceline.app.settings import as_markdown
from paceline.serve.keys import read_key_file

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_the_tables_of_settings_are_those_of_the_code() -> None:
    """`python -m paceline.app.settings` prints what belongs at the end of the page."""
    assert read("docs/configuration.md").endswith("\n" + as_markdown())


def test_every_toml_block_is_accepted() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", read("docs/configuration.md"), re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        if "[[key]]" in block:
            assert read_key_file(block)[0].name == "search-team"
        else:
            resolve({}, ConfigFile(ROOT / "paceline.toml", tomllib.loads(block)))


def test_the_exit_codes_are_those_of_the_code() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", read("docs/configuration.md"), re.MULTILINE)}
    assert listed == {0, 1, 2, INTERRUPTED, *(code for _, code in EXIT_CODES)}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_path_in_the_documentation_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    paths = re.findall(r"`((?:src|docs|tests|benchmarks|examples)/[\w./-]*)`", text)
    links = [(page.parent / link).resolve() for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text)]
    missing = [str(path) for path in [*(ROOT / path for path in paths), *links] if not path.exists()]
    assert missing == []


def test_each_step_of_a_request_names_what_is_in_its_file() -> None:
    step = re.compile(r"^\*\*(\d)\. [^*]+\*\* `([^`]+)`\n(.*?)\n\n", re.MULTILINE | re.DOTALL)
    steps = step.findall(read("docs/life_of_a_request.md"))
    assert [int(number) for number, _, _ in steps] == list(range(1, 9))
    assert len({path for _, path, _ in steps}) == 8
    for _, path, text in steps:
        source = (ROOT / path).read_text("utf-8")
        names = re.findall(r"`([A-Za-z_.]+)`", text)
        assert names
        for name in names:
            assert all(part in source for part in name.split(".")), f"{name} is not in {path}"


def test_the_readme_example_runs(model_file: str) -> None:
    test = doctest.DocTestParser().get_doctest(read("README.md"), {}, "README.md", "README.md", 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_the_example_configuration_resolves() -> None:
    settings = resolve({}, read_file(str(ROOT / "examples" / "paceline.toml"), ROOT)).settings
    assert settings.auth.api_key_file == str(ROOT / "examples" / "keys.toml")
    assert {one.name for one in settings.scheduler.classes} == {"interactive", "standard", "batch", "nightly"}


def test_the_licence_is_whole() -> None:
    text = read("LICENSE")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def run_example(name: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        capture_output=True,
        text=True,
        env=environment(**env, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1")),
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch.py", "service.py"])
def test_the_example_programs_run(model_file: str, name: str) -> None:
    assert len(run_example(name).splitlines()) >= 3


@pytest.fixture
def server(model_file: str) -> Iterator[Running]:
    with running("serve", model_file, "--port", "0", "--kv-gib", "0.2", "--max-model-len", "2048") as one:
        yield one


@pytest.mark.slow
def test_the_example_client_runs(server: Running) -> None:
    url = server.wait_for("Serving on").removeprefix("Serving on ").removesuffix(". Try:")
    assert re.search(r"^\d+ \+ \d+ tokens$", run_example("openai_client.py", PACELINE_URL=url), re.MULTILINE)
