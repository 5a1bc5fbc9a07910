"""The numerics of a cell: outputs and gradients against dense in float32 on the same rounded values."""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe.capacity import kept, slots
from moe.config import Config
from moe.dense import weighted_experts
from moe.router import count, route

from .cell import Cell
from .grid import RAGGED, implementation
from .inputs import Inputs, make_inputs


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Largest relative error (Frobenius) of outputs and of gradients, and why it is that large."""

    out: float
    grad: float
    reason: str

    @property
    def grad_params(self) -> float:
        return self.grad

    @property
    def grad_x(self) -> float:
        return self.grad


TOLERANCES: dict[str, Tolerance] = {
    "float32": Tolerance(5e-7, 3e-6, "sums over d_hidden in another order: a few float32 roundings (6e-8)"),
    "bfloat16": Tolerance(
        6e-3, 1.2e-2, "hidden rows and y rounded to 8 bits (2e-3 each), gradients once more"
    ),
}
RAGGED_TOLERANCE = Tolerance(
    1e-6, 3e-6, "float32 as XLA's ragged_dot sums it: 7.9e-7 measured, 8.9e-7 published"
)


class WrongNumerics(AssertionError):
    """A cell computes something else than dense; it is neither timed nor stored."""


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Relative errors (worst leaf for the parameters), and how the assignments fell."""

    rel_err_out: float
    rel_err_grad_params: float
    rel_err_grad_x: float
    max_expert_frac: float
    empty_experts: int
    dropped: int


def tolerance(cell: Cell) -> Tolerance:
    """The row of the table that holds for a cell."""
    return RAGGED_TOLERANCE if (cell.impl, cell.dtype) == (RAGGED, "float32") else TOLERANCES[cell.dtype]


def rel_err(value: Any, ref: Any, floor: float = 0.0) -> float:
    """||value - ref|| / max(||ref||, floor), Frobenius; empty arrays and equal ones give 0, never NaN."""
    difference, norm = _norms(jnp.asarray(value), jnp.asarray(ref))
    if float(difference) == 0:
        return 0.0
    scale = max(float(norm), floor)
    return float(difference) / scale if scale else math.inf


@jax.jit
def _norms(value: jax.Array, ref: jax.Array) -> tuple[jax.Array, jax.Array]:
    difference = value.astype(jnp.float32) - ref.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(difference**2)), jnp.sqrt(jnp.sum(ref.astype(jnp.float32) ** 2))


@dataclasses.dataclass(frozen=True)
class Result:
    """y, gradients of the mean of y**2 (parameters, x), counts (E,) and dropped."""

    y: jax.Array
    grad_params: Any
    grad_x: jax.Array
    counts: np.ndarray
    dropped: int


def _result(layer: Any, inputs: Inputs) -> Result:
    """Run a layer `(params, x) -> (y, counts, dropped)` forward and backward."""

    def loss(params, x):
        y, counts, dropped = layer(params, x)
        return jnp.sum(y.astype(jnp.float32) ** 2) / max(y.size, 1), (y, counts, dropped)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (y, counts, dropped)), (grad_params, grad_x) = run(inputs.params, inputs.x)
    return Result(y, grad_params, grad_x, np.asarray(counts), int(dropped))


@functools.lru_cache(maxsize=2)
def _reference(key: tuple, with_capacity: bool) -> Result:
    inputs = make_inputs(_as_cell(key))
    params, x = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (inputs.params, inputs.x))
    config = inputs.config

    def masked(fits):
        def layer(params, x):
            routing = route(params.router, x, config)
            counts = count(routing.experts, config.experts)
            routing = routing._replace(weights=jnp.where(fits, routing.weights, 0))
            return weighted_experts(params, x, routing), counts, 0

        return layer

    if not with_capacity:
        return _result(masked(True), Inputs(params, x, config))
    whole, fits = _reference(key, False), _fits(params.router, x, config)
    lost = np.flatnonzero(~fits.all(axis=1))
    if not lost.size:
        return whole
    # Loss and gradients are sums over tokens, so only those that lose an expert are computed again.
    part = Inputs(params, x[lost], config)
    before, after = _result(masked(True), part), _result(masked(fits[lost]), part)
    share = len(lost) / len(x)
    return dataclasses.replace(
        whole,
        y=whole.y.at[lost].set(after.y),
        grad_params=jax.tree.map(
            lambda all_, was, now: all_ + share * (now - was),
            *(whole.grad_params, before.grad_params, after.grad_params),
        ),
        grad_x=whole.grad_x.at[lost].set(share * after.grad_x),
        dropped=int(np.count_nonzero(~fits)),
    )


