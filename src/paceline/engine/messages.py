"""What travels between the server and the engine process, encoded by msgspec as MessagePack.

`Command`s go to the engine, `Report`s come back. Values of core travel as they are. On the hot path there is one
message for each step, however many requests it touched: 256 rows take about 5 us to encode and 15 us to decode.

    client                          engine process
      │ ◄──────────────────── Hello   connected
      │ Start ──────────────────────► build scheduler and backend
      │ ◄──────────────────── Stage*  each as it begins and as it ends
      │ ◄──────────────────── Ready
      │ Submit*, Cancel* ───────────► taken between two steps
      │ ◄────────────────── Answers   once for all commands taken together
      │ ◄───────────────── StepDone*  one for each step
      │ ◄──────────────────── Alive   now and then while idle
      │ Stop ───────────────────────► what still lives ends with ABORT
      │ ◄───────── Stopped | Failed   last words
      │ Bye ────────────────────────► the words have arrived: the process may end
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
import zmq

from paceline.core.step import Accepted, Bound, Finish, FinishReason, Rejected, RequestSpec, SchedulerStats, StepEvents


class Stage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A stage of the cold start. `seconds` is None while it runs; `fraction` (0 to 1) where its progress is known."""

    name: str
    seconds: float | None = None
    fraction: float | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine serves, known once it is ready."""

    model: str
    architecture: str
    road: str  # "native", or "transformers" where its own modelling code computes
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    eos_token_ids: tuple[int, ...]
    tokenizer_dir: str  # a folder that text.Tokenizer.from_dir reads
    block_size: int  # tokens
    num_blocks: int
    dtype: str  # of weights and arithmetic
    kv_dtype: str  # of cached keys and values
    device: str
    weights_bytes: int
    kv_bytes: int
    namespace: str  # hex digest of weights, tokenizer, types and layout: who may share KV
    kernels: str = "torch"  # or "native"
    quantization: str = "none"  # of the weights
    stages: tuple[Stage, ...] = ()  # filled in by the engine process


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """Measures of one step."""

    step: int
    seconds: float  # in the backend
    tokens: int  # computed
    rows: int  # requests in the batch
    ended_s: float = 0.0  # when it was committed, on the machine's monotonic clock
    prefill_tokens: int = 0  # of them, those of rows with more than one
    predicted_s: float | None = None  # what the scheduler expected, if it asked a cost model
    bound_by: Bound = Bound.NOTHING  # what kept it from being larger
    context: int = 0  # KV positions read, over all rows
    pairs: int = 0  # query-key pairs of rows with more than one token (core.shape)
    scheduler_s: float = 0.0  # real time, on any clock, of its plan and its commit


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters since the engine started, and the step that this message is about."""

    scheduler: SchedulerStats = SchedulerStats()
    steps: int = 0
    step_seconds: float = 0.0
    step_tokens: int = 0
    errors: int = 0  # requests that ended with ERROR
    near_boundary: int = 0  # draws where another batch might have chosen a neighbour
    cost_error: tuple[float, float] | None = None  # median and p95 of |predicted - real| / real, if steps are predicted
    last_step: StepSample | None = None  # None when this is not a step's message


# Commands ------------------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Build the engine: `factory` is "package.module:function"."""

    factory: str
    config: dict[str, Any]


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered by Answers.accepted or Answers.rejected."""

    spec: RequestSpec


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End a request now. Of an unknown or ended one: nothing happens."""

    request_id: str
    reason: FinishReason


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Abort what lives, then end the process with exit code 0."""


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last words have arrived."""


Command = Start | Submit | Cancel | Stop | Bye

# Reports -------------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The process is up and connected; nothing is loaded yet."""

    pid: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Requests may come."""

    info: EngineInfo


class Answers(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the commands taken between two steps. A request's acceptance comes before any event of it."""

    accepted: tuple[Accepted, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    finished: tuple[Finish, ...] = ()  # of cancelled requests


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One step of the engine."""

    events: StepEvents
    stats: EngineStats


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nothing to do; the loop turns."""

    stats: EngineStats


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Last words of an engine that was told to stop."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Last words of an engine that cannot go on. `kind` is the name of a class of `paceline.errors`, if it was one."""

    kind: str
    message: str


Report = Hello | Stage | Ready | Answers | StepDone | Alive | Stopped | Failed

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether `socket` has a frame to receive now. To poll costs ten times as much, to receive in vain thirty times."""
    return bool(cast("int", socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def encode(message: Command | Report) -> bytes:
    """One frame. Raises TypeError or OverflowError for what MessagePack cannot hold (an integer over 64 bits)."""
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """Raises msgspec.DecodeError (ValidationError is one) for anything that is not a command."""
    return _command_decoder.decode(frame)


def decode_report(frame: bytes) -> Report:
    """Raises msgspec.DecodeError (ValidationError is one) for anything that is not a report."""
    return _report_decoder.decode(frame)
