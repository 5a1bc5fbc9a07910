"""What the page tells, as plain values: built from a verdict, its records, the baselines and the verbs' reports.

A section without data is an empty tuple with nothing else to it; what could not be read is said in `faults`.
The page only lays this out, and the figures only draw it.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from . import atomic, baseline, past, published_cells, published_import, rules, wording
from .cell import Cell
from .environment import key
from .errors import BaselineError, BenchError, GridError
from .gate import limits
from .gate.verdict import CellVerdict, Verdict
from .growth import Point
from .roofline import Reached
from .sizes import Size

Found = TypeVar("Found", Point, Reached, Size)
Record = Mapping[str, Any]
SHAPE = ("suite", "dtype", "tokens", "experts", "top_k", "skew", "d_model", "d_hidden", "op", "param_dtype")
"""What cells have to share to do the same work."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Temp MiB of one cell, of dense on the same shape in the same run, and as published; None where unknown."""

    id: str
    record: Record
    ours_mb: float
    dense_mb: float | None
    published_mb: float | None


@dataclasses.dataclass(frozen=True)
class Line:
    """One implementation on shapes that differ in tokens alone: (tokens, ms, temp MiB), ascending."""

    record: Record
    points: tuple[tuple[int, float, float], ...]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """One tuning value on one shape.

    Attributes:
      name: chunk or block_m.
      record: of one of the cells.
      points: (value, ms), ascending.
      automatic: the value that the implementation takes by itself.
      automatic_ms: what that takes, where it was measured.
    """

    name: str
    record: Record
    points: tuple[tuple[int, float], ...]
    automatic: int | None
    automatic_ms: float | None


@dataclasses.dataclass(frozen=True)
class Past:
    """One cell at each update of the baseline that holds it, and now: (update's number, record)."""

    id: str
    stored: tuple[tuple[int, Record], ...]
    now: Record | None


@dataclasses.dataclass(frozen=True)
class Beside(Generic[Found]):
    """What a verb that times side by side left in the reports; `where` says on what machine, and how often."""

    cells: tuple[Found, ...] = ()
    where: str = ""


