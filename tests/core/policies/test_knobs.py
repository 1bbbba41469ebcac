"""Bad input: an unknown policy, an unknown knob, or a value it cannot take is one line that says what is accepted."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest

from paceline.core.policies.registry import ALIASES, POLICIES, make_policy
from paceline.errors import ConfigError


def test_an_unknown_policy_is_answered_with_all_there_are() -> None:
    with pytest.raises(ConfigError, match="policy is 'lifo'; it must be one of") as caught:
        make_policy("lifo")
    assert all(name in str(caught.value) for name in [*POLICIES, *ALIASES])


@pytest.mark.parametrize("name", [*POLICIES, *ALIASES])
def test_every_name_makes_a_policy_and_refuses_a_knob_it_has_not(name: str) -> None:
    policy = make_policy(name)
    assert is_dataclass(policy)
    with pytest.raises(ConfigError, match=f"policy {name} has no option 'wheel'; it has ") as caught:
        make_policy(name, [("wheel", 1)])
    assert all(entry.name in str(caught.value) for entry in fields(policy) if entry.init)


@pytest.mark.parametrize(
    ("name", "option", "value", "accepted"),
    [
        ("decode_first", "order", "random", "one of fcfs, priority"),
        ("decode_first", "long_prefill_threshold", -1, "at least 0"),
        ("decode_first", "watermark", 1.5, "between 0 and 1"),
        ("decode_first", "watermark", float("nan"), "between 0 and 1"),
        ("decode_first", "chunked", 1, "of type bool"),
        ("dynamic", "batch_size", 0, "at least 1"),
        ("dynamic", "delay_s", -0.1, "at least 0"),
        ("max_utilization", "chunking", "tiny", "one of whole, first_come, equal_progress"),
        ("no_evict", "unit", 0, "at least 1"),
        ("no_evict", "max_num_tokens", 0, "at least 1"),
        ("prefill_first", "order", "random", "one of fcfs, priority, lof, lpm, dfs_weight, hrrn"),
        ("prefill_first", "chunk", -1, "at least 0"),
        ("prefill_first", "interval", -1, "at least 0"),
        ("prefill_first", "conservativeness", -0.5, "at least 0"),
        ("prefill_first", "mixed", "yes", "of type bool"),
        ("sarathi", "chunk", 0, "at least 1"),
        ("sarathi", "chunk", True, "of type int"),
        ("sarathi", "chunk", "512", "of type int"),
        ("slo", "pace", "fast", "one of even, gap, timeline"),
        ("slo", "stretch", 0.5, "at least 1"),
        ("static", "batch_size", -3, "at least 1"),
        ("static_batch", "chunking", "", "one of whole, first_come, equal_progress"),
    ],
)
def test_a_value_it_cannot_take_is_named_with_what_it_can(name: str, option: str, value: object, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_policy(name, [(option, value)])
    message = str(caught.value)
    assert message.startswith(f"policy option {option} is {value!r}; it must be ")
    assert accepted in message
    assert "\n" not in message


def test_a_whole_number_will_do_for_a_fraction() -> None:
    assert make_policy("dynamic", [("delay_s", 3)]) == make_policy("dynamic", [("delay_s", 3.0)])
