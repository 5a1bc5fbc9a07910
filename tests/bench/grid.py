"""The grids: named tables of cells, the options that override them, and the limits that skip some.

Defaults are those of the published configuration. A skip is a record with its reason, never an absence.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from moe.blocked import BLOCK_M
from moe.ragged_dot import LOWERINGS
from moe.registry import IMPLEMENTATIONS, Implementation

from . import home, own, rejected
from .cell import DTYPES, OPS, SUITES, Cell, one_of
from .errors import GridError

DENSE, RAGGED = "dense:auto:sorted", "dropless:ragged_dot:sorted"
CHUNKED, BLOCKED, CAPACITY = "dropless:chunked:sorted", "dropless:blocked:sorted", "capacity:auto:sorted"


@dataclasses.dataclass(frozen=True)
class Source:
    """A block of a grid: the product of its lists. Field names are the published configuration's.

    `impls` None means every registered implementation but those in `but`.
    """

    suites: tuple[str, ...] = ("layer",)
    dtypes: tuple[str, ...] = ("float32",)
    tokens: tuple[int, ...] = (1024,)
    experts: tuple[int, ...] = (8,)
    top_k: tuple[int, ...] = (2,)
    skew: tuple[float, ...] = (0.0,)
    d_model: int = 512
    d_hidden: int = 1024
    impls: tuple[str, ...] | None = None
    but: tuple[str, ...] = ()
    ops: tuple[str, ...] = ("forward", "train_step")
    block_m: int = BLOCK_M
    block_ms: tuple[int, ...] = (32, 64, 128)
    chunks: tuple[int, ...] = (128, 256, 512, 1024)
    dense_limit: int = 524288
    ragged_limit: int | None = None  # 262144 on an accelerator, 131072 on the CPU, as published
    maxtok_start: int = 32768
    maxtok_stop: int = 2097152
    slab_elems: int | None = None
    keep_elems: int | None = None
    lowering: str | None = None
    rejected: bool = False


DONATED = ("forward", "train_step_donated")
# What was published recomputes in its backward pass.
AS_PUBLISHED: dict[str, Any] = {"keep_elems": 0}
RAGGED_LIMIT = {"cpu": 131072}
GRIDS: dict[str, tuple[Source, ...]] = {
    "smoke": (
        Source(ops=("forward",)),
        Source(impls=(CHUNKED,), ops=("train_step_donated",)),
    ),
    "default": (
        Source(dtypes=DTYPES, tokens=(1024, 4096), experts=(8, 64), but=(DENSE, RAGGED), ops=DONATED),
        # One dense train step at 4096 x 64 is 2.5 Tflop: the larger shapes of these two are in `published`.
        Source(dtypes=DTYPES, impls=(DENSE, RAGGED), ops=DONATED),
    ),
    # Cells of 1 to 30 ms, on which the gate proves itself (`aa`, `power`).
    "aa": (
        Source(
            dtypes=DTYPES,
            tokens=(512, 1024),
            d_model=128,
            d_hidden=256,
            but=(RAGGED,),
            ops=DONATED,
        ),
    ),
    # The published runs, in their order (cpu_A to cpu_E, cpu_chunk_v1 and v2), then the rest of `default`.
    "published": (
        Source(tokens=(1024, 4096), ragged_limit=262144, **AS_PUBLISHED),
        Source(tokens=(16384,), ragged_limit=262144, **AS_PUBLISHED),
        Source(tokens=(4096,), experts=(64,), ragged_limit=131072, **AS_PUBLISHED),
        Source(
            tokens=(4096,),
            top_k=(1, 4),
            skew=(0.0, 0.9),
            impls=(CHUNKED, BLOCKED, CAPACITY),
            **AS_PUBLISHED,
        ),
        Source(
            dtypes=("bfloat16",),
            tokens=(4096,),
            impls=(CHUNKED, BLOCKED, CAPACITY, DENSE),
            **AS_PUBLISHED,
        ),
        Source(suites=("chunk",), tokens=(4096, 16384), experts=(8, 64), chunks=(256, 512), **AS_PUBLISHED),
        Source(suites=("chunk",), tokens=(1024, 4096, 16384), experts=(8, 64), rejected=True),
        Source(dtypes=DTYPES, tokens=(1024, 4096), experts=(8, 64), impls=(DENSE, RAGGED), ops=DONATED),
    ),
}
PLURAL = ("suites", "dtypes", "tokens", "experts", "top_k", "skew", "impls", "ops", "block_ms", "chunks")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A cell of a grid with what applies to it: why it is skipped, or None, and where maxtok starts."""

    cell: Cell
    skip: str | None = None
    maxtok_start: int = 0


def implementation(impl: str) -> Implementation:
    """The implementation of an id, the rejected variant and a user's own included."""
    if own.is_own(impl):
        return own.load(impl)
    return Implementation(impl, rejected.concatenated) if impl == rejected.ID else IMPLEMENTATIONS[impl]


