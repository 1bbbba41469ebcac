"""Everything that crosses between the processes comes out as it went in."""

from __future__ import annotations

import msgspec
import pytest

from paceline.core.pace import Pace
from paceline.core.sampling import SamplingParams
from paceline.core.step import (
    Accepted,
    Finish,
    FinishReason,
    Rejected,
    RejectReason,
    RequestSpec,
    SchedulerStats,
    StepEvents,
    TokenLogprob,
)
from paceline.engine.messages import (
    Alive,
    Answers,
    Bye,
    Cancel,
    Command,
    EngineStats,
    Failed,
    Hello,
    Ready,
    Report,
    Stage,
    Start,
    StepDone,
    StepSample,
    Stop,
    Stopped,
    Submit,
    decode_command,
    decode_report,
    encode,
)
from tests.engine.fakes import make_info, make_scheduler

SPEC = RequestSpec(
    "chatcmpl-1",
    (1, 2, 3),
    SamplingParams(seed=2**64 - 1, logit_bias=((5, -100.0),), stop_token_ids=(0, 2), logprobs=3),
    cache_salt="tenant",
    priority=-3,
)
LOGPROBS = (TokenLogprob(5, -0.25, 1, ((5, -0.25), (7, -float("inf")))),)
FINISH = Finish("a", FinishReason.STOP, stop_token=0, prompt_tokens=3, first_token_s=0.5)
STATS = EngineStats(SchedulerStats(num_running=2), 7, 0.5, 90, 1, 0, (0.1, 0.2), StepSample(6, 0.01, 12, 2))

COMMANDS: list[Command] = [
    Start("package.module:function", {"path": "/models/a", "nested": {"threads": [1, 2.5, None, True]}}),
    Submit(SPEC),
    Cancel("a", FinishReason.STOP),
    Stop(),
    Bye(),
]
REPORTS: list[Report] = [
    Hello(123),
    Stage("read", None, 0.5),
    Stage("read", 1.5),
    Ready(make_info(make_scheduler())),
    Answers(
        (Accepted("a", Pace(0.08, 8)), Accepted("b")), (Rejected("c", RejectReason.QUEUE_FULL, "full", 1.5),), (FINISH,)
    ),
    StepDone(StepEvents(6, ("a",), ((5,),), (LOGPROBS,), (("a", LOGPROBS),), (FINISH,)), STATS),
    Alive(EngineStats()),
    Stopped(),
    Failed("CorruptModel", "model.gguf is truncated"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_commands_survive(command: Command) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_reports_survive(report: Report) -> None:
    assert decode_report(encode(report)) == report


@pytest.mark.parametrize("frame", [b"", b"\xc1", encode(Stop())[:-1], msgspec.msgpack.encode(["Unknown", 1])])
def test_garbage_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_command(frame)
    with pytest.raises(msgspec.DecodeError):
        decode_report(frame)
