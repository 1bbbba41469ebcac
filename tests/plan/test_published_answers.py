"""Answers that are known: worked by hand for people, and published. Each is held to the digits it is told with."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.plan.answer import solve
from paceline.plan.case import Pool, Targets, Traffic
from paceline.plan.formula import Amount
from paceline.plan.ideal import Roofline
from paceline.plan.questions.timeline import times_of
from paceline.plan.units import Unit, show
from tests.plan.cases import ask, case

GB, KIB, MIB = 1e9, 1024.0, 1024.0**2


def told(value: float, digits: int) -> float:
    """To so many significant digits."""
    return float(f"{value:.{digits}g}")


def test_llama_on_l40s_reads_its_weights_in_18_5_ms() -> None:
    answer = ask("decode", case())
    assert told(1e3 * answer["weights_read_s"].value, 3) == 18.5
    assert told(answer["decode_ceiling"].value, 2) == 54
    assert told(1e3 * answer["compute_s"].value, 1) == 0.04
    assert answer.binds == "reading the weights"


def test_eight_users_at_4k_cost_little_more_than_one() -> None:
    answer = ask("decode", case(traffic=Traffic(context=4096, batch=8)))
    assert told(1e3 * answer["step_one"].value, 3) == 19.1
    assert told(1e3 * answer["step_batch"].value, 3) == 23.5
    assert answer["throughput_gain"].value > 6.0


def test_kv_of_llama() -> None:
    answer = ask("kv", case(traffic=Traffic(context=4096)))
    assert answer["kv_bytes_per_token"].value == 128 * KIB
    assert answer["kv_bytes_per_sequence"].value == 512 * MIB
    assert answer.headline == "128 KiB a token, 512 MiB for 4,096 tokens."


@pytest.mark.parametrize(
    "about", [{"weights_bytes": 4.9 * GB}, {"layout": {"weights": "q4_k_m"}}], ids=["file", "bits"]
)
def test_a_laptop_reads_4_9_gb_63_times_a_second(about: dict[str, Any]) -> None:
    found = case(chip="m5-pro", **about)
    answer = ask("decode", found)
    assert round(answer["decode_ceiling"].value) == 63
    assert found.chip.bandwidth == 307 * GB
    assert answer["decode_ceiling"].expected is None, "nothing is expected of a chip with no published rate"
    assert [value.name for value in answer.values].count("compute_s") == 0


def test_deepseek_wants_1_200_gb_so_eight_b200() -> None:
    answer = ask("fit", case("deepseek-v3", "b200", layout={"tp": 8, "weights": "fp8"}, pool=Pool(factor=1.8)))
    assert told(answer["rule_of_thumb_bytes"].value / GB, 2) == 1200
    assert answer["rule_of_thumb_chips"].value == 8
    assert 8 * case(chip="b200").chip.memory_gb == 1440


@pytest.mark.parametrize(
    ("chip", "weights", "batch"), [("h100", "bf16", 295), ("tpu-v5e", "bf16", 240), ("tpu-v5e", "w8a16", 120)]
)
def test_critical_batch(chip: str, weights: str, batch: float) -> None:
    found = ask("critical_batch", case(chip=chip, layout={"weights": weights}))["critical_batch"].value
    assert found == pytest.approx(batch, rel=0.005)


def test_80_percent_of_what_is_free_of_a_b200_is_64_gb() -> None:
    answer = ask("pool", case(chip="b200", pool=Pool(utilization=0.8, used_bytes=100 * GB)))
    assert answer["pool_of_free"].value == pytest.approx(64 * GB)
    assert answer["pool_of_free"].working == "0.8 × max(0, 180 GB - 100 GB)"


def test_a_timeline_has_four_numbers() -> None:
    found = {value.name: value.value for value in times_of(0.0, 0.8, 2.8, 101)}
    assert found["ttft_s"] == pytest.approx(0.8)
    assert found["tpot_s"] == pytest.approx(0.02)
    assert found["decode_rate"] == pytest.approx(50.0)
    assert round(found["overall_rate"], 1) == 36.1
    asked = ask("timeline", case(stamps=(0.0, 0.8, 2.8), traffic=Traffic(output=101)))
    assert asked.headline == "First token after 800 ms, one every 20 ms after it (50 tokens/s); 36.07 tokens/s overall."


# The scaling book's inference chapters. It takes 820 GB/s and 197 TFLOP/s for a TPU v5e.

V5E_BANDWIDTH, V5E_PEAK = 0.82e12, 197e12


def v5e(params: float, bytes_each: float, chips: int) -> Roofline:
    return Roofline(
        params=params,
        active=params,
        weights=params * bytes_each,
        bandwidth=chips * V5E_BANDWIDTH,
        peak=chips * V5E_PEAK,
    )


@pytest.mark.parametrize(("batch", "step_ms"), [(4, 2.5), (256, 21)])
def test_a_30b_in_int8_on_16_v5e(batch: int, step_ms: float) -> None:
    step_s = v5e(30e9, 1.0, 16).decode_s(batch, 8192 * 100e3)
    assert told(1e3 * step_s, 2) == step_ms


@pytest.mark.parametrize(
    ("kv_gib", "steps"),
    [
        (6.7, {1: 4.98, 8: 12.13, 16: 20.30, 32: 36.65, 64: 69.33, 240: 249.09}),
        (6.7 / 5, {1: 4.17, 8: 5.60, 16: 7.23, 32: 10.50, 64: 17.04, 240: 52.99}),
    ],
    ids=["8k", "a fifth of the KV"],
)
def test_llama_2_13b_on_8_v5e(kv_gib: float, steps: dict[int, float]) -> None:
    """The book's table mixes units: 26 GB count as 26 GiB, and 8 x 0.82 TB/s as 6,560 GiB/s."""
    gib = 1024.0**3
    roof = Roofline(params=13e9, active=13e9, weights=26 * gib, bandwidth=6560 * gib)
    for batch, step_ms in steps.items():
        assert 1e3 * roof.decode_s(batch, kv_gib * gib) == pytest.approx(step_ms, abs=0.006)


