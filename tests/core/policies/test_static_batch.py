"""static_batch as TensorRT-LLM's STATIC_BATCH behaves: a new batch only when the old one has drained."""

from __future__ import annotations

from tests.core.policies.timeline import Timeline


def test_newcomers_wait_until_all_who_run_have_ended() -> None:
    run = Timeline("static_batch")
    run.ask("a", 8, 2)
    run.ask("b", 8, 5)
    run.steps(1)
    run.ask("c", 8, 2)
    run.finish()
    run.shows(
        """
        0: a+8 b+8
        1: a+1. b+1 (c)
        2-3: b+1 (c)
        4: b+1. (c)
        5: c+8
        6: c+1.
        """
    )


def test_a_batch_is_who_fits_the_budget_of_its_first_step() -> None:
    run = Timeline("static_batch", max_num_tokens=12, chunking="first_come", unit=4)
    for name, outputs in (("a", 2), ("b", 3), ("c", 2)):
        run.ask(name, 8, outputs)
    run.finish()
    run.shows(
        """
        0: a+8 b+4 (c)
        1: a+1. b+4 (c)
        2: b+1 (c)
        3: b+1. (c)
        4: c+8
        5: c+1.
        """
    )


def test_memory_is_reserved_for_the_worst_case() -> None:
    run = Timeline("static_batch", num_blocks=8)
    run.ask("a", 8, 13)
    run.ask("b", 8, 9)
    run.steps(2)
    run.shows("0: a+8 (b)\n1: a+1 (b)")
