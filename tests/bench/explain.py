"""The verb `explain`: everything that is known about one cell, and the command that reruns it alone."""

import argparse
import difflib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import baseline, home, past
from . import manifest as manifests
from .cell import DTYPES, Cell
from .errors import BaselineError, BenchError, GridError
from .published_import import FILE as PUBLISHED
from .published_import import cell_of

FOLDER = Path(__file__).resolve().parent
MIB = 2**20
ITEM_BYTES = dict(zip(DTYPES, (4, 2), strict=True))
ERRORS = {
    "rel_err_out": "outputs",
    "rel_err_grad_params": "parameter gradients",
    "rel_err_grad_x": "input gradients",
}
OPTIONS = {
    **{"suite": "suites", "impl": "impls", "dtype": "dtypes", "op": "ops"},
    **{name: name for name in ("tokens", "experts", "top_k", "skew", "d_model", "d_hidden")},
    **{name: name for name in ("chunk", "block_m", "slab_elems", "keep_elems", "lowering")},
}
"""Field of a cell -> the option of pytest that sets it. What its suite sweeps has another (`SWEEPS`)."""
SWEEPS = {
    "chunk": ("chunk", "chunks"),
    "block_m": ("block_m", "block_ms"),
    "maxtok": ("tokens", "maxtok_stop"),
}
"""Suite -> the field that it sweeps, and the option that lists the values."""

