"""The real model over a KV cache of fewer bits: nearly the same answers, whatever the cache goes through."""

from __future__ import annotations

from typing import Any

from paceline.app.llm import LLM

PREAMBLE = "You answer questions about geography in one short sentence, in English, without any doubt or excuse. "
PLACES = ("France", "Japan", "Peru", "Kenya", "Norway", "Egypt", "Canada", "India", "Chile", "Ghana")
PROMPTS = [f"{PREAMBLE}The capital of {place} is" for place in PLACES]
# Of ten: a small model hesitates now and then (0.001 between the logprobs of its two best), and a key that is rounded
# the other way then decides. Keys or scales of another block or token leave none.
MOST = 8


def answers(model_file: str, **settings: Any) -> tuple[list[tuple[int, ...]], Any]:
    """Tokens of every answer, and what the scheduler counted."""
    options = {"max_model_len": 128, "max_num_seqs": 10, "threads": 1, "kv_gib": 0.1, **settings}
    with LLM(model_file, **options) as llm:
        return asked(llm), llm._loop.scheduler.stats()


def asked(llm: LLM) -> list[tuple[int, ...]]:
    """Of each answer the first 24 tokens; they go on, so that memory runs out."""
    found = llm.generate(PROMPTS, temperature=0, max_tokens=30, ignore_eos=True)
    return [tuple(answer.tokens[:24]) for answer in found]


def alike(found: list[tuple[int, ...]], wanted: list[tuple[int, ...]]) -> int:
    return sum(ours == theirs for ours, theirs in zip(found, wanted, strict=True))


def test_bfloat16_says_what_float32_says(model_file: str, llm: LLM) -> None:
    assert alike(answers(model_file, kv_cache_dtype="bfloat16")[0], asked(llm)) >= MOST


def test_int8_survives_preemption_and_shared_blocks(model_file: str) -> None:
    wanted, _ = answers(model_file, kv_cache_dtype="int8", prefix_caching=False)
    # 16 blocks hold ten prompts, but not their answers, and this policy lets all of them in at once.
    found, counted = answers(model_file, kv_cache_dtype="int8", kv_gib=0.003, policy="decode_first")
    assert counted.preemptions > 0
    assert counted.prefix_hits_tokens > 0
    assert alike(found, wanted) >= MOST
