"""The smaller endpoints: which models there are, and text to ids and back."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import BadRequest
from paceline.serve.answering import context_of
from paceline.serve.conversation import render
from paceline.serve.exchange import JsonResponse, read_json
from paceline.serve.fields import TOKENIZE_OFF, check_fields
from paceline.serve.keys import ANONYMOUS
from paceline.serve.prepare import Model, Preparer
from paceline.serve.schemas import Conversation, DetokenizeRequest, TokenizeRequest, field_names, parse_body


async def list_models(request: Request) -> Response:
    """GET /v1/models"""
    model = await context_of(request).model()
    return JsonResponse({"object": "list", "data": [_card(model, name) for name in model.names]})


async def get_model(request: Request) -> Response:
    """GET /v1/models/{name}; a name may hold slashes."""
    name = request.path_params["name"]
    model = await context_of(request).named_model(name)
    return JsonResponse(_card(model, name))


async def tokenize(request: Request) -> Response:
    """POST /tokenize"""
    context = context_of(request)
    raw = await read_json(request, context.settings)
    body = parse_body(TokenizeRequest, raw)
    check_fields(raw, field_names(TokenizeRequest), TOKENIZE_OFF, strict=context.settings.strict_fields)
    model = await context.named_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("give either prompt or messages", param="prompt")
    special = body.add_special_tokens
    if body.prompt is not None:
        text, param, special = body.prompt, "prompt", True if special is None else special
    else:
        # Only what was sent: whether add_generation_prompt was, matters.
        sent = {name: raw[name] for name in Conversation.model_fields if name in raw}
        text = await render(model.tokenizer, parse_body(Conversation, sent))
        param = "messages"
    preparer = Preparer(model, context.settings, ANONYMOUS)
    ids = await preparer.encode(text, add_special_tokens=bool(special), param=param)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.info.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [model.tokenizer.token_text(token) for token in ids]
    return JsonResponse(answer)


async def detokenize(request: Request) -> Response:
    """POST /detokenize"""
    context = context_of(request)
    raw = await read_json(request, context.settings)
    body = parse_body(DetokenizeRequest, raw)
    check_fields(raw, field_names(DetokenizeRequest), {}, strict=context.settings.strict_fields)
    model = await context.named_model(body.model)
    Preparer(model, context.settings, ANONYMOUS).check_ids(body.tokens, "tokens")
    return JsonResponse({"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)})


def _card(model: Model, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "paceline",
        "root": model.info.model,
        "max_model_len": model.info.max_model_len,
    }