def _fits(router: jax.Array, x: jax.Array, config: Config) -> np.ndarray:
    """Which assignments (T, k) get a slot."""
    size = slots(x.shape[0], config)
    return np.asarray(
        jax.jit(lambda r, x: kept(route(r, x, config).experts, size, config.experts))(router, x)
    )


def _as_cell(key: tuple) -> Cell:
    """Any cell with these inputs: inputs and reference do not depend on the rest."""
    tokens, experts, top_k, skew, d_model, d_hidden, dtype, param_dtype = key
    return Cell(
        *("layer", "dense:auto:sorted", dtype, tokens, experts, top_k, "forward", skew),
        *(d_model, d_hidden, param_dtype),
    )


def reference(cell: Cell) -> Result:
    """Dense in float32 on the cell's values; for capacity with the dropped assignments' weights set to 0."""
    return _reference(cell.inputs, cell.impl.startswith("capacity"))


_MEASURED: collections.OrderedDict[tuple, Numerics] = collections.OrderedDict()


def remember(cell: Cell, found: Numerics) -> None:
    """Keep the numerics of a cell for its other ops; another process may have found them."""
    _MEASURED[cell.numerics] = found
    while len(_MEASURED) > 64:
        _MEASURED.popitem(last=False)


def check(cell: Cell) -> Numerics:
    """The numerics of a cell, shared between its ops.

    Raises:
      WrongNumerics: an error is not finite or over its tolerance, or the assignments are counted otherwise.
    """
    key = cell.numerics
    if key not in _MEASURED:
        remember(cell, _measure(cell))
    numerics, limits = _MEASURED[key], tolerance(cell)
    for name in ("out", "grad_params", "grad_x"):
        error, limit = getattr(numerics, f"rel_err_{name}"), getattr(limits, name)
        if not error <= limit:
            what = "is not finite" if not math.isfinite(error) else f"is over {limit:.1e} ({limits.reason})"
            raise WrongNumerics(f"{cell.id}: rel_err_{name}={error:.2e} {what}; not timed, not stored")
    return numerics


def _measure(cell: Cell) -> Numerics:
    inputs, ref = make_inputs(cell), reference(cell)
    implementation_ = implementation(cell.impl)

    def layer(params, x):
        y, aux = implementation_.apply(params, x, inputs.config, **cell.tuning)
        return y, aux.counts, aux.dropped

    result = _result(layer, inputs)
    if result.y.shape != inputs.x.shape or result.y.dtype != inputs.x.dtype:
        raise WrongNumerics(
            f"{cell.id}: y is {result.y.dtype}{result.y.shape}, x is {inputs.x.dtype}{inputs.x.shape}"
        )
    if not np.array_equal(result.counts, ref.counts) or result.dropped != ref.dropped:
        raise WrongNumerics(
            f"{cell.id}: counts or dropped={result.dropped} differ from the reference's dropped={ref.dropped}"
        )
    return Numerics(
        rel_err_out=rel_err(result.y, ref.y),
        rel_err_grad_params=worst_leaf(result.grad_params, ref.grad_params, cell.dtype),
        rel_err_grad_x=rel_err(result.grad_x, ref.grad_x),
        max_expert_frac=float(ref.counts.max() / max(ref.counts.sum(), 1)),
        empty_experts=int((ref.counts == 0).sum()),
        dropped=result.dropped,
    )


def worst_leaf(grads: Any, refs: Any, dtype: str) -> float:
    """The largest error of a leaf; one whose reference is under eps of all gradients' norm is measured
    against that (at top_k 1 with renormalised weights the router's gradient is exactly 0)."""
    leaves = jax.tree.leaves(refs)
    norm = math.sqrt(sum(float(_norms(leaf, leaf)[1]) ** 2 for leaf in leaves))
    floor = float(jnp.finfo(dtype).eps) * norm
    errors = []
    for grad, leaf in zip(jax.tree.leaves(grads), leaves, strict=True):
        small = float(_norms(leaf, leaf)[1]) < floor
        errors.append(rel_err(grad, leaf, norm if small else 0.0))
    return max(errors) if all(map(math.isfinite, errors)) else math.nan
