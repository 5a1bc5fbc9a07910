"""Bad input of the layer: refused before any work, in words that name field, value, rule and way out."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe
from tests import layers

CONFIG = moe.Config(d_model=6, d_hidden=10, experts=4, top_k=2)
PARAMS = jax.tree.map(jnp.asarray, layers.parameters(CONFIG))
X = jnp.ones((3, 6))
SIZES = ("d_model", "d_hidden", "experts", "top_k")
CHUNKED, BLOCKED = "dropless:chunked:sorted", "dropless:blocked:sorted"

every_implementation = pytest.mark.parametrize("implementation", ["auto", *moe.implementations()])


def config(**changes):
    return moe.Config(**{"d_model": 6, "d_hidden": 10, "experts": 4, "top_k": 2, **changes})


def traced(x, same=CONFIG, **keywords):
    """y's shape and dtype, without computing it."""
    return jax.eval_shape(lambda x: moe.apply(PARAMS, x, same, **keywords).y, x)


def refused(error, *words):
    """Raises `error` with all of `words` in its message, in order."""
    return pytest.raises(error, match="(?s)" + ".*".join(re.escape(word) for word in words))


@pytest.mark.parametrize(
    "value", [0, -1, 2.0, 1.5, True, False, "2", None, np.float32(2), float("nan")], ids=repr
)
@pytest.mark.parametrize("name", SIZES)
def test_size_is_not_a_positive_integer(name, value):
    with refused(ValueError, f"{name}={value!r}", "positive integer"):
        config(**{name: value})


@pytest.mark.parametrize(("top_k", "experts"), [(5, 4), (2, 1)])
def test_top_k_is_more_than_experts(top_k, experts):
    with refused(ValueError, f"top_k={top_k}", f"experts={experts}", f"1..{experts}"):
        config(top_k=top_k, experts=experts)


@pytest.mark.parametrize(
    "value", [0, 0.0, -1.25, float("nan"), float("inf"), -float("inf"), "1.25", None, 1j, True], ids=repr
)
def test_capacity_factor_is_not_positive_and_finite(value):
    with refused(ValueError, f"capacity_factor={value!r}", "positive finite", "1.25"):
        config(capacity_factor=value)


def test_config_stays_as_it_was_checked():
    with pytest.raises(AttributeError):
        CONFIG.top_k = 9  # type: ignore[misc]


@pytest.mark.parametrize("integer", [np.int32, np.int64, np.uint8])
def test_numpy_integers_are_sizes(integer):
    same = config(**{name: integer(getattr(CONFIG, name)) for name in SIZES})
    assert same == CONFIG
    assert hash(same) == hash(CONFIG)
    for implementation in moe.implementations():
        assert traced(X, same, impl=implementation).shape == X.shape
    with refused(ValueError, "x has 1073741824 tokens", "2**31", "split x"):
        traced(jax.ShapeDtypeStruct((2**30, 6), jnp.float32), same)


@pytest.mark.parametrize("factor", [1, np.float32(1.25), np.float64(1.1)], ids=repr)
def test_real_numbers_are_capacity_factors(factor):
    same = config(capacity_factor=factor)
    assert traced(X, same, impl="capacity:auto:sorted").shape == X.shape


def test_top_one_renormalised_warns():
    with pytest.warns(UserWarning, match=r"top_k=1 with renormalize=True .*router gets no gradient"):
        config(top_k=1)


@every_implementation
@pytest.mark.parametrize("shape", [(), (3, 5), (3, 7), (6, 3), (2, 3, 1), (0,), (0, 0)], ids=str)
def test_x_has_the_wrong_rank_or_width(implementation, shape):
    with refused(ValueError, f"x has shape {shape}", "d_model=6"):
        moe.apply(PARAMS, jnp.ones(shape), CONFIG, impl=implementation)


