"""The figures of the report: a story in, drawings out. Inks follow the page, so that they serve light and dark."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from . import figures, story
from .story import Story

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#010203"
"""Drawn in this, shown in the colour of the text around it."""
MOST_LABELS = 40
COLOURS = {
    "wrong": "#d55e00",
    "missing": "#d55e00",
    "regressed": "#d55e00",
    "inconclusive": "#e69f00",
    "new": "#56b4e9",
    "improved": "#009e73",
    "skipped": "#888888",
    "unchanged": "#0072b2",
}
"""Status -> its colour (Okabe and Ito's); a letter in each field of the map says it too."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One figure of the page.

    Attributes:
      name: of its file, and its anchor.
      title: its heading.
      text: what it shows, also to those who cannot see it; or why there is none.
      svg: the drawing; None where there are no data.
    """

    name: str
    title: str
    text: str
    svg: str | None


def all_of(told: Story) -> tuple[Drawn, ...]:
    """Every figure of the report, those without data included, in the order of the page."""
    n = len(told.cells)
    return (
        _drawn(
            "map", "What changed", told.cells, heat_map, told,
            f"A field for each of {n} cells: a row an implementation, a column a shape, its colour the verdict.",
            "No run was compared: pytest tests/bench --benchmark-compare.",
        ),
        _drawn(
            "ratios", "Time of changed programs", told.timed, ratios, told,
            "Today's time over the stored program's, run in turns, with 95 % bounds; over the line is slower.",
            "No program changed, so none was raced.",
        ),
        _drawn(
            "memory", "Memory", told.memory, memory, told,
            "Temporary memory of each cell, beside dense's on the same shape and the published figure, in MiB.",
            "No cell of suite layer was measured.",
        ),
        _drawn(
            "tokens", "Growth over tokens", told.lines, tokens, told,
            "Time and temporary memory against tokens, both axes logarithmic, a line for each implementation.",
            "No implementation was measured at two numbers of tokens.",
        ),
        _drawn(
            "sweeps", "Chunk and block sizes", told.sweeps, sweeps, told,
            "Time of each fixed size; the ring is the size that is taken by itself, the dashed line its time.",
            "No sizes were swept: --suites chunk,block_m, or python -m tests.bench sizes.",
        ),
        _drawn(
            "roofline", "How near to the bound", told.roofline.cells,
            lambda its: figures.roofline(its.roofline.cells), told,
            f"Chunked over its products alone, and where the rest goes. {told.roofline.where}",
            "python -m tests.bench roofline was not run.",
        ),
        _drawn(
            "growth", "A token's cost as tokens grow", told.growth.cells,
            lambda its: figures.growth(its.growth.cells), told,
            f"Chunked in turns in one run. {told.growth.where}",
            "python -m tests.bench growth was not run.",
        ),
        _drawn(
            "history", "History", [its for its in told.pasts if len(its.stored) > 1], history, told,
            "Temporary memory and share of a matmul of the most changed cells at each update, and now.",
            "No cell here has more than one stored record.",
        ),
    )  # fmt: skip


def _drawn(
    name: str,
    title: str,
    data: Iterable[Any],
    draw: Callable[[Story], "Figure"],
    told: Story,
    text: str,
    without: str,
) -> Drawn:
    if not list(data):
        return Drawn(name, title, without, None)
    return Drawn(name, title, text.strip(), inline(draw(told), name))


def inline(figure: "Figure", name: str) -> str:
    """An SVG element: text as text, in the page's ink, its ids its own among several drawings of a page."""
    import matplotlib
    from matplotlib.text import Text

    for words in figure.findobj(Text):
        if words.get_color() in ("black", "k"):
            words.set_color(INK)
    for axis in figure.axes:
        axis.patch.set_visible(False)
        axis.tick_params(colors=INK, which="both")
        for spine in axis.spines.values():
            spine.set_color(INK)
    figure.patch.set_visible(False)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        text = figures.svg(figure).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"(<svg[^>]*?) width=\"[^\"]*\"", r"\1", text, count=1)
    text = re.sub(r"(<svg[^>]*?) height=\"[^\"]*\"", r"\1", text, count=1)
    return text.replace(INK, "currentColor").replace("#000000", "currentColor")


def heat_map(told: Story) -> "Figure":
    """A field a cell: implementations down, shapes across."""
    fields = [(_row(cell.id, cell), _column(cell.id, cell), cell) for cell in told.cells]
    rows = sorted({row for row, _, _ in fields})
    columns = list(dict.fromkeys(column for _, column, _ in sorted(fields, key=lambda field: field[1])))
    figure, (axis,) = figures.axes_of(1, 1, height=2.6 + 0.34 * len(rows))
    for row, column, cell in fields:
        at = columns.index(column), rows.index(row)
        axis.add_patch(_rectangle(at, COLOURS[cell.status]))
        axis.text(*at, cell.status[0].upper(), ha="center", va="center", color="white", fontsize=8)
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_yticks(range(len(rows)), rows, fontsize=9)
    axis.set_xticks(range(len(columns)), columns, rotation=60, ha="right", fontsize=8)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)
    return figure


