"""How the next token of a request is chosen and when its generation ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved sampling parameters of one sequence (one choice of a request with n > 1).

    Values are checked at the border (`serve`, `app`); here they are taken as valid. Order of application, as the
    OpenAI API and vLLM do it: logit_bias and min_tokens mask, penalties, temperature, then top_k, top_p, min_p.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # 1 is off; over prompt and output
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # 64 bits; the draw depends on the seed and the token's position only. The caller always gives it
    max_tokens: int = 16
    min_tokens: int = 0
    # Ids that end the generation. End-of-sequence ids are among them unless the client set ignore_eos.
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # alternatives to report for each output token; 0 reports the chosen one alone
    prompt_logprobs: int | None = None  # the same for each prompt token after the first
