"""The report on a terminal: the verdict by shape group, worst first, then what to do."""

from typing import Any

from .gate.verdict import FAILING, WORST_FIRST, CellVerdict, Verdict

HEADINGS = ("verdict", "cell", "temp MiB", "time ms", "of matmul")
ACCEPT = 'if this is meant, accept it: tox run -e baseline -- --reason "..."'


def lines(verdict: Verdict) -> list[str]:
    """The comparison as text. Times stand beside each other for information: stored times are not gated."""
    groups: dict[str, list[CellVerdict]] = {}
    for cell in sorted(verdict.cells, key=lambda cell: WORST_FIRST.index(cell.status)):
        groups.setdefault(_group(cell), []).append(cell)
    out = [f"compared with {verdict.baseline}"]
    for group, cells in groups.items():
        rows = [_row(cell) for cell in cells]
        widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
        out += ["", group, _aligned(HEADINGS, widths)]
        for row, cell in zip(rows, cells, strict=True):
            out.append(_aligned(row, widths))
            if cell.status != "unchanged":
                out += [f"      {reason}" for reason in cell.reasons]
    return [*out, "", *summary(verdict)]


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    """Words to the left, figures to the right."""
    cells = (
        text.ljust(w) if i < 2 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
    )
    return "  " + "  ".join(cells).rstrip()


def summary(verdict: Verdict) -> list[str]:
    """Counts, faults, and the way on."""
    counts = ", ".join(f"{n} {status}" for status in WORST_FIRST if (n := verdict.count(status)))
    out = [f"integrity: {fault}" for fault in verdict.faults]
    out.append(f"verdict: {counts or 'no cell'}; {verdict.compared} compared (bytes and flops)")
    if verdict.partial:
        out.append(
            "PARTIAL: this run was narrowed; cells that did not run were not compared, and it is no baseline"
        )
    if any(verdict.count(status) for status in FAILING):
        out.append(ACCEPT)
    elif verdict.count("improved"):
        out.append('improved: keep it as the new bar with tox run -e baseline -- --reason "..."')
    return out


def _group(cell: CellVerdict) -> str:
    known = cell.today or cell.stored
    if known is None:
        return "without a record"
    return (
        f"{known['suite']}: {known['dtype']}, {known['tokens']} tokens, {known['experts']} experts, "
        f"top_k {known['top_k']}, skew {known['skew']}, {known['op']}"
    )


def _row(cell: CellVerdict) -> tuple[str, ...]:
    known: dict[str, Any] = cell.today or cell.stored or {}
    name = cell.id
    if known:
        tuning = cell.id.rpartition(f"-{known['op']}")[2]
        name = f"{known['routing']}:{known['impl']}:{known['dispatch']}{tuning}"
    return (
        cell.status,
        name,
        _pair(cell, "xla_temp_mb", "{:.2f}"),
        _pair(cell, "median_ms", "{:.1f}"),
        _pair(cell, "gemm_fraction", "{:.0%}"),
    )


def _pair(cell: CellVerdict, field: str, form: str) -> str:
    """Stored -> now, or the one there is."""
    texts = [
        form.format(record[field])
        for record in (cell.stored, cell.today)
        if record is not None and record.get(field) is not None
    ]
    return texts[0] if len(set(texts)) == 1 else " -> ".join(texts)
