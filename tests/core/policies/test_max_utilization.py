"""max_utilization as TensorRT-LLM's MAX_UTILIZATION behaves: admit by the next step's need, pause the last started."""

from __future__ import annotations

import pytest

from tests.core.policies.timeline import Timeline


def test_the_last_started_are_paused_until_the_step_fits_and_keep_their_place() -> None:
    run = Timeline("max_utilization", num_blocks=8, prefix_caching=False)
    for name in "abc":
        run.ask(name, 8, 12)
    run.ask("d", 2, 3)
    run.finish()
    run.shows(
        """
        0: a+8 b+8 c+8 d+2
        1: a+1 b+1 | -d -c (c d)
        2-8: a+1 b+1 (c d)
        9: a+1 | -b (b c d)
        10: a+1 (b c d)
        11: a+1. (b c d)
        12: b+17 c+9 (d)
        13: b+1 c+1 (d)
        14: b+1. c+1 (d)
        15: c+1 d+3
        16: c+1 d+1.
        17-21: c+1
        22: c+1.
        """
    )


def test_nobody_is_admitted_in_a_step_that_paused() -> None:
    run = Timeline("max_utilization", max_num_seqs=2, num_blocks=6, prefix_caching=False)
    run.ask("a", 8, 9)
    run.ask("b", 8, 6)
    run.ask("c", 4, 2)
    run.finish()
    run.shows(
        """
        0: a+8 b+8 (c)
        1-4: a+1 b+1 (c)
        5: a+1 | -b (b c)
        6-7: a+1 (b c)
        8: a+1. (b c)
        9: b+13. c+4
        10: c+1.
        """
    )


def test_a_paused_request_whose_blocks_are_shared_frees_its_own_alone() -> None:
    shared = tuple(range(1, 13))
    run = Timeline("max_utilization", num_blocks=7)
    run.ask("a", shared, 8)
    run.ask("b", (*shared, 40, 40, 40), 9)
    run.finish()
    run.shows(
        """
        0: a+12 b+3
        1-5: a+1 b+1
        6: a+1 | -b (b)
        7: a+1. (b)
        8-9: b+1
        10: b+1.
        """
    )


def test_prompts_go_whole_inside_the_budget_and_a_larger_one_alone() -> None:
    run = Timeline("max_utilization", max_num_tokens=10)
    run.ask("a", 4, 3)
    run.steps(1)
    run.ask("b", 8, 2)
    run.ask("c", 20, 2)
    run.finish()
    run.shows("0: a+4\n1: a+1 b+8 (c)\n2: a+1. b+1. (c)\n3: c+20\n4: c+1.")


@pytest.mark.parametrize(
    ("chunking", "budget", "lines"),
    [
        ("first_come", 8, "0: a+8 (b)\n1: a+4 b+4\n2-3: a+1 b+4\n4: a+1. b+1\n5: b+1\n6: b+1."),
        ("equal_progress", 9, "0-2: a+4 b+4\n3-4: a+1 b+1\n5: a+1. b+1."),
    ],
)
def test_chunks_share_what_generation_leaves_of_the_budget(chunking: str, budget: int, lines: str) -> None:
    run = Timeline("max_utilization", num_blocks=8, max_num_tokens=budget, chunking=chunking, unit=4)
    run.ask("a", 12, 4)
    run.ask("b", 12, 4)
    run.finish()
    run.shows(lines)
