"""A cost model fitted offline to recorded steps, and the calibration file that keeps it with what else was measured.

calibration = load_calibration("calibration.json")
calibration.cost.predict(shape)             # Estimate: seconds, low, high, known
calibration.cost.noise(random.Random(1))    # .draw(shape): step times as uneven as the machine's
calibration.overheads.after_s               # seconds between scheduler and client, plain values
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from paceline.core.shape import StepShape
from paceline.cost.beside import Beside, Toll
from paceline.cost.fitted import DECODE, PREFILL, QUANTILES, Band, FittedCost, Range, Term, kind_of
from paceline.cost.nonnegative import Array, fit_non_negative
from paceline.cost.recorded import StepRow
from paceline.errors import ConfigError

FORMAT, VERSION = "paceline-calibration", 1
KNOTS = tuple(float(round(2.0 ** (half / 2))) for half in range(2, 29))  # tokens, 2 to 16,384
LEAST_BEYOND = 8  # rows on both sides of a knot; fewer cannot tell what happens there
FOLDS = 5
BAND_ROWS = 40  # residuals in a band: enough for its 5 % and 95 % quantiles
MOST_BANDS = 6  # of a kind
FEWEST_ROWS = 30
BESIDE = tuple(entry.name for entry in fields(Beside))  # what a step is fitted on besides its own work
LEAST_SHARE = 0.05  # of a step's time is its own, however much was sent meanwhile
RUN, GROUPS = 20, 10  # steps that are left out together, and in how many groups
Z95 = NormalDist().inv_cdf(0.95)
NEIGHBOURS_S = 1.0  # steps that end within this of each other are one after the other
MOST_PERSISTENCE = 0.98


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a request pays outside of steps: seconds between a client on the same machine and the scheduler.

    A request sent at t is with the scheduler at t + `before_s` + `before_token_s` * its prompt's tokens, if no step is
    running then; else at the end of that step. A token committed at t reaches its client at t + `after_s` +
    `after_row_s` * its row's place in the step (0 for the first): the server writes one stream after the other.
    """

    before_s: float = 0.0
    before_token_s: float = 0.0
    after_s: float = 0.0
    after_row_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """One calibration file. `engine`: what was measured (model, dtype, KV blocks, ...); `provenance`: where and how."""

    cost: FittedCost
    overheads: Overheads = Overheads()
    engine: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "provenance": dict(self.provenance),
            "engine": dict(self.engine),
            "overheads": asdict(self.overheads),
            "cost": self.cost.to_row(),
        }

    def save(self, path: str | Path) -> None:
        """Write the file; one that was there is replaced whole. Raises ConfigError where that is not possible."""
        target = Path(path)
        scratch = target.with_name(f"{target.name}.{os.getpid()}.new")
        try:
            scratch.write_text(json.dumps(self.to_row(), indent=1) + "\n", encoding="utf-8")
            scratch.replace(target)
        except OSError as error:
            raise ConfigError(f"cannot write the calibration {path}: {error.strerror}") from error


def load_calibration(path: str | Path) -> Calibration:
    """A file that `paceline calibrate` wrote. Raises ConfigError for one that is missing, damaged or another thing."""
    try:
        row = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the calibration {path}: {error.strerror}; `paceline calibrate` makes one"
        ) from error
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise ConfigError(f"{path} is not a calibration: it is not JSON") from None
    if not isinstance(row, dict) or row.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a calibration: `paceline calibrate` makes one")
    if row.get("version") != VERSION:
        raise ConfigError(
            f"{path} is of version {row.get('version')!r}; this Paceline reads {VERSION}: calibrate again"
        )
    try:
        cost = FittedCost.from_row(row["cost"])
        told = row.get("overheads", {})
        overheads = Overheads(**{one.name: float(told.get(one.name, 0.0)) for one in fields(Overheads)})
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    return Calibration(cost, overheads, row.get("engine") or {}, row.get("provenance") or {})


def fit(rows: Sequence[StepRow] | Sequence[tuple[StepShape, float]]) -> FittedCost:
    """Fit a step-time model to recorded steps, in the order in which they ran. Raises ConfigError for too few.

    Weights come from all rows; errors, intervals and the noise come from rows that the fit which predicted them had not
    seen (each fold of every fifth row is left out once).
    """
    steps = [row if isinstance(row, StepRow) else StepRow(*row) for row in rows]
    steps = [row for row in steps if row.shape.rows and row.seconds > 0.0 and math.isfinite(row.seconds)]
    if len(steps) < FEWEST_ROWS:
        raise ConfigError(
            f"{len(steps)} recorded steps are too few to fit a cost model; at least {FEWEST_ROWS} are needed"
        )
    shapes = [row.shape for row in steps]
    seconds = np.array([row.seconds for row in steps])
    terms = choose_terms(shapes)
    features = np.array(
        [[*(term.value(row.shape) for term in terms), *(getattr(row.beside, name) for name in BESIDE)] for row in steps]
    )
    weights = fit_non_negative(features, seconds)
    alone = len(terms)
    predicted, tolls = _out_of_sample(features, seconds, weights, alone)
    errors = np.abs((predicted + tolls) / seconds - 1.0)
    # What the toll does not explain is the step's own unevenness; a step is never drawn as nothing.
    ratios = np.maximum(seconds - tolls, LEAST_SHARE * seconds) / predicted
    return FittedCost(
        [Term(term.feature, term.knot, float(weight)) for term, weight in zip(terms, weights[:alone], strict=True)],
        make_bands(shapes, ratios),
        _ranges(shapes),
        errors=(float(np.median(errors)), float(np.quantile(errors, 0.95))),
        persistence=_persistence(steps, ratios),
        toll=_toll(features, seconds, weights, alone),
    )


