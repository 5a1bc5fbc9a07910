"""The grouped feed-forward: a loop over experts, each taking its rows in pieces of a few static sizes.

Memory is a band of one expert's hidden columns, one piece and one float32 total (T, d), whatever else the
number of tokens; the backward pass recomputes the hidden rows of a piece instead of keeping them. `chunked`
and `blocked` are this loop with their own piece sizes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from moe.config import Config, positive
from moe.dispatch import Dispatch, dispatch
from moe.experts import Params, matmul, swiglu
from moe.router import Aux, route

# A slice of under about 480 bytes that is written into a large buffer inside a loop costs the whole buffer on
# CPU since JAX 0.11.1 (jax-ml/jax issue 40101), so gradients of weights are written at least this many at
# once.
WINDOW = 128
# XLA's CPU matmul sums products of up to 32 rows in another order, which alone moves a float32 result by
# 7e-7; no piece is smaller than this, so that every one rounds as dense does.
FEWEST_ROWS = 40

Carry = TypeVar("Carry")
Arrays = tuple[jax.Array, ...]


class Piece(NamedTuple):
    """Rows of one expert: `tokens` (n,) row of x, past its end where a row only pads; `weights` (n,)."""

    tokens: Int32[Array, " n"]
    weights: Float32[Array, " n"]


def ladder(largest: int) -> tuple[int, ...]:
    """Piece sizes up to `largest`, ascending: its halves down to 32 rows, four at most (each is compiled)."""
    sizes = [largest]
    while len(sizes) < 4 and sizes[0] % 2 == 0 and sizes[0] // 2 >= 32:
        sizes.insert(0, sizes[0] // 2)
    return tuple(sizes)


def piece_rows(wanted: int, slab_elems: int | None, tokens: int, config: Config) -> int:
    """`wanted` rows, or as many as there are assignments, or as `slab_elems` hidden elements hold.

    Raises ValueError for a slab that does not hold the smallest piece.
    """
    if slab_elems is not None:
        least = FEWEST_ROWS * config.d_hidden
        if positive("slab_elems", slab_elems) < least:
            raise ValueError(
                f"slab_elems={slab_elems} does not hold the smallest piece, {FEWEST_ROWS} rows of "
                f"d_hidden={config.d_hidden}; give at least {least}"
            )
        wanted = min(wanted, slab_elems // config.d_hidden)
    return min(wanted, max(tokens * config.top_k, 1))


def grouped_layer(
    params: Params, x: Float[Array, "T d"], config: Config, sizes: tuple[int, ...], whole: bool = False
) -> tuple[Float[Array, "T d"], Aux]:
    """Route, sort the assignments by expert, run each expert on its rows (see `feed_forward`)."""
    routing = route(params.router, x, config)
    rows = dispatch(routing, config.experts)
    y = feed_forward(sizes, whole, params, x, rows)
    return y.astype(x.dtype), Aux(rows.counts, jnp.int32(0))


def take(
    rows: Dispatch, total_tokens: int, size: int, first: Int32[Array, ""], left: Int32[Array, ""]
) -> Piece:
    """`size` rows from `first` on, of which `left` are this expert's.

    Padding rows get distinct tokens past the end: gathers fill them with 0 and scatters drop them, so
    whatever they would hold never enters a product.
    """
    offsets = jnp.arange(size, dtype=jnp.int32)
    valid = offsets < left
    tokens = jax.lax.dynamic_slice_in_dim(rows.tokens, first, size)
    weights = jax.lax.dynamic_slice_in_dim(rows.weights, first, size)
    return Piece(jnp.where(valid, tokens, total_tokens + offsets), jnp.where(valid, weights, 0))


def gather(x: Float[Array, "T d"], piece: Piece) -> Float[Array, "n d"]:
    return x.at[piece.tokens].get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True)


def scatter_add(
    total: Float32[Array, "T d"], piece: Piece, rows: Float32[Array, "n d"]
) -> Float32[Array, "T d"]:
    """A piece's tokens are distinct, so sums can be set: XLA's CPU sets rows in 3/4 of the time it adds them."""
    sums = gather(total, piece) + rows
    return total.at[piece.tokens].set(sums, mode="drop", unique_indices=True, indices_are_sorted=True)


def for_each_piece(
    rows: Dispatch,
    expert: Int32[Array, ""],
    sizes: tuple[int, ...],
    body: Callable[[int, Int32[Array, ""], Int32[Array, ""], Carry], Carry],
    carry: Carry,
) -> Carry:
    """Run `body(rows, first, left, carry)` over the pieces of one expert, largest first; none under FEWEST_ROWS.

    A size is taken while three quarters of it would be filled, the smallest while a row is left: one loop for
    each size instead of a switch inside one loop, which copies the carried totals on JAX 0.10.
    """
    if rows.assignments.shape[0] == 0:  # no row of x to gather from
        return carry
    start, count = rows.starts[expert], rows.counts[expert]
    sizes = tuple(sorted({max(size, FEWEST_ROWS) for size in sizes}))
    state = (jnp.int32(0), carry)
    for size in reversed(sizes):
        least = 1 if size == sizes[0] else -(-3 * size // 4)

        def more(state: tuple[Int32[Array, ""], Carry], least: int = least) -> Bool[Array, ""]:
            return count - state[0] >= least

        def step(state: tuple[Int32[Array, ""], Carry], size: int = size) -> tuple[Int32[Array, ""], Carry]:
            done, carry = state
            left = jnp.minimum(count - done, size)
            return done + size, body(size, start + done, left, carry)

        state = jax.lax.while_loop(more, step, state)
    return state[1]


def bands(d_hidden: int) -> int:
    """Into how many bands the hidden columns are cut: the fewest even ones of 256 to 512 columns, or 1.

    A second band halves the copies of an expert's matrices and the hidden rows that are held at once, for one
    more gather and scatter of every row.
    """
    fewest = -(-d_hidden // 512)
    return next((n for n in range(fewest, d_hidden // 256 + 1) if d_hidden % n == 0), 1)


class Band(NamedTuple):
    """One expert's columns (of gate and up) and rows (of down) in one band of its hidden dimension."""

    expert: Int32[Array, ""]
    first: Int32[Array, ""]
    width: int

    def of(self, params: Params, dtype: DTypeLike) -> Arrays:
        """The band's gate (d, b), up (d, b) and down (b, d), cast to `dtype`."""
        d = params.gate.shape[1]
        sizes = ((d, self.width), (d, self.width), (self.width, d))
        return tuple(
            jax.lax.dynamic_slice(weight, start, (1, *size))[0].astype(dtype)
            for weight, start, size in zip(params[1:], self.starts(), sizes, strict=True)
        )

    def put(self, totals: Arrays, grads: Arrays) -> Arrays:
        """`totals` (stacked gradients of gate, up, down) with this band's written in."""
        return tuple(
            jax.lax.dynamic_update_slice(total, grad.astype(total.dtype)[None], start)
            for total, grad, start in zip(totals, grads, self.starts(), strict=True)
        )

    def starts(self) -> tuple[tuple[int | Int32[Array, ""], ...], ...]:
        return (self.expert, 0, self.first), (self.expert, 0, self.first), (self.expert, self.first, 0)


