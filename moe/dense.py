"""Dense: every expert on every token, weighted. The reference of all others, and a good version of itself.

A scan over experts holds one expert's hidden rows at a time; an einsum over all experts holds all of them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from moe.config import Config
from moe.experts import Params, feed_forward
from moe.router import Aux, Routing, count, route


def weighted_experts(params: Params, x: Float[Array, "T d"], routing: Routing) -> Float32[Array, "T d"]:
    """Sum over experts of weight * expert(x), for any routing: zeroed weights drop assignments."""

    @jax.checkpoint
    def add_expert(
        y: Float32[Array, "T d"], expert: tuple[jax.Array, ...]
    ) -> tuple[Float32[Array, "T d"], None]:
        index, gate, up, down = expert
        weight = jnp.sum(jnp.where(routing.experts == index, routing.weights, 0), axis=1)
        return y + weight[:, None] * feed_forward(x, gate, up, down), None

    indices = jnp.arange(params.gate.shape[0], dtype=jnp.int32)
    y, _ = jax.lax.scan(add_expert, jnp.zeros(x.shape, jnp.float32), (indices, *params[1:]))
    return y


def dense(params: Params, x: Float[Array, "T d"], config: Config) -> tuple[Float[Array, "T d"], Aux]:
    """Every expert on every token; `experts / top_k` times the products of a dropless layer."""
    routing = route(params.router, x, config)
    y = weighted_experts(params, x, routing)
    return y.astype(x.dtype), Aux(count(routing.experts, config.experts), jnp.int32(0))
