"""POST /v1/chat/completions: a conversation in, the next turn out, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paceline.serve.answering import Answer, answer_request
from paceline.serve.exchange import DONE, sse
from paceline.serve.fields import CHAT_OFF
from paceline.serve.generation import ChoiceEvent, Ending, Generation
from paceline.serve.prepare import Job, Preparer
from paceline.serve.schemas import ChatRequest
from paceline.text.logprobs import chat_entries
from paceline.text.stream import ShownToken


async def chat_completions(request: Request) -> Response:
    """The endpoint."""
    return await answer_request(request, ChatRequest, CHAT_OFF, ChatAnswer)


class ChatAnswer(Answer[ChatRequest]):
    """One chat completion on its way out."""

    id_prefix = "chatcmpl"

    async def jobs(self, preparer: Preparer) -> list[Job]:
        return await preparer.chat(self._body, self.id, self.traffic)

    async def whole(self, generation: Generation) -> dict[str, Any]:
        texts: dict[int, list[str]] = {job.index: [] for job in generation.jobs}
        tokens: dict[int, list[ShownToken]] = {job.index: [] for job in generation.jobs}
        endings: dict[int, Ending] = {}
        async for event in generation.events():
            index = event.choice.job.index
            texts[index].append(event.piece.text)
            tokens[index] += event.piece.tokens
            if event.ending is not None:
                endings[index] = event.ending
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(texts[index]), "refusal": None},
                "logprobs": self._logprobs(tokens[index]),
                "finish_reason": endings[index].reason,
                "stop_reason": endings[index].stop,
            }
            for index in sorted(endings)
        ]
        return self._envelope("chat.completion", choices) | {"usage": generation.usage(endings)}

    async def streamed(self, generation: Generation) -> AsyncGenerator[bytes]:
        usage_wanted, running_usage = self._usage_wanted()
        opened: set[int] = set()
        endings: dict[int, Ending] = {}
        async for event in generation.events():
            index = event.choice.job.index
            if event.ending is not None:
                endings[index] = event.ending
            choices = self._deltas(event, first=index not in opened)
            opened.add(index)
            body = b""
            for choice in choices:
                chunk = self._envelope("chat.completion.chunk", [choice])
                if usage_wanted:
                    chunk["usage"] = generation.usage(endings) if running_usage else None
                body += sse(chunk)
            if body:
                yield body
        last = b""
        if usage_wanted:
            last = sse(self._envelope("chat.completion.chunk", []) | {"usage": generation.usage(endings)})
        yield last + DONE

    def _deltas(self, event: ChoiceEvent, *, first: bool) -> list[dict[str, Any]]:
        """The chunks that one event becomes: the role, what was said, how it ended."""
        index = event.choice.job.index
        deltas: list[dict[str, Any]] = []
        if first:
            deltas.append(_delta(index, {"role": "assistant", "content": ""}))
        if event.piece.text or event.piece.tokens:
            said = _delta(index, {"content": event.piece.text})
            said["logprobs"] = self._logprobs(event.piece.tokens)
            deltas.append(said)
        if event.ending is not None:
            deltas.append(_delta(index, {}, event.ending))
        return deltas

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        entries = chat_entries(self._model.tokenizer, tokens, self._body.top_logprobs or 0)
        return {"content": entries, "refusal": None}


def _delta(index: int, delta: dict[str, Any], ending: Ending | None = None) -> dict[str, Any]:
    chunk: dict[str, Any] = {
        "index": index,
        "delta": delta,
        "logprobs": None,
        "finish_reason": ending.reason if ending is not None else None,
    }
    if ending is not None:
        chunk["stop_reason"] = ending.stop
    return chunk
