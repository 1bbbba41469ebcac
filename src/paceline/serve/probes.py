"""What operators and their tools ask: health, readiness, version, metrics."""

from __future__ import annotations

import time

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from paceline.serve.answering import context_of
from paceline.serve.exchange import NOT_READY_RETRY_S, JsonResponse
from paceline.serve.timeline import page
from paceline.version import __version__


async def health(request: Request) -> Response:
    """200 while the engine answers; 503 while it starts, hangs or is dead. Says nothing about new requests."""
    return _state(context_of(request).unready_reason())


async def ready(request: Request) -> Response:
    """200 while new requests are taken: healthy, and not draining."""
    context = context_of(request)
    return _state(context.unready_reason() or ("draining" if context.draining else None))


def _state(reason: str | None) -> Response:
    if reason is None:
        return JsonResponse({"status": "ok"})
    return JsonResponse({"status": reason}, status_code=503, headers={"retry-after": str(NOT_READY_RETRY_S)})


async def version(request: Request) -> Response:
    """Which release this is."""
    return JsonResponse({"version": __version__})


async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(generate_latest(context_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def slo(request: Request) -> Response:
    """How each class's promise is kept, and how many prompt tokens a step is allowed now, and by what."""
    context = context_of(request)
    now = time.monotonic()
    stats = context.engine.stats
    error = stats.cost_error
    return JsonResponse(
        {
            "classes": context.attainment.report(now),
            "default_class": context.settings.default_class,
            "prefill_budget": context.timeline.prefill_budget(now),
            "step": context.timeline.last,
            "running": stats.scheduler.num_running,
            "waiting": stats.scheduler.num_waiting,
            "prediction_error": None if error is None else {"median": error[0], "p95": error[1]},
        }
    )


async def timeline_steps(request: Request) -> Response:
    """The last steps, for `paceline timeline` and the page."""
    context = context_of(request)
    return JsonResponse(context.timeline.report(context.settings.tightest_itl_s))


async def timeline(_: Request) -> Response:
    """The page that draws them; it asks for the rows itself."""
    return HTMLResponse(page())
