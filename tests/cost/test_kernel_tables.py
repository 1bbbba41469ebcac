"""Curves against kernels measured on A100 and H100: constants fitted on one half of the rows, judged on the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cost.curves.attention import DecodeCurve, PrefillCurve
from paceline.cost.curves.collective import ReduceCurve
from paceline.cost.curves.experts import ExpertsCurve
from paceline.cost.curves.gemm import GemmCurve
from paceline.cost.efficiency import Efficiency, Silicon
from paceline.cost.families import FAMILIES
from paceline.cost.grid import Grid
from paceline.cost.tables import KernelTables
from paceline.errors import ConfigError
from tests.cost import kernel_rows as rows
from tests.cost.kernel_rows import CHIPS, KERNELS, Measured, fitted, needs_tables

MEDIAN, P95 = 0.15, 0.35
BOTH = pytest.mark.parametrize("chip", CHIPS)

GEMM = ("floor_s", "step_s", "split_s", "hbm_share", "l2_ratio", "half_intensity")
DECODE = ("floor_s", "row_s", "share", "reach", "split_s", "piece_s", "regroup_s")
PREFILL = ("floor_s", "share", "tile_s", "stream_share", "token_s", "write_share")
REDUCE = ("floor_s", "peer_s", "one_shot_share", "barrier_s", "two_shot_share", "ring_s", "ring_hop_s", "ring_share")
EXPERTS = (
    *("floor_s", "step_s", "hbm_share", "stream_share", "padding", "overlap"),
    *("tuned_share", "default_share", "unaligned", "spill_bytes", "spill"),
)

# How a curve of one chip is called with the columns of a table.


def gemm(chip: str, curve: GemmCurve, dtype: str = "bf16") -> Callable[..., Any]:
    silicon, size = CHIPS[chip], 2.0 if dtype == "bf16" else 1.0
    return partial(
        curve.time,
        peak=silicon.peak(dtype),
        bandwidth=silicon.hbm_bytes_per_s,
        sms=silicon.sms,
        dtype=dtype,
        weight_bytes=size,
    )


def decode(chip: str, curve: DecodeCurve) -> Callable[..., Any]:
    return partial(_attention(chip, curve), kv_bytes=2.0, latent=False)


def prefill(chip: str, curve: PrefillCurve) -> Callable[..., Any]:
    return _attention(chip, curve)


def _attention(chip: str, curve: DecodeCurve | PrefillCurve) -> Callable[..., Any]:
    silicon = CHIPS[chip]
    return partial(curve.time, peak=silicon.peak("bf16"), bandwidth=silicon.hbm_bytes_per_s, sms=silicon.sms)


def reduce(chip: str, curve: ReduceCurve) -> Callable[..., Any]:
    return partial(curve.time, link=CHIPS[chip].link_bytes_per_s)


def experts(chip: str, curve: ExpertsCurve) -> Callable[..., Any]:
    silicon = CHIPS[chip]
    both = {tuned: replace(curve, tuned=tuned).time for tuned in (False, True)}

    def time(*, tuned: bool, **call: Any) -> Any:
        return both[tuned](
            **call, matrices=3, weight_bytes=2.0, peak=silicon.peak("bf16"), bandwidth=silicon.hbm_bytes_per_s
        )

    return time


OPERATIONS: dict[str, tuple[Callable[[str], Measured], Callable[..., Any], tuple[str, ...]]] = {
    "gemm": (partial(rows.gemms, dtype="bf16"), gemm, GEMM),
    "decode": (rows.decodes, decode, DECODE),
    "prefill": (rows.prefills, prefill, PREFILL),
    "reduce": (rows.reduces, reduce, REDUCE),
    "experts": (rows.experts, experts, EXPERTS),
}


@needs_tables
@BOTH
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_constants_that_are_shipped_describe_the_kernels(chip: str, operation: str) -> None:
    table, call, _ = OPERATIONS[operation]
    shipped = getattr(FAMILIES[CHIPS[chip].family], operation)
    median, p95 = table(chip).half(1).judge(call(chip, shipped))
    print(f"{chip} {operation}: median {median:.3f}, p95 {p95:.3f}")
    assert median <= MEDIAN
    assert p95 <= P95


@needs_tables
@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("operation", OPERATIONS)
def test_constants_fitted_on_one_half_describe_the_other(chip: str, operation: str) -> None:
    table, call, names = OPERATIONS[operation]
    # From constants of no chip in particular; what a family's kernels do at all (pieces, regrouping) is not fitted.
    family, blank = FAMILIES[CHIPS[chip].family], FAMILIES["generic"]
    start = family.decode if operation == "decode" else getattr(blank, operation)
    found = fitted(start, names, table(chip), partial(call, chip))
    median, p95 = table(chip).half(1).judge(call(chip, found))
    constants = {name: f"{getattr(found, name):.3g}" for name in names}
    print(f"{chip} {operation}: median {median:.3f}, p95 {p95:.3f} with {constants}")
    assert median <= MEDIAN
    assert p95 <= P95


@needs_tables
def test_fp8_multiplies_with_a_quantiser_of_their_own_are_described() -> None:
    table = rows.gemms("h100", "fp8")
    start = replace(FAMILIES["hopper"].gemm, quantise_s=5e-6, quantise_share=0.2)
    small = Measured(table.calls[::8], table.seconds[::8])
    found = fitted(
        start, ("quantise_s", "quantise_share", "hbm_share"), small, lambda curve: gemm("h100", curve, "fp8")
    )
    median, p95 = table.half(1).judge(gemm("h100", found, "fp8"))
    print(
        f"h100 fp8 gemm: median {median:.3f}, p95 {p95:.3f}; quantiser at {found.quantise_share:.2f} of the bandwidth"
    )
    assert median <= MEDIAN
    assert p95 <= P95
    assert found.quantise_share < 0.2  # not fused: several passes over the inputs


@needs_tables
def test_another_librarys_linear_layers_are_described_by_the_same_constants() -> None:
    table = rows.linear_layers()
    median, p95 = table.half(1).judge(gemm("a100", FAMILIES["ampere"].gemm))
    print(f"a100 linear layers of Llama-3-8B: median {median:.3f}, p95 {p95:.3f}")
    assert median <= MEDIAN
    assert p95 <= P95


# Measured tables as a source.


@pytest.fixture(scope="module")
def tables() -> KernelTables:
    return KernelTables(rows.efficiency("h100")).read(KERNELS, "h100_sxm")


@needs_tables
def test_a_measured_point_is_answered_with_its_measurement(tables: KernelTables) -> None:
    for call, seconds in zip(*_some(rows.gemms("h100", "bf16")), strict=True):
        found = tables.gemm(**call)
        assert found.known
        assert found.seconds == pytest.approx(seconds)
    for call, seconds in zip(*_some(rows.decodes("h100")), strict=True):
        assert tables.decode_attention(**call).seconds == pytest.approx(seconds)


@needs_tables
def test_points_that_were_left_out_are_found_again_better_than_by_the_curve() -> None:
    whole = rows.gemms("h100", "bf16")
    kept, left = whole.half(0), whole.half(1)
    curves = rows.efficiency("h100")
    source = KernelTables(curves)
    for call, seconds in zip(kept.calls, kept.seconds, strict=True):
        source.add_gemm(call["m"], call["n"], call["k"], seconds)
    by_table, by_curve = left.judge(source.gemm), left.judge(curves.gemm)
    print(f"left out: median, p95 {by_table} by table, {by_curve} by curve")
    assert by_table[0] < by_curve[0]
    assert by_table[1] < P95


@needs_tables
def test_beyond_the_tables_the_answer_says_so(tables: KernelTables) -> None:
    assert tables.gemm(8192, 4096, 4096).known
    beyond = tables.gemm(1 << 15, 4096, 4096)
    assert not beyond.known
    assert beyond.seconds == pytest.approx(4 * tables.gemm(8192, 4096, 4096).seconds, rel=0.1)
    assert not tables.gemm(64, 4096, 4096, weight_bytes=0.5).known
    assert not tables.experts(64, 5120, 1536, 160, 6).known
    assert tables.experts(64, 7168, 2048, 256, 8, ep=8).known
    assert tables.prefill_attention(2, 4000, 2 * 2000 * 2001 // 2, heads=32, kv_heads=8).known
    assert not tables.prefill_attention(1, 1 << 17, 1 << 33, heads=32, kv_heads=8).known
    assert tables.allreduce(1e6, 8).known
    assert not tables.decode_attention(4, 4096, heads=128, kv_heads=1, head_dim=576, latent=True).known


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "x_gemm_perf.csv").write_text("m,n,k,latency\n1,64,64,0.01\n2,64,64,fast\n")
    with pytest.raises(ConfigError, match=r"x_gemm_perf\.csv:3: latency is 'fast'"):
        KernelTables(Efficiency(Silicon({"bf16": 1e14}, 1e12))).read(tmp_path, "x")
    (tmp_path / "y_gemm_perf.csv").write_text("m,n,latency\n1,64,0.01\n")
    with pytest.raises(ConfigError, match=r"y_gemm_perf\.csv:2: column k"):
        KernelTables(Efficiency(Silicon({"bf16": 1e14}, 1e12))).read(tmp_path, "y")


def test_a_folder_with_nothing_of_the_kind_leaves_the_curves_and_says_so(tmp_path: Path) -> None:
    curves = Efficiency(Silicon({"bf16": 1e14}, 1e12))
    found = KernelTables(curves).read(tmp_path, "nothing").gemm(1, 64, 64)
    assert found.seconds == curves.gemm(1, 64, 64).seconds
    assert not found.known


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.floats(-3, 3)), min_size=1),
    st.floats(0.5, 12),
    st.floats(0.5, 12),
)
def test_a_grid_never_leaves_the_range_of_its_values(points: list[tuple[int, int, float]], x: float, y: float) -> None:
    found = Grid([((a, b), value) for a, b, value in points]).at((x, y))
    values = [value for _, _, value in points]
    assert min(values) - 1e-9 <= found.value <= max(values) + 1e-9
    if not min(a for a, _, _ in points) <= x <= max(a for a, _, _ in points):
        assert not found.inside


def _some(measured: Measured) -> tuple[list[dict[str, Any]], list[float]]:
    return measured.calls[::97], measured.seconds[::97]
