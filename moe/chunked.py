"""Dropless in chunks: each expert takes its rows in pieces of up to `chunk`, remainders in smaller ones."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe.config import Config, positive
from moe.dispatch import dispatch
from moe.experts import Params
from moe.grouped import FEWEST_ROWS, feed_forward, ladder
from moe.router import Aux, route


def automatic_chunk(tokens: int, config: Config) -> int:
    """Largest piece in rows: 256, or 128 where an expert's even share of the assignments is smaller."""
    return 256 if tokens * config.top_k >= 256 * config.experts else 128


def takes_whole(tokens: int, config: Config) -> bool:
    """Whether an expert's even share is twice its hidden columns or more.

    The second gather and scatter of every row then cost more time than the band is worth in memory.
    """
    return tokens * config.top_k >= 2 * config.d_hidden * config.experts


def rows_in_slab(slab_elems: int, config: Config) -> int:
    """Most rows whose hidden values (rows x d_hidden) fit in `slab_elems` elements."""
    least = FEWEST_ROWS * config.d_hidden
    if positive("slab_elems", slab_elems) < least:
        raise ValueError(
            f"slab_elems={slab_elems} does not hold the smallest piece, {FEWEST_ROWS} rows of "
            f"d_hidden={config.d_hidden}; give at least {least}"
        )
    return slab_elems // config.d_hidden


def chunked(
    params: Params,
    x: Float[Array, "T d"],
    config: Config,
    chunk: int | None = None,
    slab_elems: int | None = None,
) -> tuple[Float[Array, "T d"], Aux]:
    """Dropless, in memory that does not depend on the number of tokens beyond input, output and indices.

    Args:
        chunk: largest piece in rows (40 at least are taken); None is `automatic_chunk`, and the whole hidden
            dimension at once where `takes_whole` says so.
        slab_elems: most hidden elements in flight; lowers the chunk. None sets no limit of its own.
    """
    largest = automatic_chunk(x.shape[0], config) if chunk is None else positive("chunk", chunk)
    if slab_elems is not None:
        largest = min(largest, rows_in_slab(slab_elems, config))
    largest = min(largest, max(x.shape[0] * config.top_k, 1))
    routing = route(params.router, x, config)
    rows = dispatch(routing, config.experts)
    whole = chunk is None and slab_elems is None and takes_whole(x.shape[0], config)
    y = feed_forward(ladder(largest), whole, params, x, rows)
    return y.astype(x.dtype), Aux(rows.counts, jnp.int32(0))
