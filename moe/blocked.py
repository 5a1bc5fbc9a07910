"""Dropless in blocks: each expert's rows are padded to whole blocks of `block_m`, one expert a block."""

from jaxtyping import Array, Float

from moe.config import Config, positive
from moe.experts import Params
from moe.grouped import Form, grouped_layer, piece_rows
from moe.router import Aux

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
    wanted = BLOCK_M if block_m is None else positive("block_m", block_m)
    return grouped_layer(params, x, config, Form((piece_rows(wanted, slab_elems, x.shape[0], config),)))