def whole_id(part: str) -> str:
    """`dropless:chunked:sorted` for `chunked`, where one implementation alone is meant by it; or own.whole_id."""
    known = (*IMPLEMENTATIONS, rejected.ID)
    meant = [identity for identity in known if part in identity.split(":")[:2]]
    return meant[0] if len(meant) == 1 else part if part in known else own.whole_id(part) or part


def build(
    name: str,
    overrides: dict[str, Any] | None = None,
    backend: str = "cpu",
    grids: Mapping[str, tuple[Source, ...]] | None = None,
) -> list[Entry]:
    """The cells of a grid in a fixed order, cells that share inputs side by side, each once.

    Args:
      name: of `grids`.
      overrides: fields of Source that replace the grid's own, lists for PLURAL ones; impls also by a word.
      backend: decides the automatic ragged limit.
      grids: GRIDS unless a project has grids of its own (`own_grids.read`).

    Raises:
      GridError: an unknown name, a value out of range, or no cell left.
    """
    overrides, grids = dict(overrides or {}), grids or GRIDS
    one_of("grid", name, grids)
    if "impls" in overrides:
        overrides["impls"] = tuple(whole_id(part) for part in overrides["impls"])
    sources = [dataclasses.replace(source, **checked(overrides, source)) for source in grids[name]]
    entries: dict[str, Entry] = {}
    for source in sources:
        for cell in _cells(source):
            entry = Entry(cell, _skip(cell, source, backend), source.maxtok_start)
            entries.setdefault(cell.id, entry)
    if not entries:
        given = ", ".join(f"--{key.replace('_', '-')}" for key in overrides) or "no options"
        raise GridError(f"grid {name} with {given} holds no cell; --collect-only -q lists what a grid holds")
    # Larger shapes last; within a shape those with an own reference (capacity) after those that share dense's.
    return sorted(
        entries.values(),
        key=lambda e: (e.cell.tokens * e.cell.experts, *map(str, e.cell.inputs), _rank(e.cell)),
    )


def _rank(cell: Cell) -> bool:
    return cell.impl.startswith("capacity")


def checked(overrides: dict[str, Any], source: Source) -> dict[str, Any]:
    """Fields that replace those of a source, as they are. Raises GridError for what cannot stand there."""
    known = {
        "suites": SUITES,
        "dtypes": DTYPES,
        "ops": OPS,
        "impls": (*IMPLEMENTATIONS, rejected.ID),
        "lowering": LOWERINGS,
    }
    for field, value in overrides.items():
        for item in value if field in PLURAL else (value,):
            if field in known and not (field == "impls" and own.is_own(item)):
                one_of(field, item, known[field])
        if field in PLURAL and len(set(value)) != len(value):
            raise GridError(f"{field}={','.join(map(str, value))} names a value twice; give each once")
    if overrides.get("maxtok_start", source.maxtok_start) > overrides.get("maxtok_stop", source.maxtok_stop):
        raise GridError("maxtok_start is more than maxtok_stop; the search goes up from the one to the other")
    return overrides


def _impls(source: Source) -> tuple[str, ...]:
    if source.rejected and source.impls is None:
        return (rejected.ID,)
    if source.impls is not None:
        return source.impls
    # What a user's packages declare joins the user's grids; this repository's are the same on every machine.
    declared = own.installed().values() if home.INSTALLED else ()
    return (*(impl for impl in IMPLEMENTATIONS if impl not in source.but), *declared)


def _cells(source: Source) -> list[Cell]:
    cells = []
    axes = (source.suites, source.dtypes, source.tokens, source.experts, source.top_k, source.skew)
    for suite, dtype, listed, experts, top_k, skew in itertools.product(*axes):
        tokens = source.maxtok_stop if suite == "maxtok" else listed
        for impl, op in itertools.product(_impls(source), source.ops):
            takes = implementation(impl).tuning
            base: dict[str, Any] = {}
            for name in ("slab_elems", "keep_elems", "lowering"):
                if getattr(source, name) is not None and name in takes:
                    base[name] = getattr(source, name)
            if op == "forward":  # which keeps nothing
                base.pop("keep_elems", None)
            if source.block_m != BLOCK_M and "block_m" in takes and suite != "block_m":
                base["block_m"] = source.block_m
            sweeps: list[dict[str, Any]] = [{}]
            if suite in ("chunk", "block_m"):
                values = source.chunks if suite == "chunk" else source.block_ms
                sweeps = [{suite: value} for value in values] if suite in takes else []
            widths = {"d_model": source.d_model, "d_hidden": source.d_hidden}
            tuned = [{**widths, **base, **sweep} for sweep in sweeps]
            cells += [Cell(suite, impl, dtype, tokens, experts, top_k, op, float(skew), **t) for t in tuned]
    return cells


def _skip(cell: Cell, source: Source, backend: str) -> str | None:
    if cell.suite == "maxtok":
        return None
    size = cell.tokens * cell.experts
    if cell.impl == DENSE and size > source.dense_limit:
        return f"tokens x experts = {size} is over dense_limit={source.dense_limit}"
    limit = source.ragged_limit or RAGGED_LIMIT.get(backend, 262144)
    if cell.impl == RAGGED and size > limit:
        return f"tokens x experts = {size} is over ragged_limit={limit}"
    return None