def _rectangle(at: tuple[int, int], colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((at[0] - 0.46, at[1] - 0.44), 0.92, 0.88, color=colour, linewidth=0)


def _row(identity: str, cell: Any) -> str:
    record = cell.today or cell.stored
    return story.name(record) if record else identity.partition("-")[0]


def _column(identity: str, cell: Any) -> str:
    record = cell.today or cell.stored
    return story.shape(record) if record else identity.partition("-")[2] or identity


def ratios(told: Story) -> "Figure":
    """A point with its bounds for each raced cell."""
    cells = told.timed[:MOST_LABELS]
    figure, (axis,) = figures.axes_of(1, 1, height=1.2 + 0.28 * len(cells))
    for number, cell in enumerate(cells):
        timing = cell.timing
        assert timing is not None
        colour = COLOURS[cell.status]
        axis.plot([timing.low, timing.high], [number, number], color=colour, linewidth=2)
        axis.plot([timing.ratio], [number], "o", color=colour)
        axis.plot([told.slowest.get(cell.id, 1.05)], [number], "|", color=figures.GREY, markersize=11)
    axis.axvline(1, color=figures.GREY, linewidth=1)
    names = [f"{_row(cell.id, cell)}, {_column(cell.id, cell)}" for cell in cells]
    axis.set_yticks(range(len(cells)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("today's time over the stored program's (grey tick: its limit)")
    return figure


def memory(told: Story) -> "Figure":
    """Bars of temp MiB: ours, and marks for dense and what was published."""
    found = told.memory[:MOST_LABELS]
    figure, (axis,) = figures.axes_of(1, 1, height=1.6 + 0.26 * len(found))
    for number, its in enumerate(found):
        axis.barh(number, its.ours_mb, color=COLOURS["unchanged"], label="ours" if number == 0 else None)
    for field, mark, colour, label in (
        ("dense_mb", "D", figures.COLOURS[4], "dense"),
        ("published_mb", "|", figures.COLOURS[1], "published"),
    ):
        points = [(getattr(its, field), n) for n, its in enumerate(found) if getattr(its, field)]
        if points:
            axis.plot(*zip(*points, strict=True), mark, color=colour, label=label, markersize=7, mew=2)
    axis.set_xscale("log")
    names = [f"{story.name(its.record)}, {story.shape(its.record)}" for its in found]
    axis.set_yticks(range(len(found)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("temp MiB")
    axis.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=3, frameon=False, fontsize="small")
    return figure


def tokens(told: Story) -> "Figure":
    """Milliseconds and temp MiB against tokens."""
    lines = told.lines[:12]
    figure, axes = figures.axes_of(1, 2, height=4.4)
    for line, colour in zip(lines, figures.cycle(), strict=False):
        counts = [point[0] for point in line.points]
        name = f"{story.name(line.record)}, {line.record.get('dtype')}, {story.operation(line.record)}"
        axes[0].loglog(counts, [point[1] for point in line.points], "o-", color=colour, label=name)
        axes[1].loglog(counts, [point[2] for point in line.points], "o-", color=colour)
    axes[0].set_ylabel("ms a call")
    axes[1].set_ylabel("temp MiB")
    for axis in axes:
        axis.set_xlabel("tokens")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="x-small")
    return figure


def sweeps(told: Story) -> "Figure":
    """A panel a sweep."""
    found = told.sweeps[:12]
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure, axes = figures.axes_of(rows, columns, height=2.7 * rows)
    for axis, sweep in zip(axes, found, strict=False):
        values = [value for value, _ in sweep.points]
        axis.plot(values, [ms for _, ms in sweep.points], "o-", color=COLOURS["unchanged"])
        for value, ms in sweep.points:
            if value == sweep.automatic:
                axis.plot([value], [ms], "o", color=COLOURS["regressed"], mfc="none", markersize=12)
        if sweep.automatic_ms:
            axis.axhline(sweep.automatic_ms, color=COLOURS["regressed"], linestyle="--", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, values)
        axis.minorticks_off()
        axis.set_title(f"{sweep.name}: {story.shape(sweep.record)}", fontsize=8)
    for axis in axes[len(found) :]:
        axis.set_axis_off()
    figure.supylabel("ms a call", fontsize="small")
    return figure


def history(told: Story) -> "Figure":
    """Two figures of up to six cells over the updates."""
    found = [its for its in told.pasts if len(its.stored) > 1][:6]
    figure, axes = figures.axes_of(1, 2, height=4.4)
    for its, colour in zip(found, figures.COLOURS, strict=False):
        records = [(number, record) for number, record in its.stored]
        last = records[-1][0] + 1
        records += [(last, its.now)] if its.now else []
        name = f"{story.name(records[0][1])}, {story.shape(records[0][1])}"
        for axis, field in zip(axes, ("xla_temp_mb", "gemm_fraction"), strict=True):
            points = [(number, record[field]) for number, record in records if record.get(field)]
            if points:
                label = name if axis is axes[0] else None
                axis.plot(*zip(*points, strict=True), "o-", color=colour, label=label)
    axes[0].set_ylabel("temp MiB")
    axes[1].set_ylabel("share of a matmul (moves with the machine)")
    for axis in axes:
        axis.set_xlabel("update (the last point: now)")
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="x-small")
    return figure
