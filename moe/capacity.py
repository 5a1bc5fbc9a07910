"""Capacity: every expert has a fixed number of slots; what overflows is dropped and counted.

Slots as in Switch Transformers (Fedus et al. 2021, arXiv:2101.03961) and GShard (Lepikhin et al. 2020,
arXiv:2006.16668): claimed token by token, within a token by choice rank.
"""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from moe.config import Config
from moe.dispatch import dispatch, stable_order
from moe.experts import Params, matmul, swiglu
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


def one_by_one() -> bool:
    """Whether experts run one after the other: on CPU, where each fills the cores and new memory costs most.

    An accelerator runs all of them as one batch of products.
    """
    return jax.default_backend() == "cpu"


def capacity(params: Params, x: Float[Array, "T d"], config: Config) -> tuple[Float[Array, "T d"], Aux]:
    """Each expert on its slots; a dropped assignment adds exactly 0 to its token.

    A train step keeps the three products, those with gate and up in the dtype of x, and computes the rest again.
    """
    tokens = x.shape[0]
    size = slots(tokens, config)
    routing = route(params.router, x, config)
    sorted_rows = dispatch(routing, config.experts)
    counts = sorted_rows.counts
    dropped = jnp.sum(jnp.maximum(counts - size, 0), dtype=jnp.int32)
    if tokens == 0:
        return x, Aux(counts, dropped)
    slot = jnp.arange(size, dtype=jnp.int32)

    def expert(start: Int32[Array, ""], count: Int32[Array, ""], *weights: Array) -> tuple[Array, Array]:
        """Its tokens (slots,), past the end of x where a slot is unused, and what it adds to them (slots, d)."""
        gate, up, down = (weight.astype(x.dtype) for weight in weights)
        used = slot < count
        row = jnp.where(used, start + slot, 0)
        # An unused slot reads no row at all (index out of range, filled with 0), so a NaN token stays its own.
        token = jnp.where(used, sorted_rows.tokens[row], tokens + slot)
        rows = x.at[token].get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True)
        gated, upped = (
            checkpoint_name(matmul(rows, weight).astype(x.dtype), "kept").astype(jnp.float32)
            for weight in (gate, up)
        )
        out = checkpoint_name(matmul(swiglu(gated, upped).astype(x.dtype), down), "kept")
        weight = jnp.where(used, sorted_rows.weights[row], 0)
        return token, weight[:, None] * out

    keeping = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("kept"))

    @keeping
    def add_expert(y: Float32[Array, "T d"], its: tuple[Array, ...]) -> tuple[Float32[Array, "T d"], None]:
        token, out = expert(*its)
        return y.at[token].add(out, mode="drop", unique_indices=True, indices_are_sorted=True), None

    y = jnp.zeros(x.shape, jnp.float32)
    experts = sorted_rows.starts, counts, *params[1:]
    if one_by_one():
        y, _ = jax.lax.scan(add_expert, y, experts)
    else:
        token, out = keeping(jax.vmap(expert))(*experts)
        y = y.at[token].add(out, mode="drop")
    return y.astype(x.dtype), Aux(counts, dropped)
