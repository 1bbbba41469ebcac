"""prefill_first as SGLang's scheduler behaves: a step prefills or decodes, newcomers first, memory by an estimate."""

from __future__ import annotations

import pytest

from tests.core.policies.timeline import Timeline

SHARED = tuple(range(1, 41))  # ten blocks


def test_whoever_waits_goes_first_and_everybody_else_stands_still() -> None:
    run = Timeline("prefill_first", chunk=16)
    run.ask("a", 8, 6)
    run.steps(2)
    run.ask("b", 40)
    run.ask("c", 8)
    run.finish()
    run.shows(
        """
        0: a+8
        1: a+1
        2-3: b+16 (c)
        4: b+8 c+8
        5-6: a+1 b+1 c+1
        7: a+1 b+1. c+1.
        8: a+1.
        """
    )


def test_decodes_between_the_chunks_only_with_an_interval() -> None:
    run = Timeline("prefill_first", chunk=16, interval=2)
    run.ask("a", 8, 8)
    run.steps(2)
    run.ask("b", 40, 2)
    run.finish()
    run.shows(
        """
        0: a+8
        1: a+1
        2: a+1 (b)
        3: b+16
        4-5: a+1
        6: b+16
        7-8: a+1
        9: b+8
        10: a+1. b+1.
        """
    )


def test_mixed_lets_decodes_ride_along_inside_the_chunk() -> None:
    run = Timeline("prefill_first", chunk=16, mixed=True)
    run.ask("a", 8, 8)
    run.steps(2)
    run.ask("b", 40, 2)
    run.finish()
    run.shows(
        """
        0: a+8
        1: a+1
        2: b+12 a+1
        3: b+15 a+1
        4: b+13 a+1
        5: a+1 b+1.
        6: a+1
        7: a+1.
        """
    )


def test_without_chunks_prompts_go_whole_and_the_first_of_a_step_may_be_too_long() -> None:
    run = Timeline("prefill_first", chunk=0, max_prefill_tokens=16)
    for name, length in (("a", 8), ("b", 8), ("c", 4), ("d", 40), ("e", 4)):
        run.ask(name, length, 2)
    run.finish()
    run.shows(
        """
        0: a+8 b+8 (c d e)
        1: c+4 (d e)
        2: d+40 (e)
        3: e+4
        4: a+1. b+1. c+1. d+1. e+1.
        """
    )


def test_max_prefill_tokens_bounds_a_larger_chunk() -> None:
    run = Timeline("prefill_first", chunk=32, max_prefill_tokens=16)
    run.ask("a", 40, 2)
    run.finish()
    run.shows("0-1: a+16\n2: a+8\n3: a+1.")


@pytest.mark.parametrize(
    ("conservativeness", "admitted"),
    [(0.0, "2: b+16\n3: a+1 b+1"), (1.0, "2: b+16\n3: a+1 b+1"), (2.0, "2-3: a+1 (b)")],
)
def test_newcomers_must_fit_beside_what_the_running_are_expected_to_use(conservativeness: float, admitted: str) -> None:
    run = Timeline("prefill_first", num_blocks=20, conservativeness=conservativeness, prefix_caching=False)
    run.ask("a", 8, 40)
    run.steps(2)
    run.ask("b", 16, 20)
    run.steps(2)
    run.shows("0: a+8\n1: a+1\n" + admitted)


@pytest.mark.parametrize(("decodes", "lines"), [(2, "2-3: a+1 (b)"), (300, "300: b+16\n301: a+1 b+1")])
def test_the_estimate_sinks_while_all_goes_well(decodes: int, lines: str) -> None:
    run = Timeline("prefill_first", num_blocks=400, prefix_caching=False)
    run.ask("a", 8, 1000)
    run.steps(decodes)
    run.lines.clear()
    run.ask("b", 16, 900)
    run.steps(2)
    run.shows(lines)


