"""The record: what a measured cell leaves behind, under the published names and a few of our own."""

import dataclasses
from typing import Any

import numpy as np

from .baseline import SCHEMA
from .cell import Cell
from .numerics import Numerics
from .program import MIB, Compiled


def record(
    cell: Cell,
    numerics: Numerics | None,
    compiled: Compiled,
    *,
    durations_ms: np.ndarray,
    inner: int,
    anchor_ms: float,
    gemm_fraction: float,
) -> dict[str, Any]:
    """The fields of a measured cell: times in ms per call, `*_mb` in MiB (as published), `*_bytes` exact.

    `gemm_fraction` is the useful flop rate of the cell over the flop rate of its anchors.
    """
    sizes = dataclasses.asdict(compiled.bytes)
    short = {"argument": "arg", "output": "out"}
    q1, median, q3 = np.percentile(durations_ms, [25, 50, 75])
    return {
        "schema": SCHEMA,
        "status": "measured",
        **cell.fields(),
        **(dataclasses.asdict(numerics) if numerics else {}),
        **{f"xla_{short.get(name, name)}_mb": size / MIB for name, size in sizes.items()},
        **{f"{name}_bytes": size for name, size in sizes.items()},
        "flops": compiled.flops,
        "useful_flops": cell.useful_flops,
        "compile_s": compiled.seconds,
        "inner": inner,
        "median_ms": float(median),
        "q1_ms": float(q1),
        "q3_ms": float(q3),
        "anchor_ms": anchor_ms,
        "gemm_fraction": gemm_fraction,
    }


def skipped(cell: Cell, reason: str) -> dict[str, Any]:
    """The record of a cell that a limit leaves out."""
    return {"schema": SCHEMA, "status": "skipped", **cell.fields(), "reason": reason}
