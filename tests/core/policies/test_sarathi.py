"""sarathi as Sarathi-Serve describes it: a fixed chunk a step, decodes first, nobody who generates ever stalls."""

from __future__ import annotations

from tests.core.policies.timeline import Timeline


def test_decodes_then_prefills_under_way_then_newcomers_inside_one_chunk() -> None:
    run = Timeline("sarathi", chunk=8)
    run.ask("b", 2, 6)
    run.steps(1)
    run.ask("a", 20, 3)
    run.ask("c", 6, 3)
    run.finish()
    run.shows(
        """
        0: b+2
        1-2: b+1 a+7 (c)
        3: b+1 a+6 c+1
        4: b+1 a+1 c+5
        5: b+1. a+1. c+1
        6: c+1.
        """
    )


def test_a_younger_decode_goes_before_an_older_prefill() -> None:
    run = Timeline("sarathi", chunk=8)
    run.ask("a", 22, 2)
    run.steps(2)
    run.ask("b", 2, 6)
    run.finish()
    run.shows(
        """
        0-1: a+8
        2: a+6 b+2
        3: a+1. b+1
        4-6: b+1
        7: b+1.
        """
    )


def test_more_decodes_than_the_chunk_holds_are_never_admitted() -> None:
    run = Timeline("sarathi", chunk=4)
    for name in "abcdef":
        run.ask(name, 2, 4)
    run.finish()
    run.shows(
        """
        0: a+2 b+2 (c d e f)
        1: a+1 b+1 c+2 (d e f)
        2: a+1 b+1 c+1 d+1 (e f)
        3: a+1. b+1. c+1 d+1 (e f)
        4: c+1. d+1 e+2 (f)
        5: d+1 e+1 f+2
        6: d+1. e+1 f+1
        7: e+1. f+1
        8: f+1.
        """
    )


def test_the_chunk_is_bounded_by_the_server_wide_budget() -> None:
    run = Timeline("sarathi", chunk=512, max_num_batched_tokens=8)
    run.ask("a", 12, 1)
    run.finish()
    run.shows("0: a+8\n1: a+4.")


def test_without_memory_the_last_admitted_gives_way() -> None:
    run = Timeline("sarathi", num_blocks=6, prefix_caching=False)
    for name in "abc":
        run.ask(name, 8, 9)
    run.finish()
    run.shows(
        """
        0: a+8 b+8 c+8
        1: a+1 b+1 | -c (c)
        2-4: a+1 b+1 (c)
        5: a+1 | -b (b c)
        6-7: a+1 (b c)
        8: a+1. (b c)
        9: b+13 (c)
        10-11: b+1 (c)
        12: b+1. (c)
        13: c+9
        14-19: c+1
        20: c+1.
        """
    )
