"""Formulas that are shown are the formulas that are computed: one text is both.

    step = Formula("weights / bandwidth")
    step(weights=16e9, bandwidth=864e9)        # 0.0185
    step.put_in(...)                           # "16 GB / 864 GB/s"

The text is Python's arithmetic and nothing else: names, numbers, + - * / **, max, min, ceil, floor, power_of_two.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.plan.units import Unit, show

_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


def power_of_two(value: float) -> int:
    """The least power of two that is not below `value`."""
    return 1 << max(0, math.ceil(value) - 1).bit_length()


FUNCTIONS: dict[str, Callable[..., float]] = {
    "max": max,
    "min": min,
    "ceil": math.ceil,
    "floor": math.floor,
    "power_of_two": power_of_two,
}
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Amount:
    """A number that goes into a formula."""

    value: float
    unit: Unit

    def __str__(self) -> str:
        return show(self.value, self.unit)


@dataclass(frozen=True, slots=True)
class Formula:
    """An arithmetic expression over named numbers. ValueError for anything else in the text."""

    text: str
    names: tuple[str, ...] = field(init=False)  # in order of appearance
    _tree: ast.expr = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tree = ast.parse(self.text, mode="eval").body
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Load | ast.BinOp | ast.UnaryOp) or type(node) in _OPERATORS:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
                continue
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
                continue
            raise ValueError(f"a formula is arithmetic alone: {self.text!r} holds {type(node).__name__}")
        found = dict.fromkeys(name for name in _NAME.findall(self.text) if name not in FUNCTIONS)
        object.__setattr__(self, "names", tuple(found))
        object.__setattr__(self, "_tree", tree)

    def __call__(self, **numbers: float) -> float:
        """Its value; a name without a number is a KeyError."""
        return _evaluate(self._tree, numbers)

    def put_in(self, amounts: Mapping[str, Amount]) -> str:
        """The text with the numbers in place of those names that have one."""
        text = _NAME.sub(lambda found: str(amounts.get(found[0], found[0])), self.text)
        return written(text)

    def __str__(self) -> str:
        return written(self.text)


def written(text: str) -> str:
    """Arithmetic as people write it."""
    return re.sub(r"\*\* ?2\b", "²", text).replace("**", "^").replace("*", "×")


def _evaluate(node: ast.expr, numbers: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            return numbers[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_evaluate(left, numbers), _evaluate(right, numbers))
        case ast.UnaryOp(op=op, operand=operand):
            return _OPERATORS[type(op)](_evaluate(operand, numbers))
        case ast.Call(func=ast.Name(id=name), args=args):
            return FUNCTIONS[name](*(_evaluate(arg, numbers) for arg in args))
    raise AssertionError(node)  # __post_init__ let nothing else through
