"""Dropless in blocks: each expert's rows are padded to whole blocks of `block_m`, one expert a block."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe.chunked import rows_in_slab
from moe.config import Config, positive
from moe.dispatch import dispatch
from moe.experts import Params
from moe.grouped import feed_forward
from moe.router import Aux, route

BLOCK_M = 64


def blocked(
    params: Params,
    x: Float[Array, "T d"],
    config: Config,
    block_m: int | None = None,
    slab_elems: int | None = None,
) -> tuple[Float[Array, "T d"], Aux]:
    """Dropless with one fixed block size. The expert's matrices are read once, not gathered for each block.

    Args:
        block_m: rows of a block (40 at least are taken); None is 64, as published.
        slab_elems: most hidden elements in flight; lowers the block. None sets no limit of its own.
    """
    size = BLOCK_M if block_m is None else positive("block_m", block_m)
    if slab_elems is not None:
        size = min(size, rows_in_slab(slab_elems, config))
    size = min(size, max(x.shape[0] * config.top_k, 1))
    routing = route(params.router, x, config)
    rows = dispatch(routing, config.experts)
    y = feed_forward((size,), False, params, x, rows)
    return y.astype(x.dtype), Aux(rows.counts, jnp.int32(0))
