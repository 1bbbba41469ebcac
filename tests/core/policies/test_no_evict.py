"""no_evict as TensorRT-LLM's GUARANTEED_NO_EVICT behaves: worst case reserved, nobody ever paused."""

from __future__ import annotations

import pytest

from tests.core.policies.timeline import Timeline


def test_a_request_starts_only_when_all_can_run_to_their_limits() -> None:
    run = Timeline("no_evict", num_blocks=12)
    run.ask("a", 8, 9)
    run.steps(1)
    run.ask("b", 16, 17)
    run.ask("c", 4, 2)
    run.finish()
    run.shows(
        """
        0: a+8
        1: a+1 b+16 (c)
        2-7: a+1 b+1 (c)
        8: a+1. b+1 (c)
        9: b+1 c+4
        10: b+1 c+1.
        11-16: b+1
        17: b+1.
        """
    )
    assert not any(finish.preemptions for finish in run.finishes.values())


def test_nobody_overtakes_a_head_whose_worst_case_does_not_fit() -> None:
    run = Timeline("no_evict", num_blocks=8)
    run.ask("a", 8, 13)
    run.ask("b", 8, 9)
    run.ask("c", 2, 2)
    run.steps(2)
    run.shows("0: a+8 (b c)\n1: a+1 (b c)")


def test_prompts_go_whole_inside_the_budget_and_a_larger_one_alone() -> None:
    run = Timeline("no_evict", max_num_tokens=10)
    run.ask("a", 4, 6)
    run.steps(1)
    run.ask("b", 8, 2)
    run.ask("c", 8, 2)
    run.ask("d", 20, 2)
    run.finish()
    run.shows(
        """
        0: a+4
        1: a+1 b+8 (c d)
        2: a+1 b+1. c+8 (d)
        3: a+1 c+1. (d)
        4: a+1 (d)
        5: a+1. (d)
        6: d+20
        7: d+1.
        """
    )


@pytest.mark.parametrize(
    ("chunking", "lines"),
    [
        ("first_come", "1: a+1 b+8 (c)\n2: a+1 b+4 c+4\n3: a+1 b+1. c+2\n4: a+1 c+1.\n5: a+1."),
        ("equal_progress", "1: a+1 b+4 c+4\n2: a+1 b+4 c+2\n3: a+1 c+1. b+4\n4: a+1 b+1.\n5: a+1."),
    ],
)
def test_chunks_share_what_generation_leaves_of_the_budget(chunking: str, lines: str) -> None:
    run = Timeline("no_evict", max_num_tokens=10, chunking=chunking, unit=4)
    run.ask("a", 4, 6)
    run.steps(1)
    run.ask("b", 12, 2)
    run.ask("c", 6, 2)
    run.finish()
    run.shows("0: a+4\n" + lines)


def test_shared_blocks_are_reserved_once() -> None:
    shared = tuple(range(1, 13))
    run = Timeline("no_evict", num_blocks=8)
    run.ask("a", shared, 5)
    run.ask("b", (*shared, 40, 40, 40), 6)
    run.ask("c", 12, 2)
    run.finish()
    run.shows(
        """
        0: a+12 (b c)
        1: a+1 b+3 (c)
        2-3: a+1 b+1 (c)
        4: a+1. b+1 (c)
        5: b+1 (c)
        6: b+1. (c)
        7: c+12
        8: c+1.
        """
    )


def test_seats_bound_who_runs() -> None:
    run = Timeline("no_evict", max_num_seqs=2)
    run.ask("a", 4, 3)
    run.ask("b", 4, 2)
    run.ask("c", 4, 2)
    run.finish()
    run.shows("0: a+4 b+4 (c)\n1: a+1 b+1. (c)\n2: a+1. c+4\n3: c+1.")
