"""The verbs `published` (a run beside the published results) and `import-published` (how they got here)."""

import argparse
import sys
from pathlib import Path
from typing import Any

from . import baseline
from .errors import BenchError
from .published_cells import HOW_TO_RUN, compare
from .published_import import FILE, import_published
from .published_table import render

__all__ = [
    "add_arguments",
    "add_import_arguments",
    "compare",
    "import_published",
    "render",
    "run",
    "run_import",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb `published`."""
    parser.add_argument(
        "file",
        metavar="RUN.json",
        nargs="?",
        type=Path,
        help="a saved run; by default the newest of run.json and .benchmarks/",
    )
    parser.add_argument(
        "--baselines",
        metavar="DIR",
        type=Path,
        default=baseline.ROOT,
        help="where the imported results are (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints a run beside the published results. Returns 0, or 2 where there is nothing sound to compare."""
    try:
        print(report(args.file or newest_saved(Path.cwd()), args.baselines), end="")
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb `import-published`."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        type=Path,
        help="the published results file: JSON with device, config and results",
    )
    parser.add_argument(
        "--baselines",
        metavar="DIR",
        type=Path,
        default=baseline.ROOT,
        help="where to put them (default: %(default)s)",
    )


def run_import(args: argparse.Namespace) -> int:
    """Imports the published results. Returns 0, or 2 where the source or the target is at fault."""
    try:
        path = import_published(args.source, args.baselines)
        print(f"{path}: {len(baseline.load(path).records)} records")
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def report(path: Path, root: Path) -> str:
    """The text that `run` prints. Raises BenchError for a missing or damaged file, or no cell in common."""
    way_out = f"import the published results with: python -m {__package__} import-published SOURCE"
    published = baseline.load(root / FILE, way_out)
    document = baseline.read(path, HOW_TO_RUN)
    rows = compare(document, published, path=path)
    if all(row.state == "absent" for row in rows):
        raise BenchError(f"{path} holds none of the {len(rows)} published cells; {HOW_TO_RUN}")
    environment = document["moe_bench"]["environment"]
    lines = [f"Published: {_where(published.environment)}", f"Run: {path}, {_where(environment)}"]
    if environment["backend"] != published.environment["backend"]:
        lines.append("The backends differ: neither bytes nor times compare.")
    return "\n".join(lines) + "\n\n" + render(rows)


def newest_saved(folder: Path) -> Path:
    """The newest run that the user saved in a folder: run.json, or in pytest-benchmark's own storage."""
    saved = [path for pattern in ("run.json", ".benchmarks/*/*.json") for path in folder.glob(pattern)]
    if not saved:
        raise BenchError(f"no saved run in {folder}: neither run.json nor .benchmarks/*/*.json; {HOW_TO_RUN}")
    return max(saved, key=lambda path: (path.stat().st_mtime_ns, path.name))


def _where(environment: dict[str, Any]) -> str:
    cpu = f", {environment['cpu']}, {environment['cores']} cores" if environment.get("cpu") else ""
    return f"{environment['backend']}{cpu}, JAX {environment['jax']}, Python {environment.get('python')}"
