"""Dropless through `jax.lax.ragged_dot`: XLA's own grouped matmul over the sorted rows."""

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Float32, Int32

from moe.config import Config
from moe.dispatch import dispatch
from moe.experts import Params, swiglu
from moe.router import Aux, route


def _product(
    left: Float[Array, "A n"], right: Float[Array, "E n m"], counts: Int32[Array, " E"]
) -> Float32[Array, "A m"]:
    return jax.lax.ragged_dot(left, right, counts, preferred_element_type=jnp.float32)


@jax.custom_vjp
def grouped_matmul(
    left: Float[Array, "A n"], right: Float[Array, "E n m"], counts: Int32[Array, " E"]
) -> Float32[Array, "A m"]:
    """Rows of `left`, `counts[e]` of them for each e in turn, times `right[e]`; summed in float32.

    Under vmap one product after the other: JAX's own batching rule of ragged_dot covers few cases.
    """
    product: Float32[Array, "A m"] = sequential_vmap(_product)(left, right, counts)
    return product


def _forward(left: Array, right: Array, counts: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul(left, right, counts), (left, right, counts)


def _backward(saved: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, None]:
    def pull(left: Array, right: Array, counts: Array, cotangent: Array) -> tuple[Array, Array]:
        _, pulled = jax.vjp(lambda left, right: _product(left, right, counts), left, right)
        grads: tuple[Array, Array] = pulled(cotangent)
        return grads

    return *sequential_vmap(pull)(*saved, cotangent), None


grouped_matmul.defvjp(_forward, _backward)


def ragged_dot(params: Params, x: Float[Array, "T d"], config: Config) -> tuple[Float[Array, "T d"], Aux]:
    """Gather all rows in expert order, three grouped matmuls, weighted scatter-add."""
    routing = route(params.router, x, config)
    rows = dispatch(routing, config.experts)

    gathered = x[rows.tokens]
    gate, up, down = (weight.astype(x.dtype) for weight in params[1:])
    gated, upped = (grouped_matmul(gathered, weight, rows.counts) for weight in (gate, up))
    out = grouped_matmul(swiglu(gated, upped).astype(x.dtype), down, rows.counts)
    y = jnp.zeros(x.shape, jnp.float32).at[rows.tokens].add(rows.weights[:, None] * out)
    return y.astype(x.dtype), Aux(rows.counts, jnp.int32(0))
