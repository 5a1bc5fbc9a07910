"""What the verbs that time side by side found, drawn. Nothing here measures.

Every figure is drawn from the dataclasses that are written to the verb's JSON file, as SVG beside it.
"""

import importlib.util
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .errors import BenchError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .growth import Point
    from .roofline import Reached
    from .sizes import Size

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by most colour-blind readers too (Okabe and Ito 2008, "Color Universal Design")."""
GREY = "#888888"


def require() -> None:
    """Raises BenchError where nothing can be drawn: said before minutes of measuring, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("drawing needs matplotlib: pip install matplotlib, or give --no-draw")


def svg(figure: "Figure") -> bytes:
    """The figure as an SVG file: the same bytes for the same figures."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "moe-bench"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def roofline(found: Sequence["Reached"]) -> "Figure":
    """A bar a cell: its bound, the parts beside it and the rest, as shares of the bound."""
    from .roofline import where

    figure, axes = axes_of(1, 1, height=1.2 + 0.34 * len(found))
    (axis,) = axes
    names: list[str] = []
    for row, reached in enumerate(found):
        left = 0.0
        for name, value in where(reached).items():
            if name.startswith(" "):  # already in the bound
                continue
            if name not in names:
                names.append(name)
            # A rest below zero is what caches save: the parts were timed alone.
            share = max(value, 0) / reached.bound_ms
            label = name if row == 0 or name not in _labels(axis) else None
            axis.barh(row, share, left=left, color=COLOURS[names.index(name)], label=label)
            left += share
        axis.plot([reached.over_bound], [row], "k|", markersize=12, label="ours" if row == 0 else None)
    axis.axvline(1, color=GREY, linewidth=1)
    axis.set_yticks(range(len(found)), [_short(reached.cell) for reached in found])
    axis.invert_yaxis()
    axis.set_xlabel("time over the bound (median)")
    axis.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=3, frameon=False, fontsize="small")
    return figure


def growth(found: Sequence["Point"]) -> "Figure":
    """Milliseconds and temp MiB against tokens, both axes logarithmic, a line for each series."""
    figure, axes = axes_of(1, 2, height=4)
    series: dict[str, list[Any]] = {}
    for point in found:
        series.setdefault(_short(point.cell, tokens=False), []).append(point)
    for (name, points), colour in zip(series.items(), cycle(), strict=False):
        tokens = [point.tokens for point in points]
        axes[0].loglog(tokens, [point.ms for point in points], "o-", color=colour, label=name)
        axes[0].loglog(tokens, [points[0].ms * n / tokens[0] for n in tokens], ":", color=colour, linewidth=1)
        axes[1].loglog(tokens, [point.temp_bytes / 2**20 for point in points], "o-", color=colour)
    axes[0].set_ylabel("ms a call (dotted: the first point's cost a token)")
    axes[1].set_ylabel("temp MiB")
    ticks = sorted({point.tokens for point in found})
    for axis in axes:
        axis.set_xlabel("tokens")
        axis.set_xticks(ticks, ticks, rotation=30)
        axis.minorticks_off()
    axes[0].legend(frameon=False, fontsize="small")
    return figure


def sizes(found: Sequence["Size"]) -> "Figure":
    """A panel a cell: time over the automatic choice against temp MiB, the frontier joined by a line."""
    cells = list(dict.fromkeys(size.auto for size in found))
    columns = min(4, len(cells))
    figure, axes = axes_of(-(-len(cells) // columns), columns, height=2.9 * -(-len(cells) // columns))
    for axis, cell in zip(axes, cells, strict=False):
        its = [size for size in found if size.auto == cell]
        front = sorted((size for size in its if size.frontier), key=lambda size: size.temp_bytes)
        axis.plot([s.temp_bytes / 2**20 for s in front], [1 / s.cost for s in front], "-", color=GREY)
        for kind, marker, colour in (("chunk", "o", COLOURS[0]), ("slab_elems", "^", COLOURS[2])):
            for size in its:
                if getattr(size, kind):
                    at = size.temp_bytes / 2**20, 1 / size.cost
                    axis.plot(*at, marker, color=colour)
                    axis.annotate(f" {getattr(size, kind)}", at, fontsize="x-small")
        axis.plot(its[0].temp_bytes / 2**20, 1, "*", color=COLOURS[1], markersize=13)
        axis.set_title(_short(cell), fontsize="small")
    for axis in axes[len(cells) :]:
        axis.set_axis_off()
    figure.supxlabel("temp MiB")
    figure.supylabel("time over auto (star): circles chunk, triangles slab_elems", fontsize="small")
    return figure


def axes_of(rows: int, columns: int, height: float) -> tuple["Figure", list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def cycle() -> Iterable[str]:
    while True:
        yield from COLOURS


def _labels(axis: Any) -> list[str]:
    return list(axis.get_legend_handles_labels()[1])


def _short(cell: str, tokens: bool = True) -> str:
    """A cell's id in a figure, without what all of the verbs' cells share."""
    _, dtype, *rest = cell.removesuffix("-keep0").split("-")
    values = {part[0]: part[1:] for part in rest if part[1:].replace(".", "").isdigit()}  # not train_step
    words = [dtype, f"{values['t']} x {values['e']}" if tokens else f"{values['e']} experts"]
    if values["k"] != "2" or values["h"] != "1024":
        words.append(f"top_k {values['k']}, hidden {values['h']}")
    return ", ".join((*words, "train step" if "train_step" in cell else "forward"))