@dataclasses.dataclass(frozen=True)
class Story:
    """All that the page tells.

    Attributes:
      verdict: None where no run was compared.
      exit_code: of that run.
      slowest: cell id -> the ratio of times over which it is too slow.
      faults: what could not be read, in words.
      pasts: of the cells of the run, those that changed first.
    """

    verdict: Verdict | None = None
    exit_code: int = 0
    slowest: Mapping[str, float] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    memory: tuple[Memory, ...] = ()
    lines: tuple[Line, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    roofline: Beside[Reached] = dataclasses.field(default_factory=Beside)
    growth: Beside[Point] = dataclasses.field(default_factory=Beside)
    updates: tuple[past.Update, ...] = ()
    pasts: tuple[Past, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[CellVerdict, ...]:
        return tuple(wording.worst_first(self.verdict.cells)) if self.verdict else ()

    @property
    def timed(self) -> tuple[CellVerdict, ...]:
        """The cells that were raced with their stored program, slowest first."""
        raced = [cell for cell in self.cells if cell.timing and _positive(cell.timing.ratio)]
        return tuple(sorted(raced, key=lambda cell: -cell.timing.ratio))  # type: ignore[union-attr]


def tell(
    verdict: Verdict | None,
    exit_code: int = 0,
    *,
    records: Mapping[str, Record] | None = None,
    environment: Mapping[str, Any] | None = None,
    baselines: Path = baseline.ROOT,
    reports: Path | None = None,
    settings: tuple[limits.Limit, ...] = (),
) -> Story:
    """Build the story. What is missing or damaged besides the verdict becomes a fault of it, never an error.

    Args:
      verdict: of the run, or None.
      exit_code: of the run.
      records: further records by cell id, of a run that was not compared.
      environment: of those.
      baselines: folder of the backends' folders; the folder of the verdict's own baseline goes first.
      reports: folder with what `roofline`, `growth` and `sizes` found.
      settings: the limits in force.
    """
    faults: list[str] = []
    cells = verdict.cells if verdict else ()
    today = {cell.id: cell.today for cell in cells if cell.today is not None} | dict(records or {})
    where = dict(verdict.environment if verdict else environment or {})
    updates = _updates(verdict, where, baselines, faults)
    sizes = _beside("sizes", Size, reports, faults)
    return Story(
        verdict,
        exit_code,
        {cell.id: limits.slowest(settings, cell.id) for cell in cells},
        where,
        _memory(today, _published(baselines, faults)),
        _lines(today.values()),
        (*_sweeps(today.values()), *_swept(sizes.cells)),
        _beside("roofline", Reached, reports, faults),
        _beside("growth", Point, reports, faults),
        updates,
        _pasts(wording.worst_first(cells), today, updates),
        tuple(faults),
    )


def _updates(
    verdict: Verdict | None, where: Mapping[str, Any], root: Path, faults: list[str]
) -> tuple[past.Update, ...]:
    folder = Path(verdict.baseline).parent if verdict and verdict.baseline else None
    if folder is None or not folder.is_dir():
        if not {"backend", "jax"} <= where.keys():
            return ()
        folder = root / key(dict(where))
    try:
        return past.updates(folder)
    except BenchError as fault:
        faults.append(str(fault))
        return ()


def _published(root: Path, faults: list[str]) -> Mapping[str, Record]:
    if not (root / published_import.FILE).exists():
        return {}
    try:
        found = baseline.load(root / published_import.FILE).records
    except BaselineError as fault:
        faults.append(str(fault))
        return {}
    return {identity: entry["extra_info"] for identity, entry in found.items()}


def _beside(name: str, kind: type[Found], reports: Path | None, faults: list[str]) -> Beside[Found]:
    """The file that the verb wrote; nothing where it did not run."""
    path = reports / f"{name}.json" if reports else None
    if path is None or not path.exists():
        return Beside()
    try:
        document = json.loads(atomic.read(path, f"write it again: python -m {__package__} {name}"))
        cells = tuple(kind(**cell) for cell in document["cells"])
        its = document["environment"]
        words = (f"JAX {its['jax']}", its["cpu"], f"{its['cores']} cores", f"{document['rounds']} turns")
        return Beside(cells, ", ".join(map(str, words)))
    except BenchError as fault:
        faults.append(str(fault))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        faults.append(
            f"{path} is not what {name} writes ({error!r}); run it again: python -m {__package__} {name}"
        )
    return Beside()


def _memory(today: Mapping[str, Record], published: Mapping[str, Record]) -> tuple[Memory, ...]:
    layer = [
        (i, r) for i, r in today.items() if r.get("suite") == "layer" and _positive(r.get("xla_temp_mb"))
    ]
    # As in the comparison with what was published: dense's work does not depend on top_k or skew.
    fields = published_cells.SAME_DENSE
    dense = {_values(r, fields): r["xla_temp_mb"] for _, r in layer if r.get("routing") == "dense"}
    found = [
        Memory(
            identity,
            record,
            record["xla_temp_mb"],
            None if record.get("routing") == "dense" else dense.get(_values(record, fields)),
            published.get(identity, {}).get("xla_temp_mb"),
        )
        for identity, record in layer
    ]
    return tuple(sorted(found, key=lambda its: _order(its.record)))


def _lines(records: Iterable[Record]) -> tuple[Line, ...]:
    """Implementations at their own choice of sizes, where there are two numbers of tokens at least."""
    series: dict[tuple[Any, ...], dict[int, tuple[int, float, float]]] = {}
    names: dict[tuple[Any, ...], Record] = {}
    fields = [name for name in SHAPE if name not in ("tokens", "suite")]
    for record in records:
        if record.get("suite") not in ("layer", "maxtok"):
            continue
        tokens: Any = record.get("max_tokens") or record.get("tokens")
        ms: Any = record.get("median_ms")
        temp: Any = record.get("xla_temp_mb")
        if not (_positive(tokens) and _positive(ms) and _positive(temp)):
            continue
        its = (name(record), *_values(record, fields))
        series.setdefault(its, {})[tokens] = (tokens, ms, temp)
        names.setdefault(its, record)
    found = [Line(names[its], tuple(points[n] for n in sorted(points))) for its, points in series.items()]
    return tuple(line for line in sorted(found, key=lambda line: _order(line.record)) if len(line.points) > 1)


def _sweeps(records: Iterable[Record]) -> tuple[Sweep, ...]:
    records = list(records)
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        its = record.get("suite")
        if its in ("chunk", "block_m") and _positive(record.get("median_ms")) and record.get(its):
            groups.setdefault((record.get("impl"), *_values(record, SHAPE)), []).append(record)
    layer = {
        (record.get("impl"), *_values({**record, "suite": suite}, SHAPE)): record.get("median_ms")
        for record in records
        if record.get("suite") == "layer" and not _tuned(record)
        for suite in ("chunk", "block_m")
    }
    found = []
    for shape, its in groups.items():
        tuning = str(its[0]["suite"])
        points = tuple(sorted((record[tuning], record["median_ms"]) for record in its))
        found.append(Sweep(tuning, its[0], points, _automatic(its[0], tuning), layer.get(shape)))
    return tuple(sorted(found, key=lambda sweep: (sweep.name, *_order(sweep.record))))


def _swept(sizes: Iterable[Size]) -> list[Sweep]:
    """The chunks that the verb `sizes` timed in turns, as sweeps."""
    groups: dict[str, list[Size]] = {}
    for size in sizes:
        groups.setdefault(size.auto, []).append(size)
    found = []
    for identity, its in groups.items():
        points = tuple(sorted((size.chunk, size.ms) for size in its if size.chunk))
        free = next((size.ms for size in its if not size.chunk and not size.slab_elems), None)
        try:
            record = Cell.parse(identity).fields()
        except GridError:
            continue
        if points:
            found.append(Sweep("chunk", record, points, _automatic(record, "chunk"), free))
    return found


def _pasts(
    cells: Iterable[CellVerdict], today: Mapping[str, Record], updates: tuple[past.Update, ...]
) -> tuple[Past, ...]:
    ids = list(dict.fromkeys([*(cell.id for cell in cells), *today]))
    found = []
    for identity in ids:
        stored = tuple(
            (update.number, update.records[identity])
            for update in updates
            if update.records and identity in update.records
        )
        if stored:
            found.append(Past(identity, stored, today.get(identity)))
    return tuple(found)


def _automatic(record: Record, tuning: str) -> int | None:
    try:
        return rules.automatic(Cell.of(record), tuning)
    except (GridError, KeyError, TypeError, ValueError):  # A record written by hand, or by another version.
        return None


def name(record: Record) -> str:
    """An implementation in one word, with the tuning values that were set."""
    word = record.get("impl") if record.get("impl") != "auto" else record.get("routing")
    return f"{word}{_tuned(record)}"


def shape(record: Record, op: bool = True) -> str:
    """A cell's shape in a figure: what every published cell shares is left out."""
    words = [f"{record.get('dtype')} {record.get('tokens')} x {record.get('experts')}"]
    if record.get("top_k") not in (2, None):
        words.append(f"top_k {record['top_k']}")
    if record.get("skew"):
        words.append(f"skew {record['skew']}")
    if record.get("d_hidden") not in (1024, None):
        words.append(f"hidden {record['d_hidden']}")
    if op:
        words.append(operation(record))
    return ", ".join(words)


def operation(record: Record) -> str:
    """`train step, donated` for `train_step_donated`."""
    return {"train_step": "train step", "train_step_donated": "train step, donated"}.get(
        str(record.get("op")), str(record.get("op"))
    )


def _tuned(record: Record) -> str:
    identity, op = str(record.get("id")), f"-{record.get('op')}"
    return identity.rpartition(op)[2] if op in identity else ""


def _order(record: Record) -> tuple[Any, ...]:
    sizes = [record.get(name) or 0 for name in ("tokens", "experts", "top_k", "skew")]
    return (
        str(record.get("op")),
        str(record.get("dtype")),
        *sizes,
        str(record.get("impl")),
        str(record.get("id")),
    )


def _values(record: Record, fields: Iterable[str]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in fields)


def _positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0
