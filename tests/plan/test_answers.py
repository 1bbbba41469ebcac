"""All answers, on dense and sparse models, with and without a known rate: what holds whatever the numbers are."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cost.catalogue import chips, models
from paceline.plan.answer import Answer, Expected
from paceline.plan.case import Case, Drafting, Pool, Targets, Traffic
from paceline.plan.data import report
from paceline.plan.formula import FUNCTIONS
from paceline.plan.ideal import Roofline, batches, best_batch
from paceline.plan.pools import split_of
from paceline.plan.questions.budget import expected_budget
from paceline.plan.questions.parallel import candidates
from paceline.plan.questions.reload import reload_s, tiers_of, wins_from
from paceline.plan.questions.speculation import break_even, speedup
from paceline.plan.registry import QUESTIONS, answer
from paceline.plan.units import Unit
from tests.plan.cases import ask, case

CASES = {
    "dense": case(price_per_hour=1.2),
    "tensor parallel": case("llama-3-70b", "h100", layout={"tp": 4, "weights": "fp8", "kv": "fp8"}, price_per_hour=2.5),
    "two nodes": case("llama-3.1-405b", "h100", layout={"tp": 8, "pp": 2}, price_per_hour=2.5),
    "experts and latent": case("deepseek-v3", "b200", layout={"tp": 8, "ep": 8}, price_per_hour=6.0),
    "windows": case("gpt-oss-120b", "h100", traffic=Traffic(context=32768)),
    "no known rate": case(chip="m5-pro", layout={"weights": "q4_k_m"}, price_per_hour=0.1),
    "does not fit": case("llama-3-70b", "l40s", price_per_hour=1.0),
    "tiny": case("smollm2-135m", "l4"),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Answer]]:
    return {name: answer(one) for name, one in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_value_is_its_formula_with_its_numbers(name: str, answers: dict[str, list[Answer]]) -> None:
    """Recomputed from the JSON by Python itself, as a reader with a script would."""
    document = json.loads(json.dumps(report(CASES[name], answers[name]), allow_nan=False))
    seen = 0
    for one in document["answers"].values():
        for value in one["values"].values():
            put_in = {key: number["value"] for key, number in value["numbers"].items()}
            put_in = {key: math.inf if number is None else number for key, number in put_in.items()}
            assert value["value"] == pytest.approx(eval(value["formula"], {**FUNCTIONS, **put_in}))
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("name", CASES)
def test_tables_and_charts_are_whole(name: str, answers: dict[str, list[Answer]]) -> None:
    for one in answers[name]:
        assert one.headline.endswith(".")
        for table in one.tables:
            assert table.rows
            assert all(len(row) == len(table.columns) for row in table.rows)
        for chart in one.charts:
            points = [point for line in chart.lines for point in line.points]
            assert all(math.isfinite(x) and math.isfinite(y) for x, y in points)
            if chart.x_unit is Unit.COUNT and "roof" not in chart.caption.lower():  # over lengths and batches
                assert all(list(line.points) == sorted(line.points) for line in chart.lines)


@pytest.mark.parametrize("name", CASES)
def test_what_is_expected_is_never_faster_than_the_ideal(name: str, answers: dict[str, list[Answer]]) -> None:
    """Of the embedding a step reads a row only, which is all that the ideal counts and nobody reads."""
    embedding = CASES[name].model.embedding_params / CASES[name].model.params
    for one in answers[name]:
        for value in one.values:
            if value.expected is None or value.unit.base != "s":
                continue
            assert value.expected.low <= value.expected.value <= value.expected.high
            assert value.expected.value > value.value * (1.0 - embedding)


def test_each_question_answers_for_the_case_that_has_everything(answers: dict[str, list[Answer]]) -> None:
    assert [one.name for one in answers["dense"]] == list(QUESTIONS)
    assert "cost" not in [one.name for one in answers["windows"]], "no price, no cost"
    unknown = [one.name for one in answers["no known rate"]]
    assert unknown == ["fit", "pool", "kv", "decode", "curve", "attention", "cost"]


def test_what_does_not_fit_is_told_with_what_would(answers: dict[str, list[Answer]]) -> None:
    fit = answers["does not fit"][0]
    assert fit.headline.startswith("No: llama-3-70b in bf16 on l40s does not hold one sequence of 4,096 tokens")
    assert "What would: llama-3-70b in bf16 on 4 l40s (tp 4); or " in fit.headline
    assert fit.binds == "memory for the weights"
    would = next(table for table in fit.tables if table.name == "alternatives")
    assert len(would.rows) >= 2
    assert "disaggregation" not in [one.name for one in answers["does not fit"]]


def test_a_context_too_long_for_the_pool_is_told() -> None:
    fit = ask("fit", case(traffic=Traffic(context=1_000_000)))
    assert "tokens of KV fit and one sequence has 1,000,000" in fit.headline


def test_the_blocks_are_those_of_the_deployment() -> None:
    one = CASES["tensor parallel"]
    fit = ask("fit", one)
    assert fit["blocks"].value == one.deployment.num_blocks() == one.memory.num_blocks
    used = ask("fit", replace(one, pool=Pool(used_bytes=70e9)))
    assert used["blocks"].value < fit["blocks"].value


def test_latent_vectors_are_copied_by_tensor_parallel() -> None:
    """Eight chips keep eight copies, so that eight chips' bandwidth reads a sequence no faster than one's."""
    one = CASES["experts and latent"]
    assert one.kv_copies == 8.0
    assert one.kv_read() == 8.0 * one.kv_per_sequence(one.traffic.context)
    assert "8 copies" in " ".join(ask("kv", one).notes)
    assert case("llama-3-70b", "h100", layout={"tp": 16}).kv_copies == 2.0  # 8 KV heads
    assert CASES["tensor parallel"].kv_copies == 1.0


def test_experts_are_read_as_they_are_met() -> None:
    roof = CASES["experts and latent"].roofline
    shared = roof.weights - roof.routed
    assert roof.read(1) == pytest.approx(shared + roof.routed * roof.top_k / roof.experts)
    assert roof.read(1) < roof.read(8) < roof.read(64) < roof.weights
    assert roof.read(10_000) == pytest.approx(roof.weights)


@settings(deadline=None, max_examples=60)
@given(a_ms=st.floats(0.1, 100.0), b_ms=st.floats(0.001, 10.0))
def test_the_knee_of_a_line_is_where_both_parts_are_equal(a_ms: float, b_ms: float) -> None:
    found = best_batch(lambda batch: a_ms + b_ms * batch, 1 << 18)
    exact = max(1.0, a_ms / b_ms)
    around = [batch for batch in batches(1 << 18) if exact / 1.6 <= batch <= exact * 1.6]
    assert found in around or found == 1


@settings(deadline=None, max_examples=30)
@given(batch=st.integers(1, 200), itl_ms=st.integers(5, 300))
def test_a_budget_is_the_largest_that_keeps_the_promise(batch: int, itl_ms: int) -> None:
    one = case(chip="h100", targets=Targets(itl_s=itl_ms / 1e3))
    found = expected_budget(one, batch)
    if found:
        assert one.step_s(batch, found) <= itl_ms / 1e3
    assert one.step_s(batch, found + 1) > itl_ms / 1e3


def test_a_tighter_promise_leaves_a_smaller_budget() -> None:
    budgets = [expected_budget(case(chip="h100", targets=Targets(itl_s=itl)), 32) for itl in (0.01, 0.02, 0.05, 0.2)]
    assert budgets == sorted(budgets)
    assert budgets[-1] > 10 * max(budgets[0], 1)


def test_an_itl_below_a_decode_step_is_told() -> None:
    found = ask("budget", case(targets=Targets(itl_s=0.01)))
    assert found.headline.startswith("None: 8 sequences alone take ")
    budget = found["token_budget"]
    assert budget.value == 0
    assert budget.expected == Expected.exactly(0)


def test_speculation_pays_less_the_larger_the_batch() -> None:
    one = case(chip="h100", traffic=Traffic(context=256), drafting=Drafting(drafted=4))
    gains = [speedup(one, batch, 0.7) for batch in (1, 16, 64, 256, 512)]
    assert gains[0] > 1.5
    assert gains[-1] < 0.75 * gains[0]
    first, last = break_even(one, 1), break_even(one, 512)
    assert first is not None
    assert last is not None
    assert first < last
    assert speedup(one, 64, break_even(one, 64) or 0.0) == pytest.approx(1.0, abs=0.02)


def test_a_draft_that_costs_a_step_never_pays() -> None:
    assert break_even(case(chip="h100", drafting=Drafting(drafted=4, cost=1.5)), 8) is None


def test_a_prefix_is_reloaded_from_where_it_is_faster() -> None:
    one = case(chip="h100")
    for tier in tiers_of(one):
        first = wins_from(one, tier)
        if first is not None and first > 16:
            assert reload_s(one, tier, first) < one.prompt_s(first)
            assert reload_s(one, tier, first - 1) >= one.prompt_s(first - 1)
    host, store = tiers_of(one)[0], tiers_of(one)[-1]
    assert wins_from(one, host) == 16
    assert (wins_from(one, store) or 1 << 20) > 4096


def test_operations_add_up_and_the_shares_in_use_are_shares() -> None:
    for about in (CASES["dense"], CASES["tensor parallel"], CASES["experts and latent"]):
        found = ask("operations", about)
        assert 0.05 < found["decode_mbu"].value < 1.0
        assert 0.05 < found["prefill_mfu"].value < 1.0
        for table, step_s in zip(
            found.tables,
            (about.step_s(about.traffic.batch), about.prompt_s(about.traffic.prompt)),
            strict=True,
        ):
            at = [column.name for column in table.columns].index("seconds")
            assert sum(float(str(row[at])) for row in table.rows) == pytest.approx(step_s)
        for line in found.charts[0].lines[1:]:
            roof = (min(about.peak, x * about.chip.bandwidth) for x, _ in line.points)
            assert all(y <= most for (_, y), most in zip(line.points, roof, strict=True))


def test_no_layout_that_does_not_divide_is_offered() -> None:
    names = [name for name, _, _ in candidates(case("smollm2-135m", "h100"))]
    assert "TP2" not in names, "nine heads"
    assert "TP3" in names
    assert not any("EP" in name for name in names)
    assert any("EP8" in name for name, _, _ in candidates(CASES["experts and latent"]))


def test_parallel_answers_of_one_chip_and_many() -> None:
    table = ask("parallel", CASES["dense"]).tables[0]
    names = [column.name for column in table.columns]
    rows = {row[0]: dict(zip(names, row, strict=True)) for row in table.rows}
    one, four, staged = (float(str(rows[name]["step_s"])) for name in ("one chip", "TP4", "PP4"))
    assert four < 0.6 * one, "tensor parallel makes tokens faster"
    assert staged > 0.75 * one, "pipeline parallel hardly does"
    assert int(str(rows["PP4"]["fit"])) > 4 * int(str(rows["one chip"]["fit"])), "but holds more"


def test_apart_pays_when_promises_are_tight_and_not_when_they_are_loose() -> None:
    """Long prompts beside a tight ITL leave small chunks; with a loose one the shared step is the better use."""
    traffic = Traffic(prompt=8192, output=128)

    def gain(itl_s: float) -> float:
        split = split_of(case(chip="h100", traffic=traffic, targets=Targets(ttft_s=2.0, itl_s=itl_s)))
        return split.apart(*split.best) / split.together.rate if split.together.rate else math.inf

    assert gain(0.015) > 1.05
    assert gain(0.2) < 1.05
    assert gain(0.015) > gain(0.2)


def test_pools_bear_what_the_slower_one_bears() -> None:
    split = split_of(case(chip="h100"))
    x, y = split.best
    assert split.apart(x, y) == pytest.approx(min(x * split.prefill.rate, y * split.decode.rate) / (x + y))
    assert all(split.apart(x, y) >= split.apart(a, b) - 1e-9 for a in range(1, 8) for b in range(1, 8))


def test_a_first_token_that_cannot_be_in_time() -> None:
    hurried = case(chip="l4", targets=Targets(ttft_s=0.01, itl_s=0.001))
    assert ask("disaggregation", hurried).headline.startswith("Neither keeps these promises")


def roofline_of(about: Case) -> Roofline:
    return about.roofline


def test_chips_of_a_stage_share_the_reading() -> None:
    one, four = case("llama-3-70b", "h100"), case("llama-3-70b", "h100", layout={"tp": 4})
    assert roofline_of(four).bandwidth == 4 * roofline_of(one).bandwidth
    assert roofline_of(four).ridge == roofline_of(one).ridge
    assert case("llama-3-70b", "h100", layout={"pp": 4}).roofline.bandwidth == roofline_of(one).bandwidth


@pytest.mark.parametrize("name", models())
def test_every_model_and_chip_of_the_catalogue_has_answers(name: str) -> None:
    """Each model on one of the chips, in turn."""
    all_chips = list(chips())
    one = case(name, all_chips[list(models()).index(name) % len(all_chips)])
    document = report(one, answer(one))
    json.dumps(document, allow_nan=False)
    assert {"fit", "pool", "kv", "decode", "curve", "attention"} <= set(document["answers"])
