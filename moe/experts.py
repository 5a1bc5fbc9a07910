"""The experts: parameters and the SwiGLU feed-forward that each of them is."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from moe.config import Config
from moe.cpu import transposed

DTYPES = ("float32", "bfloat16")
"""What x and the experts' matrices may be; the router is always float32."""


class Params(NamedTuple):
    """`router` (d, E) float32; `gate` and `up` (E, d, h) and `down` (E, h, d), float32 or bfloat16."""

    router: Float32[Array, "d E"]
    gate: Float[Array, "E d h"]
    up: Float[Array, "E d h"]
    down: Float[Array, "E h d"]


def init(key: PRNGKeyArray, config: Config, dtype: DTypeLike = jnp.float32) -> Params:
    """Normal parameters with variance 1 / fan-in; `dtype` is that of the experts, the router is float32."""
    if jnp.dtype(dtype).name not in DTYPES:
        raise TypeError(
            f"dtype={jnp.dtype(dtype).name} is not taken by the layer; choose {' or '.join(DTYPES)}"
        )
    d, h, experts = config.d_model, config.d_hidden, config.experts
    shapes = ((d, experts), (experts, d, h), (experts, d, h), (experts, h, d))
    dtypes = (jnp.float32, dtype, dtype, dtype)
    keys = jax.random.split(key, len(shapes))
    return Params(
        *(
            (jax.random.normal(k, shape, jnp.float32) * shape[-2] ** -0.5).astype(leaf_dtype)
            for k, shape, leaf_dtype in zip(keys, shapes, dtypes, strict=True)
        )
    )


def matmul(a: Float[Array, "... m n"], b: Float[Array, "... n p"]) -> Float32[Array, "... m p"]:
    """Product of two arrays of one dtype, accumulated and returned in float32."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def product(a: Float[Array, "m n"], b: Float[Array, "n p"]) -> Float32[Array, "m p"]:
    """`matmul` to be differentiated: in bfloat16 its gradient's products are bfloat16 too, of a rounded cotangent.

    Left to autodiff they mix bfloat16 with the cotangent's float32, at the cost of float32.
    """
    return _bfloat16_product(a, b) if a.dtype == jnp.bfloat16 else matmul(a, b)


@jax.custom_vjp
def _bfloat16_product(a: Array, b: Array) -> Array:
    return matmul(a, b)


def _forward(a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return matmul(a, b), (a, b)


def _backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    a, b = saved
    cotangent = cotangent.astype(a.dtype)
    da, db = matmul(cotangent, transposed(b)), matmul(transposed(a), cotangent)
    return da.astype(a.dtype), db.astype(b.dtype)


_bfloat16_product.defvjp(_forward, _backward)


def swiglu(gated: Float32[Array, "... h"], upped: Float32[Array, "... h"]) -> Float32[Array, "... h"]:
    """silu(gated) * upped (Shazeer 2020, "GLU variants improve transformer", arXiv:2002.05202)."""
    return jax.nn.silu(gated) * upped


def feed_forward(
    x: Float[Array, "n d"],
    gate: Float[Array, "d h"],
    up: Float[Array, "d h"],
    down: Float[Array, "h d"],
) -> Float32[Array, "n d"]:
    """One expert on its rows: products in the dtype of x, sums in float32."""
    gate, up, down = (weight.astype(x.dtype) for weight in (gate, up, down))
    hidden = swiglu(product(x, gate), product(x, up))
    return product(hidden.astype(x.dtype), down)
