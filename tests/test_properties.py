"""Properties of the layer over drawn inputs; shapes come from short lists, so that programs are compiled once."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import moe
from moe import capacity, router
from tests import layers
from tests.bench.cell import Cell
from tests.bench.inputs import make_inputs
from tests.layers import CAPACITY, DROPLESS, IMPLEMENTATIONS, forward, tuned

settings = hypothesis.settings(deadline=None, max_examples=10, derandomize=True, database=None)
seeds = st.integers(0, 2**16)
CONFIG = moe.Config(12, 10, experts=5, top_k=2)
ROOMY = moe.Config(12, 10, experts=5, top_k=2, capacity_factor=5)
TOKENS = 11
every = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
# Those of which no output depends on the other tokens.
dropping_nothing = pytest.mark.parametrize("impl", ["dense:auto:sorted", *DROPLESS])


@dropping_nothing
@settings
@hypothesis.given(seed=seeds)
def test_permuting_tokens_permutes_outputs(impl, seed):
    params, x = layers.parameters(CONFIG, seed), layers.tokens_of(CONFIG, TOKENS, seed)
    order = np.random.default_rng(seed).permutation(TOKENS)
    permuted, aux = forward(impl, params, x[order], CONFIG)
    y, before = forward(impl, params, x, CONFIG)
    assert layers.error(permuted, y[order]) <= layers.tolerance(impl, "float32").out
    np.testing.assert_array_equal(aux.counts, before.counts)


@every
@settings
@hypothesis.given(seed=seeds)
def test_permuting_experts_with_their_weights_changes_nothing(impl, seed):
    params, x = layers.parameters(CONFIG, seed), layers.tokens_of(CONFIG, TOKENS, seed)
    order = np.random.default_rng(seed).permutation(CONFIG.experts)
    permuted = moe.Params(params.router[:, order], *(leaf[order] for leaf in params[1:]))
    y, aux = forward(impl, params, x, CONFIG)
    again, permuted_aux = forward(impl, permuted, x, CONFIG)
    assert layers.error(again, y) <= layers.tolerance(impl, "float32").out
    np.testing.assert_array_equal(permuted_aux.counts, aux.counts[order])
    assert permuted_aux.dropped == aux.dropped


@dropping_nothing
@settings
@hypothesis.given(seed=seeds, scale=st.sampled_from([0.0, 1.0, 1e3]))
def test_an_output_does_not_depend_on_other_tokens(impl, seed, scale):
    params, x = layers.parameters(CONFIG, seed), layers.tokens_of(CONFIG, TOKENS, seed)
    own = seed % TOKENS
    others = layers.tokens_of(CONFIG, TOKENS, seed + 1) * np.float32(scale)
    others[own] = x[own]
    y, changed = (forward(impl, params, tokens, CONFIG).y[own] for tokens in (x, others))
    assert layers.error(changed, y) <= layers.tolerance(impl, "float32").out


@pytest.mark.parametrize("top_k", [1, 2, 5])
@settings
@hypothesis.given(seed=seeds, scale=st.sampled_from([0.01, 1.0, 100.0]))
def test_weights_sum_to_one(top_k, seed, scale):
    logits = np.random.default_rng(seed).standard_normal((TOKENS, 5), np.float32) * np.float32(scale)
    for renormalize in (True, False):
        routing = router.select(logits, moe.Config(4, 4, 5, top_k, renormalize))
        weights = np.asarray(routing.weights)
        assert (weights >= 0).all()
        assert (np.diff(weights, axis=1) <= 0).all()
        if renormalize or top_k == 5:
            np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
        else:
            exact = np.exp(logits - logits.max(axis=1, keepdims=True), dtype=np.float64)
            exact = -np.sort(-exact / exact.sum(axis=1, keepdims=True), axis=1)[:, :top_k]
            np.testing.assert_allclose(weights, exact, rtol=2e-5, atol=1e-30)


@settings
@hypothesis.given(seed=seeds, levels=st.integers(1, 4))
def test_ties_go_to_the_lower_expert(seed, levels):
    logits = np.random.default_rng(seed).integers(0, levels, (TOKENS, 5)).astype(np.float32)
    routing = router.select(logits, moe.Config(4, 4, 5, 3))
    np.testing.assert_array_equal(routing.experts, np.argsort(-logits, axis=1, kind="stable")[:, :3])


@settings
@hypothesis.given(seed=seeds)
def test_capacity_drops_exactly_the_overflow(seed):
    config = moe.Config(12, 10, experts=5, top_k=2, capacity_factor=1.0)
    params, x = layers.parameters(config, seed), layers.tokens_of(config, TOKENS, seed)
    size = capacity.slots(TOKENS, config)
    y, aux = forward(CAPACITY, params, x, config)
    assert aux.counts.sum() == 2 * TOKENS
    assert aux.dropped == np.maximum(aux.counts - size, 0).sum()
    chosen = np.asarray(router.route(params.router, x, config).experts)
    flat = chosen.ravel()
    earlier = np.array([(flat[:index] == expert).sum() for index, expert in enumerate(flat)])
    keeps = (earlier < size).reshape(chosen.shape)
    np.testing.assert_array_equal(y.any(axis=1), keeps.any(axis=1))
    whole = keeps.all(axis=1)
    dense = forward("dense:auto:sorted", params, x, config).y
    assert layers.error(y[whole], dense[whole]) <= layers.tolerance(CAPACITY, "float32").out


@settings
@hypothesis.given(seed=seeds)
def test_capacity_with_room_equals_dense(seed):
    params, x = layers.parameters(ROOMY, seed), layers.tokens_of(ROOMY, TOKENS, seed)
    layers.assert_output_equals_dense(CAPACITY, params, x, ROOMY)


@every
@settings
@hypothesis.given(seed=seeds, used=st.sets(st.integers(0, 4), min_size=2, max_size=4))
def test_empty_experts_get_zero_gradient(impl, seed, used):
    rng = np.random.default_rng(seed)
    logits = np.full((TOKENS, 5), -30, np.float32)
    for row in logits:
        row[rng.permutation(sorted(used))[:2]] = rng.standard_normal(2)
    params, x = layers.with_logits(CONFIG, logits, np.arange(TOKENS))
    ran = layers.run(impl, params, x, CONFIG)
    empty = ran.counts == 0
    assert set(np.flatnonzero(~empty)) <= used
    assert empty.any()
    for grad in ran.params[1:]:
        assert not grad[empty].any()
    layers.assert_equal(ran, layers.reference(impl, params, x, CONFIG), layers.tolerance(impl, "float32"))


@pytest.mark.parametrize("dtype", layers.DTYPES)
@settings
@hypothesis.given(
    skew=st.floats(0, 1), tokens=st.sampled_from([1, 10, 200]), experts=st.sampled_from([1, 2, 8])
)
def test_skew_is_the_least_share_of_first_choices(dtype, skew, tokens, experts):
    top_k = min(2, experts)
    cell = Cell("layer", CAPACITY, dtype, tokens, experts, top_k, "forward", skew, d_model=16, d_hidden=4)
    params, x, config = make_inputs(cell)
    first = np.asarray(router.route(params.router, x, config).experts)[:, 0]
    assert (first == 0).mean() >= round(skew * tokens) / tokens
    assert np.isfinite(np.asarray(x, np.float32)).all()


@every
def test_skewed_inputs_equal_dense(impl):
    for skew in (0.0, 0.5, 1.0):
        cell = Cell("layer", impl, "float32", 40, 5, 2, "forward", skew, d_model=12, d_hidden=10)
        params, x, config = make_inputs(cell)
        layers.assert_equals_dense(impl, jax.device_get(params), np.asarray(x), config)


@every
def test_transformations_compose(impl):
    """jit of vmap of grad of checkpoint, against each batch entry's own gradient."""
    params = layers.parameters(ROOMY)
    batch = np.stack([layers.tokens_of(ROOMY, TOKENS, seed) for seed in range(3)])

    @jax.checkpoint
    def layer(params, x):
        return moe.apply(params, x, ROOMY, impl=impl, **tuned(impl)).y

    def loss(params, x):
        return jnp.mean(layer(params, x) ** 2)

    mapped = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), (None, 0)), compiler_options=layers.QUICK)
    grad_params, grad_x = jax.device_get(mapped(params, batch))
    limit = layers.tolerance(impl, "float32").grad
    for index, x in enumerate(batch):
        ran = layers.run(impl, params, x, ROOMY)
        assert layers.error(grad_x[index], ran.x) <= limit
        for grad, own in zip(grad_params, ran.params, strict=True):
            assert layers.error(grad[index], own) <= limit


