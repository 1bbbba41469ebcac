"""A conversation of the API to the prompt text of a model's chat template."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from paceline.errors import BadRequest
from paceline.serve.schemas import Conversation, Message
from paceline.text.chat import ChatTemplate
from paceline.text.tokenizer import Tokenizer

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"})


_INLINE_MESSAGES = 32
_INLINE_CHARS = 4096


async def render(tokenizer: Tokenizer, body: Conversation) -> str:
    """`render_conversation`, off the event loop unless the conversation is plain and short."""
    inline = len(body.messages) <= _INLINE_MESSAGES and all(
        isinstance(message.content, str) and message.tool_calls is None for message in body.messages
    )
    if inline and sum(len(message.content or "") for message in body.messages) <= _INLINE_CHARS:
        return render_conversation(tokenizer, body)
    return await asyncio.to_thread(render_conversation, tokenizer, body)


def render_conversation(tokenizer: Tokenizer, body: Conversation) -> str:
    """The prompt text of a conversation. Raises BadRequest when the model has no template or refuses the turns."""
    template = tokenizer.chat_template
    if template is None:
        raise BadRequest(
            "this model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
        )
    variables = body.chat_template_kwargs or {}
    if taken := sorted(_RESERVED & set(variables)):
        raise BadRequest(f"chat_template_kwargs may not set {taken[0]}", param="chat_template_kwargs")
    continues = body.continue_final_message
    # Asking to continue says that no new turn is to be opened, unless both were asked for by name.
    opens = body.add_generation_prompt and not (continues and "add_generation_prompt" not in body.model_fields_set)
    return template.render(
        [_plain_message(message, f"messages.{i}", template) for i, message in enumerate(body.messages)],
        add_generation_prompt=opens,
        continue_final_message=continues,
        variables=variables,
    )


def _plain_message(message: Message, path: str, template: ChatTemplate) -> dict[str, Any]:
    """A message as templates expect it: plain values, text alone."""
    plain = message.model_dump(exclude_none=True)
    if message.role == "developer" and not template.knows_developer:
        plain["role"] = "system"
    if message.content is None and message.tool_calls is None and message.role != "assistant":
        raise BadRequest(f"{path}.content: a {message.role} message needs content", param=f"{path}.content")
    plain["content"] = _content(message.content or "", path, template)
    if message.tool_calls is not None:
        plain["tool_calls"] = [_tool_call(call, f"{path}.tool_calls.{i}") for i, call in enumerate(message.tool_calls)]
    return plain


def _content(content: str | list[dict[str, Any]], path: str, template: ChatTemplate) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if template.wants_parts else content
    texts = [_part_text(part, f"{path}.content.{i}") for i, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts] if template.wants_parts else "\n".join(texts)


def _part_text(part: dict[str, Any], path: str) -> str:
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise BadRequest(
            f"{path}.type: this model takes text alone, not {str(kind)[:64]!r}",
            param=f"{path}.type",
            code="unsupported_content",
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise BadRequest(f"{path}.{kind}: should be a string", param=f"{path}.{kind}")
    return text


def _tool_call(call: dict[str, Any], path: str) -> dict[str, Any]:
    """An earlier call for the template, which expects its arguments as an object: the API has them as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{path}.function: should be an object with a name", param=f"{path}.function")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise BadRequest(
                f"{path}.function.arguments: should be JSON text", param=f"{path}.function.arguments"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}
