"""The scheduler: submit, plan, commit, cancel.

    answer = scheduler.submit(spec, now)
    plan   = scheduler.plan(now)
    events = scheduler.commit(plan, backend.execute(plan), now)

`plan` may be called again before the last plan is committed: counters are projected (`planned`, `pending`), so step
k + 1 can be decided while step k computes. Plans must be executed and committed in the order they were made.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from paceline.core.config import SchedulerConfig
from paceline.core.desk import Desk
from paceline.core.kv import KVCache
from paceline.core.pace import Pacer
from paceline.core.policies.registry import make_policy
from paceline.core.protocols import CostModel
from paceline.core.request import Request, RequestState
from paceline.core.shape import shape_of
from paceline.core.step import (
    Accepted,
    Finish,
    FinishReason,
    Rejected,
    RejectReason,
    RequestSpec,
    SchedulerStats,
    StepEvents,
    StepPlan,
    StepResult,
    TokenLogprob,
)


@dataclass(slots=True)
class _Totals:
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


class Scheduler:
    """Decides each iteration. Deterministic; has no clock: time is an argument, in seconds, never decreasing."""

    def __init__(self, config: SchedulerConfig, cost: CostModel | None = None) -> None:
        """With a cost model, steps are predicted, and it learns how long they took from `plan` to `commit`."""
        self.config = config
        self.cost = cost
        self._classes = {kind.name: kind for kind in config.classes}
        self._tightest_ttft_s = min((k.ttft_s for k in config.classes if k.ttft_s is not None), default=inf)
        self._policy = make_policy(config.policy, config.policy_options)
        self._kv = KVCache(
            config.num_blocks, config.block_size, prefix_caching=config.prefix_caching, namespace=config.namespace
        )
        self._requests: dict[str, Request] = {}  # every live request
        self._running: list[Request] = []  # in order of admission
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # in order of service
        # (step, when it was planned, rows) of plans not yet committed
        self._in_flight: deque[tuple[int, float, list[Request]]] = deque()
        self._committed_s = 0.0  # time of the last commit
        self._released: list[str] = []  # ids whose state the backend may drop
        self._steps = 0
        self.wake_s: float | None = None  # after a `plan` of None: when to ask again even if nothing else happens
        self._totals = _Totals()

    @property
    def has_work(self) -> bool:
        """Whether any accepted request has not ended yet."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def submit(self, spec: RequestSpec, now: float) -> Accepted | Rejected:
        """Take a request into the queue, or say why not. Accepted means: exactly one `Finish` will follow."""
        config = self.config
        if spec.request_id in self._requests:
            message = f"request id {spec.request_id!r} is already in use by a live request"
            return Rejected(spec.request_id, RejectReason.DUPLICATE_ID, message)
        kind = self._classes.get(spec.traffic_class)
        if kind is None:
            message = f"traffic class is {spec.traffic_class!r}; it must be one of {', '.join(self._classes)}"
            return Rejected(spec.request_id, RejectReason.UNKNOWN_CLASS, message)
        arrived_s = now if spec.sent_s is None else min(now, spec.sent_s)
        request = Request(spec, kind, arrived_s, max_model_len=config.max_model_len)
        if request.known >= config.max_model_len:
            message = (
                f"the prompt has {request.known} tokens, the context holds {config.max_model_len} "
                "and needs room for at least one new token: shorten the prompt"
            )
            return Rejected(spec.request_id, RejectReason.TOO_LONG, message)
        needed = self._kv.blocks_for(request.limit - 1)  # the KV of the last token is never needed
        if needed > config.num_blocks:
            message = (
                f"prompt and max_tokens come to {request.limit} tokens, the KV cache holds "
                f"{config.num_blocks * config.block_size}: ask for fewer tokens"
            )
            return Rejected(spec.request_id, RejectReason.TOO_LONG, message)
        refusal = self._queue_full(request, now) or self._policy.arrive(self._desk(now), request)
        if refusal is not None:
            return refusal
        self._requests[spec.request_id] = request
        self._waiting[spec.request_id] = request
        pace = self._policy.pace_of(request) if spec.even else None
        if pace is not None:
            request.pacer = Pacer(pace)
        return Accepted(spec.request_id, pace)

    def plan(self, now: float) -> StepPlan | None:
        """Decide the next step; None when there is nothing to compute now."""
        desk = self._desk(now)
        self._policy.decide(desk)
        self.wake_s = desk.wake_s
        self._released += desk.released
        self._totals.preemptions += len(desk.preempted)
        if not desk.rows:
            return None
        plan = desk.plan(self._steps, tuple(self._released))
        self._count_admissions(plan)
        self._in_flight.append((self._steps, now, desk.rows))
        self._released.clear()
        self._steps += 1
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepEvents:
        """Take in what a step produced; plans are committed in the order they were made."""
        step, planned_s, rows = self._in_flight.popleft()
        assert step == plan.step == result.step, f"commit of step {plan.step} and result {result.step}, expected {step}"
        assert len(rows) == len(result.tokens), "a result has one row for each row of its plan"
        finished: list[Finish] = []
        spoke: list[int] = []  # rows that bring tokens to a live request
        totals = self._totals
        for row, (request, count, tokens) in enumerate(zip(rows, plan.counts, result.tokens, strict=True)):
            request.in_flight -= 1
            if request.state is RequestState.RUNNING:
                request.computed += count
            elif request.state is RequestState.FINISHED:
                continue
            if not tokens:
                continue
            spoke.append(row)
            request.pending -= 1
            if request.first_token_s is None:
                request.first_token_s = now
                totals.prompt_tokens += request.prompt_len
            request.last_token_s = request.shown_s = now
            if (pacer := request.pacer) is not None:
                pacer.add(now, len(tokens))
                request.shown_s = pacer.last_s
            request.tokens += tokens
            request.known += len(tokens)
            totals.generation_tokens += len(tokens)
            if tokens[-1] in request.stop_ids:
                finished.append(self._end(request, FinishReason.STOP, now, stop_token=tokens[-1]))
            elif request.known >= request.limit:
                finished.append(self._end(request, FinishReason.LENGTH, now))
        for row, message in result.failures:
            if rows[row].state is not RequestState.FINISHED:
                assert not result.tokens[row], "a failed row brings no token"
                finished.append(self._end(rows[row], FinishReason.ERROR, now, message=message))
        if self.cost is not None:
            self.cost.observe(shape_of(plan), now - max(planned_s, self._committed_s))
        self._committed_s = now
        if finished:
            self._running[:] = [request for request in self._running if request.state is RequestState.RUNNING]
        scored = _new_prompt_logprobs(plan, result, rows) if result.prompt_logprobs else ()
        return _events(plan, result, spoke, scored, tuple(finished))

    def cancel(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> Finish | None:
        """End a request and free its blocks; its terminal event, or None if it is unknown or has ended already."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
        return self._end(request, reason, now)

    def held(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many leading tokens the prefix cache holds now, in whole blocks."""
        return self._kv.held(tokens, salt)

    def adopt(self, tokens: Sequence[int], salt: str = "") -> int:
        """The KV of these tokens has come from elsewhere (another engine, a slower tier) into the prefix cache.

        Returns how many leading tokens it holds now. Whoever calls it sees to it that the backend's memory agrees.
        """
        return self._kv.adopt(tokens, salt)

    def stats(self) -> SchedulerStats:
        """Counters and gauges as they are now."""
        totals, pool = self._totals, self._kv.pool
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_blocks - pool.num_available,
            kv_blocks_cached=pool.num_cached,
            prefix_queries_tokens=totals.prefix_queries_tokens,
            prefix_hits_tokens=totals.prefix_hits_tokens,
            preemptions=totals.preemptions,
            recomputed_tokens=totals.recomputed_tokens,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
        )

    def lost_tokens(self, request_id: str) -> int:
        """Tokens of a live request whose KV its last preemption threw away, until it runs again."""
        return self._requests[request_id].lost

    def start_over(self) -> None:
        """After a warm-up: forget cached prefixes and counters, keep what the cost model has learned."""
        assert not self.has_work, "requests are live"
        self._kv.pool.clear_cache()
        self._totals = _Totals()

    def check_integrity(self) -> None:
        """Assert the conservation laws; for tests, debug steps and an idle server."""
        self._kv.check_integrity(self._requests.values())
        for request in self._requests.values():
            request.check(self.config.block_size)
        running = [r.request_id for r in self._running]
        assert len(set(running)) == len(running), "a request runs twice"
        assert set(running) | set(self._waiting) == set(self._requests), "a live request is nowhere"
        assert not set(running) & set(self._waiting), "a request runs and waits"
        assert all(r.state is RequestState.RUNNING for r in self._running)
        assert all(r.state is RequestState.WAITING for r in self._waiting.values())
        rows = [row for *_, plan_rows in self._in_flight for row in plan_rows]
        assert all(r.in_flight == sum(row is r for row in rows) for r in self._requests.values())

    def _queue_full(self, request: Request, now: float) -> Rejected | None:
        """Refuse it where its class, or the server, queues no more."""
        kind, most = request.kind, self.config.max_waiting
        queue = (
            [other for other in self._waiting.values() if other.kind is kind] if kind.queue_limit is not None else []
        )
        if kind.queue_limit is not None and len(queue) >= kind.queue_limit:
            message = f"{len(queue)} requests of class {kind.name} are waiting already, the most it may queue"
        elif most is not None and len(self._waiting) >= most:
            queue = list(self._waiting.values())
            message = f"{len(queue)} requests are waiting already, the most this server queues"
        else:
            return None
        retry_after_s = self._policy.retry_after_s(self._desk(now), queue)
        return Rejected(request.request_id, RejectReason.QUEUE_FULL, message, retry_after_s=retry_after_s)

    def _desk(self, now: float) -> Desk:
        return Desk(
            self._kv,
            self._running,
            self._waiting,
            now=now,
            budget=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            cost=self.cost,
            tightest_ttft_s=self._tightest_ttft_s,
        )

    def _end(
        self, request: Request, reason: FinishReason, now: float, *, stop_token: int | None = None, message: str = ""
    ) -> Finish:
        """Make the terminal event and let go of everything. The caller takes it off `_running`.

        Blocks are free at once even if a plan in flight still writes to them: plans run in order, so whoever gets the
        blocks next writes after that. What a failed request computed may be wrong and is forgotten.
        """
        self._policy.leave(request, reason)
        self._waiting.pop(request.request_id, None)
        self._kv.close(request, forget=reason is FinishReason.ERROR)
        del self._requests[request.request_id]
        if request.state is RequestState.RUNNING:
            self._released.append(request.request_id)
        return request.finish(reason, now, stop_token=stop_token, message=message)

    def _count_admissions(self, plan: StepPlan) -> None:
        totals = self._totals
        for admission in plan.admitted:
            request = self._requests[admission.spec.request_id]
            if self.config.prefix_caching and not request.preemptions:
                totals.prefix_queries_tokens += request.prompt_len
                totals.prefix_hits_tokens += admission.cached_tokens
            if request.lost:
                again = max(0, request.lost - admission.cached_tokens)
                request.recomputed_tokens += again
                totals.recomputed_tokens += again
                request.lost = 0


def _events(
    plan: StepPlan,
    result: StepResult,
    spoke: list[int],
    scored: tuple[tuple[str, tuple[TokenLogprob, ...]], ...],
    finished: tuple[Finish, ...],
) -> StepEvents:
    """Rows that spoke, as parallel tuples; the plan's own tuples when all did."""
    ids, tokens, logprobs = plan.ids, result.tokens, result.logprobs
    if len(spoke) < len(ids):
        ids = tuple(ids[row] for row in spoke)
        tokens = tuple(tokens[row] for row in spoke)
        logprobs = tuple(logprobs[row] for row in spoke) if logprobs else ()
    return StepEvents(plan.step, ids, tokens, logprobs, scored, finished)


def _new_prompt_logprobs(
    plan: StepPlan, result: StepResult, rows: list[Request]
) -> tuple[tuple[str, tuple[TokenLogprob, ...]], ...]:
    """Prompt logprobs not reported before: a recomputed prompt is scored again but told once."""
    told = []
    for request, start, found in zip(rows, plan.starts, result.prompt_logprobs, strict=True):
        first = start + 1
        if first + len(found) > request.scored:
            told.append((request.request_id, found[request.scored - first :]))
            request.scored = first + len(found)
    return tuple(told)
