"""The answers for a terminal."""

from __future__ import annotations

import textwrap
from typing import Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from paceline.plan.answer import Answer, Cell, Column, Expected, Table, Value
from paceline.plan.case import Case
from paceline.plan.units import Unit, show


def print_answers(console: Console, case: Case, answers: list[Answer], *, tables: bool = True) -> None:
    """All of them, with the case they are about at the top."""
    _print(console, describe(case), style="bold")
    for note in case.notes:
        _print(console, f"note: {note}", style="yellow")
    for answer in answers:
        console.print()
        _print(console, answer.question, style="bold underline")
        _print(console, answer.headline)
        _print_values(console, answer.values)
        if answer.binds:
            _print(console, f"binds: {answer.binds}", 2, style="bold")
        for table in answer.tables if tables else ():
            console.print(Padding(_grid(table), (1, 0, 0, 2), expand=False))
            if table.formula is not None:
                _print(console, f"each row: {table.formula.put_in(table.numbers)}", 2, style="dim")
        for note in answer.notes:
            _print(console, f"note: {note}", 2, style="dim")


def _print(console: Console, text: str, indent: int = 0, *, style: str = "") -> None:
    """Text in lines as wide as the console, without spaces at their ends."""
    space = " " * indent
    lines = textwrap.fill(text, max(console.width, 40), initial_indent=space, subsequent_indent=space)
    console.print(Text(lines, style=style), soft_wrap=True)


def describe(case: Case) -> str:
    """What was asked about, on one line."""
    deployment, traffic = case.deployment, case.traffic
    layout = "".join(
        f", {name} {degree}"
        for name, degree in (("TP", deployment.tp), ("PP", deployment.pp), ("EP", deployment.ep))
        if degree > 1
    )
    return (
        f"{case.model.name} in {deployment.weights}, KV in {deployment.kv}, on {case.chips} x {case.chip.title}"
        f"{layout}; context {traffic.context:,}, prompt {traffic.prompt:,}, output {traffic.output:,}, "
        f"batch {traffic.batch}"
    )


def _print_values(console: Console, values: tuple[Value, ...]) -> None:
    """Name, ideal and expected on one line; below it the formula and the same with the numbers put in."""
    width = max((len(value.label) for value in values), default=0)
    for value in values:
        told = Text(f"  {value.label:<{width}}  ")
        told.append(show(value.value, value.unit), style="bold")
        told.append(expected_text(value.expected, value.unit))
        console.print(told, soft_wrap=True)
        if is_derived(value):
            for line in dict.fromkeys((str(value.formula), value.working)):
                _print(console, f"= {line}", 6, style="dim")


def is_derived(value: Value) -> bool:
    """Whether its formula says something: what a search found has a name for a formula."""
    return bool(value.formula.names) and value.formula.text not in value.formula.names


def expected_text(seen: Expected | None, unit: Unit) -> str:
    if seen is None:
        return ""
    spread = f" ({show(seen.low, unit)} to {show(seen.high, unit)})" if seen.low != seen.high else ""
    return f"; expected {show(seen.value, unit)}{spread}{'' if seen.known else ', a guess'}"


def _grid(table: Table) -> Grid:
    grid = Grid(box=None, pad_edge=False)
    for column in table.columns:
        side: Literal["left", "right"] = "left" if _is_text(table, column.name) else "right"
        grid.add_column(heading_text(column), justify=side, overflow="fold")
    for row in table.rows:
        grid.add_row(*(cell_text(cell, column.unit) for cell, column in zip(row, table.columns, strict=True)))
    return grid


def _is_text(table: Table, name: str) -> bool:
    at = [column.name for column in table.columns].index(name)
    return any(isinstance(row[at], str) for row in table.rows)


_IN_HEADING = (Unit.TOKENS, Unit.TOKENS_PER_S, Unit.REQUESTS_PER_S, Unit.MONEY)


def heading_text(column: Column) -> str:
    """A column's label, with the unit where its cells go without."""
    named = column.unit in _IN_HEADING and column.unit is not Unit.MONEY and column.unit.value not in column.label
    return f"{column.label} ({column.unit.value})" if named else column.label


def cell_text(cell: Cell, unit: Unit) -> str:
    """A cell of a table; units that never change with the size stand in the heading."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    return show(cell, Unit.COUNT if unit in _IN_HEADING else unit)
