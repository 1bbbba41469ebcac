"""What `sample` computes, in float64: the filters, the draw, and which draws are near a boundary.

The definition is the one of Paceline's sampling on torch. Filters are thresholds: equal logits share one fate. What is
left stands in the order of its ids, and a uniform number picks the first token whose cumulated probability exceeds it.
"""

from __future__ import annotations

import numpy as np

from paceline_native.contracts import Array, Contract, Doubles, Tensor

BOUNDARY = 1e-5  # noise: in probability for draws and sums, in logits over temperature for thresholds


def sample(logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array, uniform: Array) -> Doubles:
    """The token of each row of logits [rows, vocab]; -1 where it holds NaN or +infinity, or nothing but -infinity."""
    rows = zip(logits, temperature, top_k, top_p, min_p, uniform, strict=True)
    return np.array([_token(*row) for row in rows], dtype=np.float64)


def _token(logits: Array, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    if not np.isfinite(logits.max()):
        return -1
    if temperature == 0:
        return int(logits.argmax())
    kept = np.where(keep(logits, temperature, top_k, top_p, min_p), weights(logits, temperature), 0.0)
    cumulated = np.cumsum(kept)
    target = min(uniform * cumulated[-1], np.nextafter(cumulated[-1], 0.0))
    return int(np.searchsorted(cumulated, target, side="right"))


def weights(logits: Array, temperature: float) -> Doubles:
    """Of one row [vocab]: 1 for the best token."""
    x = logits.astype(np.float64)
    y: Doubles = np.exp((x - x.max()) / temperature)
    return y


def keep(logits: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> Array:
    """Which tokens of one row pass top_k, then top_p of what is left, then min_p; [vocab] bool."""
    found = weights(logits, temperature)
    passed = np.ones(len(found), dtype=bool)
    falling = np.sort(found)[::-1]
    if 0 < top_k < len(found):
        passed &= found >= falling[top_k - 1]
    if top_p < 1:
        left = falling[: int(passed.sum())]
        above = np.cumsum(left) - left
        last = max(int((above < top_p * left.sum()).sum()) - 1, 0)
        passed &= found >= left[last]
    return passed & (found >= min(min_p, 1.0))


SAMPLE = Contract(
    name="sample",
    formula="the first token whose cumulated probability, of what the filters leave, exceeds `uniform`",
    inputs={
        "logits": Tensor("float32", ("rows", "columns")),
        "temperature": Tensor("float64", ("rows",)),
        "top_k": Tensor("int64", ("rows",)),
        "top_p": Tensor("float64", ("rows",)),
        "min_p": Tensor("float64", ("rows",)),
        "uniform": Tensor("float64", ("rows",)),
    },
    output=Tensor("int64", ("rows",)),
    slack=0.0,  # but for rows that are reported to be near a boundary
    reference=sample,
    magnitude=lambda logits, *_: np.ones(len(logits)),
    samples=tuple(
        {"rows": r, "columns": c}
        for r, c in ((0, 4), (3, 1), (5, 2), (9, 31), (4, 64), (7, 513), (33, 1100), (3, 49152), (2, 151936))
    ),
)
