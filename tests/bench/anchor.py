"""The anchor: a plain matmul of known flops beside each round. A cell's rate over its anchor's survives noise."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SIDE = 1024
FLOPS = 2 * SIDE**3
"""2.1 Gflop: a few ms on two cores."""


class Anchor:
    """One compiled matmul; each call runs it and keeps its seconds."""

    def __init__(self, dtype: str) -> None:
        self.seconds: list[float] = []
        self._run = compiled(dtype)
        self._run()

    def __call__(self) -> None:
        start = time.perf_counter()
        self._run()
        self.seconds.append(time.perf_counter() - start)

    def paired(self, rounds: int) -> np.ndarray:
        """For each round the geometric mean of the anchors before and after it, in seconds."""
        seconds = np.asarray(self.seconds[: rounds + 1])
        return np.sqrt(seconds[:-1] * seconds[1:])


@functools.cache
def compiled(dtype: str) -> Callable[[], Any]:
    """The matmul of this dtype, as a call that runs it once."""
    a = jnp.asarray(np.random.default_rng(0).standard_normal((SIDE, SIDE), np.float32)).astype(dtype)
    matmul = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32)).lower(a).compile()
    return lambda: jax.block_until_ready(matmul(a))
