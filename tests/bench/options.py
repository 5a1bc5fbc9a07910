"""The options: what pytest takes for the grid and the run, each once."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .cell import one_of
from .errors import GridError

TEXTS = ("suites", "dtypes", "impls", "ops")
INTEGERS = ("tokens", "experts", "top_k", "block_ms", "chunks")
SINGLE = (
    *("d_model", "d_hidden", "block_m", "dense_limit", "ragged_limit"),
    *("maxtok_start", "maxtok_stop", "slab_elems", "keep_elems", "lowering"),
)
GATE = ("on", "strict", "warn", "off")
DEVICES = ("cpu", "cuda", "tpu")
AGAINST = ("program", "accepted")
HELP = {
    "suites": "layer, chunk, block_m, maxtok",
    "dtypes": "of x and of the products: float32, bfloat16",
    "tokens": "rows of x",
    "experts": "number of experts",
    "top_k": "experts a token is sent to",
    "skew": "share of the tokens that are sent to expert 0, 0 to 1",
    "d_model": "width of x (published: 512)",
    "d_hidden": "width of an expert (published: 1024)",
    "impls": "implementation ids, or their middle or first word: chunked, blocked, ragged_dot, capacity, dense; or "
    "your own: package.module:function",
    "ops": "forward, train_step, train_step_donated",
    "block_m": "rows of a block in blocked (published: 64)",
    "block_ms": "sweep of suite block_m (published: 32,64,128)",
    "chunks": "sweep of suite chunk (published: 128,256,512,1024)",
    "dense_limit": "dense is skipped over this many tokens x experts (published: 524288)",
    "ragged_limit": "the same for ragged_dot (published: 262144; on the CPU 131072)",
    "maxtok_start": "where suite maxtok starts doubling (published: 32768)",
    "maxtok_stop": "and where it stops (published: 2097152)",
    "slab_elems": "most hidden elements in flight (default: each implementation's own rule)",
    "keep_elems": "most elements of products kept for the backward pass (default: chunked's own rule)",
    "lowering": "of ragged_dot's products: loop, or xla, XLA's own (default: loop on the CPU)",
}


class Once(argparse.Action):
    """Store a value; a second one for the same option is an error, not a silent override."""

    def __call__(self, parser, namespace, values, option_string=None):
        seen = namespace.__dict__.setdefault("_bench_seen", set())
        if self.dest in seen:
            raise pytest.UsageError(
                f"{option_string} is given twice; give it once, values separated by commas"
            )
        seen.add(self.dest)
        setattr(namespace, self.dest, values)


@dataclasses.dataclass(frozen=True)
class Run:
    """How a run behaves; the grid itself is `grid` with `overrides`."""

    grid: str
    overrides: dict[str, Any]
    seconds: float
    cores: int | None
    check: bool
    device: str | None
    gate: str
    baselines: Path | None
    maxtok_memory: int | None
    only: str | None
    changed_only: bool
    resume: bool
    gate_seconds: float
    cell_limit: float
    all_programs: bool
    against: str
    against_jax: str | None
    reports: Path | None
    programs: Path | None
    accepted: str | None
    page: bool


def add(parser: pytest.Parser) -> None:
    """Declare the options, all strings: they are read by `read`, so that errors are ours."""
    group = parser.getgroup("moe bench", "moe bench: the benchmark grid and its gate")
    option = group.addoption
    option(
        "--grid",
        action=Once,
        help="smoke, default, published, or one of [[tool.moe-bench.grids]] in pyproject.toml (default: default)",
    )
    for name in (*TEXTS, *INTEGERS, "skew", *SINGLE):
        many = "" if name in SINGLE else ", separated by commas"
        option(_flag(name), action=Once, dest=f"bench_{name}", help=HELP[name] + many)
    option(
        "--no-check",
        action="store_true",
        dest="bench_no_check",
        help="measure without asserting; never saved",
    )
    option("--device", action=Once, dest="bench_device", help="cpu, cuda or tpu (default: what JAX chooses)")
    option("--bench-seconds", action=Once, help="time budget of a cell's timed rounds (default: 2)")
    option("--bench-cores", action=Once, help="physical cores to pin to (default: all this process may use)")
    option(
        "--baselines",
        action=Once,
        dest="bench_baselines",
        help="folder of the baselines (default: baselines)",
    )
    option(
        "--gate",
        action=Once,
        dest="bench_gate",
        help="on; strict: a partial run fails too; warn: tell the verdict, exit as pytest would; off (default: on)",
    )
    option("--only", action=Once, dest="bench_only", help="cells whose id holds this, * and ? as in a shell")
    option(
        "--changed-only",
        action="store_true",
        dest="bench_changed_only",
        help="run only cells whose program is not the stored one",
    )
    option(
        "--resume",
        action="store_true",
        dest="bench_resume",
        help="replay from the newest journal what is equal in cell, program and environment",
    )
    option("--gate-seconds", action=Once, help="most seconds side by side for a changed cell (default: 20)")
    option(
        "--cell-limit",
        action=Once,
        dest="bench_cell_limit",
        help="most seconds for the trial of an own implementation's cell (default: 120)",
    )
    option(
        "--all-programs",
        action="store_true",
        dest="bench_all_programs",
        help="time unchanged programs side by side too: what `python -m tests.bench aa` does",
    )
    option("--against", action=Once, dest="bench_against", help=f"{' or '.join(AGAINST)} (default: program)")
    option(
        "--against-jax",
        action=Once,
        dest="bench_against_jax",
        help="show what moved against the baseline of another JAX version; gates nothing",
    )
    option(
        "--accept-slower",
        action=Once,
        dest="bench_accepted",
        metavar="REASON",
        help="why cells may be slower or larger than their baseline: they are reported with it, and pass",
    )
    option(
        "--no-page",
        action="store_true",
        dest="bench_no_page",
        help="leave out the page of a comparison, reports/index.html",
    )
    option("--reports", action=Once, dest="bench_reports", help="folder of reports (default: reports)")
    option("--save-programs", action=Once, dest="bench_programs", help="folder to write the programs to")
    option("--maxtok-memory", action=Once, help="memory budget of suite maxtok, MiB (default: the machine's)")


def read(config: pytest.Config) -> Run:
    """The options as values. Raises GridError naming the option, the value and what is accepted."""
    get = config.getoption
    overrides: dict[str, Any] = {}
    for name in (*TEXTS, *INTEGERS, "skew", *SINGLE):
        text = get(f"bench_{name}")
        if text is None:
            continue
        if name in SINGLE:
            overrides[name] = SINGLE_READERS.get(name, _integer)(name, text)
            continue
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise GridError(
                f"--{name.replace('_', '-')}={text!r} has an empty value; separate by single commas"
            )
        read_one = {"skew": _share}.get(name, _integer if name in INTEGERS else lambda _, part: part)
        overrides[name] = tuple(read_one(name, part) for part in parts)
    seconds = _number("bench-seconds", get("bench_seconds") or "2")
    cores, memory = get("bench_cores"), get("maxtok_memory")
    return Run(
        grid=get("grid") or "default",
        overrides=overrides,
        seconds=seconds,
        cores=None if cores is None else _integer("bench_cores", cores),
        check=not get("bench_no_check"),
        device=_among("device", get("bench_device"), DEVICES),
        gate=_among("gate", get("bench_gate"), GATE) or "on",
        baselines=_path(get("bench_baselines")),
        maxtok_memory=None if memory is None else _integer("maxtok_memory", memory) * 2**20,
        only=get("bench_only"),
        changed_only=get("bench_changed_only"),
        resume=get("bench_resume"),
        gate_seconds=_number("gate-seconds", get("gate_seconds") or "20"),
        cell_limit=_number("cell-limit", get("bench_cell_limit") or "120"),
        all_programs=get("bench_all_programs"),
        against=_among("against", get("bench_against"), AGAINST) or "program",
        against_jax=get("bench_against_jax"),
        reports=_path(get("bench_reports")),
        programs=_path(get("bench_programs")),
        accepted=_reason(get("bench_accepted")),
        page=not get("bench_no_page"),
    )


def _reason(text: str | None) -> str | None:
    """On one line and without control characters: it may be a stranger's, and is printed as it is."""
    if text is None:
        return None
    words = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    if not words:
        raise GridError("--accept-slower is empty; say why cells may be slower or larger")
    return words


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _integer(name: str, text: str, least: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        zero = "" if least else "0 or "
        raise GridError(f"{_flag(name)}={text!r} must be {zero}a positive integer")
    return value


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise GridError(f"{_flag(name)}={text!r} must be a positive number of seconds")
    return value


def _share(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise GridError(f"{_flag(name)}={text!r} must lie in [0, 1]")
    return value


def _among(name: str, value: str | None, known: tuple[str, ...]) -> str | None:
    return value if value is None else one_of(_flag(name), value, known)


SINGLE_READERS: dict[str, Callable[[str, str], Any]] = {
    "keep_elems": lambda name, text: _integer(name, text, least=0),
    "lowering": lambda _, text: text,
}
