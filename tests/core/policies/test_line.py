"""The line: whose tenant has had more than others, and whose less."""

from __future__ import annotations

from paceline.core.classes import TrafficClass
from paceline.core.policies.parts.line import CREDIT, Line
from paceline.core.request import Request
from tests.core.driver import spec

CHAT = TrafficClass("chat", ttft_s=2.0, itl_s=0.1)


def newcomer(line: Line, tenant: str, number: int = 0) -> Request:
    asked = spec(f"{tenant}{number}", (1, 2, 3), 4, stop=(), traffic_class="chat", tenant=tenant)
    request = Request(asked, CHAT, float(number), max_model_len=64)
    line.add(request)
    return request


def test_one_tenant_alone_is_neither_ahead_nor_behind() -> None:
    line = Line()
    only = newcomer(line, "a")
    line.charge(only, 100_000)
    assert not line.ahead(only)
    assert not line.behind(only)


def test_tenants_who_take_turns_are_neither() -> None:
    line = Line()
    for number in range(200):
        one, other = newcomer(line, "a", number), newcomer(line, "b", number)
        for request in (one, other):
            assert not line.ahead(request)
            assert not line.behind(request)
            line.charge(request, 400)
            line.leave(request)


def test_a_flood_is_ahead_of_a_tenant_that_was_here_lately_and_that_one_behind() -> None:
    line = Line()
    flood, quiet = newcomer(line, "a"), newcomer(line, "b")
    line.charge(quiet, 200)
    line.end(quiet)
    line.charge(flood, int(200 + CREDIT))
    assert line.ahead(flood)
    again = newcomer(line, "b", 1)
    assert line.behind(again)
    assert not line.ahead(again)
    line.charge(again, int(2 * CREDIT))
    assert not line.ahead(flood), "whoever has caught up is owed nothing"
    assert line.behind(flood)


def test_a_tenant_that_stays_away_is_forgotten_and_nothing_spared_for_it() -> None:
    line = Line()
    line.end(newcomer(line, "b"))
    flood = newcomer(line, "a")
    for number in range(1000):
        line.leave(flood)
        flood = newcomer(line, "a", number)
        line.punctual(lambda request: True)
        line.charge(flood, 100)
    assert not line.ahead(flood)


def test_nobody_is_behind_a_flood_that_is_gone() -> None:
    line = Line()
    flood, quiet = newcomer(line, "a"), newcomer(line, "b")
    line.charge(flood, int(2 * CREDIT))
    assert line.behind(quiet)
    line.end(flood)
    assert not line.behind(quiet)


def test_a_prompt_that_began_because_its_tenant_was_behind_goes_on() -> None:
    line = Line()
    newcomer(line, "a")
    quiet, next_ = newcomer(line, "b"), newcomer(line, "b", 1)
    line.charge(newcomer(line, "a", 1), int(0.75 * CREDIT))
    line.charge(quiet, int(0.5 * CREDIT))
    assert not line.behind(next_), "what it had since counts"
    quiet.planned = int(0.5 * CREDIT)
    assert line.behind(quiet), "but not against itself"
