"""A backend whose KV memory can be looked into: each slot holds the hash of the whole prefix that ends there.

Reading a slot of the wrong block, of a block handed to somebody else, or of a stale prefix gives a wrong hash at once.
The next token is a function of the history alone, so outputs must not depend on batching, sharing or preemption.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.step import Admission, StepPlan, StepResult, TokenLogprob

EOS = 0


def chain(parent: int, token: int) -> int:
    return (parent * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 64)


def next_token(history: list[int], vocab: int) -> int:
    state = 7
    for token in history:
        state = chain(state, token)
    return (state >> 33) % vocab


def expected_output(prompt: tuple[int, ...], limit: int, stop_ids: frozenset[int], vocab: int) -> list[int]:
    history = list(prompt)
    while len(history) < limit:
        history.append(next_token(history, vocab))
        if history[-1] in stop_ids:
            break
    return history[len(prompt) :]


@dataclass
class Row:
    tokens: list[int]
    salt: str
    scored_len: int  # prompt tokens to score
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class MemoryBackend:
    """Implements `Backend`; raises AssertionError at the first slot that does not hold what it should."""

    def __init__(self, num_blocks: int, block_size: int, vocab: int = 50, fail: frozenset[str] = frozenset()) -> None:
        self.block_size = block_size
        self.vocab = vocab
        self.fail = fail
        self.memory: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.rows: dict[str, Row] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            del self.rows[request_id]
        for admission in plan.admitted:
            self._admit(admission)
        for request_id, start, count, blocks in zip(plan.ids, plan.starts, plan.counts, plan.new_blocks, strict=True):
            row = self.rows[request_id]
            assert row.computed == start, f"{request_id} starts at {start}, its KV ends at {row.computed}"
            row.blocks.extend(blocks)
            row.computed = start + count
            assert row.computed <= len(row.tokens), "a row computes a token that nobody knows"
            assert row.computed <= len(row.blocks) * self.block_size, "a row has no block for its tokens"
            self._write(row, start, count)
        tokens = [self._attend(request_id, samples) for request_id, samples in zip(plan.ids, plan.samples, strict=True)]
        failures = tuple((at, "failed on purpose") for at, request_id in enumerate(plan.ids) if request_id in self.fail)
        scores = tuple(
            self._score(self.rows[i], start, count)
            for i, start, count in zip(plan.ids, plan.starts, plan.counts, strict=True)
        )
        return StepResult(
            plan.step, tuple(tokens), failures=failures, prompt_logprobs=scores if any(scores) else (), seconds=0.001
        )

    def _admit(self, admission: Admission) -> None:
        spec = admission.spec
        assert spec.request_id not in self.rows, "admitted twice"
        scored = len(spec.prompt) if spec.sampling.prompt_logprobs is not None else 0
        row = Row([*spec.prompt, *admission.outputs], spec.cache_salt, scored, computed=admission.cached_tokens)
        self.rows[spec.request_id] = row

    def _hashes(self, row: Row) -> list[int]:
        state, found = sum(map(ord, row.salt)), []
        for token in row.tokens[: row.computed]:
            state = chain(state, token)
            found.append(state)
        return found

    def _write(self, row: Row, start: int, count: int) -> None:
        hashes = self._hashes(row)
        for position in range(start, start + count):
            self.memory[row.blocks[position // self.block_size]][position % self.block_size] = hashes[position]

    def _attend(self, request_id: str, samples: bool) -> tuple[int, ...]:
        row = self.rows[request_id]
        for position, state in enumerate(self._hashes(row)):
            held = self.memory[row.blocks[position // self.block_size]][position % self.block_size]
            assert held == state, f"{request_id}: wrong KV at position {position}"
        assert samples == (row.computed == len(row.tokens))
        if not samples or request_id in self.fail:
            return ()
        row.tokens.append(next_token(row.tokens, self.vocab))
        return (row.tokens[-1],)

    def _score(self, row: Row, start: int, count: int) -> tuple[TokenLogprob, ...]:
        known = row.tokens[start + 1 : min(start + count + 1, row.scored_len)]
        return tuple(TokenLogprob(token, -1.0, 1) for token in known)
