"""Units of the numbers in an answer, and how each is written for people. Values are always in the base unit."""

from __future__ import annotations

import math
from enum import StrEnum


class Unit(StrEnum):
    """The base unit, as JSON names it."""

    SECONDS = "s"
    BYTES = "B"  # shown in powers of ten, as datasheets do
    BINARY = "B (binary)"  # the same bytes, shown in powers of two, as allocators do
    BYTES_PER_S = "B/s"
    OPERATIONS = "FLOP"
    OPERATIONS_PER_S = "FLOP/s"
    INTENSITY = "FLOP/B"
    TOKENS = "tokens"
    TOKENS_PER_S = "tokens/s"
    REQUESTS_PER_S = "requests/s"
    PARAMETERS = "parameters"
    COUNT = ""
    SHARE = "share"
    FACTOR = "x"
    MONEY = "per million tokens"
    PRICE = "per hour"

    @property
    def base(self) -> str:
        """The unit of the stored value."""
        return "B" if self is Unit.BINARY else self.value


_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"))
_SCALED = {
    Unit.BYTES: "B",
    Unit.OPERATIONS: "FLOP",
    Unit.OPERATIONS_PER_S: "FLOP/s",
}


def show(value: float, unit: Unit) -> str:
    """The value with its unit, at most four digits: enough to check the arithmetic by hand."""
    if math.isinf(value):
        return "unlimited"
    if unit is Unit.SECONDS:
        return _seconds(value)
    if unit is Unit.BINARY:
        return _scaled(value, _BINARY, "B")
    if unit is Unit.BYTES_PER_S:  # 3350 GB/s is how everybody writes it
        return _scaled(value, _DECIMAL[2:], "B/s")
    if unit in _SCALED:
        return _scaled(value, _DECIMAL, _SCALED[unit])
    if unit is Unit.PARAMETERS:
        return f"{digits(value / 1e9)}e9" if value >= 1e8 else f"{digits(value / 1e6)}e6"
    if unit is Unit.SHARE:
        return f"{digits(100.0 * value, 3)} %"
    if unit is Unit.COUNT:
        return digits(value)
    return f"{digits(value)} {unit.value}" if unit is not Unit.FACTOR else f"{digits(value, 3)}x"


def digits(value: float, most: int = 4) -> str:
    """A plain number: thousands with commas, whole where it is whole, no exponent short of a billion."""
    if value == 0.0 or not math.isfinite(value):
        return "0" if value == 0.0 else "unlimited"
    size = math.floor(math.log10(abs(value)))
    if size >= most - 1 or float(value).is_integer():
        return f"{value:,.0f}"
    text = f"{value:.{min(most - 1 - size, 12)}f}"
    return text.rstrip("0").rstrip(".")


def _seconds(value: float) -> str:
    size = abs(value)
    if size == 0.0:
        return "0 s"
    if size < 9.995e-4:
        return f"{digits(value * 1e6, 3)} µs"
    return f"{digits(value * 1e3, 3)} ms" if size < 0.9995 else f"{digits(value)} s"


def _scaled(value: float, scales: tuple[tuple[float, str], ...], unit: str) -> str:
    factor, prefix = next(((factor, prefix) for factor, prefix in scales if abs(value) >= factor), (1.0, ""))
    return f"{digits(value / factor)} {prefix}{unit}"
