"""Step plan in, step result out: the seam between the scheduler and a model."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.step import Admission, StepPlan, StepResult, TokenLogprob
from paceline.errors import EngineError
from paceline.runtime.batch import RaggedBatch, build_batch
from paceline.runtime.kernels.kvpool import KV_DTYPES, KVPool
from paceline.runtime.load import LoadedModel
from paceline.runtime.logprobs import token_logprobs
from paceline.runtime.sampling import SamplerState, sample
from paceline.runtime.sequences import SequenceTable

NOT_FINITE = "the model gave logits that are not finite"


class OutOfMemory(EngineError):
    """The device's memory did not hold this step. Its requests are lost, those outside of it are whole."""

    recoverable = True  # the engine loop asks


@dataclass(slots=True)
class _Sequence:
    """One live request."""

    row: int  # in the sequence table
    sampler: SamplerState
    prompt_len: int
    prompt_logprobs: int | None
    shared_blocks: int  # how many of the first blocks it gets hold their KV already
    failed: bool = False


class ModelBackend:
    """Implements `core.protocols.Backend` with a model and a KV pool of `num_blocks` blocks.

    A row whose logits are not finite ends in `StepResult.failures` and the others go on. Where torch computes,
    blocks are zeroed when they change hands: it masks slots that are not written yet, but zero times the NaN of a
    former owner is NaN.
    A step that does not fit the device's memory raises OutOfMemory; any other error of the model is raised as it is.
    """

    def __init__(self, loaded: LoadedModel, num_blocks: int, block_size: int) -> None:
        self.info = loaded.info
        self._model = loaded.model
        self._device = torch.device(loaded.info.device)
        dtype = KV_DTYPES[loaded.info.kv_dtype]
        self.pool = KVPool(self._model.kv_specs, num_blocks, block_size, device=self._device, dtype=dtype)
        self._sequences: dict[str, _Sequence] = {}
        self._table = SequenceTable(self.pool.scratch_block, block_size)
        # Native attention reads no slot beyond a row's context.
        self._scrubs = loaded.info.kernels != "native"

    @property
    def num_live(self) -> int:
        """Requests whose state is kept."""
        return len(self._sequences)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan; see `StepPlan` for what is applied in which order."""
        began = time.perf_counter()
        for request_id in plan.released:
            self._table.remove(self._sequences.pop(request_id).row)
        for admission in plan.admitted:
            self._admit(admission)
        sequences = [self._sequences[request_id] for request_id in plan.ids]
        self._give_blocks(plan, sequences)
        step = _Step(plan, sequences)
        if step.rows:
            try:
                self._compute(step)
            except torch.OutOfMemoryError as error:
                for sequence in sequences:
                    sequence.failed = True
                message = f"a step of {plan.num_tokens} tokens does not fit the memory of {self._device}"
                raise OutOfMemory(f"{message}: lower max_num_batched_tokens") from error
        return StepResult(
            plan.step,
            tuple(step.tokens),
            tuple(step.logprobs) if any(step.logprobs) else (),
            tuple(step.prompt_logprobs) if any(step.prompt_logprobs) else (),
            tuple(sorted(step.failures.items())),
            time.perf_counter() - began,
            step.near_boundary,
        )

    def _admit(self, admission: Admission) -> None:
        spec = admission.spec
        self._sequences[spec.request_id] = _Sequence(
            self._table.add(spec.prompt, admission.outputs),
            SamplerState(spec, admission.outputs),
            len(spec.prompt),
            spec.sampling.prompt_logprobs,
            admission.cached_tokens // self.pool.block_size,
        )

    def _give_blocks(self, plan: StepPlan, sequences: list[_Sequence]) -> None:
        fresh: list[int] = []
        for sequence, blocks in zip(sequences, plan.new_blocks, strict=True):
            if blocks:
                self._table.add_blocks(sequence.row, blocks)
                fresh += blocks[sequence.shared_blocks :]
                sequence.shared_blocks = 0
        if fresh and self._scrubs:
            self.pool.scrub(fresh)

    def _compute(self, step: _Step) -> None:
        batch = self._batch(step)
        logits = self._model.forward(batch, self.pool)
        if step.scored:
            logits = self._score_prompts(step, logits)
        if step.sampled:
            self._sample(step, logits)

    def _batch(self, step: _Step) -> RaggedBatch:
        table = self._table
        plan, rows = step.plan, step.rows
        starts, counts = np.array(plan.starts, dtype=np.int64), np.array(plan.counts, dtype=np.int64)
        if len(rows) < len(plan.ids):
            starts, counts = starts[rows], counts[rows]
        return build_batch(
            table.tokens,
            table.blocks,
            step.table_rows,
            starts,
            counts,
            np.array(step.logit_counts, dtype=np.int64),
            block_size=self.pool.block_size,
            device=self._device,
        )

    def _sample(self, step: _Step, logits: Tensor) -> None:
        """Draw a token for each row of `step.sampled`, whose logits these are."""
        samplers = [step.sequences[i].sampler for i in step.sampled]
        drawn = sample(logits, samplers)
        step.near_boundary = drawn.near_boundary
        for at, message in drawn.failures:
            self._fail(step, step.sampled[at], message)
        sound = [at for at, i in enumerate(step.sampled) if i not in step.failures]
        if not sound:
            return
        for at in sound:
            i, token = step.sampled[at], drawn.tokens[at]
            step.tokens[i] = (token,)
            samplers[at].append(token)
            if drawn.logprobs:
                step.logprobs[i] = drawn.logprobs[at]
        rows = np.array([step.sequences[step.sampled[at]].row for at in sound], dtype=np.int64)
        self._table.append(rows, [drawn.tokens[at] for at in sound])

    def _score_prompts(self, step: _Step, logits: Tensor) -> Tensor:
        """Fill in the prompt logprobs that rows asked for; returns the logits of the rows that sample."""
        keep: list[int] = []
        at = 0  # first of this row's logits
        for i, wanted in zip(step.rows, step.logit_counts, strict=True):
            if scored := step.scored.get(i, 0):
                sequence, start = step.sequences[i], step.plan.starts[i]
                rows = logits[at : at + scored]
                if torch.isfinite(rows.amax(-1)).all():
                    following = self._table.tokens[sequence.row, start + 1 : start + 1 + scored].tolist()
                    top = sequence.prompt_logprobs or 0
                    step.prompt_logprobs[i] = tuple(token_logprobs(rows, following, [top] * scored))
                else:
                    self._fail(step, i, NOT_FINITE)
            at += wanted
            if step.plan.samples[i]:
                keep.append(at - 1)
        return logits[keep]

    @staticmethod
    def _fail(step: _Step, i: int, message: str) -> None:
        """End the request of row i with an error."""
        step.failures[i] = message
        step.sequences[i].failed = True


class _Step:
    """One plan on its way through: what to compute, and what has come of it by row of the plan."""

    def __init__(self, plan: StepPlan, sequences: list[_Sequence]) -> None:
        self.plan = plan
        self.sequences = sequences
        # A request that failed may be in a plan made before the failure was known: its rows compute nothing.
        self.rows = [i for i, sequence in enumerate(sequences) if not sequence.failed]
        self.table_rows: NDArray[np.int64] = np.array([sequences[i].row for i in self.rows], dtype=np.int64)
        self.sampled = [i for i in self.rows if plan.samples[i]]
        self.scored = self._scored()  # row -> prompt tokens whose logprobs are wanted
        # Rows that score want the logits of all their tokens; others of the last one, if they sample.
        self.logit_counts = [plan.counts[i] if i in self.scored else int(plan.samples[i]) for i in self.rows]
        self.tokens: list[tuple[int, ...]] = [()] * len(sequences)
        self.logprobs: list[tuple[TokenLogprob, ...]] = [()] * len(sequences)
        self.prompt_logprobs: list[tuple[TokenLogprob, ...]] = [()] * len(sequences)
        self.failures: dict[int, str] = {}
        self.near_boundary = 0

    def _scored(self) -> dict[int, int]:
        scored = {}
        for i in self.rows:
            sequence = self.sequences[i]
            if sequence.prompt_logprobs is not None:
                start = self.plan.starts[i]
                last = min(start + self.plan.counts[i], sequence.prompt_len - 1)
                if last > start:
                    scored[i] = last - start
        return scored
