"""The report on a terminal: the verdict by shape group, worst first, then what to do."""

from . import wording
from .gate.verdict import CellVerdict, Verdict


def lines(verdict: Verdict) -> list[str]:
    """The comparison as text. Times stand beside each other for information: stored times are not gated."""
    groups: dict[str, list[CellVerdict]] = {}
    for cell in wording.worst_first(verdict.cells):
        groups.setdefault(_group(cell), []).append(cell)
    out = [f"compared with {verdict.baseline}"]
    for group, cells in groups.items():
        table = wording.filled(
            wording.HEADINGS, [(wording.status(cell), _name(cell), *wording.figures(cell)) for cell in cells]
        )
        headings, *rows = aligned(table)
        out += ["", group, headings]
        for row, cell in zip(rows, cells, strict=True):
            out.append(row)
            if cell.status != "unchanged":
                out += [f"      {reason}" for reason in cell.reasons]
    return [*out, "", *summary(verdict)]


def summary(verdict: Verdict) -> list[str]:
    """Faults, drifts, notes, counts, and the way on."""
    out = [f"integrity: {fault}" for fault in verdict.faults]
    out += wording.drift(verdict)
    out += wording.accepted(verdict)
    out += [f"note: {note}" for note in verdict.notes]
    out.append(f"verdict: {wording.counts(verdict)}; {wording.compared(verdict)}")
    if verdict.partial:
        out.append(f"PARTIAL: {wording.PARTIAL}")
    return out + [f"{what}: {command}" for what, command in wording.accept(verdict)]


def aligned(table: list[tuple[str, ...]]) -> list[str]:
    """Columns of one width each: words (the first two) to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  " + "  ".join(_padded(row, widths)).rstrip() for row in table]


def _padded(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [
        text.ljust(width) if place < 2 else text.rjust(width)
        for place, (text, width) in enumerate(zip(row, widths, strict=True))
    ]


def _group(cell: CellVerdict) -> str:
    known = cell.today or cell.stored
    if known is None:
        return "without a record"
    return (
        f"{known['suite']}: {known['dtype']}, {known['tokens']} tokens, {known['experts']} experts, "
        f"top_k {known['top_k']}, skew {known['skew']}, {known['op']}"
    )


def _name(cell: CellVerdict) -> str:
    """What tells the cell from the others of its group."""
    known = cell.today or cell.stored
    if known is None:
        return cell.id
    tuning = cell.id.rpartition(f"-{known['op']}")[2]
    return f"{known['routing']}:{known['impl']}:{known['dispatch']}{tuning}"
