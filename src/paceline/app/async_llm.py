"""The Python API for services: `AsyncLLM` streams from an engine process of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import Any

from paceline.app.build import FACTORY, plan_from_arguments, settings_from_arguments
from paceline.app.prompting import (
    Answer,
    Assembler,
    Delta,
    Message,
    Prompt,
    make_spec,
    render_chat,
    sampling_options,
)
from paceline.app.store import DEFAULT_MODEL
from paceline.core.classes import DEFAULT_CLASS
from paceline.core.step import FinishReason
from paceline.engine.client import EngineClient
from paceline.engine.messages import EngineInfo, Stage
from paceline.engine.process import EngineLaunch
from paceline.errors import EngineDead
from paceline.text.tokenizer import Tokenizer


class AsyncLLM:
    """A model in an engine process of its own, for services.

    >>> import asyncio
    >>> from paceline import AsyncLLM
    >>> async def count() -> str:
    ...     async with AsyncLLM("smollm2-135m", kv_gib=0.5) as llm:
    ...         return "".join([delta.text async for delta in llm.stream("1, 2, 3, 4,", temperature=0, max_tokens=5)])
    >>> asyncio.run(count())
    ' 5, 6'

    Belongs to one event loop. Prompts, messages and sampling arguments are those of `LLM`. A stream that is closed or
    whose task is cancelled ends its request at the engine's next step.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        restart: bool = False,
        on_stage: Callable[[Stage], None] | None = None,
        **settings: Any,
    ) -> None:
        """Nothing is loaded before `start`. `restart`: start an engine that died anew. Raises ConfigError."""
        self._model = model
        self._settings = settings
        self._restart = restart
        self._on_stage = on_stage
        self._client: EngineClient | None = None
        self._tokenizer: Tokenizer | None = None
        self._ids = itertools.count()
        self._traffic_class = DEFAULT_CLASS
        settings_from_arguments("AsyncLLM", model, settings)

    async def start(self) -> EngineInfo:
        """Find (or fetch) the model and start its engine. Raises ModelError, ConfigError, EngineDead."""
        spec = await asyncio.to_thread(plan_from_arguments, "AsyncLLM", self._model, self._settings)
        self._traffic_class = spec.scheduler.default_class
        launch = EngineLaunch(FACTORY, spec.to_config())
        self._client = EngineClient(launch, restart=self._restart, on_stage=self._on_stage)
        info = await self._client.start()
        self._tokenizer = await asyncio.to_thread(Tokenizer.from_dir, info.tokenizer_dir)
        return info

    async def close(self) -> None:
        """Stop the engine; what runs ends with finish_reason "abort"."""
        if self._client is not None:
            await self._client.close()

    async def drain(self, timeout_s: float | None = None) -> None:
        """Take nothing new, let what runs end, then stop the engine."""
        await self._started[0].drain(timeout_s)

    async def stream(self, prompt: Prompt, **sampling: Any) -> AsyncGenerator[Delta]:
        """One answer as it is made; the last delta carries the whole. Raises BadRequest, Overloaded, EngineDead."""
        client, tokenizer = self._started
        options = sampling_options(sampling)
        request_id = f"llm-{next(self._ids)}"
        spec = make_spec(request_id, prompt, options, tokenizer, client.info, self._traffic_class)
        assembler = Assembler(spec, tokenizer, options)
        async with await client.submit(spec) as updates:
            async for update in updates:
                assembler.prompt_logprobs += update.prompt_logprobs
                stop_token = update.finish.stop_token if update.finish else None
                text = assembler.push(update.tokens, update.logprobs, stop_token=stop_token)
                if update.finish is not None:
                    text += assembler.flush()
                    yield Delta(0, text, len(update.tokens), assembler.answer(update.finish))
                    return
                if assembler.is_stopped:
                    updates.cancel(FinishReason.STOP)
                if text:
                    yield Delta(0, text, len(update.tokens))

    async def generate(self, prompt: Prompt, **sampling: Any) -> Answer:
        """One answer, whole."""
        answer: Answer | None = None
        async for delta in self.stream(prompt, **sampling):
            answer = delta.answer
        assert answer is not None, "a stream ends with its answer or raises"
        return answer

    def stream_chat(self, messages: Sequence[Message], **sampling: Any) -> AsyncGenerator[Delta]:
        """The model's next message in a conversation, as it is made."""
        return self.stream(render_chat(messages, self._started[1]), **sampling)

    async def chat(self, messages: Sequence[Message], **sampling: Any) -> Answer:
        """The model's next message in a conversation, whole."""
        return await self.generate(render_chat(messages, self._started[1]), **sampling)

    @property
    def info(self) -> EngineInfo:
        """What the engine serves."""
        return self._started[0].info

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _started(self) -> tuple[EngineClient, Tokenizer]:
        if self._client is None or self._tokenizer is None:
            raise EngineDead("this AsyncLLM was not started; use `async with`, or await start()")
        return self._client, self._tokenizer
