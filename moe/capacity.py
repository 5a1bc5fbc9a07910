"""Capacity: every expert has a fixed number of slots; what overflows is dropped and counted.

Slots as in Switch Transformers (Fedus et al. 2021, arXiv:2101.03961) and GShard (Lepikhin et al. 2020,
arXiv:2006.16668): claimed token by token, within a token by choice rank.
"""

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from moe.config import Config
from moe.cpu import on_cpu
from moe.dispatch import dispatch, stable_order
from moe.experts import Params, product, swiglu
from moe.router import Aux, route

Experts = tuple[Float[Array, "E d h"], Float[Array, "E d h"], Float[Array, "E h d"]]
FULL = 256
"""Slots from which on a float32 train step on CPU takes one expert after the other."""


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
    """Each expert on its slots; a dropped assignment adds exactly 0 to its token."""
    tokens = x.shape[0]
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
    token = jnp.where(used, sorted_rows.tokens[row], tokens + slot)
    weight = jnp.where(used, sorted_rows.weights[row], 0)
    y = combined(params[1:], x, token, weight)
    return y.astype(x.dtype), Aux(counts, dropped)


keeping_products = functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("product")
)
"""Keeps the three products, those with gate and up in the dtype of x, and computes the rest again."""


def expert(
    x: Float[Array, "T d"],
    token: Int32[Array, " s"],
    weight: Float32[Array, " s"],
    *matrices: Float[Array, "m n"],
    **indexing: Any,
) -> Float32[Array, "s d"]:
    """What one expert adds to the tokens of its slots."""
    gate, up, down = (matrix.astype(x.dtype) for matrix in matrices)
    rows = x.at[token].get(mode="fill", fill_value=0, **indexing)
    gated, upped = (
        checkpoint_name(product(rows, matrix).astype(x.dtype), "product").astype(jnp.float32)
        for matrix in (gate, up)
    )
    out: Array = checkpoint_name(product(swiglu(gated, upped).astype(x.dtype), down), "product")
    return weight[:, None] * out


@keeping_products
def together(experts: Experts, x: Array, token: Array, weight: Array) -> Float32[Array, "T d"]:
    """All experts as one batch of products: what an accelerator needs."""
    out = jax.vmap(functools.partial(expert, x))(token, weight, *experts)
    return jnp.zeros(x.shape, jnp.float32).at[token].add(out, mode="drop")


def one_by_one(experts: Experts, x: Array, token: Array, weight: Array) -> Float32[Array, "T d"]:
    """One expert after the other: on CPU each fills the cores, and new memory is what costs most."""
    distinct: dict[str, Any] = {"unique_indices": True, "indices_are_sorted": True}

    @keeping_products
    def add_expert(y: Float32[Array, "T d"], its: tuple[Array, ...]) -> tuple[Float32[Array, "T d"], None]:
        return y.at[its[0]].add(expert(x, *its, **distinct), mode="drop", **distinct), None

    y, _ = jax.lax.scan(add_expert, jnp.zeros(x.shape, jnp.float32), (token, weight, *experts))
    return y


@jax.custom_vjp
def combined(
    experts: Experts, x: Float[Array, "T d"], token: Int32[Array, "E s"], weight: Float32[Array, "E s"]
) -> Float32[Array, "T d"]:
    """Sum over experts of weight * expert(x[token]) (s slots each), in the form that suits the backend."""
    return (one_by_one if on_cpu() else together)(experts, x, token, weight)


def _forward(experts: Experts, x: Array, token: Array, weight: Array) -> tuple[Array, Callable[..., Any]]:
    # Float32 gradients of small experts are written into one array faster by one batch of products (0.7 to 0.9).
    small = x.dtype == jnp.float32 and token.shape[1] < FULL
    form = one_by_one if on_cpu() and not small else together
    y, pull = jax.vjp(lambda experts, x, weight: form(experts, x, token, weight), experts, x, weight)
    return y, pull


def _backward(pull: Callable[..., Any], dy: Array) -> tuple[Any, ...]:
    dexperts, dx, dweight = pull(dy)
    return dexperts, dx, None, dweight


combined.defvjp(_forward, _backward)
