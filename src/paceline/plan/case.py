"""What is asked about: a deployment, its traffic, its promises, and the two layers that answer, ideal and expected."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from paceline.core.protocols import CostModel
from paceline.core.shape import StepShape
from paceline.cost.analytic import AnalyticCost
from paceline.cost.chip import Chip
from paceline.cost.deployment import Deployment
from paceline.cost.memory import Memory
from paceline.cost.model import Model
from paceline.errors import ConfigError
from paceline.plan.answer import Expected
from paceline.plan.formula import Amount
from paceline.plan.ideal import Roofline
from paceline.plan.units import Unit

MOST_TOKENS = 10_000_000
MOST_BATCH = 4096  # of curves: beyond it every model on every chip is bound by compute or by its KV cache


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests as they are on average. `context` is what a decoding sequence holds, `prompt` what a new one brings."""

    context: int = 4096
    prompt: int = 1024
    output: int = 256
    batch: int = 8  # sequences that decode together, where an answer needs one

    def __post_init__(self) -> None:
        for name in ("context", "prompt", "output", "batch"):
            value = getattr(self, name)
            if not 1 <= value <= MOST_TOKENS:
                raise ConfigError(f"{name} is {value}; it must be from 1 to {MOST_TOKENS:,}")


@dataclass(frozen=True, slots=True)
class Targets:
    """What is promised: seconds to the first token, seconds between tokens."""

    ttft_s: float = 1.0
    itl_s: float = 0.05

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            value = getattr(self, name)
            if not 0.0 < value <= 86400.0:
                raise ConfigError(f"{name[:-2]} is {value:g} s; it must be above 0 and at most a day")


@dataclass(frozen=True, slots=True)
class Pool:
    """How an engine shares out a chip's memory."""

    block_size: int = 16
    utilization: float = 0.9  # share that the engine may use in all
    used_bytes: float | None = None  # on one chip before the KV pool is made; None: weights and reserve
    factor: float = 1.8  # rule of thumb: weights times this, for KV, activations and all else

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= 4096:
            raise ConfigError(f"block_size is {self.block_size}; it must be from 1 to 4096")
        if not 0.0 < self.utilization <= 1.0:
            raise ConfigError(f"utilization is {self.utilization:g}; it must be above 0 and at most 1")
        if self.used_bytes is not None and not 0.0 <= self.used_bytes < 1e15:
            raise ConfigError(f"used memory is {self.used_bytes:g} bytes; it must be from 0 to below 1e15")
        if not 1.0 <= self.factor <= 10.0:
            raise ConfigError(f"factor is {self.factor:g}; it must be from 1 to 10")


@dataclass(frozen=True, slots=True)
class Drafting:
    """Speculation: tokens drafted a step, the chance that one is accepted, a draft's time as a share of a step."""

    drafted: int = 4
    acceptance: float = 0.7
    cost: float | None = None  # None: a head of one layer, as EAGLE has

    def __post_init__(self) -> None:
        if not 1 <= self.drafted <= 64:
            raise ConfigError(f"drafted tokens are {self.drafted}; they must be from 1 to 64")
        if not 0.0 <= self.acceptance < 1.0:
            raise ConfigError(f"acceptance is {self.acceptance:g}; it must be from 0 to below 1")
        if self.cost is not None and not 0.0 <= self.cost <= 10.0:
            raise ConfigError(f"a draft's cost is {self.cost:g} of a step; it must be from 0 to 10")


