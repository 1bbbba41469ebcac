"""ITL spikes: what a prefill does to those who are in the middle of an answer, and to short prompts behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.core.classes import BATCH
from paceline.core.shape import StepShape
from tests.core.known_failures.rig import CHAT, Ask, Sim, ask, gpu, start


def big(shape: StepShape) -> float:
    """A large model on a large machine: 20 ms a step, 15,000 tokens/s of prefill, attention that shows at 100,000."""
    return 0.02 + 6.7e-5 * shape.tokens + 1e-8 * shape.context + 4e-10 * shape.pairs


PATIENT = replace(CHAT, name="patient", ttft_s=300.0, itl_s=0.1)


def sim(policy: str, **options: Any) -> Sim:
    return Sim(start(policy, big, num_blocks=60_000, classes=(CHAT, PATIENT, BATCH), budget=8192, **options), big)


def streams(count: int, outputs: int) -> list[Ask]:
    return [ask(0.0, f"s{number}", 64, outputs) for number in range(count)]


def test_streams_go_on_behind_two_prompts_of_300_000_tokens() -> None:
    """sglang#32549: decode starved to a batch in 24 s; one stream stood still for 5 m 19 s behind two such prompts."""
    long = [ask(1.0, f"long{n}", 300_000, 4, kind="patient", ttft_s=600.0) for n in range(2)]
    run = sim("slo").play([*streams(4, 300), *long])
    assert run.worst_gap_s("s") <= 0.1, "no gap beyond the promise"
    assert all(life.kept for life in run.of("long"))
    assert sim("prefill_first").play([*streams(4, 300), *long]).worst_gap_s("s") > 30.0


@pytest.mark.parametrize("kind", ["patient", "batch"])
def test_a_short_prompt_goes_between_the_chunks_of_a_long_one_which_still_finishes(kind: str) -> None:
    """sglang#8211, #10063: first come, first served with one chunked request: a short one waits for 128k tokens."""
    long = [ask(0.0, f"long{n}", 128_000, 2, kind=kind) for n in range(3)]
    shorts = [ask(0.5 + 0.5 * n, f"short{n}", 200, 20) for n in range(40)]
    run = sim("slo").play([*long, *shorts])
    assert run.kept("short") == 1.0
    alone = sim("slo").play(long).ttft_s("long")
    assert run.ttft_s("long") < 1.5 * alone, "and hardly pays for it"
    assert sim("prefill_first").play([*long, *shorts]).ttft_s("short") > 20.0


def test_a_long_prompt_is_not_starved_by_an_endless_stream_of_short_ones() -> None:
    """sglang#8211, the other way round: the long one ages, although shorter ones with earlier deadlines keep coming."""
    shorts = [ask(0.075 * n, f"short{n}", 600, 4) for n in range(1400)]  # nine tenths of the machine, for 100 s
    run = sim("slo").play([ask(1.0, "long", 30_000, 2, kind="batch"), *shorts])
    assert run.ttft_s("long") < 60.0
    assert run.kept("short") > 0.95


def test_decoding_slows_down_by_a_bounded_factor_while_a_long_prompt_is_computed() -> None:
    """local-inference-lab/vllm#541: 270 tokens/s fell to 6.6 while a 64K prompt was prefilled, its TTFT worse too."""
    asks = [*streams(1, 400), ask(1.0, "long", 64_000, 2, kind="patient")]
    run, vllm = sim("slo").play(asks), sim("decode_first").play(asks)
    assert run.worst_gap_s("s") <= 0.1, "five times a step alone, as promised"
    assert vllm.worst_gap_s("s") > 0.5, "thirty times"
    assert run.ttft_s("long") < 1.35 * vllm.ttft_s("long"), "for little of the newcomer's time"


@pytest.mark.parametrize("itl_s", [0.03, 0.05, 0.1, 0.2])
def test_spikes_stay_below_whatever_is_promised(itl_s: float) -> None:
    """vllm#5579, #3130: chunked prefill bounds a spike by a constant; here the promise bounds it."""
    kind = replace(CHAT, itl_s=itl_s)
    run = Sim(start("slo", gpu, classes=(kind, PATIENT, BATCH)), gpu)
    prompts = [ask(0.5 + 0.7 * n, f"p{n}", 3000, 8, kind="patient") for n in range(10)]
    run.play([*streams(16, 250), *prompts])
    assert run.gap_s("s", 0.97) <= itl_s
    assert all(life.kept for life in run.of("p"))


def test_batch_decodes_give_way_to_the_pace_of_those_who_were_promised_one() -> None:
    """Of the same kind: streams slow down because of how many others decode, not because of any prefill."""
    bulk = [ask(0.0, f"bulk{n}", 20, 400, kind="batch") for n in range(40)]  # alone they fill 110 ms of a step
    chats = [ask(6.0, f"s{n}", 30, 100) for n in range(8)]  # for ten seconds
    run = Sim(start("slo")).play([*bulk, *chats])
    assert run.gap_s("s", 0.95) <= 0.1
    assert run.worst_gap_s("bulk") < 2.0, "they take turns"
    assert Sim(start("decode_first")).play([*bulk, *chats]).kept("s") == 0.0


def test_those_who_fill_a_step_up_do_not_hold_first_tokens_back_to_the_last_moment() -> None:
    """Of the same kind: with work for every spare millisecond, a first token would come exactly at its deadline."""
    bulk = [ask(0.0, f"bulk{n}", 900, 2, kind="batch") for n in range(40)]
    run = Sim(start("slo")).play([*bulk, *(ask(1.3 + 2.0 * n, f"c{n}", 100, 2) for n in range(12))])
    assert run.ttft_s("c") < 0.8 * 2.0


def test_a_crowd_that_has_grown_too_large_shrinks_again() -> None:
    """Of the same kind: contexts grow, and a batch that kept its pace no longer does; more must not join it then."""

    def law(shape: StepShape) -> float:
        return 0.02 + 0.001 * shape.tokens + 2e-6 * shape.context

    streams = [ask(0.0, f"s{n}", 30, 900) for n in range(40)]  # 62 ms a step at first, 130 ms by the end
    late = [ask(30.0 + n, f"n{n}", 60, 20) for n in range(30)]
    run = Sim(start("slo", law), law).play([*streams, *late])
    assert run.worst_gap_s("s") < 0.16, "never twice what its decodes take"


def test_two_paces_in_one_batch_are_both_kept() -> None:
    """Of the same kind: one class's loose pace must not become the other's."""
    slow = replace(CHAT, name="slow", itl_s=0.4)
    run = Sim(start("slo", classes=(CHAT, slow, BATCH)))
    asks = [ask(0.0, f"f{n}", 30, 200) for n in range(4)] + [ask(0.0, f"w{n}", 30, 60, kind="slow") for n in range(4)]
    run.play(asks + [ask(1.0 + 2 * n, f"n{n}", 700, 2, kind="slow") for n in range(6)])
    assert run.gap_s("f", 1.0) <= 0.1
    assert run.gap_s("w", 1.0) <= 0.4
