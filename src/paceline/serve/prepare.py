"""From a checked body to engine requests: one for each choice of each prompt."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.sampling import SamplingParams
from paceline.core.step import RequestSpec
from paceline.engine.messages import EngineInfo
from paceline.errors import BadRequest
from paceline.serve.conversation import render
from paceline.serve.keys import Caller
from paceline.serve.schemas import ChatRequest, CompletionRequest, Sampling
from paceline.serve.settings import ServeSettings
from paceline.serve.traffic import Traffic
from paceline.text.stream import TextStream
from paceline.text.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16  # the API's default of the older endpoint
_INLINE_CHARS = 4096  # longer texts are tokenised off the event loop
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Model:
    """What is served: the engine's facts, the tokenizer, and the names clients may use."""

    info: EngineInfo
    tokenizer: Tokenizer
    names: tuple[str, ...]
    created: int  # Unix time, seconds

    @property
    def name(self) -> str:
        """The name to show."""
        return self.names[0]

    @property
    def fingerprint(self) -> str:
        """Changes when the same request might be answered differently."""
        return f"fp_{self.info.namespace[:12]}"

    @property
    def longest(self) -> int:
        """The most tokens of prompt and output together that context and KV pool hold (the last needs no KV)."""
        return min(self.info.max_model_len, self.info.num_blocks * self.info.block_size + 1)


@dataclass(frozen=True, slots=True)
class Job:
    """One choice: what the engine is asked, and how its tokens become text."""

    index: int  # of the choice in the answer
    prompt_index: int
    spec: RequestSpec
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # those the client named
    include_stop: bool = False
    skip_special_tokens: bool = True
    discard: bool = False  # only the prompt was wanted (echo with max_tokens 0)
    prompt_text: str | None = None  # as the client sent it, if it sent text

    def text_stream(self, tokenizer: Tokenizer) -> TextStream:
        """A fresh way from this choice's tokens to its text."""
        return TextStream(
            tokenizer,
            stops=self.stops,
            include_stop=self.include_stop,
            skip_special_tokens=self.skip_special_tokens,
            min_tokens=self.spec.sampling.min_tokens,
        )


