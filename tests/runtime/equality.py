"""The equality matrix: whatever the scheduler does to a request, its greedy tokens are those of transformers.

A `Cell` is one way to run a set of requests. `check` runs them through scheduler and backend and compares; where a near
tie was decided otherwise, it submits the prompt again with transformers' choice and goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random

from paceline.core.config import SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.step import Accepted, FinishReason, RequestSpec
from paceline.engine.loop import EngineLoop
from paceline.runtime.backend import ModelBackend
from paceline.runtime.load import LoadedModel
from tests.runtime.reference import Reference


@dataclass(frozen=True)
class Cell:
    """One way to run the requests."""

    budget: int  # tokens a step may compute
    prefix_cache: bool
    few_blocks: bool  # so few that requests are preempted
    cancels: bool  # other requests come and are cancelled in between
    alone: bool  # one request at a time; else they arrive over the first steps in random order

    def __str__(self) -> str:
        words = [
            f"budget{self.budget}",
            "cache" if self.prefix_cache else "nocache",
            "few" if self.few_blocks else "many",
            "cancels" if self.cancels else "calm",
            "alone" if self.alone else "mixed",
        ]
        return "-".join(words)


BUDGETS = (16, 64, 512, 2048)
MATRIX = [
    Cell(budget, *switches)
    for budget, switches in product(BUDGETS, product((False, True), (False, True), (False, True), (False, True)))
]
# Every pair of values of two factors occurs (asserted in test_equality).
PAIRWISE = [
    Cell(16, prefix_cache=True, few_blocks=True, cancels=True, alone=False),
    Cell(16, prefix_cache=False, few_blocks=False, cancels=False, alone=True),
    Cell(64, prefix_cache=True, few_blocks=False, cancels=False, alone=False),
    Cell(64, prefix_cache=False, few_blocks=True, cancels=True, alone=True),
    Cell(512, prefix_cache=True, few_blocks=True, cancels=False, alone=True),
    Cell(512, prefix_cache=False, few_blocks=False, cancels=True, alone=False),
    Cell(2048, prefix_cache=True, few_blocks=False, cancels=True, alone=True),
    Cell(2048, prefix_cache=False, few_blocks=True, cancels=False, alone=False),
]


@dataclass(frozen=True)
class Workload:
    """Prompts, the number of tokens wanted after each, and the memory to run them in."""

    prompts: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    block_size: int
    max_model_len: int

    def part(self, first: int, step: int) -> Workload:
        """Every `step`-th request."""
        return replace(self, prompts=self.prompts[first::step], counts=self.counts[first::step])

    def num_blocks(self, *, few: bool) -> int:
        """Room for all at once, or for little more than the longest."""
        needs = [-(-(len(p) + n) // self.block_size) for p, n in zip(self.prompts, self.counts, strict=True)]
        return max(needs) + 2 if few else 2 * sum(needs)


def make_workload(
    lengths: Sequence[int], counts: Sequence[int], vocab: int, *, block_size: int, max_model_len: int, seed: int = 1
) -> Workload:
    """Random prompts; of those long enough, two in three share their beginning with others."""
    random = Random(seed)
    shared = [random.randrange(vocab) for _ in range(max(lengths))]
    prompts = []
    for i, length in enumerate(lengths):
        common = (0, length // 2, length - 1)[i % 3]
        prompts.append((*shared[:common], *(random.randrange(vocab) for _ in range(length - common))))
    return Workload(tuple(prompts), tuple(counts), block_size, max_model_len)


@dataclass
class Report:
    """What running a cell came to."""

    preemptions: int = 0
    prefix_hits: int = 0
    cancelled: int = 0
    near_ties: int = 0  # tokens decided the other way where transformers' two best logits nearly tie
    wrong: list[str] = field(default_factory=list)


@dataclass
class Ties:
    """Near ties over all cells of a session, told at its end."""

    tokens: int = 0
    near_ties: int = 0

    def note(self, workload: Workload, report: Report) -> None:
        """Count a cell."""
        self.tokens += sum(workload.counts)
        self.near_ties += report.near_ties


def check(loaded: LoadedModel, reference: Reference, workload: Workload, cell: Cell, seed: int = 7) -> Report:
    """Run the workload in the way of the cell and compare every token."""
    driver = _Driver(loaded, workload, cell, seed)
    pending = [(prompt, count, 0) for prompt, count in zip(workload.prompts, workload.counts, strict=True)]
    report = Report()
    while pending:
        # (prompt, tokens that continue it, how many of transformers' tokens the submitted prompt carried already)
        outputs = driver.run([(prompt, count, done) for prompt, count, done in pending], reference)
        again = []
        for (prompt, count, done), ours in zip(pending, outputs, strict=True):
            greedy = reference.greedy(prompt, count, guess=ours)
            difference = greedy.first_difference(ours, done)
            if difference is None:
                continue
            at, tie = difference
            if not tie:
                report.wrong.append(
                    f"prompt of {len(prompt)}: token {at} is {ours[at - done]}, not {greedy.tokens[at]}"
                )
                continue
            report.near_ties += 1
            if at + 1 < count:
                again.append((prompt, count, at + 1))
        pending = again
    driver.finish(report)
    return report


class _Driver:
    """Submits requests to an engine over `loaded`, with the disturbances of a cell."""

    def __init__(self, loaded: LoadedModel, workload: Workload, cell: Cell, seed: int) -> None:
        self.workload, self.cell = workload, cell
        num_blocks = workload.num_blocks(few=cell.few_blocks)
        config = SchedulerConfig(
            num_blocks=num_blocks,
            max_model_len=workload.max_model_len,
            block_size=workload.block_size,
            max_num_batched_tokens=cell.budget,
            prefix_caching=cell.prefix_cache,
        )
        self.scheduler = Scheduler(config)
        self.backend = ModelBackend(loaded, num_blocks, workload.block_size)
        self.loop = EngineLoop(self.scheduler, self.backend, debug=True)
        self.random = Random(seed)
        self.outputs: dict[str, list[int]] = {}
        self.decoys: dict[str, int] = {}  # id -> steps until it is cancelled
        self.cancelled = 0
        self.submitted = 0

    def run(self, asked: Sequence[tuple[tuple[int, ...], int, int]], reference: Reference) -> list[list[int]]:
        """Tokens for each (prompt, count, done); `done` of transformers' tokens become part of the prompt."""
        specs = []
        for prompt, count, done in asked:
            known = reference.greedy(prompt, count).tokens[:done] if done else ()
            specs.append(self._spec((*prompt, *known), count - done))
        waiting = specs if self.cell.alone else self.random.sample(specs, len(specs))
        groups = [[spec] for spec in waiting] if self.cell.alone else [waiting]
        for group in groups:
            for _ in self._until_done(group):
                pass
        return [self.outputs[spec.request_id] for spec in specs]

    def finish(self, report: Report) -> None:
        """Note what happened, once nothing is left."""
        while self.loop.has_work:
            self.loop.step()
        stats = self.scheduler.stats()
        assert stats.kv_blocks_used == 0
        self.scheduler.check_integrity()
        report.preemptions = stats.preemptions
        report.prefix_hits = stats.prefix_hits_tokens
        report.cancelled = self.cancelled

    def _until_done(self, group: list[RequestSpec]) -> Iterator[None]:
        arriving = list(group)
        open_ids = {spec.request_id for spec in group}
        while open_ids:
            for _ in range(self.random.randrange(1, 4)):
                if arriving:
                    self._submit(arriving.pop())
            if self.cell.cancels:
                self._disturb()
            events = self.loop.step()
            assert events is not None
            for request_id, tokens in zip(events.ids, events.tokens, strict=True):
                self.outputs.setdefault(request_id, []).extend(tokens)
            for finish in events.finished:
                assert finish.reason is FinishReason.LENGTH, finish
                open_ids.discard(finish.request_id)
                self.decoys.pop(finish.request_id, None)
            yield

    def _disturb(self) -> None:
        """Cancel decoys whose time has come, and send another now and then."""
        for name in list(self.decoys):
            self.decoys[name] -= 1
            if self.decoys[name] < 0:
                del self.decoys[name]
                finish = self.loop.cancel(name)
                assert finish is not None
                self.cancelled += 1
        if len(self.decoys) < 3 and self.random.random() < (0.1 if self.cell.alone else 0.3):
            prompt = self.random.choice(self.workload.prompts)
            room = min(200, self.backend.pool.num_blocks * self.workload.block_size - 20)
            spec = self._spec(prompt[: self.random.randrange(len(prompt)) + 1][:room], 20)
            self.decoys[spec.request_id] = self.random.choice((0, 0, 1, 2, 5, 12))
            self._submit(spec)

    def _spec(self, prompt: tuple[int, ...], count: int) -> RequestSpec:
        self.submitted += 1
        return RequestSpec(f"r{self.submitted}", prompt, SamplingParams(temperature=0.0, max_tokens=count))

    def _submit(self, spec: RequestSpec) -> None:
        answer = self.loop.submit(spec)
        assert isinstance(answer, Accepted), answer
