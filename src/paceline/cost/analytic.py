"""The time of a step from first principles: the work of each kernel, and how fast a chip does work of that kind.

    cost = AnalyticCost(Deployment(find_model("llama-3-8b"), find_chip("h100")))
    cost.predict(StepShape(tokens=64, rows=64, context=64 * 1500)).seconds
    for operation in cost.operations(shape): ...

A step is a sum: kernels follow each other on a chip, chips of a stage work alike, stages follow each other. The
multiplies depend on the tokens, the head on the rows, attention on what is read; so the first two are remembered by
their number and an answer costs a few lookups. Kernel times come from a `Kernels`: efficiency curves of the chip's
family (the default), or measured tables. Nothing here is fitted on steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from paceline.core.protocols import Estimate
from paceline.core.shape import StepShape
from paceline.cost.chip import Chip
from paceline.cost.deployment import Deployment
from paceline.cost.efficiency import FAMILIES, Efficiency, Host, Kernels, Silicon
from paceline.cost.operation import Operation
from paceline.cost.operations import Work
from paceline.cost.split import split

# Where a maker publishes no rate of arithmetic (Apple), prefills need a guess: FLOP per byte of memory bandwidth, as
# low as general-purpose chips have. Answers that use it say so.
GUESSED_INTENSITY = 30.0
# How far off a part of the sum may be, as a share of it: so that nine in ten measured servings fall inside
# (tests/cost/test_serving_points.py). Host time depends most on the machine around the chip.
SPREAD_TOKENS, SPREAD_ATTENTION, SPREAD_HOST, SPREAD_UNKNOWN = 0.15, 0.25, 0.50, 0.50
# Generations whose kernels were measured; the others' curves follow from these and from datasheets.
MEASURED, SPREAD_UNMEASURED = frozenset({"ampere", "hopper"}), 0.15
UNKNOWN_FAMILY = "generic"
MOST_TOKENS = 1 << 20  # in a step; more is outside what kernels are known for
REMEMBERED = 1 << 15  # token counts and row counts kept
WINDOW = 256  # steps whose errors are kept


class _Part(NamedTuple):
    """Seconds of a group of operations, and whether all of their times are known."""

    seconds: float
    known: bool


class AnalyticCost:
    """Implements `CostModel` for one deployment. About 15 us for an answer."""

    def __init__(self, deployment: Deployment, kernels: Kernels | None = None, host: Host | None = None) -> None:
        silicon = silicon_of(deployment.chip)
        self.deployment = deployment
        self.kernels: Kernels = kernels if kernels is not None else Efficiency(silicon)
        self.host = host or FAMILIES.get(silicon.family, FAMILIES["generic"]).host
        described = silicon.family in FAMILIES and silicon.family != UNKNOWN_FAMILY
        self.knows_chip = bool(deployment.chip.tflops) and (kernels is not None or described)
        self._spread = 0.0 if kernels is not None or silicon.family in MEASURED else SPREAD_UNMEASURED
        self._work = Work(deployment, self.kernels)
        self._most_context = deployment.model.max_context or MOST_TOKENS
        self._by_tokens: dict[int, _Part] = {}
        self._by_rows: dict[int, _Part] = {}
        self._ratios: deque[float] = deque(maxlen=WINDOW)

    @property
    def ready(self) -> bool:
        """Always: it needs no steps."""
        return True

    @property
    def request_s(self) -> float:
        """CPU time of a request, once: HTTP, tokenisation, its first chunk. In no step's time."""
        return self.host.request_s

    def predict(self, shape: StepShape) -> Estimate:
        """Seconds from the start of the step to its tokens, through all pipeline stages.

        `known` is false where the chip's family or arithmetic rate is a guess, where a kernel's source does not reach,
        where the step is larger than any kernel was measured at, or where its rows are longer than the model takes; the
        range is wider then.
        """
        tokens, rows = shape.tokens, shape.rows
        if tokens <= 0 or rows <= 0:
            return Estimate(0.0, 0.0, 0.0)
        by_tokens = self._by_tokens.get(tokens) or self._remember(self._by_tokens, tokens, self._work.of_tokens)
        by_rows = self._by_rows.get(rows) or self._remember(self._by_rows, rows, self._work.of_rows)
        known = self.knows_chip and tokens <= MOST_TOKENS and shape.context <= rows * self._most_context
        attention_s, known = 0.0, known and by_tokens.known and by_rows.known
        for operation in self._work.of_attention(split(shape)):
            attention_s += operation.seconds
            known = known and operation.known
        linear_s = by_tokens.seconds + by_rows.seconds
        host_s = self._host_s(rows, linear_s + attention_s)
        seconds = linear_s + attention_s + host_s
        spread = SPREAD_TOKENS * linear_s + SPREAD_ATTENTION * attention_s + SPREAD_HOST * host_s
        spread += (self._spread if known else SPREAD_UNKNOWN) * seconds
        return Estimate(seconds, max(seconds - spread, 0.1 * seconds), seconds + spread, known)

    def operations(self, shape: StepShape) -> tuple[Operation, ...]:
        """The operations of the step on the busiest chip, host work last; their seconds add up to `predict`'s."""
        if shape.tokens <= 0 or shape.rows <= 0:
            return ()
        work = self._work
        found = [*work.of_tokens(shape.tokens), *work.of_attention(split(shape)), *work.of_rows(shape.rows)]
        layers, chip_s = self.deployment.model.layers, sum(operation.seconds for operation in found)
        launches_s = layers * self.host.layer_s + self.host.waits_s(layers, chip_s)
        step_s = self._host_s(shape.rows, chip_s) - launches_s
        found.append(Operation("launches", layers, 0.0, 0.0, launches_s, "host"))
        found.append(Operation("step on the host", 1, 0.0, 0.0, step_s, "host"))
        return tuple(found)

    def interval_s(self, shape: StepShape) -> float:
        """Seconds between the starts of two steps that follow each other: with pipeline stages, that of the slowest."""
        deployment = self.deployment
        slowest = max(sum(deployment.stage_layers(stage)) for stage in range(deployment.pp))
        return self.predict(shape).seconds * slowest / deployment.model.layers

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Remember how far off it was; it does not learn (see `fit.py` and `online.py` for models that do)."""
        predicted = self.predict(shape).seconds
        if seconds > 0.0 and predicted > 0.0:
            self._ratios.append(predicted / seconds)

    def errors(self) -> tuple[float, float]:
        """(median, p95) of |predicted - real| / real over the last steps; (0, 0) before any."""
        found = sorted(abs(ratio - 1.0) for ratio in self._ratios)
        if not found:
            return 0.0, 0.0
        return found[len(found) // 2], found[min(len(found) - 1, int(0.95 * len(found)))]

    def _host_s(self, rows: int, chip_s: float) -> float:
        """Copies of the attention have a host process each, which sees to its own rows."""
        host, layers = self.host, self.deployment.model.layers
        mine = self._work.rank_tokens(rows)
        return host.step_s + host.row_s * mine + host.layer_s * layers + host.waits_s(layers, chip_s)

    def _remember(self, parts: dict[int, _Part], key: int, of: Callable[[int], Iterator[Operation]]) -> _Part:
        """The sum of a group, kept."""
        if len(parts) >= REMEMBERED:
            parts.clear()
        made = tuple(of(key))
        part = _Part(sum(operation.seconds for operation in made), all(operation.known for operation in made))
        parts[key] = part
        return part


def silicon_of(chip: Chip) -> Silicon:
    """The chip as kernel curves want it. Without a published rate its arithmetic is a guess from its bandwidth."""
    flops = {dtype: rate * 1e12 for dtype, rate in chip.tflops.items()}
    flops.setdefault("bf16", GUESSED_INTENSITY * chip.bandwidth)
    return Silicon(
        flops=flops,
        hbm_bytes_per_s=chip.bandwidth,
        link_bytes_per_s=chip.link_gbs * 1e9,
        family=chip.family,
        sms=chip.sms,
    )
