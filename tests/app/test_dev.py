"""The `dev` script: it says what is wrong, sets up once, and mends what was left half done."""

from __future__ import annotations

import os
import platform
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
        assert all(verb in done.stdout for verb in ("setup", "serve", "test [--all]", "sanitize", "help"))


def test_an_unknown_verb_is_refused() -> None:
    done = dev("srve")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "dev: unknown verb 'srve'")


@pytest.mark.parametrize("python", ["/absent/python3", "/bin/false"])
def test_a_python_that_does_not_do_is_refused(python: str) -> None:
    done = dev("setup", PYTHON=python)
    assert (done.returncode, done.stderr) == (1, f"dev: PYTHON={python} is no Python >= 3.11 that runs\n")


# A part that builds without a compiler, unless its source says otherwise.
NATIVE_PYPROJECT = PYPROJECT.replace('"nothing"', '"paceline-native"')
NATIVE_BACKEND = '''\
import os, pathlib, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    """One wheel with metadata alone."""
    print(f"CXX is {os.environ['CXX']}")
    assert "broken" not in pathlib.Path("src/kernel.cpp").read_text(), "does not compile"
    name = "paceline_native-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        info = "paceline_native-1.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: paceline-native\\nVersion: 1\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
'''


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


@pytest.fixture
def kernel(project: Path) -> Path:
    """Gives the project a native part; its one source file."""
    native = project / "native"
    (native / "src").mkdir(parents=True)
    (native / "paceline_native").mkdir()
    (native / "CMakeLists.txt").write_text("")
    (native / "pyproject.toml").write_text(NATIVE_PYPROJECT)
    (native / "backend.py").write_text(NATIVE_BACKEND)
    source = native / "src" / "kernel.cpp"
    source.write_text("fine")
    return source


def compiler(folder: Path, name: str, exit_code: int) -> str:
    """A compiler that finds all programs right, or none."""
    path = folder / name
    path.write_text(f"#!/bin/sh\nexit {exit_code}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
@pytest.mark.skipif(platform.system() + platform.machine() != "Linuxx86_64", reason="kernels are for x86-64 Linux")
def test_native_kernels_are_built_where_they_can_be_and_only_then(project: Path, kernel: Path, tmp_path: Path) -> None:
    good, old = compiler(tmp_path, "new-g++", 0), compiler(tmp_path, "old-g++", 1)

    def said(**env: str) -> tuple[str, bool]:
        """What setup says of the kernels, and whether they are there then."""
        done = dev("setup", folder=project, PIP_NO_INDEX="1", **env)
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stderr.splitlines() if "native" in line]
        assert len(lines) <= 2
        there = bool(list(project.glob(".venv/lib/python3*/site-packages/paceline_native-1.dist-info")))
        return "; ".join(lines), there

    # Without a compiler one line says how to get them, once.
    text, there = said(CXX=old)
    assert ("no native kernels: they need g++ 12" in text, there) == (True, False)
    assert said(CXX=old) == ("", False)

    # With one they are built, and built again when their source changes. The rest stays.
    text, there = said(CXX=f"{good} -pipe")
    assert ("building the native kernels" in text, there) == (True, True)
    assert f"CXX is {good} -pipe" in (project / ".venv/native-build.log").read_text()
    assert said(CXX=f"{good} -pipe") == ("", True)
    kernel.write_text("fine too")
    done = dev("setup", folder=project, PIP_NO_INDEX="1", CXX=good)
    assert ("building the native kernels" in done.stderr, "installing" in done.stderr) == (True, False)

    # A build that fails ends nothing, takes the older one away, and is tried again.
    kernel.write_text("broken")
    for _ in range(2):
        text, there = said(CXX=good)
        assert ("did not build, see .venv/native-build.log" in text, there) == (True, False)
    assert "does not compile" in (project / ".venv/native-build.log").read_text()
    kernel.write_text("fine")
    assert said(CXX=good)[1]

    # Switched off, they go.
    assert said(CXX=good, PACELINE_NATIVE="0") == ("", False)
