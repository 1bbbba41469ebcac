"""The call log: every call on a scheduler in one file, enough to make the same decisions again.

One JSON object a line. The first holds the configuration; each further one a call with its `now`, what it was given and
what it answered. A log holds prompts and outputs as token ids: treat it like the traffic itself.

    scheduler = RecordedScheduler(config, open("calls.jsonl", "w"))
    ...
    replay("calls.jsonl")  # raises ReplayMismatch at the first plan that differs
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from paceline.core.classes import Overload, TrafficClass
from paceline.core.config import SchedulerConfig
from paceline.core.protocols import CostModel
from paceline.core.sampling import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.step import Accepted, Finish, FinishReason, Rejected, RequestSpec, StepEvents, StepPlan, StepResult
from paceline.errors import PacelineError

VERSION = 1


class ReplayMismatch(PacelineError):
    """A replayed call answered differently from the recorded one."""


class RecordedScheduler(Scheduler):
    """A scheduler that writes down every call. The file is the caller's to open and close."""

    def __init__(self, config: SchedulerConfig, file: TextIO, cost: CostModel | None = None) -> None:
        super().__init__(config, cost)
        self._file = file
        self._write(log=VERSION, config=asdict(config))

    def submit(self, spec: RequestSpec, now: float) -> Accepted | Rejected:
        answer = super().submit(spec, now)
        self._write(call="submit", now=now, spec=asdict(spec), accepted=isinstance(answer, Accepted))
        return answer

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        self._write(call="plan", now=now, plan=None if plan is None else plan_row(plan))
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepEvents:
        self._write(
            call="commit",
            now=now,
            step=plan.step,
            tokens=result.tokens,
            failures=result.failures,
            seconds=result.seconds,
        )
        return super().commit(plan, result, now)

    def cancel(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> Finish | None:
        self._write(call="cancel", now=now, request_id=request_id, reason=reason.value)
        return super().cancel(request_id, now, reason)

    def adopt(self, tokens: Sequence[int], salt: str = "") -> int:
        self._write(call="adopt", tokens=list(tokens), salt=salt)
        return super().adopt(tokens, salt)

    def start_over(self) -> None:
        self._write(call="start_over")
        super().start_over()

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), default=_plain) + "\n")


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{value!r} has no place in a call log")


def plan_row(plan: StepPlan) -> dict[str, Any]:
    """A plan as plain JSON values, complete but for the specs that `submit` already holds."""
    return {
        "step": plan.step,
        "ids": list(plan.ids),
        "starts": list(plan.starts),
        "counts": list(plan.counts),
        "new_blocks": [list(blocks) for blocks in plan.new_blocks],
        "samples": list(plan.samples),
        "admitted": [[a.spec.request_id, list(a.outputs), a.cached_tokens] for a in plan.admitted],
        "released": list(plan.released),
        "predicted_s": plan.predicted_s,
        "bound_by": plan.bound_by.value,
    }


def read_calls(path: str | Path) -> tuple[SchedulerConfig, Iterator[dict[str, Any]]]:
    """The configuration and the calls of a log. A last line cut off by a crash ends the log."""
    lines = _lines(path)
    head = next(lines, None)
    if head is None or head.get("log") != VERSION:
        raise PacelineError(f"{path} is not a call log of version {VERSION}")
    return config_from_row(head["config"]), lines


def config_from_row(row: dict[str, Any]) -> SchedulerConfig:
    """The configuration a log was made with."""
    options = tuple((name, value) for name, value in row["policy_options"])
    classes = tuple(TrafficClass(**{**kind, "overload": Overload(kind["overload"])}) for kind in row["classes"])
    return SchedulerConfig(**{**row, "policy_options": options, "classes": classes})


def _lines(path: str | Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield json.loads(line)


def spec_from_row(row: dict[str, Any]) -> RequestSpec:
    """The `RequestSpec` that `submit` was given."""
    sampling = dict(row["sampling"])
    sampling["logit_bias"] = tuple((token, bias) for token, bias in sampling["logit_bias"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    return RequestSpec(**{**row, "prompt": tuple(row["prompt"]), "sampling": SamplingParams(**sampling)})


def result_from_row(row: dict[str, Any]) -> StepResult:
    """The `StepResult` that `commit` was given, less its logprobs, which no decision looks at."""
    return StepResult(
        step=row["step"],
        tokens=tuple(map(tuple, row["tokens"])),
        failures=tuple((at, message) for at, message in row["failures"]),
        seconds=row["seconds"],
    )


def replay(path: str | Path, cost: CostModel | None = None) -> int:
    """Make every recorded call on a fresh scheduler; the number of plans compared. `ReplayMismatch` at a difference.

    `cost` must be in the state in which the recorded scheduler's was when the log began (a fresh one, as a rule).
    """
    config, calls = read_calls(path)
    scheduler = Scheduler(config, cost)
    in_flight: dict[int, StepPlan] = {}
    compared = 0
    for call in calls:
        match call["call"]:
            case "submit":
                accepted = isinstance(scheduler.submit(spec_from_row(call["spec"]), call["now"]), Accepted)
                if accepted != call["accepted"]:
                    raise ReplayMismatch(f"submit of {call['spec']['request_id']!r}: accepted is now {accepted}")
            case "plan":
                plan = scheduler.plan(call["now"])
                row = None if plan is None else plan_row(plan)
                if row != call["plan"]:
                    raise ReplayMismatch(f"plan {compared} differs: recorded {call['plan']}, now {row}")
                if plan is not None:
                    in_flight[plan.step] = plan
                compared += 1
            case "commit":
                scheduler.commit(in_flight.pop(call["step"]), result_from_row(call), call["now"])
            case "cancel":
                scheduler.cancel(call["request_id"], call["now"], FinishReason(call["reason"]))
            case "adopt":
                scheduler.adopt(call["tokens"], call["salt"])
            case "start_over":
                scheduler.start_over()
            case other:
                raise PacelineError(f"{path}: unknown call {other!r}")
    return compared
