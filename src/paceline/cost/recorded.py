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
from paceline.cost.beside import NOTHING, Beside
from paceline.errors import ConfigError

IDLE_S = 0.005  # a submission that comes so long after the last commit has waited for no step
TIMELINE_NEEDS = ("ended_s", "seconds", "rows", "prefill_tokens", "decode_tokens", "context", "pairs")


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step: what it computed and how long it took, in seconds. `at_s`: when it ended, on the server's clock."""

    shape: StepShape
    seconds: float
    at_s: float = 0.0
    beside: Beside = NOTHING  # what the server did meanwhile, where that is known


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
    loop_s: float = 0.0  # from a commit to the next plan, where little is sent; in the seconds of all steps


def read_call_times(path: str | Path) -> CallTimes:
    """Steps and requests of a call log; those before `start_over` are the engine's warm-up and left out.

    A step of a busy engine lasts from the commit before to its own: whatever is between a commit and the next plan
    (the loop itself, commands, the server's share of the cores) clients wait for, too. The first after a pause lasts
    from its plan, and `loop_s` is added, which it has paid as well.
    """
    config, calls = read_calls(path)
    log = _Log(CallTimes(config))
    for call in calls:
        log.take(call)
    return log.finish()


@dataclass(slots=True)
class _Step:
    """One step of a log. `gap_s`: None where the engine was not busy before it."""

    shape: StepShape
    began_s: float
    ended_s: float
    gap_s: float | None
    sent: int  # tokens that were on their way meanwhile
    requests: int = 0
    prompt_tokens: int = 0


@dataclass(slots=True)
class _Log:
    """What has been read of a call log."""

    found: CallTimes
    steps: list[_Step] = field(default_factory=list)
    plans: dict[int, tuple[float, dict[str, Any], bool]] = field(default_factory=dict)  # made and not committed
    committed_s: float = float("-inf")
    brought: int = 0  # tokens, by the last commit
    rested: bool = True  # since then, or before the first

    def take(self, call: Mapping[str, Any]) -> None:
        """The next call."""
        match call["call"]:
            case "start_over":
                self.steps.clear()
                self.found.requests.clear()
            case "submit" if call["accepted"]:
                self._submit(call["spec"], call["now"])
            case "plan" if call["plan"] is None:
                self.rested = True
            case "plan":
                plan = call["plan"]
                requests = self.found.requests
                busy = any(name in requests and requests[name].submitted_s <= self.committed_s for name in plan["ids"])
                self.plans[plan["step"]] = call["now"], plan, busy and not self.rested
            case "commit":
                self._commit(call)

    def _submit(self, spec: Mapping[str, Any], now: float) -> None:
        idle = now - self.committed_s > IDLE_S
        prompt_tokens = len(spec["prompt"])
        self.found.requests[spec["request_id"]] = RequestTimes(prompt_tokens, spec["sent_s"], now, idle)
        came_s = now if spec["sent_s"] is None else spec["sent_s"]
        if self.steps and came_s <= self.committed_s:  # the server saw to it during the step that ended last
            self.steps[-1].requests += 1
            self.steps[-1].prompt_tokens += prompt_tokens

    def _commit(self, call: Mapping[str, Any]) -> None:
        now, requests = call["now"], self.found.requests
        planned_s, plan, busy = self.plans.pop(call["step"])
        shape = _shape(plan["starts"], plan["counts"])
        if busy:
            gap_s = max(0.0, planned_s - self.committed_s)
            self.steps.append(_Step(shape, self.committed_s, now, gap_s, self.brought))
        else:
            self.steps.append(_Step(shape, max(planned_s, self.committed_s), now, None, 0))
        for place, (request_id, tokens) in enumerate(zip(plan["ids"], call["tokens"], strict=True)):
            if tokens and request_id in requests:
                requests[request_id].tokens += [(now, place)] * len(tokens)
        self.committed_s, self.rested = now, False
        self.brought = sum(map(len, call["tokens"]))

    def finish(self) -> CallTimes:
        """All of it."""
        gaps = sorted((step.sent, step.gap_s) for step in self.steps if step.gap_s is not None)
        if gaps:
            self.found.loop_s = statistics.median(gap_s for _, gap_s in gaps[: max(1, len(gaps) // 4)])
        for step in self.steps:
            seconds = step.ended_s - step.began_s + (self.found.loop_s if step.gap_s is None else 0.0)
            beside = Beside(step.sent, step.requests, step.prompt_tokens)
            self.found.steps.append(StepRow(step.shape, seconds, step.ended_s, beside))
        return self.found


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
