"""One run of the benchmark: results kept by key, servers, how much time is left."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _common import Report
from _server import server
from _state import State

from _interference.scenario import COMMON_LOAD, Scenario, Size
from _interference.variants import SLO, Variant

START_S = 6.0  # until a server is ready and the client has asked it what it needs to know


class OutOfTime(Exception):
    """What comes next would end after --minutes."""


@dataclass
class Bench:
    """What every part works with."""

    model: Path
    state: State
    size: Size
    report: Report
    scenario: Scenario
    lengths: list[tuple[int, int]]  # of the trace, scaled
    variants: tuple[Variant, ...]
    until_s: float  # on the monotonic clock: nothing that would end later is begun
    left_out: list[str] = field(default_factory=list)

    def measured(self, key: str, about_s: float, work: Callable[[], Any]) -> Any:
        """The result under this key, measured now if there is none. Raises OutOfTime."""
        found = self.state.get(key)
        if found is not None:
            return found
        if time.monotonic() + about_s > self.until_s:
            self.left_out.append(key)
            raise OutOfTime(key)
        print(f"  {key}: about {about_s:.0f} s", file=sys.stderr, flush=True)
        return self.state.put(key, work())

    def known(self, keys: Iterable[str]) -> dict[str, Any]:
        """What is there already under these keys."""
        found = {key: self.state.get(key) for key in keys}
        return {key: value for key, value in found.items() if value is not None}

    def left_s(self, planned: Mapping[str, float]) -> float:
        """How long what is planned and not yet measured will take."""
        return sum(about_s for key, about_s in planned.items() if self.state.get(key) is None)

    @contextlib.contextmanager
    def serving(
        self,
        variant: Variant,
        classes: dict[str, dict[str, float]] | None = None,
        flags: Sequence[str] = ("--no-batches",),
    ) -> Iterator[str]:
        """The URL of a server of that variant, with the scenario's promise."""
        options = variant.flags(self.scenario.classes if classes is None else classes)
        # As JSON, the server's log has no stages for people between our rows.
        with server(self.model, [*options, "--log-format", "json", *flags]) as url:
            yield url

    @contextlib.contextmanager
    def serving_if_asked(self, variant: Variant) -> Iterator[Callable[[], str]]:
        """The same, started at the first call: where every result is there already, no server is needed."""
        with contextlib.ExitStack() as stack:
            url = ""

            def ask() -> str:
                nonlocal url
                url = url or stack.enter_context(self.serving(variant))
                return url

            yield ask

    # What one part finds and others need

    @property
    def common_rate(self) -> float:
        """At which every preset's setting is chosen, in requests a second."""
        return COMMON_LOAD * self.scenario.most_per_s(self.lengths)

    @property
    def full_load(self) -> dict[str, Any]:
        """slo's capacity as `rate`, and what it is; before it was searched, the common rate stands in for it."""
        found = self.state.get("capacity slo")
        if found and found["rate"]:
            return {"rate": float(found["rate"]), "is": "slo's capacity"}
        return {"rate": self.common_rate, "is": "the common rate: slo's capacity was not known"}

    @property
    def full_rate(self) -> float:
        """The rate of `full_load`."""
        rate: float = self.full_load["rate"]
        return rate

    def rivals(self) -> list[Variant]:
        """The best preset at the common rate, if it is known, then the vendors' defaults."""
        best = (self.state.get("best at the common rate") or {}).get("name")
        chosen = [v for v in self.variants if v.name == best]
        return chosen + [v for v in self.variants if v.vendor_default and v not in chosen and v is not SLO]
