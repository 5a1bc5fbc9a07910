"""Dispatch: the assignments sorted by expert, each expert's a contiguous run of rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from moe.router import Routing, count


class Dispatch(NamedTuple):
    """Assignments in expert order, A = T * k of them; within an expert in token order.

    `assignments` (A,) index into the flattened (T, k) choices; `tokens` (A,) row of x; `weights` (A,) combine
    weight, float32; `starts` (E,) first row of each expert; `counts` (E,) rows of each expert.
    """

    assignments: Int32[Array, " A"]
    tokens: Int32[Array, " A"]
    weights: Float32[Array, " A"]
    starts: Int32[Array, " E"]
    counts: Int32[Array, " E"]


def stable_order(experts: Int32[Array, " A"], number_of_experts: int) -> Int32[Array, " A"]:
    """The stable argsort of expert indices.

    Where expert and position fit together in one int32 they are sorted as that one key: on CPU this takes a
    quarter of the time of sorting pairs with JAX 0.10.
    """
    size = experts.shape[0]
    if size * number_of_experts >= 2**31:
        return jnp.argsort(experts, stable=True).astype(jnp.int32)
    keys = experts * size + jnp.arange(size, dtype=jnp.int32)
    return jax.lax.rem(jax.lax.sort(keys, is_stable=False), jnp.int32(max(size, 1)))


def dispatch(routing: Routing, number_of_experts: int) -> Dispatch:
    """Sort the assignments of all tokens by expert (stable)."""
    top_k = routing.experts.shape[1]
    order = stable_order(routing.experts.reshape(-1), number_of_experts)
    counts = count(routing.experts, number_of_experts)
    return Dispatch(
        assignments=order,
        tokens=order // top_k,
        weights=routing.weights.reshape(-1)[order],
        starts=jnp.cumsum(counts, dtype=jnp.int32) - counts,
        counts=counts,
    )
