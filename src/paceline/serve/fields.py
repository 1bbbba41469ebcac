"""Body fields that Paceline knows and cannot honour.

A field that would change the answer and is silently dropped makes a wrong answer that looks right, so each is an error
unless its value means "off". Fields that carry no promise about the answer are ignored. Fields that nobody knows are
ignored with a debug log, or refused with `strict_fields`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from paceline.errors import BadRequest

log = logging.getLogger("paceline.serve")

# Known, and without effect on the answer.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "parallel_tool_calls",  # tools themselves are refused
        "include_reasoning",
        "request_id",
        "session_id",
        "stream_interval",
    }
)

# Name -> values that mean "off", beside null.
_COMMON: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "thinking_token_budget": (),
    "watermarking": (),
    "repetition_detection": (),
    "priority": (0,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_prompt_text": (False,),
    "response_format": ({"type": "text"},),
    "lora_path": (),
    "store": (False,),
}
CHAT_OFF: dict[str, tuple[Any, ...]] = _COMMON | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"], []),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "documents": ([],),
    "echo": (False,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
COMPLETION_OFF: dict[str, tuple[Any, ...]] = _COMMON | {
    "suffix": ("",),
    "prompt_embeds": (),
}
TOKENIZE_OFF: dict[str, tuple[Any, ...]] = {"tools": ([],), "media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}


def check_fields(
    body: Mapping[str, Any], known: frozenset[str], off: Mapping[str, tuple[Any, ...]], *, strict: bool
) -> None:
    """Refuse what cannot be honoured. `known` are the fields of the endpoint's schema.

    Raises BadRequest that names the field; unknown fields raise only if `strict`.
    """
    if body.get("chat_template") is not None:
        raise BadRequest(
            "chat_template is not taken from requests, since a template is a program: the model's own is used",
            param="chat_template",
            code="unsupported_parameter",
        )
    unknown = []
    for name, value in body.items():
        if name in known or name in HARMLESS or name == "chat_template":
            continue
        if name not in off:
            unknown.append(name)
        elif value is not None and not any(type(value) is type(each) and value == each for each in off[name]):
            raise BadRequest(
                f"{name} is not supported by this server; leave it out", param=name, code="unsupported_parameter"
            )
    if not unknown:
        return
    shown = ", ".join(repr(name[:64]) for name in sorted(unknown)[:8])
    if strict:
        raise BadRequest(f"unknown fields: {shown}", param=min(unknown)[:64], code="unknown_parameter")
    log.debug("ignored unknown fields: %s", shown)
