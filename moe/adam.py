"""Adam in the backward pass: each expert takes its step as soon as its gradients are known.

A layer that can do this is given `Stepping` for `Params`. What would be the gradients of the experts' matrices and
of their moments are then the new values themselves, written over the old ones: gradients of all experts never
exist at once. That saves their memory, and the time that new memory costs (most of a page's first writing is the
system's).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Float32, Int32

from moe.experts import Params

LEARNING_RATE, B1, B2, EPSILON = 1e-3, 0.9, 0.999, 1e-8

Matrices = tuple[Float[Array, "..."], ...]
"""Of the experts: gate, up and down, or values of their shapes."""


class Stepping(NamedTuple):
    """`Params`, and Adam's state of its matrices: first and second moments, and the steps taken so far."""

    router: Float32[Array, "d E"]
    gate: Float[Array, "E d h"]
    up: Float[Array, "E d h"]
    down: Float[Array, "E h d"]
    mu: Matrices
    nu: Matrices
    taken: Int32[Array, ""]


def default_optimizer() -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2014, arXiv:1412.6980) with optax's constants at learning rate 1e-3."""
    return optax.adam(LEARNING_RATE, b1=B1, b2=B2, eps=EPSILON)


def stepping(params: Params, opt_state: optax.OptState) -> Stepping:
    """Parameters with the state that `default_optimizer` has for them."""
    adam = opt_state[0]
    return Stepping(*params, adam.mu[1:], adam.nu[1:], adam.count)


def stepped(new: Stepping, params: Params, opt_state: optax.OptState) -> tuple[Params, optax.OptState]:
    """The parameters and the state after the step: `new` has the experts' values, and the router's gradient."""
    adam, *rest = opt_state
    router_state = (adam._replace(mu=adam.mu.router, nu=adam.nu.router), *rest)
    updates, (router_adam, *rest) = default_optimizer().update(new.router, router_state, params.router)
    router = optax.apply_updates(params.router, updates)
    adam = router_adam._replace(mu=Params(router_adam.mu, *new.mu), nu=Params(router_adam.nu, *new.nu))
    return Params(router, *new[1:4]), (adam, *rest)


def moments(grads: Matrices, mu: Matrices, nu: Matrices) -> tuple[Matrices, Matrices]:
    """Both moments after these gradients."""
    mu = optax.tree_utils.tree_update_moment(grads, mu, B1, 1)
    return mu, optax.tree_utils.tree_update_moment_per_elem_norm(grads, nu, B2, 2)


def moved(matrices: Matrices, mu: Matrices, nu: Matrices, count: Int32[Array, ""]) -> Matrices:
    """The matrices after step number `count`, from both moments after it."""
    mu, nu = (
        optax.tree_utils.tree_bias_correction(moment, decay, count) for moment, decay in ((mu, B1), (nu, B2))
    )

    def move(matrix: Array, first: Array, second: Array) -> Any:
        return (matrix + -LEARNING_RATE * (first / (jnp.sqrt(second) + EPSILON))).astype(matrix.dtype)

    return tuple(map(move, matrices, mu, nu))
