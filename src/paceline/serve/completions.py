"""POST /v1/completions: text or ids in, their continuation out; batches of prompts, echo, log-probabilities."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paceline.serve.answering import Answer, answer_request
from paceline.serve.exchange import DONE, sse
from paceline.serve.fields import COMPLETION_OFF
from paceline.serve.generation import Choice, ChoiceEvent, Ending, Generation
from paceline.serve.prepare import Job, Preparer
from paceline.serve.schemas import CompletionRequest
from paceline.text.logprobs import CompletionLogprobs
from paceline.text.tokenizer import Tokenizer


async def completions(request: Request) -> Response:
    """The endpoint."""
    return await answer_request(request, CompletionRequest, COMPLETION_OFF, CompletionAnswer)


class CompletionAnswer(Answer[CompletionRequest]):
    """One completion on its way out."""

    id_prefix = "cmpl"

    async def jobs(self, preparer: Preparer) -> list[Job]:
        return await preparer.completion(self._body, self.id, self.traffic)

    async def whole(self, generation: Generation) -> dict[str, Any]:
        writers = {choice.job.index: self._writer(choice) for choice in generation.choices}
        parts = {index: self._part(index) for index in writers}
        endings: dict[int, Ending] = {}
        async for event in generation.events():
            index = event.choice.job.index
            writers[index].write(event, parts[index])
            if event.ending is not None:
                endings[index] = event.ending
        choices = [parts[index].as_json(endings[index]) for index in sorted(endings)]
        return self._envelope("text_completion", choices) | {"usage": generation.usage(endings)}

    async def streamed(self, generation: Generation) -> AsyncGenerator[bytes]:
        usage_wanted, running_usage = self._usage_wanted()
        writers = {choice.job.index: self._writer(choice) for choice in generation.choices}
        endings: dict[int, Ending] = {}
        async for event in generation.events():
            index = event.choice.job.index
            part = self._part(index)
            writers[index].write(event, part)
            if event.ending is not None:
                endings[index] = event.ending
            chunk = self._envelope("text_completion", [part.as_json(event.ending)])
            if usage_wanted:
                chunk["usage"] = generation.usage(endings) if running_usage else None
            yield sse(chunk)
        last = (
            sse(self._envelope("text_completion", []) | {"usage": generation.usage(endings)}) if usage_wanted else b""
        )
        yield last + DONE

    def _part(self, index: int) -> _Part:
        top = self._body.logprobs
        return _Part(index, None if top is None else CompletionLogprobs(self._model.tokenizer, top))

    def _writer(self, choice: Choice) -> _Writer:
        return _Writer(choice, self._model.tokenizer, echo=bool(self._body.echo))


class _Part:
    """A piece of one choice, as large as the answer wants it."""

    def __init__(self, index: int, logprobs: CompletionLogprobs | None) -> None:
        self.text = ""
        self.logprobs = logprobs
        self._index = index

    def as_json(self, ending: Ending | None) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": self.text,
            "logprobs": self.logprobs.as_json() if self.logprobs is not None else None,
            "finish_reason": ending.reason if ending is not None else None,
            "stop_reason": ending.stop if ending is not None else None,
        }


class _Writer:
    """Writes the events of one choice into parts; the first begins with the prompt where that is to be repeated."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer, *, echo: bool) -> None:
        self._choice = choice
        self._tokenizer = tokenizer
        self._echo = echo
        self._echoed = 0  # characters of the prompt

    def write(self, event: ChoiceEvent, part: _Part) -> None:
        if self._echo:
            self._echo = False
            self._write_prompt(part)
        part.text += event.piece.text
        if part.logprobs is not None:
            for token in event.piece.tokens:
                part.logprobs.add(token.token, self._echoed + token.offset, token.logprob)

    def _write_prompt(self, part: _Part) -> None:
        job = self._choice.job
        ids = job.spec.prompt
        decoder = self._tokenizer.start_decoding()
        logprobs = (None, *self._choice.prompt_logprobs)
        text = ""
        for position, token in enumerate(ids):
            if part.logprobs is not None:
                known = logprobs[position] if position < len(logprobs) else None
                part.logprobs.add(token, len(text), known)
            if not (job.skip_special_tokens and self._tokenizer.is_special(token)):
                text += decoder.push(token)
        text += decoder.flush()
        if job.prompt_text is not None:
            text = job.prompt_text
        part.text = text
        self._echoed = len(text)
