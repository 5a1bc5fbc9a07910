"""A variant that was measured and rejected: gate and up concatenated into one matrix.

It was slower and takes a copy of two thirds of the parameters (published as code "rejected"); it stays
measurable here, outside `moe`, so that the decision can be checked again.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import moe
from moe.chunked import automatic_chunk
from moe.dispatch import dispatch
from moe.experts import matmul, swiglu
from moe.router import route

ID = "dropless:concatenated:sorted"


def concatenated(params: moe.Params, x: Float[Array, "T d"], config: moe.Config, chunk: int | None = None):
    """Dropless in pieces of `chunk` rows, one expert a piece, one product for gate and up together."""
    size = chunk or automatic_chunk(x.shape[0], config)
    routing = route(params.router, x, config)
    rows = dispatch(routing, config.experts)
    # Each expert's rows padded to whole pieces; `pieces` is the most there can be.
    pieces = rows.tokens.shape[0] // size + config.experts
    needed = -(-rows.counts // size)
    last = jnp.cumsum(needed)
    expert = jnp.minimum(jnp.searchsorted(last, jnp.arange(pieces), side="right"), config.experts - 1)
    rank = jnp.arange(pieces) - (last - needed)[expert]
    offset = rank[:, None] * size + jnp.arange(size)
    valid = (offset < rows.counts[expert][:, None]) & (jnp.arange(pieces) < last[-1])[:, None]
    index = jnp.where(valid, rows.starts[expert][:, None] + offset, rows.tokens.shape[0])
    token = rows.tokens.at[index].get(mode="fill", fill_value=x.shape[0])
    weight = rows.weights.at[index].get(mode="fill", fill_value=0)
    both = jnp.concatenate([params.gate, params.up], axis=-1)
    y = _loop(both, params.down, x, weight, token, expert.astype(jnp.int32))
    return y.astype(x.dtype), moe.Aux(rows.counts, jnp.int32(0))


def _piece(both, down, inputs, weight):
    gated, upped = jnp.split(matmul(inputs, both.astype(inputs.dtype)), 2, axis=-1)
    hidden = swiglu(gated, upped).astype(inputs.dtype)
    return weight[:, None] * matmul(hidden, down.astype(inputs.dtype))


def _take(x, token):
    return x.at[token].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _loop(both, down, x, weight, token, expert):
    def add(y, piece):
        token, weight, expert = piece
        return y.at[token].add(_piece(both[expert], down[expert], _take(x, token), weight), mode="drop"), None

    return jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), (token, weight, expert))[0]


def _forward(*arguments):
    return _loop(*arguments), arguments


def _backward(saved, dy):
    both, down, x, weight, token, expert = saved

    def add(totals, piece):
        dboth, ddown, dx = totals
        token, weight, expert = piece
        _, pull = jax.vjp(_piece, both[expert], down[expert], _take(x, token), weight)
        gboth, gdown, gx, gweight = pull(_take(dy, token))
        dx = dx.at[token].add(gx.astype(jnp.float32), mode="drop")
        return (dboth.at[expert].add(gboth), ddown.at[expert].add(gdown), dx), gweight

    start = (jnp.zeros_like(both), jnp.zeros_like(down), jnp.zeros(x.shape, jnp.float32))
    (dboth, ddown, dx), dweight = jax.lax.scan(add, start, (token, weight, expert))
    return dboth, ddown, dx.astype(x.dtype), dweight, None, None


_loop.defvjp(_forward, _backward)
