"""What the package promises around the numerics: choice, table, counts, initial values, traces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe
from moe.registry import IMPLEMENTATIONS, get
from tests import oracle

CONFIG = moe.Config(d_model=6, d_hidden=10, experts=4, top_k=2)
CHUNKED, RAGGED, DENSE = "dropless:chunked:sorted", "dropless:ragged_dot:sorted", "dense:auto:sorted"

every_implementation = pytest.mark.parametrize("implementation", moe.implementations())


def params(config=CONFIG, dtype="float32"):
    return moe.init(jax.random.key(1), config, dtype)


PARAMS = params()


def test_reference_comes_first():
    assert moe.implementations()[0] == DENSE
    assert sorted(moe.implementations()) == [
        "capacity:auto:sorted",
        DENSE,
        "dropless:blocked:sorted",
        CHUNKED,
        RAGGED,
    ]


@every_implementation
def test_table_gives_what_apply_runs(implementation):
    entry = get(implementation)
    x = jax.random.normal(jax.random.key(2), (5, 6))
    y, aux = entry.apply(PARAMS, x, CONFIG)
    out = moe.apply(PARAMS, x, CONFIG, impl=implementation)
    assert jnp.array_equal(y, out.y)
    assert jnp.array_equal(aux.counts, out.aux.counts)


def test_tuning_values_of_the_table():
    tuning = {name.split(":")[1]: IMPLEMENTATIONS[name].tuning for name in moe.implementations()[1:]}
    assert tuning["chunked"] == ("chunk", "slab_elems", "keep_elems")
    assert tuning["blocked"] == ("block_m", "slab_elems")
    assert tuning["ragged_dot"] == ("lowering",)
    assert tuning["auto"] == IMPLEMENTATIONS[DENSE].tuning == ()


@pytest.mark.parametrize(
    ("backend", "expected"), [("cpu", CHUNKED), ("gpu", RAGGED), ("cuda", RAGGED), ("tpu", RAGGED)]
)
def test_auto_chooses_by_backend_and_says_why(backend, expected):
    choice = moe.choose(CONFIG, 1024, jnp.bfloat16, backend)
    assert choice.id == expected
    assert backend in choice.reason


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("experts", [1, 4])
def test_auto_chooses_dense_where_every_expert_is_chosen(backend, experts):
    choice = moe.choose(moe.Config(6, 10, experts, experts), 1024, backend=backend)
    assert choice.id == DENSE
    assert f"experts={experts}" in choice.reason


@pytest.mark.parametrize("tokens", [0, 1, 7, 4096, 2**20])
@pytest.mark.parametrize("backend", [None, "cpu", "gpu", "tpu"])
def test_auto_never_drops(backend, tokens):
    for dtype in (jnp.float32, jnp.bfloat16):
        choice = moe.choose(CONFIG, tokens, dtype, backend)
        assert choice.id in moe.implementations()
        assert not choice.id.startswith("capacity")
        assert choice.reason


@pytest.mark.parametrize("top_k", [2, 4])
def test_auto_runs_what_it_chooses(top_k):
    config = moe.Config(6, 10, 4, top_k)
    x = jax.random.normal(jax.random.key(2), (9, 6))
    chosen = moe.apply(params(config), x, config, impl=moe.choose(config, 9, x.dtype).id)
    assert jnp.array_equal(moe.apply(params(config), x, config).y, chosen.y)


@every_implementation
def test_aux_counts_assignments_before_drops(implementation):
    config = moe.Config(6, 10, 4, 2, capacity_factor=0.6)
    x = jax.random.normal(jax.random.key(3), (4, 10, 6))
    rows = np.asarray(x, np.float64).reshape(-1, 6)
    aux = jax.jit(lambda x: moe.apply(PARAMS, x, config, impl=implementation).aux)(x)
    size = oracle.slots(40, 4, 2, 0.6) if implementation.startswith("capacity") else None
    routed = oracle.route(np.asarray(PARAMS.router, np.float64), rows, oracle.Rule(2, slots=size))
    assert (aux.counts.shape, aux.counts.dtype) == ((4,), jnp.int32)
    assert (aux.dropped.shape, aux.dropped.dtype) == ((), jnp.int32)
    assert aux.counts.tolist() == np.bincount(routed.experts.ravel(), minlength=4).tolist()
    assert int(aux.dropped) == np.count_nonzero(~routed.kept)
    assert (int(aux.dropped) > 0) == (size is not None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_initial_shapes_and_dtypes(dtype):
    made = params(dtype=dtype)
    assert isinstance(made, moe.Params)
    assert [leaf.shape for leaf in made] == [(6, 4), (4, 6, 10), (4, 6, 10), (4, 10, 6)]
    assert [leaf.dtype.name for leaf in made] == ["float32", dtype, dtype, dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_initial_variance_is_one_over_fan_in(dtype):
    made = params(moe.Config(64, 96, 32, 2), dtype)
    for leaf, fan_in in zip(made, (64, 64, 64, 96), strict=True):
        scaled = np.asarray(leaf, np.float64) * fan_in**0.5
        # Five standard errors of the mean and of the variance of that many normal values.
        assert abs(scaled.mean()) <= 5 * scaled.size**-0.5
        assert abs(scaled.var() - 1) <= 5 * (2 / scaled.size) ** 0.5 + 4e-3


def test_initial_values_depend_on_the_key_and_on_nothing_else():
    again, other = moe.init(jax.random.key(1), CONFIG), moe.init(jax.random.key(2), CONFIG)
    for leaf, same, different in zip(PARAMS, again, other, strict=True):
        assert jnp.array_equal(leaf, same)
        assert not jnp.isclose(leaf, different).any()
    assert not jnp.isclose(PARAMS.gate, PARAMS.up).any()


def test_initial_values_in_bfloat16_are_the_rounded_ones():
    for leaf, rounded in zip(PARAMS[1:], params(dtype="bfloat16")[1:], strict=True):
        assert jnp.array_equal(leaf.astype(jnp.bfloat16), rounded)


@every_implementation
def test_one_trace_a_shape(implementation):
    traced = []

    @jax.jit
    def layer(params, x):
        traced.append(x.shape)
        return moe.apply(params, x, CONFIG, impl=implementation).y

    shapes = [(100, 6), (2, 50, 6)]
    for _ in range(2):
        for shape in shapes:
            layer(PARAMS, jnp.ones(shape))
    assert traced == shapes
    assert layer._cache_size() == len(shapes)


@pytest.mark.parametrize(
    ("donate", "impl"),
    [(True, "auto"), (False, "auto"), (True, CHUNKED)],
    ids=["donated", "kept", "stepping"],
)
def test_train_step_traces_once(donate, impl):
    step = moe.train_step(CONFIG, impl=impl, donate=donate)
    state = moe.init_state(moe.init(jax.random.key(1), CONFIG))
    x, losses = jax.random.normal(jax.random.key(2), (9, 6)), []
    for _ in range(5):
        state, loss = step(state, x)
        losses.append(float(loss))
    assert step._cache_size() == 1
    assert losses == sorted(set(losses), reverse=True)
    assert int(state.opt_state[0].count) == 5
