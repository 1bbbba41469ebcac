"""The pace line: tokens that came early wait a little, so that a pause of the engine is not a pause of the reader.

An engine makes tokens in bursts: fast while little else runs, slowly while a long prompt is computed. A reader was
promised a pace. So of a stream with a promise the first token is shown at once, and a later one when `hold` more are
there or `interval_s` after the one before, whichever comes first. Undisturbed, every token is `hold` tokens old when it
is shown and the stream runs at the engine's speed; in a pause the tokens held back are shown one by one, and the engine
has that long for other work. The end shows all that is left: no answer takes longer than it would have taken.

The scheduler and whoever shows the tokens turn the same `Pacer`, each by its own reading of one clock. News reaches the
latter later, so it shows no token before the scheduler believes it shown.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """How a stream is shown."""

    interval_s: float  # at most so long after the token before, if there is one to show
    hold: int  # tokens that are kept back at most


class Pacer:
    """Which tokens of one stream are shown. Times never go back."""

    __slots__ = ("held", "pace", "shown_s")

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.shown_s: float | None = None  # when the newest token that is shown was
        self.held = 0  # tokens made and not shown

    @property
    def next_s(self) -> float | None:
        """When the next token is shown, if nothing more is made until then; None: none is held."""
        return self.shown_s + self.pace.interval_s if self.held and self.shown_s is not None else None

    @property
    def last_s(self) -> float:
        """When the newest token made is shown, if nothing more is made. Only after the first."""
        assert self.shown_s is not None
        return self.shown_s + self.pace.interval_s * self.held

    def advance(self, now: float) -> int:
        """Let time pass; how many tokens are shown by it."""
        if not self.held or self.shown_s is None:
            return 0
        interval_s, passed_s = self.pace.interval_s, now - self.shown_s
        # Divided only where that stays below `held`: a client may ask for a gap of next to nothing.
        count = self.held if passed_s >= self.held * interval_s else int(passed_s / interval_s)
        # One of them may be due at this very moment and lie below it by a rounding error.
        if count < self.held and self.shown_s + (count + 1) * interval_s <= now:
            count += 1
        self.shown_s += count * interval_s
        self.held -= count
        return count

    def add(self, now: float, count: int) -> int:
        """`count` tokens are made; how many, of these and those held, are shown now."""
        pace, shown_s = self.pace, self.shown_s
        shown = 0
        due = shown_s is None or now - shown_s >= pace.interval_s
        if due and self.held:
            shown = self.advance(now)
            assert self.shown_s is not None
            due = now - self.shown_s >= pace.interval_s
        held = self.held + count
        at_once = max(held - pace.hold, min(held, 1) if due else 0)
        if at_once > 0:
            held -= at_once
            shown += at_once
            self.shown_s = now
        self.held = held
        return shown

    def show(self, now: float, count: int, *, end: bool = False) -> list[float]:
        """When those tokens were shown that are shown by now, `count` new ones among them; all, if this is the end."""
        before_s, interval_s = self.shown_s, self.pace.interval_s
        due = self.advance(now)
        times = [before_s + (number + 1) * interval_s for number in range(due)] if before_s is not None else []
        times += [now] * self.add(now, count)
        if end:
            times += [now] * self.held
            self.held = 0
        return times
