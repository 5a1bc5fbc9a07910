"""The train step: mean-square loss, gradients, Adam."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Float32

from moe.adam import default_optimizer, stepped, stepping
from moe.config import Config
from moe.experts import Params
from moe.layer import apply, implementation_of
from moe.registry import Implementation, get


class TrainState(NamedTuple):
    """Parameters and the optimizer's state (for Adam: count and two moments)."""

    params: Params
    opt_state: optax.OptState


Step = Callable[..., tuple[TrainState, Float32[Array, ""]]]


def init_state(params: Params, optimizer: optax.GradientTransformation | None = None) -> TrainState:
    """The state before the first step."""
    return TrainState(params, (optimizer or default_optimizer()).init(params))


def steps_in_place(implementation: Implementation, params: Params) -> bool:
    """Whether Adam's step is taken in the layer's backward pass, where the state is donated.

    Not in bfloat16, whose stacks XLA's CPU writes in a loop by way of copies: gradients of all experts cost less.
    """
    return implementation.steps and params.gate.dtype == jnp.float32


def step_of(
    layer: Callable[[Any, Array], Array], optimizer: optax.GradientTransformation | None = None
) -> Step:
    """The plain, not jitted step around any layer `(params, x) -> y`.

    The loss is the mean of y**2, or of (y - target)**2, in float32; 0 where x is empty. `optimizer` None is Adam in
    the layer's backward pass, for a layer that can (`Implementation.steps`); its results are those of
    `default_optimizer` to a rounding step, in less memory where the state is donated. The step raises ValueError
    for a target of another shape than x, which would broadcast.
    """

    def loss_fn(params: Any, x: Array, target: Array | None) -> Float32[Array, ""]:
        y = layer(params, x).astype(jnp.float32)
        if target is not None and jnp.shape(target) != y.shape:
            raise ValueError(f"target has shape {jnp.shape(target)}; it must be that of x, {y.shape}")
        error = y if target is None else y - target.astype(jnp.float32)
        return jnp.sum(error**2) / max(error.size, 1)

    def step(
        state: TrainState, x: Float[Array, "... d"], target: Float[Array, "... d"] | None = None
    ) -> tuple[TrainState, Float32[Array, ""]]:
        if optimizer is None:
            loss, new = jax.value_and_grad(loss_fn, allow_int=True)(stepping(*state), x, target)
            return TrainState(*stepped(new, *state)), loss
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

    def step(
        state: TrainState, x: Float[Array, "... d"], target: Float[Array, "... d"] | None = None
    ) -> tuple[TrainState, Float32[Array, ""]]:
        # Not donated, the new state is a copy in which the old one cannot be overwritten.
        in_place = (
            donate
            and optimizer is None
            and x.size
            and steps_in_place(implementation_of(impl, x, config), state.params)
        )
        return step_of(layer, None if in_place else optimizer or default_optimizer())(state, x, target)

    return jax.jit(step, donate_argnums=(0,) if donate else ())
