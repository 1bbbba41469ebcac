"""What is shown is what is computed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.formula import FUNCTIONS, Amount, Formula, power_of_two
from paceline.plan.units import Unit, digits, show

numbers = st.floats(min_value=1e-6, max_value=1e18)


@given(a=numbers, b=numbers)
def test_it_is_pythons_arithmetic(a: float, b: float) -> None:
    text = "max(a, 2 * b) / (a + b) - min(a, b) ** 2 + ceil(a / b) * -1"
    assert Formula(text)(a=a, b=b) == eval(text, {"a": a, "b": b, **FUNCTIONS})


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "a.b", "[a]", "a if b else c", "lambda: a", "f(a)", "a < b", "'x'", "a @ b", "(a := 1)"],
)
def test_nothing_but_arithmetic(text: str) -> None:
    with pytest.raises(ValueError, match="arithmetic"):
        Formula(text)


def test_numbers_stand_in_their_places() -> None:
    formula = Formula("weights / bandwidth + 2 * weights_read ** 2")
    amounts = {"weights": Amount(16e9, Unit.BYTES), "bandwidth": Amount(864e9, Unit.BYTES_PER_S)}
    assert formula.names == ("weights", "bandwidth", "weights_read")
    assert formula.put_in(amounts) == "16 GB / 864 GB/s + 2 × weights_read ²"
    assert str(formula) == "weights / bandwidth + 2 × weights_read ²"
    with pytest.raises(KeyError):
        formula(weights=1.0)


@given(st.floats(min_value=0.01, max_value=1e6))
def test_power_of_two(value: float) -> None:
    found = power_of_two(value)
    assert found >= value
    assert found == 1 or found / 2 < value
    assert found & (found - 1) == 0


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (16e9, Unit.BYTES, "16 GB"),
        (3350e9, Unit.BYTES_PER_S, "3,350 GB/s"),
        (131072, Unit.BINARY, "128 KiB"),
        (0.01852, Unit.SECONDS, "18.5 ms"),
        (4.4e-5, Unit.SECONDS, "44 µs"),
        (0.0, Unit.SECONDS, "0 s"),
        (2.226, Unit.SECONDS, "2.226 s"),
        (8.03e9, Unit.PARAMETERS, "8.03e9"),
        (0.125, Unit.SHARE, "12.5 %"),
        (6.5161, Unit.FACTOR, "6.52x"),
        (math.inf, Unit.OPERATIONS_PER_S, "unlimited"),
        (989e12, Unit.OPERATIONS_PER_S, "989 TFLOP/s"),
    ],
)
def test_units(value: float, unit: Unit, text: str) -> None:
    assert show(value, unit) == text


@given(st.floats(min_value=1e-9, max_value=1e12))
def test_digits_are_enough_to_check_by_hand(value: float) -> None:
    assert float(digits(value).replace(",", "")) == pytest.approx(value, rel=6e-4)