@every_implementation
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "float16", "complex64", "float8_e4m3fn"])
def test_x_has_the_wrong_dtype(implementation, dtype):
    with refused(TypeError, f"x has dtype {dtype}", "float32 or bfloat16", "cast"):
        moe.apply(PARAMS, jnp.ones((3, 6)).astype(dtype), CONFIG, impl=implementation)


@pytest.mark.parametrize("dtype", ["int64", "float64", "float16"])
def test_numpy_x_has_the_wrong_dtype(dtype):
    with refused(TypeError, f"x has dtype {dtype}", "float32 or bfloat16", "cast"):
        moe.apply(PARAMS, np.ones((3, 6), dtype), CONFIG, impl="dense:auto:sorted")


@pytest.mark.parametrize("implementation", moe.implementations())
def test_x_and_params_of_numpy_are_taken(implementation):
    y = moe.apply(jax.tree.map(np.asarray, PARAMS), np.asarray(X), CONFIG, impl=implementation).y
    assert (y.shape, y.dtype) == ((3, 6), jnp.float32)


@pytest.mark.parametrize(
    ("changes", "leaf"),
    [
        ({"d_model": 6, "experts": 5}, "router"),
        ({"d_hidden": 11}, "gate"),
        ({"experts": 3}, "router"),
        ({"d_model": 7}, "router"),
    ],
    ids=str,
)
def test_params_are_of_another_config(changes, leaf):
    params = layers.parameters(config(**changes))
    with refused(ValueError, f"params.{leaf} has shape", "needs", "another config", "moe.init"):
        moe.apply(params, X, CONFIG)


@pytest.mark.parametrize("name", moe.Params._fields)
def test_one_leaf_has_another_shape(name):
    swapped = PARAMS._replace(**{name: jnp.swapaxes(getattr(PARAMS, name), -1, -2)})
    with refused(ValueError, f"params.{name} has shape", str(getattr(PARAMS, name).shape), "moe.init"):
        moe.apply(swapped, X, CONFIG)


@pytest.mark.parametrize("name", moe.Params._fields)
@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_one_leaf_has_another_dtype(name, dtype):
    cast = PARAMS._replace(**{name: getattr(PARAMS, name).astype(dtype)})
    with refused(TypeError, f"params.{name} has dtype {dtype}", "must be float32"):
        moe.apply(cast, X, CONFIG)


def test_router_stays_float32():
    with refused(TypeError, "params.router has dtype bfloat16", "must be float32"):
        moe.apply(PARAMS._replace(router=PARAMS.router.astype(jnp.bfloat16)), X, CONFIG)


@pytest.mark.parametrize(
    "params", [tuple(PARAMS), dict(PARAMS._asdict()), list(PARAMS), None, X, PARAMS[1]], ids=type
)
def test_params_are_not_params(params):
    with refused(TypeError, f"params is a {type(params).__name__}", "moe.Params", "moe.init"):
        moe.apply(params, X, CONFIG)


