"""The page on step times runs, and its catalogue file is accepted."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from paceline.cost.catalogue import find_chip

PAGE = Path(__file__).parents[2] / "docs" / "cost.md"


def test_the_examples_run() -> None:
    text = PAGE.read_text("utf-8")
    test = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert len(test.examples) >= 8
    assert doctest.DocTestRunner().run(test).failed == 0


def test_the_chip_of_ones_own_is_accepted(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    path = tmp_path / "chips.toml"
    path.write_text(block, encoding="utf-8")
    chip = find_chip("our-mac", [path])
    assert chip.memory_gb == find_chip("m5-max").memory_gb
    assert chip.flops() == 34e12
    assert chip.sources["tflops"].startswith("GEMM")
