"""Which texts and seeds the cells of a comparison get."""

from __future__ import annotations

from paceline.measure.compare import plan_cells
from paceline.measure.duel import cell_plan
from paceline.measure.plan import BenchPlan, Load, Target

PLAN = BenchPlan(target=Target(url="http://a"), load=Load(rate=1, requests=1), seed=7)


def texts(cache: str, one_server: bool) -> dict[str, tuple[int, str]]:
    """(seed, salt) by cell: what decides arrivals, lengths and texts."""
    plans = {cell.name: cell_plan(PLAN, cell, cache, one_server) for cell in plan_cells(3, 2, PLAN.seed)}
    return {name: (plan.seed, plan.prompts.salt) for name, plan in plans.items()}


def test_a_pair_on_two_servers_shares_seed_and_texts() -> None:
    cells = texts("cold", one_server=False)
    assert cells["pair00.0A"] == cells["pair00.1B"]
    assert cells["pair01.0B"] == cells["pair01.1A"]
    assert cells["pair00.0A"] != cells["pair01.1A"]


def test_cold_means_that_no_server_sees_a_text_twice() -> None:
    for one_server in (False, True):
        cells = texts("cold", one_server)
        seen = [(("x" if one_server else name[-1]), *value) for name, value in cells.items()]
        assert len(set(seen)) == len(seen)


def test_seeds_within_a_pair_are_equal_whatever_the_cache() -> None:
    for cache in ("cold", "primed"):
        cells = texts(cache, one_server=True)
        assert cells["pair02.0A"][0] == cells["pair02.1B"][0]
        assert cells["aa00.0A"][0] == cells["aa00.1A"][0]


def test_a_primed_cell_repeats_its_pairs_texts() -> None:
    cells = texts("primed", one_server=True)
    assert cells["pair00.0A"] == cells["pair00.1B"]
    assert cells["aa00.0A"] == cells["aa00.1A"]


def test_a_cell_measured_again_has_texts_that_nobody_has_seen() -> None:
    cell = plan_cells(1, 0, 7)[0]
    salts = {cell_plan(PLAN, cell, "cold", one_server=False, attempt=i).prompts.salt for i in range(3)}
    assert len(salts) == 3
