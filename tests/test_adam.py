"""Adam's step inside the backward pass: optax's results, without gradients of all experts at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe
from moe.adam import Stepping, default_optimizer, stepping
from moe.registry import IMPLEMENTATIONS
from tests.bench.cell import Cell
from tests.bench.grid import BLOCKED, CHUNKED
from tests.bench.program import flat

STEPS = [impl for impl, entry in IMPLEMENTATIONS.items() if entry.steps]
DTYPES = [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
CONFIG = moe.Config(32, 512, experts=6, top_k=2)


def state_of(config, dtype, count=7):
    """A state in the midst of training: moments as of gradients that were 1 or so, second ones not negative."""
    params = moe.init(jax.random.key(0), config, dtype)
    state = moe.init_state(params)
    leaves, tree = jax.tree.flatten(params)

    def drawn(seed):
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        values = (
            jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)
        )
        return jax.tree.unflatten(tree, values)

    adam = state.opt_state[0]._replace(
        count=jnp.int32(count), mu=drawn(1), nu=jax.tree.map(jnp.square, drawn(2))
    )
    return moe.TrainState(params, (adam, *state.opt_state[1:]))


def after(config, impl, dtype, optimizer, tokens=100, **tuning):
    step = moe.train_step(config, optimizer, impl=impl, **tuning)
    x = jax.random.normal(jax.random.key(3), (tokens, config.d_model)).astype(dtype[0])
    return jax.device_get(step(state_of(config, dtype[1]), x))


def test_grouped_implementations_step():
    assert {BLOCKED, CHUNKED} <= set(STEPS)


@pytest.mark.parametrize(
    ("impl", "tuning", "dtype"),
    [
        *((CHUNKED, {"chunk": 64, "keep_elems": 0}, dtype) for dtype in DTYPES),
        (CHUNKED, {"chunk": 64, "keep_elems": 2**22}, DTYPES[0]),
        (BLOCKED, {}, DTYPES[1]),
    ],
    ids=str,
)
def test_a_step_is_that_of_optax_to_a_rounding_step(impl, tuning, dtype):
    """Of the larger term of each sum: XLA may or may not round a product before it is added."""
    state, loss = after(CONFIG, impl, dtype, None, **tuning)
    expected, expected_loss = after(CONFIG, impl, dtype, default_optimizer(), **tuning)
    assert loss == expected_loss
    before = jax.device_get(state_of(CONFIG, dtype[1]))
    assert state.opt_state[0].count == expected.opt_state[0].count == 8
    for got, want, old in zip(
        *(jax.tree.leaves(its._replace(opt_state=its.opt_state[0][1:])) for its in (state, expected, before)),
        strict=True,
    ):
        assert got.dtype == want.dtype
        step = float(jnp.finfo(got.dtype).eps)
        larger = np.maximum(*(np.abs(np.asarray(values).astype(np.float64)) for values in (want, old)))
        distance = np.abs(got.astype(np.float64) - want.astype(np.float64))
        assert np.all(distance <= step * larger)
    assert all(np.any(a != b) for a, b in zip(state.params, before.params, strict=True))


def test_no_tokens_leave_the_experts_where_moments_take_them():
    state, loss = after(CONFIG, CHUNKED, DTYPES[0], None, tokens=0)
    expected, _ = after(CONFIG, CHUNKED, DTYPES[0], default_optimizer(), tokens=0)
    assert loss == 0
    for got, want in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_automatic_choice_steps():
    """On any backend the donated default step is that of optax."""
    state, _ = after(CONFIG, "auto", DTYPES[0], None)
    expected, _ = after(CONFIG, "auto", DTYPES[0], default_optimizer())
    for got, want in zip(*map(jax.tree.leaves, (state.params, expected.params)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("impl", STEPS)
def test_gradients_of_all_experts_never_exist_at_once(impl):
    cell = Cell("layer", impl, "float32", 512, 32, 2, "train_step_donated", 0.0, 128, 256)
    held = flat(cell).compile().bytes
    gradients = 4 * 3 * 32 * 128 * 256
    params = jax.eval_shape(lambda: moe.init(jax.random.key(0), moe.Config(128, 256, 32, 2)))
    step = moe.train_step(moe.Config(128, 256, 32, 2), default_optimizer(), impl=impl)
    x = jax.ShapeDtypeStruct((512, 128), "float32")
    plain = step.lower(jax.eval_shape(moe.init_state, params), x).compile().memory_analysis()
    assert plain.temp_size_in_bytes - held.temp > 0.9 * gradients
    assert held.temp < gradients


def test_the_suite_measures_the_step_that_users_take():
    cell = Cell("layer", CHUNKED, "float32", 64, 4, 2, "train_step_donated", 0.0, 16, 24)
    config = moe.Config(16, 24, 4, 2)
    state = jax.eval_shape(lambda: moe.init_state(moe.init(jax.random.key(0), config)))
    x = jax.ShapeDtypeStruct((64, 16), "float32")
    mine = moe.train_step(config, impl=CHUNKED).lower(state, x).compile()
    assert flat(cell).compile().bytes.temp == mine.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("impl", [impl for impl in IMPLEMENTATIONS if impl not in STEPS])
def test_who_cannot_step_says_so(impl):
    params = stepping(*state_of(CONFIG, "float32"))
    assert isinstance(params, Stepping)
    with pytest.raises(TypeError, match=r"takes no Stepping; give it moe\.Params"):
        moe.apply(params, jnp.zeros((3, 32)), CONFIG, impl=impl)


def test_stepping_is_checked_as_parameters_are():
    params = stepping(*state_of(CONFIG, "float32"))
    with pytest.raises(ValueError, match=r"params\.gate has shape"):
        moe.apply(params._replace(gate=params.up[:, :, :3]), jnp.zeros((3, 32)), CONFIG, impl=CHUNKED)
