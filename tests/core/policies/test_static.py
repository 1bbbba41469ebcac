"""static: a batch waits to be full and runs to its end."""

from __future__ import annotations

from tests.core.policies.timeline import Timeline


def test_a_batch_waits_to_be_full_and_nobody_joins_it_on_the_way() -> None:
    run = Timeline("static", batch_size=2, clock=True)
    run.ask("a", 8, 3)
    assert run.scheduler.plan(run.now) is None
    assert run.scheduler.wake_s == 10.0, "and does not wait for ever"
    run.now = 1.0
    run.ask("b", 4, 5)
    run.steps(1)
    run.ask("c", 4, 2)
    run.ask("d", 4, 2)
    run.finish()
    run.shows(
        """
        1: a+8 b+4
        2: a+1 b+1 (c d)
        3: a+1. b+1 (c d)
        4: b+1 (c d)
        5: b+1. (c d)
        6: c+4 d+4
        7: c+1. d+1.
        """
    )


def test_a_batch_that_never_fills_closes_after_the_delay() -> None:
    run = Timeline("static", batch_size=4, delay_s=2.5, clock=True)
    run.ask("a", 8, 2)
    run.finish()
    run.shows("2.5: a+8\n3.5: a+1.")


def test_a_batch_holds_who_fits_with_the_worst_case_of_all() -> None:
    run = Timeline("static", batch_size=2, num_blocks=8, clock=True)
    run.ask("a", 8, 3)
    run.ask("b", 20, 9)
    run.steps(3)
    run.shows("0: a+8 (b)\n1: a+1 (b)\n2: a+1. (b)")
