"""The ledger conserves requests and tokens; holdings are a cache of bounded size, least recently used first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.route.policies.holdings import Holdings
from paceline.route.policies.ledger import Ledger


class LedgerLives(RuleBasedStateMachine):
    """Any order of joining, sending, speaking, ending and leaving."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.names: list[str] = []
        self.live: dict[str, str] = {}
        self.tokens: dict[str, int] = {}
        self.count = 0

    @rule(speed=st.sampled_from([0.5, 1.0]))
    def join(self, speed: float) -> None:
        self.count += 1
        self.names.append(f"r{self.count}")
        self.ledger.join(self.names[-1], cache_tokens=100, speed=speed)

    @precondition(lambda self: self.names)
    @rule(data=st.data(), tokens=st.integers(1, 50), hit=st.integers(0, 50))
    def send(self, data: st.DataObject, tokens: int, hit: int) -> None:
        self.count += 1
        name = data.draw(st.sampled_from(self.names))
        self.ledger.sent(f"q{self.count}", name, tokens, min(hit, tokens - 1))
        self.live[f"q{self.count}"] = name

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(1, 3))
    def speak(self, data: st.DataObject, tokens: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.ledger.started(request_id)
        self.ledger.grew(self.live[request_id], tokens)
        self.tokens[request_id] = self.tokens.get(request_id, 0) + tokens

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.ledger.ended(request_id, self.tokens.get(request_id, 0))
        del self.live[request_id]

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names))
        lost = self.ledger.leave(name)
        assert lost == [request_id for request_id, at in self.live.items() if at == name]
        self.names.remove(name)
        self.live = {request_id: at for request_id, at in self.live.items() if at != name}

    @invariant()
    def books_balance(self) -> None:
        self.ledger.check_integrity()
        loads = self.ledger.loads()
        assert [load.name for load in loads] == self.names
        assert sum(load.requests for load in loads) == len(self.live)
        if not self.live:
            assert all(load.waiting_tokens == load.running_tokens == 0 for load in loads)


TestLedgerLives = LedgerLives.TestCase


def test_what_comes_for_a_request_that_is_over_changes_nothing() -> None:
    ledger = Ledger()
    ledger.join("r0")
    ledger.sent("q", "r0", 10)
    ledger.ended("q")
    ledger.started("q")
    ledger.ended("q")
    assert ledger.loads()[0].requests == 0
    with pytest.raises(AssertionError, match="here already"):
        ledger.join("r0")


@given(st.lists(st.lists(st.integers(0, 8), max_size=6, unique=True), max_size=20), st.integers(1, 8))
def test_holdings_match_a_list_kept_by_hand(chains: list[list[int]], capacity: int) -> None:
    holdings, model = Holdings(capacity), list[int]()
    for chain in chains:
        depth = 0
        while depth < len(chain) and chain[depth] in model:
            depth += 1
        assert holdings.match(chain) == depth
        holdings.add(chain)
        model = [block for block in model if block not in chain] + chain[::-1]
        model = model[-capacity:]
        assert len(holdings) == len(model)


def test_the_end_of_a_chain_goes_before_its_start() -> None:
    holdings = Holdings(3)
    holdings.add([1, 2, 3])
    holdings.add([4])
    assert holdings.match([1, 2, 3]) == 2
    holdings.drop([1])
    assert holdings.match([1, 2, 3]) == 0
