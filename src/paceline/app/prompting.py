"""From what a caller of the Python API asks for to a request of core, and from its tokens back to an answer.

`LLM`, `AsyncLLM` and the terminal commands share this; over HTTP, `serve` does the same for the OpenAI API.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.core.sampling import SamplingParams
from paceline.core.step import Finish, FinishReason, RequestSpec, TokenLogprob
from paceline.engine.messages import EngineInfo
from paceline.errors import BadRequest
from paceline.text.stream import TextStream
from paceline.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model made of one prompt."""

    text: str
    tokens: tuple[int, ...]  # of the answer; without those of a stop string, with a stop token that ended it
    finish_reason: str  # "stop", "length", "abort" or "error"
    stop_reason: str | int | None  # the stop string or stop token id that ended it; None for end-of-sequence
    prompt_tokens: int
    cached_tokens: int  # of the prompt, taken from the prefix cache
    logprobs: tuple[TokenLogprob, ...] = ()  # parallel to `tokens`, where asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens after the first, where asked for
    error: str | None = None  # what went wrong, with finish_reason "error"


@dataclass(frozen=True, slots=True)
class Delta:
    """What has become visible of one answer since the last one; the last of each answer carries the whole."""

    index: int  # of the prompt
    text: str
    tokens: int  # new tokens behind it
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What a caller may say about sampling: `SamplingParams`, with text to stop at and the model's own ends."""

    params: SamplingParams
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    is_seeded: bool = False


_OWN = frozenset({"stop", "ignore_eos", "sampling"})
_PARAMS = {one.name for one in fields(SamplingParams)}
# (lowest, highest) of what the OpenAI API and vLLM accept.
_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-3, 10.0),
}
_LEAST: dict[str, int] = {"top_k": 0, "max_tokens": 1, "min_tokens": 0, "logprobs": 0, "prompt_logprobs": 0}


def sampling_options(given: Mapping[str, Any]) -> SamplingOptions:
    """Check keyword arguments; BadRequest names the first that is unknown or out of range."""
    unknown = next((name for name in given if name not in _PARAMS | _OWN), None)
    if unknown is not None:
        raise BadRequest(f"unknown sampling parameter {unknown!r}; known: {', '.join(sorted(_PARAMS | _OWN))}")
    values = {name: value for name, value in given.items() if name in _PARAMS and value is not None}
    for name, value in values.items():
        _check_number(name, value)
    if isinstance(values.get("logit_bias"), Mapping):
        values["logit_bias"] = tuple((int(token), float(bias)) for token, bias in values["logit_bias"].items())
    values["stop_token_ids"] = tuple(values.get("stop_token_ids", ()))
    if "seed" in values:
        values["seed"] = int(values["seed"]) & (2**64 - 1)
    base = given.get("sampling") or SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)
    stop = given.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(one, str) and one for one in stops):
        raise BadRequest(f"stop is {stop!r}; it must be one text or several, none empty", param="stop")
    is_seeded = "seed" in values or given.get("sampling") is not None
    return SamplingOptions(replace(base, **values), stops, bool(given.get("ignore_eos")), is_seeded)


def _check_number(name: str, value: Any) -> None:
    if name in _BOUNDS:
        low, high = _BOUNDS[name]
        if not isinstance(value, (int, float)) or not low <= value <= high:
            raise BadRequest(f"{name} is {value!r}; it must be from {low:g} to {high:g}", param=name)
    if name in _LEAST and (isinstance(value, bool) or not isinstance(value, int) or value < _LEAST[name]):
        raise BadRequest(f"{name} is {value!r}; it must be a whole number of at least {_LEAST[name]}", param=name)


def make_spec(
    request_id: str,
    prompt: Prompt,
    options: SamplingOptions,
    tokenizer: Tokenizer,
    info: EngineInfo,
    traffic_class: str,
) -> RequestSpec:
    """A request of core. Raises BadRequest for a prompt that cannot be taken, naming what is wrong with it."""
    ids = tuple(tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
    if not ids:
        raise BadRequest("the prompt is empty", param="prompt")
    params = options.params
    _check_tokens("prompt", ids, info)
    _check_tokens("logit_bias", (token for token, _ in params.logit_bias), info)
    _check_tokens("stop_token_ids", params.stop_token_ids, info)
    room = info.max_model_len - len(ids)
    if room < 1:
        raise BadRequest(
            f"the prompt has {len(ids)} tokens and {info.model} takes {info.max_model_len}, prompt and answer together",
            param="prompt",
        )
    ends = () if options.ignore_eos else info.eos_token_ids
    params = replace(
        params,
        max_tokens=min(params.max_tokens, room),
        min_tokens=min(params.min_tokens, params.max_tokens, room),
        stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *ends))),
        seed=params.seed if options.is_seeded else secrets.randbits(64),
    )
    # A stop string is found as its text is shown: held back, the answer would end late.
    return RequestSpec(request_id, ids, params, traffic_class=traffic_class, even=not options.stop)


def _check_tokens(name: str, ids: Iterable[int], info: EngineInfo) -> None:
    strange = next((token for token in ids if not 0 <= token < info.vocab_size), None)
    if strange is not None:
        raise BadRequest(f"{name}: token id {strange} is outside the vocabulary of {info.vocab_size}", param=name)


def render_chat(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """A conversation as the prompt its model was trained on. Raises BadRequest where that cannot be made."""
    if tokenizer.chat_template is None:
        raise BadRequest("this model has no chat template; use generate with a prompt of your own", param="messages")
    # The template writes the special tokens itself.
    return tokenizer.encode(tokenizer.chat_template.render(messages), add_special_tokens=False)


@dataclass(slots=True)
class Assembler:
    """Collects one request's tokens into text as they come, and into an `Answer` at the end."""

    spec: RequestSpec
    tokenizer: Tokenizer
    options: SamplingOptions
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    _stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        params = self.spec.sampling
        self._stream = TextStream(self.tokenizer, stops=self.options.stop, min_tokens=params.min_tokens)

    @property
    def is_stopped(self) -> bool:
        """A stop string has come: the caller ends the request."""
        return self._stream.stop_string is not None

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = (), *, stop_token: int | None = None
    ) -> str:
        """Take new tokens; the text that may be shown now."""
        if self.is_stopped:
            return ""
        self.tokens += tokens
        self.logprobs += logprobs
        return self._show(self._stream.push(tokens, logprobs, stop_token=stop_token).text)

    def flush(self) -> str:
        """What was held back in case a stop string went on."""
        return self._show(self._stream.finish().text)

    def answer(self, finish: Finish) -> Answer:
        """The whole, once the request has ended."""
        used = self._stream.used
        stop_reason: str | int | None = self._stream.stop_string
        if stop_reason is None and finish.stop_token in self.options.params.stop_token_ids:
            stop_reason = finish.stop_token
        return Answer(
            text=self.text,
            tokens=tuple(self.tokens[:used]),
            finish_reason="stop" if self.is_stopped else finish.reason.value,
            stop_reason=stop_reason,
            prompt_tokens=len(self.spec.prompt),
            cached_tokens=finish.cached_tokens,
            logprobs=tuple(self.logprobs[:used]),
            prompt_logprobs=tuple(self.prompt_logprobs),
            error=finish.message if finish.reason is FinishReason.ERROR else None,
        )

    def _show(self, text: str) -> str:
        self.text += text
        return text
