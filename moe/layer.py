"""The layer: checks its input, picks the implementation, restores the leading dimensions."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe.adam import Stepping
from moe.config import INDEX_LIMIT, Config
from moe.experts import DTYPES, Params
from moe.registry import Implementation, choose, get
from moe.router import Aux


class Output(NamedTuple):
    """`y` with the shape and dtype of x, and `aux`, see `Aux`."""

    y: Float[Array, "... d"]
    aux: Aux


def apply(
    params: Params | Stepping,
    x: Float[Array, "... d"],
    config: Config,
    *,
    impl: str = "auto",
    **tuning: Any,
) -> Output:
    """The layer on x.

    Args:
        params: router (d, E) float32; gate, up (E, d, h) and down (E, h, d), cast to the dtype of x at use. In a
            train step `Stepping`, for implementations that take it.
        x: (..., d_model), float32 or bfloat16, any leading dimensions, also empty ones.
        config: sizes and routing rule.
        impl: an id of `implementations()`, or "auto" (`choose` says which, and why).
        **tuning: values that the implementation takes, such as `chunk`; None is automatic.

    Raises:
        TypeError: x or a parameter is not of a floating dtype that the layer takes.
        ValueError: a shape does not match, `impl` or a tuning value is unknown or not positive.
    """
    check(params, x, config)
    params, x = jax.tree.map(jnp.asarray, (params, x))
    implementation = implementation_of(impl, x, config)
    implementation.check(tuning)
    if isinstance(params, Stepping) and not (implementation.steps and x.size):
        raise TypeError(
            f"{implementation.id} takes no Stepping; give it moe.Params, and step on its gradients"
        )
    y, aux = implementation.apply(params, x.reshape(-1, config.d_model), config, **tuning)
    return Output(y.reshape(x.shape), aux)


def implementation_of(impl: str, x: Float[Array, "... d"], config: Config) -> Implementation:
    """The implementation that `apply` takes for these; ValueError for an unknown one."""
    tokens = math.prod(jnp.shape(x)[:-1])
    return get(choose(config, tokens, _dtype(x)).id if impl == "auto" else impl)


def check(params: Params | Stepping, x: Float[Array, "... d"], config: Config) -> None:
    """Raise what `apply` documents about x and params; shapes and dtypes only, free under jit."""
    if _dtype(x) not in DTYPES:
        raise TypeError(f"x has dtype {_dtype(x)}; the layer takes {' or '.join(DTYPES)}: cast it first")
    shape = jnp.shape(x)
    if len(shape) < 1 or shape[-1] != config.d_model:
        raise ValueError(f"x has shape {shape}; its last dimension must be d_model={config.d_model}")
    assignments = math.prod(shape[:-1]) * config.top_k
    if assignments > INDEX_LIMIT or math.prod(shape[:-1]) * config.experts > INDEX_LIMIT:
        raise ValueError(
            f"x has {math.prod(shape[:-1])} tokens; tokens x experts={config.experts} must stay under 2**31: "
            "split x into batches"
        )
    d, h, experts = config.d_model, config.d_hidden, config.experts
    expected = ((d, experts), (experts, d, h), (experts, d, h), (experts, h, d))
    if isinstance(params, Stepping):
        params = Params(*params[:4])
    leaves = jax.tree.leaves(params)
    if not isinstance(params, Params) or len(leaves) != len(expected):
        raise TypeError(
            f"params is a {type(params).__name__} with {len(leaves)} arrays; it must be a moe.Params of "
            f"{len(expected)} as moe.init returns"
        )
    for name, leaf, wanted in zip(Params._fields, leaves, expected, strict=True):
        if jnp.shape(leaf) != wanted:
            raise ValueError(
                f"params.{name} has shape {jnp.shape(leaf)}; this config needs {wanted}: "
                "the parameters are of another config, make them with moe.init(key, config)"
            )
        accepted = DTYPES[:1] if name == "router" else DTYPES
        if _dtype(leaf) not in accepted:
            raise TypeError(f"params.{name} has dtype {_dtype(leaf)}; it must be {' or '.join(accepted)}")


def _dtype(array: Any) -> str:
    """The name of an array's own dtype: JAX's `result_type` would call NumPy's float64 float32."""
    return str(getattr(array, "dtype", jnp.result_type(array)))
