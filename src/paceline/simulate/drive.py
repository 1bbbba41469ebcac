"""Traffic against one engine, in virtual time, until everybody has been served or somebody says stop.

    result = drive(planned(plan), Replica("engine", config, cost))
    result.records, result.usage, result.ended

Three things make time go on, the earliest first: a request that leaves its client, one that reaches the engine, a turn
of the engine. Equal times go in that order, so that one seed gives one run.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from paceline.core.step import FinishReason
from paceline.measure.records import ErrorClass, RequestRecord, ScrapeRecord
from paceline.simulate.ledger import Ended, Ledger
from paceline.simulate.overheads import Overheads
from paceline.simulate.progress import Backlog, OnProgress, Show
from paceline.simulate.replica import Replica, Turn
from paceline.simulate.traffic import Arrival, Traffic
from paceline.simulate.usage import UsageReport


@dataclass(frozen=True, slots=True)
class Limits:
    """When a request, or the whole simulation, has lasted long enough. Seconds of virtual time."""

    timeout_s: float = 600.0  # a client gives its request up
    # With requests still to come: if those that wait would need longer to be started, at the pace of the last minute,
    # the load is beyond what the engine can take, and more of it tells nothing more.
    overload_s: float = 600.0
    scrape_every_s: float = 1.0


@dataclass(slots=True)
class Simulated:
    """A simulation that has ended."""

    records: list[RequestRecord]
    scrapes: list[ScrapeRecord]
    usage: dict[str, UsageReport]  # by engine
    ended: str  # "complete", "interrupted" (by Ctrl-C) or "overloaded"
    ended_s: float  # virtual
    real_s: float  # what it took
    steps: int
    warnings: list[str] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """How many times faster than real time."""
        return self.ended_s / self.real_s if self.real_s > 0.0 else inf


def drive(
    traffic: Traffic,
    replica: Replica,
    *,
    overheads: Overheads | None = None,
    limits: Limits | None = None,
    on_progress: OnProgress | None = None,
) -> Simulated:
    """Run to the end. Ctrl-C ends it early; the requests that are open then are cut off, and all others are kept."""
    driver = _Driver(traffic, replica, overheads or Overheads(), limits or Limits(), on_progress)
    began = time.perf_counter()
    ended = driver.run()
    return driver.result(ended, time.perf_counter() - began)


class _Driver:
    """The state of one simulation."""

    def __init__(
        self, traffic: Traffic, replica: Replica, overheads: Overheads, limits: Limits, on_progress: OnProgress | None
    ) -> None:
        self._traffic, self._replica, self._overheads, self._limits = traffic, replica, overheads, limits
        self._ledger = Ledger(overheads)
        self._on_way: list[tuple[float, int, Arrival]] = []  # a heap: sent, and not yet at the engine
        self._given_up: deque[tuple[float, str]] = deque()  # when a request is given up, in the order of sending
        self._sent = 0
        self._now = 0.0
        self._scrapes = _Scrapes(replica, limits.scrape_every_s)
        self._backlog = Backlog(limits.overload_s)
        self._show = Show(on_progress, traffic.total)

    def run(self) -> str:
        """Until nothing is left to happen; how it ended."""
        try:
            while True:
                send_s, reach_s = self._traffic.next_s, self._on_way[0][0] if self._on_way else inf
                turn_s = self._replica.next_s
                if send_s <= reach_s and send_s <= turn_s and send_s < inf:
                    self._send(send_s)
                elif reach_s <= turn_s and reach_s < inf:
                    self._reach()
                elif turn_s < inf:
                    # Until somebody has ended, turns change nothing about who comes next.
                    horizon = min(send_s, reach_s)
                    while turn_s < horizon and not self._turn(turn_s):
                        turn_s = self._replica.next_s
                    if self._backlog.hopeless:
                        return "overloaded"
                else:
                    return "complete"
        except KeyboardInterrupt:
            return "interrupted"

    def result(self, ended: str, real_s: float) -> Simulated:
        """Close the books."""
        warnings = []
        left = self._ledger.open
        if ended == "overloaded":
            why = self._backlog.why
            warnings.append(f"overloaded: {why}; stopped at {self._now:.1f} s")
            self._ledger.cut_off(self._now, ErrorClass.TIMEOUT, "the simulation stopped: overloaded")
        elif left:
            self._ledger.cut_off(self._now, ErrorClass.CANCELLED)
        self._scrapes.take(self._now)
        self._show.last(self._now, *self._counts)
        return Simulated(
            records=self._ledger.records,
            scrapes=self._scrapes.rows,
            usage={self._replica.name: self._replica.usage.report(self._now)},
            ended=ended,
            ended_s=self._now,
            real_s=real_s,
            steps=self._replica.usage.steps,
            warnings=warnings,
        )

    def _send(self, now_s: float) -> None:
        arrival = self._traffic.pop()
        self._ledger.sent(arrival)
        self._sent += 1
        self._given_up.append((now_s + self._limits.timeout_s, arrival.spec.request_id))
        reach_s = self._overheads.reaches_s(now_s, len(arrival.spec.prompt))
        heappush(self._on_way, (reach_s, self._sent, arrival))

    def _reach(self) -> None:
        at_s, _, arrival = heappop(self._on_way)
        self._replica.deliver(arrival.spec, at_s, arrival.answer)

    def _turn(self, now_s: float) -> bool:
        """Turn the engine; whether somebody has ended, or the run is to."""
        self._now = now_s
        if self._given_up and self._given_up[0][0] <= now_s:
            self._give_up(now_s)
        turn = self._replica.turn(now_s)
        for answer in turn.accepted:
            self._ledger.accepted(answer)
        if turn.events is not None:
            self._ledger.heard(turn.events, now_s)
        ended = bool(turn.finished or turn.rejected)
        if ended:
            self._ended(turn)
        if now_s >= self._scrapes.due_s:
            self._scrapes.take(now_s)
            stats = self._replica.scheduler.stats()
            waiting = stats.num_waiting + len(self._replica.inbox)
            self._backlog.look(now_s, self._sent - waiting, waiting, more=self._traffic.next_s < inf)
        self._show.maybe(now_s, *self._counts)
        return ended or self._backlog.hopeless

    @property
    def _counts(self) -> tuple[int, int, int, int]:
        """Sent, in flight, ended, failed."""
        ledger = self._ledger
        return self._sent, len(ledger.open), len(ledger.records), ledger.failed

    def _ended(self, turn: Turn) -> None:
        over: list[Ended] = []
        for finish in turn.finished:
            timed_out = finish.reason is FinishReason.ABORT
            error = ErrorClass.TIMEOUT if timed_out else None
            over.append(self._ledger.finished(finish, turn.at_s, error, "given up by its client" if timed_out else ""))
        over += (self._ledger.refused(rejected, turn.at_s) for rejected in turn.rejected)
        for ended in over:
            self._traffic.ended(ended.arrival, ended.ended_s, ok=ended.ok)

    def _give_up(self, now_s: float) -> None:
        """Clients whose request is too old hang up."""
        while self._given_up and self._given_up[0][0] <= now_s:
            _, name = self._given_up.popleft()
            if name in self._ledger.open:
                self._replica.cancel(name, now_s)


class _Scrapes:
    """Readings of the engine's counters and gauges, as a real server's /metrics gives them."""

    def __init__(self, replica: Replica, every_s: float) -> None:
        self._replica, self._every_s = replica, every_s
        self.due_s = 0.0
        self.rows: list[ScrapeRecord] = []

    def take(self, now_s: float) -> None:
        stats = self._replica.scheduler.stats()
        values = {
            "running": stats.num_running,
            "waiting": stats.num_waiting + len(self._replica.inbox),
            "kv_used_ratio": stats.kv_blocks_used / stats.kv_blocks_total,
            "prefix_queries_tokens": stats.prefix_queries_tokens,
            "prefix_hits_tokens": stats.prefix_hits_tokens,
            "preemptions": stats.preemptions,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
        }
        self.rows.append(ScrapeRecord(t_s=now_s, values={name: float(value) for name, value in values.items()}))
        self.due_s = now_s + self._every_s
