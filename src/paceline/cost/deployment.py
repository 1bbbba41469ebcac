"""A model laid out over chips: what each chip holds, and whether it fits.

    Deployment(find_model("llama-3-70b"), find_chip("h100"), tp=4, weights="fp8").memory().num_blocks

Four degrees. `tp` splits heads and matrices; `dp` are copies of the attention that serve different requests inside one
engine, as large mixtures of experts are run; `pp` splits the layers into stages; `ep` deals whole experts over the
tp * dp chips of a stage, which split each expert tp * dp / ep ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.cost.chip import Chip
from paceline.cost.memory import Memory, Reserve
from paceline.cost.model import Model
from paceline.cost.precision import PRECISIONS, Precision, find_precision
from paceline.errors import ConfigError

_UNQUANTIZED = PRECISIONS["bf16"]
_MOST = 1 << 16  # chips in a degree


@dataclass(frozen=True, slots=True)
class Deployment:
    """One engine. ConfigError where a degree does not divide what it splits."""

    model: Model
    chip: Chip
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    weights: str = "auto"  # precision; "auto": that of the published weights
    kv: str = "auto"  # "auto": 16 bits
    chips_per_node: int = 0  # chips joined by the fast link; 0: as the catalogue says
    network_gbs: float = 50.0  # between nodes: for each chip, one direction; 50 is a 400 Gbit/s card for each
    uneven_stages: bool = False  # allow stages that differ by a layer
    expert_skew: float = 0.0  # how unevenly tokens choose experts: popularity of the i-th goes as i ** -skew

    def __post_init__(self) -> None:
        if self.weights == "auto":
            object.__setattr__(self, "weights", self.model.native)
        if self.kv == "auto":
            object.__setattr__(self, "kv", "bf16")
        find_precision(self.weights, what="weights")
        find_precision(self.kv, what="kv")
        if not self.chips_per_node:
            object.__setattr__(self, "chips_per_node", self.chip.node)
        for name in ("tp", "pp", "ep", "dp", "chips_per_node"):
            value = getattr(self, name)
            if not 1 <= value <= _MOST:
                raise ConfigError(f"{name} is {value}; it must be from 1 to {_MOST}")
        if not 0.0 < self.network_gbs < 1e6:
            raise ConfigError(f"network_gbs is {self.network_gbs}; it must be above 0 and below 1,000,000")
        if not 0.0 <= self.expert_skew <= 4.0:
            raise ConfigError(f"expert_skew is {self.expert_skew}; it must be from 0 (even) to 4")
        self._check_degrees()

    def _check_degrees(self) -> None:
        model, experts = self.model, self.model.experts
        _divide("tp", self.tp, model.heads, f"the {model.heads} attention heads of {model.name}")
        if model.latent is None and model.kv_heads % self.tp and self.tp % model.kv_heads:
            raise ConfigError(
                f"tp={self.tp} neither divides the {model.kv_heads} key-value heads of {model.name} nor is a multiple "
                f"of them; choose one of {_some(tp_degrees(model))}"
            )
        if model.dense_layers:
            _divide("tp", self.tp, model.ffn, f"the MLP width {model.ffn} of {model.name}")
        if self.pp > model.layers:
            raise ConfigError(f"pp={self.pp} is more than the {model.layers} layers of {model.name}")
        if not self.uneven_stages:
            hint = "; or allow stages that differ by a layer: --uneven-stages, in Python uneven_stages=True"
            _divide("pp", self.pp, model.layers, f"the {model.layers} layers of {model.name}", hint)
        if experts is None:
            if self.ep > 1:
                raise ConfigError(f"ep={self.ep} needs a mixture of experts; {model.name} has none")
            return
        _divide("ep", self.ep, experts.count, f"the {experts.count} experts of {model.name}")
        if self.width % self.ep:
            raise ConfigError(f"ep={self.ep} does not divide the {self.width} chips of a stage (tp * dp)")
        _divide("tp * dp / ep", self.expert_tp, experts.inter, f"the expert width {experts.inter} of {model.name}")

    @property
    def width(self) -> int:
        """Chips that work on a layer."""
        return self.tp * self.dp

    @property
    def chips(self) -> int:
        """Chips in all."""
        return self.width * self.pp

    @property
    def expert_tp(self) -> int:
        """Chips that split one expert."""
        return self.width // self.ep

    @property
    def precision(self) -> Precision:
        """Of the weights."""
        return find_precision(self.weights, what="weights")

    @property
    def kv_precision(self) -> Precision:
        """Of the KV cache."""
        return find_precision(self.kv, what="kv")

    # What a number takes, by the part of the model it belongs to.

    @property
    def expert_weight_bytes(self) -> float:
        """Bytes of one weight of an expert."""
        return self.precision.bytes

    @property
    def linear_weight_bytes(self) -> float:
        """Bytes of one weight of attention or of a plain MLP."""
        return (_UNQUANTIZED if self.precision.scope == "experts" else self.precision).bytes

    @property
    def table_weight_bytes(self) -> float:
        """Bytes of one weight of embedding or head."""
        return (self.precision if self.precision.scope == "all" else _UNQUANTIZED).bytes

    # Whole model.

    @property
    def weights_bytes(self) -> float:
        """Bytes of the weights, each counted once."""
        return self._weights(self.model.experts.count if self.model.experts else 0, tables=1 if self.model.tied else 2)

    @property
    def token_weights_bytes(self) -> float:
        """Bytes of weights that one token alone is multiplied with: its experts, and no embedding (it is looked up)."""
        return self._weights(self.model.experts.active if self.model.experts else 0, tables=1)

    def _weights(self, experts: int, tables: int) -> float:
        model = self.model
        linear = model.layers * model.attention_params + model.dense_layers * model.mlp_params + model.hidden
        linear += model.moe_layers * model.expert_side_params
        expert = model.moe_layers * experts * model.expert_params
        table = tables * model.embedding_params
        return linear * self.linear_weight_bytes + expert * self.expert_weight_bytes + table * self.table_weight_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes kept for one token over all layers, each counted once (copies that `tp` makes are in `memory`)."""
        return self.model.kv_bytes_per_token(self.kv)

    def kv_bytes(self, context: int) -> float:
        """Bytes that one sequence needs, each counted once; layers that slide keep their window alone."""
        return self.model.kv_bytes(context, self.kv)

    def rule_of_thumb_bytes(self, factor: float = 1.8) -> float:
        """Memory to plan with before anything is known: weights times a factor for KV, activations and all else."""
        return self.weights_bytes * factor

    # One chip.

    def stage_layers(self, stage: int) -> tuple[int, int]:
        """(plain layers, layers with experts) of a stage; the first stages take what does not divide."""
        base, more = divmod(self.model.layers, self.pp)
        start = stage * base + min(stage, more)
        stop = start + base + (stage < more)
        plain = max(0, min(stop, self.model.dense_layers) - start)
        return plain, stop - start - plain

    @property
    def attention_params_per_chip(self) -> float:
        """Of one layer. Key-value heads are copied where there are fewer than `tp`; so are latent down-projections."""
        model, tp = self.model, self.tp
        norms = 2 * model.hidden
        if model.latent is not None:
            copied = model.hidden * (model.latent.q_rank + model.latent.kv_rank + model.latent.rope_dim)
            return (model.attention_params - copied - norms) / tp + copied + norms
        return model.hidden * model.head_dim * 2 * (model.heads // tp + self.kv_heads_per_chip) + norms

    @property
    def kv_heads_per_chip(self) -> int:
        """Key-value heads that a chip keeps; at least one."""
        return max(1, self.model.kv_heads // self.tp)

    @property
    def kv_numbers_per_chip(self) -> int:
        """Numbers that a chip keeps for one token in one layer. The latent vector of MLA is kept whole by each."""
        if self.model.latent is not None:
            return self.model.kv_numbers
        return 2 * self.kv_heads_per_chip * self.model.head_dim

    def stage_weights_bytes(self, stage: int) -> float:
        """Bytes of weights on each chip of a stage."""
        model = self.model
        plain, moe = self.stage_layers(stage)
        linear = (plain + moe) * self.attention_params_per_chip + plain * model.mlp_params / self.tp
        expert = 0.0
        if model.experts is not None:
            side = model.expert_side_params - model.hidden * model.experts.count
            linear += moe * (side / self.tp + model.hidden * model.experts.count)
            expert = moe * model.experts.count * model.expert_params / self.width
        first, last = stage == 0, stage == self.pp - 1
        tables = 1 if model.tied and self.pp == 1 else first + last
        table = tables * model.embedding_params / self.tp
        return linear * self.linear_weight_bytes + expert * self.expert_weight_bytes + table * self.table_weight_bytes

    def stage_kv_bytes_per_token(self, stage: int) -> float:
        """Bytes that each chip of a stage keeps for one token of its requests."""
        return sum(self.stage_layers(stage)) * self.kv_numbers_per_chip * self.kv_precision.bytes

    def memory(
        self,
        *,
        block_size: int = 16,
        utilization: float = 0.9,
        share_of: str = "total",
        step_tokens: int = 2048,
        max_rows: int = 256,
        used_bytes: float | None = None,
    ) -> Memory:
        """What the fullest chip holds, and how many KV blocks are left.

        `utilization` is the share of the chip that the engine may fill (vLLM), or with `share_of="free"` the share of
        what is free once the weights are loaded that KV may take (TensorRT-LLM). `step_tokens` and `max_rows` are the
        engine's limits, which its largest activations follow. `used_bytes`: what the chip reports as used before the KV
        pool is made, in place of our weights and reserve.
        """
        reserve = Reserve.of(self, step_tokens, max_rows)
        candidates = (
            Memory.share(
                total=self.chip.memory_bytes,
                utilization=utilization,
                share_of=share_of,
                weights=self.stage_weights_bytes(stage),
                reserve=reserve,
                token=self.stage_kv_bytes_per_token(stage),
                block_size=block_size,
                copies=self.dp,
                used=used_bytes,
            )
            for stage in range(self.pp)
        )
        return min(candidates, key=lambda memory: (memory.num_blocks, memory.kv_bytes))

    def num_blocks(self, block_size: int = 16, utilization: float = 0.9) -> int:
        """KV blocks that the engine will have (of each copy of the attention); 0 if the weights do not fit."""
        return self.memory(block_size=block_size, utilization=utilization).num_blocks

    def sequences(self, context: int, *, utilization: float = 0.9, hybrid: bool = False) -> int:
        """How many sequences of `context` tokens the KV memory holds.

        An engine that keeps one kind of block keeps all tokens in all layers; with `hybrid`, layers that slide keep
        their window alone (vLLM's hybrid KV cache manager).
        """
        memory = self.memory(utilization=utilization)
        if not hybrid:
            return memory.num_blocks // -(-context // memory.block_size) * self.dp
        kept = self.model.kv_bytes(context, self.kv) / self.model.kv_bytes_per_token(self.kv)
        each = memory.block_bytes / memory.block_size * kept
        return max(0, int(memory.kv_bytes // each)) * self.dp

    def fits(self, context: int = 1, rows: int = 1, *, utilization: float = 0.9) -> bool:
        """Whether `rows` sequences of `context` tokens fit beside the weights."""
        memory = self.memory(utilization=utilization)
        needed = rows * -(-context // memory.block_size)
        return 0 < needed <= memory.num_blocks * self.dp

    def alternatives(self, context: int = 1, rows: int = 1, *, utilization: float = 0.9) -> list[Deployment]:
        """For each precision of the weights, from ours down, the layout of fewest chips that fits, if one does."""
        best: dict[str, Deployment] = {}
        for other in self._others():
            known = best.get(other.weights)
            if known is not None and other._rank() >= known._rank():
                continue
            if other.fits(context, rows, utilization=utilization):
                best[other.weights] = other
        return sorted(best.values(), key=lambda other: -other.precision.bits)

    def _rank(self) -> tuple[int, int, float]:
        """Fewer chips first, then fewer stages, then more bits of KV."""
        return self.chips, self.pp, -self.kv_precision.bits

    def require_fit(self, context: int = 1, rows: int = 1, *, utilization: float = 0.9) -> Memory:
        """The memory of the fullest chip; ConfigError with the budget and what would fit, if this does not."""
        memory = self.memory(utilization=utilization)
        if self.fits(context, rows, utilization=utilization):
            return memory
        wanted = f"{rows} sequence{'s' * (rows > 1)} of {context} tokens"
        others = self.alternatives(context, rows, utilization=utilization)
        would = "; or ".join(other.layout for other in others) or "none of the layouts tried; choose a larger chip"
        raise ConfigError(f"{self.layout} does not hold {wanted}: {memory.line()}. What would: {would}")

    @property
    def layout(self) -> str:
        """In words, such as "llama-3-70b in bf16 on 4 h100 (tp 4)"."""
        degrees = ", ".join(
            f"{name} {value}" for name in ("tp", "pp", "dp", "ep") if (value := getattr(self, name)) > 1
        )
        kv = f", KV in {self.kv}" if self.kv != "bf16" else ""
        where = f"{self.chips} {self.chip.name}" if self.chips > 1 else self.chip.name
        return f"{self.model.name} in {self.weights}{kv} on {where}" + (f" ({degrees})" if degrees else "")

    def _others(self) -> Iterator[Deployment]:
        """Layouts to try: more chips a node, more nodes as stages, smaller weights, smaller KV."""
        weights = [self.weights, *(name for name in ("fp8", "int4") if PRECISIONS[name].bits < self.precision.bits)]
        caches = [self.kv, *(["fp8"] if self.kv_precision.bits > 8 else [])]
        nodes = [1, 2, 4, 8, 16] if self.chip.link_gbs else [1]
        for tp in tp_degrees(self.model):
            if tp > self.chips_per_node:
                continue
            for pp in nodes if tp == self.chips_per_node else [1]:
                for weight in weights:
                    for cache in caches:
                        try:
                            yield replace(
                                self, tp=tp, pp=pp, ep=1, dp=1, weights=weight, kv=cache, uneven_stages=pp > 1
                            )
                        except ConfigError:  # some other degree does not divide
                            continue


def tp_degrees(model: Model) -> tuple[int, ...]:
    """The tensor-parallel degrees that the heads of a model allow."""
    kv_heads = model.heads if model.latent else model.kv_heads
    return tuple(
        tp
        for tp in range(1, model.heads + 1)
        if model.heads % tp == 0
        and (kv_heads % tp == 0 or tp % kv_heads == 0)
        and (not model.dense_layers or model.ffn % tp == 0)
    )


def _divide(name: str, degree: int, size: int, what: str, hint: str = "") -> None:
    if size % degree:
        divisors = tuple(value for value in range(1, size + 1) if size % value == 0)
        raise ConfigError(f"{name}={degree} does not divide {what}; choose one of {_some(divisors)}{hint}")


def _some(values: tuple[int, ...]) -> str:
    """The first dozen."""
    return ", ".join(str(value) for value in values[:12]) + (", ..." if len(values) > 12 else "")
