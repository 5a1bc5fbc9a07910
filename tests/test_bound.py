"""The bound of a cell does the products that its experts need, no more and no less."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.experts import feed_forward
from tests.bench import bound, roofline, turns
from tests.bench.cell import Cell
from tests.bench.grid import CHUNKED
from tests.running import ROOT

SHAPE = {"d_model": 32, "d_hidden": 48}


def cell(op="forward", dtype="float32", tokens=512, experts=4, top_k=2):
    return Cell("layer", CHUNKED, dtype, tokens, experts, top_k, op, **SHAPE)


def drawn(experts, pieces, rows, d=32, h=48):
    rng = np.random.default_rng(0)
    shapes = ((experts, d, h), (experts, d, h), (experts, h, d))
    weights = tuple(jnp.asarray(rng.standard_normal(shape, np.float32)) / 6 for shape in shapes)
    return weights, jnp.asarray(rng.standard_normal((experts, pieces, rows, d), np.float32))


def test_forward_is_each_expert_on_its_rows():
    weights, x = drawn(3, 2, 8)
    whole = jax.vmap(feed_forward)(x.reshape(3, 16, 32), *weights).reshape(x.shape)
    np.testing.assert_allclose(bound.forward(weights, x), whole, rtol=1e-4, atol=1e-5)


def test_both_ways_are_the_gradients_of_half_the_square():
    weights, x = drawn(3, 2, 8)

    def loss(weights):
        return jnp.sum(bound.forward(weights, x) ** 2) / 2

    for got, expected in zip(bound.both_ways(weights, x), jax.grad(loss)(weights), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("op", ["forward", "train_step_donated"])
def test_products_of_every_piece_size_are_the_useful_ones(op):
    """XLA counts a loop's body once, so one expert in one piece holds all of its products."""
    its = cell(op, tokens=64, experts=1, top_k=1)
    weights, x = drawn(1, 1, 64)
    function = bound.forward if op == "forward" else bound.both_ways
    flops = jax.jit(function).lower(weights, x).compile().cost_analysis()["flops"]
    assert its.useful_flops <= flops <= 1.1 * its.useful_flops


def test_pieces_divide_the_even_share():
    assert [its.piece for its in bound.bounds(cell())] == [64, 128, 256]
    assert [its.piece for its in bound.bounds(cell(tokens=100, experts=3))] == [67]


def test_adam_moves_28_bytes_a_parameter():
    assert bound.adam_bytes(cell()) == 0
    assert bound.adam_bytes(cell("train_step_donated")) == 28 * (3 * 4 * 32 * 48 + 32 * 4)


def test_turns_come_in_every_round():
    ran = []
    timed = {name: (lambda name=name: ran.append(name) or 1.0) for name in "abc"}
    seconds = turns.take(timed, 5, np.random.default_rng(0))
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys("abc", 5)
    rounds = [ran[3 * i : 3 + 3 * i] for i in range(5)]
    assert all(sorted(one) == list("abc") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1


def test_the_process_is_pinned_before_jax_is_imported():
    script = "import tests.bench.__main__, tests.bench.roofline, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def test_what_is_in_the_bound_is_not_counted_twice():
    parts = {"routing": 1.0, "gather and scatter": 2.0, "activation": 3.0, "Adam": 4.0}
    reached = roofline.Reached("it", 20.0, 15.0, 4 / 3, 1.3, 256, 0.7, parts, 15)
    found = roofline.where(reached)
    assert found["rest: ragged tails, stores"] == 20 - 15 - 1 - 2
    assert found["  of it Adam"] == 4
    assert "x1.333 of it (1.300 of the minima, 15 turns), 70% of a plain matmul" in roofline.lines(reached)[0]


@pytest.mark.parametrize("op", ["forward", "train_step_donated"])
def test_a_cell_is_reached(op):
    reached = roofline.reach(cell(op), 2, np.random.default_rng(0))
    assert reached.bound_ms > 0
    assert reached.over_bound == pytest.approx(reached.ours_ms / reached.bound_ms)
    assert reached.parts_ms.keys() == {"routing", "gather and scatter", "activation"} | (
        {"Adam"} if op != "forward" else set()
    )
