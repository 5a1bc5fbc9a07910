"""Capacity: every expert has a fixed number of slots; what overflows is dropped and counted.

Slots as in Switch Transformers (Fedus et al. 2021, arXiv:2101.03961) and GShard (Lepikhin et al. 2020,
arXiv:2006.16668): claimed token by token, within a token by choice rank.
"""

import math
from fractions import Fraction

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from moe.config import Config
from moe.dispatch import dispatch, stable_order
from moe.experts import Params, feed_forward
from moe.router import Aux, route


def slots(tokens: int, config: Config) -> int:
    """Slots of each expert: min(tokens, ceil(tokens * top_k * factor / experts)), exactly.

    The factor is read as its shortest decimal, so 1.1 is 11/10 and 1000 * 2 * 1.1 / 8 is 275, not 276.
    """
    share = Fraction(tokens * config.top_k, config.experts) * Fraction(str(config.capacity_factor))
    return min(tokens, math.ceil(share))


def kept(experts: Int32[Array, "T k"], slots_per_expert: int, number_of_experts: int) -> Bool[Array, "T k"]:
    """Which assignments get a slot: the first `slots_per_expert` of each expert in token order."""
    chosen = experts.reshape(-1)
    order = stable_order(chosen, number_of_experts)
    in_order = chosen[order]
    starts = jnp.searchsorted(in_order, jnp.arange(number_of_experts, dtype=jnp.int32)).astype(jnp.int32)
    rank = jnp.arange(chosen.shape[0], dtype=jnp.int32) - starts[in_order]
    fits = jnp.zeros(chosen.shape[0], bool).at[order].set(rank < slots_per_expert)
    return fits.reshape(experts.shape)


def capacity(params: Params, x: Float[Array, "T d"], config: Config) -> tuple[Float[Array, "T d"], Aux]:
    """All experts at once on (experts, slots) rows; a dropped assignment adds exactly 0 to its token."""
    tokens, width = x.shape
    size = slots(tokens, config)
    routing = route(params.router, x, config)
    sorted_rows = dispatch(routing, config.experts)
    counts = sorted_rows.counts
    dropped = jnp.sum(jnp.maximum(counts - size, 0), dtype=jnp.int32)
    if tokens == 0:
        return x, Aux(counts, dropped)

    slot = jnp.arange(size, dtype=jnp.int32)
    used = slot < counts[:, None]
    row = jnp.where(used, sorted_rows.starts[:, None] + slot, 0)
    # An unused slot reads no row at all (index out of range, filled with 0), so a NaN token stays its own.
    token = jnp.where(used, sorted_rows.tokens[row], tokens)
    rows = x.at[token].get(mode="fill", fill_value=0)
    out = feed_forward(rows, *params[1:])
    weight = jnp.where(used, sorted_rows.weights[row], 0)
    y = jnp.zeros((tokens, width), jnp.float32).at[token].add(weight[..., None] * out, mode="drop")
    return y.astype(x.dtype), Aux(counts, dropped)
