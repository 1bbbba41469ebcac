"""The page of a comparison: is B faster than A, how sure is that, and how large is the noise."""

from __future__ import annotations

import math

from paceline.measure.compare import Comparison, Row
from paceline.measure.report import words
from paceline.measure.report.figures import Figure
from paceline.measure.report.html import Cell, Entry, facts, heading, page, paragraph, table
from paceline.measure.report.html import figures as figure_grid
from paceline.measure.report.html import verdict as verdict_box
from paceline.measure.report.runpage import GLOSSARY, WHY
from paceline.measure.report.svg import BOTTOM, TOP, Axis, Plot


def render(comparison: Comparison) -> str:
    """The whole page."""
    a, b = comparison.name_a, comparison.name_b
    title = f"{b} against {a}"
    return page(
        title,
        [
            heading(title, 1),
            paragraph(_method(comparison), "soft"),
            verdict_box(comparison.verdict.value, comparison.why),
            figure_grid([figure] if (figure := ratios(comparison)) else []),
            heading("Statistics"),
            _table(comparison),
            *_deltas(comparison),
            heading("Words"),
            facts(
                (
                    ("ratio", f"{b} over {a}: below 1 is sooner, for a throughput above 1 is more."),
                    (
                        "interval",
                        "95 %, of the median ratio over pairs; for two saved runs, over resampled time blocks.",
                    ),
                    ("noise", "The largest ratio between two runs of the same arm. No smaller change is believed."),
                    ("p", "Two-sided sign-flip test over pairs."),
                    *(entry for entry in GLOSSARY if entry[0] in ("TTFT", "ITL", "TPOT", "E2E", "with failures")),
                )
            ),
        ],
    )


def _method(comparison: Comparison) -> str:
    if comparison.saved:
        text = "Two saved runs. Intervals come from time blocks within them; how repetitions differ is not known."
    else:
        text = (
            f"{words.plural(comparison.pairs, 'pair')} of runs in turns (AB, BA, …), same arrivals and prompts in a "
            f"pair, and {words.plural(comparison.aa_pairs, 'pair')} of one arm with itself for the noise. "
            f"Cache: {comparison.cache}."
        )
    text += f" Smallest change of interest: {words.percent(comparison.smallest_effect)}."
    if comparison.dropped:
        text += f" Left out as INVALID or incomplete: {', '.join(comparison.dropped)}."
    return text


def ratios(comparison: Comparison) -> Figure | None:
    """Every statistic as a ratio with its interval, on one logarithmic axis around 1."""
    rows = [row for row in comparison.rows if row.ratio.median is not None]
    if not rows:
        return None
    ends = [abs(math.log(v)) for row in rows for v in (row.ratio.low, row.ratio.median, row.ratio.high)
            if v is not None and 0.0 < v < math.inf]  # fmt: skip
    reach = max(math.exp(max(ends, default=0.0)) * 1.05, 1.0 + 2.0 * comparison.smallest_effect)
    x = _ratio_axis(reach, f"{comparison.name_b} / {comparison.name_a}")
    names = tuple((float(len(rows) - i), row.name.replace("_", " ")) for i, row in enumerate(rows))
    height = TOP + BOTTOM + 26 * (len(rows) + 1)
    plot = Plot(x, Axis(0.0, len(rows) + 1.0, "", names), width=820, height=height, left=150)
    effect = 1.0 + comparison.smallest_effect
    plot.span(1.0 / effect, effect, f"within ±{words.percent(comparison.smallest_effect)}: the same")
    for i, row in enumerate(rows):
        _draw(plot, row, float(len(rows) - i))
    plot.vertical(1.0, "", "mark")
    reading = "A dot is the median ratio, its line the 95 % interval. Strong: counts toward the verdict."
    return Figure("Ratios", reading, plot.render("Ratios of B over A"))


def _ratio_axis(reach: float, label: str) -> Axis:
    steps = (1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
    wanted = [step for step in steps if step <= reach]
    chosen = wanted[-3:] if len(wanted) > 3 else wanted
    ticks = [*(1.0 / step for step in reversed(chosen)), 1.0, *chosen]
    return Axis(1.0 / reach, reach, label, tuple((tick, f"{tick:.3g}") for tick in ticks), logarithmic=True)


_STYLE = {"faster": "good", "slower": "bad", "same": "s1", "undecided": "s6"}


def _draw(plot: Plot, row: Row, place: float) -> None:
    estimate = row.ratio
    assert estimate.median is not None
    style = _STYLE[estimate.verdict.value] + ("" if row.decides else " faint")
    if estimate.low is not None and estimate.high is not None:
        plot.line([(max(estimate.low, 1e-9), place), (min(estimate.high, 1e9), place)], style)
    plot.points([(estimate.median, place)], style, radius=4.5 if row.decides else 3.5,
                titles=[f"{row.name}: {estimate.verdict.value}"])  # fmt: skip


def _table(comparison: Comparison) -> str:
    rows: list[list[Entry]] = []
    for row in comparison.rows:
        ratio, text = row.ratio, words.count if row.name.endswith("throughput") else words.duration
        between = "" if ratio.low is None or ratio.high is None else f"{ratio.low:.3f} … {ratio.high:.3f}"
        rows.append(
            [
                Cell(row.name, "decides" if row.decides else "", "left"),
                text(row.a),
                text(row.b),
                Cell("–" if ratio.median is None else f"{ratio.median:.3f}", between),
                "–" if ratio.p_value is None else f"{ratio.p_value:.3g}",
                "–" if ratio.noise is None else f"±{100 * (ratio.noise - 1):.1f} %",
                Cell(ratio.verdict.value, style=f"tag {ratio.verdict.value}"),
                Cell(ratio.why, style="wide"),
            ]
        )
    return table(["", comparison.name_a, comparison.name_b, "ratio", "p", "noise", "", WHY], rows)


def _deltas(comparison: Comparison) -> list[str]:
    found = [delta for delta in comparison.deltas if delta.n]
    if not found:
        return []
    rows: list[list[Entry]] = [
        [
            Cell(delta.metric, style="left"),
            f"{delta.n:,}",
            _signed(delta.p10),
            _signed(delta.median),
            _signed(delta.p90),
            words.percent(delta.b_faster_share),
        ]
        for delta in found
    ]
    head = ["", "n", "p10", "median", "p90", f"{comparison.name_b} was sooner"]
    return [
        heading("The same requests under both"),
        paragraph(
            f"{comparison.name_b} minus {comparison.name_a}, request by request, successful in both.", "soft small"
        ),
        table(head, rows),
    ]


def _signed(seconds: float | None) -> str:
    return "–" if seconds is None else ("+" if seconds > 0 else "") + words.duration(seconds)
