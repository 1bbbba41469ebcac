"""Chat templates: a conversation to the text that the model was trained on.

Templates come with checkpoints from strangers, so they run in jinja's immutable sandbox and see plain JSON data. What
they may use (loop controls, `tojson`, `raise_exception`, `strftime_now`, generation blocks) is what transformers
offers, and the rendered text is the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from paceline.errors import BadRequest, CorruptModel

# Names that a message's reasoning goes by; templates read the first, or `thinking`.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Marks where the last message ends when the model is to continue it. Trailing space: templates may trim it.
_CONTINUE = "\ue000CONTINUE-HERE\ue001 "
_PROBE = "paceline-probe"


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks trainable text; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (the attribute jinja looks for)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        return str(caller())


class _PlainNamespace(Namespace):
    """jinja's namespace without names that start with an underscore, as transformers has it."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set the attribute {name!r} of a namespace")


class _Dict:
    """`dict` for templates, without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML, which would change prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _PlainNamespace
    return environment


class ChatTemplate:
    """One compiled template with the special tokens it may mention."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises CorruptModel when the source is not a valid template."""
        self.source = source
        self._special = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CorruptModel(f"the chat template is not valid: {error}") from error
        self.wants_parts = self._probe_parts()
        self.knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation of plain JSON values.

        `continue_final_message` leaves the last message open so that the model goes on with it. Raises BadRequest
        when the template refuses the conversation (roles that must alternate, say) or cannot render it.
        """
        if not messages:
            raise BadRequest("messages is empty; send at least one message", param="messages")
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other; set add_generation_prompt to "
                "false",
                param="continue_final_message",
            )
        chat = [_alias_reasoning({k: v for k, v in message.items() if v is not None}) for message in messages]
        ending = _mark_ending(chat[-1]) if continue_final_message else ""
        text = self._render(chat, add_generation_prompt, tools, documents, variables or {})
        return _cut_at_mark(text, ending) if continue_final_message else text

    def _render(
        self,
        chat: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        given = {
            **self._special,
            **variables,
            "messages": chat,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(given)
        except jinja2.TemplateError as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error
        except RecursionError:
            raise BadRequest("the messages are nested too deeply", param="messages") from None
        except Exception as error:
            # A template is a program from outside; whatever it trips over in a conversation is no fault of the server.
            raise BadRequest(
                f"the model's chat template cannot render these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error

    def _probe_parts(self) -> bool:
        """Whether the template reads `content` as a list of parts and shows nothing of a plain string."""

        def shows(content: Any) -> bool:
            try:
                return _PROBE in self._render([{"role": "user", "content": content}], True, None, None, {})
            except BadRequest:
                return False

        return not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])


def _alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark_ending(message: dict[str, Any]) -> str:
    """Put the mark at the end of the message's text, in place; return the text before the mark."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE
        return content
    if isinstance(content, list):
        parts = [dict(part) for part in content]
        for part in reversed(parts):
            if isinstance(text := part.get("text"), str):
                part["text"] = text + _CONTINUE
                message["content"] = parts
                return text
    raise BadRequest("continue_final_message needs a last message with text to continue", param="messages")


def _cut_at_mark(text: str, ending: str) -> str:
    mark = _CONTINUE.strip()
    at = text.rfind(mark)
    if at < 0 or ending.strip() not in text:
        raise BadRequest(
            "the model's chat template does not show the last message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    kept = text[:at]
    # Where the template trimmed the mark's own trailing space, it would have trimmed the message's, too.
    return kept if text.startswith(_CONTINUE, at) else kept.rstrip()
