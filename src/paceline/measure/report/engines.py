"""The part of a run's page on the engines themselves, of which only a simulation can tell."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.measure.records import Manifest
from paceline.measure.report import words
from paceline.measure.report.html import Cell, Entry, heading, paragraph, table


def engines(manifest: Manifest) -> Iterable[str]:
    """Of a simulation: what the time of its engines went into."""
    usage = manifest.engine.get("usage")
    if not usage:
        return
    yield heading("What the engines did")
    rows: list[list[Entry]] = [
        [
            name,
            words.percent(one["utilisation"]),
            f"{one['steps']:,}",
            words.duration(one["busy_s"] / one["steps"] if one["steps"] else None),
            words.count(one["rows"] / one["steps"] if one["steps"] else None),
            words.percent(one["prefill_tokens"] / one["tokens"] if one["tokens"] else None),
            Cell(words.percent(one["kv_used_mean"]), f"at most {words.percent(one['kv_used_max'])}"),
            Cell(words.shares(one["bound_share"]), style="left"),
            Cell(words.shares(one["limit_share"]), style="left"),
        ]
        for name, one in usage.items()
    ]
    yield table(
        ["engine", "busy", "steps", "mean step", "rows", "prefill tokens", "KV held",
         "what kept steps small", "what limits the hardware"], rows
    )  # fmt: skip
    yield paragraph(
        "Shares are of the time in which steps were computed. A step bound by nothing gave everybody all they could "
        "take; the last column sums the operations of sampled steps by what limits each.",
        "soft small",
    )
    outside = [name for name, one in usage.items() if (one["outside_share"] or 0.0) > 0.0]
    if outside:
        text = "Some steps of {} lie outside what the cost model was made from: their times are extrapolated."
        yield paragraph(text.format(", ".join(outside)), "small")
