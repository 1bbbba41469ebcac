"""The frozen values that pass between scheduler, engine and backend.

`StepPlan` goes across to the backend, `StepResult` comes back, `StepEvents` go up to the client. Per-request rows
are parallel tuples inside one object: at 256 rows, an object per row would cost more than the decision itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paceline.core.classes import DEFAULT_CLASS
from paceline.core.pace import Pace
from paceline.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a client asked for, already tokenised and checked."""

    request_id: str  # unique among live requests; the caller chooses it
    prompt: tuple[int, ...]  # token ids, at least one
    sampling: SamplingParams
    cache_salt: str = ""  # requests share prefix-cache blocks only with those of the same salt
    priority: int = 0  # lower is earlier, for policies that look at it
    traffic_class: str = DEFAULT_CLASS
    sent_s: float | None = None  # when the client's request came, on the clock of `now`; None: when it is submitted
    tenant: str = ""  # whose traffic it is; tenants of a class share it fairly
    # Targets of this request in place of its class's; None keeps the class's.
    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None
    even: bool = True  # whether tokens may be kept back for a moment so that they come evenly


@dataclass(frozen=True, slots=True)
class Admission:
    """A request whose state the backend must create: new, or resumed after preemption."""

    spec: RequestSpec
    outputs: tuple[int, ...]  # tokens generated before a preemption; () for a new request
    cached_tokens: int  # leading tokens whose KV the prefix cache already holds; the first row starts here


class Bound(Enum):
    """What kept a step from being larger."""

    NOTHING = "nothing"  # everybody got all they could take
    BUDGET = "budget"  # a constant of the policy
    DEADLINE = "deadline"  # somebody's next token was due
    MEMORY = "memory"  # KV blocks


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration: which requests, how many tokens of each, which KV blocks they gained.

    Rows are parallel: row i computes `counts[i]` tokens of request `ids[i]` from position `starts[i]` on, after
    appending `new_blocks[i]` to its block table. Prefill is n tokens, decode is one. Where `samples[i]` is true the
    row reaches the last known token, and the backend answers with the next one.

    A backend keeps, by id: the tokens (it appends what it samples) and the block table. It applies `released` first,
    then `admitted`, then the rows. A preempted request appears in `released` and later again in `admitted`.
    """

    step: int
    ids: tuple[str, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    new_blocks: tuple[tuple[int, ...], ...]
    samples: tuple[bool, ...]
    admitted: tuple[Admission, ...] = ()
    released: tuple[str, ...] = ()
    predicted_s: float | None = None  # what the cost model expects the step to take, if a policy asked
    bound_by: Bound = Bound.NOTHING  # what kept the step from being larger

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, over all rows."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token, with the most likely alternatives at its position.

    `logprob` and `top` are of the model's distribution after log-softmax of the raw logits (temperature 1, no
    filters), as vLLM's default. `rank` is 1 for the most likely token.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the backend made of a plan; rows parallel to the plan's.

    `tokens[i]` is () where the row did not sample, else the new token (several once drafts are verified).
    `logprobs` and `prompt_logprobs` are () when no row asked for any, else one tuple a row; `prompt_logprobs[i]`
    are of the prompt tokens at positions starts[i]+1 .. starts[i]+counts[i], as far as those are prompt tokens.
    """

    step: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    failures: tuple[tuple[int, str], ...] = ()  # (row, message): this request ends with an error, the others go on
    seconds: float = 0.0  # time the step took on the backend's clock
    near_boundary: int = 0  # draws within 1e-5 of a boundary, where another batch might have chosen a neighbour


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finish:
    """The one terminal event of an accepted request. Times are on the clock of the `now` arguments, in seconds."""

    request_id: str
    reason: FinishReason
    stop_token: int | None = None  # the stop token id that ended it, if one did
    message: str = ""  # for ERROR
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens served from the prefix cache at first admission
    preemptions: int = 0
    recomputed_tokens: int = 0  # tokens whose KV was computed again after preemptions
    arrived_s: float = 0.0
    scheduled_s: float | None = None  # first time in a plan
    first_token_s: float | None = None
    finished_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What clients learn from one commit. Rows are parallel: new tokens of request `ids[i]`.

    A request's last tokens and its `Finish` come in the same object, tokens first.
    """

    step: int
    ids: tuple[str, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()  # () when no row has any
    # (request id, logprobs) of prompt tokens, in order, for requests that asked
    prompt_logprobs: tuple[tuple[str, tuple[TokenLogprob, ...]], ...] = ()
    finished: tuple[Finish, ...] = ()


class RejectReason(Enum):
    """Why `submit` said no."""

    DUPLICATE_ID = "duplicate_id"
    TOO_LONG = "too_long"  # prompt and output can never fit the context or the KV pool
    QUEUE_FULL = "queue_full"
    OVERLOADED = "overloaded"  # its promise could not be kept
    UNKNOWN_CLASS = "unknown_class"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request waits or runs; exactly one `Finish` will follow."""

    request_id: str
    pace: Pace | None = None  # how its tokens are to be shown to a reader; None: as they come


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request was not taken; no event will follow."""

    request_id: str
    reason: RejectReason
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counters and gauges of the scheduler, for metrics. Counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0  # held by live requests
    kv_blocks_cached: int = 0  # unreferenced, still reusable by the prefix cache
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0  # computed or taken from cache, counted at first completion of the prompt
    generation_tokens: int = 0