def test_llama_70b_in_int8_on_8_v5e() -> None:
    step_s = v5e(70e9, 1.0, 8).decode_s(32, 8192 * 160e3)
    assert told(1e3 * step_s, 2) == 17
    assert 32 / step_s / 8 == pytest.approx(235, rel=0.02)  # the book divides by the rounded 17 ms


@pytest.mark.parametrize(("bytes_each", "exact", "chips"), [(2.0, 8.75, 16), (1.0, 4.375, 8), (0.5, 2.1875, 4)])
def test_v5e_that_hold_a_70b(bytes_each: float, exact: float, chips: int) -> None:
    needed, memory = Amount(70e9 * bytes_each, Unit.BYTES), Amount(16 * GB, Unit.BYTES)
    assert solve("n", "n", Unit.COUNT, "needed / memory", needed=needed, memory=memory).value == pytest.approx(exact)
    assert solve("n", "n", Unit.COUNT, "power_of_two(needed / memory)", needed=needed, memory=memory).value == chips


def test_fused_attention_of_a_decode_is_four_flop_a_byte() -> None:
    """Grouped heads share what is read: 32 query heads on 8 KV heads in 16 bits make 4, and no batch changes it."""
    few, many = (ask("attention", case(traffic=Traffic(context=32768, batch=batch))) for batch in (1, 64))
    assert few["fused_decode_intensity"].value == pytest.approx(4.0, rel=0.001)
    assert few["fused_decode_intensity"].value == many["fused_decode_intensity"].value
    assert few["fused_decode_intensity"].binds == "memory"


def test_the_knee_is_where_kv_takes_as_long_as_weights() -> None:
    knee = ask("curve", case(traffic=Traffic(context=4096)))["knee_batch"].value
    assert knee == pytest.approx(16e9 / (512 * MIB))
    no_cache_to_speak_of = ask("curve", case(chip="h100", traffic=Traffic(context=1)))["knee_batch"].value
    assert no_cache_to_speak_of == pytest.approx(295, rel=0.005)


def test_reloading_beats_recomputing_from_a_bandwidth_on() -> None:
    """KV of a token over the time to compute it, 2 FLOP a parameter: 128 KiB x 989e12 / 16e9 on an H100."""
    needed = ask("reload", case(chip="h100"))["break_even_bandwidth"]
    assert needed.value == pytest.approx(8.1e9, rel=0.005)
    assert show(needed.value, needed.unit) == "8.102 GB/s"


def test_speculation_makes_a_geometric_sum() -> None:
    tokens = ask("speculation", case(chip="h100"))["tokens_per_step"].value
    assert tokens == pytest.approx(sum(0.7**n for n in range(5)))


def test_a_price_becomes_a_cost() -> None:
    asked = case(price_per_hour=3.6, traffic=Traffic(batch=8), targets=Targets(itl_s=0.05))
    price = ask("cost", asked)["output_price"]
    assert price.value == pytest.approx(3.6 / 3600 / (8 / asked.step_s(8)) * 1e6)
    assert math.isfinite(price.value)
