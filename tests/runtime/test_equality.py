"""Greedy output equals transformers', token by token, however requests are batched, chunked, preempted and cached."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from paceline.runtime.load import LoadedModel, load_model
from tests.runtime import reference as reference_module
from tests.runtime.equality import BUDGETS, MATRIX, PAIRWISE, Cell, Report, Ties, Workload, check, make_workload
from tests.runtime.reference import Reference
from tests.runtime.test_models import CASES, COMMON, randomise


def default_workload(*longer: int) -> Workload:
    """Every length around the ends of the first blocks, and longer ones."""
    lengths = (1, 2, 3, 5, 8, 12, 15, 16, 17, 21, 26, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, *longer)
    # Short prompts go on for longer: requests that outgrow their blocks are what preemption comes from.
    counts = tuple(12 + 5 * i % 29 if length <= 150 else 4 + 7 * i % 17 for i, length in enumerate(lengths))
    return make_workload(lengths, counts, 49_000, block_size=16, max_model_len=8192)


# The longest is more than three of the four budgets, so that each of them cuts a prompt.
SHORT = default_workload(110, 150, 256, 530)
FULL = default_workload(80, 96, 110, 128, 150, 190, 256, 333, 512, 900, 1500)


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
    # One at a time is slow: the four cells that do so share the requests among them.
    workload = SHORT.part([one for one in PAIRWISE if one.alone].index(cell), 4) if cell.alone else SHORT
    report = check(default_model, reference, workload, cell)
    ties.note(workload, report)
    expect(report, cell)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", MATRIX, ids=str)
def test_default_model_in_full(default_model: LoadedModel, reference: Reference, ties: Ties, cell: Cell) -> None:
    report = check(default_model, reference, FULL, cell)
    ties.note(FULL, report)
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


def make_tiny(case: str, folder: Path) -> tuple[LoadedModel, Reference]:
    family, settings = CASES[case]
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **settings})
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    randomise(theirs)
    theirs.save_pretrained(folder)
    return load_model(folder, device="cpu", dtype="float32"), Reference(theirs)


@pytest.fixture(scope="module", params=CASES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Reference]:
    return make_tiny(request.param, tmp_path_factory.mktemp("equality"))


@pytest.mark.parametrize("cell", TINY_CELLS, ids=str)
def test_tiny_models(tiny: tuple[LoadedModel, Reference], ties: Ties, cell: Cell) -> None:
    report = check(*tiny, TINY, cell)
    ties.note(TINY, report)
    expect(report, cell)


# --- the rule for near ties -----------------------------------------------------------------------------------------


class Contrary:
    """A model that swaps its two best logits at every fifth position."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, tokens: Tensor, *, logits_to_keep: int, use_cache: bool) -> SimpleNamespace:
        logits = self.model(tokens, use_cache=use_cache).logits
        best = logits.topk(2, dim=-1)
        where = (torch.arange(tokens.shape[1]) % 5 == 4)[:, None].expand_as(best.values[0])
        logits[0].scatter_(1, best.indices[0], torch.where(where, best.values[0].flip(-1), best.values[0]))
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def test_after_a_near_tie_the_comparison_goes_on_from_their_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every pair of logits counts as a tie, swapped ones are counted and all else must be equal."""
    loaded, honest = make_tiny("llama", tmp_path)
    strict = check(loaded, Reference(Contrary(honest.model)), TINY, TINY_CELLS[0])
    assert len(strict.wrong) == len(TINY.prompts)
    monkeypatch.setattr(reference_module, "TIE", float("inf"))
    lenient = check(loaded, Reference(Contrary(honest.model)), TINY, TINY_CELLS[0])
    assert not lenient.wrong
    swapped = sum(
        position % 5 == 4
        for prompt, count in zip(TINY.prompts, TINY.counts, strict=True)
        for position in range(len(prompt) - 1, len(prompt) - 1 + count)
    )
    assert lenient.near_ties == swapped