@pytest.mark.parametrize("tokens", [(2**31 // 4,), (2**20, 2**11), (2**40,)], ids=str)
def test_tokens_times_experts_overflow(tokens):
    x = jax.ShapeDtypeStruct((*tokens, 6), jnp.float32)
    with refused(ValueError, f"{np.prod(tokens)} tokens", "experts=4", "2**31", "split x"):
        traced(x)


def test_most_tokens_that_do_not_overflow_are_taken():
    x = jax.ShapeDtypeStruct(((2**31 - 1) // 4, 6), jnp.bfloat16)
    for implementation in moe.implementations():
        y = traced(x, impl=implementation)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("value", [0, -64, 1.5, 64.0, True, "64"], ids=repr)
@pytest.mark.parametrize(
    ("implementation", "name"),
    [(CHUNKED, "chunk"), (CHUNKED, "slab_elems"), (BLOCKED, "block_m"), (BLOCKED, "slab_elems")],
)
def test_tuning_value_is_not_positive(implementation, name, value):
    with refused(ValueError, f"{name}={value!r}", "positive integer"):
        moe.apply(PARAMS, X, CONFIG, impl=implementation, **{name: value})


@pytest.mark.parametrize("value", [-1, 1.5, True, "64"], ids=repr)
def test_keep_elems_is_no_number_of_elements(value):
    with refused(ValueError, f"keep_elems={value!r}", "0 or a positive integer"):
        moe.apply(PARAMS, X, CONFIG, impl=CHUNKED, keep_elems=value)


def test_lowering_is_unknown():
    with refused(ValueError, "lowering='triton'", "loop or xla"):
        moe.apply(PARAMS, X, CONFIG, impl="dropless:ragged_dot:sorted", lowering="triton")


@pytest.mark.parametrize("implementation", [CHUNKED, BLOCKED])
def test_slab_does_not_hold_the_smallest_piece(implementation):
    with refused(ValueError, "slab_elems=399", "40 rows of d_hidden=10", "at least 400"):
        moe.apply(PARAMS, X, CONFIG, impl=implementation, slab_elems=399)
    assert traced(X, impl=implementation, slab_elems=400).shape == X.shape


@pytest.mark.parametrize(
    ("implementation", "name", "accepted"),
    [
        ("dense:auto:sorted", "chunk", "none"),
        ("capacity:auto:sorted", "slab_elems", "none"),
        ("dropless:ragged_dot:sorted", "block_m", "lowering"),
        (CHUNKED, "block_m", "chunk, slab_elems, keep_elems"),
        (BLOCKED, "chunk", "block_m, slab_elems"),
        (BLOCKED, "blocks", "block_m, slab_elems"),
    ],
)
def test_tuning_value_is_unknown(implementation, name, accepted):
    with refused(ValueError, f"{name}=64", implementation, f"takes: {accepted}"):
        moe.apply(PARAMS, X, CONFIG, impl=implementation, **{name: 64})


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("dense", "dense:auto:sorted"),
        ("dropless:chunk:sorted", CHUNKED),
        ("dropless:blocks:sorted", BLOCKED),
        ("capacity", "capacity:auto:sorted"),
        ("dropless:ragged-dot:sorted", "dropless:ragged_dot:sorted"),
    ],
)
def test_implementation_is_unknown(unknown, nearest):
    with refused(
        ValueError, f"impl={unknown!r}", f"did you mean {nearest!r}", "auto", *moe.implementations()
    ):
        moe.apply(PARAMS, X, CONFIG, impl=unknown)
    with refused(ValueError, f"impl={unknown!r}", f"did you mean {nearest!r}"):
        moe.registry.get(unknown)


@pytest.mark.parametrize("unknown", ["", "qqqq", None, 3], ids=repr)
def test_implementation_is_like_none_there_is(unknown):
    with refused(ValueError, f"impl={unknown!r} is unknown", "auto", *moe.implementations()) as raised:
        moe.apply(PARAMS, X, CONFIG, impl=unknown)
    assert "did you mean" not in str(raised.value)
    assert re.search(r"unknown[.;:] ", str(raised.value))


@pytest.mark.parametrize("keywords", [{"impl": "dense"}, {"impl": CHUNKED, "chunk": 0}], ids=str)
def test_train_step_refuses_the_same(keywords):
    with pytest.raises(ValueError, match=r"impl='dense' is unknown|chunk=0 must be"):
        moe.train_step(CONFIG, **keywords)(moe.init_state(PARAMS), X)


def test_train_step_refuses_integers():
    step = moe.train_step(CONFIG, donate=False)
    with refused(TypeError, "x has dtype int32"):
        step(moe.init_state(PARAMS), X.astype(jnp.int32))


def test_errors_are_the_same_under_jit():
    with refused(ValueError, "x has shape (3, 5)", "d_model=6"):
        jax.jit(lambda x: moe.apply(PARAMS, x, CONFIG))(jnp.ones((3, 5)))
