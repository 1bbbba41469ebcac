"""One request's way through the fleet: every place it was at, every token it got, and exactly one end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from enum import Enum

from paceline.core.pace import Pace
from paceline.core.prefix import chain_root, extend_chain
from paceline.core.step import Finish, Rejected, RequestSpec
from paceline.route.policies.base import Ask
from paceline.simulate.backend import OUTPUT
from paceline.simulate.overheads import NONE, Overheads
from paceline.simulate.paced import paced
from paceline.simulate.traffic import Arrival

BLOCK_TOKENS = 256  # of the prefix blocks that routers and tiers look at, where a trace does not name its own


class Outcome(Enum):
    """How a request ended, for its client."""

    DONE = "done"
    REJECTED = "rejected"  # an engine said no
    FAILED = "failed"  # the engine that served it died, and it was not tried again
    GIVEN_UP = "given_up"  # its client hung up


@dataclass(slots=True)
class Loss:
    """One try that came to nothing."""

    replica: str
    sent_s: float
    lost_s: float
    tokens: int  # that had reached the client by then


@dataclass(slots=True, eq=False)
class Journey:
    """A request under way. Its (i+1)-th delivery of tokens was made at `token_s[i]`: `token_counts[i]` tokens, in row
    `token_places[i]` of the step. When a client reads them, `read_s` tells; all other times go by that.

    More attributes than a dozen, because it is the one record of a request: whatever a report tells is read off it.
    """

    arrival: Arrival
    ask: Ask
    replica: str = ""  # where it is or was last
    sent_s: float = 0.0  # when it went there
    token_s: list[float] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    token_places: list[int] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    outcome: Outcome | None = None  # None: under way
    ended_s: float | None = None
    finish: Finish | None = None  # of the last engine
    rejected: Rejected | None = None
    cached_tokens: int = 0  # prompt tokens that its first engine did not compute
    reloaded_tokens: int = 0  # of those, fetched from a slower tier
    preemptions: int = 0
    here: int = 0  # tokens it got at the replica where it is now
    pace: Pace | None = None  # at which its client is shown tokens
    given_up: bool = False  # its client has hung up, and whoever has it next ends it
    transfer_s: float = 0.0  # between prefill and decode: waiting for room, and the wire

    @property
    def request_id(self) -> str:
        return self.arrival.spec.request_id

    @property
    def tokens(self) -> int:
        """Output tokens that were made for it."""
        return sum(self.token_counts)

    def read_s(self, overheads: Overheads = NONE) -> tuple[float, ...]:
        """When its client read each token, as `Ledger` of a single engine counts."""
        made = zip(self.token_s, self.token_places, self.token_counts, strict=True)
        read = tuple(time_s for at_s, place, count in made for time_s in (overheads.read_s(at_s, place),) * count)
        return read if self.pace is None else paced(read, self.closed_s(overheads), self.pace)

    def closed_s(self, overheads: Overheads = NONE) -> float:
        """When its client had the last of it; of one under way, of what there is."""
        end_s = self.token_s[-1] if self.ended_s is None else self.ended_s
        if not self.token_s:
            return end_s + overheads.after_s
        return max(end_s + overheads.after_s, overheads.read_s(self.token_s[-1], self.token_places[-1]))

    @property
    def ttft_s(self) -> float | None:
        """From its place on the schedule to its first token; None before there is one."""
        return self.token_s[0] - self.arrival.at_s if self.token_s else None  # the first is shown at once

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first delivery; None where there are none."""
        later = self.tokens - self.token_counts[0] if self.token_s else 0
        return (self.read_s()[-1] - self.token_s[0]) / later if later else None

    @property
    def e2e_s(self) -> float | None:
        """From its place on the schedule to its last token, for one that was answered."""
        return self.read_s()[-1] - self.arrival.at_s if self.outcome is Outcome.DONE else None

    def gaps_s(self) -> list[float]:
        """Times between two deliveries of tokens, or between two tokens that are shown at a pace."""
        times = self.token_s if self.pace is None else self.read_s()
        return [after - before for before, after in itertools.pairwise(times)]

    def got(self, now_s: float, tokens: int, place: int = 0) -> None:
        """An engine has made tokens, in that row of its step."""
        assert self.outcome is None, f"{self.request_id} has ended and speaks"
        self.token_s.append(now_s)
        self.token_counts.append(tokens)
        self.token_places.append(place)
        self.here += tokens

    def end(self, outcome: Outcome, now_s: float) -> None:
        """The one end."""
        assert self.outcome is None, f"{self.request_id} ends twice"
        self.outcome, self.ended_s = outcome, now_s

    def lose(self, now_s: float, *, resume: bool) -> None:
        """Its engine died. Unless the stream is resumed, its tokens are void and it starts over."""
        self.losses.append(Loss(self.replica, self.sent_s, now_s, self.tokens))
        if not resume:
            self.token_s.clear()
            self.token_counts.clear()
            self.token_places.clear()

    def remainder(self, *, first_only: bool = False) -> tuple[RequestSpec, tuple[int, ...] | None]:
        """What is still to be asked, and its answer for `Replica.deliver`: tokens it has are part of the prompt.

        With `first_only`, for one token: the work of a prefill engine.
        """
        spec, answer, had = self.arrival.spec, self.arrival.answer, self.tokens
        if not had and not first_only:
            return spec, answer
        said = (OUTPUT,) * had if answer is None else answer[:had]
        limit = 1 if first_only else spec.sampling.max_tokens - had
        rest = None if answer is None else answer[had : had + 1 if first_only else None]
        sampling = replace(spec.sampling, max_tokens=limit)
        # Behind the first token a promise of the next one is that of a gap.
        ttft_s = spec.itl_s if had and spec.itl_s is not None else spec.ttft_s
        return replace(spec, prompt=spec.prompt + said, sampling=sampling, ttft_s=ttft_s), rest


def ask_of(arrival: Arrival) -> Ask:
    """What a router may know of an arrival."""
    spec, planned = arrival.spec, arrival.planned
    blocks: tuple[int | bytes, ...]
    if planned is not None and planned.blocks and planned.turns == 1:
        size = planned.block_tokens
        blocks = planned.blocks[: len(spec.prompt) // size]
    else:
        size, chain = BLOCK_TOKENS, list[bytes]()
        extend_chain(chain, chain_root("", spec.cache_salt), spec.prompt, size, len(spec.prompt) // size)
        blocks = tuple(chain)
    session = f"c{planned.index}" if planned is not None and planned.turns > 1 else ""
    return Ask(spec.request_id, len(spec.prompt), blocks, size, session)
