"""What start-up says of promises that this machine cannot keep even for one request alone."""

from __future__ import annotations

import pytest
from tests.core.known_failures.rig import start

from paceline.app.warmup import infeasible_promises
from paceline.core.classes import TrafficClass

# On that machine a token takes 32 ms, a prompt of 128 tokens 288 ms, and 63 more tokens after it 2.3 s in all.


@pytest.mark.parametrize(
    ("kind", "what", "least_ms"),
    [
        (TrafficClass("a", itl_s=0.02), "20 ms between tokens", 32),
        (TrafficClass("a", ttft_s=0.05), "the first token within 50 ms", 288),
        (TrafficClass("a", e2e_s=1.0), "the last token within 1000 ms", 288 + 63 * 32),
    ],
)
def test_each_kind_of_target_is_held_against_one_request_alone(kind: TrafficClass, what: str, least_ms: float) -> None:
    (sentence,) = infeasible_promises(start("slo", classes=(kind,)))
    assert what in sentence
    told_ms = float(sentence.split(" ms: promise at least that")[0].split()[-1])
    assert told_ms == pytest.approx(least_ms, rel=0.1)


def test_nothing_is_said_of_promises_that_can_be_kept() -> None:
    kind = TrafficClass("a", ttft_s=0.5, itl_s=0.05, e2e_s=3.0)
    assert infeasible_promises(start("slo", classes=(kind,))) == []
