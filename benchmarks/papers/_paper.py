"""What the scripts that reproduce published results share: engines, traffic, capacity, and paper beside ours.

A script states the paper's configuration and value, runs the simulator as anybody would (datasheet figures and default
efficiencies, nothing fitted to the paper), prints both side by side, and says by how much and why where they differ.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.config import SchedulerConfig
from paceline.core.protocols import CostModel
from paceline.core.sampling import SamplingParams
from paceline.core.step import RequestSpec
from paceline.cost.analytic import AnalyticCost
from paceline.cost.catalogue import find_chip, find_model
from paceline.cost.deployment import Deployment
from paceline.measure.stats import percentile
from paceline.simulate.backend import OUTPUT, STOP
from paceline.simulate.fleet.blueprint import Blueprint, Role
from paceline.simulate.fleet.fleet import Fleet
from paceline.simulate.fleet.link import LinkSpec
from paceline.simulate.fleet.report import FleetRun
from paceline.simulate.traffic import Arrival, ListTraffic
from paceline.version import __version__

DATA = Path(__file__).parents[3] / "shared" / "data"

Length = tuple[int, int]  # prompt and output tokens


def arguments(doc: str | None, add: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """The flags every script takes, and whatever `add` puts to them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute at most: fewer requests, fewer probes")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every figure here")
    parser.add_argument("--seed", type=int, default=0)
    if add is not None:
        add(parser)
    return parser.parse_args()


class Paper:
    """One published result: its configuration, rows of paper against ours, and what we make of the difference."""

    def __init__(self, title: str, source: str, args: argparse.Namespace) -> None:
        self._began = time.perf_counter()
        self._args = args
        self._found: dict[str, Any] = {"title": title, "source": source, "settings": {}, "rows": [], "notes": []}
        print(f"{title}\n  {source}")

    def setting(self, name: str, value: object) -> None:
        """A part of the configuration, the paper's or ours."""
        self._found["settings"][name] = str(value)
        print(f"  {name}: {value}")

    def row(
        self,
        what: str,
        paper: float | str | None,
        ours: float | str,
        unit: str = "",
        *,
        within: float | None = None,
        holds: bool | None = None,
        why: str = "",
    ) -> None:
        """Paper's value beside ours. Checked where `within` (relative) or `holds` is given; None: shown alone."""
        if not any(row for row in self._found["rows"]):
            print(f"\n  {'':<58}{'paper':>12}{'ours':>12}{'off':>8}")
        off = ours / paper - 1.0 if isinstance(ours, float | int) and isinstance(paper, float | int) and paper else None
        if within is not None:
            holds = off is not None and abs(off) <= within
        label = f"{what} [{unit}]" if unit else what
        told = "" if off is None else f"{off:+8.0%}"
        verdict = {True: "  holds", False: "  DIFFERS", None: ""}[holds]
        print(f"  {label:<58}{_text(paper):>12}{_text(ours):>12}{told:>8}{verdict}")
        if why:
            print(f"      {why}")
        row = {"what": what, "unit": unit, "paper": paper, "ours": ours, "off": off, "within": within}
        self._found["rows"].append({**row, "holds": holds, "why": why})
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """What to think of it."""
        self._found["notes"].append(text)
        print(f"  {text}")

    def finish(self) -> int:
        """Write the JSON file, if asked for; the exit status: 1 where a checked row differs."""
        checked = [row["holds"] for row in self._found["rows"] if row["holds"] is not None]
        seconds = time.perf_counter() - self._began
        print(f"\n  {sum(checked)} of {len(checked)} checked rows hold; {seconds:.0f} s")
        if self._args.json is not None:
            head = {"paceline": __version__, "quick": self._args.quick, "seed": self._args.seed, "seconds": seconds}
            self._args.json.write_text(json.dumps({**head, **self._found}, indent=1) + "\n")
        return 0 if all(checked) else 1


def _text(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4g}"


# Engines


