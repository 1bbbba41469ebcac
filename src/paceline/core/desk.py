"""What a policy works with: one step being planned.

A policy looks at `running`, `waiting` and `budget`, and writes its decision by three verbs: `grow`, `admit`,
`preempt`. All KV accounting happens in them, so a policy cannot leak a block or overspend.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

from paceline.core.kv import KVCache
from paceline.core.protocols import CostModel
from paceline.core.request import Request, RequestState
from paceline.core.step import Admission, Bound, StepPlan


class Desk:
    """The step under construction. `now` is the time of the `plan` call."""

    def __init__(
        self,
        kv: KVCache,
        running: list[Request],
        waiting: OrderedDict[str, Request],
        *,
        now: float,
        budget: int,
        max_num_seqs: int,
        cost: CostModel | None = None,
        tightest_ttft_s: float = inf,
    ) -> None:
        self.kv = kv
        self.running = running  # in order of admission
        self.waiting = waiting  # in order of arrival; preempted requests come first
        self.now = now
        self.budget = budget  # tokens that may still be given in this step
        self.max_num_seqs = max_num_seqs
        self.cost = cost  # None, or not `ready`: nobody knows yet how long a step takes
        self.tightest_ttft_s = tightest_ttft_s  # of all classes: what a newcomer may be promised
        self.predicted_s: float | None = None  # for the plan: what the policy expects the step to take
        self.bound_by = Bound.NOTHING  # for the plan: what kept the step from being larger
        self.preempted: list[Request] = []
        self.wake_s: float | None = None  # when a policy that waits wants to be asked again
        self.released: list[str] = []  # preempted requests whose state the backend holds
        # The rows so far, parallel.
        self.rows: list[Request] = []
        self._ids: list[str] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._new_blocks: list[tuple[int, ...]] = []
        self._samples: list[bool] = []
        self._admitted: list[Admission] = []

    @property
    def available_blocks(self) -> int:
        """KV blocks nobody holds, cached ones included."""
        return self.kv.pool.num_available

    def blocks_needed(self, request: Request, tokens: int) -> int:
        """Blocks it would take from the available ones to hold `tokens` tokens, prefix hits counted if it waits."""
        if request.state is RequestState.RUNNING:
            return max(0, self.kv.blocks_for(tokens) - len(request.blocks))
        return self.kv.blocks_needed(self.kv.lookup(request), tokens)

    def blocks_to_finish(self, request: Request) -> int:
        """Blocks it would take to run to its limit; the KV of the very last token is never needed."""
        return self.blocks_needed(request, request.limit - 1)

    def uncached(self, request: Request) -> int:
        """Known tokens a waiting request would have to compute, prefix hits left out."""
        return request.known - len(self.kv.lookup(request)) * self.kv.block_size

    def call_again_at(self, time: float) -> None:
        """Ask for another `plan` at this time even if nothing else happens: the policy waits for it."""
        self.wake_s = time if self.wake_s is None else min(self.wake_s, time)

    @property
    def room(self) -> int:
        """How many more requests may run."""
        return self.max_num_seqs - len(self.running)

    def grow(self, request: Request, tokens: int) -> bool:
        """Give a running request that is not yet in this step its next `tokens` tokens.

        False, and nothing changed, when the KV blocks do not suffice.
        """
        start = request.planned
        end = start + tokens
        if end <= request.capacity:
            self._place(request, start, end, ())
            return True
        new_blocks = self.kv.extend(request, end)
        if new_blocks is None:
            return False
        self._place(request, start, end, new_blocks)
        return True

    def admit(self, request: Request, most: int, *, whole: bool = True) -> bool:
        """Let a waiting request run, with at most `most` tokens (> 0) in this step; prefix hits cost none of them.

        False, and nothing changed, when its whole known sequence (with `whole=False`: what this step computes) does
        not fit into the blocks available now. Admitting by the first chunk alone lets prompts crowd each other out
        half-way.
        """
        if request.in_flight:  # preempted, and a plan with it is still being computed
            return False
        hits = self.kv.lookup(request)
        reach = request.known if whole else min(len(hits) * self.kv.block_size + most, request.known)
        if self.kv.blocks_needed(hits, reach) > self.available_blocks:
            return False
        del self.waiting[request.request_id]
        request.become(RequestState.RUNNING)
        self.running.append(request)
        self.kv.open(request, hits)
        start = request.planned
        end = min(start + most, request.known)
        new_blocks = self.kv.extend(request, end)
        assert new_blocks is not None, "blocks_needed() said it fits"
        if request.scheduled_s is None:
            request.scheduled_s = self.now
            request.cached_tokens = start
        outputs = tuple(request.tokens[request.prompt_len :])
        self._admitted.append(Admission(request.spec, outputs, cached_tokens=start))
        self._place(request, start, end, (*hits, *new_blocks))
        return True

    def preempt(self, request: Request, *, to_tail: bool = False) -> None:
        """Take all blocks from a running request and put it at the head (or tail) of the queue, to be recomputed.

        If this step had already given it tokens, they go back into the budget.
        """
        fresh = request in self.rows and self._withdraw(self.rows.index(request))
        lost = request.lost
        if not fresh:
            self.released.append(request.request_id)
        self.kv.close(request)
        request.forget_kv()
        if fresh:
            request.lost = lost  # it had computed nothing since it lost that
        request.become(RequestState.WAITING)
        self.running.remove(request)
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=to_tail)
        self.preempted.append(request)

    def _place(self, request: Request, start: int, end: int, new_blocks: tuple[int, ...]) -> None:
        samples = end == request.known + request.pending
        request.planned = end
        request.in_flight += 1
        if samples:
            request.pending += 1
        if end >= request.register_at:
            self.kv.register(request)
        self.budget -= end - start
        self.rows.append(request)
        self._ids.append(request.request_id)
        self._starts.append(start)
        self._counts.append(end - start)
        self._new_blocks.append(new_blocks)
        self._samples.append(samples)

    def _withdraw(self, row: int) -> bool:
        """Take a row back out; whether the request had been admitted in this very step."""
        request = self.rows.pop(row)
        self.budget += self._counts.pop(row)
        request.planned = self._starts[row]
        if self._samples.pop(row):
            request.pending -= 1
        request.in_flight -= 1
        for column in (self._ids, self._starts, self._new_blocks):
            del column[row]
        others = [a for a in self._admitted if a.spec.request_id != request.request_id]
        fresh = len(others) < len(self._admitted)
        self._admitted = others
        return fresh

    def plan(self, step: int, released: tuple[str, ...]) -> StepPlan:
        """Freeze what was decided."""
        return StepPlan(
            step=step,
            ids=tuple(self._ids),
            starts=tuple(self._starts),
            counts=tuple(self._counts),
            new_blocks=tuple(self._new_blocks),
            samples=tuple(self._samples),
            admitted=tuple(self._admitted),
            released=released,
            predicted_s=self.predicted_s,
            bound_by=self.bound_by,
        )
