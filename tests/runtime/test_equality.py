"""Greedy output equals transformers', token by token, however requests are batched, chunked, preempted and cached."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.runtime.load import LoadedModel, load_model
from tests.runtime.equality import BUDGETS, MATRIX, PAIRWISE, Cell, Report, Workload, check, make_workload
from tests.runtime.reference import Reference
from tests.runtime.test_models import CASES, COMMON, randomise

LENGTHS = (
    *(1, 2, 3, 5, 8, 12, 15, 16, 17, 21, 26, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65),
    *(80, 96, 110, 128, 150, 190, 256, 333, 512, 900, 1500),
)
# Short prompts go on for longer: requests that outgrow their blocks are what preemption comes from.
COUNTS = tuple(12 + 5 * i % 29 if length <= 150 else 4 + 7 * i % 17 for i, length in enumerate(LENGTHS))
WORKLOAD = make_workload(LENGTHS, COUNTS, 49_000, block_size=16, max_model_len=8192)


class Ties:
    """Near ties over all tests of a session, told at its end."""

    def __init__(self) -> None:
        self.tokens = 0
        self.near_ties = 0

    def note(self, workload: Workload, report: Report) -> None:
        self.tokens += sum(workload.counts)
        self.near_ties += report.near_ties


@pytest.fixture(scope="module")
def ties(request: pytest.FixtureRequest) -> Iterator[Ties]:
    ties = Ties()
    yield ties
    reporter: Any = request.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"\nequality: {ties.tokens} tokens, {ties.near_ties} near ties decided the other way")


def expect(report: Report, cell: Cell) -> None:
    """The tokens are right, and what the cell is about did happen."""
    assert not report.wrong, report.wrong
    if not cell.alone:  # alone, only decoys compete
        assert (report.preemptions > 0) == cell.few_blocks
    assert (report.cancelled > 0) == cell.cancels
    assert (report.prefix_hits > 0) == cell.prefix_cache


@pytest.mark.timeout(600)  # a busy machine is no failure
@pytest.mark.parametrize("cell", PAIRWISE, ids=str)
def test_default_model(default_model: LoadedModel, reference: Reference, ties: Ties, cell: Cell) -> None:
    # One at a time is slow: the cells that do so take half of the requests each, in turns.
    workload = WORKLOAD.part(PAIRWISE.index(cell) // 2 % 2, 2) if cell.alone else WORKLOAD
    report = check(default_model, reference, workload, cell)
    ties.note(workload, report)
    expect(report, cell)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", [cell for cell in MATRIX if cell not in PAIRWISE], ids=str)
def test_default_model_in_full(default_model: LoadedModel, reference: Reference, ties: Ties, cell: Cell) -> None:
    report = check(default_model, reference, WORKLOAD, cell)
    ties.note(WORKLOAD, report)
    expect(report, cell)


def test_the_subset_is_pairwise() -> None:
    factors = {
        "budget": BUDGETS,
        **dict.fromkeys(("prefix_cache", "few_blocks", "cancels", "alone"), (False, True)),
    }
    for a, b in combinations(factors, 2):
        seen = {(getattr(cell, a), getattr(cell, b)) for cell in PAIRWISE}
        assert seen == set(product(factors[a], factors[b])), (a, b)


# --- tiny models of every native family -----------------------------------------------------------------------------

TINY = make_workload(
    (1, 2, 3, 5, 8, 13, 17, 22, 30, 41, 55, 80),
    (9, 5, 12, 7) * 3,
    COMMON["vocab_size"],
    block_size=4,
    max_model_len=128,
)
# Budgets that cut these short prompts too.
TINY_CELLS = [
    Cell(5, prefix_cache=True, few_blocks=True, cancels=True, alone=False),
    Cell(16, prefix_cache=False, few_blocks=True, cancels=False, alone=False),
    Cell(64, prefix_cache=True, few_blocks=False, cancels=True, alone=False),
    Cell(2048, prefix_cache=True, few_blocks=False, cancels=False, alone=True),
]


@pytest.fixture(scope="module", params=CASES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Reference]:
    family, settings = CASES[request.param]
    folder: Path = tmp_path_factory.mktemp(f"equality-{request.param}")
    torch.manual_seed(11)
    theirs = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**{**COMMON, **settings})
    ).eval()
    randomise(theirs)
    theirs.save_pretrained(folder)
    return load_model(folder, device="cpu", dtype="float32"), Reference(theirs)


@pytest.mark.parametrize("cell", TINY_CELLS, ids=str)
def test_tiny_models(tiny: tuple[LoadedModel, Reference], ties: Ties, cell: Cell) -> None:
    report = check(*tiny, TINY, cell)
    ties.note(TINY, report)
    expect(report, cell)
