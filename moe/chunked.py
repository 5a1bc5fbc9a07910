"""Dropless in chunks: each expert takes its rows in pieces of up to `chunk`, remainders in smaller ones."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe.config import Config, natural, positive
from moe.experts import Params
from moe.grouped import Form, grouped_layer, ladder, piece_rows
from moe.router import Aux

KEEP_ELEMS = 2**26


def automatic_chunk(tokens: int, config: Config) -> int:
    """Largest piece in rows: 256, or 128 where an expert's even share of the assignments is smaller."""
    return 256 if tokens * config.top_k >= 256 * config.experts else 128


def takes_whole(tokens: int, config: Config) -> bool:
    """Whether an expert's even share is twice its hidden columns or more.

    The second gather and scatter of every row then cost more time than the band is worth in memory.
    """
    return tokens * config.top_k >= 2 * config.d_hidden * config.experts


def automatic_keep_elems(dtype: DTypeLike, slab_elems: int | None = None) -> int:
    """2**26 (256 MiB) in float32, where a train step takes 0.75 to 0.9 of the time, and else none.

    Products in bfloat16 are computed as fast as they are read (0.97 to 1.05). `slab_elems` bounds them too.
    """
    if jnp.dtype(dtype) != jnp.float32:
        return 0
    return KEEP_ELEMS if slab_elems is None else min(KEEP_ELEMS, slab_elems)


def chunked(
    params: Params,
    x: Float[Array, "T d"],
    config: Config,
    chunk: int | None = None,
    slab_elems: int | None = None,
    keep_elems: int | None = None,
) -> tuple[Float[Array, "T d"], Aux]:
    """Dropless, in memory that does not depend on the number of tokens beyond input, output and indices.

    Args:
        chunk: largest piece in rows (40 at least are taken); None is `automatic_chunk`, and the whole hidden
            dimension at once where `takes_whole` says so.
        slab_elems: most hidden elements in flight; lowers the chunk. None sets no limit of its own.
        keep_elems: most elements of the products with gate and up that are kept for the backward pass; where
            there are more, they are computed again. None is `automatic_keep_elems`.
    """
    wanted = automatic_chunk(x.shape[0], config) if chunk is None else positive("chunk", chunk)
    sizes = ladder(piece_rows(wanted, slab_elems, x.shape[0], config))
    most = (
        automatic_keep_elems(x.dtype, slab_elems) if keep_elems is None else natural("keep_elems", keep_elems)
    )
    keep = 2 * x.shape[0] * config.top_k * config.d_hidden <= most
    whole = chunk is None and slab_elems is None and takes_whole(x.shape[0], config)
    return grouped_layer(params, x, config, Form(sizes, whole, keep))
