"""Dense against the float64 oracle, and every implementation against dense, on small and odd shapes."""

import functools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe
from moe.dense import weighted_experts
from moe.router import route
from tests import oracle
from tests.bench.numerics import RAGGED_TOLERANCE, TOLERANCES, Tolerance, rel_err, worst_leaf
from tests.layers import QUICK

DTYPES = ("float32", "bfloat16")
DENSE, CAPACITY, RAGGED = "dense:auto:sorted", "capacity:auto:sorted", "dropless:ragged_dot:sorted"

# Leading dimensions of x, then the config. Under half of a token's choices, capacity drops some.
SHAPES = {
    "no-tokens": ((0,), moe.Config(7, 43, 3, 2)),
    "no-tokens-in-the-middle": ((2, 0, 3), moe.Config(7, 7, 8, 3, renormalize=False)),
    "no-leading-dimension": ((), moe.Config(43, 7, 8, 8)),
    "one-token": ((1,), moe.Config(96, 43, 60, 4, renormalize=False)),
    "seven-tokens": ((7,), moe.Config(43, 96, 3, 3, capacity_factor=0.5)),
    "one-expert": ((33,), moe.Config(7, 43, 1, 1, capacity_factor=0.5)),
    "width-one": ((33,), moe.Config(1, 1, 3, 2, renormalize=False)),
    "hidden-one": ((3, 11), moe.Config(96, 1, 8, 2)),
    "three-leading-dimensions": (
        (3, 1, 11),
        moe.Config(43, 96, 8, 5, renormalize=False, capacity_factor=1.0),
    ),
    "top-one": ((129,), moe.Config(43, 43, 8, 1)),
    "top-one-raw": ((129,), moe.Config(43, 43, 8, 1, renormalize=False)),
    "few-tokens-an-expert": ((129,), moe.Config(7, 96, 60, 4, capacity_factor=1.0)),
    "all-experts": ((129,), moe.Config(96, 7, 8, 8, renormalize=False, capacity_factor=0.75)),
    "many-tokens-an-expert": ((3, 43), moe.Config(96, 96, 3, 2, capacity_factor=0.9)),
}
BFLOAT16 = ("no-tokens", "three-leading-dimensions")
CASES = [(name, "float32") for name in SHAPES] + [(name, "bfloat16") for name in BFLOAT16]
# Their like is held against dense for every implementation in tests/test_cases.py: tile offsets, top-1 gradient,
# odd and few tokens.
CASES_HAVE = ("hidden-one", "width-one", "top-one", "few-tokens-an-expert", "no-tokens")
AGAINST_DENSE = [case for case in CASES if case[0] not in CASES_HAVE]
STEPPED = [("seven-tokens", "float32", False), ("three-leading-dimensions", "bfloat16", True)]

every_implementation = pytest.mark.parametrize("implementation", moe.implementations())
every_case = pytest.mark.parametrize(("name", "dtype"), CASES, ids=map("-".join, CASES))


def tolerance(implementation, dtype):
    return RAGGED_TOLERANCE if (implementation, dtype) == (RAGGED, "float32") else TOLERANCES[dtype]


ORACLE_TOLERANCE = {
    "float32": Tolerance(1e-6, 3e-6, "dense rounds products and sums to float32, the oracle to float64"),
    "bfloat16": TOLERANCES["bfloat16"],
}


def arrays(leading, config, dtype):
    """Parameters and x of values that `dtype` holds; parameters in float32, as they are trained; a target."""
    rng = np.random.default_rng(zlib.crc32(repr((leading, config)).encode()))
    d, h, experts = config.d_model, config.d_hidden, config.experts
    shapes = ((d, experts), (experts, d, h), (experts, d, h), (experts, h, d))
    leaves = [rng.standard_normal(shape, np.float32) * np.float32(shape[-2] ** -0.5) for shape in shapes]
    experts_ = (jnp.asarray(leaf).astype(dtype).astype(jnp.float32) for leaf in leaves[1:])
    x, target = (jnp.asarray(rng.standard_normal((*leading, d), np.float32)).astype(dtype) for _ in range(2))
    return moe.Params(jnp.asarray(leaves[0]), *experts_), x, target


def rule_of(config, tokens, drops):
    """The oracle's rule for a config; with the slots of `capacity` if `drops`."""
    size = oracle.slots(tokens, config.experts, config.top_k, config.capacity_factor) if drops else None
    return oracle.Rule(config.top_k, config.renormalize, size)


def flat(x):
    """x (T, d) in float64."""
    return np.asarray(x).astype(np.float64).reshape(-1, x.shape[-1])


