"""The signed-rank test and its bounds: against scipy, against counting every sign, and by simulation."""

import itertools

import numpy as np
import pytest
from scipy import stats

from tests.bench.gate.signed_rank import lower_bound, p_greater, upper_bound


def drawn(pairs, seed=0, middle=0.3):
    """Values without ties or zeros."""
    return np.random.default_rng(seed).normal(middle, 1, pairs)


def signs(sizes):
    """Every way to sign these sizes: what the hypothesis holds to be equally likely."""
    return [np.array(picked) * sizes for picked in itertools.product((1, -1), repeat=len(sizes))]


@pytest.mark.parametrize("pairs", [1, 2, 4, 5, 12, 24, 50])
@pytest.mark.parametrize("seed", range(5))
def test_p_is_scipys_exact_one(pairs, seed):
    values = drawn(pairs, seed)
    expected = stats.wilcoxon(values, alternative="greater", method="exact").pvalue
    assert p_greater(values) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("pairs", [96, 192])
def test_p_of_many_values_is_near_the_normal_approximation(pairs):
    values = drawn(pairs, middle=0.1)
    expected = stats.wilcoxon(values, alternative="greater", method="approx", correction=True).pvalue
    assert p_greater(values) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("values", "p"),
    [
        ([], 1),
        ([1], 1 / 2),
        ([-1], 1),
        ([0], 1),
        ([0, 0, 0], 1),
        (range(1, 13), 2**-12),
        (range(-12, 0), 1),
        ([1] * 12, 2**-12),  # All tied.
        ([3, 2, -1], 2 / 8),  # Sums of 1..3 from 5 on: 5 and 6.
        ([2, -1, -3], 6 / 8),
        ([0, 1, 2], 2 / 8),  # The zero has the lowest rank, and counts as against.
        ([-1, 1, 2], 3 / 8),  # Ranks 1.5, 1.5, 3: 4.5, rounded down to 4.
    ],
    ids=str,
)
def test_p_by_hand(values, p):
    assert p_greater(list(values)) == p


@pytest.mark.parametrize(
    "sizes",
    [
        [1] * 10,
        [1, 1, 2, 2, 3, 3, 4, 4, 5, 5],
        [0, 0, 0, 1, 2, 3, 4, 5, 6, 7],
        [0, 0, 1, 1, 1, 1, 2, 2, 2, 5],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 9],
        range(1, 11),
    ],
    ids=["all tied", "tied by twos", "zeros", "zeros and ties", "one tie", "distinct"],
)
@pytest.mark.parametrize("level", [0.05, 0.01, 0.005])
def test_ties_and_zeros_do_not_raise_the_level(sizes, level):
    every = [p_greater(values) for values in signs(np.array(sizes, float))]
    assert np.mean(np.array(every) <= level) <= level


def test_order_and_scale_of_the_values_do_not_matter():
    values = drawn(24)
    shuffled = np.random.default_rng(1).permutation(values)
    assert p_greater(shuffled) == p_greater(values) == p_greater(7 * values)
    assert upper_bound(shuffled) == upper_bound(values)
    assert upper_bound(7 * values) == pytest.approx(7 * upper_bound(values))
    assert upper_bound(values + 3) == pytest.approx(upper_bound(values) + 3)


@pytest.mark.parametrize("pairs", [5, 6, 12, 13, 24, 48])
@pytest.mark.parametrize("confidence", [0.95, 0.995])
def test_the_bound_is_where_the_test_begins_to_reject(pairs, confidence):
    """Just above the bound "the median is at least this" is rejected, and just below it is not."""
    for seed in range(20):
        values = drawn(pairs, seed)
        bound = upper_bound(values, confidence)
        if not np.isfinite(bound):
            assert p_greater(np.full(pairs, 1.0)) > 1 - confidence
            continue
        assert p_greater(bound + 1e-9 - values) <= 1 - confidence
        assert p_greater(bound - 1e-9 - values) > 1 - confidence
        assert lower_bound(-values, confidence) == -bound


@pytest.mark.parametrize("pairs", [0, 1, 2, 3, 4])
def test_too_few_values_have_no_bound(pairs):
    """2**-4 is over 0.05, whatever the values."""
    values = np.ones(pairs)
    assert (lower_bound(values), upper_bound(values)) == (-np.inf, np.inf)


def test_five_values_are_bounded_by_their_ends():
    values = [3.0, -1.0, 4.0, 1.0, 5.0]
    assert (lower_bound(values), upper_bound(values)) == (-1, 5)


@pytest.mark.parametrize("pairs", [5, 12, 24])
@pytest.mark.parametrize("scale", ["normal", "heavy", "one in ten far off"])
def test_bounds_hold_as_often_as_they_say(pairs, scale):
    rng = np.random.default_rng(pairs)
    shape = (2000, pairs)
    noise = {
        "normal": rng.normal(size=shape),
        "heavy": rng.standard_cauchy(shape),
        "one in ten far off": rng.normal(size=shape) * np.where(rng.random(shape) < 0.1, 50, 1),
    }[scale]
    under = np.mean([upper_bound(values) > 0 for values in noise])
    over = np.mean([lower_bound(values) < 0 for values in noise])
    # Exact from below but for the draw (three standard errors are 0.015), and not needlessly wide.
    for share in (under, over):
        assert 0.935 <= share <= 0.99
