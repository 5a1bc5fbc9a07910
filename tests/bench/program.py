"""The program of a cell: its function compiled ahead of time, its arguments, and what the compiler says of it."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

import moe
from moe.train import default_optimizer, step_of

from .cell import Cell
from .errors import BenchError
from .grid import implementation
from .inputs import config_of, make_inputs

MIB = 2**20


class Retraced(BenchError):
    """A cell's function is traced again for the same shapes: each call would pay for it."""


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes of a compiled program, from its memory analysis."""

    temp: int
    argument: int
    output: int
    alias: int

    @property
    def total(self) -> int:
        """What a run needs at once: donated arguments lend their buffers to outputs."""
        return self.temp + self.argument + self.output - self.alias


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled cell: `call` runs it once to the end; bytes, the compiler's flop count, seconds to compile.

    XLA counts a loop's body once, so `flops` tells programs apart and is no measure of work.
    """

    call: Callable[[], Any]
    bytes: Bytes
    flops: float | None
    compile_s: float


def function(cell: Cell) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """The function, forward `(params, x) -> y` or else the train step, and which arguments it is donated."""
    impl, config = implementation(cell.impl), config_of(cell)

    def layer(params: moe.Params, x: jax.Array) -> jax.Array:
        return impl.apply(params, x, config, **cell.tuning)[0]

    if cell.op == "forward":
        return layer, ()
    return step_of(layer, default_optimizer()), (0,) if cell.op == "train_step_donated" else ()


def compile_(cell: Cell, arguments: tuple[Any, ...]) -> tuple[Any, Bytes, float | None, float]:
    """Compile for these arguments (arrays or shapes). Returns compiled, bytes, flops, seconds.

    Raises:
      Retraced: tracing the same shapes again runs the Python function again.
    """
    plain, donate = function(cell)
    traces = 0

    def counted(*args):
        nonlocal traces
        traces += 1
        return plain(*args)

    jitted = jax.jit(counted, donate_argnums=donate)
    start = time.perf_counter()
    compiled = jitted.lower(*arguments).compile()
    seconds = time.perf_counter() - start
    jitted.lower(*arguments)
    if traces != 1:
        raise Retraced(
            f"{cell.id} was traced {traces} times for one shape; a cached value is missing its key"
        )
    memory = compiled.memory_analysis()
    assert memory is not None, "every backend of XLA that we run on analyses memory"
    sizes = Bytes(
        temp=memory.temp_size_in_bytes,
        argument=memory.argument_size_in_bytes,
        output=memory.output_size_in_bytes,
        alias=memory.alias_size_in_bytes,
    )
    cost = compiled.cost_analysis() or {}
    return compiled, sizes, cost.get("flops"), seconds


def shapes(cell: Cell, tokens: int) -> tuple[Any, ...]:
    """The arguments as shapes, for compiling without allocating."""
    config = config_of(cell)
    params = jax.eval_shape(lambda: moe.init(jax.random.key(0), config, cell.param_dtype))
    x = jax.ShapeDtypeStruct((tokens, cell.d_model), cell.dtype)
    return (params if cell.op == "forward" else jax.eval_shape(moe.init_state, params)), x


def program(cell: Cell) -> Program:
    """Compile a cell on its inputs. A donated train state is handed on from call to call."""
    params, x, _ = make_inputs(cell)
    donated = cell.op == "train_step_donated"
    first = params if cell.op == "forward" else moe.init_state(params)
    if donated:  # The inputs are shared between cells: give away copies.
        first = jax.tree.map(lambda leaf: leaf.copy(), first)
    compiled, sizes, flops, seconds = compile_(cell, (first, x))
    held = [first]

    def call() -> Any:
        result = jax.block_until_ready(compiled(held[0], x))
        if donated:
            held[0] = result[0]
        return result

    return Program(call, sizes, flops, seconds)
