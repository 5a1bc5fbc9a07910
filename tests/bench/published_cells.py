"""The published results beside a run of ours, cell by cell: who is better, and by what rule.

A published cell is beaten when every counted figure of ours holds its bar:
- temp MB at most the published one;
- time over dense of the same run at most the larger of the published ratio and 1.1 x the flop limit against
  dense;
- each of the three relative errors at most the larger of the published one and our own tolerance;
- argument and output bytes equal to the published ones (dense bfloat16 forward: at most, as its y was
  float32). Compile seconds are shown, never counted; so is the time of raw ragged_dot, which a better dense
  makes look worse, and of a cell for which neither side has a dense. A figure that we lack is never beaten.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import baseline
from .baseline import Baseline
from .published_import import FILE

HOW_TO_RUN = "get a run with: pytest tests/bench --grid published --benchmark-json=run.json"

FLOP_SLACK = 1.1
CAPACITY_FACTOR = 1.25
ERRORS = ("out", "grad_params", "grad_x")
SAME_DENSE = ("dtype", "tokens", "experts", "d_model", "d_hidden", "op")
"""Fields that a cell and its dense share: dense's work does not depend on the others, top_k and skew."""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One figure of a cell, ours and theirs; `holds` is None where it is shown and not counted."""

    name: str
    ours: float | None
    theirs: float | None
    bar: float | None = None
    holds: bool | None = None


@dataclass(frozen=True)
class Row:
    """One published cell beside ours.

    Attributes:
      id: cell id.
      cell: the published fields.
      state: "compared", "skipped" (`reason` is our run's) or "absent".
      figures: what was compared, by name; empty unless compared.
      dense_run: the published run whose dense the published ratio is over; None where there is none.
    """

    id: str
    cell: Entry
    state: str
    reason: str = ""
    figures: tuple[Figure, ...] = ()
    dense_run: str | None = None

    @property
    def rejected(self) -> bool:
        """Of the variant that was measured and not landed: counted on its own."""
        return self.cell["code"] == "rejected"

    @property
    def borrowed(self) -> bool:
        """Whether the published ratio is over dense of another published run: its own holds none."""
        return self.dense_run not in (None, self.cell["run"])

    @property
    def unmet(self) -> tuple[str, ...]:
        """Names of the counted figures that miss their bars."""
        return tuple(figure.name for figure in self.figures if figure.holds is False)

    @property
    def beaten(self) -> bool:
        """Whether it was compared and every counted figure holds."""
        return self.state == "compared" and not self.unmet


def compare(
    run: dict[str, Any],
    published: Baseline | dict[str, Any],
    tolerances: Any = None,
    path: Path = Path("the run"),
) -> list[Row]:
    """Puts a run beside the published cells: one row for each published cell, in published order.

    Args:
      run: a pytest-benchmark document of this suite.
      published: the imported file, loaded or as a document.
      path: where the run was read, for messages.
      tolerances: dtype -> object with `out`, `grad_params` and `grad_x`; `numerics.TOLERANCES` when None.

    Raises:
      BaselineError: one of the two is damaged.
    """
    if not isinstance(published, Baseline):
        published = baseline.parse(published, FILE)
    ours = baseline.parse(run, path, HOW_TO_RUN)
    tolerances = tolerances or default_tolerances()
    rows = []
    for identity, theirs in published.records.items():
        cell = theirs["extra_info"]
        if identity in ours.records:
            dense, their_dense = _dense(ours, cell, min), _dense(published, cell, max)
            figures = _figures(ours.records[identity], theirs, dense, their_dense, tolerances[cell["dtype"]])
            dense_run = their_dense["extra_info"]["run"] if their_dense else None
            rows.append(Row(identity, cell, "compared", figures=figures, dense_run=dense_run))
        elif identity in ours.skipped:
            rows.append(Row(identity, cell, "skipped", reason=ours.skipped[identity]))
        else:
            rows.append(Row(identity, cell, "absent"))
    return rows


