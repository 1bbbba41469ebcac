"""Many replicas on one virtual timeline.

    fleet = Fleet([("a", blueprint), ("b", blueprint)], router=make_router("prefix_aware"))
    run = fleet.run(traffic)

Events are those of the replicas (a step has ended, somebody came to an idle engine), of links and of outages; the
earliest is next. At equal times arrivals go first, and events keep the order of their entry. A router decides when a
request arrives, on the ledger: what was sent where and what has come back by then. A step under way has no result yet
for anybody, although it has been computed here.

Every request that arrives ends exactly once: done, rejected or failed. `check_integrity` holds the books to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf

from paceline.core.step import Finish, FinishReason, Rejected
from paceline.errors import ConfigError
from paceline.route.policies.base import Ask, Router
from paceline.route.policies.ledger import Ledger
from paceline.route.policies.registry import make_router
from paceline.simulate.fleet.blueprint import Blueprint, Role
from paceline.simulate.fleet.faults import Outage, Retry
from paceline.simulate.fleet.handoff import Handoffs
from paceline.simulate.fleet.journey import Journey, Outcome, ask_of
from paceline.simulate.fleet.member import Member, State
from paceline.simulate.fleet.report import FleetRun, summed
from paceline.simulate.fleet.tiers import Tier, TierSpec, reload
from paceline.simulate.fleet.timeline import Timeline
from paceline.simulate.replica import Turn
from paceline.simulate.traffic import Arrival, Traffic


class Fleet:
    """Replicas, routers and the requests between them. One `run` of a fleet, and it is used up."""

    def __init__(
        self,
        members: Sequence[tuple[str, Blueprint]],
        *,
        router: Router | None = None,
        decode_router: Router | None = None,
        tiers: Sequence[TierSpec] = (),
        outages: Sequence[Outage] = (),
        retry: Retry | None = None,
        overlap_layers: int | None = None,
        timeout_s: float = inf,
        way_s: Callable[[int], float] | None = None,
        cold: bool = False,
        seed: int = 0,
        on_end: Callable[[Journey], None] | None = None,
    ) -> None:
        """`cold`: members begin with their cold start at 0, instead of being up. A client hangs up `timeout_s` after it
        sent its request, which takes `way_s` of its prompt's tokens to the router. `on_end` sees each ended request.
        """
        _check(members, outages)
        self._timeline = Timeline()
        self._ledgers = {role: Ledger() for role in Role}
        self._router = router or make_router("least_load")
        self._decode_router = decode_router or make_router("least_load")
        self._retry = retry or Retry()
        shared = {spec.name: Tier(spec) for spec in tiers if spec.shared}
        self._members: dict[str, Member] = {}
        for name, blueprint in members:
            own = tuple(shared.get(spec.name) or Tier(spec) for spec in tiers)
            self._members[name] = Member(name, blueprint, own if blueprint.role is not Role.DECODE else (), str(seed))
        fastest = max(blueprint.prefill_tokens_per_s for _, blueprint in members)
        self._speeds = {name: blueprint.prefill_tokens_per_s / fastest for name, blueprint in members}
        self._handoffs = Handoffs(self._timeline, self._members, self._deliver, layers=overlap_layers)
        self._journeys: dict[str, Journey] = {}  # under way
        self._stranded: deque[Journey] = deque()  # nobody is up for them
        self._prefilled: deque[Journey] = deque()  # nobody is up to decode them
        self._timeout_s, self._way_s = timeout_s, way_s
        self._on_end = on_end
        self._run = FleetRun()
        self._traffic: Traffic | None = None
        for member in self._members.values():
            self._start(0.0, member, cold=cold)
        for outage in outages:
            self._timeline.at(outage.at_s, self._fail, self._members[outage.replica], outage.down_s)

    def run(self, traffic: Traffic, *, until_s: float = inf, keep: bool = True) -> FleetRun:
        """Serve the traffic to its end, or until `until_s`, when what is under way stays unended.

        With `keep`, every ended request stays in `FleetRun.journeys`; without, `on_end` is the only one to see it.
        """
        self._traffic = traffic
        timeline = self._timeline
        while True:
            arrives_s, event_s = traffic.next_s, timeline.next_s
            if min(arrives_s, event_s) > until_s or (arrives_s == inf and not self._journeys):
                break
            if arrives_s <= event_s and arrives_s < inf:  # who come together may share an engine's next step
                timeline.move_to(arrives_s)
                self._arrive(arrives_s, traffic.pop(), keep=keep)
            elif event_s < inf:
                timeline.advance()
            else:
                break
        self._close(until_s)
        return self._run

    def check_integrity(self) -> None:
        """Assert the conservation laws: books balance, and every live request is in exactly one place."""
        for ledger in self._ledgers.values():
            ledger.check_integrity()
        booked = sum(load.requests for ledger in self._ledgers.values() for load in ledger.loads())
        waiting = len(self._stranded) + len(self._prefilled)
        assert booked + waiting + self._run.on_way == len(self._journeys), "a request is nowhere"
        for member in self._members.values():
            if member.replica is not None:
                member.replica.scheduler.check_integrity()

    # Requests come

    def _arrive(self, now_s: float, arrival: Arrival, *, keep: bool) -> None:
        journey = Journey(arrival, ask_of(arrival))
        assert journey.request_id not in self._journeys, f"{journey.request_id} is under way already"
        self._journeys[journey.request_id] = journey
        self._run.arrived += 1
        if keep:
            self._run.journeys.append(journey)
        if self._timeout_s < inf:
            self._timeline.at(arrival.sent_s + self._timeout_s, self._give_up, journey)
        if self._way_s is None:
            self._place(now_s, journey)
        else:
            self._send(now_s + self._way_s(len(arrival.spec.prompt)), journey)

    def _give_up(self, now_s: float, journey: Journey) -> None:
        """A client hangs up: an engine that has its request is told; on the way, it is dropped where it comes next."""
        if journey.outcome is not None:
            return
        journey.given_up = True
        member = self._members.get(journey.replica)
        for line in (self._stranded, self._prefilled):
            if journey in line:
                line.remove(journey)
                self._end(now_s, journey, Outcome.GIVEN_UP)
                return
        if member is not None and member.is_up:
            member.engine.cancel(journey.request_id, now_s)
            self._watch(member)

    def _place(self, now_s: float, journey: Journey) -> None:
        """Send a request to where its prompt is computed."""
        if journey.given_up:
            self._end(now_s, journey, Outcome.GIVEN_UP)
            return
        role, names = self._entrance()
        if not names:
            self._strand(now_s, journey)
            return
        ledger, ask = self._ledgers[role], journey.ask
        name = self._pick(self._router, ledger, ask, names, hit_tokens=None)
        member = self._members[name]
        journey.replica, journey.sent_s, journey.here = name, now_s, 0
        if not member.tiers:
            self._deliver(now_s, journey, member)
            return
        spec = journey.arrival.spec
        held = member.engine.scheduler.held(spec.prompt, spec.cache_salt)
        blueprint = member.blueprint
        depth, ready_s = reload(
            member.tiers, ask, held, now_s, kv_bytes_per_token=blueprint.kv_bytes_per_token, cost=blueprint.cost
        )
        journey.reloaded_tokens = depth - held
        if depth > held:
            self._timeline.at(ready_s, self._reloaded, journey, member, member.epoch, depth)
        else:
            self._deliver(now_s, journey, member)

    def _pick(self, router: Router, ledger: Ledger, ask: Ask, names: list[str], *, hit_tokens: int | None) -> str:
        """Have a replica picked, and book the request there; `hit_tokens` None: as many as the router believes."""
        loads = ledger.loads(names)
        name = router.pick(ask, loads)
        believed = router.hit_tokens(ask, name) if hit_tokens is None else hit_tokens
        ledger.sent(ask.request_id, name, ask.prompt_tokens, believed)
        router.sent(ask, next(load for load in loads if load.name == name))
        return name

    def _entrance(self) -> tuple[Role, list[str]]:
        """Who takes prompts: prefill engines where there are any, else whole ones."""
        pooled = any(member.role is Role.PREFILL for member in self._members.values())
        role = Role.PREFILL if pooled else Role.WHOLE
        return role, [member.name for member in self._members.values() if member.role is role and member.is_up]

    def _reloaded(self, now_s: float, journey: Journey, member: Member, epoch: int, depth: int) -> None:
        if member.epoch == epoch:
            spec = journey.arrival.spec
            member.engine.scheduler.adopt(spec.prompt[:depth], spec.cache_salt)
            self._deliver(now_s, journey, member)

    def _deliver(self, now_s: float, journey: Journey, member: Member) -> None:
        if journey.given_up:
            self._ledgers[member.role].ended(journey.request_id, journey.here)
            self._end(now_s, journey, Outcome.GIVEN_UP)
            return
        spec, answer = journey.remainder(first_only=member.role is Role.PREFILL)
        member.engine.deliver(spec, now_s, answer)
        self._watch(member)

    def _strand(self, now_s: float, journey: Journey) -> None:
        """Nobody is up: wait for one, unless none will come."""
        if self._expected(self._entrance()[0]):
            self._stranded.append(journey)
        else:
            self._end(now_s, journey, Outcome.FAILED)

    def _expected(self, role: Role) -> bool:
        """Whether somebody of this role will be up again."""
        members = (member for member in self._members.values() if member.role is role)
        return any(member.state is not State.OFF or member.returns for member in members)

    # Replicas turn

    def _watch(self, member: Member) -> None:
        next_s = member.engine.next_s
        if next_s < member.watched_s:
            member.watched_s = next_s
            self._timeline.at(next_s, self._turn, member, member.epoch)

    def _turn(self, now_s: float, member: Member, epoch: int) -> None:
        if member.epoch != epoch:
            return
        member.watched_s = inf
        engine = member.engine
        if engine.next_s <= now_s:
            self._take(now_s, member, engine.turn(now_s))
            member.settle()
        if member.epoch == epoch:
            if member.inward:
                self._handoffs.pull(now_s, member)
            self._watch(member)

    def _take(self, now_s: float, member: Member, turn: Turn) -> None:
        """What came of a turn: tokens first, then ends."""
        ledger, journeys = self._ledgers[member.role], self._journeys
        for answer in turn.accepted:
            journeys[answer.request_id].pace = answer.pace
        if turn.events is not None:
            total = 0
            for place, (request_id, tokens) in enumerate(zip(turn.events.ids, turn.events.tokens, strict=True)):
                journey = journeys[request_id]
                if not journey.here:
                    ledger.started(request_id)
                    self._first_here(journey, member)
                journey.got(now_s, len(tokens), place)
                total += len(tokens)
            ledger.grew(member.name, total)
        for rejected in turn.rejected:
            self._rejected(now_s, journeys[rejected.request_id], member, rejected)
        for finish in turn.finished:
            self._finished(now_s, journeys[finish.request_id], member, finish)

    def _first_here(self, journey: Journey, member: Member) -> None:
        for tier in member.tiers:
            tier.write(journey.ask)

    def _rejected(self, now_s: float, journey: Journey, member: Member, rejected: Rejected) -> None:
        self._ledgers[member.role].ended(journey.request_id)
        journey.rejected = rejected
        self._end(now_s, journey, Outcome.REJECTED)

    def _finished(self, now_s: float, journey: Journey, member: Member, finish: Finish) -> None:
        self._ledgers[member.role].ended(journey.request_id, journey.here)
        if journey.finish is None:
            journey.cached_tokens = finish.cached_tokens
        journey.finish = finish
        journey.preemptions += finish.preemptions
        self._run.recomputed_tokens += finish.recomputed_tokens
        if journey.given_up:
            self._end(now_s, journey, Outcome.GIVEN_UP)
        elif finish.reason in (FinishReason.ABORT, FinishReason.ERROR):
            self._end(now_s, journey, Outcome.FAILED)
        elif member.role is Role.PREFILL and finish.reason is FinishReason.LENGTH and not self._whole(journey):
            self._hand_over(now_s, journey)
        else:
            self._end(now_s, journey, Outcome.DONE)

    def _whole(self, journey: Journey) -> bool:
        """Whether it has all it asked for."""
        return journey.tokens >= min(journey.arrival.spec.sampling.max_tokens, journey.arrival.output_tokens)

    def _hand_over(self, now_s: float, journey: Journey) -> None:
        """Prefilled: pick who decodes. Its KV waits where it is until somebody is up, and is lost if nobody will be."""
        names = [member.name for member in self._members.values() if member.role is Role.DECODE and member.is_up]
        if not names:
            if self._expected(Role.DECODE) and self._members[journey.replica].is_up:
                self._prefilled.append(journey)
            else:
                self._lost(now_s, journey)
            return
        ledger, ask = self._ledgers[Role.DECODE], journey.ask
        name = self._pick(self._decode_router, ledger, ask, names, hit_tokens=ask.prompt_tokens)
        ledger.started(ask.request_id)  # it takes memory there from now on
        journey.here = 0
        journey.sent_s = now_s
        self._handoffs.offer(now_s, journey, self._members[name])

    def _end(self, now_s: float, journey: Journey, outcome: Outcome) -> None:
        del self._journeys[journey.request_id]
        journey.end(outcome, now_s)
        self._run.count(journey)
        if self._on_end is not None:
            self._on_end(journey)
        assert self._traffic is not None
        self._traffic.ended(journey.arrival, now_s, ok=outcome is Outcome.DONE)

    # Replicas come and go

    def _start(self, now_s: float, member: Member, *, cold: bool = True) -> None:
        up_s = member.start(now_s)
        if cold and up_s > now_s:
            self._timeline.at(up_s, self._up, member, member.epoch)
        else:
            self._up(now_s, member, member.epoch)

    def _up(self, now_s: float, member: Member, epoch: int) -> None:
        if member.epoch != epoch:
            return  # it died while it started
        member.come_up(now_s)
        self._ledgers[member.role].join(member.name, cache_tokens=member.cache_tokens, speed=self._speeds[member.name])
        waiting, self._stranded = self._stranded, deque()
        for journey in waiting:
            self._place(now_s, journey)
        prefilled, self._prefilled = self._prefilled, deque()
        for journey in prefilled:
            self._hand_over(now_s, journey)

    def _fail(self, now_s: float, member: Member, down_s: float) -> None:
        """A replica dies, and with it what it was doing."""
        if member.state is State.OFF:
            return  # it is down already
        was_up = member.is_up
        member.returns = down_s < inf
        member.die(now_s)
        self._run.outages += 1
        if member.returns:
            self._timeline.at(now_s + down_s, self._come_back, member)
        if was_up:
            for router in (self._router, self._decode_router):
                router.left(member.name)
            for request_id in self._ledgers[member.role].leave(member.name):
                self._lost(now_s, self._journeys[request_id])
            gone = [journey for journey in self._prefilled if journey.replica == member.name]
            for journey in gone:
                self._prefilled.remove(journey)
                self._lost(now_s, journey)

    def _come_back(self, now_s: float, member: Member) -> None:
        member.returns = False
        if member.state is State.OFF:
            self._start(now_s, member)

    def _lost(self, now_s: float, journey: Journey) -> None:
        """Its engine is gone: it fails, or is tried again."""
        retry = self._retry
        again = retry.on_loss != "fail" and len(journey.losses) < retry.most
        journey.lose(now_s, resume=retry.on_loss != "retry")
        self._run.lost += 1
        if not again:
            self._end(now_s, journey, Outcome.FAILED)
        else:
            self._send(now_s + retry.wait_s, journey)

    def _send(self, reaches_s: float, journey: Journey) -> None:
        self._run.on_way += 1
        self._timeline.at(reaches_s, self._reached, journey)

    def _reached(self, now_s: float, journey: Journey) -> None:
        self._run.on_way -= 1
        self._place(now_s, journey)

    def _close(self, until_s: float) -> None:
        """Add up what the members did."""
        run = self._run
        run.end_s = self._timeline.now_s if until_s == inf else max(self._timeline.now_s, until_s)
        run.unended = len(self._journeys)
        run.transfers = self._handoffs.totals
        for member in self._members.values():
            member.close(run.end_s)
            run.members.append(summed(member))


def _check(members: Sequence[tuple[str, Blueprint]], outages: Sequence[Outage]) -> None:
    names = [name for name, _ in members]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"replicas are {names}; there must be at least one, and no name twice")
    roles = {blueprint.role for _, blueprint in members}
    if (Role.PREFILL in roles) != (Role.DECODE in roles):
        raise ConfigError("a fleet with prefill engines needs decode engines, and the other way round")
    if Role.PREFILL in roles and Role.WHOLE in roles:
        raise ConfigError("a fleet is of whole engines, or of prefill and decode engines, not of both")
    for outage in outages:
        if outage.replica not in names:
            raise ConfigError(f"outage of {outage.replica!r}: there is no such replica; there are {', '.join(names)}")
