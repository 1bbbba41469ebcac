"""What a request body may hold: the fields that Paceline honours, their types and their ranges.

Checked strictly (the number 1 is not the string "1"), by pydantic, here and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from paceline.errors import BadRequest

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
_MOST_TARGET_MS = 86_400_000  # a day: beyond it a target is a slip of units
_MOST_BIAS = 100
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")
_SHOWN = 64  # characters of a wrong value that an error repeats


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """A list of prompts, each text or ids, from any of the four shapes."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return [value]
    valid = isinstance(value, list) and (
        all(isinstance(item, str) for item in value)
        or all(isinstance(item, list) and all(type(i) is int for i in item) for item in value)
    )
    if not valid:
        raise ValueError("should be a string, a list of strings, a list of token ids, or a list of such lists")
    return value


def _biases(value: Any) -> dict[int, float]:
    """Token ids are strings in JSON objects."""
    if not isinstance(value, dict):
        raise ValueError("should be an object of token ids and numbers")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        if not _TOKEN_ID.fullmatch(token):
            raise ValueError("keys should be token ids")
        if type(bias) not in (int, float) or not -_MOST_BIAS <= bias <= _MOST_BIAS:
            raise ValueError(f"the bias of token {token} should be a number from -{_MOST_BIAS} to {_MOST_BIAS}")
        biases[int(token)] = float(bias)
    return biases


# The first fault of a list is enough: an error object for each of a million wrong items would hold up everybody.
_FAIL_FAST = Field(fail_fast=True)
_Objects = Annotated[list[dict[str, Any]], _FAIL_FAST]
_Count = Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)]  # beyond, Python may not even print the number in an error


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """Extras of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # no padding is ever sent


class PacelineOptions(_Body):
    """Our own extension field: the class of traffic, and targets in place of the class's."""

    traffic_class: str | None = Field(None, alias="class")
    ttft_ms: Annotated[float, Field(gt=0, le=_MOST_TARGET_MS)] | None = None
    itl_ms: Annotated[float, Field(gt=0, le=_MOST_TARGET_MS)] | None = None
    e2e_ms: Annotated[float, Field(gt=0, le=_MOST_TARGET_MS)] | None = None


class Sampling(_Body):
    """Fields that both endpoints share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[_Count, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=10)] | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_biases)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    max_tokens: _Count | None = None
    min_tokens: Annotated[_Count, Field(ge=0)] | None = None
    stop: Annotated[list[str], _FAIL_FAST, BeforeValidator(_one_or_many)] | None = None
    stop_token_ids: Annotated[list[int], _FAIL_FAST] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    service_tier: str | None = None
    paceline: PacelineOptions | None = None


class Message(_Body):
    """One turn of a conversation."""

    role: Role
    content: str | _Objects | None = None
    name: str | None = None
    tool_calls: _Objects | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Conversation(_Body):
    """What a chat template is given."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(Sampling, Conversation):
    """POST /v1/chat/completions"""

    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool = False  # templates write theirs themselves


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_prompts)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: _Count | None = None
    add_special_tokens: bool = True


class TokenizeRequest(_Body):
    """POST /tokenize: of `prompt`, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None  # true for a prompt, false for a conversation
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(_Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[int], _FAIL_FAST]
    skip_special_tokens: bool = False


AnyBody = TypeVar("AnyBody", bound=BaseModel)


def parse_body(kind: type[AnyBody], body: Mapping[str, Any]) -> AnyBody:
    """Check a decoded body. Raises BadRequest that names the first field at fault."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    path = _path(first["loc"])
    problem = first["msg"].removeprefix("Value error, ")
    message = f"{path}: {problem}" if first["type"] == "missing" else f"{path}: {problem}; got {_shown(first['input'])}"
    raise BadRequest(message, param=path)


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages.0.role`, without pydantic's names for the branches of a union."""
    return ".".join(str(part) for part in loc if not (isinstance(part, str) and ("[" in part or part == "str")))


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def field_names(kind: type[BaseModel]) -> frozenset[str]:
    """The fields of a schema as they are spelled in JSON."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())