def default_tolerances() -> Any:
    """The suite's own table; imported late, since it brings jax, which reading files does not need."""
    from .numerics import TOLERANCES

    return TOLERANCES


def time_bar(cell: Entry, published_ratio: float | None) -> float:
    """The most time over dense that counts as beaten.

    No implementation can do less than its own share of dense's flops: top_k of the experts, and as many slots
    more as capacity's factor leaves empty.
    """
    share = 1.0 if cell["routing"] == "dense" else cell["top_k"] / cell["experts"]
    if cell["routing"] == "capacity":
        share *= CAPACITY_FACTOR
    return max(published_ratio or 0.0, FLOP_SLACK * share)


def _figures(
    ours: Entry, theirs: Entry, dense: Entry | None, their_dense: Entry | None, tolerance: Any
) -> tuple[Figure, ...]:
    mine, cell = ours["extra_info"], theirs["extra_info"]

    def figure(
        name: str, field: str, holds: Callable[[float, float], bool] | None, least: float | None = None
    ):
        our_value, their_value = _number(mine, field), _number(cell, field)
        if holds is None:
            return Figure(name, our_value, their_value)
        bar = max((value for value in (their_value, least) if value is not None), default=None)
        met = our_value is not None and bar is not None and holds(our_value, bar)
        return Figure(name, our_value, their_value, bar, met)

    float32_y = (cell["routing"], cell["dtype"], cell["op"]) == ("dense", "bfloat16", "forward")
    return (
        figure("temp", "xla_temp_mb", _at_most),
        _time(ours, theirs, dense, their_dense),
        *(
            figure(f"rel_err_{kind}", f"rel_err_{kind}", _at_most, getattr(tolerance, kind))
            for kind in ERRORS
        ),
        figure("arguments", "xla_arg_mb", _equal),
        figure("output", "xla_out_mb", _at_most if float32_y else _equal),
        figure("compile", "compile_s", None),
        Figure("median_ms", _median_ms(ours), _median_ms(theirs)),
    )


def _at_most(ours: float, bar: float) -> bool:
    return ours <= bar


def _equal(ours: float, bar: float) -> bool:
    return ours == bar  # Bytes over 2**20 are exact in a float, so this is equality to the byte.


def _time(ours: Entry, theirs: Entry, dense: Entry | None, their_dense: Entry | None) -> Figure:
    ratio, published = _ratio(ours, dense), _ratio(theirs, their_dense)
    cell = theirs["extra_info"]
    if cell["impl"] == "ragged_dot" or (dense is None and their_dense is None):
        return Figure("time", ratio, published)
    bar = time_bar(cell, published)
    return Figure("time", ratio, published, bar, ratio is not None and ratio <= bar)


def _dense(source: Baseline, cell: Entry, choose: Callable[..., Entry | None]) -> Entry | None:
    """Dense of the cell's dtype, tokens, experts, widths and op; None where the source has none.

    The one of the cell's own published run goes first. Of several `choose` takes one by its median: the
    fastest of ours and the slowest of theirs, so that doubt counts against us.
    """
    found = [entry for entry in source.records.values() if _is_dense_of(entry["extra_info"], cell)]
    found = [entry for entry in found if entry["extra_info"].get("run") == cell["run"]] or found
    return choose(found, key=lambda entry: entry["stats"]["median"], default=None)


def _is_dense_of(other: Entry, cell: Entry) -> bool:
    what = (other.get("routing"), other.get("suite"), other.get("param_dtype") or "float32")
    return what == ("dense", "layer", "float32") and all(
        other.get(field) == cell[field] for field in SAME_DENSE
    )


def _number(fields: Entry, name: str) -> float | None:
    """A finite figure that is not negative; None for whatever else stands there: a missing figure."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)


def _median_ms(entry: Entry) -> float | None:
    seconds = _number(entry["stats"], "median")
    return seconds * 1000 if seconds else None


def _ratio(entry: Entry, dense: Entry | None) -> float | None:
    time, reference = _median_ms(entry), _median_ms(dense) if dense else None
    return time / reference if time and reference else None
