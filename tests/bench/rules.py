"""What an implementation chooses by itself for a cell: the values of its own rules, and the rule in words.

Each value is computed by the function of `moe` that the layer itself asks, so that the words cannot drift from
what runs.
"""

import dataclasses

import jax.numpy as jnp

from moe.blocked import BLOCK_M
from moe.capacity import slots
from moe.chunked import automatic_chunk, automatic_keep_elems, takes_whole
from moe.grouped import BAND_BYTES, bands, ladder, piece_rows
from moe.ragged_dot import automatic_lowering

from .cell import Cell
from .inputs import config_of


@dataclasses.dataclass(frozen=True)
class Rule:
    """One value in force in a cell.

    Attributes:
      name: what it is a value of.
      value: in words or figures.
      why: the rule with the cell's own figures, or that it was given.
    """

    name: str
    value: str
    why: str


def automatic(cell: Cell, name: str) -> int | None:
    """The automatic `chunk` or `block_m` of a cell's shape; None where the implementation has no such value."""
    impl = cell.impl.split(":")[1]
    if name == "chunk" and impl in ("chunked", "concatenated"):
        return automatic_chunk(cell.tokens, config_of(cell))
    return BLOCK_M if name == "block_m" and impl == "blocked" else None


def of(cell: Cell) -> list[Rule]:
    """The values in force in a cell; none for an implementation without any."""
    impl = cell.impl.split(":")[1]
    if impl == "chunked":
        return _chunked(cell)
    if impl == "blocked":
        return _blocked(cell)
    if impl == "concatenated":
        return [_chunk(cell)]
    if impl == "ragged_dot":
        value = cell.lowering or automatic_lowering()
        return [Rule("lowering", value, _given(cell.lowering) or "loop on the CPU, else XLA's own")]
    if cell.impl.startswith("capacity"):
        return [_slots(cell)]
    return []


def _chunked(cell: Cell) -> list[Rule]:
    config = config_of(cell)
    wanted = automatic_chunk(cell.tokens, config) if cell.chunk is None else cell.chunk
    size = piece_rows(wanted, cell.slab_elems, cell.tokens, config)
    rules = [_chunk(cell), _pieces(cell, ladder(size))]
    keep = cell.keep_elems
    most = automatic_keep_elems(jnp.dtype(cell.dtype), cell.slab_elems) if keep is None else keep
    products = 2 * cell.tokens * cell.top_k * cell.d_hidden
    kept = cell.op != "forward" and products <= most
    free = cell.chunk is None and cell.slab_elems is None
    whole = free and takes_whole(cell.tokens, config)
    if cell.op != "forward":
        why = _given(keep) or ("2**26 at most in float32, none in bfloat16")
        said = f"{products:,} elements of gate's and up's products against {most:,} ({why})"
        rules.append(Rule("kept for the backward pass", "yes" if kept else "no, computed again", said))
    if kept:
        rules.append(Rule("hidden columns", f"all {cell.d_hidden} at once", "products are kept"))
    elif whole:
        share, twice = cell.tokens * cell.top_k, 2 * cell.d_hidden * cell.experts
        said = f"tokens x top_k = {share:,} is at least 2 x d_hidden x experts = {twice:,}"
        rules.append(Rule("hidden columns", f"all {cell.d_hidden} at once", said + " (forward)"))
    else:
        rules.append(_bands(cell))
    return rules


def _blocked(cell: Cell) -> list[Rule]:
    wanted = BLOCK_M if cell.block_m is None else cell.block_m
    size = piece_rows(wanted, cell.slab_elems, cell.tokens, config_of(cell))
    why = _given(cell.block_m) or f"{BLOCK_M} rows, as published, whatever the shape"
    return [Rule("block_m", str(wanted), why), _pieces(cell, (size,)), _bands(cell)]


def _chunk(cell: Cell) -> Rule:
    rows, full = cell.tokens * cell.top_k, 256 * cell.experts
    sign = "at least" if rows >= full else "under"
    why = f"tokens x top_k = {rows:,} is {sign} 256 x experts = {full:,}"
    value = automatic(cell, "chunk") if cell.chunk is None else cell.chunk
    return Rule("chunk", str(value), _given(cell.chunk) or why)


def _pieces(cell: Cell, sizes: tuple[int, ...]) -> Rule:
    why = "its halves down to 32, four sizes at most" if len(sizes) > 1 else "one size"
    if cell.slab_elems is not None:
        why += f"; slab_elems={cell.slab_elems} holds {cell.slab_elems // cell.d_hidden} rows"
    return Rule("pieces", ", ".join(map(str, sizes)) + " rows", why)


def _bands(cell: Cell) -> Rule:
    size = jnp.dtype(cell.dtype).itemsize
    number = bands(cell.d_hidden, BAND_BYTES // size)
    why = f"a band's row holds at most {BAND_BYTES} bytes in the forward pass"
    return Rule("hidden columns", f"{number} bands of {cell.d_hidden // number}", why)


def _slots(cell: Cell) -> Rule:
    config = config_of(cell)
    why = f"tokens x top_k x factor {config.capacity_factor} / experts, rounded up"
    return Rule("slots an expert", str(slots(cell.tokens, config)), why)


def _given(value: object) -> str:
    return "" if value is None else "given in the cell's id"
