"""The Python API for batches: `LLM` computes in the caller's process. `AsyncLLM` is in async_llm.py.

Both run the same scheduler, cache and model as the server. Settings are the names of `paceline.toml`, given as
arguments; neither the file nor the environment is read.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import msgspec

from paceline.app.async_llm import AsyncLLM
from paceline.app.build import EngineSpec, make_engine, plan_from_arguments
from paceline.app.prompting import (
    Answer,
    Assembler,
    Delta,
    Message,
    Prompt,
    SamplingOptions,
    make_spec,
    render_chat,
    sampling_options,
)
from paceline.app.store import DEFAULT_MODEL
from paceline.core.classes import BATCH
from paceline.core.step import Finish, FinishReason, Rejected, RequestSpec, StepEvents
from paceline.engine.loop import EngineLoop, StepFailed
from paceline.engine.messages import EngineInfo, Stage
from paceline.engine.server import StageReporter
from paceline.errors import BadRequest, EngineDead
from paceline.text.tokenizer import Tokenizer

__all__ = ["LLM", "Answer", "AsyncLLM", "Delta"]


@dataclass(slots=True)
class _Batch:
    """One call's answers in the making."""

    deltas: deque[Delta] = field(default_factory=deque)
    open: dict[str, int] = field(default_factory=dict)  # request id -> index of its prompt


@dataclass(frozen=True, slots=True)
class _Live:
    batch: _Batch
    assembler: Assembler