def for_each_band(params: Params, number: int, body: Callable[[Band, Carry], Carry], carry: Carry) -> Carry:
    """Run `body(band, carry)` over the `number` bands of each expert."""
    experts, _, d_hidden = params.gate.shape
    width = d_hidden // number

    def step(index: Int32[Array, ""], carry: Carry) -> Carry:
        return body(Band(index // number, index % number * width, width), carry)

    result: Carry = jax.lax.fori_loop(0, experts * number, step, carry)
    return result


def padded(rows: Dispatch, size: int) -> Dispatch:
    """The same rows with room for one more piece behind the last, so that a slice never shifts back."""
    return rows._replace(tokens=jnp.pad(rows.tokens, (0, size)), weights=jnp.pad(rows.weights, (0, size)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def feed_forward(
    sizes: tuple[int, ...], whole: bool, params: Params, x: Float[Array, "T d"], rows: Dispatch
) -> Float32[Array, "T d"]:
    """Sum over each token's experts of weight * expert(x), for rows sorted by expert.

    Args:
        sizes: piece sizes in rows, ascending (static).
        whole: take all hidden columns at once in the forward pass instead of in bands (static).
        params: the experts' matrices; the router is not used.
        x: tokens, float32 or bfloat16; products are in this dtype, sums in float32.
        rows: the assignments by expert.
    """
    rows = padded(rows, max(sizes[-1], FEWEST_ROWS))

    def add_band(band: Band, y: Float32[Array, "T d"]) -> Float32[Array, "T d"]:
        gate, up, down = band.of(params, x.dtype)

        def add_piece(size: int, first: Int32[Array, ""], left: Int32[Array, ""], y: jax.Array) -> jax.Array:
            piece = take(rows, x.shape[0], size, first, left)
            inputs = gather(x, piece)
            hidden = swiglu(matmul(inputs, gate), matmul(inputs, up)).astype(x.dtype)
            return scatter_add(y, piece, piece.weights[:, None] * matmul(hidden, down))

        return for_each_piece(rows, band.expert, sizes, add_piece, y)

    number = 1 if whole else bands(params.gate.shape[2])
    return for_each_band(params, number, add_band, jnp.zeros(x.shape, jnp.float32))


Saved = tuple[Params, jax.Array, Dispatch]


def _forward(
    sizes: tuple[int, ...], whole: bool, params: Params, x: Float[Array, "T d"], rows: Dispatch
) -> tuple[Float32[Array, "T d"], Saved]:
    return feed_forward(sizes, whole, params, x, rows), (params, x, rows)


def _backward(
    sizes: tuple[int, ...], whole: bool, saved: Saved, dy: Float32[Array, "T d"]
) -> tuple[Any, jax.Array, Any]:
    params, x, unpadded = saved
    rows = padded(unpadded, max(sizes[-1], WINDOW))
    dy = dy.astype(x.dtype)

    def add_band(band: Band, totals: Arrays) -> Arrays:
        *stacked, dx, dweights = totals
        gate, up, down = band.of(params, x.dtype)

        def add_piece(size: int, first: Int32[Array, ""], left: Int32[Array, ""], sums: Arrays) -> Arrays:
            dgate, dup, ddown, dx, dweights = sums
            piece = take(rows, x.shape[0], size, first, left)
            inputs, cotangent = gather(x, piece), gather(dy, piece)
            hidden, pull = jax.vjp(swiglu, matmul(inputs, gate), matmul(inputs, up))
            # <hidden @ down, dy> = <hidden, dy @ down.T>: the output itself is not needed again.
            unweighted = matmul(cotangent, down.T)
            # The window reaches into the next experts' rows: padding adds nothing, whatever this expert holds.
            valid = piece.tokens < x.shape[0]
            dweight = jnp.where(valid, jnp.sum(hidden * unweighted, axis=1), 0)
            dgated, dupped = (part.astype(x.dtype) for part in pull(piece.weights[:, None] * unweighted))
            weighted = (piece.weights[:, None] * hidden).astype(x.dtype)
            window = jax.lax.dynamic_slice_in_dim(dweights, first, max(size, WINDOW))
            window += jnp.pad(dweight, (0, max(WINDOW - size, 0)))
            return (
                dgate + matmul(inputs.T, dgated),
                dup + matmul(inputs.T, dupped),
                ddown + matmul(weighted.T, cotangent),
                scatter_add(dx, piece, matmul(dgated, gate.T) + matmul(dupped, up.T)),
                jax.lax.dynamic_update_slice_in_dim(dweights, window, first, axis=0),
            )

        zeros = tuple(jnp.zeros(weight.shape, jnp.float32) for weight in (gate, up, down))
        *grads, dx, dweights = for_each_piece(rows, band.expert, sizes, add_piece, (*zeros, dx, dweights))
        return (*band.put(tuple(stacked), tuple(grads)), dx, dweights)

    start = (
        *(jnp.zeros(weight.shape, weight.dtype) for weight in params[1:]),
        jnp.zeros(x.shape, jnp.float32),
        jnp.zeros(rows.weights.shape, jnp.float32),
    )
    *grads, dx, dweights = for_each_band(params, bands(params.gate.shape[2]), add_band, start)
    dparams = Params(jnp.zeros_like(params.router), *grads)
    # Integer inputs have no gradient: None.
    drows: dict[str, Any] = dict.fromkeys(Dispatch._fields)
    drows["weights"] = dweights[: unpadded.weights.shape[0]]
    return dparams, dx.astype(x.dtype), Dispatch(**drows)


feed_forward.defvjp(_forward, _backward)
