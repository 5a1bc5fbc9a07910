"""The child of suite maxtok: holds one cell, and is what the system kills when memory runs out.

Speaks JSON lines: its facts once it is ready (or an error), then one line for each run it is asked for.
"""

import contextlib
import dataclasses
import errno
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import moe

from .cell import Cell
from .grid import implementation
from .inputs import config_of
from .numerics import rel_err, tolerance
from .program import MIB, Arguments, flat

BLOCK = 4096
"""Tokens are drawn in a block of this many and repeated: the cost is the same, the memory for drawing is not."""
SAMPLE = 256
NO_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "can't start new thread")


def main() -> None:
    """Serve one cell on standard input and output; an allocation that fails is said, other errors are raised."""
    try:
        _serve(json.loads(sys.argv[1]))
    except (MemoryError, OSError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        _say({"out_of_memory": str(error)})


def out_of_memory(error: Exception) -> bool:
    """Whether it says so; JAX's runtime error is INTERNAL where the allocation fails behind an earlier call."""
    full = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return full or any(words in str(error) for words in NO_MEMORY)


def _serve(words: dict) -> None:
    cell = Cell(**words["cell"])
    _die_first()
    config = config_of(cell)
    params = moe.init(jax.random.key(0), config, cell.param_dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(cell.dtype).astype(leaf.dtype), params)._replace(
        router=params.router
    )
    block = jax.random.normal(jax.random.key(1), (min(BLOCK, cell.tokens), cell.d_model)).astype(cell.dtype)
    x = jnp.tile(block, (-(-cell.tokens // len(block)), 1))[: cell.tokens]
    first = params if cell.op == "forward" else moe.init_state(params)
    function = flat(cell)
    compiled = function.compile()
    sizes = compiled.bytes
    error = _wrong(cell, params, x, config) if words["check"] else None
    if error is not None and not error <= tolerance(cell).out:
        _say(
            {
                "error": f"{cell.id}: rel_err_out={error:.2e} of sampled tokens is over {tolerance(cell).out:.1e}"
            }
        )
        return
    names = {"temp": "temp", "argument": "arg", "output": "out", "alias": "alias"}
    _say(
        {
            "rel_err_out": error,
            **{f"xla_{names[k]}_mb": v / MIB for k, v in dataclasses.asdict(sizes).items()},
            **{f"{k}_bytes": v for k, v in dataclasses.asdict(sizes).items()},
            "flops": compiled.flops,
            "compile_s": compiled.seconds,
        }
    )
    arguments = Arguments(jax.tree.leaves((first, x)), function.donated)
    del params, first, x  # A donated state has one owner.
    for _ in sys.stdin:
        arguments.run(compiled.run)
        _say({})


def _wrong(cell: Cell, params: moe.Params, x: jax.Array, config: moe.Config) -> float | None:
    """Error of sampled tokens against dense; None for capacity, whose drops depend on all tokens."""
    if cell.impl.startswith("capacity"):
        return None
    run = jax.jit(lambda params, x: implementation(cell.impl).apply(params, x, config, **cell.tuning)[0])
    sample = np.linspace(0, cell.tokens - 1, SAMPLE).astype(np.int32)
    y = run(params, x)[sample]
    as_float32 = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    return rel_err(
        y, moe.apply(as_float32, x[sample].astype(jnp.float32), config, impl="dense:auto:sorted").y
    )


def _die_first() -> None:
    """Where the kernel must kill something, let it be this process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _say(values: dict) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
