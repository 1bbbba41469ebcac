"""The `dev` script: it says what is wrong, sets up once, and mends what was left half done."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A project without dependencies that builds without a network: its own backend makes an empty editable wheel.
PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "nothing"
version = "1"
[project.optional-dependencies]
dev = []
"""
BACKEND = '''\
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    """One wheel with metadata alone."""
    name = "nothing-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        metadata = "Metadata-Version: 2.1\\nName: nothing\\nVersion: 1\\nProvides-Extra: dev\\n"
        wheel.writestr("nothing-1.dist-info/METADATA", metadata)
        wheel.writestr("nothing-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("nothing-1.dist-info/RECORD", "")
    return name
'''


def dev(*arguments: str, folder: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in {"PYTHON", "PYTHONPATH"}}
    command = ["bash", str(folder / "dev"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**environ, **env}, timeout=170)


def test_help_names_every_verb() -> None:
    for arguments in ((), ("help",), ("--help",)):
        done = dev(*arguments)
        assert done.returncode == 0
        assert all(verb in done.stdout for verb in ("setup", "serve", "test [--all]", "help"))


def test_an_unknown_verb_is_refused() -> None:
    done = dev("srve")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "dev: unknown verb 'srve'")


@pytest.mark.parametrize("python", ["/absent/python3", "/bin/false"])
def test_a_python_that_does_not_do_is_refused(python: str) -> None:
    done = dev("setup", PYTHON=python)
    assert (done.returncode, done.stderr) == (1, f"dev: PYTHON={python} is no Python >= 3.11 that runs\n")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "dev", tmp_path)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "constraints.txt").write_text("")
    return tmp_path


def set_up(project: Path) -> str:
    """What `dev setup` says, having succeeded and installed the project."""
    done = dev("setup", folder=project, PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stderr
    assert list(project.glob(".venv/lib/python3*/site-packages/nothing-1.dist-info"))
    return done.stderr


@pytest.mark.slow
def test_setup_works_once_and_mends_what_is_half_made(project: Path) -> None:
    assert "making .venv" in set_up(project)
    assert "making" not in (again := set_up(project))
    assert "installing" not in again

    (project / "constraints.txt").write_text("# changed\n")
    said = set_up(project)
    assert ("making" in said, "installing" in said) == (False, True)

    # Interrupted before the end: the environment is taken up again.
    (project / ".venv/.paceline-setup").unlink()
    shutil.rmtree(next(project.glob(".venv/lib/python3*/site-packages/nothing-1.dist-info")))
    assert "making" not in set_up(project)

    # Interrupted while it was made: without pip, or without a Python that runs, it is made anew.
    (project / ".venv/.paceline-setup").unlink()
    shutil.rmtree(next(project.glob(".venv/lib/python3*/site-packages/pip")))
    assert "making .venv" in set_up(project)
    for python in (project / ".venv/bin").glob("python*"):
        python.unlink()
    assert "making .venv" in set_up(project)


@pytest.mark.slow
def test_a_failed_install_fails_setup_and_is_tried_again(project: Path) -> None:
    backend = (project / "backend.py").read_text()
    (project / "backend.py").write_text("raise SystemExit('no')")
    done = dev("setup", folder=project, PIP_NO_INDEX="1")
    assert done.returncode != 0
    assert "ready" not in done.stderr
    (project / "backend.py").write_text(backend)
    assert "installing" in set_up(project)
