"""The grouped feed-forward: a loop over experts, each taking its rows in pieces of a few static sizes.

Memory is a band of one expert's hidden columns, one piece and one float32 total (T, d), whatever else the
number of tokens. The backward pass recomputes the hidden rows of a piece, unless the form keeps them. `chunked`
and `blocked` are this loop with their own piece sizes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from moe.adam import Stepping, moments, moved
from moe.config import Config, positive
from moe.cpu import read_at, readable, transposed, transposing, writable, written
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
# Most bytes of a band's row: 512 float32 columns, or twice as many of bfloat16. Backward half of it, since six
# matrices are held: 256 float32 columns take 3/5 of the temporary bytes of 512 in 1.02 to 1.05 of their time.
BAND_BYTES = 2048

Carry = TypeVar("Carry")
Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Form:
    """How the loop takes the rows.

    Attributes:
        sizes: piece sizes in rows, ascending.
        whole: takes all hidden columns at once in a forward pass that keeps nothing, instead of in bands.
        keep: keeps the products with gate and up for the backward pass instead of computing them again; takes all
            columns at once, both ways.
    """

    sizes: tuple[int, ...]
    whole: bool = False
    keep: bool = False


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
    params: Params | Stepping, x: Float[Array, "T d"], config: Config, form: Form
) -> tuple[Float[Array, "T d"], Aux]:
    """Route, sort the assignments by expert, run each expert on its rows (see `feed_forward`)."""
    routing = route(params.router, x, config)
    rows = dispatch(routing, config.experts)
    if x.shape[0] == 0:  # no row to gather from
        return x, Aux(rows.counts, jnp.int32(0))
    y = feed_forward(form, params, x, rows)
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
    start: Int32[Array, ""],
    count: Int32[Array, ""],
    sizes: tuple[int, ...],
    body: Callable[[int, Int32[Array, ""], Int32[Array, ""], Carry], Carry],
    carry: Carry,
) -> Carry:
    """Run `body(rows, first, left, carry)` over the pieces of `count` rows from `start` on, largest first.

    No piece is under FEWEST_ROWS. A size is taken while three quarters of it would be filled, the smallest while
    a row is left: one loop for each size instead of a switch inside one loop, which copies the carried totals on
    JAX 0.10.
    """
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


def bands(d_hidden: int, columns: int) -> int:
    """Into how many bands the hidden columns are cut: the fewest even ones of half to all of `columns`, or 1.

    A second band halves the copies of an expert's matrices and the hidden rows that are held at once, for one
    more gather and scatter of every row.
    """
    fewest = -(-d_hidden // columns)
    return next((n for n in range(fewest, 2 * d_hidden // columns + 1) if d_hidden % n == 0), 1)


class Band(NamedTuple):
    """One expert's columns (of gate and up) and rows (of down) in one band of its hidden dimension."""

    expert: Int32[Array, ""]
    first: Int32[Array, ""]
    width: int

    def of(self, stacks: Arrays, dtype: DTypeLike | None = None) -> Arrays:
        """The band's gate (d, b), up (d, b) and down (b, d), or what is of their shapes, cast to `dtype`."""
        d = stacks[0].shape[1]
        sizes = ((d, self.width), (d, self.width), (self.width, d))
        parts = (
            readable(jax.lax.dynamic_slice(stack, start, (1, *size))[0])
            for stack, start, size in zip(read_at(stacks, self.expert), self.starts(), sizes, strict=True)
        )
        return tuple(part.astype(part.dtype if dtype is None else dtype) for part in parts)

    def put(self, stacks: Arrays, values: Arrays) -> Arrays:
        """`stacks` (of gate, up and down, or of their shapes) with the band's written in."""
        return tuple(
            jax.lax.dynamic_update_slice(stack, written(value, stack)[None], start)
            for stack, value, start in zip(stacks, values, self.starts(), strict=True)
        )

    def step(self, params: Stepping, grads: Arrays) -> Stepping:
        """`params` with Adam's step taken in the band; it is written in place."""
        mu, nu = self.of(params.mu), self.of(params.nu)
        grads = tuple(grad.astype(moment.dtype) for grad, moment in zip(grads, mu, strict=True))
        mu, nu = moments(grads, mu, nu)
        # The matrices move by what was stored: read before, the old moments would have to be kept in a copy.
        mu, nu = jax.lax.optimization_barrier((self.put(params.mu, mu), self.put(params.nu, nu)))
        new = moved(self.of(params[1:4]), self.of(mu), self.of(nu), params.taken + 1)
        gate, up, down = self.put(params[1:4], new)
        return params._replace(gate=gate, up=up, down=down, mu=mu, nu=nu)

    def rows_of(self, whole: Float[Array, "R h"], size: int, first: Int32[Array, ""]) -> Float[Array, "n b"]:
        """`size` rows of the band's columns of `whole`, from row `first` on."""
        return jax.lax.dynamic_slice(whole, (first, self.first), (size, self.width))

    def put_rows(
        self, whole: Float[Array, "R h"], rows: Float[Array, "n b"], first: Int32[Array, ""]
    ) -> Float[Array, "R h"]:
        """`whole` with these rows of the band's columns written in, from row `first` on."""
        return jax.lax.dynamic_update_slice(whole, rows.astype(whole.dtype), (first, self.first))

    def starts(self) -> tuple[tuple[int | Int32[Array, ""], ...], ...]:
        return (self.expert, 0, self.first), (self.expert, 0, self.first), (self.expert, self.first, 0)


