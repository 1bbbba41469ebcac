"""When a reader sees the tokens of a stream that is shown at a pace, all at once and afterwards."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.pace import Pace


def paced(made_s: Iterable[float], end_s: float, pace: Pace) -> tuple[float, ...]:
    """Times at which tokens made at `made_s` (in order) are shown, if the stream ends at `end_s`.

    What a `core.pace.Pacer` says, asked token by token; here in one loop without a call, because a simulation shows
    millions.
    """
    interval_s, hold = pace.interval_s, pace.hold
    shown: list[float] = []
    shown_s, held = 0.0, 0  # of the newest token shown; `shown` is empty before the first
    for now in (*made_s, None):
        until = end_s if now is None else now
        while held and shown_s + interval_s <= until:
            shown_s += interval_s
            held -= 1
            shown.append(shown_s)
        if now is None:
            break
        held += 1
        at_once = held - hold
        if at_once < 1 and (not shown or now - shown_s >= interval_s):
            at_once = 1
        if at_once > 0:
            held -= at_once
            shown_s = now
            shown += [now] * at_once
    return (*shown, *([end_s] * held))
