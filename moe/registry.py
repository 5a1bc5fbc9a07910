"""The table of implementations, and the choice among them."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe.blocked import blocked
from moe.capacity import capacity
from moe.chunked import chunked
from moe.config import Config
from moe.dense import dense
from moe.ragged_dot import ragged_dot


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute the layer.

    `id` is routing:impl:dispatch; `apply` is `(params, x (T, d), config, **tuning) -> (y (T, d), Aux)`. Its
    tuning values are the keywords after `config`, each None for its automatic rule. `steps` says whether it takes
    `moe.adam.Stepping` for `Params`.
    """

    id: str
    apply: Callable[..., tuple[jax.Array, Any]]
    steps: bool = False

    @property
    def tuning(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.apply).parameters)[3:]

    def check(self, tuning: dict[str, Any]) -> None:
        """Raise ValueError for a tuning value that this implementation does not take."""
        for name in tuning:
            if name not in self.tuning:
                accepted = ", ".join(self.tuning) or "none"
                raise ValueError(
                    f"{name}={tuning[name]!r} is no tuning value of {self.id}; it takes: {accepted}"
                )


@dataclasses.dataclass(frozen=True)
class Choice:
    """What `impl="auto"` means for a shape, and why."""

    id: str
    reason: str


IMPLEMENTATIONS: dict[str, Implementation] = {
    entry.id: entry
    for entry in (
        Implementation("dense:auto:sorted", dense),
        Implementation("capacity:auto:sorted", capacity),
        Implementation("dropless:ragged_dot:sorted", ragged_dot),
        Implementation("dropless:blocked:sorted", blocked, steps=True),
        Implementation("dropless:chunked:sorted", chunked, steps=True),
    )
}


BACKENDS = ("cpu", "gpu", "cuda", "rocm", "tpu")


def implementations() -> tuple[str, ...]:
    """Ids of all implementations, the reference first."""
    return tuple(IMPLEMENTATIONS)


def get(implementation_id: str) -> Implementation:
    """The implementation of that id; ValueError with the nearest one otherwise."""
    if implementation_id not in IMPLEMENTATIONS:
        near = difflib.get_close_matches(str(implementation_id), IMPLEMENTATIONS, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"impl={implementation_id!r} is unknown{hint} There are: auto, {', '.join(IMPLEMENTATIONS)}"
        )
    return IMPLEMENTATIONS[implementation_id]


def choose(config: Config, tokens: int, dtype: DTypeLike = jnp.float32, backend: str | None = None) -> Choice:
    """The implementation that `impl="auto"` takes; always one that drops nothing.

    Args:
        tokens: rows of x, all leading dimensions together.
        dtype: of x.
        backend: "cpu", "gpu", "cuda", "rocm" or "tpu"; None is JAX's default backend.

    Raises ValueError for a negative `tokens` or an unknown backend. `tokens` and `dtype` only enter the reason
    so far.
    """
    backend = backend or jax.default_backend()
    if tokens < 0:
        raise ValueError(f"tokens={tokens} must not be negative")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; there are: {', '.join(BACKENDS)}")
    if config.top_k == config.experts:
        return Choice("dense:auto:sorted", f"top_k equals experts={config.experts}: nothing to leave out")
    if backend == "cpu":
        return Choice(
            "dropless:chunked:sorted",
            f"on cpu its loop over experts is near the matmul limit in constant memory ({tokens} tokens)",
        )
    return Choice(
        "dropless:ragged_dot:sorted",
        f"on {backend} the grouped matmul of {jnp.dtype(dtype).name} rows is one kernel; loops over "
        "experts are not",
    )