def for_each_band(
    params: Params | Stepping, number: int, body: Callable[[Band, Carry], Carry], carry: Carry
) -> Carry:
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def feed_forward(
    form: Form, params: Params | Stepping, x: Float[Array, "T d"], rows: Dispatch
) -> Float32[Array, "T d"]:
    """Sum over each token's experts of weight * expert(x), for rows sorted by expert.

    Args:
        form: how the rows are taken (static).
        params: the experts' matrices; the router is not used. With `Stepping` the experts' "gradients" are their
            new values (see `moe.adam`).
        x: tokens, float32 or bfloat16; products are in this dtype, sums in float32.
        rows: the assignments by expert.
    """
    y, *_ = _sum(form, params, x, rows, ())
    return y


def _sum(
    form: Form, params: Params | Stepping, x: Float[Array, "T d"], rows: Dispatch, kept: Arrays
) -> Arrays:
    """The sum, then `kept`, (A + largest piece, h) each and gate's first, with their products of all rows."""
    rows = padded(rows, max(form.sizes[-1], FEWEST_ROWS))

    def add_band(band: Band, carry: Arrays) -> Arrays:
        gate, up, down = band.of(params[1:4], x.dtype)

        def add_piece(size: int, first: Int32[Array, ""], left: Int32[Array, ""], carry: Arrays) -> Arrays:
            y, *kept = carry
            piece = take(rows, x.shape[0], size, first, left)
            inputs = gather(x, piece)
            products = matmul(inputs, gate), matmul(inputs, up)
            # What padding writes here is in the next expert's rows, which come after it.
            for place, whole in enumerate(kept):
                kept[place] = band.put_rows(whole, products[place], first)
            hidden = swiglu(*products).astype(x.dtype)
            return scatter_add(y, piece, piece.weights[:, None] * matmul(hidden, down)), *kept

        return for_each_piece(
            rows.starts[band.expert], rows.counts[band.expert], form.sizes, add_piece, carry
        )

    number = 1 if form.whole or kept else bands(params.gate.shape[2], BAND_BYTES // x.dtype.itemsize)
    return for_each_band(params, number, add_band, (jnp.zeros(x.shape, jnp.float32), *kept))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """Whether x needs a gradient; in a train step of the layer alone it needs none."""

    dx: bool


Saved = tuple[Params | Stepping, jax.Array, Dispatch, Arrays, Wanted]


def _forward(form: Form, params: Any, x: Any, rows: Any) -> tuple[Float32[Array, "T d"], Saved]:
    """The arguments come as `CustomVJPPrimal`s, which tell whether their gradient is wanted."""
    wanted = Wanted(x.perturbed)
    params, x, rows = jax.custom_derivatives.custom_vjp_primal_tree_values((params, x, rows))
    kept: Arrays = ()
    if form.keep:
        shape = rows.tokens.shape[0] + max(form.sizes[-1], FEWEST_ROWS), params.gate.shape[2]
        kept = (jnp.zeros(shape, x.dtype), jnp.zeros(shape, x.dtype))
    y, *kept_rows = _sum(form, params, x, rows, kept)
    return y, (params, x, rows, tuple(kept_rows), wanted)


def _backward(form: Form, saved: Saved, dy: Float32[Array, "T d"]) -> tuple[Any, Any, Any]:
    params, x, unpadded, kept, wanted = saved
    rows = padded(unpadded, max(form.sizes[-1], WINDOW))
    dy = dy.astype(x.dtype)

    def add_band(band: Band, totals: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        new, dweights, dx = totals
        gate, up, down = band.of((new if isinstance(params, Stepping) else params)[1:4], x.dtype)
        turned = transposing(down)

        def add_piece(size: int, first: Int32[Array, ""], left: Int32[Array, ""], sums: Arrays) -> Arrays:
            dgate, dup, ddown, dweights, dx = sums
            piece = take(rows, x.shape[0], size, first, left)
            inputs, cotangent = gather(x, piece), gather(dy, piece)
            # The window reaches into the next experts' rows: padding adds nothing, whatever this expert holds.
            valid = piece.tokens < x.shape[0]
            if kept:
                gated, upped = (
                    jnp.where(valid[:, None], band.rows_of(whole, size, first), 0).astype(jnp.float32)
                    for whole in kept
                )
            else:
                gated, upped = matmul(inputs, gate), matmul(inputs, up)
            hidden = swiglu(gated, upped)
            # <hidden @ down, dy> = <hidden, dy @ down.T>: the output itself is not needed again.
            unweighted = matmul(cotangent, turned())
            dweight = jnp.where(valid, jnp.sum(hidden * unweighted, axis=1), 0)
            weighted = (piece.weights[:, None] * hidden).astype(x.dtype)
            ddown += matmul(transposed(weighted), cotangent)
            if not kept:
                # The hidden rows go before their gradients come: 1/10 less memory at no time.
                ddown, dweight, gated, upped, unweighted = jax.lax.optimization_barrier(
                    (ddown, dweight, gated, upped, unweighted)
                )
            _, pull = jax.vjp(swiglu, gated, upped)
            dgated, dupped = (part.astype(x.dtype) for part in pull(piece.weights[:, None] * unweighted))
            window = jax.lax.dynamic_slice_in_dim(dweights, first, max(size, WINDOW))
            window += jnp.pad(dweight, (0, max(WINDOW - size, 0)))
            if wanted.dx:
                dx = scatter_add(dx, piece, matmul(dgated, gate.T) + matmul(dupped, up.T))
            columns = transposing(inputs)
            return (
                dgate + matmul(columns(), dgated),
                dup + matmul(columns(), dupped),
                ddown,
                jax.lax.dynamic_update_slice_in_dim(dweights, window, first, axis=0),
                dx,
            )

        zeros = tuple(jnp.zeros(weight.shape, jnp.float32) for weight in (gate, up, down))
        *grads, dweights, dx = for_each_piece(
            rows.starts[band.expert],
            rows.counts[band.expert],
            form.sizes,
            add_piece,
            (*zeros, dweights, dx),
        )
        if isinstance(params, Stepping):
            return band.step(new, tuple(grads)), dweights, dx
        return Params(new.router, *band.put(new[1:4], tuple(grads))), dweights, dx

    start = (
        jax.tree.map(
            writable, params if isinstance(params, Stepping) else jax.tree.map(jnp.zeros_like, params)
        ),
        jnp.zeros(rows.weights.shape, jnp.float32),
        jnp.zeros(x.shape if wanted.dx else 0, jnp.float32),
    )
    row = BAND_BYTES if isinstance(params, Stepping) else BAND_BYTES // 2
    number = 1 if form.keep else bands(params.gate.shape[2], row // x.dtype.itemsize)
    new, dweights, dx = for_each_band(params, number, add_band, start)
    dparams = jax.tree.map(readable, new)
    if isinstance(params, Stepping):
        none: Any = None
        dparams = dparams._replace(router=jnp.zeros_like(params.router), taken=none)
    # Integer inputs have no gradient: None.
    drows: dict[str, Any] = dict.fromkeys(Dispatch._fields)
    drows["weights"] = dweights[: unpadded.weights.shape[0]]
    return dparams, dx.astype(x.dtype) if wanted.dx else None, Dispatch(**drows)


feed_forward.defvjp(_forward, _backward, symbolic_zeros=True)
