"""What XLA's CPU compiler needs to be told in another way, mostly of bfloat16; elsewhere each is the plain form.

Measured on JAX 0.10.2 and 0.12.0.1 with two cores: `python -m tests.bench peers` has the layer's figures.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int32


def on_cpu() -> bool:
    """Whether programs are made for the CPU."""
    return jax.default_backend() == "cpu"


def transposed(array: Float[Array, "m n"]) -> Float[Array, "n m"]:
    """The transpose to multiply with; in bfloat16 written out.

    XLA folds a transpose into the product that reads it, which then runs at half of its rate (162 of 316 GF/s for
    256 rows; in float32 at 7/8, for which a copy is not worth while).
    """
    if not _writes_out(array):
        return array.T
    out: Array = sequential_vmap(_written_out)(array)
    return out


def _writes_out(array: Array) -> bool:
    return on_cpu() and array.dtype == jnp.bfloat16 and array.size > 0


def _written_out(array: Float[Array, "m n"]) -> Float[Array, "n m"]:
    """XLA does not fold through a branch of which only we know that it is always taken."""
    bits = jax.lax.bitcast_convert_type(array[0, 0], jnp.uint16).astype(jnp.int32)
    out: Array = jax.lax.cond(bits >= 0, jnp.transpose, lambda array: jnp.zeros_like(array.T), array)
    return out


def transposing(array: Float[Array, "m n"]) -> Callable[[], Float[Array, "n m"]]:
    """`transposed` for uses inside a loop: written out once before it, else folded into each, never held."""
    if not _writes_out(array):
        return lambda: array.T
    out = transposed(array)
    return lambda: out


def read_at(stacks: tuple[Array, ...], index: Int32[Array, ""]) -> tuple[Array, ...]:
    """`stacks` to be sliced at `index` inside a loop over it.

    XLA slices bfloat16 as float32, and converts the whole stack before the loop if it can. Tied to the loop's
    index, only the slice is converted.
    """
    if not on_cpu() or stacks[0].dtype != jnp.bfloat16:
        return stacks
    tied: tuple[Array, ...] = jax.lax.optimization_barrier((stacks, index))[0]
    return tied


def writable(stack: Array) -> Array:
    """A stack to be written in a loop: bfloat16 as its bits, since XLA would convert all of it at each writing."""
    if not on_cpu() or stack.dtype != jnp.bfloat16:
        return stack
    return jax.lax.bitcast_convert_type(stack, jnp.uint16)


def written(values: Array, stack: Array) -> Array:
    """`values` as they are written into a `writable` stack."""
    if stack.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(stack.dtype)


def readable(stack: Array) -> Array:
    """A `writable` stack, or a part of it, as it was."""
    return jax.lax.bitcast_convert_type(stack, jnp.bfloat16) if stack.dtype == jnp.uint16 else stack