def mean_square(y, target):
    return jnp.sum((y.astype(jnp.float32) - target.astype(jnp.float32)) ** 2) / max(y.size, 1)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def dense_of(config, params, x, target, fits):
    """Dense in float32 with the assignments outside `fits` (T, k) dropped: y, and gradients in params and x."""

    def loss(params, x):
        routing = route(params.router, x, config)
        routing = routing._replace(weights=jnp.where(fits, routing.weights, 0))
        y = weighted_experts(params, x, routing)
        return mean_square(y, target), y

    (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    return y, *grads


@functools.lru_cache(maxsize=8)
def reference(name, dtype, drops=False, with_target=False):
    """y, gradients in the parameters, in x (with the dimensions of x), and the oracle's routing."""
    leading, config = SHAPES[name]
    params, x, target = arrays(leading, config, dtype)
    rows = x.reshape(-1, config.d_model).astype(jnp.float32)
    routed = oracle.route(flat(params.router), flat(x), rule_of(config, rows.shape[0], drops))
    aim = target.reshape(rows.shape).astype(jnp.float32) if with_target else jnp.zeros_like(rows)
    y, grads, dx = dense_of(config, params, rows, aim, jnp.asarray(routed.kept))
    return y.reshape(x.shape), grads, dx.reshape(x.shape), routed


@every_case
def test_dense_in_float32_equals_the_oracle(name, dtype):
    leading, config = SHAPES[name]
    params, x, _ = arrays(leading, config, dtype)
    weights, rows = oracle.float64(params), flat(x)
    for drops in (False, True):
        rule = rule_of(config, rows.shape[0], drops)
        expected = oracle.forward(weights, rows, rule)
        grads, dx = oracle.backward(weights, rows, rule, oracle.cotangent(expected))
        y, dense_grads, dense_dx, _ = reference(name, dtype, drops)
        assert rel_err(flat(y), expected) <= ORACLE_TOLERANCE["float32"].out
        assert worst_leaf(dense_grads, moe.Params(*grads), "float32") <= ORACLE_TOLERANCE["float32"].grad
        assert rel_err(flat(dense_dx), dx) <= ORACLE_TOLERANCE["float32"].grad


@every_case
def test_dense_equals_the_oracle(name, dtype):
    leading, config = SHAPES[name]
    params, x, _ = arrays(leading, config, dtype)
    weights, rows, rule = oracle.float64(params), flat(x), rule_of(config, math.prod(leading), drops=False)
    expected = oracle.forward(weights, rows, rule)
    grads, dx = oracle.backward(weights, rows, rule, oracle.cotangent(expected))
    y, _, layer_grads, layer_dx = run(DENSE, config, params, x)
    assert rel_err(flat(y), expected) <= ORACLE_TOLERANCE[dtype].out
    assert worst_leaf(layer_grads, moe.Params(*grads), dtype) <= ORACLE_TOLERANCE[dtype].grad
    assert rel_err(flat(layer_dx), dx) <= ORACLE_TOLERANCE[dtype].grad


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def run(implementation, config, params, x):
    """y, aux, gradients of the mean of y**2 in params and x."""

    def loss(params, x):
        out = moe.apply(params, x, config, impl=implementation)
        return mean_square(out.y, jnp.zeros_like(out.y)), out

    (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    return out.y, out.aux, *grads


@pytest.mark.parametrize(("name", "dtype"), AGAINST_DENSE, ids=map("-".join, AGAINST_DENSE))
@every_implementation
def test_equals_dense(implementation, name, dtype):
    leading, config = SHAPES[name]
    params, x, _ = arrays(leading, config, dtype)
    expected, expected_grads, expected_dx, routed = reference(name, dtype, drops=implementation == CAPACITY)
    y, aux, grads, dx = run(implementation, config, params, x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
    assert [(g.shape, g.dtype) for g in grads] == [(p.shape, p.dtype) for p in params]
    assert aux.counts.tolist() == np.bincount(routed.experts.ravel(), minlength=config.experts).tolist()
    assert int(aux.dropped) == np.count_nonzero(~routed.kept)
    limits = tolerance(implementation, dtype)
    assert rel_err(y, expected) <= limits.out
    assert worst_leaf(grads, expected_grads, dtype) <= limits.grad
    assert rel_err(dx, expected_dx) <= limits.grad


def test_shapes_have_drops():
    dropped = {name: np.count_nonzero(~reference(name, "float32", drops=True)[3].kept) for name in SHAPES}
    assert sum(count > 0 for count in dropped.values()) >= 8, dropped


@pytest.mark.parametrize(
    ("name", "dtype", "with_target"),
    [pytest.param(*case, id="-".join([*case[:2], "target" if case[2] else "no-target"])) for case in STEPPED],
)
@every_implementation
def test_adam_step_equals_dense(implementation, name, dtype, with_target):
    leading, config = SHAPES[name]
    params, x, target = arrays(leading, config, dtype)
    y, grads, _, _ = reference(name, dtype, drops=implementation == CAPACITY, with_target=with_target)
    aim = target if with_target else None
    state = moe.init_state(params)
    after, loss = moe.train_step(config, impl=implementation, donate=False)(state, x, aim)
    limits, adam = tolerance(implementation, dtype), after.opt_state[0]

    # The loss is quadratic in y, so its relative error is twice that of the error it squares.
    expected_loss = oracle.loss(flat(y), None if aim is None else flat(aim))
    np.testing.assert_allclose(float(loss), expected_loss, rtol=2 * limits.out)
    assert int(adam.count) == 1
    assert worst_leaf(adam.mu, jax.tree.map(lambda grad: grad / 10, grads), dtype) <= limits.grad

    # By formula from the step's own gradients, to a few float32 roundings of moments and parameters.
    own = oracle.Weights(*(leaf * 10 for leaf in oracle.float64(adam.mu)))
    formula = oracle.adam(oracle.float64(params), own)
    for stepped, second, leaf, expected, expected_second in zip(
        after.params, adam.nu, params, formula.weights, formula.nu, strict=True
    ):
        assert (stepped.dtype, second.dtype) == (leaf.dtype, leaf.dtype)
        assert rel_err(second, expected_second) <= 5e-7
        assert rel_err(stepped, expected) <= 2e-7

    # Against dense: the first update is the sign of the gradient, so entries within the error of 0 flip.
    dense = oracle.adam(oracle.float64(params), oracle.float64(grads))
    for stepped, leaf, expected in zip(after.params, oracle.float64(params), dense.weights, strict=True):
        change = np.linalg.norm(np.asarray(stepped) - expected) / 1e-3 / math.sqrt(leaf.size)
        assert change <= 2 * math.sqrt(limits.grad) + 3e-4  # float32 holds a parameter to 3e-4 of an update

    # Not donated: the old state is still there, unchanged.
    assert all(jnp.array_equal(old, leaf) for old, leaf in zip(state.params, params, strict=True))


# Gate values, largest and smallest and between, as both dtypes hold them; below -87 silu is under 1e-36.
GATES = np.array([-100, -88, -60, -20, -5, -1, -1e-3, -1e-6, 0, 1e-6, 1e-3, 0.5, 1, 5, 20, 60, 88, 100, 1e4])


@functools.lru_cache(maxsize=2)
def activation_case(dtype):
    """One token, one expert; hidden value j reaches output j alone, so its derivatives stand by themselves."""
    h = len(GATES)
    rng = np.random.default_rng(0)
    gate, up = np.zeros((1, h, h), np.float32), np.zeros((1, h, h), np.float32)
    gate[0, 0], up[0, 0] = GATES, rng.standard_normal(h)
    leaves = (jnp.asarray(leaf).astype(dtype) for leaf in (gate, up, np.eye(h, dtype=np.float32)[None]))
    x, dy = np.zeros((1, h), np.float32), rng.standard_normal((1, h)).astype(np.float32)
    x[0, 0] = 1
    params = moe.Params(jnp.zeros((h, 1)), *leaves)
    return moe.Config(h, h, 1, 1), params, jnp.asarray(x).astype(dtype), jnp.asarray(dy).astype(dtype)


@functools.lru_cache(maxsize=2)
def activation_differences(dtype):
    """Central finite differences of the oracle in the first rows of gate and up, (h,) each."""
    _, params, x, dy = activation_case(dtype)
    weights, rows, found = oracle.float64(params), flat(x), []
    for leaf in (weights.gate, weights.up):
        middle = leaf[0, 0].copy()
        step = 1e-5 * np.maximum(1, np.abs(middle))
        sides = []
        for sign in (1, -1):
            leaf[0, 0] = middle + sign * step
            sides.append(oracle.forward(weights, rows, oracle.Rule(1))[0])
        leaf[0, 0] = middle
        found.append((sides[0] - sides[1]) / (2 * step) * flat(dy)[0])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@every_implementation
def test_activation_gradients_equal_finite_differences_of_the_oracle(implementation, dtype):
    config, params, x, dy = activation_case(dtype)
    if implementation == CAPACITY:
        assert moe.capacity.slots(1, config) == 1

    def weighted(params):
        return jnp.sum(moe.apply(params, x, config, impl=implementation).y.astype(jnp.float32) * dy)

    grads = jax.jit(jax.grad(weighted), compiler_options=QUICK)(params)
    expected = activation_differences(dtype)
    for name, expected_row in zip(("gate", "up"), expected, strict=True):
        grad = np.asarray(getattr(grads, name)).astype(np.float64)[0]
        # Elementwise, each against itself: a norm would see the largest alone. Under 1e-30 float32 flushes.
        np.testing.assert_allclose(grad[0], expected_row, TOLERANCES[dtype].grad, 1e-30, err_msg=name)
        assert not grad[1:].any()


@pytest.mark.parametrize("shape", [(4,), (3, 1), (3, 3, 4), (2, 4)])
def test_target_of_another_shape_is_refused(shape):
    config = moe.Config(4, 6, 3, 2)
    state = moe.init_state(moe.init(jax.random.key(0), config))
    with pytest.raises(ValueError, match=r"target has shape .*\(3, 4\)"):
        moe.train_step(config, donate=False)(state, jnp.ones((3, 4)), jnp.ones(shape))


@pytest.mark.parametrize(
    ("name", "impl"), [("chunk", "dropless:chunked:sorted"), ("block_m", "dropless:blocked:sorted")]
)
def test_pieces_are_no_larger_than_the_rows_there_are(name, impl):
    config = moe.Config(16, 16, 2, 2)
    params = moe.init(jax.random.key(0), config)
    layer = jax.jit(lambda x: moe.apply(params, x, config, impl=impl, **{name: 2**24}).y)
    compiled = layer.lower(jnp.ones((8, 16))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