class LLM:
    """A model in this process, for batches.

    >>> from paceline import LLM
    >>> with LLM("smollm2-135m", kv_gib=0.5) as llm:
    ...     answers = llm.generate(["The capital of France is", "1, 2, 3, 4,"], temperature=0, max_tokens=3)
    ...     reply = llm.chat([{"role": "user", "content": "Say hello."}], temperature=0, max_tokens=32)
    >>> [answer.text for answer in answers]
    [' Paris.\\n', ' 5,']
    >>> reply.finish_reason
    'stop'

    Sampling arguments are the fields of `SamplingParams` (temperature, top_p, max_tokens, seed, logprobs, ...) and
    `stop`, one text or several, and `ignore_eos`; max_tokens is 256 unless given. `sampling=SamplingParams(...)` gives
    them all at once. Several threads may call one LLM: their requests share its batches. Ctrl-C comes between two
    steps, ends the running requests and leaves the LLM usable.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        on_stage: Callable[[Stage], None] | None = None,
        **settings: Any,
    ) -> None:
        """Find (or fetch) the model and load it.

        `settings` are those of the tables model, scheduler and kv in docs/configuration.md. `on_stage` hears how far
        loading is. Raises ConfigError and ModelError.
        """
        self._load(plan_from_arguments("LLM", model, settings), on_stage)

    @classmethod
    def from_spec(cls, spec: EngineSpec, *, on_stage: Callable[[Stage], None] | None = None) -> LLM:
        """From what `plan_engine` made of resolved settings."""
        llm = cls.__new__(cls)
        llm._load(spec, on_stage)
        return llm

    def _load(self, spec: EngineSpec, on_stage: Callable[[Stage], None] | None) -> None:
        reporter = StageReporter(on_stage or _silent)
        parts = make_engine(spec, reporter)
        self.info: EngineInfo = msgspec.structs.replace(parts.info, stages=reporter.finish())
        self.tokenizer = Tokenizer.from_dir(self.info.tokenizer_dir)
        self._loop = EngineLoop(parts.scheduler, parts.backend)
        self._live: dict[str, _Live] = {}
        self._ids = itertools.count()
        self._lock = threading.RLock()  # of the loop and everything above
        self._failure: str | None = None

    def generate(self, prompts: Prompt | Sequence[Prompt], **sampling: Any) -> list[Answer]:
        """Answers to one prompt or many, in their order. A prompt is text, or token ids.

        Raises BadRequest before anything is computed if one of them cannot be taken.
        """
        answers: dict[int, Answer] = {}
        for delta in self.stream(prompts, **sampling):
            if delta.answer is not None:
                answers[delta.index] = delta.answer
        return [answers[index] for index in sorted(answers)]

    def stream(self, prompts: Prompt | Sequence[Prompt], **sampling: Any) -> Generator[Delta]:
        """The same, as it is made: text in small pieces, answers as they end. Closing the generator ends the rest."""
        options = sampling_options(sampling)
        return self._drive(self._make_specs(_as_list(prompts), options), options)

    def chat(self, messages: Sequence[Message], **sampling: Any) -> Answer:
        """The model's next message in a conversation of `{"role": ..., "content": ...}`."""
        return self.generate(render_chat(messages, self.tokenizer), **sampling)[0]

    def stream_chat(self, messages: Sequence[Message], **sampling: Any) -> Generator[Delta]:
        """The same, as it is made."""
        return self.stream(render_chat(messages, self.tokenizer), **sampling)

    def close(self) -> None:
        """End what runs and let go of the model's memory."""
        with self._lock:
            for request_id in tuple(self._live):
                self._cancel(request_id)
            self._failure = "this LLM was closed"
            del self._loop

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_specs(self, prompts: list[Prompt], options: SamplingOptions) -> list[RequestSpec]:
        specs = []
        for index, prompt in enumerate(prompts):
            try:
                request_id = f"llm-{next(self._ids)}"
                specs.append(make_spec(request_id, prompt, options, self.tokenizer, self.info, BATCH.name))
            except BadRequest as error:
                where = f"prompt {index}: " if len(prompts) > 1 else ""
                raise BadRequest(f"{where}{error}", param=error.param) from None
        return specs

    def _drive(self, specs: list[RequestSpec], options: SamplingOptions) -> Generator[Delta]:
        """Turn the loop until this batch has ended. Other threads' batches ride along, and this one on theirs."""
        batch = _Batch()
        try:
            self._submit(specs, options, batch)
            while True:
                while batch.deltas:
                    yield batch.deltas.popleft()
                with self._lock:
                    if batch.open and not batch.deltas:
                        self._require_alive()
                        self._turn()
                    elif not batch.deltas:
                        return
        finally:
            with self._lock:
                for request_id in tuple(batch.open):
                    self._cancel(request_id)

    def _submit(self, specs: list[RequestSpec], options: SamplingOptions, batch: _Batch) -> None:
        with self._lock:
            self._require_alive()
            for index, spec in enumerate(specs):
                answer = self._loop.submit(spec)
                if isinstance(answer, Rejected):
                    raise BadRequest(f"prompt {index}: {answer.message}", code=answer.reason.value)
                batch.open[spec.request_id] = index
                self._live[spec.request_id] = _Live(batch, Assembler(spec, self.tokenizer, options))

    def _turn(self) -> None:
        with _interrupts_between_steps():
            try:
                events = self._loop.step()
            except StepFailed as error:
                self._failure = str(error)
                self._live.clear()
                raise EngineDead(self._failure) from error
            if events is not None:
                self._deliver(events)

    def _deliver(self, events: StepEvents) -> None:
        finished = {finish.request_id: finish for finish in events.finished}
        for request_id, logprobs in events.prompt_logprobs:
            if request_id in self._live:
                self._live[request_id].assembler.prompt_logprobs += logprobs
        for row, request_id in enumerate(events.ids):
            live = self._live.get(request_id)
            if live is None:
                continue
            tokens = events.tokens[row]
            finish = finished.pop(request_id, None)
            stop_token = finish.stop_token if finish else None
            logprobs = events.logprobs[row] if events.logprobs else ()
            text = live.assembler.push(tokens, logprobs, stop_token=stop_token)
            if finish is None and live.assembler.is_stopped:
                finish = self._loop.cancel(request_id, FinishReason.STOP)
            self._show(live, request_id, text, len(tokens), finish)
        for request_id, finish in finished.items():
            if request_id in self._live:
                self._show(self._live[request_id], request_id, "", 0, finish)

    def _show(self, live: _Live, request_id: str, text: str, tokens: int, finish: Finish | None) -> None:
        index = live.batch.open[request_id]
        if finish is None:
            live.batch.deltas.append(Delta(index, text, tokens))
            return
        text += live.assembler.flush()
        del self._live[request_id], live.batch.open[request_id]
        live.batch.deltas.append(Delta(index, text, tokens, live.assembler.answer(finish)))

    def _cancel(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            live.batch.open.pop(request_id, None)
            self._loop.cancel(request_id)

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise EngineDead(self._failure)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Text and a list of ids are one prompt; anything else is a sequence of them."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # the first element tells
    return list(prompts)  # type: ignore[arg-type]


@contextmanager
def _interrupts_between_steps() -> Iterator[None]:
    """Hold back Ctrl-C until the step is committed: half a step would leave scheduler and model at odds.

    A second Ctrl-C does not wait. Only where Ctrl-C would raise KeyboardInterrupt; other handlers are not ours.
    """
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    held = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        if held:
            signal.default_int_handler(number, frame)
        held = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if held:
        raise KeyboardInterrupt


def _silent(stage: Stage) -> None:
    """The stages of someone who does not ask."""
