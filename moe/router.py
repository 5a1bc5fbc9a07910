"""The router: which experts a token goes to, and with what weight. Always float32."""

import functools
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
    # XLA's CPU sorts whole rows; without the barrier all (T, E) sorted indices are held for the backward pass.
    experts = jax.lax.optimization_barrier(jax.lax.top_k(jax.lax.stop_gradient(scores), config.top_k)[1])
    best = chosen(scores, experts)
    if config.renormalize:
        weights = jax.nn.softmax(best, axis=-1)
    else:
        # Shifted by the largest before exp: a log-sum-exp would round at the size of the logits.
        largest = jax.lax.stop_gradient(best[:, :1])
        weights = jnp.exp(best - largest) / jnp.sum(jnp.exp(scores - largest), axis=-1, keepdims=True)
    return Routing(weights, experts.astype(jnp.int32))


@jax.custom_vjp
def chosen(scores: Float32[Array, "T E"], experts: Int32[Array, "T k"]) -> Float32[Array, "T k"]:
    """The scores of the chosen experts.

    JAX's own gradient of an indexed read adds into (T, E) zeros, which XLA fills before the experts run and
    holds until after them; this one is written in one go.
    """
    return jnp.take_along_axis(scores, experts, axis=1, mode="promise_in_bounds")


def _chosen_forward(scores: Array, experts: Array) -> tuple[Array, tuple[Array, int]]:
    return chosen(scores, experts), (experts, scores.shape[1])


def _chosen_backward(saved: tuple[Array, int], dchosen: Float32[Array, "T k"]) -> tuple[Array, None]:
    experts, number = saved
    each = jnp.arange(number)
    terms = (jnp.where(experts[:, k, None] == each, dchosen[:, k, None], 0) for k in range(experts.shape[1]))
    return functools.reduce(jnp.add, terms), None


chosen.defvjp(_chosen_forward, _chosen_backward)


def route(router: Float32[Array, "d E"], x: Float[Array, "T d"], config: Config) -> Routing:
    """Scores, then the choice."""
    return select(logits(router, x), config)


def count(experts: Int32[Array, "T k"], number_of_experts: int) -> Int32[Array, " E"]:
    """Assignments of each expert, counted in integers."""
    return jnp.zeros(number_of_experts, jnp.int32).at[experts.reshape(-1)].add(1)