@dataclass(frozen=True)  # without slots: what is derived is kept
class Case:
    """One deployment under one traffic. `price_per_hour` is that of one chip."""

    deployment: Deployment
    traffic: Traffic = field(default_factory=Traffic)
    targets: Targets = field(default_factory=Targets)
    pool: Pool = field(default_factory=Pool)
    drafting: Drafting = field(default_factory=Drafting)
    price_per_hour: float | None = None
    stamps: tuple[float, float, float] | None = None  # sent, first token, last token of a real request, seconds
    measured: CostModel | None = None  # of this very deployment, fitted; None: what is expected comes from datasheets
    weights_bytes: float | None = None  # of a file whose size is known, in place of parameters times bytes

    def __post_init__(self) -> None:
        if self.price_per_hour is not None and not 0.0 < self.price_per_hour < 1e9:
            raise ConfigError(f"the price per hour is {self.price_per_hour:g}; it must be above 0 and below 1e9")
        if self.weights_bytes is not None and not 0.0 < self.weights_bytes < 1e16:
            raise ConfigError(f"the weights are {self.weights_bytes:g} bytes; they must be above 0 and below 1e16")
        if self.stamps is not None and not -math.inf < self.stamps[0] <= self.stamps[1] <= self.stamps[2] < math.inf:
            raise ConfigError(f"stamps are {self.stamps}; sent, first and last token must follow each other")

    @property
    def model(self) -> Model:
        return self.deployment.model

    @property
    def chip(self) -> Chip:
        return self.deployment.chip

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of the case itself, whatever is asked about it."""
        most, traffic = self.model.max_context, self.traffic
        asked = (("context", traffic.context), ("prompt and output", traffic.prompt + traffic.output))
        return tuple(
            f"{what} of {tokens:,} tokens: {self.model.name} was made for {most:,}, and an engine takes no more"
            for what, tokens in asked
            if 0 < most < tokens
        )

    @cached_property
    def format(self) -> str:
        """In what the chip multiplies these weights; the maker may publish no rate for any format."""
        return self.deployment.precision.multiplied_in(self.chip.tflops)

    @cached_property
    def peak(self) -> float:
        """FLOP/s of one chip in that format; infinite where none is published, so that compute never binds."""
        return self.chip.tflops[self.format] * 1e12 if self.format in self.chip.tflops else math.inf

    @cached_property
    def roofline(self) -> Roofline:
        """The textbook's view: parameters as people round them, and the chips that work on a token together."""
        model, together = self.model, self.deployment.width
        params = model.nominal_params
        bytes_each = self.deployment.precision.bytes
        weights = self.weights_bytes or params * bytes_each
        routed = 0.0
        if model.experts is not None:
            share = model.moe_layers * model.experts.count * model.expert_params / model.params
            routed = weights * share
        return Roofline(
            params=params,
            active=params * model.active_params / model.params,
            weights=weights,
            bandwidth=together * self.chip.bandwidth,
            peak=together * self.peak,
            routed=routed,
            experts=model.experts.count if model.experts else 1,
            top_k=model.experts.active if model.experts else 1,
        )

    @cached_property
    def amounts(self) -> dict[str, Amount]:
        """The numbers most formulas put in, by the names they have there."""
        traffic = self.traffic
        return {
            **self.roofline.amounts,
            "bytes_per_param": Amount(self.deployment.precision.bytes, Unit.COUNT),
            "kv_per_token": Amount(self.kv_per_token, Unit.BINARY),
            "kv_per_sequence": Amount(self.kv_read(), Unit.BINARY),
            "context": Amount(traffic.context, Unit.COUNT),
            "prompt": Amount(traffic.prompt, Unit.COUNT),
            "output": Amount(traffic.output, Unit.COUNT),
            "batch": Amount(traffic.batch, Unit.COUNT),
            "memory": Amount(self.chip.memory_bytes, Unit.BYTES),
            "chips": Amount(self.chips, Unit.COUNT),
            "itl": Amount(self.targets.itl_s, Unit.SECONDS),
            "ttft": Amount(self.targets.ttft_s, Unit.SECONDS),
        }

    @property
    def chips(self) -> int:
        """Chips of one replica."""
        return self.deployment.chips

    def at_own_context(self) -> Case:
        """The same with what its own requests hold on average as context: their prompt and half of their answer."""
        traffic = self.traffic
        context = min(traffic.prompt + traffic.output // 2, MOST_TOKENS)
        return replace(self, traffic=replace(traffic, context=context))

    @cached_property
    def kv_per_token(self) -> float:
        """Bytes, over all layers and chips."""
        return self.deployment.kv_bytes_per_token

    @cached_property
    def kv_copies(self) -> float:
        """How often the chips keep (and read) a sequence's KV: heads that are fewer than `tp` are copied, and so is
        the latent vector of MLA."""
        return self.deployment.kv_numbers_per_chip * self.deployment.tp / self.model.kv_numbers

    def kv_per_sequence(self, context: int) -> float:
        """Bytes of one sequence, each counted once; a layer that slides keeps its window."""
        return self.deployment.kv_bytes(context)

    def kv_read(self, context: int | None = None) -> float:
        """Bytes that a decode step reads for one sequence (None: of the traffic's context), over all its chips."""
        return self.kv_copies * self.kv_per_sequence(self.traffic.context if context is None else context)

    @cached_property
    def memory(self) -> Memory:
        """What the fullest chip holds."""
        pool = self.pool
        return self.deployment.memory(
            block_size=pool.block_size, utilization=pool.utilization, used_bytes=pool.used_bytes
        )

    def sequences_that_fit(self, context: int) -> int:
        """Sequences of this context that the KV blocks hold; a layer that slides keeps its window alone."""
        kept = self.kv_per_sequence(context) / self.kv_per_token  # tokens that take as much in every layer
        blocks = math.ceil(kept / self.pool.block_size)
        return self.memory.num_blocks // blocks * self.memory.copies

    def attention_flops(self, tokens: float) -> float:
        """FLOPs of the query-key pairs of a causal prefill of `tokens`: scores and values, 2 each per number."""
        model = self.model
        pairs = tokens * tokens / 2.0
        seen = min(float(model.window or tokens), tokens)
        windowed = seen * seen / 2.0 + (tokens - seen) * seen
        return per_pair(model) * (model.full_layers * pairs + model.window_layers * windowed)

    @cached_property
    def analytic(self) -> AnalyticCost:
        """The cost model from datasheets and the efficiency of kernels."""
        return AnalyticCost(self.deployment)

    @property
    def cost(self) -> CostModel:
        """The expected layer."""
        return self.analytic if self.measured is None else self.measured

    @property
    def knows_times(self) -> bool:
        """Whether the expected layer is more than a guess."""
        return self.measured is not None or self.roofline.knows_compute

    def expect(self, shape: StepShape) -> Expected | None:
        """What the cost model expects of a step; None where the chip's arithmetic would be a guess."""
        if not self.knows_times:
            return None
        found = self.cost.predict(shape)
        return Expected(found.seconds, found.low, found.high, found.known)

    def decode(self, batch: int, context: int | None = None) -> Expected | None:
        """A step of `batch` sequences with this context each (None: the traffic's)."""
        held = self.traffic.context if context is None else context
        return self.expect(StepShape(tokens=batch, rows=batch, context=batch * held))

    def prefill(self, tokens: int) -> Expected | None:
        """A prompt alone, in one step."""
        return self.expect(StepShape().plus(0, tokens))

    def step_s(self, batch: int, chunk: int = 0) -> float:
        """Seconds expected of a decode step that also carries `chunk` tokens from the middle of a prompt.

        On a chip whose rate is not known these are the ideal's, and the chunk costs nothing.
        """
        if not self.knows_times:
            return self.roofline.decode_s(batch, self.kv_read())
        shape = StepShape(tokens=batch, rows=batch, context=batch * self.traffic.context)
        if chunk:
            shape = shape.plus(max(0, (self.traffic.prompt - chunk) // 2), chunk)
        return self.cost.predict(shape).seconds

    def prompt_s(self, tokens: int) -> float:
        """Seconds expected of a prompt alone."""
        return self.cost.predict(StepShape().plus(0, tokens)).seconds


def rate(amount: float, seconds: Expected | None) -> Expected | None:
    """`amount` per second of an expected time."""
    return (
        None
        if seconds is None
        else Expected(amount / seconds.value, amount / seconds.high, amount / seconds.low, seconds.known)
    )


def per_pair(model: Model) -> float:
    """FLOPs of one query-key pair in one layer: scores and weighted values, over all heads."""
    if model.latent is not None:
        latent = model.latent
        return 2.0 * model.heads * (latent.nope_dim + latent.rope_dim + latent.value_dim)
    return 4.0 * model.heads * model.head_dim
