"""What every output says of a verdict: a cell's figures, the counts, the drifts, how to accept."""

from collections.abc import Callable, Iterable
from typing import Any

from . import home
from .gate.verdict import DRIFTS, WORST_FIRST, CellVerdict, Timing, Verdict

HEADINGS = ("verdict", "cell", "temp MiB", "side by side", "time ms", "of matmul")
HEADLINES = {
    "wrong": "Wrong numbers",
    "missing": "Cells or metrics are missing",
    "regressed": "Regressed",
    "inconclusive": "Inconclusive",
    "improved": "Improved",
    "new": "New cells",
    "unchanged": "Unchanged",
}
"""The verdict of a run in words: that of the first status here that one of its cells has."""
RECORD = f'{home.BASELINE} --reason "..."'
SLOWER = ' --accept-slower "..."'
CELLS_OF_A_DRIFT = 3
PARTIAL = "this run was narrowed; cells that did not run were not compared, and it is no baseline"


def worst_first(cells: Iterable[CellVerdict]) -> list[CellVerdict]:
    """By status; cells of one status stay in their order."""
    return sorted(cells, key=lambda cell: WORST_FIRST.index(cell.status))


def headline(verdict: Verdict) -> str:
    """The verdict in words, then the counts."""
    words = next((text for status, text in HEADLINES.items() if verdict.count(status)), "")
    if not verdict.count("wrong"):
        if verdict.faults:
            words = "Integrity fault"
        elif not verdict.compared and not verdict.count("missing"):
            words = "Nothing was compared"
        elif verdict.accepted_cells == verdict.count("regressed") and words == HEADLINES["regressed"]:
            words = "Regressed, accepted"
    return f"{words}: {counts(verdict)}"


def counts(verdict: Verdict) -> str:
    """How many cells have each status, worst first."""
    told = {status: f"{n} {status}" for status in WORST_FIRST if (n := verdict.count(status))}
    if verdict.accepted_cells:
        told["regressed"] += f" ({verdict.accepted_cells} accepted)"
    return ", ".join(told.values()) or "no cell"


def status(cell: CellVerdict) -> str:
    """The verdict of one cell in a table."""
    return f"{cell.status}, accepted" if cell.accepted else cell.status


def accepted(verdict: Verdict, as_text: Callable[[str], str] = str) -> list[str]:
    """A line for the reason that was given, also where nothing needed it."""
    if verdict.accepted is None:
        return []
    n = verdict.accepted_cells
    cells = "no cell needed it" if not n else "1 cell" if n == 1 else f"{n} cells"
    return [f"accepted ({cells}): {as_text(verdict.accepted)}"]


def compared(verdict: Verdict) -> str:
    """How many cells were compared, and by what."""
    timed = any(cell.timing for cell in verdict.cells)
    return f"{verdict.compared} compared ({'bytes, flops and time' if timed else 'bytes and flops'})"


def figures(cell: CellVerdict) -> tuple[str, ...]:
    """The columns of HEADINGS after the cell, empty where there is nothing to say."""
    return (
        pair(cell, "xla_temp_mb", "{:.2f}"),
        side_by_side(cell.timing),
        pair(cell, "median_ms", "{:.1f}"),
        pair(cell, "gemm_fraction", "{:.0%}"),
    )


def filled(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """A table, headings first, without the columns that no row fills."""
    kept = [number for number, column in enumerate(zip(*rows, strict=True)) if any(column)]
    return [tuple(row[number] for number in kept) for row in (headings, *rows)]


def drift(
    verdict: Verdict, as_id: Callable[[str], str] = str, as_text: Callable[[str], str] = str
) -> list[str]:
    """A line for each kind of drift: what it means, what differs in the run, and some of the cells."""
    out = []
    for kind in sorted({found.kind for found in verdict.drift}, key=list(DRIFTS).index):
        found = [drift for drift in verdict.drift if drift.kind == kind]
        run = [as_text(drift.text) for drift in found if drift.id is None]
        cells = [f"{as_id(drift.id)} ({as_text(drift.text)})" for drift in found if drift.id is not None]
        out.append(f"{kind} drift: {DRIFTS[kind]}: " + "; ".join([*run, *some(cells, CELLS_OF_A_DRIFT)]))
    return out


def accept(verdict: Verdict) -> list[tuple[str, str]]:
    """(what to do, the command that does it), for what is worse and for what is better or new."""
    slower = SLOWER if verdict.count("regressed") else ""
    out = []
    failing = any(cell.failing for cell in verdict.cells)
    if failing:
        out.append(("if this is meant, accept it", RECORD + slower))
    elif verdict.accepted_cells:
        out.append(("accepted for this run alone; record it, or the next one fails", RECORD + slower))
    for status, gain in (("improved", "keep it as the new bar"), ("new", "gate it from now on")):
        if n := verdict.count(status):
            cells = f"{n} cell" if n == 1 else f"{n} cells"
            first = "fix or accept what is worse, then " if failing else ""
            out.append((f"{status}: {cells}; {first}{gain}", RECORD))
    return out


def some(items: list[str], most: int) -> list[str]:
    """The first items, and how many more there are."""
    return items if len(items) <= most else [*items[:most], f"and {len(items) - most} more"]


def side_by_side(timing: Timing | None) -> str:
    return f"x{timing.ratio:.2f} ({timing.low:.2f} to {timing.high:.2f})" if timing else ""


def pair(cell: CellVerdict, field: str, form: str) -> str:
    """Stored -> now, or the one there is."""
    values: list[Any] = [record.get(field) for record in (cell.stored, cell.today) if record is not None]
    texts = [form.format(value) for value in values if value is not None]
    return texts[0] if len(set(texts)) == 1 else " -> ".join(texts)
