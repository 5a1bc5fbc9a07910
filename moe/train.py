"""The train step: mean-square loss, gradients, Adam."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Float32

from moe.config import Config
from moe.experts import Params
from moe.layer import apply
from moe.registry import get

LEARNING_RATE = 1e-3


class TrainState(NamedTuple):
    """Parameters and the optimizer's state (for Adam: count and two moments)."""

    params: Params
    opt_state: optax.OptState


Step = Callable[..., tuple[TrainState, Float32[Array, ""]]]


def default_optimizer() -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2014, arXiv:1412.6980) with optax's constants at learning rate 1e-3."""
    return optax.adam(LEARNING_RATE)


def init_state(params: Params, optimizer: optax.GradientTransformation | None = None) -> TrainState:
    """The state before the first step."""
    return TrainState(params, (optimizer or default_optimizer()).init(params))


def step_of(layer: Callable[[Params, Array], Array], optimizer: optax.GradientTransformation) -> Step:
    """The plain, not jitted step around any layer `(params, x) -> y`.

    The loss is the mean of y**2, or of (y - target)**2, in float32; 0 where x is empty. The step raises
    ValueError for a target of another shape than x, which would broadcast.
    """

    def loss_fn(params: Params, x: Array, target: Array | None) -> Float32[Array, ""]:
        y = layer(params, x).astype(jnp.float32)
        if target is not None and jnp.shape(target) != y.shape:
            raise ValueError(f"target has shape {jnp.shape(target)}; it must be that of x, {y.shape}")
        error = y if target is None else y - target.astype(jnp.float32)
        return jnp.sum(error**2) / max(error.size, 1)

    def step(
        state: TrainState, x: Float[Array, "... d"], target: Float[Array, "... d"] | None = None
    ) -> tuple[TrainState, Float32[Array, ""]]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, x, target)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), loss

    return step


def train_step(
    config: Config,
    optimizer: optax.GradientTransformation | None = None,
    *,
    impl: str = "auto",
    donate: bool = True,
    **tuning: Any,
) -> Step:
    """A jitted `step(state, x, target=None) -> (state, loss)`.

    Args:
        config: of the layer.
        optimizer: any optax transformation; None is Adam at 1e-3.
        impl: as in `apply`.
        donate: whether the state's buffers are handed on to the new state (the old one is gone then).
        **tuning: as in `apply`.

    Raises ValueError for an unknown `impl` or a tuning value that it does not take; with "auto", tuning values are
    checked when the step is traced.
    """
    if impl != "auto":
        get(impl).check(tuning)

    def layer(params: Params, x: Array) -> Array:
        return apply(params, x, config, impl=impl, **tuning).y

    return jax.jit(step_of(layer, optimizer or default_optimizer()), donate_argnums=(0,) if donate else ())
