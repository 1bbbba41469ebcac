"""The simulator and its cost model against engines that others have measured on GPUs: a sample of the benchmark."""

from __future__ import annotations

import statistics

import pytest
from _fidelity_gpu import engines_2023, serving, vllm_run
from _fidelity_gpu.data import DATA, spread_of

from paceline.core.shape import StepShape
from paceline.cost.scaled import ScaledCost

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no measurements beside the checkout")


def test_a_vllm_run_from_the_datasheet() -> None:
    """RTX 4090: a generation whose kernels nobody measured for us."""
    real, cost = vllm_run.measured(), vllm_run.cost_model()
    errors = vllm_run.simulated(cost).errors(real)
    print(errors)
    assert abs(errors["tpot_s"]) <= 0.15
    assert abs(errors["e2e_s"]) <= 0.15
    assert abs(errors["ttft_p90_s"]) <= 0.30


def test_the_blocks_of_that_engine_from_the_datasheet() -> None:
    deployment = vllm_run.cost_model().deployment
    assert deployment.num_blocks() == pytest.approx(vllm_run.BLOCKS, rel=0.01)


@pytest.mark.slow
def test_one_factor_found_on_half_of_the_run_predicts_the_other() -> None:
    first, last = range(150), range(150, 300)
    cost = vllm_run.calibrated(vllm_run.cost_model(), first)
    errors = vllm_run.simulated(cost, last).errors(vllm_run.measured(last))
    print(cost.factor, errors)
    assert abs(errors["tpot_s"]) <= 0.05
    assert abs(errors["e2e_s"]) <= 0.05
    assert abs(errors["ttft_p50_s"]) <= 0.15
    assert abs(errors["ttft_p90_s"]) <= 0.15


def test_published_servings() -> None:
    """One row in seventeen of those with short answers; the benchmark takes all."""
    chosen = [point for point in serving.points() if point.output <= 256][::17]
    errors = [serving.predict(point).tpot_s / point.tpot_s - 1.0 for point in chosen]
    print(spread_of(errors))
    assert len(chosen) > 15
    assert statistics.median(map(abs, errors)) <= 0.20


def test_a_draft_costs_little_and_gains_most_of_a_token() -> None:
    cost = serving.cost_model("trtllm", "", "deepseek-ai/DeepSeek-R1", "h200_sxm", "fp8", 8, 1, 8)
    shape = StepShape(8, 8, 8 * 2000)
    plain, drafting = cost.predict(shape), serving.Drafting(cost, serving.ACCEPTED).predict(shape)
    assert plain.seconds / (1.0 + serving.ACCEPTED) < drafting.seconds < plain.seconds
    prompt = StepShape().plus(0, 4000)
    assert serving.Drafting(cost, serving.ACCEPTED).predict(prompt).seconds == pytest.approx(
        cost.predict(prompt).seconds, rel=0.05
    )


def test_a_closed_loop_keeps_as_many_in_flight_and_passes_the_api_one_by_one() -> None:
    point = serving.points()[0]
    traffic = serving.Closed(point, waves=2, api_s=0.01)
    first = [traffic.pop() for _ in range(point.concurrency)]
    assert [arrival.at_s for arrival in first] == pytest.approx(
        [0.01 + serving.API_S * i for i in range(point.concurrency)]
    )
    assert set(traffic.sent_s.values()) == {0.0}
    assert traffic.next_s == float("inf")
    traffic.ended(first[0], 5.0, ok=True)
    follower = traffic.pop()
    assert follower.at_s == pytest.approx(traffic.sent_s[follower.index] + 0.01)
    assert traffic.sent_s[follower.index] > 5.0
    assert traffic.next_s == float("inf")


def test_yi_34b() -> None:
    """Within 20 %; batch 8 is 22 % off, where the source's own two figures for a batch of 4 differ by 40 %."""
    rows = engines_2023.yi()
    for row in rows:
        assert abs(row.error) <= (0.25 if row.name == "decode, batch 8" else 0.20), row
    assert statistics.median(abs(row.error) for row in rows if not row.told) <= 0.10
    alone, mixed = rows[-2:]
    assert mixed.ours_ms / alone.ours_ms < 1.05  # decodes ride along nearly free; measured: 1.002


def test_tokens_of_llama_2_70b() -> None:
    errors = [row.error for row in engines_2023.splitwise() if row.name.startswith("token") and not row.told]
    assert len(errors) > 90
    assert statistics.median(map(abs, errors)) <= 0.10


def test_a_scaled_cost_learns_in_the_units_of_the_other() -> None:
    cost = vllm_run.cost_model()
    scaled, shape = ScaledCost(cost, 0.5), StepShape(4, 4, 4000)
    assert scaled.ready
    assert scaled.predict(shape).seconds == pytest.approx(0.5 * cost.predict(shape).seconds)
    scaled.observe(shape, scaled.predict(shape).seconds)
    assert scaled.errors() == pytest.approx((0.0, 0.0))
