"""The router: which experts a token goes to, and with what weight. Always float32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from moe.config import Config


class Routing(NamedTuple):
    """The choice of each token: `weights` (T, k) float32 and `experts` (T, k) int32, best first."""

    weights: Float32[Array, "T k"]
    experts: Int32[Array, "T k"]


class Aux(NamedTuple):
    """What a layer reports beside y, both int32.

    `counts` (E,) assignments routed to each expert, before any drop; `dropped` (), how many of them were not
    computed.
    """

    counts: Int32[Array, " E"]
    dropped: Int32[Array, ""]


def logits(router: Float32[Array, "d E"], x: Float[Array, "T d"]) -> Float32[Array, "T E"]:
    """Router scores in float32, whatever the dtype of x."""
    return jnp.dot(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)


def select(scores: Float32[Array, "T E"], config: Config) -> Routing:
    """The `top_k` best experts of each token; ties go to the lower index.

    The choice is made on the logits: softmax merges scores that differ by a rounding step. Renormalised
    weights are the softmax over the chosen logits alone, which equals p / sum(p) and is exactly the constant
    1 at top_k 1.
    """
    best, experts = jax.lax.top_k(scores, config.top_k)
    if config.renormalize:
        weights = jax.nn.softmax(best, axis=-1)
    else:
        # Shifted by the largest before exp: a log-sum-exp would round at the size of the logits.
        largest = jax.lax.stop_gradient(best[:, :1])
        weights = jnp.exp(best - largest) / jnp.sum(jnp.exp(scores - largest), axis=-1, keepdims=True)
    return Routing(weights, experts.astype(jnp.int32))


def route(router: Float32[Array, "d E"], x: Float[Array, "T d"], config: Config) -> Routing:
    """Scores, then the choice."""
    return select(logits(router, x), config)


def count(experts: Int32[Array, "T k"], number_of_experts: int) -> Int32[Array, " E"]:
    """Assignments of each expert, counted in integers."""
    return jnp.zeros(number_of_experts, jnp.int32).at[experts.reshape(-1)].add(1)
