"""The oracle's own rules and gradients, by hand-made cases and by central finite differences."""

import numpy as np
import pytest

from tests import oracle

TOKENS, EXPERTS, D_MODEL, D_HIDDEN = 6, 4, 3, 5
STEP = 1e-6
# Truncation is about STEP**2 and rounding 1e-16 / STEP, times sums near 10; relative and absolute.
FINITE_DIFFERENCE = 1e-8


def values(seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((D_MODEL, EXPERTS), *[(EXPERTS, D_MODEL, D_HIDDEN)] * 2, (EXPERTS, D_HIDDEN, D_MODEL))
    params = oracle.Weights(*(rng.standard_normal(shape) for shape in shapes))
    return params, rng.standard_normal((TOKENS, D_MODEL)), rng.standard_normal((TOKENS, D_MODEL))


def differences(function, array):
    """Central finite differences of a scalar function that reads `array`."""
    grad = np.zeros(array.shape)
    for index in np.ndindex(array.shape):
        middle = array[index]
        array[index] = middle + STEP
        above = function()
        array[index] = middle - STEP
        below = function()
        array[index] = middle
        grad[index] = (above - below) / (2 * STEP)
    return grad


@pytest.mark.parametrize("slots", [None, 0, 1, 2], ids=lambda slots: f"slots={slots}")
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "raw"])
@pytest.mark.parametrize("top_k", range(1, EXPERTS + 1), ids=lambda k: f"k{k}")
def test_gradients_equal_finite_differences(top_k, renormalize, slots):
    params, x, dy = values(seed=top_k)
    rule = oracle.Rule(top_k, renormalize, slots)
    dropped = np.count_nonzero(~oracle.route(params.router, x, rule).kept)
    assert (dropped > 0) == (slots is not None)
    grads, dx = oracle.backward(params, x, rule, dy)
    for name, grad, array in zip((*params._fields, "x"), (*grads, dx), (*params, x), strict=True):
        expected = differences(lambda: float(np.sum(oracle.forward(params, x, rule) * dy)), array)
        np.testing.assert_allclose(grad, expected, FINITE_DIFFERENCE, FINITE_DIFFERENCE, err_msg=name)


@pytest.mark.parametrize("with_target", [False, True], ids=["no-target", "target"])
def test_cotangent_is_the_gradient_of_the_loss(with_target):
    _, y, target = values()
    target = target if with_target else None
    expected = differences(lambda: oracle.loss(y, target), y)
    np.testing.assert_allclose(oracle.cotangent(y, target), expected, rtol=0, atol=FINITE_DIFFERENCE)


def test_ties_go_to_the_lower_index():
    routed = oracle.route(np.zeros((D_MODEL, 8)), np.ones((2, D_MODEL)), oracle.Rule(3))
    assert routed.experts.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(routed.weights, 1 / 3)


def test_weights_sum_to_one_only_where_renormalised():
    params, x, _ = values()
    renormalised = oracle.route(params.router, x, oracle.Rule(2, True)).weights
    raw = oracle.route(params.router, x, oracle.Rule(2, False)).weights
    np.testing.assert_allclose(renormalised.sum(axis=1), 1)
    assert (raw.sum(axis=1) < 1).all()
    np.testing.assert_allclose(raw / raw.sum(axis=1, keepdims=True), renormalised)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "factor", "expected"),
    [
        (1000, 8, 2, 1.1, 275),
        (7680, 8, 1, 4.05, 3888),
        (4, 2, 2, 4, 4),
        (5, 4, 1, 1.0, 2),
        (0, 8, 2, 1.25, 0),
    ],
)
def test_slots_are_exact(tokens, experts, top_k, factor, expected):
    assert oracle.slots(tokens, experts, top_k, factor) == expected


def test_slots_are_claimed_by_token_and_then_by_choice():
    experts = np.array([[0, 1], [1, 0], [1, 2], [0, 2]])
    assert oracle.keeps(experts, 2).tolist() == [[True, True], [True, True], [False, True], [False, True]]
    assert oracle.keeps(experts, 1).tolist() == [[True, True], [False, False], [False, True], [False, False]]


def test_a_token_without_a_slot_gives_zero():
    params, x, dy = values()
    params.router[:] = 0
    y = oracle.forward(params, x, oracle.Rule(1, slots=2))
    _, dx = oracle.backward(params, x, oracle.Rule(1, slots=2), dy)
    assert y[:2].all()
    assert not y[2:].any()
    assert not dx[2:].any()


def test_one_expert_is_its_feed_forward():
    params, x, _ = values()
    gated = x @ params.gate[0]
    expected = (gated / (1 + np.exp(-gated)) * (x @ params.up[0])) @ params.down[0]
    one = oracle.Weights(params.router[:, :1], *(leaf[:1] for leaf in params[1:]))
    np.testing.assert_allclose(oracle.forward(one, x, oracle.Rule(1)), expected, rtol=1e-13)


def test_no_tokens_give_zero_gradients():
    params, x, dy = values()
    for renormalize in (True, False):
        grads, dx = oracle.backward(params, x[:0], oracle.Rule(2, renormalize), dy[:0])
        assert dx.shape == (0, D_MODEL)
        assert not any(leaf.any() for leaf in grads)


def test_first_step_of_adam_is_the_sign_of_the_gradient():
    params, _, _ = values()
    grads, _, _ = values(seed=1)
    stepped = oracle.adam(params, grads)
    for weight, grad, new in zip(params, grads, stepped.weights, strict=True):
        np.testing.assert_allclose(weight - new, 1e-3 * np.sign(grad), rtol=1e-5)
    zero = oracle.adam(params, oracle.Weights(*(0 * grad for grad in grads)))
    assert all((new == old).all() for new, old in zip(zero.weights, params, strict=True))
