"""Philox4x32-10: random numbers that are a function of a key and a counter, and of nothing else.

A generator with state would have to be saved, restored and kept apart for each request; here the number for the token
at position p of a request with seed s is a function of s and p, whoever else is in the batch, whether or not the
request was preempted in between, on any device and machine. The generator is the one of Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3" (SC 2011); it passes BigCrush, and its known answers are in our tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

# 32-bit words, each held in 64 bits so that a product of two fits.
Words: TypeAlias = NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)  # golden ratio and sqrt(3) - 1, added to the key after a round
_ROUNDS = 10


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four random words for each 128-bit counter and 64-bit key, given as words, the least significant first.

    All are arrays of one shape and the generator works on them element by element.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> _HALF) ^ c1 ^ k0, right & _LOW, (left >> _HALF) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, one for each seed (taken modulo 2**64) and position (0 or more).

    The counter is the position; its upper two words are 0, which leaves room for other streams of the same seed.
    """
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(position)
    words = philox4x32((position & _LOW, position >> _HALF, zero, zero), (seed & _LOW, seed >> _HALF))
    return ((words[0] << _HALF | words[1]) >> np.uint64(11)).astype(np.float64) * 2.0**-53