def _toll(features: Array, seconds: Array, weights: Array, alone: int) -> Toll:
    """The weights from column `alone` on, with their ranges from fits that leave out one group of steps each.

    Groups are runs of neighbours, because slow moments last (the jackknife of dependent observations).
    """
    group_of = np.arange(len(seconds)) // RUN % GROUPS
    found = np.array(
        [fit_non_negative(features[group_of != group], seconds[group_of != group])[alone:] for group in range(GROUPS)]
    )
    spread = Z95 * np.sqrt((GROUPS - 1) * found.var(axis=0))
    values: dict[str, Any] = {}
    for column, name in enumerate(("sent", "request", "prompt_token")):
        weight = float(weights[alone + column])
        values[f"{name}_s"] = weight
        values[f"{name}_range_s"] = (max(0.0, weight - float(spread[column])), weight + float(spread[column]))
    return Toll(**values)


def choose_terms(shapes: Sequence[StepShape]) -> list[Term]:
    """The features worth fitting: a knot in tokens needs steps below and above it."""
    tokens = np.array([shape.tokens for shape in shapes])
    knots = [knot for knot in KNOTS if (tokens <= knot).sum() >= LEAST_BEYOND and (tokens > knot).sum() >= LEAST_BEYOND]
    plain = [Term(name) for name in ("step", "rows", "chunk", "context", "pairs")]
    pieces = [Term(name, knot) for knot in knots for name in ("tokens_to", "tokens_beyond")]
    return [*plain, Term("tokens_beyond", 0.0), *pieces]


def make_bands(shapes: Sequence[StepShape], ratios: Array) -> list[Band]:
    """Quantiles of real / predicted by kind and, where there are enough rows, by number of tokens."""
    bands: list[Band] = []
    for kind in (DECODE, PREFILL):
        own = [i for i, shape in enumerate(shapes) if kind_of(shape) == kind]
        own.sort(key=lambda i: shapes[i].tokens)
        count = max(1, min(MOST_BANDS, len(own) // BAND_ROWS))
        cuts = [round(number * len(own) / count) for number in range(count + 1)]
        for first, last in itertools.pairwise(cuts):
            part = own[first:last]
            if part:
                most = float(shapes[part[-1]].tokens)
                found = _quantiles(ratios[part])
                if bands and bands[-1].kind == kind and bands[-1].most_tokens == most:
                    continue  # one size of step fills several bands: the first speaks for all
                bands.append(Band(kind, most, len(part), found))
    return bands


def _quantiles(ratios: Array) -> tuple[float, ...]:
    return tuple(float(value) for value in np.quantile(ratios, QUANTILES))


def _out_of_sample(features: Array, seconds: Array, weights: Array, alone: int) -> tuple[Array, Array]:
    """(each row's own time, its toll) by a fit without its fold; by the fit to all where that one would know nothing.

    The columns up to `alone` are the step's own.
    """
    own, toll = features[:, :alone] @ weights[:alone], features[:, alone:] @ weights[alone:]
    fold_of = np.arange(len(seconds)) % FOLDS
    for fold in range(FOLDS):
        held = fold_of == fold
        found = fit_non_negative(features[~held], seconds[~held])
        mine = features[held][:, :alone] @ found[:alone]
        own[held] = np.where(mine > 0.0, mine, own[held])
        toll[held] = features[held][:, alone:] @ found[alone:]
    return np.maximum(own, 1e-9), toll


def _ranges(shapes: Sequence[StepShape]) -> dict[str, Range]:
    found = {}
    for kind in (DECODE, PREFILL):
        own = [shape for shape in shapes if kind_of(shape) == kind]
        if own:
            found[kind] = Range(
                *(max(getattr(shape, name) for shape in own) for name in ("tokens", "rows", "context", "pairs"))
            )
    return found


def _persistence(steps: Sequence[StepRow], ratios: Array) -> float:
    """Lag-1 correlation of the ratios' normal scores over steps that followed one another; 0 where none is positive."""
    order = ratios.argsort().argsort()
    shares = (order + 0.5) / len(order)
    scores = _normal_scores(shares)
    near = [
        i
        for i in range(1, len(steps))
        if steps[i].at_s == 0.0 or 0.0 <= steps[i].at_s - steps[i].seconds - steps[i - 1].at_s < NEIGHBOURS_S
    ]
    if len(near) < FEWEST_ROWS:
        return 0.0
    before, after = scores[[i - 1 for i in near]], scores[near]
    spread = float(before.std() * after.std())
    if spread <= 0.0:
        return 0.0
    correlation = float(((before - before.mean()) * (after - after.mean())).mean()) / spread
    return min(max(0.0, correlation), MOST_PERSISTENCE)


def _normal_scores(shares: Array) -> Array:
    """Quantiles of the standard normal distribution."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse(float(share)) for share in shares])
