"""Small fleets for tests, and the laws every run of one must keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from paceline.core.config import SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.core.step import RequestSpec
from paceline.simulate.backend import STOP
from paceline.simulate.fleet.blueprint import Blueprint, Role
from paceline.simulate.fleet.fleet import Fleet
from paceline.simulate.fleet.journey import Journey, Outcome
from paceline.simulate.fleet.report import FleetRun
from paceline.simulate.traffic import Arrival, ListTraffic
from tests.simulate.laws import Linear


def config(**fields: object) -> SchedulerConfig:
    return SchedulerConfig(**{"num_blocks": 64, "max_model_len": 512, **fields})  # type: ignore[arg-type]


def whole(**fields: object) -> Blueprint:
    return Blueprint(**{"config": config(), "cost": Linear(), **fields})  # type: ignore[arg-type]


def pools(prefill: int, decode: int, **fields: object) -> list[tuple[str, Blueprint]]:
    """xPyD of one blueprint."""
    blueprint = whole(**fields)
    return [(f"p{i}", replace(blueprint, role=Role.PREFILL)) for i in range(prefill)] + [
        (f"d{i}", replace(blueprint, role=Role.DECODE)) for i in range(decode)
    ]


def request(
    number: int, at_s: float = 0.0, prompt: int = 20, output: int = 4, tokens: tuple[int, ...] | None = None
) -> Arrival:
    """One arrival; its prompt is its own unless `tokens` says otherwise."""
    sampling = SamplingParams(max_tokens=output, stop_token_ids=(STOP,))
    spec = RequestSpec(f"q{number}", tokens or (number + 2,) * prompt, sampling, sent_s=at_s)
    return Arrival(at_s, spec, output, index=number)


def run(
    members: list[tuple[str, Blueprint]], arrivals: Iterable[Arrival], *, until_s: float = inf, **options: object
) -> FleetRun:
    """Serve the arrivals, and hold the run to what is true of every run."""
    wanted = list(arrivals)
    ended: list[Journey] = []
    fleet = Fleet(members, on_end=ended.append, **options)  # type: ignore[arg-type]
    result = fleet.run(ListTraffic(wanted), until_s=until_s)
    fleet.check_integrity()
    assert len({journey.request_id for journey in ended}) == len(ended), "a request ended twice"
    assert result.arrived == sum(result.outcomes.values()) + result.unended
    if until_s == inf:
        assert result.arrived == len(wanted)
        assert result.unended == 0
    for journey in result.done:
        check(journey)
    return result


def check(journey: Journey) -> None:
    """An answered request got every token once, in order of time, after it came."""
    assert journey.outcome is Outcome.DONE
    assert journey.tokens == journey.arrival.output_tokens
    assert journey.token_s == sorted(journey.token_s)
    assert journey.token_s[0] > journey.arrival.at_s
    assert journey.ended_s == journey.token_s[-1]
