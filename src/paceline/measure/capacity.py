"""The highest rate that keeps the promise, found without believing any single lucky or unlucky run.

A trial is one run at one rate. Its gates decide with their own confidence: they hold, they fail, or the run cannot
tell. What it cannot tell is repeated with other arrivals, and what stays open counts as not held: the search fails
closed. The answer is confirmed by fresh runs before it is given; where nothing passes, the answer is "none".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from paceline.errors import ConfigError
from paceline.measure.analysis import Analysis, analyse
from paceline.measure.folder import write_atomically
from paceline.measure.gates import Status
from paceline.measure.plan import BenchPlan
from paceline.measure.records import SelfCheck
from paceline.measure.runner import Extras, OnProgress, run
from paceline.measure.sweep import at_load
from paceline.measure.verdict import Level

INDEX = "capacity.json"
# Findings of which the server is the cause: at this rate it does not hold the promise, whatever the gates saw so far.
_SERVER_GIVES_IN = frozenset(("overload", "no_success"))


class Answer(StrEnum):
    """What one trial says about its rate."""

    HOLDS = "holds"
    FAILS = "fails"
    OPEN = "open"  # too noisy or too few to tell
    INVALID = "invalid"  # the client or the run broke down: says nothing about the server
    STOPPED = "stopped"  # the user ended it


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the search."""

    rate: float
    attempt: int  # 0 for the first run at this rate
    answer: Answer
    why: str
    confirming: bool = False
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Capacity:
    """`best` is the highest rate that held and was confirmed; None: no rate did.

    Where the client or the user ended the search, it is the highest that held by then, and `why` says so.
    """

    best: float | None
    failed_at: float | None  # the lowest rate that did not hold, where one was met
    trials: tuple[Trial, ...]
    why: str
    limited_by: str = "server"  # or "range", "client", "user": who ended the search
    undecided: bool = False  # no run at `failed_at` failed: they could not tell, which counts as not held

    @property
    def shown(self) -> str:
        """The answer alone, in words."""
        if self.best is None:
            return "none" if self.limited_by in ("server", "range") else "not known"
        return f"{'at least ' if self.limited_by in ('client', 'user') else ''}{self.best:g} requests/s"


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Bounds of the search. Rates are requests per second."""

    low: float = 0.1  # where it begins; when this does not hold, nothing does
    high: float = 1000.0
    resolution: float = 0.05  # stop when the bracket is this narrow, relative
    attempts: int = 3  # runs at one rate before "cannot tell" becomes "does not hold"
    confirmations: int = 1
    growth: float = 2.0


def find_capacity(trial: Callable[[float, int], tuple[Answer, str, str]], settings: SearchSettings) -> Capacity:
    """Search with `trial(rate, attempt) -> (answer, why, folder name)`; attempts of one rate are independent runs."""
    return _Search(trial, settings).run()


class _End(Exception):
    """The search cannot go on."""

    def __init__(self, limited_by: str, why: str) -> None:
        super().__init__(why)
        self.limited_by = limited_by


class _Search:
    def __init__(self, trial: Callable[[float, int], tuple[Answer, str, str]], settings: SearchSettings) -> None:
        self._trial, self._settings = trial, settings
        self._trials: list[Trial] = []
        self._attempts: dict[float, int] = {}
        self._held: list[float] = []
        self._confirmed: float | None = None
        self._failed: float | None = None
        self._undecided: set[float] = set()  # of the rates that count as not held, those where no run failed

    def run(self) -> Capacity:
        _check(self._settings)
        try:
            self._bracket()
            self._narrow()
            self._confirm()
        except _End as end:
            return self._so_far(end)
        return self._answer()

    def _answer(self) -> Capacity:
        trials, failed = tuple(self._trials), self._failed
        undecided = failed in self._undecided
        if self._confirmed is None:
            low = f"{self._settings.low:g}/s"
            why = f"none: {self._upper('does not')}" if undecided else f"none: not even {low} holds"
            return Capacity(None, failed, trials, why, undecided=undecided)
        if failed is None:
            why = f"{self._confirmed:g}/s, the highest rate asked for, holds"
            return Capacity(self._confirmed, None, trials, why, "range")
        why = f"{self._confirmed:g}/s holds, {self._upper('does not')}"
        return Capacity(self._confirmed, failed, trials, why, undecided=undecided)

    def _so_far(self, end: _End) -> Capacity:
        """What is known when the search cannot go on: what held stands, and is confirmed no more."""
        held, failed = self._held[-1] if self._held else None, self._failed
        known = [str(end)]
        known += [f"at least {held:g}/s held, unconfirmed"] if held is not None else []
        known += [self._upper("did not")] if failed is not None else []
        return Capacity(
            held, failed, tuple(self._trials), "; ".join(known), end.limited_by, undecided=failed in self._undecided
        )

    def _upper(self, does_not: str) -> str:
        """What is known of the lowest rate that counts as not held."""
        assert self._failed is not None
        if self._failed not in self._undecided:
            return f"{self._failed:.4g}/s {does_not}"
        runs = sum(trial.rate == self._failed for trial in self._trials)
        return f"{self._failed:.4g}/s could not be told in {runs} runs (more requests a run would tell)"

    def _bracket(self) -> None:
        """Grow the rate until one does not hold."""
        rate = self._settings.low
        while self._holds(rate) and rate < self._settings.high:
            rate = min(rate * self._settings.growth, self._settings.high)

    def _narrow(self) -> None:
        """Bisect between the highest that held and the lowest that did not, on the logarithm."""
        while self._held and self._failed is not None:
            low = self._held[-1]
            if self._failed / low <= 1 + self._settings.resolution:
                return
            self._holds(_round(math.sqrt(low * self._failed)))

    def _confirm(self) -> None:
        """Fresh runs at the best rate; where one does not hold, the search goes on below it."""
        low = self._settings.low
        while True:
            if self._held:
                rate = self._held[-1]
                if all(self._holds(rate, confirming=True) for _ in range(self._settings.confirmations)):
                    self._confirmed = rate
                    return
                self._narrow()
            elif self._failed is None or self._failed <= low:
                return
            else:
                self._holds(_round(max(low, self._failed / self._settings.growth)))
                self._narrow()

    def _holds(self, rate: float, confirming: bool = False) -> bool:
        """Run at a rate until it is decided or the attempts are used up.

        A run that the client spoilt says nothing and is repeated too; when all of them are spoilt, the client's own
        limit has been met and the search ends.
        """
        answers: list[Answer] = []
        why = ""
        while len(answers) < self._settings.attempts and Answer.FAILS not in answers:
            attempt = self._attempts.get(rate, 0)
            self._attempts[rate] = attempt + 1
            answer, why, folder = self._trial(rate, attempt)
            answers.append(answer)
            self._trials.append(Trial(rate, attempt, answer, why, confirming, folder))
            if answer is Answer.HOLDS:
                if not confirming:
                    self._held.append(rate)
                return True
            if answer is Answer.STOPPED:
                raise _End("user", "stopped")
        if set(answers) == {Answer.INVALID}:
            raise _End("client", f"at {rate:g}/s the run is invalid ({why}): the client, not the server, ends here")
        if Answer.FAILS in answers:
            self._undecided.discard(rate)
        elif rate != self._failed:  # which a run may have failed before
            self._undecided.add(rate)
        self._held = [held for held in self._held if held < rate]
        self._failed = rate if self._failed is None else min(self._failed, rate)
        return False


def _round(rate: float) -> float:
    """Four digits are enough to say and to repeat."""
    return float(f"{rate:.4g}")


def _check(settings: SearchSettings) -> None:
    if not (0 < settings.low <= settings.high and math.isfinite(settings.high)):
        raise ConfigError(f"the search range {settings.low:g} .. {settings.high:g} is empty")
    if not (0.001 <= settings.resolution <= 1 and settings.attempts >= 1 and settings.confirmations >= 0):
        raise ConfigError("the resolution must lie between 0.1 % and 100 %, with at least one attempt")
    if settings.growth <= 1:
        raise ConfigError("the growth must be above 1")


# Trials that are runs


def judge_trial(analysis: Analysis) -> tuple[Answer, str]:
    """What a run says about its rate: its gates, and whether the server gave in."""
    verdict = analysis.verdict
    grave = [r for r in verdict.reasons if r.level is Level.INVALID and r.code not in _SERVER_GIVES_IN]
    if grave:
        return Answer.INVALID, grave[0].text
    gave_in = [r for r in verdict.reasons if r.code in _SERVER_GIVES_IN]
    if gave_in:
        return Answer.FAILS, gave_in[0].text
    failed = [g for g in verdict.gates if g.status is Status.FAIL]
    if failed:
        return Answer.FAILS, "; ".join(f"{g.gate.text}: {g.value_text}" for g in failed)
    unclear = [g for g in verdict.gates if g.status is not Status.PASS]
    if unclear:
        return Answer.OPEN, "; ".join(f"{g.gate.text}: {g.value_text} ({g.why})" for g in unclear)
    return Answer.HOLDS, "; ".join(f"{g.gate.text}: {g.value_text}" for g in verdict.gates)


def run_capacity(
    plan: BenchPlan,
    out_dir: Path,
    settings: SearchSettings,
    on_progress: OnProgress | None = None,
    on_trial: Callable[[float, int, Answer, str], None] | None = None,
) -> Capacity:
    """Search with real runs, one folder a trial, and capacity.json beside them. The plan must have gates."""
    if not plan.gates:
        raise ConfigError("capacity needs a promise to keep: give at least one --gate or --slo")
    if (out_dir / INDEX).exists():
        raise ConfigError(f"{out_dir} already holds a capacity search; choose another folder")
    checked: SelfCheck | None = None
    checked_at = 0.0

    def trial(rate: float, attempt: int) -> tuple[Answer, str, str]:
        nonlocal checked, checked_at
        name = f"rate-{rate:g}-{attempt}"
        each = at_load(plan, "rate", rate, f":rate={rate:g}:{attempt}")
        each = msgspec.structs.replace(each, seed=plan.seed + attempt)
        # The client is checked again whenever the load grows beyond what it was checked at.
        extras = Extras(labels={"capacity": f"{rate:g}", "attempt": str(attempt)}, parent=out_dir.name)
        extras.self_check = checked if rate <= checked_at else None
        folder = run(each, out_dir / name, on_progress, extras)
        if rate > checked_at:
            checked, checked_at = folder.manifest.self_check, rate
        if folder.manifest.segments[-1].ended == "interrupted":
            return Answer.STOPPED, "stopped", name
        answer, why = judge_trial(analyse(folder))
        if on_trial is not None:
            on_trial(rate, attempt, answer, why)
        return answer, why, name

    found = find_capacity(trial, settings)
    out_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(out_dir / INDEX, msgspec.json.format(msgspec.json.encode(found), indent=2))
    return found
