"""Speculative decoding: a draft proposes `length` tokens a step, the model verifies them in one pass.

A position is accepted with a probability of its own, given that those before it were. A step therefore brings

    1 + a1 + a1 a2 + a1 a2 a3 + ...

tokens to a sequence, and costs what a step of `length + 1` tokens a sequence costs, plus the draft's own passes. In a
small batch both are bound by reading weights, and the extra tokens are nearly free; in a large one they are not, and
the gain shrinks and turns into a loss. Nothing here says where: the cost model does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from paceline.core.protocols import CostModel
from paceline.core.shape import StepShape
from paceline.core.step import StepPlan, StepResult
from paceline.errors import ConfigError
from paceline.simulate.backend import OUTPUT, SimulatedBackend
from paceline.simulate.clock import VirtualClock


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a draft does. `acceptance[i]` is the share of accepted tokens at position i among those that got there."""

    acceptance: tuple[float, ...]
    draft: CostModel | None = None  # of one pass of the draft model; None: `draft_share` of the model's own step
    draft_share: float = 0.0  # n-gram and prompt look-up cost nothing; an EAGLE head a few per cent a pass
    passes: int | None = None  # of the draft a step; None: one for each position

    def __post_init__(self) -> None:
        if not self.acceptance or not all(0.0 <= share <= 1.0 for share in self.acceptance):
            raise ConfigError(f"acceptance is {self.acceptance}; it must be one share from 0 to 1 for each position")
        if self.draft_share < 0.0:
            raise ConfigError(f"draft_share is {self.draft_share}; it must be 0 or more")

    @property
    def length(self) -> int:
        """Tokens drafted a step."""
        return len(self.acceptance)

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens a sequence gets in a step."""
        total, reach = 1.0, 1.0
        for share in self.acceptance:
            reach *= share
            total += reach
        return total

    def draw(self, rng: random.Random) -> int:
        """Accepted drafts of one sequence in one step."""
        for position, share in enumerate(self.acceptance):
            if rng.random() >= share:
                return position
        return self.length

    def draft_s(self, rows: int, context: int, step_s: float) -> float:
        """Seconds the draft takes for `rows` sequences."""
        passes = self.length if self.passes is None else self.passes
        if self.draft is None:
            return passes * self.draft_share * step_s
        return passes * self.draft.predict(StepShape(rows, rows, context, 0)).seconds


class SpeculativeBackend(SimulatedBackend):
    """A simulated backend whose sequences get several tokens a step.

    The scheduler hands a sequence the tokens that were accepted last time as work; here they have been computed by the
    verification already, so such a row costs `length + 1` tokens whatever its count. Draws are of the request's own
    generator: they do not depend on who else is in the batch.
    """

    __slots__ = ("_limits", "_max_model_len", "_rngs", "_seed", "drafted", "speculation", "verified")

    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        speculation: Speculation,
        *,
        max_model_len: int,
        seed: str,
        jitter: random.Random | None = None,
    ) -> None:
        super().__init__(cost, clock, jitter=jitter)
        self.speculation = speculation
        self._max_model_len = max_model_len
        self._seed = seed
        self._limits: dict[str, tuple[int, int]] = {}  # prompt length and most tokens, by id
        self._rngs: dict[str, random.Random] = {}
        self.drafted = 0  # tokens proposed so far
        self.verified = 0  # of those, accepted

    def execute(self, plan: StepPlan) -> StepResult:
        """Draft, verify, let the time of both pass."""
        for name in plan.released:
            self._limits.pop(name, None)
            self._rngs.pop(name, None)
        for admission in plan.admitted:
            spec = admission.spec
            limit = min(len(spec.prompt) + spec.sampling.max_tokens, self._max_model_len)
            self._limits[spec.request_id] = (len(spec.prompt), limit)
        shape, drafting, context = self._shape(plan)
        seconds = self.alone_s(shape)
        if drafting:
            seconds += self.speculation.draft_s(drafting, context, seconds)
        tokens = tuple(
            self._tokens(name, start, count) if samples else ()
            for name, start, count, samples in zip(plan.ids, plan.starts, plan.counts, plan.samples, strict=True)
        )
        return StepResult(plan.step, tokens, seconds=self.let_pass(seconds, tokens))

    def _verifies(self, name: str, start: int) -> bool:
        """Whether a row continues an answer: its first token was drafted for. A last piece of a prompt was not."""
        return start >= self._limits[name][0]

    def _shape(self, plan: StepPlan) -> tuple[StepShape, int, int]:
        """What is computed: of a verifying row its drafts and one more; and how many rows draft over which context."""
        tokens = context = pairs = drafting = drafted_context = 0
        wide = self.speculation.length + 1
        for name, start, count, samples in zip(plan.ids, plan.starts, plan.counts, plan.samples, strict=True):
            if samples and self._verifies(name, start):
                drafting += 1
                drafted_context += start + count
                # `wide` queries share one reading of the context, as rows of a decode kernel do: no pairs.
                tokens += wide
                context += start + count + wide - 1
            else:
                tokens += count
                context += start + count
                if count > 1:
                    pairs += count * start + count * (count + 1) // 2
        return StepShape(tokens, len(plan.ids), context, pairs), drafting, drafted_context

    def _tokens(self, name: str, start: int, count: int) -> tuple[int, ...]:
        """What a row brings: one token, and as many more as were accepted and still fit."""
        limit = self._limits[name][1]
        left = limit - (start + count)
        many = 1
        if self._verifies(name, start):
            rng = self._rngs.get(name)
            if rng is None:
                rng = self._rngs[name] = random.Random(f"{self._seed}:{name}")  # noqa: S311  reproducible
            accepted = self.speculation.draw(rng)
            self.drafted += self.speculation.length
            self.verified += accepted
            many += accepted
        answer = self._answers.get(name)
        if answer is None:
            return (OUTPUT,) * min(many, left)
        prompt_len, said = answer
        place = start + count - prompt_len
        return said[place : place + min(many, left)]
