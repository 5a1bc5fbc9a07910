"""The faults that `power` injects: a pytest plugin (`-p tests.bench.faults --fault NAME`), and their table.

A fault changes the measured code or the run, never the gate.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

from .session import KEY

TIMES = (5, 10, 20, 50)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
      text: what it is.
      caught_as: the statuses that catch it.
      words: parts of the ids of the cells that it is put into; all of them have to be there.
      always: whether it has to be caught in every cell.
      options: for pytest, such as a narrower grid.
    """

    text: str
    caught_as: tuple[str, ...]
    words: tuple[str, ...] = ()
    always: bool = True
    options: tuple[str, ...] = ()

    def concerns(self, identity: str) -> bool:
        return all(word in identity for word in self.words)


LARGE = ("--only=t1024",)
FORWARD = (("-forward",), ("--only=t1024*-forward",))
FAULTS: dict[str, Fault] = {
    **{
        f"time+{percent}%": Fault(
            f"{percent} % more time in the program, the same bytes and flops",
            ("regressed",),
            always=percent >= 20,
        )
        for percent in TIMES
    },
    "temp+2%": Fault("2 % more temp bytes", ("regressed",), *FORWARD[:1], options=FORWARD[1]),
    "copy": Fault("a copy of x", ("regressed",), *FORWARD[:1], options=FORWARD[1]),
    "upcast": Fault(
        "bfloat16 products in float32",
        ("regressed",),
        ("bfloat16", "-forward"),
        options=("--only=bfloat16*t1024*-forward",),
    ),
    "capacity": Fault(
        "capacity factor 1.40 for 1.25", ("regressed",), ("capacity",), options=("--only=capacity",)
    ),
    "wrong expert": Fault("experts 0 and 1 exchanged", ("wrong",), options=LARGE),
    "dropped token": Fault("token 0 gets no output", ("wrong",), options=LARGE),
    "nan": Fault("one NaN in y", ("wrong",), options=LARGE),
    "deleted": Fault("cells that left the grid", ("missing",), ("-forward", "chunked")),
    "renamed": Fault("cells under another id", ("missing",), ("-forward", "chunked", "s0.0-")),
    "duplicated": Fault("a cell that is there twice", ("missing",), ("-forward", "chunked")),
    "retrace": Fault("a trace for every call", ("wrong",), options=LARGE),
    "callback": Fault("a call back into Python", ("regressed",), options=LARGE),
    "sleep": Fault("a sleep outside the compiled program", ("regressed",), options=LARGE),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault", choices=list(FAULTS), required=True, help="the fault to inject")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """The suite's own plugin has pinned the process, imported jax and built the grid by now."""
    cells, name = config.stash[KEY], config.getoption("--fault")
    injected = {
        "deleted": delete,
        "renamed": rename,
        "duplicated": duplicate,
        "sleep": sleep,
    }
    if name in injected:
        injected[name](cells, FAULTS[name])
    elif name.startswith("time+"):
        slow(1 + int(name[5:-1]) / 100)
    elif FAULTS[name].caught_as == ("wrong",) and name != "retrace":
        everywhere(LAYERS[name])
    else:
        in_program(LAYERS[name])


# The grid


def delete(cells: Any, fault: Fault) -> None:
    cells.entries = [entry for entry in cells.entries if not fault.concerns(entry.cell.id)]


def rename(cells: Any, fault: Fault) -> None:
    cells.entries = [
        dataclasses.replace(entry, cell=dataclasses.replace(entry.cell, skew=0.5))
        if fault.concerns(entry.cell.id)
        else entry
        for entry in cells.entries
    ]


def duplicate(cells: Any, fault: Fault) -> None:
    cells.entries += [entry for entry in cells.entries if fault.concerns(entry.cell.id)]


# The call


def sleep(cells: Any, fault: Fault) -> None:
    """Each call sleeps as long as it runs."""
    from . import measure

    patched: Any = measure
    whole = patched.program

    def program(cell: Any) -> Any:
        ready = whole(cell)

        def call() -> Any:
            start = time.perf_counter()
            result = ready.call()
            time.sleep(time.perf_counter() - start)
            return result

        return dataclasses.replace(ready, call=call)

    patched.program = program


# The layer


def everywhere(change: Callable[..., Any]) -> None:
    """Change what is asserted and measured."""
    from . import numerics

    patched: Any = numerics
    patched.implementation = _changed(patched.implementation, change)
    in_program(change)


def in_program(change: Callable[..., Any]) -> None:
    """Change what is measured; the numerics of these faults are right."""
    from . import program

    patched: Any = program
    patched.implementation = _changed(patched.implementation, change)


def _changed(implementation: Callable[[str], Any], change: Callable[..., Any]) -> Callable[[str], Any]:
    def changed(impl: str) -> Any:
        whole = implementation(impl)

        def layer(params: Any, x: Any, config: Any, **tuning: Any) -> Any:
            return change(functools.partial(whole.apply, **tuning), params, x, config)

        return dataclasses.replace(whole, apply=layer)

    return changed


def more_temp(apply: Any, params: Any, x: Any, config: Any) -> Any:
    """A buffer that lives as long as the layer runs: 2 % of the largest layer's temp bytes, and over 4 KiB.

    It is a product, since XLA folds what is only broadcast; the layer waits for it and it for the layer.
    """
    import jax.numpy as jnp

    seed = x[0, 0].astype(jnp.float32)
    held = jnp.full((MORE_TEMP // 1280, 8), seed) @ jnp.full((8, 320), seed)
    router = params.router + (0 * held[0, 0]).astype(params.router.dtype)
    y, aux = apply(params._replace(router=router), x, config)
    return y + (0 * jnp.max(held + y[0, 0].astype(jnp.float32))).astype(y.dtype), aux


MORE_TEMP = 200 * 2**10


def copied(apply: Any, params: Any, x: Any, config: Any) -> Any:
    """A copy of x that lives as long as the layer runs: made by a loop, since XLA elides a plain one."""
    import jax
    import jax.numpy as jnp

    zero, other = jax.lax.scan(lambda zero, row: (zero, row + zero), 0 * x[0, 0], x)
    y, aux = apply(params, x + 0 * other[0, 0], config)
    zero, _ = jax.lax.scan(lambda zero, row: (zero + 0 * jnp.max(row), None), 0 * y[0, 0], other)
    return y + zero, aux


def upcast(apply: Any, params: Any, x: Any, config: Any) -> Any:
    import jax.numpy as jnp

    y, aux = apply(params, x.astype(jnp.float32), config)
    return y.astype(x.dtype), aux


def more_capacity(apply: Any, params: Any, x: Any, config: Any) -> Any:
    return apply(params, x, dataclasses.replace(config, capacity_factor=1.4))


def wrong_expert(apply: Any, params: Any, x: Any, config: Any) -> Any:
    down = params.down
    return apply(params._replace(down=down.at[0].set(down[1]).at[1].set(down[0])), x, config)


def dropped_token(apply: Any, params: Any, x: Any, config: Any) -> Any:
    y, aux = apply(params, x, config)
    return y.at[0].set(0), aux


def nan(apply: Any, params: Any, x: Any, config: Any) -> Any:
    y, aux = apply(params, x, config)
    return y.at[0, 0].set(float("nan")), aux


def retraced(apply: Any, params: Any, x: Any, config: Any) -> Any:
    """What JAX keys its traces by changes at each trace."""
    import jax

    flags: Any = jax.config
    other = "float32" if flags.jax_default_matmul_precision != "float32" else None
    jax.config.update("jax_default_matmul_precision", other)
    return apply(params, x, config)


def called_back(apply: Any, params: Any, x: Any, config: Any) -> Any:
    import jax

    jax.debug.callback(lambda value: None, x[0, 0])
    return apply(params, x, config)


LAYERS: dict[str, Callable[..., Any]] = {
    "temp+2%": more_temp,
    "copy": copied,
    "upcast": upcast,
    "capacity": more_capacity,
    "wrong expert": wrong_expert,
    "dropped token": dropped_token,
    "nan": nan,
    "retrace": retraced,
    "callback": called_back,
}


# Time


def slow(ratio: float) -> None:
    """Each cell's program gets a loop over a tiny matrix, as long as it takes for this ratio on this machine."""
    from . import program

    patched: Any = program
    whole, implementation = patched.flat, patched.implementation
    turns: dict[str, int] = {}

    def flat(cell: Any, impl: Any = None) -> Any:
        if cell.id not in turns:
            patched.implementation = implementation
            turns[cell.id] = round((ratio - 1) * _seconds(whole, cell) / _seconds_of_a_turn())
        delay = functools.partial(delayed, turns=turns[cell.id])
        patched.implementation = _changed(implementation, delay)
        return whole(cell, impl)

    patched.flat = flat


def delayed(apply: Any, params: Any, x: Any, config: Any, *, turns: int) -> Any:
    """All of the layer waits for the loop's result, which is 0."""
    return apply(params, x + waited(x[0, 0], turns).astype(x.dtype), config)


def waited(seed: Any, turns: int) -> Any:
    import jax
    import jax.numpy as jnp

    start = jnp.full((8, 8), 0 * jax.lax.stop_gradient(seed).astype(jnp.float32))
    return jax.lax.fori_loop(0, turns, lambda _, a: jnp.sin(a @ a), start)[0, 0]


def _seconds(flat: Any, cell: Any) -> float:
    """Median seconds of a cell as it is."""
    from .program import arguments_of

    arguments, compiled = arguments_of(cell), flat(cell).compile()
    return _median(lambda: arguments.run(compiled.run))


@functools.cache
def _seconds_of_a_turn() -> float:
    import jax

    turns = 20000
    run = jax.jit(functools.partial(waited, turns=turns))
    return _median(lambda: jax.block_until_ready(run(1.0))) / turns


def _median(call: Callable[[], Any], runs: int = 15) -> float:
    call()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[runs // 2]