class Preparer:
    """Checks a body against the model and the caps, and makes its jobs."""

    def __init__(self, model: Model, settings: ServeSettings, caller: Caller, arrived_s: float | None = None) -> None:
        """`arrived_s`: when the request came, on the clock of `time.monotonic`; its deadlines count from there."""
        self._model = model
        self._settings = settings
        self._caller = caller
        self._arrived_s = arrived_s

    async def chat(self, body: ChatRequest, answer_id: str, traffic: Traffic) -> list[Job]:
        """Jobs of a chat completion. Raises BadRequest."""
        if body.top_logprobs is not None and not body.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self._check_logprobs(logprobs, "top_logprobs")
        self._check_counts(body.n or 1, 1)
        text = await render(self._model.tokenizer, body)
        prompt = await self.encode(text, add_special_tokens=body.add_special_tokens, param="messages")
        wanted, param = body.max_completion_tokens, "max_completion_tokens"
        if wanted is None:
            wanted, param = body.max_tokens, "max_tokens"
        max_tokens = self._max_tokens(prompt, wanted, param, "messages", default=None)
        return self._jobs(body, answer_id, traffic, [prompt], [max_tokens], logprobs=logprobs)

    async def completion(self, body: CompletionRequest, answer_id: str, traffic: Traffic) -> list[Job]:
        """Jobs of a completion. Raises BadRequest."""
        self._check_logprobs(body.logprobs, "logprobs")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise BadRequest(
                "best_of is not supported: every choice is returned; use n alone",
                param="best_of",
                code="unsupported_parameter",
            )
        self._check_counts(body.n or 1, len(body.prompt))
        texts = [prompt if isinstance(prompt, str) else None for prompt in body.prompt]
        prompts = await self._completion_prompts(body)
        nothing_new = bool(body.echo) and body.max_tokens == 0
        wanted = 1 if nothing_new else body.max_tokens
        limits = [self._max_tokens(p, wanted, "max_tokens", "prompt", default=COMPLETION_MAX_TOKENS) for p in prompts]
        return self._jobs(
            body,
            answer_id,
            traffic,
            prompts,
            limits,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            discard=nothing_new,
            texts=texts,
        )

    async def _completion_prompts(self, body: CompletionRequest) -> list[tuple[int, ...]]:
        """The prompts as ids. Raises BadRequest for an empty one, one that cannot fit, ids that do not exist."""
        if not all(body.prompt):
            raise BadRequest("prompt is empty", param="prompt")
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        if texts:  # a body holds texts or ids, never both
            prompts = await self._encode_all(texts, add_special_tokens=body.add_special_tokens, param="prompt")
        else:
            prompts = [tuple(ids) for ids in body.prompt if not isinstance(ids, str)]
            for ids in prompts:
                self.check_ids(ids, "prompt")
        if not prompts or not all(prompts):
            raise BadRequest("prompt is empty", param="prompt")
        return prompts

    async def encode(self, text: str, *, add_special_tokens: bool, param: str) -> tuple[int, ...]:
        """Ids of a text. Raises BadRequest for one that cannot fit."""
        [ids] = await self._encode_all([text], add_special_tokens=add_special_tokens, param=param)
        return ids

    async def _encode_all(self, texts: Sequence[str], *, add_special_tokens: bool, param: str) -> list[tuple[int, ...]]:
        tokenizer, longest = self._model.tokenizer, self._model.info.max_model_len
        most = max(map(len, texts))
        if most > longest * tokenizer.longest_token:
            raise BadRequest(
                f"{param} has {most} characters, more than the {longest} tokens of the context can hold",
                param=param,
                code="context_length_exceeded",
            )

        def encode() -> list[tuple[int, ...]]:
            return [tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens)) for text in texts]

        return encode() if sum(map(len, texts)) <= _INLINE_CHARS else await asyncio.to_thread(encode)

    def _max_tokens(
        self, prompt: Sequence[int], wanted: int | None, param: str, prompt_param: str, *, default: int | None
    ) -> int:
        """How many tokens may be generated. Without a wish: `default`, or the rest of the context."""
        size, longest = len(prompt), self._model.info.max_model_len
        if size >= longest:
            raise BadRequest(
                f"the prompt has {size} tokens and the context of this model holds {longest}, with room needed for at "
                "least one new token; shorten the prompt",
                param=prompt_param,
                code="context_length_exceeded",
            )
        if wanted is None:
            return max(1, min(self._model.longest - size, longest if default is None else default))
        if wanted < 1:
            raise BadRequest(f"{param} should be at least 1, not {wanted}", param=param)
        if wanted > longest - size:
            raise BadRequest(
                f"the prompt has {size} tokens and {param} asks for {wanted} more, {size + wanted} in all; the context "
                f"of this model holds {longest}",
                param=param,
                code="context_length_exceeded",
            )
        return wanted

    def _jobs(
        self,
        body: Sampling,
        answer_id: str,
        traffic: Traffic,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: Sequence[int],
        *,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        discard: bool = False,
        texts: Sequence[str | None] = (None,),
    ) -> list[Job]:
        n = body.n or 1
        self._check_shared(body, min(max_tokens))
        stop_ids = self._stop_ids(body)
        salt = f"{self._caller.tenant}/{body.cache_salt}" if body.cache_salt is not None else ""
        jobs = []
        for number, prompt in enumerate(prompts):
            seed = secrets.randbits(64) if body.seed is None else body.seed & _MASK
            for choice in range(n):
                index = number * n + choice
                sampling = _sampling(
                    body,
                    seed=choice_seed(seed, choice),
                    max_tokens=max_tokens[number],
                    stop_token_ids=stop_ids,
                    vocab_size=self._model.info.vocab_size,
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                )
                spec = RequestSpec(
                    f"{answer_id}-{index}",
                    prompt,
                    sampling,
                    cache_salt=salt,
                    traffic_class=traffic.kind.name,
                    tenant=self._caller.tenant,
                    ttft_s=traffic.ttft_s,
                    itl_s=traffic.itl_s,
                    e2e_s=traffic.e2e_s,
                    sent_s=self._arrived_s,
                    even=not body.stop,  # a stop string is found as its text is shown: held back, it ends late
                )
                jobs.append(
                    Job(
                        index,
                        number,
                        spec,
                        stops=tuple(body.stop or ()),
                        stop_token_ids=tuple(body.stop_token_ids or ()),
                        include_stop=body.include_stop_str_in_output,
                        skip_special_tokens=body.skip_special_tokens,
                        discard=discard,
                        prompt_text=texts[number],
                    )
                )
        return jobs

    def _check_counts(self, n: int, prompts: int) -> None:
        """First of all: what is over these is not worth tokenising."""
        caps = self._settings
        if n > caps.max_choices:
            raise BadRequest(f"n should be at most {caps.max_choices}, not {n}", param="n")
        if n * prompts > caps.max_sequences:
            raise BadRequest(
                f"{prompts} prompts with n {n} are {n * prompts} choices; at most {caps.max_sequences} in one request",
                param="prompt",
            )

    def _check_shared(self, body: Sampling, max_tokens: int) -> None:
        caps = self._settings
        stops = body.stop or []
        if len(stops) > caps.max_stops:
            raise BadRequest(f"at most {caps.max_stops} stop strings, not {len(stops)}", param="stop")
        if not all(stops):
            raise BadRequest("a stop string is empty", param="stop")
        if any(len(stop) > caps.max_stop_chars for stop in stops):
            raise BadRequest(f"a stop string is longer than {caps.max_stop_chars} characters", param="stop")
        biases = body.logit_bias or {}
        if len(biases) > caps.max_logit_bias:
            raise BadRequest(f"at most {caps.max_logit_bias} entries, not {len(biases)}", param="logit_bias")
        self.check_ids(biases, "logit_bias")
        self.check_ids(body.stop_token_ids or (), "stop_token_ids")
        if (body.min_tokens or 0) > max_tokens:
            raise BadRequest(f"min_tokens {body.min_tokens} is over max_tokens {max_tokens}", param="min_tokens")
        if body.stream_options is not None and not body.stream:
            raise BadRequest("stream_options needs stream to be true", param="stream_options")

    def check_ids(self, ids: Sequence[int] | Mapping[int, Any], param: str) -> None:
        size = self._model.info.vocab_size
        for token in ids:
            if not 0 <= token < size:
                raise BadRequest(f"{param}: token id {token} is outside the vocabulary, 0 to {size - 1}", param=param)

    def _check_logprobs(self, wanted: int | None, param: str) -> None:
        if wanted is not None and wanted > self._settings.max_logprobs:
            raise BadRequest(f"{param} should be at most {self._settings.max_logprobs}, not {wanted}", param=param)

    def _stop_ids(self, body: Sampling) -> tuple[int, ...]:
        model = self._model
        ends = () if body.ignore_eos else (*model.info.eos_token_ids, *model.tokenizer.eos_token_ids)
        return tuple(dict.fromkeys((*ends, *(body.stop_token_ids or ()))))


def _sampling(
    body: Sampling,
    *,
    seed: int,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    vocab_size: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    top_p = 1.0 if body.top_p is None else body.top_p
    top_k = min(max(body.top_k or 0, 0), vocab_size)
    if top_p == 0:  # the smallest set there is: the best token
        top_p, top_k = 1.0, 1
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=tuple(sorted((body.logit_bias or {}).items())),
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice`; that of choice 0 is the seed itself, so n does not change the first answer.

    Others are mixed by SplitMix64's finaliser: neighbouring seeds must not give each other's choices.
    """
    if choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def new_id(prefix: str) -> str:
    """An id that is new in the whole world: `chatcmpl-` and 24 hexadecimal digits."""
    return f"{prefix}-{os.urandom(12).hex()}"
