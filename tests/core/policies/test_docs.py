"""The pages on policies say what is there: every policy has one, with every knob and its default."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from paceline.core.policies.registry import ALIASES, POLICIES

PAGES = Path(__file__).parents[3] / "docs" / "policies"
ROW = re.compile(r"^\| `(\w+)` \| `([^`]*)` \| \S.*\|$", re.MULTILINE)


def test_every_policy_has_a_page_and_a_row() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == {*POLICIES, "README"}
    table = (PAGES / "README.md").read_text()
    linked = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\) \| (?:`([\w-]+)`)?", table, re.MULTILINE)
    assert sorted(name for name, _, _ in linked) == sorted(POLICIES)
    assert all(name == page for name, page, _ in linked)
    assert {alias: name for name, _, alias in linked if alias} == ALIASES


@pytest.mark.parametrize("name", POLICIES)
def test_a_page_has_every_knob_with_its_default(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text()
    assert text.startswith(f"# {name}\n")
    told = {knob: json.loads(default) for knob, default in ROW.findall(text)}
    there = {entry.name: entry.default for entry in fields(POLICIES[name]) if entry.init}  # type: ignore[arg-type]
    assert MISSING not in there.values()
    assert told == there
    assert all(type(told[knob]) is type(there[knob]) for knob in there), "1 and 1.0 are not the same to a reader"
    for section in ("**Protects**", "**Source**"):
        assert section in text
    assert ("**Deviations**" in text) == (name != "slo")
