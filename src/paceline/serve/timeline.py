"""The last steps of the engine, one row each: what was computed, how long it was expected to take and took."""

from __future__ import annotations

from collections import deque
from importlib.resources import files
from typing import Any

from paceline.core.step import Bound
from paceline.engine.messages import EngineStats

KEPT_STEPS = 2000
COLUMNS = (
    "step",
    "ended_s",  # on the server's monotonic clock
    "seconds",
    "predicted_s",  # null where no cost model was asked
    "prefill_tokens",
    "decode_tokens",
    "rows",
    "running",
    "waiting",
    "kv_usage",  # share of KV blocks held by live requests
    "bound_by",
    "context",  # KV positions read, over all rows
    "pairs",  # query-key pairs of prefills; with tokens, rows and context what a step's time depends on
    "scheduler_s",  # of real time, for its plan and its commit
)


_BOUND_BY = COLUMNS.index("bound_by")


class Timeline:
    """A ring of rows. Costs a tuple a step, so it is always on."""

    def __init__(self, kept: int = KEPT_STEPS) -> None:
        self._rows: deque[tuple[Any, ...]] = deque(maxlen=kept)

    def note(self, stats: EngineStats) -> None:
        """One message of the engine; heartbeats bring no step."""
        step = stats.last_step
        if step is None:
            return
        core = stats.scheduler
        self._rows.append(
            (
                step.step,
                step.ended_s,
                step.seconds,
                step.predicted_s,
                step.prefill_tokens,
                step.tokens - step.prefill_tokens,
                step.rows,
                core.num_running,
                core.num_waiting,
                core.kv_blocks_used / core.kv_blocks_total if core.kv_blocks_total else 0.0,
                step.bound_by.value,
                step.context,
                step.pairs,
                step.scheduler_s,
            )
        )

    @property
    def last(self) -> dict[str, Any] | None:
        """The newest row by column; None before any step."""
        return dict(zip(COLUMNS, self._rows[-1], strict=True)) if self._rows else None

    def prefill_budget(self, now: float) -> dict[str, Any]:
        """How many prompt tokens a step may hold at `now`, on the clock of `ended_s`, and what bounds that.

        A step that something kept from being larger holds as many as it was allowed: `bound` is the newest of those.
        Any other had room for all who wanted it: `last` is the newest step, and where it was of that kind
        (`at_least`), the budget was at least what it holds. Both are None before any such step.
        """
        bound = next((row for row in reversed(self._rows) if row[_BOUND_BY] != Bound.NOTHING.value), None)
        return {
            "last": _budget(self._rows[-1], now) if self._rows else None,
            "bound": None if bound is None else _budget(bound, now),
        }

    def report(self, itl_s: float | None) -> dict[str, Any]:
        """All rows, oldest first, with the tightest promised gap for the deadline line."""
        return {"columns": COLUMNS, "rows": list(self._rows), "itl_s": itl_s}


def _budget(row: tuple[Any, ...], now: float) -> dict[str, Any]:
    step = dict(zip(COLUMNS, row, strict=True))
    return {
        "tokens": step["prefill_tokens"],
        "at_least": step["bound_by"] == Bound.NOTHING.value,
        "bound_by": step["bound_by"],
        "step": step["step"],
        "age_s": max(0.0, now - step["ended_s"]),
    }


def page(still: str = "null") -> str:
    """One self-contained HTML file that draws a report; given one as JSON, a still of it, else a live view."""
    source = files("paceline.serve").joinpath("pages/timeline.html").read_text(encoding="utf-8")
    return source.replace("/*STILL*/ null", still.replace("<", "\\u003c"), 1)
