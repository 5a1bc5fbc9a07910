"""Our side: implementations of this package, and tokamax's grouped matmul where it is installed."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moe
from moe.dispatch import dispatch
from moe.experts import swiglu
from moe.registry import Implementation
from moe.router import Aux, route

from .. import program
from ..cell import Cell
from ..inputs import make_inputs
from .shapes import JAX


class Jax:
    """See `worker.Side`. Inputs are seeded, so the file of the other side is not needed."""

    def __init__(self) -> None:
        self._cell: Cell
        self._arms: dict[str, Any] = {}

    def load(self, cell: dict[str, Any], inputs: str) -> None:
        self._cell, self._arms = Cell(**cell), {}
        jax.block_until_ready(make_inputs(self._cell)[:2])

    def prepare(self, arm: str) -> None:
        self._arms[arm] = program.program(self._cell, implementation(arm))

    def output(self, arm: str, path: str) -> None:
        params, x, config = make_inputs(self._cell)
        y = jax.jit(lambda params, x: implementation(arm).apply(params, x, config)[0])(params, x)
        np.save(path, np.asarray(y.astype(jnp.float32)))

    def run(self, arm: str) -> None:
        self._arms[arm].call()


def implementation(arm: str) -> Implementation:
    """The layer of an arm."""
    (known,) = (known for known in JAX if known.name == arm)
    if known.impl is not None:
        entry = moe.registry.get(known.impl)
        return dataclasses.replace(entry, apply=functools.partial(entry.apply, **known.tuning))
    import tokamax

    def layer(params: moe.Params, x: jax.Array, config: moe.Config) -> tuple[jax.Array, Aux]:
        """As `moe.ragged_dot`, around tokamax's product."""
        rows = dispatch(route(params.router, x, config), config.experts)
        gate, up, down = (weight.astype(x.dtype) for weight in params[1:])

        def product(left: jax.Array, right: jax.Array) -> jax.Array:
            made: jax.Array = tokamax.ragged_dot(left, right, rows.counts, preferred_element_type=jnp.float32)
            return made

        gathered = x[rows.tokens]
        hidden = swiglu(product(gathered, gate), product(gathered, up)).astype(x.dtype)
        y = jnp.zeros(x.shape, jnp.float32).at[rows.tokens].add(rows.weights[:, None] * product(hidden, down))
        return y.astype(x.dtype), Aux(rows.counts, jnp.int32(0))

    return Implementation(arm, layer)
