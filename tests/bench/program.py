"""The program of a cell: its function on flat arguments, compiled ahead of time, and the compiler's own figures."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax

import moe
from moe.adam import default_optimizer
from moe.registry import Implementation
from moe.train import step_of, steps_in_place

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


class Arguments:
    """The arrays that a cell's programs run on: parameters (or the train state) and x, as a flat list.

    The first `donated` of them are given away at each run, and replaced by as many first outputs. So two
    programs of one cell can take turns on one state.
    """

    def __init__(self, leaves: list[jax.Array], donated: int) -> None:
        self.leaves, self.donated = leaves, donated

    def run(self, executable: Callable[..., Any]) -> list[jax.Array]:
        """One run to the end."""
        outputs = jax.block_until_ready(executable(*self.leaves))
        self.leaves[: self.donated] = outputs[: self.donated]
        return outputs


@dataclasses.dataclass(frozen=True)
class Compiled:
    """An executable on flat arguments, and what the compiler says of it; seconds to lower and compile.

    XLA counts a loop's body once, so `flops` tells programs apart and is no measure of work.
    """

    run: Callable[..., Any]
    bytes: Bytes
    flops: float | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Program:
    """A cell ready to be timed: `call` runs it once to the end, on `arguments`."""

    call: Callable[[], Any]
    compiled: Compiled
    arguments: Arguments
    flat: "Flat"


@dataclasses.dataclass(frozen=True)
class Flat:
    """The function of a cell on flat arguments, jitted; `traces` counts how often Python ran it."""

    cell: Cell
    jitted: Any
    donated: int
    specs: tuple[jax.ShapeDtypeStruct, ...]
    traces: list[int]

    def compile(self) -> Compiled:
        """Compile ahead of time.

        Raises:
          Retraced: tracing the same shapes again runs the Python function again.
        """
        start = time.perf_counter()
        executable = self.jitted.lower(*self.specs).compile()
        seconds = time.perf_counter() - start
        self.jitted.lower(*self.specs)
        if sum(self.traces) != 1:
            raise Retraced(
                f"{self.cell.id} was traced {sum(self.traces)} times for one shape; a cached value is "
                "missing its key"
            )
        return analysed(executable, seconds)


def analysed(executable: Any, seconds: float) -> Compiled:
    """An executable with its bytes and flops."""
    memory = executable.memory_analysis()
    assert memory is not None, "every backend of XLA that we run on analyses memory"
    sizes = Bytes(
        temp=memory.temp_size_in_bytes,
        argument=memory.argument_size_in_bytes,
        output=memory.output_size_in_bytes,
        alias=memory.alias_size_in_bytes,
    )
    return Compiled(executable, sizes, (executable.cost_analysis() or {}).get("flops"), seconds)


def flat(cell: Cell, impl: Implementation | None = None) -> Flat:
    """The function of a cell: forward `(params, x) -> y`, or the train step `(state, x) -> (state, loss)`.

    Nothing is allocated. `impl` replaces the cell's own.
    """
    impl, config = impl or implementation(cell.impl), config_of(cell)

    def layer(params: moe.Params, x: jax.Array) -> jax.Array:
        return impl.apply(params, x, config, **cell.tuning)[0]

    params = jax.eval_shape(lambda: moe.init(jax.random.key(0), config, cell.param_dtype))
    in_place = cell.op == "train_step_donated" and steps_in_place(impl, params)
    plain = layer if cell.op == "forward" else step_of(layer, None if in_place else default_optimizer())
    first = params if cell.op == "forward" else jax.eval_shape(moe.init_state, params)
    x = jax.ShapeDtypeStruct((cell.tokens, cell.d_model), cell.dtype)
    specs, tree = jax.tree.flatten((first, x))
    donated = len(specs) - 1 if cell.op == "train_step_donated" else 0
    traces: list[int] = []

    def cell_of(*leaves):  # Its name stands in the program's text.
        traces.append(1)
        return jax.tree.leaves(plain(*jax.tree.unflatten(tree, leaves)))

    return Flat(cell, jax.jit(cell_of, donate_argnums=tuple(range(donated))), donated, tuple(specs), traces)


def arguments_of(cell: Cell) -> Arguments:
    """The seeded inputs of a cell, as its programs take them."""
    params, x, _ = make_inputs(cell)
    leaves = jax.tree.leaves((params if cell.op == "forward" else moe.init_state(params), x))
    donated = len(leaves) - 1 if cell.op == "train_step_donated" else 0
    # The inputs are shared between cells: give away copies.
    leaves[:donated] = [leaf.copy() for leaf in leaves[:donated]]
    return Arguments(leaves, donated)


def program(cell: Cell, impl: Implementation | None = None) -> Program:
    """Compile a cell, on its inputs; `impl` replaces the cell's own."""
    arguments, function = arguments_of(cell), flat(cell, impl)
    compiled = function.compile()
    return Program(functools.partial(arguments.run, compiled.run), compiled, arguments, function)
