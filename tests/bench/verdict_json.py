"""The verdict as JSON, for other programs. verdict.schema.json beside this file says what each field means."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from . import atomic, baseline
from .errors import BaselineError
from .gate.verdict import WORST_FIRST, CellVerdict, Drift, Timing, Verdict
from .wording import worst_first

SCHEMA = 1
SCHEMA_FILE = Path(__file__).with_name("verdict.schema.json")


def document(verdict: Verdict, exit_code: int) -> dict[str, Any]:
    """The verdict as plain values. Figures that are not finite (a metric that vanished) become None."""
    return {
        "schema": SCHEMA,
        "exit_code": exit_code,
        "baseline": verdict.baseline,
        "partial": verdict.partial,
        "compared": verdict.compared,
        "counts": {status: verdict.count(status) for status in WORST_FIRST},
        "faults": list(verdict.faults),
        "drift": [dataclasses.asdict(drift) for drift in verdict.drift],
        "notes": list(verdict.notes),
        "accepted": verdict.accepted,
        "environment": _plain(verdict.environment),
        "cells": [_plain(dataclasses.asdict(cell)) for cell in worst_first(verdict.cells)],
    }


def write(path: Path, verdict: Verdict, exit_code: int) -> None:
    """Writes the document, atomically: readers see the old file or the new one, whole.

    Raises:
      BaselineError: the file cannot be written, or a record holds what JSON cannot.
    """
    atomic.write(path, baseline.dumps(document(verdict, exit_code)).encode())


def read(path: Path) -> tuple[Verdict, int]:
    """The verdict that `write` wrote, and the exit code. Figures that are None there stay None.

    Raises BaselineError where the file is missing, damaged, or of another schema.
    """
    way_out = "write it again: pytest tests/bench --benchmark-compare"
    try:
        found = json.loads(atomic.read(path, way_out))
        if found["schema"] != SCHEMA:
            raise BaselineError(
                f"{path} is of schema {found['schema']!r}, this suite reads {SCHEMA}; {way_out}"
            )
        verdict = Verdict(
            tuple(_cell(cell) for cell in found["cells"]),
            str(found["baseline"]),
            bool(found["partial"]),
            tuple(found["faults"]),
            tuple(Drift(**drift) for drift in found["drift"]),
            tuple(found["notes"]),
            dict(found["environment"]),
            found["accepted"],
        )
        return verdict, int(found["exit_code"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BaselineError(f"{path} is no verdict of this suite ({error!r}); {way_out}") from error


def _cell(found: dict[str, Any]) -> CellVerdict:
    if found["status"] not in WORST_FIRST:
        raise ValueError(f"status={found['status']!r}")
    timing = Timing(**found["timing"]) if found["timing"] else None
    return CellVerdict(
        found["id"],
        found["status"],
        tuple(found["reasons"]),
        found["stored"],
        found["today"],
        timing,
        bool(found["accepted"]),
    )


def _plain(value: Any) -> Any:
    """Lists for tuples, and None for figures that JSON cannot hold."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
