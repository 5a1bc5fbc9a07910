"""The signed-rank test on paired log ratios, exact, with the bounds that belong to it.

Wilcoxon 1945, Individual comparisons by ranking methods; the bounds are those of Hodges and
Lehmann 1963, from the Walsh averages (the means of all pairs of values, each with itself too).
"""

import functools

import numpy as np
from numpy.typing import ArrayLike


def p_greater(values: ArrayLike) -> float:
    """One-sided p that the median is over 0. Zeros count as against it; ties share their mean rank."""
    values = np.asarray(values, float)
    order = np.argsort(np.abs(values), kind="stable")
    sizes = np.abs(values)[order]
    # Mean ranks, from the first and last place of each run of equal sizes.
    first = np.searchsorted(sizes, sizes, "left")
    last = np.searchsorted(sizes, sizes, "right")
    ranks = (first + last + 1) / 2
    statistic = ranks[values[order] > 0].sum()
    # The exact distribution is one of whole ranks: a half is rounded down, against significance.
    return float(_upper_tail(len(values))[int(np.floor(statistic))]) if len(values) else 1.0


def upper_bound(values: ArrayLike, confidence: float = 0.95) -> float:
    """One-sided bound: the true median is under it with this confidence. Infinite for too few values."""
    averages = _walsh(values)
    tail = _upper_tail(np.size(np.asarray(values)))
    # Some k averages at or under a value reject it once P(W >= k) <= 1 - confidence: the smallest such k.
    significant = np.flatnonzero(tail <= 1 - confidence)
    if not len(significant):
        return float("inf")
    return float(averages[significant[0] - 1])


def lower_bound(values: ArrayLike, confidence: float = 0.95) -> float:
    """The other side of `upper_bound`."""
    return -upper_bound(-np.asarray(values, float), confidence)


def _walsh(values: ArrayLike) -> np.ndarray:
    values = np.asarray(values, float)
    i, j = np.triu_indices(len(values))
    return np.sort((values[i] + values[j]) / 2)


@functools.lru_cache(maxsize=64)
def _upper_tail(n: int) -> np.ndarray:
    """P(W >= w) for w from 0 to n (n + 1) / 2, W the sum of the ranks that a fair coin picks for each of 1..n."""
    mass = np.zeros(n * (n + 1) // 2 + 1)
    mass[0] = 1
    for rank in range(1, n + 1):
        reached = mass[: rank * (rank + 1) // 2 + 1]
        reached[rank:] += reached[:-rank].copy()
        reached /= 2
    return np.cumsum(mass[::-1])[::-1]
