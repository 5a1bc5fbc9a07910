"""The inputs of a cell: seeded, the same under every JAX, shared by all cells of one shape."""

import functools
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import moe

from .cell import Cell
from .errors import GridError

MARGIN = 0.5
"""By how much the logit of expert 0 leads on a skewed token; a bfloat16 rounding of x does not undo it."""


class Inputs(NamedTuple):
    """`params` with values that the cell's dtype can hold (so that casting them loses nothing), x, config."""

    params: moe.Params
    x: jax.Array
    config: moe.Config


def config_of(cell: Cell) -> moe.Config:
    return moe.Config(cell.d_model, cell.d_hidden, cell.experts, cell.top_k)


def make_inputs(cell: Cell) -> Inputs:
    """Parameters, x (tokens, d_model) and config of a cell; cells of one shape get the same arrays."""
    return _inputs(cell.inputs)


@functools.lru_cache(maxsize=1)
def _inputs(key: tuple) -> Inputs:
    tokens, experts, top_k, skew, d, h, dtype, param_dtype = key
    params = _params(experts, d, h, dtype, param_dtype)
    x = _rng("x", tokens, d).standard_normal((tokens, d), np.float32)
    if skew and experts > 1:
        x = skewed(x, np.asarray(params.router), skew, _rng("skew", tokens))
    return Inputs(params, jnp.asarray(x).astype(dtype), moe.Config(d, h, experts, top_k))


@functools.lru_cache(maxsize=1)
def _params(experts: int, d: int, h: int, dtype: str, param_dtype: str) -> moe.Params:
    rng = _rng("params", experts, d, h)
    shapes = ((d, experts), (experts, d, h), (experts, d, h), (experts, h, d))
    leaves = [rng.standard_normal(shape, np.float32) * np.float32(shape[-2] ** -0.5) for shape in shapes]
    matrices = (jnp.asarray(leaf).astype(dtype).astype(param_dtype) for leaf in leaves[1:])
    return moe.Params(jnp.asarray(leaves[0]), *matrices)


def skewed(x: np.ndarray, router: np.ndarray, skew: float, rng: np.random.Generator) -> np.ndarray:
    """x with expert 0 made the first choice of the first round(skew * tokens) of a permutation.

    A multiple of the router's column 0 is added to those tokens, just enough for a lead of MARGIN.
    """
    x = x.copy()
    chosen = rng.permutation(len(x))[: round(skew * len(x))]
    column = router[:, 0]
    gain = column @ column - column @ router[:, 1:]
    if not (gain > 0).all():
        raise GridError(
            f"skew={skew} cannot be reached: another expert's router column leads along expert 0's; take more "
            "d_model or fewer experts"
        )
    logits = x[chosen] @ router
    lead = np.max((logits[:, 1:] - logits[:, :1] + MARGIN) / gain, axis=1)
    x[chosen] += np.maximum(lead, 0)[:, None] * column
    return x


def _rng(*name: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(name).encode()))
