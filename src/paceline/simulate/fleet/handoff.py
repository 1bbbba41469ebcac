"""Prefill here, decode there. The decode engine pulls the KV when it has room for it.

    prefill ends --> picked decode engine --> waits for blocks --> wire --> adopted, next token

The first token is the prefill engine's. Only blocks that the decode engine does not hold yet travel. With `layers`, a
layer's KV leaves as soon as the layer is computed: the wire is taken from the prefill's first step on, and what is left
at its end is the larger of the last layer and what the wire is behind. (That the target was known by then is assumed.)

Left out: the sender's blocks are not held until the pull, so a long line at the decode engines puts no pressure back
on the memory of the prefill engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.simulate.fleet.journey import Journey
from paceline.simulate.fleet.link import send
from paceline.simulate.fleet.member import Member
from paceline.simulate.fleet.timeline import Timeline


@dataclass(slots=True)
class TransferTotals:
    """What went over the wire, and what requests felt of it."""

    count: int = 0
    bytes: float = 0.0
    waiting_s: float = 0.0  # for room at the decode engine
    wire_s: float = 0.0  # from the pull to the arrival, queueing on links included


class Handoffs:
    """Moves prefilled requests to decode engines."""

    def __init__(
        self,
        timeline: Timeline,
        members: dict[str, Member],
        deliver: Callable[[float, Journey, Member], None],
        *,
        layers: int | None = None,
    ) -> None:
        """`layers` of the model: KV is sent layer by layer, beside the prefill. None: after it."""
        self.totals = TransferTotals()
        self._timeline = timeline
        self._members = members
        self._deliver = deliver
        self._layers = layers

    def offer(self, now_s: float, journey: Journey, target: Member) -> None:
        """The prefill has ended at `journey.replica`, and `target` is to go on with it."""
        journey.sent_s = now_s
        target.inward.append(journey)
        self.pull(now_s, target)

    def pull(self, now_s: float, target: Member) -> None:
        """Begin the transfers that `target` has room for now, in order."""
        while target.inward:
            journey = target.inward[0]
            needed = self._blocks(journey, target)
            if needed <= target.blueprint.config.num_blocks and not self._fits(target, needed):
                return
            target.inward.popleft()
            self._begin(now_s, journey, target, needed)

    def _blocks(self, journey: Journey, target: Member) -> int:
        return -(-(journey.ask.prompt_tokens + 1) // target.blueprint.config.block_size)

    def _fits(self, target: Member, needed: int) -> bool:
        stats = target.engine.scheduler.stats()
        if stats.num_waiting:
            return False  # its KV is here and cached, and would be the next to be evicted
        free = stats.kv_blocks_total - stats.kv_blocks_used - target.promised_blocks
        taken = stats.num_running + target.coming
        return needed <= free and taken < target.blueprint.config.max_num_seqs

    def _begin(self, now_s: float, journey: Journey, target: Member, needed: int) -> None:
        sender = self._members[journey.replica]
        spec = journey.arrival.spec
        missing = journey.ask.prompt_tokens - target.engine.scheduler.held(spec.prompt, spec.cache_salt)
        nbytes = missing * sender.blueprint.kv_bytes_per_token
        done_s = now_s
        if sender.out is not None and target.into is not None and nbytes > 0.0:
            began_s, last_s = self._overlapped(now_s, journey, sender.out.spec.seconds(nbytes))
            done_s = max(last_s, send(began_s, nbytes, sender.out, target.into))
        totals = self.totals
        totals.count += 1
        totals.bytes += nbytes
        totals.waiting_s += now_s - journey.sent_s
        totals.wire_s += done_s - now_s
        journey.transfer_s += done_s - journey.sent_s
        target.promised_blocks += needed
        target.coming += 1
        journey.replica = target.name
        self._timeline.at(done_s, self._end, journey, target, target.epoch, needed)

    def _overlapped(self, now_s: float, journey: Journey, wire_s: float) -> tuple[float, float]:
        """(when the transfer could begin, when its last layer could have come).

        A target that had no room at once could take no layer either.
        """
        finish = journey.finish
        if self._layers is None or finish is None or finish.scheduled_s is None or now_s > journey.sent_s:
            return now_s, now_s
        return finish.scheduled_s, now_s + wire_s / self._layers

    def _end(self, now_s: float, journey: Journey, target: Member, epoch: int, needed: int) -> None:
        if target.epoch != epoch:
            return  # it died meanwhile, and the fleet has taken the request back
        target.landed.append(needed)  # promised until the engine has looked at its inbox
        if journey.given_up:
            target.settle()
            self._deliver(now_s, journey, target)
            self.pull(now_s, target)
            return
        spec, _ = journey.remainder()
        target.engine.scheduler.adopt(spec.prompt, spec.cache_salt)
        self._deliver(now_s, journey, target)
