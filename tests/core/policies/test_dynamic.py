"""dynamic: a batch closes on size or on a delay, and runs to its end (Triton's dynamic batcher)."""

from __future__ import annotations

from tests.core.policies.timeline import Timeline


def test_a_batch_closes_when_its_oldest_has_waited_for_the_delay() -> None:
    run = Timeline("dynamic", batch_size=3, delay_s=2.5, clock=True)
    run.ask("a", 8, 3)
    assert run.scheduler.plan(run.now) is None
    assert run.scheduler.wake_s == 2.5
    run.now = 2.0
    run.ask("b", 4, 2)
    run.finish()
    run.shows("2.5: a+8 b+4\n3.5: a+1 b+1.\n4.5: a+1.")


def test_a_full_batch_closes_at_once_and_the_next_after_its_end() -> None:
    run = Timeline("dynamic", batch_size=2, delay_s=0.5, clock=True)
    run.ask("a", 8, 3)
    run.ask("b", 4, 2)
    run.ask("c", 4, 2)
    run.finish()
    run.shows(
        """
        0: a+8 b+4 (c)
        1: a+1 b+1. (c)
        2: a+1. (c)
        3: c+4
        4: c+1.
        """
    )


def test_the_defaults_are_eight_and_fifty_milliseconds() -> None:
    run = Timeline("dynamic", clock=True)
    for name in "abcdefghi":
        run.ask(name, 4, 1)
    run.finish()
    run.shows("0: a+4. b+4. c+4. d+4. e+4. f+4. g+4. h+4. (i)\n1: i+4.")
