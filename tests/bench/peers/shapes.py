"""The cells of a contest, and its arms: who may run a cell, and where."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from ..cell import Cell
from ..grid import CAPACITY as CAPACITY_ID
from ..grid import CHUNKED, DENSE, DONATED, RAGGED, RAGGED_LIMIT, Source

OURS = "ours"
CAPACITY = "capacity"
TORCH = "torch"
DTYPES = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))
"""(dtype, param_dtype): what computes, and what is kept."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One contestant.

    Attributes:
      name: as printed; all arms of torch begin with `torch`.
      side: the worker that runs it, `jax` or `torch`.
      impl: the implementation of ours that it is, where it is one.
      limit: tokens x experts over which it takes no part (None: no limit).
      tuning: values of that implementation.
    """

    name: str
    side: str
    impl: str | None = None
    limit: int | None = None
    tuning: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)


JAX = (
    Arm(OURS, "jax", CHUNKED),
    Arm(CAPACITY, "jax", CAPACITY_ID),
    Arm("dense", "jax", DENSE, Source.dense_limit),
    Arm("ragged_dot", "jax", RAGGED),
    Arm("jax.lax.ragged_dot", "jax", RAGGED, RAGGED_LIMIT["cpu"], tuning={"lowering": "xla"}),
    Arm("tokamax.ragged_dot", "jax", None, RAGGED_LIMIT["cpu"]),
)
EXPERTS = ("eager", "grouped_mm")
ADAMS = ("fused", "foreach")


def arms(cell: Cell) -> list[Arm]:
    """The arms of a cell. A train step is Adam's too: torch has two of them for each form of the experts."""
    ways = itertools.product(EXPERTS, ADAMS if cell.op != "forward" else ("",))
    torch = [Arm(" ".join(filter(None, (TORCH, *way))), "torch") for way in ways]
    size = cell.tokens * cell.experts
    return [arm for arm in (*JAX, *torch) if arm.limit is None or size <= arm.limit]


def cells() -> list[Cell]:
    """The core table, then one factor at a time around 4096 x 8, then two fine-grained shapes."""
    shapes: list[dict[str, float]] = [
        {"tokens": tokens, "experts": experts, "top_k": 2}
        for tokens, experts in itertools.product((1024, 4096, 16384), (8, 64))
    ]
    around = {"tokens": 4096, "experts": 8, "top_k": 2}
    shapes += [{**around, "top_k": top_k} for top_k in (1, 4, 8)]
    shapes += [{**around, "skew": 0.9}]
    shapes += [
        {"tokens": 4096, "experts": 128, "top_k": 8, "d_hidden": 256},
        {"tokens": 4096, "experts": 60, "top_k": 4, "d_hidden": 704},
    ]
    return [
        Cell("layer", CHUNKED, dtype, op=op, param_dtype=param_dtype, **shape)  # type: ignore[arg-type]
        for shape, (dtype, param_dtype), op in itertools.product(shapes, DTYPES, DONATED)
    ]