Record = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("cell", metavar="CELL", help="its id, as the reports and --collect-only -q print it")
    parser.add_argument(
        "--baselines",
        metavar="DIR",
        type=Path,
        default=baseline.ROOT,
        help="folder of the baselines (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints what is known. Returns 0, or 2 for an id that is none, or that nothing knows."""
    try:
        print("\n".join(lines(args.cell, args.baselines)))
    except BenchError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    return 0


def lines(identity: str, root: Path) -> list[str]:
    """All that is known, by section.

    Raises:
      GridError: no grid, baseline or published result holds the cell; the message has the nearest id.
      BenchError: the limits in pyproject.toml cannot be read.
    """
    grids, published = _grids(), _published(root)
    stored = {folder: _updates(folder) for folder in _folders(root)}
    known = {i for entries in grids.values() for i in entries} | published.keys()
    known |= {i for found in stored.values() if not isinstance(found, str) for i in _ids(found)}
    if identity not in known:
        raise GridError(_unknown(identity, known))
    cell = _cell(identity, published)
    pasts = {
        folder: found if isinstance(found, str) else _measured(found, identity)
        for folder, found in stored.items()
    }
    out = [identity, "", *_shapes(cell), *_flops(cell), *_sizes(cell)]
    for folder, found in pasts.items():
        out += _past(folder.name, found)
    out += _beside_published(published.get(identity), pasts)
    out += _limits(cell, grids)
    return [
        *out,
        *_again(cell, grids, compared=any(found for found in pasts.values() if not isinstance(found, str))),
    ]


def command(cell: Cell, grids: list[str], compared: bool) -> str:
    """The command that runs this cell and no other; with `compared`, against its baseline.

    By the name of its test: `--only` takes every id that holds the words, `train_step_donated` for `train_step`.

    Args:
      cell: to run.
      grids: that hold it; where there is none, options that replace a grid's values make it.
      compared: whether a baseline may hold it.
    """
    test = f"{_here()}/test_{cell.suite}.py::test_{cell.suite}[{cell.id}]"
    words = ["pytest", shlex.quote(test)]
    if not grids:
        words += _made_by(cell)
    elif "default" not in grids:
        words.append(f"--grid={grids[0]}")
    return " ".join([*words, "--benchmark-compare"] if compared else words)


def _made_by(cell: Cell) -> list[str]:
    field, option = SWEEPS.get(cell.suite, ("", ""))
    options = OPTIONS | ({field: option} if field else {})
    values = {options[name]: getattr(cell, name) for name in options}
    return [
        f"--{name.replace('_', '-')}={shlex.quote(str(value))}"
        for name, value in values.items()
        if value is not None
    ]


def _grids() -> dict[str, dict[str, Any]]:
    """Grid -> its entries by id, on this machine's backend."""
    import jax

    from . import grid

    backend = jax.default_backend()
    return {
        name: {entry.cell.id: entry for entry in grid.build(name, backend=backend)} for name in grid.GRIDS
    }


def _published(root: Path) -> dict[str, Record]:
    if not (root / PUBLISHED).is_file():
        return {}
    return {
        identity: entry["extra_info"] for identity, entry in baseline.load(root / PUBLISHED).records.items()
    }


def _folders(root: Path) -> list[Path]:
    found = sorted(root.iterdir()) if root.is_dir() else []
    return [folder for folder in found if (folder / manifests.FILE).is_file()]


def _updates(folder: Path) -> tuple[past.Update, ...] | str:
    """The updates of a folder, or why they cannot be trusted: one damaged folder hides no other."""
    try:
        return past.updates(folder)
    except BaselineError as fault:
        return str(fault)


def _ids(updates: tuple[past.Update, ...]) -> set[str]:
    return {identity for update in updates for identity in update.records or ()}


def _measured(updates: tuple[past.Update, ...], identity: str) -> list[tuple[past.Update, Record]]:
    """The updates that measured the cell: those narrowed to others keep its record as it was."""
    found: list[tuple[past.Update, Record]] = []
    for update in updates:
        record = (update.records or {}).get(identity)
        if record is not None and not (found and found[-1][1] == record):
            found.append((update, record))
    return found


def _cell(identity: str, published: Mapping[str, Record]) -> Cell:
    try:
        return Cell.parse(identity)
    except GridError:
        # What was published of another code has an id of its own.
        return cell_of(dict(published[identity]))


def _unknown(identity: str, known: set[str]) -> str:
    near = difflib.get_close_matches(identity, sorted(known), n=3, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else "."
    others = f" Near to it too: {', '.join(near[1:])}." if near[1:] else ""
    return (
        f"CELL={identity!r} is in no grid, baseline or published result{hint}{others} "
        f"To list a grid: pytest {_here()} --grid default --collect-only -q"
    )


def _shapes(cell: Cell) -> Iterator[str]:
    tokens, experts, d, h = cell.tokens, cell.experts, cell.d_model, cell.d_hidden
    matrices, router, rows = 3 * experts * d * h, d * experts, tokens * cell.top_k
    x = _mib(tokens * d * ITEM_BYTES[cell.dtype])
    parameters = _mib(matrices * ITEM_BYTES[cell.param_dtype] + router * ITEM_BYTES["float32"])
    share = f"{rows / experts:g} an expert on an even split"
    yield "shapes"
    yield _row("x, and y", f"({tokens}, {d}) {cell.dtype}, {x} each")
    yield _row("router", f"({d}, {experts}) float32")
    yield _row("gate, and up", f"({experts}, {d}, {h}) {cell.param_dtype}")
    yield _row("down", f"({experts}, {h}, {d}) {cell.param_dtype}")
    yield _row("parameters", f"{matrices + router:,}, {parameters}")
    yield _row("assignments", f"{rows:,} (tokens x top_k), {share}; skew {cell.skew:g}")


def _flops(cell: Cell) -> Iterator[str]:
    products = "three products" if cell.op == "forward" else "seven products, backward ones included"
    yield "flops of a call"
    yield _row("useful", f"{cell.useful_flops / 1e9:.2f} Gflop: the routed experts' {products}")
    if cell.impl.startswith("dense"):
        every = cell.useful_flops * cell.experts / cell.top_k
        yield _row("of dense", f"{every / 1e9:.2f} Gflop: every expert on every token")


def _sizes(cell: Cell) -> Iterator[str]:
    from . import rules

    found = rules.of(cell)
    yield "sizes in force"
    for rule in found:
        yield _row(rule.name, f"{rule.value}: {rule.why}")
    if not found:
        yield "  it has none to choose"


def _past(folder: str, found: list[tuple[past.Update, Record]] | str) -> Iterator[str]:
    yield f"baseline {folder}"
    if isinstance(found, str):
        yield f"  cannot be trusted: {found}"
        return
    if not found:
        yield "  has no record of it"
        return
    for number, (update, record) in enumerate(found):
        identity = record["id"]
        yield f"  {update.date[:10]}  {_figures(record)}"
        yield f"              {update.file}, by {update.by}: {update.reason}"
        if update.accept_slower and number and update.changed.get(identity) in ("regressed", "inconclusive"):
            yield f"              {update.changed[identity]}, accepted: {update.accept_slower}"
    record = found[-1][1]
    sizes = {name: record.get(f"{name}_bytes") for name in ("argument", "output", "alias", "temp")}
    errors = {words: record.get(name) for name, words in ERRORS.items()}
    yield _row("bytes now", ", ".join(f"{name} {size:,}" for name, size in sizes.items() if size is not None))
    yield _row(
        "relative errors", ", ".join(f"{words} {e:.1e}" for words, e in errors.items() if e is not None)
    )
    if record.get("flops") is not None:
        yield _row("compiler's flops", f"{record['flops'] / 1e9:.2f} Gflop (it counts a loop's body once)")
    yield _row("program", str(record.get("program") or "none stored"))


def _figures(record: Record) -> str:
    forms = {"xla_temp_mb": "temp {:.2f} MiB", "median_ms": "{:.1f} ms", "gemm_fraction": "{:.0%} of matmul"}
    said = [form.format(record[name]) for name, form in forms.items() if record.get(name) is not None]
    return ", ".join(said) or "no figures"


def _beside_published(
    theirs: Record | None, pasts: Mapping[Path, list[tuple[past.Update, Record]] | str]
) -> Iterator[str]:
    yield "published"
    if theirs is None:
        yield "  no published result holds it"
        return
    rejected = " (the variant that was rejected)" if theirs["code"] == "rejected" else ""
    yield _row("theirs", f"{_figures(theirs)}; run {theirs['run']}{rejected}")
    for folder, found in pasts.items():
        ours = found[-1][1].get("xla_temp_mb") if found and not isinstance(found, str) else None
        if ours is not None and theirs.get("xla_temp_mb"):
            yield _row(
                "ours over theirs", f"x{ours / theirs['xla_temp_mb']:.2f} of the temp MiB ({folder.name})"
            )


def _limits(cell: Cell, grids: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    from .gate import limits

    settings = limits.read(home.settings(home.ROOT))
    yield "limits of the gate"
    for metric in limits.DEFAULTS:
        limit = limits.of(settings, cell.id, metric)
        least = f" and {limit.least} bytes" if limit.least else ""
        why = f": {limit.reason}" if limit.reason else ""
        yield _row(metric, f"{limit.share * 100:.3g} %{least}{why}")
    for name, entries in grids.items():
        if cell.id in entries and entries[cell.id].skip:
            yield _row("skipped", f"in grid {name}: {entries[cell.id].skip}")


def _again(cell: Cell, grids: Mapping[str, Mapping[str, Any]], compared: bool) -> Iterator[str]:
    within = [name for name, entries in grids.items() if cell.id in entries]
    yield "grids that hold it"
    yield f"  {', '.join(within) or 'none'}"
    yield "to run it alone"
    yield f"  {command(cell, within, compared)}"


def _row(name: str, text: str) -> str:
    return f"  {name:18} {text}"


def _mib(size: int) -> str:
    return f"{size / MIB:.2f} MiB"


def _here() -> str:
    """The suite's folder as a word of a command, relative to the working folder where it lies in it."""
    try:
        return FOLDER.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return os.fspath(FOLDER)