@dataclass(frozen=True, slots=True)
class Engine:
    """A model on a chip under a policy; `blueprint` makes a replica of it."""

    model: str
    chip: str
    tp: int = 1
    policy: str = "decode_first"
    options: tuple[tuple[str, bool | int | float | str], ...] = ()
    max_num_seqs: int = 256
    budget: int = 2048  # most tokens of a step
    max_model_len: int = 16_384
    kv_tokens: int | None = None  # as published; None: what our memory model leaves
    prefix_caching: bool = False
    block_size: int = 16
    cost: CostModel | None = None  # in place of the analytic one

    @property
    def deployment(self) -> Deployment:
        return Deployment(find_model(self.model), find_chip(self.chip), tp=self.tp, weights="bf16")

    def law(self) -> CostModel:
        """How long its steps take."""
        return AnalyticCost(self.deployment) if self.cost is None else self.cost

    def blueprint(
        self, *, role: Role = Role.WHOLE, network: LinkSpec | None = None, price: float | None = None
    ) -> Blueprint:
        """A replica of this engine."""
        deployment = self.deployment
        size = self.block_size
        blocks = deployment.num_blocks(size) if self.kv_tokens is None else self.kv_tokens // size
        config = SchedulerConfig(
            num_blocks=blocks,
            max_model_len=min(self.max_model_len, blocks * size),
            block_size=size,
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.max_num_seqs,
            prefix_caching=self.prefix_caching or role is not Role.WHOLE,
            policy=self.policy,
            policy_options=self.options,
        )
        return Blueprint(
            config,
            self.law(),
            role=role,
            chips=self.tp,
            chip=self.chip,
            kv_bytes_per_token=deployment.kv_bytes_per_token,
            network=network,
            price_per_chip_hour=price,
        )


# Traffic


def requests(
    times: Iterable[float], lengths: Iterable[Length], *, most: int | None = None, itl_s: float | None = None
) -> list[Arrival]:
    """Requests with prompts of their own. `most` is the max_tokens that clients ask for, where it is not the length."""
    made = []
    for number, (at_s, (prompt, output)) in enumerate(zip(times, lengths, strict=False)):
        asked = output if most is None else max(most, output)
        sampling = SamplingParams(temperature=0.0, max_tokens=asked, stop_token_ids=(STOP,))
        spec = RequestSpec(f"r{number}", (number + 2,) * prompt, sampling, sent_s=at_s, itl_s=itl_s)
        answer = None if asked == output else (OUTPUT,) * (output - 1) + (STOP,)
        made.append(Arrival(at_s, spec, output, answer, index=number))
    return made


def poisson(rate: float, count: int, seed: int) -> Iterator[float]:
    """Times of a Poisson process. One seed gives the same gaps at every rate, scaled."""
    rng = random.Random(f"{seed}:arrivals")
    at_s = 0.0
    for _ in range(count):
        at_s += rng.expovariate(1.0) / rate
        yield at_s


def lognormal(median: float, p90: float, rng: random.Random, *, low: int = 1, high: int = 10**9) -> int:
    """A length from the log-normal law with these quantiles, within bounds."""
    sigma = math.log(p90 / median) / 1.2816  # the normal law's 90 % point
    return max(low, min(high, round(median * math.exp(sigma * rng.gauss(0.0, 1.0)))))


def azure_lengths(count: int, seed: int) -> list[Length]:
    """Pairs of lengths drawn from the Azure conversation trace."""
    lines = (DATA / "azure_conv_2023.csv").read_text().splitlines()[1:]
    pairs = [(int(row[1]), int(row[2])) for row in (line.split(",") for line in lines)]
    rng = random.Random(f"{seed}:lengths")
    return [pair for pair in rng.choices(pairs, k=count) if min(pair) > 0]


# Runs


def serve(members: Sequence[tuple[str, Blueprint]], arrivals: list[Arrival], **options: Any) -> FleetRun:
    """A fleet under these requests, to their end unless `until_s` says otherwise."""
    until_s = options.pop("until_s", float("inf"))
    return Fleet(members, **options).run(ListTraffic(arrivals), until_s=until_s)


def highest(holds: Callable[[float], bool], start: float, *, tolerance: float, most: float = 1e6) -> float:
    """The highest rate at which `holds`, within a relative tolerance; 0 where it holds at none that can be told apart.

    Doubles or halves from `start` until the answer changes, then bisects.
    """
    low, high = 0.0, start
    while holds(high):
        low, high = high, 2.0 * high
        if high > most:
            return low
    while low == 0.0:
        lower = high / 2.0
        if lower < start / 256.0:
            return 0.0
        if holds(lower):
            low = lower
        else:
            high = lower
    while high - low > tolerance * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def quantile(values: Sequence[float], share: float) -> float:
    """A percentile of a sample, `share` from 0 to 1; of none, 0."""
    return percentile(values, 100.0 * share) or 0.0


def mean(values: Iterable[float]) -> float:
    """Of none, 0."""
    found = list(values)
    return statistics.fmean(found) if found else 0.0
