"""What a run of a fleet cost, and where its time went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.simulate.fleet.handoff import TransferTotals
from paceline.simulate.fleet.journey import Journey, Outcome
from paceline.simulate.fleet.member import Life, Member

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class TierReport:
    """What a tier was good for, in prompt tokens."""

    name: str
    asked_tokens: int
    held_tokens: int
    reloaded_tokens: int
    link_busy_s: float
    shared: bool


@dataclass(frozen=True, slots=True)
class MemberReport:
    """One member over the whole run."""

    name: str
    role: str
    chip: str
    chips: int
    paid_s: float  # starting and up
    up_s: float
    busy_s: float  # a step was being computed
    steps: int
    tokens: int  # computed, prompts and outputs
    cost: float | None  # in the currency of its price; None without one
    lives: tuple[Life, ...]
    tiers: tuple[TierReport, ...]

    @property
    def utilisation(self) -> float:
        """Share of the time it was up in which it computed."""
        return self.busy_s / self.up_s if self.up_s > 0.0 else 0.0


@dataclass(slots=True)
class FleetRun:
    """The result. Counts of requests add up: arrived = done + rejected + failed + unended."""

    arrived: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    unended: int = 0  # under way when the run was stopped
    lost: int = 0  # tries that died with their engine
    on_way: int = 0  # from a client, or a try that was lost, to the router
    outages: int = 0
    prompt_tokens: int = 0  # of requests that are done
    cached_tokens: int = 0  # of those, not computed by the engine that took the prompt, reloaded ones included
    reloaded_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0  # after preemptions
    end_s: float = 0.0
    transfers: TransferTotals = field(default_factory=TransferTotals)
    members: list[MemberReport] = field(default_factory=list)
    journeys: list[Journey] = field(default_factory=list)

    def count(self, journey: Journey) -> None:
        """A request has ended."""
        outcome = journey.outcome
        assert outcome is not None
        self.outcomes[outcome] += 1
        if outcome is Outcome.DONE:
            self.prompt_tokens += journey.ask.prompt_tokens
            self.cached_tokens += journey.cached_tokens
            self.reloaded_tokens += journey.reloaded_tokens
            self.output_tokens += journey.tokens

    @property
    def done(self) -> list[Journey]:
        """Answered requests, in order of arrival."""
        return [journey for journey in self.journeys if journey.outcome is Outcome.DONE]

    @property
    def hit_share(self) -> float:
        """Share of prompt tokens that were not computed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def cost(self) -> float | None:
        """Of the whole run, starts and idle time included; None where a member has no price."""
        costs = [member.cost for member in self.members]
        return None if None in costs or not costs else sum(cost for cost in costs if cost is not None)

    def cost_per_million(self, *, of: str = "output") -> float | None:
        """Cost of a million tokens: `output`, or `all` (prompts counted too)."""
        tokens = self.output_tokens + (self.prompt_tokens if of == "all" else 0)
        return None if self.cost is None or not tokens else self.cost / tokens * 1e6

    def goodput(self, *, ttft_s: float, tpot_s: float) -> float:
        """Share of the requests that arrived whose first token and mean later token were in time."""
        return self.attainment(lambda j: (j.ttft_s or 0.0) <= ttft_s and (j.tpot_s is None or j.tpot_s <= tpot_s))

    def attainment(self, good: Callable[[Journey], bool]) -> float:
        """Share of the requests that arrived which were answered and for which `good` holds."""
        return sum(good(journey) for journey in self.done) / self.arrived if self.arrived else 0.0


def summed(member: Member) -> MemberReport:
    """A member's lives, added up."""
    blueprint = member.blueprint
    price = blueprint.price_per_chip_hour
    return MemberReport(
        name=member.name,
        role=blueprint.role.value,
        chip=blueprint.chip,
        chips=blueprint.chips,
        paid_s=member.paid_s,
        up_s=sum(life.end_s - life.start_s for life in member.lives),
        busy_s=sum(life.usage.busy_s for life in member.lives),
        steps=sum(life.usage.steps for life in member.lives),
        tokens=sum(life.usage.tokens for life in member.lives),
        cost=None if price is None else price * blueprint.chips * member.paid_s / HOUR_S,
        lives=tuple(member.lives),
        tiers=tuple(
            TierReport(
                tier.spec.name,
                tier.asked_tokens,
                tier.held_tokens,
                tier.reloaded_tokens,
                tier.link.busy_s,
                tier.spec.shared,
            )
            for tier in member.tiers
        ),
    )
