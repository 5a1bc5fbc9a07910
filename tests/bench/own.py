"""A user's own implementation: `package.module:function`, by the side of the registered ones.

The function is `(params, x, config, **tuning) -> (y, aux)`, as the registered ones are:

    params   moe.Params: router (d, E) float32; gate, up (E, d, h); down (E, h, d), to be cast to the dtype of x
    x        (T, d), float32 or bfloat16
    config   moe.Config: d_model, d_hidden, experts, top_k, renormalize
    tuning   its further keywords, if they are called chunk, block_m, slab_elems, keep_elems or lowering; None each
             for its own rule
    y        (T, d), the dtype of x
    aux      moe.Aux(counts (E,) int32, dropped int32); or None, which says that nothing was dropped

It is traced under jit and differentiated, and has to be pure. Its id is `own:package.module:function`.
"""

import functools
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import moe
from moe.registry import Implementation
from moe.router import count, route

from . import home
from .errors import BenchError, GridError

GROUP = "moe_bench.implementations"
"""Entry points of installed packages: `name = "package.module:function"`."""
PREFIX = "own:"
_NAME = r"[^\W\d]\w*"
_ID = re.compile(rf"{PREFIX}{_NAME}(\.{_NAME})*:{_NAME}")


class BadResult(BenchError):
    """A user's function does not return what the module describes."""


def is_own(impl: str) -> bool:
    return impl.startswith(PREFIX)


def whole_id(word: str) -> str | None:
    """`own:package.module:function` for itself, for `package.module:function` and for an entry point's name.

    None where the word is none of these.
    """
    whole = installed().get(word) or (word if is_own(word) else f"{PREFIX}{word}")
    return whole if _ID.fullmatch(whole) else None


@functools.cache
def installed() -> dict[str, str]:
    """Name -> id of the entry points of installed packages, in the order of their names."""
    found = importlib.metadata.entry_points(group=GROUP)
    return {
        point.name: PREFIX + point.value.replace(" ", "") for point in sorted(found, key=lambda p: p.name)
    }


@functools.cache
def load(impl: str) -> Implementation:
    """The implementation of an id of whole_id's form.

    Raises:
      GridError: its module cannot be imported, or has no such function with `(params, x, config)` first.
    """
    module, name = impl.removeprefix(PREFIX).split(":")
    home.importable()
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # Whatever a user's module raises.
        raise GridError(
            f"--impls={module}:{name} cannot be imported ({type(error).__name__}: {error}); give "
            f"package.module:function, from {home.ROOT} or installed"
        ) from error
    try:
        takes = tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise GridError(f"--impls={module}:{name} is no function ({error})") from error
    if len(takes) < 3 or any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in takes[3:]):
        raise GridError(
            f"--impls={module}:{name} takes {inspect.signature(function)}; it must take (params, x, config), and "
            "further keywords with defaults only"
        )
    return Implementation(impl, _checked(impl, function))


def _checked(impl: str, function: Callable[..., Any]) -> Callable[..., tuple[jax.Array, Any]]:
    """The function, its result checked when it is traced."""

    @functools.wraps(function)  # Its signature says which tuning values it takes.
    def apply(params: Any, x: jax.Array, config: moe.Config, **tuning: Any) -> tuple[jax.Array, Any]:
        result = function(params, x, config, **tuning)
        if not isinstance(result, tuple) or len(result) != 2:
            raise BadResult(
                f"{impl} returns {_shown(result)}; it must return (y, aux), where aux may be None"
            )
        y, aux = result
        if jnp.shape(y) != x.shape:
            raise BadResult(f"{impl} returns y of shape {jnp.shape(y)}; it must be that of x, {x.shape}")
        if getattr(y, "dtype", None) != x.dtype:
            raise BadResult(
                f"{impl} returns y of dtype {getattr(y, 'dtype', type(y).__name__)}; it must be that of x, "
                f"{x.dtype}: end with y.astype(x.dtype)"
            )
        if aux is None:
            routing = route(params.router, x, config)
            aux = moe.Aux(count(routing.experts, config.experts), jnp.int32(0))
        elif getattr(getattr(aux, "counts", None), "shape", None) != (config.experts,) or not hasattr(
            aux, "dropped"
        ):
            raise BadResult(
                f"{impl} returns aux={_shown(aux)}; it must be None or moe.Aux(counts, dropped), counts of shape "
                f"({config.experts},)"
            )
        return y, aux

    return apply


def _shown(value: Any) -> str:
    return (
        f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
    )
