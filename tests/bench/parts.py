"""The parts of chunked that are no product of an expert: routing, gather and scatter, activation, Adam."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import moe
from moe.adam import default_optimizer
from moe.chunked import automatic_chunk
from moe.dispatch import dispatch
from moe.experts import swiglu
from moe.grouped import for_each_piece, gather, ladder, padded, scatter_add, take
from moe.router import route

from .bound import ready
from .cell import Cell
from .inputs import make_inputs


def parts(cell: Cell) -> dict[str, Callable[[], Any]]:
    """Each part alone on the cell's arrays, as a call that runs it once."""
    params, x, config = make_inputs(cell)
    sizes = ladder(automatic_chunk(cell.tokens, config))

    def routing(params: moe.Params, x: jax.Array) -> Any:
        return dispatch(route(params.router, x, config), config.experts)

    rows = jax.jit(routing)(params, x)

    def moving(x: jax.Array, rows: Any) -> jax.Array:
        rows = padded(rows, sizes[-1])

        def expert(index: jax.Array, y: jax.Array) -> jax.Array:
            def piece(size: int, first: jax.Array, left: jax.Array, y: jax.Array) -> jax.Array:
                its = take(rows, x.shape[0], size, first, left)
                return scatter_add(y, its, gather(x, its).astype(jnp.float32))

            return for_each_piece(rows.starts[index], rows.counts[index], sizes, piece, y)

        moved: jax.Array = jax.lax.fori_loop(0, config.experts, expert, jnp.zeros(x.shape, jnp.float32))
        return moved

    hidden = jnp.ones((sizes[-1], cell.d_hidden), jnp.float32)
    pieces = -(-cell.tokens * cell.top_k // sizes[-1])

    def activating(hidden: jax.Array) -> jax.Array:
        def piece(_: int, carry: jax.Array) -> jax.Array:
            return swiglu(carry, carry + 1).astype(cell.dtype).astype(jnp.float32)

        done: jax.Array = jax.lax.fori_loop(0, pieces, piece, hidden)
        return done

    made: dict[str, Callable[[], Any]] = {
        "routing": ready(routing, params, x),
        "gather and scatter": ready(moving, x, rows),
        "activation": ready(activating, hidden),
    }
    if cell.op != "forward":
        state = default_optimizer().init(params)

        def adam(params: moe.Params, grads: moe.Params, state: Any) -> Any:
            updates, state = default_optimizer().update(grads, state, params)
            return optax.apply_updates(params, updates), state

        made["Adam"] = ready(adam, params, params, state)
    return made
