"""orca as its paper describes it: iteration-level batching, whole prefills, memory reserved for the maximum."""

from __future__ import annotations

from tests.core.policies.timeline import Timeline


def test_requests_join_and_leave_at_every_step_as_whole_prompts() -> None:
    run = Timeline("orca")
    run.ask("a", 8, 4)
    run.steps(1)
    run.ask("b", 500, 2)
    run.ask("c", 300, 2)
    run.finish()
    run.shows(
        """
        0: a+8
        1: a+1 b+500 c+300
        2: a+1 b+1. c+1.
        3: a+1.
        """
    )


def test_memory_is_reserved_for_prompt_and_output() -> None:
    run = Timeline("orca", num_blocks=10)
    run.ask("a", 8, 9)
    run.steps(1)
    run.ask("b", 16, 9)
    run.ask("c", 4, 2)
    run.finish()
    run.shows(
        """
        0: a+8
        1: a+1 b+16 (c)
        2-7: a+1 b+1 (c)
        8: a+1. b+1 (c)
        9: b+1. c+4
        10: c+1.
        """
    )


def test_seats_bound_who_runs() -> None:
    run = Timeline("orca", max_num_seqs=1)
    run.ask("a", 8, 2)
    run.ask("b", 4, 1)
    run.finish()
    run.shows("0: a+8 (b)\n1: a+1. (b)\n2: b+4.")
