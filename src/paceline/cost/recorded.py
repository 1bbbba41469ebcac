"""Steps that a server has recorded, as rows a cost model can be fitted to: from a call log or from /timeline/steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.calllog import read_calls
from paceline.core.config import SchedulerConfig
from paceline.core.shape import StepShape
from paceline.errors import ConfigError

IDLE_S = 0.005  # a submission that comes so long after the last commit has waited for no step
TIMELINE_NEEDS = ("ended_s", "seconds", "rows", "prefill_tokens", "decode_tokens", "context", "pairs")


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step: what it computed and how long it took, in seconds. `at_s`: when it ended, on the server's clock."""

    shape: StepShape
    seconds: float
    at_s: float = 0.0


@dataclass(slots=True)
class RequestTimes:
    """One request as the scheduler saw it, in seconds on its clock."""

    prompt_tokens: int
    sent_s: float | None  # when the HTTP request came
    submitted_s: float  # when the scheduler was told
    idle: bool  # no step ended just before, so that it did not wait for one
    tokens: list[tuple[float, int]] = field(default_factory=list)  # of each token: commit, its place in the step


@dataclass(slots=True)
class CallTimes:
    """What the calls of one log tell about times."""

    config: SchedulerConfig
    steps: list[StepRow] = field(default_factory=list)
    requests: dict[str, RequestTimes] = field(default_factory=dict)  # by the scheduler's id
    loop_s: float = 0.0  # from a commit to the next plan, where nothing comes between; included in the steps' seconds


def read_call_times(path: str | Path) -> CallTimes:
    """Steps and requests of a call log; those before `start_over` are the engine's warm-up and left out.

    A step lasts from its plan to its commit, or from the commit before where plans overlap; `loop_s`, which every step
    of a busy engine pays, is added.
    """
    config, calls = read_calls(path)
    found = CallTimes(config)
    gaps: list[float] = []
    plans: dict[int, tuple[float, dict[str, Any]]] = {}
    committed_s, after_commit = float("-inf"), False
    for call in calls:
        match call["call"]:
            case "start_over":
                found.steps.clear()
                found.requests.clear()
                gaps.clear()
            case "submit" if call["accepted"]:
                spec = call["spec"]
                idle = call["now"] - committed_s > IDLE_S
                found.requests[spec["request_id"]] = RequestTimes(
                    len(spec["prompt"]), spec["sent_s"], call["now"], idle
                )
            case "plan" if call["plan"] is not None:
                plan = call["plan"]
                plans[plan["step"]] = call["now"], plan
                if after_commit:
                    gaps.append(call["now"] - committed_s)
            case "commit":
                planned_s, plan = plans.pop(call["step"])
                seconds = call["now"] - max(planned_s, committed_s)
                committed_s = call["now"]
                found.steps.append(StepRow(_shape(plan["starts"], plan["counts"]), seconds, committed_s))
                for place, (request_id, tokens) in enumerate(zip(plan["ids"], call["tokens"], strict=True)):
                    if tokens and request_id in found.requests:
                        found.requests[request_id].tokens += [(committed_s, place)] * len(tokens)
        after_commit = call["call"] == "commit"
    if gaps:
        found.loop_s = statistics.median(gaps)
    found.steps = [StepRow(row.shape, row.seconds + found.loop_s, row.at_s) for row in found.steps]
    return found


def _shape(starts: list[int], counts: list[int]) -> StepShape:
    shape = StepShape()
    for start, count in zip(starts, counts, strict=True):
        shape = shape.plus(start, count)
    return shape


def rows_of_timeline(report: Mapping[str, Any]) -> list[StepRow]:
    """The rows of /timeline/steps (or of `paceline timeline --json`). Raises ConfigError for one that lacks columns.

    A step's seconds are those in the backend; where the step before ended just before it began, from that end on, so
    that the scheduler's own time is in them.
    """
    columns = list(report.get("columns") or ())
    missing = [name for name in TIMELINE_NEEDS if name not in columns]
    if missing:
        raise ConfigError(
            f"the recorded steps have no column {', '.join(missing)}: they are of another version of Paceline; "
            "record them again, or give a call log (paceline serve --call-log FILE)"
        )
    rows = []
    before_s = float("-inf")
    for values in report["rows"]:
        row = dict(zip(columns, values, strict=True))
        tokens = row["prefill_tokens"] + row["decode_tokens"]
        shape = StepShape(tokens, row["rows"], row["context"], row["pairs"])
        ended_s, seconds = row["ended_s"], row["seconds"]
        whole_s = ended_s - before_s
        if seconds <= whole_s <= seconds + IDLE_S:
            seconds = whole_s
        before_s = ended_s
        if seconds > 0.0 and shape.rows:
            rows.append(StepRow(shape, seconds, ended_s))
    return rows
