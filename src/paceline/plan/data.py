"""The answers as plain data, for JSON: base units, and for each value the formula with what was put in."""

from __future__ import annotations

import math
from typing import Any

from paceline.plan.answer import Answer, Cell, Chart, Table, Value
from paceline.plan.case import Case
from paceline.plan.formula import Amount

SCHEMA = 1


def report(case: Case, answers: list[Answer]) -> dict[str, Any]:
    """Everything, with the case that was asked about. Numbers that are infinite or unknown are null."""
    return {"schema": SCHEMA, "case": of_case(case), "answers": {one.name: of_answer(one) for one in answers}}


def of_case(case: Case) -> dict[str, Any]:
    deployment, traffic, targets = case.deployment, case.traffic, case.targets
    return {
        "model": case.model.name,
        "chip": case.chip.name,
        "chips": case.chips,
        "tp": deployment.tp,
        "pp": deployment.pp,
        "ep": deployment.ep,
        "weights": deployment.weights,
        "kv": deployment.kv,
        "context": traffic.context,
        "prompt": traffic.prompt,
        "output": traffic.output,
        "batch": traffic.batch,
        "ttft_s": targets.ttft_s,
        "itl_s": targets.itl_s,
        "price_per_hour": case.price_per_hour,
        "notes": list(case.notes),
    }


def of_answer(answer: Answer) -> dict[str, Any]:
    return {
        "question": answer.question,
        "answer": answer.headline,
        "binds": answer.binds or None,
        "values": {value.name: of_value(value) for value in answer.values},
        "tables": {table.name: of_table(table) for table in answer.tables},
        "charts": [of_chart(chart) for chart in answer.charts],
        "notes": list(answer.notes),
    }


def of_value(value: Value) -> dict[str, Any]:
    seen = value.expected
    return {
        "value": _number(value.value),
        "unit": value.unit.base,
        "label": value.label,
        "formula": value.formula.text,
        "numbers": {name: of_amount(amount) for name, amount in value.numbers.items()},
        "expected": None
        if seen is None
        else {"value": seen.value, "low": seen.low, "high": seen.high, "known": seen.known},
        "binds": value.binds or None,
    }


def of_amount(amount: Amount) -> dict[str, Any]:
    return {"value": _number(amount.value), "unit": amount.unit.base}


def of_table(table: Table) -> dict[str, Any]:
    return {
        "formula": table.formula.text if table.formula else None,
        "numbers": {name: of_amount(amount) for name, amount in table.numbers.items()},
        "columns": [{"name": one.name, "label": one.label, "unit": one.unit.base} for one in table.columns],
        "rows": [[_cell(cell) for cell in row] for row in table.rows],
    }


def of_chart(chart: Chart) -> dict[str, Any]:
    return {
        "caption": chart.caption,
        "x": {"label": chart.x_label, "unit": chart.x_unit.base},
        "y": {"label": chart.y_label, "unit": chart.y_unit.base},
        "lines": [{"name": line.name, "points": [list(point) for point in line.points]} for line in chart.lines],
        "marks": [{"axis": mark.axis, "at": _number(mark.at), "text": mark.text} for mark in chart.marks],
    }


def _cell(cell: Cell) -> Cell:
    return _number(cell) if isinstance(cell, float) else cell


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
