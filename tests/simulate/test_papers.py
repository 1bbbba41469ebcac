"""The scripts that reproduce published results run, and what they check holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.measure.plan import Trace
from paceline.measure.traces import load_trace
from paceline.route.policies.holdings import Holdings

PAPERS = Path(__file__).parents[2] / "benchmarks" / "papers"
DATA = Path(__file__).parents[3] / "shared" / "data"
FAST = ("prefill_returns", "nim_table")


def check(name: str, tmp_path: Path) -> None:
    """Run it quickly; every checked row must hold."""
    out = tmp_path / f"{name}.json"
    done = subprocess.run(
        [sys.executable, str(PAPERS / f"{name}.py"), "--quick", "--json", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if not out.exists():
        pytest.skip(done.stdout.strip().splitlines()[-1])
    rows = json.loads(out.read_text())["rows"]
    assert [row["what"] for row in rows if row["holds"] is not None], "nothing was checked"


@pytest.mark.parametrize("name", FAST)
def test_quick_papers(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", sorted(path.stem for path in PAPERS.glob("[a-z]*.py") if path.stem not in FAST), ids=lambda name: str(name)
)
def test_the_other_papers(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


def test_the_mooncake_trace_hits_what_is_published_of_it() -> None:
    trace = DATA / "mooncake_conversation.jsonl"
    if not trace.exists():
        pytest.skip("the Mooncake conversation trace is not beside the checkout")
    cache, hits, blocks = Holdings(), 0, 0
    for row in load_trace(Trace(path=str(trace))):
        hits += cache.match(row.blocks)
        blocks += len(row.blocks)
        cache.add(row.blocks)
    assert (hits, blocks) == (105_710, 288_500)
    assert round(hits / blocks, 3) == 0.366
