"""Dropless through a grouped matmul of all rows in expert order: `jax.lax.ragged_dot`, or our loop on CPU.

XLA's CPU lowers ragged_dot to a masked product of every expert with every row. There the loop over an expert's
pieces of `moe.grouped` does the product, on rows that lie side by side already.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Float32, Int32

from moe.config import Config
from moe.cpu import on_cpu, read_at, readable, transposed, writable, written
from moe.dispatch import dispatch
from moe.experts import Params, matmul, swiglu
from moe.grouped import Wanted, for_each_piece, ladder
from moe.router import Aux, route

LARGEST_PIECE = 256


def _xla(
    left: Float[Array, "A n"], right: Float[Array, "E n m"], counts: Int32[Array, " E"]
) -> Float32[Array, "A m"]:
    return jax.lax.ragged_dot(left, right, counts, preferred_element_type=jnp.float32)


def _pull_xla(
    wanted: Wanted, left: Array, right: Array, counts: Array, cotangent: Array
) -> tuple[Array, Array]:
    _, pulled = jax.vjp(lambda left, right: _xla(left, right, counts), left, right)
    grads: tuple[Array, Array] = pulled(cotangent)
    return grads


def _room(rows: Float[Array, "A n"]) -> Float[Array, "A+r n"]:
    """The rows with room for one more piece behind the last, so that a slice never shifts back."""
    return jnp.pad(rows, ((0, LARGEST_PIECE), (0, 0)))


def _of(right: Float[Array, "E n m"], index: Int32[Array, ""]) -> Float[Array, "n m"]:
    (stack,) = read_at((right,), index)
    return stack[index]


def _loop(
    left: Float[Array, "A n"], right: Float[Array, "E n m"], counts: Int32[Array, " E"]
) -> Float32[Array, "A m"]:
    rows, starts = _room(left), jnp.cumsum(counts) - counts

    def add_expert(index: Int32[Array, ""], out: Float32[Array, "R m"]) -> Float32[Array, "R m"]:
        def add_piece(size: int, first: Array, _: Array, out: Float32[Array, "R m"]) -> Float32[Array, "R m"]:
            product = matmul(jax.lax.dynamic_slice_in_dim(rows, first, size), _of(right, index))
            # What it writes behind the expert's last row is the next one's, which comes after it.
            return jax.lax.dynamic_update_slice_in_dim(out, product, first, axis=0)

        return for_each_piece(starts[index], counts[index], ladder(LARGEST_PIECE), add_piece, out)

    start = jnp.zeros((rows.shape[0], right.shape[2]), jnp.float32)
    out: Float32[Array, "R m"] = jax.lax.fori_loop(0, right.shape[0], add_expert, start)
    return out[: left.shape[0]]


def _pull_loop(
    wanted: Wanted, left: Array, right: Array, counts: Array, cotangent: Array
) -> tuple[Array, Array]:
    rows, cotangents = _room(left), _room(cotangent.astype(left.dtype))
    starts = jnp.cumsum(counts) - counts

    def add_expert(index: Int32[Array, ""], grads: tuple[Array, Array]) -> tuple[Array, Array]:
        dleft, dright = grads

        def add_piece(
            size: int, first: Array, remain: Array, sums: tuple[Array, Array]
        ) -> tuple[Array, Array]:
            dleft, dmatrix = sums
            its, pulled = (jax.lax.dynamic_slice_in_dim(array, first, size) for array in (rows, cotangents))
            if wanted.dx:
                product = matmul(pulled, transposed(_of(right, index)))
                dleft = jax.lax.dynamic_update_slice_in_dim(dleft, product, first, axis=0)
            mine = jnp.arange(size)[:, None] < remain
            its, pulled = (jnp.where(mine, array, 0) for array in (its, pulled))
            return dleft, dmatrix + matmul(transposed(its), pulled)

        start = dleft, jnp.zeros(right.shape[1:], jnp.float32)
        dleft, dmatrix = for_each_piece(starts[index], counts[index], ladder(LARGEST_PIECE), add_piece, start)
        return dleft, jax.lax.dynamic_update_index_in_dim(dright, written(dmatrix, dright), index, 0)

    start = jnp.zeros(rows.shape if wanted.dx else (0, 0), jnp.float32), writable(jnp.zeros_like(right))
    dleft, dright = jax.lax.fori_loop(0, right.shape[0], add_expert, start)
    return dleft[: left.shape[0]].astype(left.dtype), readable(dright)


PRODUCTS = {"loop": (_loop, _pull_loop), "xla": (_xla, _pull_xla)}
LOWERINGS = tuple(PRODUCTS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_matmul(
    lowering: str, left: Float[Array, "A n"], right: Float[Array, "E n m"], counts: Int32[Array, " E"]
) -> Float32[Array, "A m"]:
    """Rows of `left`, `counts[e]` of them for each e in turn, times `right[e]`; summed in float32.

    Under vmap one product after the other: JAX's own batching rule of ragged_dot covers few cases.
    """
    product: Float32[Array, "A m"] = sequential_vmap(PRODUCTS[lowering][0])(left, right, counts)
    return product


Saved = tuple[Array, Array, Array, Wanted]


def _forward(lowering: str, left: Any, right: Any, counts: Any) -> tuple[Float32[Array, "A m"], Saved]:
    """The arguments come as `CustomVJPPrimal`s, which tell whether their gradient is wanted."""
    wanted = Wanted(left.perturbed)
    left, right, counts = jax.custom_derivatives.custom_vjp_primal_tree_values((left, right, counts))
    return grouped_matmul(lowering, left, right, counts), (left, right, counts, wanted)


def _backward(lowering: str, saved: Saved, cotangent: Array) -> tuple[Array | None, Array, None]:
    *arguments, wanted = saved
    pull = functools.partial(PRODUCTS[lowering][1], wanted)
    dleft, dright = sequential_vmap(pull)(*arguments, cotangent)
    return dleft if wanted.dx else None, dright, None


grouped_matmul.defvjp(_forward, _backward, symbolic_zeros=True)


def automatic_lowering() -> str:
    """`loop` on CPU, where XLA's own is a masked product of every expert with every row; else `xla`."""
    return "loop" if on_cpu() else "xla"


def ragged_dot(
    params: Params, x: Float[Array, "T d"], config: Config, lowering: str | None = None
) -> tuple[Float[Array, "T d"], Aux]:
    """Gather all rows in expert order, three grouped matmuls, weighted scatter-add.

    Args:
        lowering: of the grouped matmul, one of LOWERINGS; None is `automatic_lowering`.

    Raises ValueError for another lowering.
    """
    lowering = automatic_lowering() if lowering is None else lowering
    if lowering not in LOWERINGS:
        raise ValueError(f"lowering={lowering!r} is unknown; choose {' or '.join(LOWERINGS)}")
    routing = route(params.router, x, config)
    rows = dispatch(routing, config.experts)

    gathered = x[rows.tokens]
    gate, up, down = (weight.astype(x.dtype) for weight in params[1:])
    product = functools.partial(grouped_matmul, lowering)
    gated, upped = (product(gathered, weight, rows.counts) for weight in (gate, up))
    out = product(swiglu(gated, upped).astype(x.dtype), down, rows.counts)
    y = jnp.zeros(x.shape, jnp.float32).at[rows.tokens].add(rows.weights[:, None] * out)
    return y.astype(x.dtype), Aux(rows.counts, jnp.int32(0))
