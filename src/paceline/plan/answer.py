"""What an answer is: values with their formulas, perhaps a table and a chart. Renderers know nothing else.

Each value stands twice where both are known: `value` is the ideal, from the datasheet alone; `expected` is what the
project's cost model says for the same thing, with the efficiencies that kernels reach, and a range.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.plan.formula import Amount, Formula
from paceline.plan.units import Unit

Cell = float | str | None  # None: does not apply, or is not known


@dataclass(frozen=True, slots=True)
class Expected:
    """What the cost model says: the number, and the range that nine in ten are expected in.

    Not `known`: nothing of this kind or size was measured, and the numbers are a guess.
    """

    value: float
    low: float
    high: float
    known: bool = True

    @classmethod
    def exactly(cls, value: float) -> Expected:
        """A number without a range of its own: a count, or what a search over expected times found."""
        return cls(value, value, value)


@dataclass(frozen=True, slots=True)
class Value:
    """One number: where it comes from, and what bounds it (memory, compute, link, ...; empty: nothing does)."""

    name: str  # stable, for JSON
    label: str  # for people
    value: float
    unit: Unit
    formula: Formula
    numbers: dict[str, Amount]  # put into the formula, in its order
    expected: Expected | None = None
    binds: str = ""

    @property
    def amount(self) -> Amount:
        """As a number of the next formula."""
        return Amount(self.value, self.unit)

    def expecting(self, expected: Expected | None) -> Value:
        """The same with what the cost model says beside it."""
        return replace(self, expected=expected)

    def bound_by(self, binds: str) -> Value:
        """The same with what bounds it."""
        return replace(self, binds=binds)

    @property
    def working(self) -> str:
        """The formula with its numbers put in."""
        return self.formula.put_in(self.numbers)


def solve(name: str, label: str, unit: Unit, formula: str, /, **numbers: Amount | Value) -> Value:
    """The value of a formula. KeyError where a number is missing; numbers that it does not name are not kept."""
    parsed = Formula(formula)
    given = {key: number.amount if isinstance(number, Value) else number for key, number in numbers.items()}
    put_in = {key: given[key] for key in parsed.names}
    value = parsed(**{key: amount.value for key, amount in put_in.items()})
    return Value(name, label, value, unit, parsed, put_in)


@dataclass(frozen=True, slots=True)
class Column:
    name: str  # stable, for JSON
    label: str
    unit: Unit = Unit.COUNT


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of numbers, made by one formula where there is one; `numbers` are those that stay the same in all rows."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    formula: Formula | None = None
    numbers: dict[str, Amount] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """A series of a chart, in order of x."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: str = "s1"  # a series class of the chart kit
    dots: bool = False
    titles: tuple[str, ...] = ()  # of the dots, on hovering
    label: str = ""  # below its first point, to the right
    above: bool = False  # the label is above it, to the left


@dataclass(frozen=True, slots=True)
class Mark:
    """A bound on one of the axes."""

    axis: str  # "x" or "y"
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure as data."""

    caption: str
    reading: str  # one sentence: how to read it
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    x_unit: Unit = Unit.COUNT
    y_unit: Unit = Unit.COUNT
    y_log: bool = True
    x_log: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question."""

    name: str  # of the question, as the registry has it
    question: str
    headline: str  # the answer in one sentence
    values: tuple[Value, ...] = ()
    binds: str = ""
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Value:
        """A value by its name. KeyError where there is none."""
        for value in self.values:
            if value.name == name:
                return value
        raise KeyError(name)
