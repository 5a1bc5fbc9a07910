"""Dropless through `jax.lax.ragged_dot`: XLA's own grouped matmul over the sorted rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe.config import Config
from moe.dispatch import dispatch
from moe.experts import Params, swiglu
from moe.router import Aux, route


def ragged_dot(params: Params, x: Float[Array, "T d"], config: Config) -> tuple[Float[Array, "T d"], Aux]:
    """Gather all rows in expert order, three grouped matmuls, weighted scatter-add."""
    routing = route(params.router, x, config)
    rows = dispatch(routing, config.experts)

    def grouped_matmul(left: Float[Array, "A n"], right: Float[Array, "E n m"]) -> Float[Array, "A m"]:
        return jax.lax.ragged_dot(
            left, right.astype(left.dtype), rows.counts, preferred_element_type=jnp.float32
        )

    gathered = x[rows.tokens]
    hidden = swiglu(grouped_matmul(gathered, params.gate), grouped_matmul(gathered, params.up))
    out = grouped_matmul(hidden.astype(x.dtype), params.down)
    y = jnp.zeros(x.shape, jnp.float32).at[rows.tokens].add(rows.weights[:, None] * out)
    return y.astype(x.dtype), Aux(rows.counts, jnp.int32(0))
