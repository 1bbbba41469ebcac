"""A live request: counters, not phases.

There is no "prefill" or "decode" state. A request knows some tokens and has computed the KV of some of them; each step
gives it tokens to catch up with. Prefill is catching up by many, decode by one.
"""

from __future__ import annotations

from enum import Enum
from math import inf

from paceline.core.classes import TrafficClass
from paceline.core.pace import Pacer
from paceline.core.step import Finish, FinishReason, RequestSpec


class RequestState(Enum):
    """Where a request stands with the scheduler."""

    WAITING = "waiting"  # holds no KV blocks
    RUNNING = "running"  # holds KV blocks and may be given tokens
    FINISHED = "finished"  # its `Finish` has been made; it may still have rows in flight


TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


class Request:
    """The scheduler's record of one sequence.

    More attributes than a dozen, on purpose: the step loop touches them for every running request, and one flat object
    with slots is what makes a decision cost about a microsecond a request.

    The counters hold `cached <= computed <= planned <= known + pending <= limit` while running; `check` asserts it.
    """

    __slots__ = (
        "arrived_s",
        "blocks",
        "cached_tokens",
        "capacity",
        "computed",
        "deadline_s",
        "e2e_s",
        "first_token_s",
        "hashes",
        "in_flight",
        "itl_s",
        "kind",
        "known",
        "last_token_s",
        "limit",
        "lost",
        "pacer",
        "pending",
        "planned",
        "preemptions",
        "prompt_len",
        "recomputed_tokens",
        "register_at",
        "request_id",
        "scheduled_s",
        "scored",
        "shown_s",
        "spec",
        "state",
        "stop_ids",
        "tokens",
    )

    def __init__(self, spec: RequestSpec, kind: TrafficClass, arrived_s: float, *, max_model_len: int) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.state = RequestState.WAITING
        self.tokens: list[int] = list(spec.prompt)
        self.prompt_len = len(spec.prompt)
        self.stop_ids = frozenset(spec.sampling.stop_token_ids)
        self.limit = min(self.prompt_len + spec.sampling.max_tokens, max_model_len)  # tokens it may come to know

        # What it was promised: its class's targets, or its own in their place.
        self.kind = kind
        self.itl_s = kind.itl_s if spec.itl_s is None else spec.itl_s
        self.e2e_s = kind.e2e_s if spec.e2e_s is None else spec.e2e_s
        ttft_s = kind.ttft_s if spec.ttft_s is None else spec.ttft_s
        first_s = min(inf if ttft_s is None else ttft_s, inf if self.e2e_s is None else self.e2e_s)
        self.deadline_s = arrived_s + first_s  # of the first token; inf where nothing is promised

        # Counters, in tokens.
        self.known = self.prompt_len  # == len(tokens): the prompt and what has been committed since
        self.pending = 0  # sampled by plans not yet committed
        self.planned = 0  # KV computed, or being computed by plans not yet committed
        self.computed = 0  # KV computed by committed plans
        self.in_flight = 0  # rows in plans not yet committed
        self.scored = 1  # position of the next prompt token whose logprob is to be reported

        # KV accounting, kept by `KVCache`.
        self.blocks: list[int] = []
        self.capacity = 0  # == len(blocks) * block_size
        self.hashes: list[bytes] = []  # chain over the full blocks of `tokens`, as far as needed so far
        self.register_at = 0  # when `planned` reaches this, another full block can enter the prefix index

        # Its reader's side: tokens may be shown later than they are made.
        self.pacer: Pacer | None = None
        self.shown_s = arrived_s  # when its newest token is shown at the latest; its arrival before any

        # What its `Finish` will report.
        self.arrived_s = arrived_s
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s = arrived_s  # when its newest token was committed; its arrival before any
        self.cached_tokens = 0
        self.preemptions = 0
        self.lost = 0  # tokens whose KV the last preemption threw away
        self.recomputed_tokens = 0

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, known={self.known}, planned={self.planned}, "
            f"computed={self.computed}, pending={self.pending}, blocks={len(self.blocks)})"
        )

    @property
    def todo(self) -> int:
        """Tokens it can be given now: known or pending ones whose KV nobody has planned yet."""
        reach = self.known + self.pending
        return reach - self.planned if reach < self.limit else 0

    @property
    def holds_kv(self) -> bool:
        """Whether it runs (still: a policy may have preempted it a moment ago)."""
        return self.state is RequestState.RUNNING

    @property
    def prefilling(self) -> bool:
        """Whether it has more to compute than the token it generated last (or will still have, planned or not)."""
        reach = self.known + self.pending
        return reach - self.planned > 1 or self.planned < self.prompt_len

    def become(self, state: RequestState) -> None:
        """Change state; the table of allowed transitions decides."""
        assert state in TRANSITIONS[self.state], f"{self!r} cannot become {state.value}"
        self.state = state

    def forget_kv(self) -> None:
        """After a preemption: all KV is gone, all tokens stay known."""
        self.lost = self.planned
        self.planned = self.computed = 0
        self.preemptions += 1

    def finish(self, reason: FinishReason, now: float, *, stop_token: int | None = None, message: str = "") -> Finish:
        """Make its one terminal event."""
        self.become(RequestState.FINISHED)
        return Finish(
            request_id=self.request_id,
            reason=reason,
            stop_token=stop_token,
            message=message,
            prompt_tokens=self.prompt_len,
            output_tokens=self.known - self.prompt_len,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            arrived_s=self.arrived_s,
            scheduled_s=self.scheduled_s,
            first_token_s=self.first_token_s,
            finished_s=now,
        )

    def check(self, block_size: int) -> None:
        """Assert the chain of inequalities."""
        assert self.known == len(self.tokens), self
        assert 0 <= self.pending <= self.in_flight, self
        assert self.known + self.pending <= self.limit, self
        if self.state is RequestState.RUNNING:
            assert 0 <= self.computed <= self.planned <= self.known + self.pending, self
            assert self.planned <= self.capacity == len(self.blocks) * block_size, self
        else:
            assert self.planned == self.computed == self.capacity == len(self.blocks) == 0, self
