"""The answers as one self-contained page with figures, in the look of the measured reports."""

from __future__ import annotations

import math
from html import escape

from paceline.measure.report import html
from paceline.measure.report.figures import Figure
from paceline.measure.report.style import CSS
from paceline.measure.report.svg import LEFT, Axis, Plot
from paceline.plan.answer import Answer, Chart, Table, Value
from paceline.plan.case import Case
from paceline.plan.text import cell_text, describe, heading_text, is_derived
from paceline.plan.units import Unit, show


def render(case: Case, answers: list[Answer]) -> str:
    """The whole page."""
    title = f"{case.model.name} on {case.chips} x {case.chip.title}"
    body = [html.heading(title, 1), html.paragraph(describe(case), "soft")]
    body += [html.paragraph(f"Note: {note}.") for note in case.notes]
    for answer in answers:
        body.append(html.heading(answer.question))
        body.append(html.paragraph(answer.headline))
        if answer.binds:
            body.append(html.paragraph(f"What binds: {answer.binds}.", "soft"))
        body += [_narrow(html.figures([figure_of(chart)])) for chart in answer.charts]
        if answer.values:
            body.append(_values(answer.values))
        body += [_apart(_table(table)) for table in answer.tables]
        body += [html.paragraph(note, "soft small") for note in answer.notes]
    return html.page(title, body)


def _narrow(content: str) -> str:
    """A figure alone in its row, no wider than it is read well."""
    return f'<div style="max-width: 660px; margin: 14px 0">{content}</div>'


def _apart(content: str) -> str:
    """A table with room above it, as several follow each other here."""
    return f'<div style="margin: 18px 0 4px">{content}</div>'


def figure_of(chart: Chart) -> Figure:
    return Figure(chart.caption, chart.reading, draw(chart))


def draw(chart: Chart) -> str:
    """The figure as an `<svg>` that takes its colours from the page."""
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    ys += [mark.at for mark in chart.marks if mark.axis == "y"]
    x, y = (
        _axis(xs, chart.x_label, chart.x_unit, chart.x_log),
        _axis(ys, chart.y_label, chart.y_unit, chart.y_log),
    )
    widest = max((len(text) for _, text in y.ticks), default=0)
    plot = Plot(x, y, left=max(LEFT, 30 + round(6.2 * widest)))
    for line in chart.lines:
        if line.dots:
            plot.points(line.points, line.style, line.name, radius=4.0, titles=line.titles)
        else:
            plot.line(line.points, line.style, line.name)
        if line.label and line.points:
            anchor, dx, dy = ("end", -8.0, -6.0) if line.above else ("start", 8.0, 14.0)
            plot.text(line.points[0], line.label, anchor=anchor, dx=dx, dy=dy)
    for mark in chart.marks:
        (plot.vertical if mark.axis == "x" else plot.horizontal)(mark.at, mark.text)
    return plot.render(chart.caption)


def standalone(chart: Chart) -> str:
    """The figure as a file of its own, with the report's colours in it."""
    svg = draw(chart).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    start = svg.index(">") + 1
    return f"{svg[:start]}<style>{escape(CSS, quote=False)}</style>{svg[start:]}\n"


def _axis(values: list[float], label: str, unit: Unit, logarithmic: bool) -> Axis:
    def tick(value: float) -> str:
        return show(value, unit)

    finite = [value for value in values if math.isfinite(value)]
    if logarithmic:
        positive = [value for value in finite if value > 0.0]
        return Axis.log(min(positive) * 0.9, max(positive) * 1.1, label, tick)
    return Axis.linear(min(0.0, *finite), max(finite), label, tick)


def _values(values: tuple[Value, ...]) -> str:
    rows = []
    both = any(value.expected for value in values)
    for value in values:
        seen = value.expected
        expected = html.Cell("")
        if seen is not None:
            spread = f"{show(seen.low, value.unit)} to {show(seen.high, value.unit)}" if seen.low != seen.high else ""
            spread += "" if seen.known else ", a guess"
            expected = html.Cell(show(seen.value, value.unit), spread)
        how = html.Cell(str(value.formula), value.working, "wide") if is_derived(value) else html.Cell("")
        numbers = (show(value.value, value.unit), *((expected,) if both else ()))
        rows.append((html.Cell(value.label, style="left"), *numbers, how))
    heads = ("ideal", "expected") if both else ("value",)
    return html.table(("", *heads, html.Cell("formula, and the numbers put in", style="left")), rows)


def _table(table: Table) -> str:
    rows = [
        [cell_text(cell, column.unit) for cell, column in zip(row, table.columns, strict=True)] for row in table.rows
    ]
    made_by = html.paragraph(f"Each row: {table.formula.put_in(table.numbers)}", "soft small") if table.formula else ""
    return html.table([heading_text(column) for column in table.columns], rows) + made_by