@pytest.mark.parametrize(("length", "line"), [(8, "31: c+8 (b)"), (12, "31: a+1 (c b)")])
def test_retraction_takes_the_fewest_outputs_to_the_tail_and_raises_the_estimate(length: int, line: str) -> None:
    run = Timeline("prefill_first", num_blocks=18, conservativeness=0.0, prefix_caching=False)
    run.ask("a", 8, 40)
    run.steps(2)
    run.ask("b", 8, 40)
    run.steps(28)
    run.ask("c", length, length // 2)
    run.steps(2)
    run.shows(
        f"""
        0: a+8
        1: a+1
        2: b+8
        3-29: a+1 b+1
        30: a+1 | -b (c b)
        {line}
        """
    )


def test_a_prompt_under_way_is_not_retracted_while_another_can_be() -> None:
    run = Timeline("prefill_first", num_blocks=14, conservativeness=0.0, prefix_caching=False, interval=4, chunk=4)
    run.ask("a", 4, 24)
    run.steps(6)
    run.ask("b", 4, 20)
    run.steps(1)
    run.ask("c", 20, 1)
    run.finish()
    run.shows(
        """
        0: a+4
        1-5: a+1
        6: b+4
        7-10: a+1 b+1 (c)
        11: c+4
        12-15: a+1 b+1
        16: c+4
        17-20: a+1 b+1
        21: c+4
        22-24: a+1 b+1
        25: a+1 | -b (b)
        26: c+4 (b)
        27: a+1 (b)
        28: a+1. (b)
        29: c+4. (b)
        30-34: b+4
        35-36: b+1
        37: b+1.
        """
    )


def test_mixed_retracts_too() -> None:
    run = Timeline("prefill_first", num_blocks=11, conservativeness=0.0, prefix_caching=False, mixed=True)
    run.ask("a", 8, 16)
    run.steps(2)
    run.ask("b", 8, 16)
    run.steps(4)
    run.ask("c", 8, 2)
    run.finish()
    run.shows(
        """
        0: a+8
        1: a+1
        2: b+8 a+1
        3-5: a+1 b+1
        6: c+8 a+1 b+1
        7: a+1 b+1 c+1.
        8-14: a+1 b+1
        15: a+1. | -b (b)
        16: b+21
        17: b+1
        18: b+1.
        """
    )


def test_once_full_nobody_is_admitted_until_somebody_leaves() -> None:
    run = Timeline("prefill_first", num_blocks=16, conservativeness=0.0, prefix_caching=False)
    run.ask("a", 8, 20)
    run.ask("b", 8, 8)
    run.ask("c", 28, 4)  # 28 + 4 and a block beside a's 20 and b's 8
    run.finish()
    run.shows(
        """
        0: a+8 b+8 (c)
        1-6: a+1 b+1 (c)
        7: a+1 b+1. (c)
        8: c+28
        9-10: a+1 c+1
        11: a+1 c+1.
        12-19: a+1
        20: a+1.
        """
    )


def warm(order: str, chunk: int) -> Timeline:
    """With the shared prefix in the cache."""
    run = Timeline("prefill_first", order=order, chunk=chunk)
    run.ask("w", SHARED, 1)
    run.finish()
    run.lines.clear()
    return run


@pytest.mark.parametrize(
    ("order", "lines"), [("fcfs", "1: a+44. (b c)\n2: b+4. c+4."), ("lpm", "1: b+4. c+4. a+36\n2: a+8.")]
)
def test_the_longest_cached_prefix_goes_first(order: str, lines: str) -> None:
    run = warm(order, 44)
    run.ask("a", 44, 1)
    run.ask("b", (*SHARED, 77, 77, 77, 77), 1)
    run.ask("c", (*SHARED[:20], 78, 78, 78, 78), 1)
    run.finish()
    run.shows(lines)


def test_of_two_that_share_what_is_not_cached_the_second_goes_last() -> None:
    run = Timeline("prefill_first", order="lpm", chunk=44)
    run.ask("a", (*SHARED, 77), 1)
    run.ask("b", (*SHARED, 78), 1)
    run.ask("c", 40, 1)
    run.finish()
    run.shows("0: a+41. (b c)\n1: b+1. c+40.")


@pytest.mark.parametrize("order", ["lpm", "dfs_weight", "hrrn"])
def test_a_long_queue_is_not_matched(order: str) -> None:
    run = warm(order, 64)
    for number in range(129):
        prompt = (*SHARED, 100 + number) if number == 100 else (100 + number,) * 8
        run.ask(chr(200 + number), prompt, 1)
    run.steps(1)
    assert run.plans[-1].ids == tuple(chr(200 + number) for number in range(8)), "first come, first served"


@pytest.mark.parametrize(("order", "ran"), [("fcfs", "a b c d e"), ("dfs_weight", "c d b a e")])
def test_the_heaviest_subtree_goes_first_and_its_leaves_before_it(order: str, ran: str) -> None:
    run = warm(order, 8)
    run.ask("a", 8, 1)
    run.ask("b", (*SHARED[:8], *(77,) * 8), 1)
    run.ask("c", (*SHARED[:36], *(78,) * 8), 1)
    run.ask("d", (*SHARED[:36], *(79,) * 8), 1)
    run.ask("e", 8, 1)
    run.finish()
    assert " ".join(name for plan in run.plans[-5:] for name in plan.ids) == ran


def test_the_longest_output_goes_first() -> None:
    run = Timeline("prefill_first", order="lof", chunk=8)
    run.ask("a", 8, 2)
    run.ask("b", 8, 9)
    run.ask("c", 8, 5)
    run.steps(3)
    run.shows("0: b+8 (a c)\n1: c+8 (a)\n2: a+8")


def test_priority_is_a_queue_order() -> None:
    run = Timeline("prefill_first", order="priority", chunk=8)
    run.ask("a", 8, 2, priority=2)
    run.ask("b", 8, 9, priority=1)
    run.ask("c", 8, 5, priority=1)
    run.steps(3)
    run.shows("0: b+8 (a c)\n1: c+8 (a)\n2: a+8")


def test_the_highest_response_ratio_prefers_short_ones_and_ages_all() -> None:
    run = Timeline("prefill_first", order="hrrn", chunk=16)
    run.ask("a", 32, 1)
    run.ask("b", 48, 1)
    run.steps(1)
    run.ask("c", 4, 1)
    run.ask("d", 32, 1)
    run.finish()
    run.shows(
        """
        0: a+16 (b)
        1: a+16. (b c d)
        2: c+4. b+12 (d)
        3-4: b+16 (d)
        5: b+4. d+12
        6: d+16
        7: d+4.
        """
    )


def test_who_came_during_a_long_prompt_ages_by_it() -> None:
    run = Timeline("prefill_first", order="hrrn", chunk=16)
    run.ask("a", 48, 1)
    run.steps(1)
    run.ask("b", 60, 1)
    run.steps(1)
    run.ask("c", 32, 1)
    run.steps(2)
    run.shows("0: a+16\n1: a+16 (b)\n2: a+16. (b c)\n3: b+16 (c)")


def test_seats_bound_who_runs() -> None:
    run = Timeline("prefill_first", max_num_seqs=2)
    run.ask("a", 8, 4)
    run.ask("b", 8, 2)
    run.ask("c", 8, 2)
    run.finish()
    run.shows(
        """
        0: a+8 b+8 (c)
        1: a+1 b+1. (c)
        2: c+8
        3: a+1 c+1.
        4: a+1.
        """
    )


def test_a_chunk_below_the_size_of_a_block_still_moves() -> None:
    run = Timeline("prefill_first", chunk=3, block_size=4)
    run.ask("a", 8, 2)
    run.finish()
    run.shows("0-1: a+3\n2: a+2\n3: a+1.")
