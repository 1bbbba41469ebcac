"""The last steps of the engine, one row each: what was computed, how long it was expected to take and took."""

from __future__ import annotations

from collections import deque
from importlib.resources import files
from typing import Any

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
)


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
            )
        )

    @property
    def last(self) -> dict[str, Any] | None:
        """The newest row by column; None before any step."""
        return dict(zip(COLUMNS, self._rows[-1], strict=True)) if self._rows else None

    def report(self, itl_s: float | None) -> dict[str, Any]:
        """All rows, oldest first, with the tightest promised gap for the deadline line."""
        return {"columns": COLUMNS, "rows": list(self._rows), "itl_s": itl_s}


def page(still: str = "null") -> str:
    """One self-contained HTML file that draws a report; given one as JSON, a still of it, else a live view."""
    source = files("paceline.serve").joinpath("pages/timeline.html").read_text(encoding="utf-8")
    return source.replace("/*STILL*/ null", still.replace("<", "\\u003c"), 1)
