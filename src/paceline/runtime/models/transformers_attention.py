"""Our paged attention inside transformers' modelling code.

transformers lets an attention function and a mask function be registered under a name. Both are called for every
attention layer of a forward pass, in the same order each time; that order, not a layer number, is what identifies a
layer here, so models whose numbering is unusual run too. What they need to know about the step passes through a
context variable, because not every model hands unknown keyword arguments down to its attention.

The first forward (`probe`) learns what each layer caches and which keys its mask lets it see. A mask function is
asked directly, at positions far beyond the few tokens of the probe: full and sliding attention are understood, and
everything else (chunks, both directions, prefixes, added biases) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UnsupportedModel
from paceline.runtime.batch import RaggedBatch
from paceline.runtime.kernels.attention import paged_attention
from paceline.runtime.kernels.kvpool import KVPool, KVSpec

NAME = "paceline_paged"
_HARMLESS_TENSORS = ("position_ids",)

# (batch, head, query position, key position) -> may see, elementwise over tensors
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """What the probe learned of one attention call."""

    spec: KVSpec
    window: int | None  # keys a query sees, itself included; None is all before it


@dataclass(slots=True)
class Probe:
    """A first forward over a few tokens of one sequence. `horizon` is the longest context that will be served."""

    horizon: int
    layers: list[Layer] = field(default_factory=list)
    # Masks handed out, by address: (mask, its function). Held so that no address is used twice.
    masks: dict[int, tuple[Tensor, MaskFunction]] = field(default_factory=dict)

    def make_mask(self, function: MaskFunction, queries: int, keys: int, device: torch.device) -> Tensor:
        """A causal mask [1, 1, queries, keys] (0 or -inf) that is recognised when a layer brings it back."""
        mask = torch.full((1, 1, queries, keys), float("-inf"), device=device).triu_(1)
        self.masks[mask.data_ptr()] = (mask, function)
        return mask

    def attend(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Note the layer; its output is zeros [1, T, H, Dv]."""
        name = type(module).__name__
        if not (q.shape[0] == k.shape[0] == 1 and q.shape[2] == k.shape[2] == v.shape[2]):
            raise UnsupportedModel(f"{name} attends over keys that are not those of its own tokens")
        if q.shape[1] % k.shape[1] or v.shape[1] != k.shape[1]:
            raise UnsupportedModel(f"{name} has {q.shape[1]} query, {k.shape[1]} key and {v.shape[1]} value heads")
        window = None
        if mask is not None:
            known = self.masks.get(mask.data_ptr())
            if known is None:
                raise UnsupportedModel(f"{name} makes or changes its attention mask in a way of its own")
            window = mask_window(known[1], self.horizon, name)
        self.layers.append(Layer(KVSpec(k.shape[1], k.shape[3], v.shape[3]), window))
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


@dataclass(slots=True)
class Step:
    """One served step. `calls` counts the attention layers passed so far."""

    batch: RaggedBatch
    pool: KVPool
    layers: tuple[Layer, ...]
    calls: int = 0


_current: ContextVar[Probe | Step | None] = ContextVar("paceline_transformers_step", default=None)


@contextmanager
def running(state: Probe | Step) -> Iterator[None]:
    """Attention calls within belong to `state`."""
    token = _current.set(state)
    try:
        yield
    finally:
        _current.reset(token)


def register() -> None:
    """Make NAME known to transformers; more than once is the same as once."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    *, q_length: int, kv_length: int, mask_function: MaskFunction, device: torch.device, **_: Any
) -> Tensor | None:
    """transformers' mask hook: a marked mask while probing, none while serving (the pool knows what is visible)."""
    state = _current.get()
    return state.make_mask(mask_function, q_length, kv_length, device) if isinstance(state, Probe) else None


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention hook: query [1, H, T, Dk], key [1, KH, T, Dk], value [1, KH, T, Dv] -> [1, T, H, Dv].

    `s_aux` are gpt-oss's sinks. Other keywords repeat what the mask says (sliding_window), or matter to training or
    to the caller alone; but a tensor among them (a bias, indices of chosen keys) changes what attention is.
    """
    state = _current.get()
    if isinstance(state, Probe):
        if is_causal is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedModel(f"{type(module).__name__} attends in both directions")
        for name, value_given in others.items():
            if isinstance(value_given, Tensor) and name not in _HARMLESS_TENSORS:
                raise UnsupportedModel(f"{type(module).__name__} gives its attention {name!r}, which is not understood")
        return state.attend(module, query, key, value, attention_mask), None
    if state is None:
        raise RuntimeError(f"{NAME} attention called outside a step")
    layer = state.calls
    state.calls += 1
    dtype = value.dtype  # rotary code in float32 may have widened queries and keys
    out = paged_attention(
        query[0].transpose(0, 1).to(dtype),
        key[0].transpose(0, 1).to(dtype),
        value[0].transpose(0, 1).to(dtype),
        state.pool,
        layer,
        state.batch,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=state.layers[layer].window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def mask_window(function: MaskFunction, horizon: int, name: str) -> int | None:
    """The window that a mask function describes, for contexts up to `horizon`: None where it is plainly causal.

    Asks at a few query positions which of all keys are visible. Raises UnsupportedModel, naming the layer, for a
    mask that is neither causal nor a causal sliding window.
    """
    zero = torch.zeros((), dtype=torch.int64)
    last = max(horizon, 2) - 1
    keys = torch.arange(last + 2)
    spans = {}
    for position in sorted({0, 1, last // 3, last // 2, last - 1, last}):
        visible = function(zero, zero, torch.tensor(position), keys).expand(keys.shape)
        seen = visible.nonzero().flatten().tolist()
        first = seen[0] if seen else position
        if seen != list(range(first, position + 1)):
            raise UnsupportedModel(f"{name} uses an attention mask that is not causal")
        spans[position] = len(seen)
    window = spans[last]
    if any(span != min(window, position + 1) for position, span in spans.items()):
        raise UnsupportedModel(f"{name} uses an attention mask that is neither full nor a sliding window")
    return None if window == last + 1 else window
