"""The ASGI application: which path goes where, and what is around it."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.errors import PacelineError
from paceline.serve import chat, completions, models, probes
from paceline.serve.batch import endpoints as batch
from paceline.serve.batch.manager import Batches
from paceline.serve.context import ServerContext
from paceline.serve.engine_port import Engine
from paceline.serve.exchange import describe_error, error_response
from paceline.serve.keys import KeyRing
from paceline.serve.middleware import Gate, RequestScope
from paceline.serve.settings import ServeSettings
from paceline.text.tokenizer import Tokenizer

ROUTES = (
    Route("/v1/chat/completions", chat.chat_completions, methods=["POST"]),
    Route("/v1/completions", completions.completions, methods=["POST"]),
    Route("/v1/models", models.list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", models.get_model, methods=["GET"]),
    *batch.ROUTES,
    Route("/tokenize", models.tokenize, methods=["POST"]),
    Route("/detokenize", models.detokenize, methods=["POST"]),
    Route("/health", probes.health, methods=["GET"]),
    Route("/ready", probes.ready, methods=["GET"]),
    Route("/version", probes.version, methods=["GET"]),
    Route("/metrics", probes.metrics, methods=["GET"]),
    Route("/slo", probes.slo, methods=["GET"]),
    Route("/timeline", probes.timeline, methods=["GET"]),
    Route("/timeline/steps", probes.timeline_steps, methods=["GET"]),
)


def create_app(engine: Engine, settings: ServeSettings, tokenizer: Tokenizer | None = None) -> Starlette:
    """The application over `engine`, which may still be starting. Its `ServerContext` is `app.state.context`.

    Without a `tokenizer`, the one in the engine's `info.tokenizer_dir` is loaded when it is first needed.
    """
    context = ServerContext(engine, settings, tokenizer)
    paths = frozenset(route.path for route in ROUTES if "{" not in route.path)
    middleware = [Middleware(RequestScope, context.metrics, paths)]
    if settings.cors_origins:
        # Outside the gate: a browser's preflight carries no key.
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["authorization", "content-type", "x-request-id"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    middleware.append(Middleware(Gate, KeyRing(settings.keys), context.metrics))

    async def on_error(request: Request, error: Exception) -> Response:
        status, body, _ = describe_error(error)
        context.metrics.note_error(status, body["error"]["code"] or "")
        return error_response(error)

    app = Starlette(
        routes=ROUTES,
        middleware=middleware,
        exception_handlers={PacelineError: on_error, HTTPException: on_error},
    )
    app.router.redirect_slashes = False  # a redirected POST arrives without its body
    app.state.context = context
    app.state.batches = Batches(context, settings.batch)
    return app