@every
def test_vmap_over_parameters(impl):
    stacked = jax.tree.map(
        lambda *leaves: np.stack(leaves), *(layers.parameters(ROOMY, seed) for seed in (0, 1))
    )
    x = layers.tokens_of(ROOMY, TOKENS)
    layer = functools.partial(moe.apply, config=ROOMY, impl=impl, **tuned(impl))
    y, aux = jax.jit(jax.vmap(layer, (0, None)), compiler_options=layers.QUICK)(stacked, x)
    for seed in (0, 1):
        own, own_aux = forward(impl, layers.parameters(ROOMY, seed), x, ROOMY)
        assert layers.error(y[seed], own) <= layers.tolerance(impl, "float32").out
        np.testing.assert_array_equal(aux.counts[seed], own_aux.counts)


@every
def test_leading_dimensions_are_one_row_of_tokens(impl):
    params, x = layers.parameters(ROOMY), layers.tokens_of(ROOMY, 12)
    y = forward(impl, params, x, ROOMY).y
    split = forward(impl, params, x.reshape(2, 3, 2, 12), ROOMY).y
    assert split.shape == (2, 3, 2, 12)
    assert layers.error(split.reshape(12, 12), y) <= layers.tolerance(impl, "float32").out


@every
def test_one_trace_for_each_shape(impl):
    traced = []

    @functools.partial(jax.jit, compiler_options=layers.QUICK)
    def layer(params, x):
        traced.append(x.shape)
        return moe.apply(params, x, CONFIG, impl=impl, **tuned(impl)).y

    for seed in range(3):
        for tokens in (4, 5):
            layer(layers.parameters(CONFIG, seed), layers.tokens_of(CONFIG, tokens, seed))
    assert traced == [(4, 12), (5, 12)]
