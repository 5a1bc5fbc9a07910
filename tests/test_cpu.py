"""What XLA's CPU is told in another way: the same values, and none of the copies that it would make."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe
from moe import cpu
from moe.experts import matmul, product
from moe.registry import get
from moe.train import steps_in_place
from tests.bench import program
from tests.bench.cell import Cell
from tests.bench.grid import BLOCKED, CHUNKED, RAGGED
from tests.layers import DROPLESS, IMPLEMENTATIONS

FIRST = [0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, np.nan, -np.nan]
"""Values whose bits the branch could take for a sign."""


def drawn(shape, dtype="bfloat16", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("first", FIRST)
def test_a_transpose_is_one_whatever_comes_first(first, dtype):
    array = drawn((3, 5), dtype).at[0, 0].set(first)
    for found in (cpu.transposed(array), jax.jit(cpu.transposed)(array)):
        np.testing.assert_array_equal(found, np.asarray(array).T)


def test_a_transpose_of_nothing():
    assert cpu.transposed(drawn((0, 5))).shape == (5, 0)


def test_a_transpose_under_vmap():
    arrays = drawn((4, 3, 5))
    np.testing.assert_array_equal(jax.vmap(cpu.transposed)(arrays), np.swapaxes(arrays, 1, 2))


def test_a_bfloat16_transpose_is_written_out_before_the_product():
    """The product reads both sides as they lie; of a plain transpose it reads the left one across."""

    def contracted(turn):
        text = (
            jax.jit(lambda a, b: matmul(turn(a), b))
            .lower(drawn((64, 32)), drawn((64, 48)))
            .compile()
            .as_text()
        )
        (line,) = (line for line in text.splitlines() if " dot(" in line)
        return line.split("lhs_contracting_dims={")[1][0]

    assert contracted(cpu.transposed) == "1"
    assert contracted(jnp.transpose) == "0"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stack_read_and_written_in_a_loop(dtype):
    stack, change = drawn((4, 3, 5), dtype), drawn((4, 3, 5), dtype, seed=1)

    def step(index, held):
        ((mine,), (its,)) = ((s[index] for s in cpu.read_at((a,), index)) for a in (stack, change))
        added = cpu.written(mine.astype(jnp.float32) + its.astype(jnp.float32), held)
        return jax.lax.dynamic_update_index_in_dim(held, added, index, 0)

    start = cpu.writable(jnp.zeros_like(stack))
    found = cpu.readable(jax.jit(lambda start: jax.lax.fori_loop(0, 4, step, start))(start))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, stack + change)


def test_elsewhere_each_is_the_plain_form(monkeypatch):
    monkeypatch.setattr(cpu, "on_cpu", lambda: False)
    stack = drawn((4, 3, 5))
    assert cpu.writable(stack) is stack
    assert cpu.read_at((stack,), jnp.int32(1))[0] is stack
    assert "cond" not in str(jax.make_jaxpr(lambda array: cpu.transposed(array))(stack[0]))


def test_gradients_of_bfloat16_products_are_bfloat16_products():
    a, b, cotangent = drawn((6, 3)), drawn((3, 4), seed=1), drawn((6, 4), "float32", seed=2)
    y, pull = jax.vjp(product, a, b)
    np.testing.assert_array_equal(y, matmul(a, b))
    rounded = np.asarray(cotangent.astype(jnp.bfloat16), np.float32)
    wide = [np.asarray(side, np.float32) for side in (a, b)]
    for found, exact in zip(pull(cotangent), (rounded @ wide[1].T, wide[0].T @ rounded), strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(found, np.float32), exact, rtol=2**-8)


def test_gradients_of_float32_products_are_left_to_jax():
    a, b = drawn((6, 3), "float32"), drawn((3, 4), "float32")
    assert str(jax.make_jaxpr(product)(a, b)) == str(jax.make_jaxpr(matmul)(a, b))


@pytest.mark.parametrize("impl", DROPLESS)
def test_no_bfloat16_stack_of_the_experts_is_copied_forward(impl):
    """XLA would hold all matrices once more, as float32: two times the bytes of the parameters."""
    cell = Cell(
        "layer", impl, "bfloat16", 64, 16, 2, "forward", d_model=128, d_hidden=512, param_dtype="bfloat16"
    )
    sizes = program.flat(cell).compile().bytes
    matrices = 3 * 16 * 128 * 512 * 2
    assert sizes.argument > matrices
    assert sizes.temp < matrices / 2


@pytest.mark.parametrize("impl", [CHUNKED, BLOCKED, RAGGED])
def test_a_bfloat16_train_step_holds_its_gradients_and_no_more(impl):
    """Gradients, once as bits; XLA would hold them as float32 besides, and copy all for each expert."""
    cell = Cell(
        "layer",
        impl,
        "bfloat16",
        64,
        16,
        2,
        "train_step_donated",
        d_model=128,
        d_hidden=512,
        param_dtype="bfloat16",
    )
    matrices = 3 * 16 * 128 * 512 * 2
    assert program.flat(cell).compile().bytes.temp < 2.5 * matrices


def test_adam_in_the_backward_pass_is_for_float32_matrices():
    config = moe.Config(8, 16, experts=4, top_k=2)
    for name in IMPLEMENTATIONS:
        entry = get(name)
        wide, narrow = (moe.init(jax.random.key(0), config, dtype) for dtype in ("float32", "bfloat16"))
        assert steps_in_place(entry, wide) == entry.steps == (name in (CHUNKED, BLOCKED))
        assert not steps_in_place(entry, narrow)
        assert not steps_in_place(dataclasses.replace(entry, steps=False), wide)
