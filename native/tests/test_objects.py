"""What the compiler made of it: code for one processor must not be reached on another.

Reads the object files that the last build left under native/build; skipped where they or binutils are not there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

OBJECTS = sorted(Path(__file__).parents[1].glob("build/cp*/CMakeFiles/_core.dir/src/**/*.o"))
PER_ISA = [path for path in OBJECTS if path.parent.name == "isa"]
BASELINE = [path for path in OBJECTS if path.parent.name != "isa"]

VEX = re.compile(r"^\s+[0-9a-f]+:\s+v[a-z]", re.MULTILINE)  # any instruction of AVX or later
AVX512 = re.compile(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2[0-9]|3[01])")

pytestmark = pytest.mark.skipif(
    not PER_ISA or not BASELINE or shutil.which("objdump") is None, reason="no object files, or no objdump"
)


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassembly(path: Path) -> str:
    return output("objdump", "-d", "--no-show-raw-insn", path)


@pytest.mark.parametrize("path", BASELINE, ids=lambda path: path.name)
def test_what_runs_before_the_choice_runs_everywhere(path: Path) -> None:
    assert not VEX.findall(disassembly(path))


@pytest.mark.parametrize("path", PER_ISA, ids=lambda path: path.name)
def test_each_instruction_set_uses_its_own(path: Path) -> None:
    code = disassembly(path)
    assert VEX.search(code)
    assert (AVX512.search(code) is not None) == path.name.startswith("avx512")


@pytest.mark.parametrize("path", PER_ISA, ids=lambda path: path.name)
def test_no_function_is_offered_to_others(path: Path) -> None:
    """Of a function that several objects define weakly (an inline one, a template of std) the linker keeps any one."""
    names = [line for line in output("nm", "-C", path).splitlines() if re.search(r" [WVu] ", line)]
    assert not names
