"""decode_first as vLLM's V1 scheduler behaves: running before waiting under one budget, last admitted gives way."""

from __future__ import annotations

import pytest

from tests.core.policies.timeline import Timeline


def test_newcomers_get_what_is_left_of_the_budget_in_chunks() -> None:
    run = Timeline("decode_first", max_num_batched_tokens=10)
    run.ask("a", 4)
    run.steps(1)
    run.ask("b", 30)
    run.ask("c", 6)
    run.finish()
    run.shows(
        """
        0: a+4
        1-2: a+1 b+9 (c)
        3: a+1. b+9 (c)
        4: b+3 c+6
        5-6: b+1 c+1
        7: b+1. c+1.
        """
    )


def test_an_older_prefill_takes_its_tokens_before_a_younger_decode() -> None:
    run = Timeline("decode_first", max_num_batched_tokens=6, long_prefill_threshold=5)
    run.ask("a", 16, 2)
    run.ask("b", 1, 6)
    run.finish()
    run.shows(
        """
        0-2: a+5 b+1
        3: a+1 b+1
        4: a+1. b+1
        5: b+1.
        """
    )


def test_a_long_prefill_is_held_to_the_threshold_even_alone() -> None:
    run = Timeline("decode_first", max_num_batched_tokens=12, long_prefill_threshold=4)
    run.ask("a", 10)
    run.ask("b", 10)
    run.ask("c", 2)
    run.finish()
    run.shows(
        """
        0: a+4 b+4 c+2
        1: a+4 b+4 c+1
        2: a+2 b+2 c+1
        3: a+1 b+1 c+1.
        4: a+1 b+1
        5: a+1. b+1.
        """
    )


def test_without_memory_the_last_admitted_gives_way_and_goes_to_the_head() -> None:
    run = Timeline("decode_first", num_blocks=6, prefix_caching=False)
    for name in "abc":
        run.ask(name, 8, 12)
    run.ask("d", 2, 2)
    run.finish()
    run.shows(
        """
        0: a+8 b+8 c+8 (d)
        1: a+1 b+1 | -c (c d)
        2-4: a+1 b+1 (c d)
        5: a+1 | -b (b c d)
        6-10: a+1 (b c d)
        11: a+1. (b c d)
        12: b+13 (c d)
        13-17: b+1 (c d)
        18: b+1. (c d)
        19: c+9 d+2
        20: c+1 d+1.
        21-28: c+1
        29: c+1.
        """
    )


def test_a_resumed_request_finds_those_of_its_blocks_that_nobody_took() -> None:
    run = Timeline("decode_first", num_blocks=9)
    run.ask("a", 12, 12)
    run.ask("b", 12, 9)
    run.finish()
    run.shows(
        """
        0: a+12 b+12
        1-4: a+1 b+1
        5: a+1 | -b (b)
        6-10: a+1 (b)
        11: a+1. (b)
        12: b+5
        13-14: b+1
        15: b+1.
        """
    )
    assert run.finishes["b"].recomputed_tokens == 4, "it had 16 tokens of KV; three blocks of four were still there"


def test_by_priority_the_lowest_waits_and_the_lowest_gives_way() -> None:
    run = Timeline("decode_first", num_blocks=6, prefix_caching=False, order="priority")
    run.ask("a", 8, 12, priority=2)
    run.ask("b", 8, 12, priority=0)
    run.ask("c", 8, 12, priority=1)
    run.steps(1)
    run.ask("d", 2, 2, priority=1)
    run.finish()
    run.shows(
        """
        0: b+8 c+8 a+8
        1: b+1 c+1 | -a (a d)
        2-4: b+1 c+1 (a d)
        5: b+1 | -c (c a d)
        6-10: b+1 (c a d)
        11: b+1. (c a d)
        12: c+13 d+2 (a)
        13: c+1 d+1. (a)
        14-17: c+1 (a)
        18: c+1. (a)
        19: a+9
        20-28: a+1
        29: a+1.
        """
    )


def test_by_priority_nobody_who_runs_is_displaced_for_a_seat() -> None:
    run = Timeline("decode_first", max_num_seqs=1, order="priority")
    run.ask("a", 8, 4, priority=9)
    run.steps(1)
    run.ask("b", 8, 2, priority=5)
    run.ask("c", 8, 2, priority=0)
    run.finish()
    run.shows(
        """
        0: a+8
        1-2: a+1 (b c)
        3: a+1. (b c)
        4: c+8 (b)
        5: c+1. (b)
        6: b+8
        7: b+1.
        """
    )


@pytest.mark.parametrize(
    ("watermark", "lines"),
    [
        (0.0, "0: a+12 b+12 c+4\n1: a+1 b+1. c+1.\n2-7: a+1\n8: a+1."),
        (0.5, "0: a+12 (b c)\n1-7: a+1 (b c)\n8: a+1. (b c)\n9: b+12 c+4\n10: b+1. c+1."),
    ],
)
def test_the_watermark_keeps_blocks_free_while_somebody_runs(watermark: float, lines: str) -> None:
    run = Timeline("decode_first", num_blocks=10, watermark=watermark)
    run.ask("a", 12, 9)
    run.ask("b", 12, 2)
    run.ask("c", 4, 2)
    run.finish()
    run.shows(lines)


def test_without_chunks_the_line_stops_at_a_prompt_beyond_the_budget_until_it_can_go_alone() -> None:
    run = Timeline("decode_first", max_num_batched_tokens=8, chunked=False)
    run.ask("a", 4, 3)
    run.steps(1)
    run.ask("b", 12, 2)
    run.ask("c", 2, 2)
    run.finish()
    run.shows(
        """
        0: a+4
        1: a+1 (b c)
        2: a+1. (b c)
        3: b+12 (c)
        4: b+1. c+2
        5: c+1.
        """
    )


@pytest.mark.parametrize(
    ("reserve_whole", "lines"),
    [
        (True, "0: a+8\n1: a+8 (b)\n2: a+1. (b)\n3-5: b+8\n6: b+1."),
        (False, "0: a+8\n1: a+8 (b)\n2: a+1. b+7\n3-4: b+8\n5: b+1\n6: b+1."),
    ],
)
def test_admission_needs_room_for_all_that_is_known(reserve_whole: bool, lines: str) -> None:
    run = Timeline(
        "decode_first", num_blocks=8, max_num_batched_tokens=8, reserve_whole=reserve_whole, prefix_caching=False
    )
    run.ask("a", 16, 2)
    run.steps(1)
    run.ask("b", 24, 2)
    run.finish()
    run.shows(lines)
