"""The forms of one implementation: kept or recomputed products, x's gradient or none, either lowering."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe
from moe import capacity
from moe.chunked import KEEP_ELEMS, automatic_keep_elems
from moe.grouped import bands
from moe.ragged_dot import LOWERINGS, automatic_lowering
from tests import layers
from tests.bench.grid import CAPACITY, CHUNKED, RAGGED
from tests.layers import DTYPES

# Two bands forward and four backward in float32; experts of whole pieces, of a few rows and of none.
CONFIG = moe.Config(32, 1024, experts=6, top_k=2)
FORMS = [
    *((CHUNKED, {"keep_elems": keep, "chunk": 64}) for keep in (0, 2**20)),
    *((RAGGED, {"lowering": lowering}) for lowering in LOWERINGS),
]
KEPT = 2 * 200 * CONFIG.top_k * CONFIG.d_hidden


def drawn(dtype, tokens=200):
    rows = np.array([[3, 2, 0, -1, -2, -9], [3, 0, 2, -1, -2, -9], [-1, 3, 0, 2, -2, -9]], np.float32)
    pattern = np.arange(tokens) % 20 % 3
    return layers.with_logits(CONFIG, rows, pattern, dtype)


every_form = pytest.mark.parametrize(("impl", "tuning"), FORMS, ids=[str(form[1]) for form in FORMS])


@pytest.mark.parametrize("dtype", DTYPES)
@every_form
def test_each_form_equals_dense(impl, tuning, dtype):
    ran = layers.assert_equals_dense(impl, *drawn(dtype), CONFIG, **tuning)
    assert ran.counts.tolist() == sorted(ran.counts, reverse=True)
    assert ran.counts[-1] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("on_cpu", "full"), [(True, 1), (True, 10**6), (False, 1)])
def test_each_form_of_capacity_equals_dense(monkeypatch, on_cpu, full, dtype):
    monkeypatch.setattr(capacity, "on_cpu", lambda: on_cpu)
    monkeypatch.setattr(capacity, "FULL", full)
    roomy = dataclasses.replace(CONFIG, capacity_factor=3.0)
    ran = layers.assert_equals_dense(CAPACITY, *drawn(dtype), roomy)
    assert ran.dropped == 0


def test_capacity_trains_one_by_one_only_from_full_experts_on():
    """Of two forms' gradients one is a loop over experts."""

    def loops(tokens):
        params, x = drawn("float32", tokens)
        text = str(jax.make_jaxpr(jax.grad(functools.partial(loss, CAPACITY, {})))(params, x))
        return text.count("scan[")

    few, full = (
        round(slots * CONFIG.experts / CONFIG.top_k / CONFIG.capacity_factor) for slots in (200, 300)
    )
    assert (loops(few), loops(full)) == (0, 2)


def loss(impl, tuning, params, x):
    y = moe.apply(params, x, CONFIG, impl=impl, **tuning).y
    return jnp.mean(y.astype(jnp.float32) ** 2)


@pytest.mark.parametrize("dtype", DTYPES)
@every_form
def test_parameters_have_the_same_gradients_with_and_without_those_of_x(impl, tuning, dtype):
    params, x = drawn(dtype)
    function = functools.partial(loss, impl, tuning)
    both, alone = (
        jax.jit(jax.grad(function, argnums=which), compiler_options=layers.QUICK)(params, x)
        for which in ((0, 1), (0,))
    )
    for got, expected in zip(alone[0], both[0], strict=True):
        # XLA may fuse the two otherwise, and sum in another order: a few roundings of the largest.
        most = 4 * np.finfo(np.float32).eps * np.abs(expected).max()
        np.testing.assert_allclose(got, expected, rtol=0, atol=most)


def products(impl, tuning, argnums, dtype="float32"):
    """Products in the traced gradient, however deep; of an unrolled ladder each size has its own."""
    text = str(
        jax.make_jaxpr(jax.grad(functools.partial(loss, impl, tuning), argnums=argnums))(*drawn(dtype))
    )
    return text.count("dot_general["), text.count("ragged_dot_general[")


def test_a_train_step_does_not_compute_the_gradient_of_x():
    # 64 rows is two sizes of pieces; each has two products for the gradient of x. The router has one.
    for keep in (0, 2**20):
        tuning = {"keep_elems": keep, "chunk": 64}
        assert products(CHUNKED, tuning, (0, 1))[0] - products(CHUNKED, tuning, 0)[0] == 2 * 2 + 1


def test_what_is_kept_is_not_computed_again():
    kept, again = (products(CHUNKED, {"keep_elems": keep, "chunk": 64}, 0)[0] for keep in (KEPT, KEPT - 1))
    assert again - kept == 2 * 2


def test_lowering_of_ragged_dot():
    assert products(RAGGED, {"lowering": "xla"}, 0)[1] > 0
    assert products(RAGGED, {"lowering": "loop"}, 0)[1] == 0
    assert automatic_lowering() == ("loop" if jax.default_backend() == "cpu" else "xla")


def test_automatic_keep_elems():
    assert automatic_keep_elems("float32") == KEEP_ELEMS == 2**26
    assert automatic_keep_elems("float32", slab_elems=2**20) == 2**20
    assert automatic_keep_elems("bfloat16") == 0


@pytest.mark.parametrize(
    ("d_hidden", "columns", "number"),
    [
        (1024, 512, 2),
        (1024, 256, 4),
        (704, 512, 2),
        (704, 256, 4),
        (256, 256, 1),
        (43, 512, 1),
        (509, 256, 1),
    ],
)
def test_bands_are_even_and_not_too_narrow(d_hidden, columns, number):
    assert bands(d_hidden, columns) == number


def temp(impl, tokens, experts, tuning):
    config = moe.Config(128, 256, experts, top_k=2)
    step = moe.train_step(config, impl=impl, donate=False, **tuning)
    state = jax.eval_shape(lambda: moe.init_state(moe.init(jax.random.key(0), config)))
    x = jax.ShapeDtypeStruct((tokens, 128), "float32")
    return step.lower(state, x).compile().memory_analysis().temp_size_in_bytes


def test_routing_is_not_held_for_all_experts():
    """(T, E) scores, indices or zeros would be 1 MiB each here, from before the experts run to after them."""
    few, many = (temp(CHUNKED, 4096, experts, {"keep_elems": 0}) for experts in (8, 64))
    assert many - few < 2**20


def test_recomputing_takes_less_memory_than_what_it_does_not_keep():
    kept, again = (temp(CHUNKED, 4096, 8, {"keep_elems": keep}) for keep in (KEEP_ELEMS, 0))
    assert kept - again > 0.75 * 4 * 2 * 4096 * 2 * 256
    assert again < temp(CAPACITY, 4096, 8, {})
