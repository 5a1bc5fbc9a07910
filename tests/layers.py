"""Layers for tests: inputs whose routing is known, and every implementation held against dense."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import moe
from moe.capacity import kept, slots
from moe.dense import weighted_experts
from moe.registry import get
from moe.router import Aux, count, route
from tests.bench.grid import RAGGED
from tests.bench.numerics import RAGGED_TOLERANCE, TOLERANCES, Tolerance, worst_leaf

IMPLEMENTATIONS = moe.implementations()
DROPLESS = tuple(impl for impl in IMPLEMENTATIONS if impl.startswith("dropless"))
CAPACITY = "capacity:auto:sorted"
DTYPES = ("float32", "bfloat16")


def known(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that this XLA takes: names come and go with its versions."""

    def taken(name: str) -> bool:
        try:
            jax.jit(lambda: 0, compiler_options={name: options[name]})()
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            return False
        return True

    return {name: value for name, value in options.items() if taken(name)}


# What compiles in a test is small and runs once: most of its time would go into LLVM's optimisations and the fusion
# emitters. Products are library calls either way, and tests/test_numerics.py checks programs as users compile them.
QUICK = known({"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False})


class Ran(NamedTuple):
    """Outputs, counts and dropped, and gradients of the mean of y**2, all on the host."""

    y: np.ndarray
    counts: np.ndarray
    dropped: int
    params: moe.Params
    x: np.ndarray


def parameters(config: moe.Config, seed: int = 0, dtype: str = "float32") -> moe.Params:
    """Random parameters; NumPy's, since JAX would compile for each shape. Matrices are what `dtype` can hold."""
    rng = np.random.default_rng(seed)
    d, h, experts = config.d_model, config.d_hidden, config.experts
    shapes = ((d, experts), (experts, d, h), (experts, d, h), (experts, h, d))
    leaves = [rng.standard_normal(shape, np.float32) * np.float32(shape[-2] ** -0.5) for shape in shapes]
    return moe.Params(leaves[0], *(leaf.astype(jnp.dtype(dtype)).astype(np.float32) for leaf in leaves[1:]))


def tokens_of(config: moe.Config, tokens: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng([seed, tokens])
    return rng.standard_normal((tokens, config.d_model), np.float32).astype(jnp.dtype(dtype))


def with_logits(
    config: moe.Config, rows: np.ndarray, pattern: np.ndarray, dtype: str = "float32"
) -> tuple[moe.Params, np.ndarray]:
    """Parameters and x such that token t has exactly the logits `rows[pattern[t]]` (P, E).

    The first P features of x say one-hot which row it is, and the router holds the rows; 1 * logit + 0 is exact
    in every dtype. The other features are noise that the router does not see.
    """
    number = len(rows)
    assert number <= config.d_model
    params, x = parameters(config, dtype=dtype), tokens_of(config, len(pattern), dtype=dtype)
    router = np.zeros_like(params.router)
    router[:number] = rows
    x[:, :number] = np.eye(number)[pattern]
    return params._replace(router=router), x


def tuned(impl: str, **tuning: int) -> dict[str, int]:
    """Those of the tuning values that it takes; chunk is 32 if not given: one loop to compile, not four."""
    tuning = {"chunk": 32} | tuning
    return {name: value for name, value in tuning.items() if name in get(impl).tuning}


def run(impl: str, params: moe.Params, x: np.ndarray, config: moe.Config, **tuning: int) -> Ran:
    """Forward and gradients of an implementation; compiled once for each shape in a process."""
    return _ran(_program(impl, config, tuple(tuned(impl, **tuning).items())), params, x)


def forward(impl: str, params: moe.Params, x: np.ndarray, config: moe.Config, **tuning: int) -> moe.Output:
    """Forward alone, on the host; compiled once for each shape in a process."""
    return jax.device_get(_forward(impl, config, tuple(tuned(impl, **tuning).items()))(params, x))


def reference(impl: str, params: moe.Params, x: np.ndarray, config: moe.Config) -> Ran:
    """Dense in float32 on the same values; for capacity with the weights of what it drops set to 0."""
    params, x = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float32), (params, x))
    return _ran(_reference(config, impl == CAPACITY), params, x)


def tolerance(impl: str, dtype: str) -> Tolerance:
    return RAGGED_TOLERANCE if (impl, dtype) == (RAGGED, "float32") else TOLERANCES[dtype]


def error(value: Any, ref: Any, floor: float = 0.0) -> float:
    """Relative Frobenius error in float64 on the host; 0 where both are 0, infinite where only `ref` is."""
    value, ref = (np.asarray(array).astype(np.float64) for array in (value, ref))
    difference, scale = np.linalg.norm(value - ref), max(np.linalg.norm(ref), floor)
    if difference == 0:
        return 0.0
    return float(difference / scale) if scale else np.inf


def assert_equal(ran: Ran, ref: Ran, limits: Tolerance) -> None:
    """Counts equal; outputs and each gradient within the table."""
    np.testing.assert_array_equal(ran.counts, ref.counts)
    assert ran.dropped == ref.dropped
    assert ran.y.shape == ref.y.shape
    assert error(ran.y, ref.y) <= limits.out
    assert worst_leaf(ran.params, ref.params, ran.y.dtype.name) <= limits.grad
    assert error(ran.x, ref.x) <= limits.grad


def assert_equals_dense(
    impl: str, params: moe.Params, x: np.ndarray, config: moe.Config, **tuning: int
) -> Ran:
    """Run an implementation, hold it against dense, return what it gave."""
    ran = run(impl, params, x, config, **tuning)
    assert ran.y.dtype == x.dtype
    assert_equal(ran, reference(impl, params, x, config), tolerance(impl, x.dtype.name))
    return ran


def assert_output_equals_dense(
    impl: str, params: moe.Params, x: np.ndarray, config: moe.Config, **tuning: int
) -> moe.Output:
    """As `assert_equals_dense` without gradients, where nothing is dropped: a third of the time to compile."""
    y, aux = forward(impl, params, x, config, **tuning)
    ref, ref_aux = forward("dense:auto:sorted", params, x.astype(np.float32), config)
    np.testing.assert_array_equal(aux.counts, ref_aux.counts)
    assert aux.dropped == 0
    assert y.dtype == x.dtype
    assert error(y, ref) <= tolerance(impl, x.dtype.name).out
    return moe.Output(y, aux)


def gradients(layer: Any, params: moe.Params, x: jax.Array) -> tuple[Any, Any]:
    """((y, aux), gradients) of the mean of y**2 through `layer(params, x) -> (y, aux)`; not jitted."""

    def loss(params: moe.Params, x: jax.Array):
        y, aux = layer(params, x)
        return jnp.sum(y.astype(jnp.float32) ** 2) / max(y.size, 1), (y, aux)

    (_, ran), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    return ran, grads


def _ran(program: Any, params: moe.Params, x: np.ndarray) -> Ran:
    (y, aux), (grad_params, grad_x) = jax.device_get(program(params, x))
    return Ran(y, aux.counts, int(aux.dropped), grad_params, grad_x)


@functools.cache
def _program(impl: str, config: moe.Config, tuning: tuple) -> Any:
    layer = functools.partial(moe.apply, config=config, impl=impl, **dict(tuning))
    return jax.jit(functools.partial(gradients, layer), compiler_options=QUICK)


@functools.cache
def _forward(impl: str, config: moe.Config, tuning: tuple) -> Any:
    layer = functools.partial(moe.apply, config=config, impl=impl, **dict(tuning))
    return jax.jit(layer, compiler_options=QUICK)


@functools.cache
def _reference(config: moe.Config, with_capacity: bool) -> Any:
    def dense(params: moe.Params, x: jax.Array):
        routing, size = route(params.router, x, config), slots(x.shape[0], config)
        counts = count(routing.experts, config.experts)
        if not with_capacity:
            return weighted_experts(params, x, routing), Aux(counts, jnp.int32(0))
        fits = kept(routing.experts, size, config.experts)
        routing = routing._replace(weights=jnp.where(fits, routing.weights, 0))
        return weighted_experts(params, x, routing), Aux(counts, jnp.sum(~fits))

    return jax.jit(functools.partial(gradients, dense), compiler_options=QUICK)
