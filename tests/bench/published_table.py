"""How the comparison with the published results reads as text; it decides nothing."""

from collections.abc import Iterable
from itertools import groupby

from .published_cells import Figure, Row
from .published_import import cell_of

COLUMNS = (
    ("cell", "temp MB", "time / dense (bar)", "worst rel_err", "arg MB", "out MB", "compile s"),
    ("", *("ours / published",) * 3, "(= is equal)", "", ""),
)
BORROWED = (
    "* The published run of this cell holds no dense, so its ratio is over the dense of the same dtype,\n"
    "  tokens, experts and op from another published run: dense's work does not depend on top_k or skew."
)
NOT_COUNTED = (
    "- Time in [ ] is shown, not counted: raw ragged_dot, which a better dense makes look worse, and\n"
    "  cells for which neither side has a dense."
)


def render(rows: list[Row]) -> str:
    """Tables of the landed code and of the rejected variant, what was not compared, notes, and counts."""
    landed, rejected = ([row for row in rows if row.rejected == value] for value in (False, True))
    parts = [_table("Published cells", landed), _table("Rejected variant, measured for comparison", rejected)]
    parts += [_not_compared(rows, "skipped"), _not_compared(rows, "absent"), _notes(rows)]
    parts += [_counts(landed, "published cells") + "\n" + _counts(rejected, "cells of the rejected variant")]
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(title: str, rows: list[Row]) -> str:
    seen = {_group(row): place for place, row in reversed(list(enumerate(rows)))}
    # Rows that do the same work stand together, groups in published order.
    compared = sorted((row for row in rows if row.state == "compared"), key=lambda row: seen[_group(row)])
    if not compared:
        return ""
    body = [_line(row) for row in compared]
    widths = [max(map(len, column)) for column in zip(*COLUMNS, *(line[:-1] for line in body), strict=True)]

    def aligned(line: tuple[str, ...]) -> str:
        first, *others = line
        cells = [value.rjust(width) for value, width in zip(others, widths[1:], strict=False)]
        return "  ".join([first.ljust(widths[0]), *cells, *others[len(cells) :]]).rstrip()

    lines = [title, *map(aligned, COLUMNS)]
    for group, members in groupby(zip(compared, body, strict=True), key=lambda pair: _group(pair[0])):
        lines += ["", group, *(aligned(line) for _, line in members)]
    return "\n".join(lines)


def _group(row: Row) -> str:
    return cell_of(row.cell).group


def _line(row: Row) -> tuple[str, ...]:
    figures = {figure.name: figure for figure in row.figures}
    errors = [figure for name, figure in figures.items() if name.startswith("rel_err_")]
    tuning = f" chunk {row.cell['chunk']}" if row.cell.get("chunk") is not None else ""
    return (
        "  " + row.id.split("/")[-1].split("-")[0] + tuning,
        _pair("{:.2f}", figures["temp"].ours, figures["temp"].theirs),
        _time(figures["time"], figures["median_ms"]) + ("*" if row.borrowed else " "),
        _pair("{:.1e}", _worst(figure.ours for figure in errors), _worst(figure.theirs for figure in errors)),
        _same("{:.2f}", figures["arguments"]),
        _same("{:.2f}", figures["output"]),
        _pair("{:.2f}", figures["compile"].ours, figures["compile"].theirs),
        "beaten" if row.beaten else f"not yet: {', '.join(row.unmet)}",
    )


def _time(ratio: Figure, median_ms: Figure) -> str:
    if ratio.bar is not None:
        return _pair("{:.3f}", ratio.ours, ratio.theirs) + f" ({ratio.bar:.3f})"
    if ratio.ours is None and ratio.theirs is None:
        return f"[{_pair('{:.0f} ms', median_ms.ours, median_ms.theirs)}]"
    return f"[{_pair('{:.3f}', ratio.ours, ratio.theirs)}]"


def _pair(pattern: str, ours: float | None, theirs: float | None) -> str:
    return " / ".join("-" if value is None else pattern.format(value) for value in (ours, theirs))


def _same(pattern: str, figure: Figure) -> str:
    if figure.ours is not None and figure.ours == figure.theirs:
        return f"{pattern.format(figure.ours)} ="
    return _pair(pattern, figure.ours, figure.theirs)


def _worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _not_compared(rows: list[Row], state: str) -> str:
    lines = [f"  {row.id}" + (f": {row.reason}" if row.reason else "") for row in rows if row.state == state]
    return "\n".join([f"Published cells {state} in this run: {len(lines)}", *lines]) if lines else ""


def _notes(rows: list[Row]) -> str:
    shown = any(f.name == "time" and f.holds is None for row in rows for f in row.figures)
    borrowed = any(row.borrowed for row in rows)
    return "\n".join([BORROWED] * borrowed + [NOT_COUNTED] * shown)


def _counts(rows: list[Row], what: str) -> str:
    compared, skipped, absent = (
        sum(row.state == s for row in rows) for s in ("compared", "skipped", "absent")
    )
    beaten = sum(row.beaten for row in rows)
    return f"{beaten} of {compared} compared beaten ({len(rows)} {what}: {skipped} skipped, {absent} absent)"
