"""Least squares under the constraint that no weight is negative, robust against rows that are far off."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

RIDGE = 1e-9  # of the mean diagonal: makes the normal equations of dependent columns solvable
HUBER = 1.345  # standard deviations beyond which a residual loses weight: 95 % efficient where noise is normal
NORMAL_MAD = 1.4826  # median |residual| times this estimates a normal distribution's standard deviation
LEAST_SCALE = 1e-3  # relative: no row is an outlier for being off by less than this


def solve_non_negative(matrix: Array, vector: Array) -> Array:
    """The w >= 0 that minimises |A w - b|^2, given the normal equations A'A and A'b (Lawson and Hanson, 1974, ch. 23).

    Features enter one at a time, the one that would help most first; on the way to an unconstrained optimum that has
    negative weights, the first to reach zero leaves again.
    """
    size = len(vector)
    matrix = matrix + RIDGE * max(float(np.trace(matrix)) / size, 1e-300) * np.eye(size)
    weights, active = np.zeros(size), np.zeros(size, dtype=bool)
    enough = 1e-12 * max(1e-300, float(np.abs(vector).max()))
    for _ in range(10 * size):
        gain = vector - matrix @ weights
        gain[active] = -np.inf
        best = int(gain.argmax())
        if gain[best] <= enough:
            break
        active[best] = True
        while True:
            found = np.zeros(size)
            found[active] = np.linalg.solve(matrix[np.ix_(active, active)], vector[active])
            leaving = active & (found <= 0.0)
            if not leaving.any():
                weights = found
                break
            steps = weights[leaving] / (weights[leaving] - found[leaving])
            weights = weights + float(steps.min()) * (found - weights)
            active &= weights > enough
            weights[~active] = 0.0
            if not active.any():
                break
    return weights


def fit_non_negative(features: Array, seconds: Array, units: Array | float | None = None, rounds: int = 20) -> Array:
    """Weights w >= 0 with features @ w near `seconds`, each row's error counted in its unit; None: its own seconds.

    Relative errors let a decode of 20 ms count as much as a prefill of 2 s. Huber's estimator by iterated weights: a
    row that took three times what its like take (a neighbour on the machine) pulls no harder than one slightly off.

    features [rows, terms], all >= 0; seconds [rows], all > 0; units [rows] or one for all, > 0.
    """
    per = np.broadcast_to(seconds if units is None else np.asarray(units, dtype=np.float64), seconds.shape)
    target = seconds / per
    scale = np.where(features.any(axis=0), (features / per[:, None]).mean(axis=0), 1.0)
    relative = features / per[:, None] / scale
    trust = np.ones(len(seconds))
    weights = np.zeros(features.shape[1])
    for _ in range(rounds):
        weighted = relative * trust[:, None]
        found = solve_non_negative(weighted.T @ relative, weighted.T @ target)
        settled = np.allclose(found, weights, rtol=1e-6, atol=1e-12)
        weights = found
        if settled:
            break
        residuals = np.abs(relative @ weights - target)
        usual = max(LEAST_SCALE, NORMAL_MAD * float(np.median(residuals)))
        trust = np.minimum(1.0, HUBER * usual / np.maximum(residuals, 1e-12))
    return np.asarray(weights / scale, dtype=np.float64)
