"""The bound of a cell: the products of its experts on rows split evenly. No router, no gather, no scatter.

SwiGLU is included; for a train step the products of the backward pass, without recomputing and without the
gradient of x, and Adam's bytes at the bandwidth of a plain copy. It is measured as if it were an
implementation, and never asserted against dense.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from moe.cpu import read_at, readable, transposed, writable
from moe.experts import matmul, swiglu

from .cell import Cell
from .inputs import make_inputs

PIECES = (64, 128, 256, 512, 1024)
"""Rows of a piece that are tried; an expert's whole share is tried too."""
ADAM_BYTES = 28
"""For one float32 parameter: gradient, two moments and the parameter read, the last three written."""

Weights = tuple[Float[Array, "E d h"], Float[Array, "E d h"], Float[Array, "E h d"]]


@dataclasses.dataclass(frozen=True)
class Bound:
    """One way to reach for it: rows of a piece, and the call that runs it once."""

    piece: int
    call: Callable[[], Any]


def share(cell: Cell) -> int:
    """Rows of each expert where all have as many, rounded up."""
    return -(-cell.tokens * cell.top_k // cell.experts)


def bounds(cell: Cell) -> list[Bound]:
    """All piece sizes of a cell, compiled; the best of them is the bound."""
    rows = share(cell)
    params, _, _ = make_inputs(cell)
    weights = tuple(leaf.astype(cell.dtype) for leaf in params[1:])
    # A piece that does not divide the share would pad it, which is no bound.
    sizes = sorted({size for size in (*PIECES, rows) if size <= rows and rows % size == 0})
    function = forward if cell.op == "forward" else both_ways
    found = []
    for piece in sizes:
        shape = (cell.experts, rows // piece, piece, cell.d_model)
        x = jax.random.normal(jax.random.key(0), shape).astype(cell.dtype)
        found.append(Bound(piece, ready(function, weights, x)))
    return found


def forward(weights: Weights, x: Float[Array, "E n p d"]) -> Float[Array, "E n p d"]:
    """Each expert on its pieces, one after the other."""

    def expert(index: Int32[Array, ""]) -> Array:
        (gate, up, down), (pieces,) = _of(weights, index), _of((x,), index)

        def piece(number: Int32[Array, ""]) -> Array:
            (rows,) = _of((pieces,), number)
            return writable(_piece(gate, up, down, rows).astype(rows.dtype))

        return jax.lax.map(piece, jnp.arange(x.shape[1]))

    return readable(jax.lax.map(expert, jnp.arange(x.shape[0])))


def both_ways(weights: Weights, x: Float[Array, "E n p d"]) -> tuple[Float32[Array, "E m n"], ...]:
    """Forward and backward in one loop, so that nothing is kept or computed twice; y is its own cotangent.

    Returns the gradients of the weights, summed in float32.
    """

    def expert(index: Int32[Array, ""]) -> Any:
        (gate, up, down), (pieces,) = _of(weights, index), _of((x,), index)
        turned = transposed(down)

        def piece(sums: Any, number: Int32[Array, ""]) -> tuple[Any, None]:
            dgate, dup, ddown = sums
            (rows,) = _of((pieces,), number)
            hidden, pull = jax.vjp(swiglu, matmul(rows, gate), matmul(rows, up))
            hidden = hidden.astype(rows.dtype)
            cotangent = matmul(hidden, down).astype(rows.dtype)
            dgated, dupped = (part.astype(rows.dtype) for part in pull(matmul(cotangent, turned)))
            columns = transposed(rows)
            sums = (
                dgate + matmul(columns, dgated),
                dup + matmul(columns, dupped),
                ddown + matmul(transposed(hidden), cotangent),
            )
            return sums, None

        zeros = tuple(jnp.zeros(weight.shape, jnp.float32) for weight in (gate, up, down))
        return jax.lax.scan(piece, zeros, jnp.arange(x.shape[1]))[0]

    grads: Weights = jax.lax.map(expert, jnp.arange(x.shape[0]))
    return grads


def _of(stacks: tuple[Array, ...], index: Int32[Array, ""]) -> tuple[Array, ...]:
    return tuple(stack[index] for stack in read_at(stacks, index))


def _piece(gate: Array, up: Array, down: Array, rows: Array) -> Float32[Array, "p d"]:
    return matmul(swiglu(matmul(rows, gate), matmul(rows, up)).astype(rows.dtype), down)


def ready(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """A function compiled on these arguments, as a call that runs it once to the end."""
    run = jax.jit(function).lower(*arguments).compile()
    return lambda: jax.block_until_ready(run(*arguments))


def adam_bytes(cell: Cell) -> int:
    """Bytes that Adam reads and writes in a train step; 0 forward."""
    experts = 3 * cell.experts * cell.d_model * cell.d_hidden
    return 0 if cell.op == "forward" else ADAM_BYTES * (experts + cell.d_model * cell.experts)


def copying(size: int = 2**26) -> tuple[Callable[[], Any], int]:
    """A pass over `size` float32 values in place, as a call, and the bytes that it reads and writes.

    In place, as Adam is: most of the time of a copy into new memory goes into the system's handing out its pages.
    """
    run = jax.jit(lambda values: values + 1, donate_argnums=0).lower(jnp.zeros(size, jnp.float32)).compile()
    values = [jnp.zeros(size, jnp.float32)]

    def call() -> None:
        values[0] = jax.block_until_ready(run(values[0]))

    return call, 8 * size
