"""The report people look at: one HTML file that holds all it needs. Also the verb `report`: write it again."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import atomic, baseline, drawn, home, story, verdict_json, wording
from .errors import BenchError
from .gate import limits
from .gate.verdict import WORST_FIRST, CellVerdict
from .story import Story

TEMPLATE = Path(__file__).with_name("page.html")
NAME = "index.html"
HEADINGS = ("verdict", "cell", "temp MiB", "side by side", "time ms", "of matmul", "why")
SORTED_BY = ("xla_temp_mb", None, "median_ms", "gemm_fraction")
"""Field of today's record that sorts a column after the cell; the third is the ratio of times."""


def html(told: Story, figures: tuple[drawn.Drawn, ...] | None = None) -> str:
    """The page."""
    import jinja2

    verdict = told.verdict
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        headline=wording.headline(verdict) if verdict else "Nothing was compared",
        tone=_tone(told),
        summary=" ".join(_summary(told)),
        faults=[*(verdict.faults if verdict else ()), *told.faults],
        notes=list(_notes(told)),
        headings=HEADINGS,
        rows=[{"status": cell.status, "columns": _columns(cell)} for cell in told.cells],
        statuses=[status for status in WORST_FIRST if verdict and verdict.count(status)],
        drawings=drawn.all_of(told) if figures is None else figures,
        updates=told.updates[::-1],
        environment=[(name, "none" if value is None else value) for name, value in told.environment.items()],
    )


def write(told: Story, reports: Path) -> None:
    """Write index.html into the reports' folder, atomically."""
    atomic.write(reports / NAME, html(told).encode())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "--reports", type=Path, default=home.ROOT / "reports", help="folder of reports (default: reports)"
    )
    parser.add_argument("--baselines", type=Path, default=baseline.ROOT, help="folder of the baselines")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write the figures as SVG files here too")


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 2 where a file cannot be read."""
    try:
        path = args.reports / "verdict.json"
        verdict, code = verdict_json.read(path) if path.exists() else (None, 0)
        settings = limits.read(home.settings(home.ROOT))
        told = story.tell(verdict, code, baselines=args.baselines, reports=args.reports, settings=settings)
        figures = drawn.all_of(told)
        atomic.write(args.reports / NAME, html(told, figures).encode())
        print(f"written: {args.reports / NAME}")
        for figure in figures if args.figures else ():
            if figure.svg:
                # A file of its own has no page around it, whose ink it could take.
                svg = figure.svg.replace("currentColor", "#57606a")
                atomic.write(args.figures / f"{figure.name}.svg", svg.encode())
                print(f"written: {args.figures / figure.name}.svg")
    except BenchError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    return 0


def _tone(told: Story) -> str:
    if told.verdict is None or told.exit_code:
        return "bad"
    return "good"


def _summary(told: Story) -> Iterator[str]:
    verdict = told.verdict
    if verdict is None:
        yield "There is no verdict: run pytest tests/bench --benchmark-compare."
        return
    yield f"{wording.compared(verdict)}, with {verdict.baseline}."
    yield f"Exit code {told.exit_code}."
    if verdict.partial:
        yield f"PARTIAL: {wording.PARTIAL}."


def _notes(told: Story) -> Iterator[str]:
    if told.verdict is not None:
        yield from wording.accepted(told.verdict)
        yield from wording.drift(told.verdict)
        yield from told.verdict.notes
        yield from (f"{what}: {command}" for what, command in wording.accept(told.verdict))


def _columns(cell: CellVerdict) -> list[tuple[str, Any]]:
    """(shown, sorted by) of each column."""
    today = cell.today or cell.stored or {}
    keys = [today.get(field, "") if field else "" for field in SORTED_BY]
    keys[1] = cell.timing.ratio if cell.timing else ""
    figures = [
        (text, "" if key is None else key) for text, key in zip(wording.figures(cell), keys, strict=True)
    ]
    why = "; ".join(cell.reasons)
    return [(wording.status(cell), WORST_FIRST.index(cell.status)), (cell.id, cell.id), *figures, (why, why)]
