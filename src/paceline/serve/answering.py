"""The way that both generating endpoints share: check, prepare, run, answer whole or streamed."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from paceline.serve.context import ServerContext
from paceline.serve.exchange import EventStream, JsonResponse, describe_error, read_json, unless_gone
from paceline.serve.fields import check_fields
from paceline.serve.generation import Generation
from paceline.serve.keys import ANONYMOUS, Caller
from paceline.serve.prepare import Job, Model, Preparer, new_id
from paceline.serve.schemas import Sampling, field_names, parse_body
from paceline.serve.traffic import Traffic, resolve_traffic

CLASS_HEADER = "x-paceline-class"  # of an answer: the class of traffic that was applied
log = logging.getLogger("paceline.serve")
BodyT = TypeVar("BodyT", bound=Sampling)


class Answer(ABC, Generic[BodyT]):
    """One answer on its way out; a subclass knows the shape of its endpoint."""

    id_prefix: ClassVar[str]

    def __init__(self, model: Model, body: BodyT, traffic: Traffic) -> None:
        self.id = new_id(self.id_prefix)
        self._model = model
        self._body = body
        self.traffic = traffic
        self._created = int(time.time())

    @abstractmethod
    async def jobs(self, preparer: Preparer) -> list[Job]:
        """What to ask of the engine. Raises BadRequest."""

    @abstractmethod
    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer as one object."""

    @abstractmethod
    def streamed(self, generation: Generation) -> AsyncGenerator[bytes]:
        """The answer as server-sent events; each body holds those that belong together."""

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        envelope = {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
            "system_fingerprint": self._model.fingerprint,
        }
        if self.traffic.tier is not None:
            envelope["service_tier"] = self.traffic.tier
        return envelope

    def _usage_wanted(self) -> tuple[bool, bool]:
        """Whether a stream reports usage at its end, and with every chunk."""
        options = self._body.stream_options
        at_end = bool(options and options.include_usage)
        return at_end, at_end and bool(options and options.continuous_usage_stats)


def context_of(request: Request) -> ServerContext:
    """The server that this request came to."""
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context


def caller_of(request: Request) -> Caller:
    """Who sent it; the middleware found out."""
    caller = request.scope.get("state", {}).get("caller", ANONYMOUS)
    assert isinstance(caller, Caller)
    return caller


async def answer_request(
    request: Request, kind: type[BodyT], off: Mapping[str, tuple[Any, ...]], answer_kind: type[Answer[BodyT]]
) -> Response:
    """Handle a generating request from its body to the last byte."""
    began = time.monotonic()
    context = context_of(request)
    raw = await read_json(request, context.settings)
    body, answer, generation = await prepare_answer(context, raw, kind, off, answer_kind, caller_of(request), began)
    headers = {CLASS_HEADER: answer.traffic.kind.name}
    if body.stream:
        bodies = _stream(context, generation, answer)
        return EventStream(bodies, context.settings, _error_hook(context), headers)
    whole = await unless_gone(request.receive, _whole(context, generation, answer))
    return JsonResponse(whole | {"paceline": answer.traffic.applied()}, headers=headers)


def asked_traffic(context: ServerContext, body: Sampling, caller: Caller) -> Traffic:
    """The class that a body asks for. Raises BadRequest and Forbidden."""
    settings = context.settings
    return resolve_traffic(body.service_tier, body.paceline, caller, settings.classes, settings.default_class)


async def prepare_answer(
    context: ServerContext,
    raw: dict[str, Any],
    kind: type[BodyT],
    off: Mapping[str, tuple[Any, ...]],
    answer_kind: type[Answer[BodyT]],
    caller: Caller,
    began: float,
    decide_traffic: Callable[[ServerContext, Sampling, Caller], Traffic] = asked_traffic,
) -> tuple[BodyT, Answer[BodyT], Generation]:
    """Everything before the engine is asked, of an HTTP request and of a batch's line alike.

    `began` is when it came, on the clock of `time.monotonic`. Raises RequestError.
    """
    body = parse_body(kind, raw)
    check_fields(raw, field_names(kind), off, strict=context.settings.strict_fields)
    model = await context.named_model(body.model)
    answer = answer_kind(model, body, decide_traffic(context, body, caller))
    jobs = await answer.jobs(Preparer(model, context.settings, caller, began))
    context.metrics.choices.observe(body.n or 1)
    log.debug("request %s: %d choices, max_tokens %d", answer.id, len(jobs), jobs[0].spec.sampling.max_tokens)
    if context.settings.log_prompts:
        for job in jobs:
            log.debug("prompt of %s", job.spec.request_id, extra={"prompt": model.tokenizer.decode(job.spec.prompt)})
    generation = Generation(context.engine, jobs, model.tokenizer, context.metrics, began, context.attainment)
    return body, answer, generation


async def _whole(context: ServerContext, generation: Generation, answer: Answer[Any]) -> dict[str, Any]:
    with context.running():
        async with generation:
            whole = await answer.whole(generation)
    _log_answer(generation, answer)
    return whole


async def _stream(context: ServerContext, generation: Generation, answer: Answer[Any]) -> AsyncGenerator[bytes]:
    with context.running():
        async with generation, aclosing(answer.streamed(generation)) as bodies:
            async for body in bodies:
                yield body
    _log_answer(generation, answer)


def _log_answer(generation: Generation, answer: Answer[Any]) -> None:
    counts = {
        "choices": len(generation.jobs),
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.completion_tokens,
    }
    log.info("answered %s", answer.id, extra=counts)


def _error_hook(context: ServerContext) -> Callable[[Exception], None]:
    def note(error: Exception) -> None:
        status, body, _ = describe_error(error)
        context.metrics.note_error(status, body["error"]["code"] or "")
        if status == 500:
            log.error("a stream failed: %s", error, exc_info=error)
        else:
            log.info("a stream ended with an error: %s", error)

    return note
