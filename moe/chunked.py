"""Dropless in chunks: each expert takes its rows in pieces of up to `chunk`, remainders in smaller ones."""

from jaxtyping import Array, Float

from moe.config import Config, positive
from moe.experts import Params
from moe.grouped import grouped_layer, ladder, piece_rows
from moe.router import Aux


def automatic_chunk(tokens: int, config: Config) -> int:
    """Largest piece in rows: 256, or 128 where an expert's even share of the assignments is smaller."""
    return 256 if tokens * config.top_k >= 256 * config.experts else 128


def takes_whole(tokens: int, config: Config) -> bool:
    """Whether an expert's even share is twice its hidden columns or more.

    The second gather and scatter of every row then cost more time than the band is worth in memory.
    """
    return tokens * config.top_k >= 2 * config.d_hidden * config.experts


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
    wanted = automatic_chunk(x.shape[0], config) if chunk is None else positive("chunk", chunk)
    whole = chunk is None and slab_elems is None and takes_whole(x.shape[0], config)
    return grouped_layer(params, x, config, ladder(piece_rows(wanted, slab_elems, x.shape[0], config)), whole)
