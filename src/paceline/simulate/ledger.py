"""What clients of simulated engines see, as the same rows that `paceline bench` writes: one `RequestRecord` a request.

    ledger.sent(arrival)                         # it leaves the client
    ledger.accepted(answer)                      # an engine takes it, and may set a pace for its tokens
    ledger.heard(events, at_s)                   # tokens of a step that ended at `at_s`
    ledger.finished(finish, at_s)                # -> Ended(arrival, ended_s, ok)
    ledger.refused(rejected, at_s)               # -> Ended
    ledger.cut_off(at_s, error)                  # who is left when the simulation stops
    ledger.records

Every request that was sent gets exactly one record. Ids are unique over the run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from paceline.core.pace import Pace
from paceline.core.step import Accepted, Finish, FinishReason, Rejected, RejectReason, StepEvents
from paceline.measure.records import Attempt, ErrorClass, RequestRecord, Usage
from paceline.simulate.overheads import Overheads
from paceline.simulate.paced import paced
from paceline.simulate.traffic import Arrival

CHARS = 4  # of a token, in rows that have no text
_STATUS = {
    RejectReason.QUEUE_FULL: 429,
    RejectReason.OVERLOADED: 429,
    RejectReason.TOO_LONG: 400,
    RejectReason.UNKNOWN_CLASS: 400,
    RejectReason.DUPLICATE_ID: 500,
}


class Ended(NamedTuple):
    """A request whose client has the last of it."""

    arrival: Arrival
    ended_s: float
    ok: bool


class Ledger:
    """Open requests and the records of those that have ended."""

    def __init__(self, overheads: Overheads | None = None) -> None:
        overheads = overheads or Overheads()
        self._after_s, self._after_row_s = overheads.after_s, overheads.after_row_s
        self._open: dict[str, Arrival] = {}
        self._heard: dict[str, list[float]] = {}  # when each token of an open request could be shown to its reader
        self._paces: dict[str, Pace] = {}  # of open requests whose tokens are shown at a pace
        self.records: list[RequestRecord] = []
        self.failed = 0

    @property
    def open(self) -> dict[str, Arrival]:
        """Requests sent and not ended, in the order they were sent."""
        return self._open

    def sent(self, arrival: Arrival) -> None:
        """A request leaves its client."""
        name = arrival.spec.request_id
        assert name not in self._open, f"request {name} is sent twice"
        self._open[name] = arrival
        self._heard[name] = []

    def accepted(self, answer: Accepted) -> None:
        """An engine takes a request; from now on its tokens are shown at this pace."""
        if answer.pace is not None:
            self._paces[answer.request_id] = answer.pace

    def heard(self, events: StepEvents, at_s: float) -> None:
        """Tokens of a step."""
        heard, read_s, row_s = self._heard, at_s + self._after_s, self._after_row_s
        for name, tokens in zip(events.ids, events.tokens, strict=True):
            if len(tokens) == 1:
                heard[name].append(read_s)
            else:
                heard[name].extend([read_s] * len(tokens))
            read_s += row_s

    def first_token_s(self, name: str) -> float | None:
        """When the client of an open request read its first token."""
        return self._heard[name][0] if self._heard[name] else None

    def finished(self, finish: Finish, at_s: float, error: ErrorClass | None = None, why: str = "") -> Ended:
        """An engine's terminal event. `error` says why one that did not end by itself has."""
        if error is None and finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            error, why = ErrorClass.SERVER_ERROR_IN_STREAM, finish.message or finish.reason.value
        reason = None if error else finish.reason.value
        return self._end(finish.request_id, at_s, error, why, reason=reason, cached=finish.cached_tokens)

    def refused(self, rejected: Rejected, at_s: float) -> Ended:
        """An engine's no."""
        status = _STATUS[rejected.reason]
        error = ErrorClass.REJECTED if status == 429 else ErrorClass.HTTP_4XX
        return self._end(rejected.request_id, at_s, error, rejected.message, status=status)

    def failed_to_reach(self, name: str, at_s: float, why: str) -> Ended:
        """No engine answers the request."""
        return self._end(name, at_s, ErrorClass.REJECTED, why, status=503)

    def cut_off(self, at_s: float, error: ErrorClass, why: str = "") -> None:
        """The simulation stops: whoever is open ends like this."""
        for name in tuple(self._open):
            self._end(name, at_s, error, why)

    def _end(
        self,
        name: str,
        at_s: float,
        error: ErrorClass | None,
        why: str,
        *,
        status: int = 200,
        reason: str | None = None,
        cached: int | None = None,
    ) -> Ended:
        arrival, heard = self._open.pop(name), tuple(self._heard.pop(name))
        closed_s = max(at_s + self._after_s, heard[-1] if heard else at_s)
        if (pace := self._paces.pop(name, None)) is not None:
            heard = paced(heard, closed_s, pace)
        self.failed += error is not None
        self.records.append(
            record_of(arrival, heard, closed_s, error=error, why=why, status=status, reason=reason, cached=cached)
        )
        return Ended(arrival, closed_s, error is None)


def record_of(
    arrival: Arrival,
    heard: tuple[float, ...],
    closed_s: float,
    *,
    error: ErrorClass | None = None,
    why: str = "",
    status: int = 200,
    reason: str | None = None,
    cached: int | None = None,
    attempts: tuple[Attempt, ...] = (),
) -> RequestRecord:
    """The record of a request whose client read a token at each time of `heard`, and the end at `closed_s`."""
    ones, kinds, rows, chars = _columns(len(heard))
    spec, planned = arrival.spec, arrival.planned
    return RequestRecord(
        id=spec.request_id,
        index=arrival.index,
        turn=arrival.turn,
        turns=planned.turns if planned is not None else 1,
        tenant=spec.tenant,
        traffic_class=spec.traffic_class,
        prefix_group=planned.prefix if planned is not None else "",
        first_wave=arrival.first_wave,
        prompt_tokens_wanted=len(spec.prompt),
        output_tokens_wanted=arrival.output_tokens,
        length_forced=True,
        prompt_chars=CHARS * len(spec.prompt),
        scheduled_s=arrival.at_s,
        dispatched_s=arrival.sent_s,
        cap_wait_s=arrival.sent_s - arrival.at_s,
        written_s=arrival.sent_s,
        headers_s=heard[0] if heard else closed_s,
        closed_s=closed_s,
        status=status,
        error=error,
        error_message=why[:300],
        finish_reason=reason,
        done_seen=error is None,
        usage=Usage(prompt_tokens=len(spec.prompt), completion_tokens=len(heard), cached_tokens=cached),
        attempts=attempts,
        read_s=heard,
        read_bytes=chars,
        kinds=kinds,
        row_reads=rows,
        row_chars=chars,
        row_tokens=ones,
    )


@lru_cache(maxsize=8192)
def _columns(tokens: int) -> tuple[tuple[int, ...], str, tuple[int, ...], tuple[int, ...]]:
    """Columns of a record of so many tokens, each read on its own: ones, kinds, reads, characters."""
    return (1,) * tokens, "c" * tokens, tuple(range(tokens)), (CHARS,) * tokens
