"""The cell: one point of the grid, its explicit id, and what may stand in it."""

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import GridError

DTYPES = ("float32", "bfloat16")
OPS = ("forward", "train_step", "train_step_donated")
SUITES = ("layer", "chunk", "block_m", "maxtok")
INDEX_LIMIT = 2**31 - 1
TUNING = {"chunk": "chunk", "block_m": "block", "slab_elems": "slab", "keep_elems": "keep", "lowering": ""}
"""Fields that are tuning values, in the order of an id, and what stands before the value there."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One implementation on one shape. In suite maxtok `tokens` is where the search stops.

    Raises:
      GridError: a value is unknown or out of range, when the cell is made.
    """

    suite: str
    impl: str
    dtype: str
    tokens: int
    experts: int
    top_k: int
    op: str
    skew: float = 0.0
    d_model: int = 512
    d_hidden: int = 1024
    param_dtype: str = "float32"
    chunk: int | None = None
    block_m: int | None = None
    slab_elems: int | None = None
    keep_elems: int | None = None
    lowering: str | None = None

    def __post_init__(self) -> None:
        one_of("suite", self.suite, SUITES)
        one_of("dtype", self.dtype, DTYPES)
        one_of("param_dtype", self.param_dtype, DTYPES)
        one_of("op", self.op, OPS)
        for name in ("tokens", "experts", "top_k", "d_model", "d_hidden"):
            if getattr(self, name) < 1:
                raise GridError(f"{name}={getattr(self, name)} must be a positive integer")
        for name in ("chunk", "block_m", "slab_elems"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise GridError(f"{name}={getattr(self, name)} must be a positive integer")
        if self.keep_elems is not None and self.keep_elems < 0:
            raise GridError(f"keep_elems={self.keep_elems} must be 0 or a positive integer")
        if self.top_k > self.experts:
            raise GridError(
                f"top_k={self.top_k} is more than experts={self.experts}; choose 1..{self.experts}"
            )
        if not 0 <= self.skew <= 1:
            raise GridError(f"skew={self.skew} must lie in [0, 1]: it is a share of the tokens")
        if self.tokens * self.experts > INDEX_LIMIT:
            raise GridError(
                f"tokens={self.tokens} x experts={self.experts} is over 2**31 - 1, the layer's indices; "
                "take fewer of either"
            )

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Cell":
        """The cell of a record. Raises GridError, or KeyError where the record lacks a field."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in record]
        values = {name: record[name] for name in names}
        impl = f"{record['routing']}:{record['impl']}:{record['dispatch']}"
        return cls(**values | {"impl": impl, "skew": float(record.get("skew") or 0)})

    @classmethod
    def parse(cls, identity: str) -> "Cell":
        """The cell of an id. Raises GridError where it is none, or a value in it is out of range."""
        found = _ID.fullmatch(identity)
        if not found:
            raise GridError(f"cell={identity!r} is no id; one is {_EXAMPLE}")
        values: dict[str, Any] = {name: value for name, value in found.groupdict().items() if value}
        for name in values.keys() - {"suite", "impl", "dtype", "op", "param_dtype", "lowering", "skew"}:
            values[name] = int(values[name])
        cell = cls(**{"suite": "layer"} | values | {"skew": float(values["skew"])})
        if cell.id != identity:
            raise GridError(f"cell={identity!r} is no id: it reads as {cell.id}")
        return cell

    @property
    def tuning(self) -> dict[str, int | str]:
        """The tuning values that are set, as the layer's keywords."""
        values = {name: getattr(self, name) for name in TUNING}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def id(self) -> str:
        """Stable and readable; records and baselines are matched by it. Never depends on order or position."""
        suite = "" if self.suite == "layer" else f"{self.suite}/"
        params = "" if self.param_dtype == "float32" else f"-p{self.param_dtype}"
        tuning = "".join(f"-{TUNING[name]}{value}" for name, value in self.tuning.items())
        return (
            f"{suite}{self.impl}-{self.dtype}-t{self.tokens}-e{self.experts}-k{self.top_k}-s{self.skew}"
            f"-d{self.d_model}-h{self.d_hidden}-{self.op}{params}{tuning}"
        )

    @property
    def group(self) -> str:
        """The cells that do the same work side by side: pytest-benchmark's group, and the tables' headings."""
        sweep = "" if self.suite == "layer" else f"{self.suite} sweep, "
        return (
            f"{sweep}{self.dtype}, {self.tokens} tokens, {self.experts} experts, top_k {self.top_k}, "
            f"skew {self.skew}, {self.op}"
        )

    @property
    def inputs(self) -> tuple:
        """What the inputs and the reference depend on: cells with equal ones share both."""
        return (
            *(self.tokens, self.experts, self.top_k, self.skew),
            *(self.d_model, self.d_hidden, self.dtype, self.param_dtype),
        )

    @property
    def numerics(self) -> tuple:
        """What the numerics of a cell depend on: forward and train step of one shape share them."""
        return (self.impl, *self.tuning.items(), *self.inputs)

    def matches(self, words: str) -> bool:
        """Whether the id holds these words, `*` and `?` as in a shell."""
        return fnmatch.fnmatchcase(self.id, f"*{words}*")

    def fields(self) -> dict:
        """The cell as a record's fields, under the published names."""
        routing, impl, dispatch = self.impl.split(":")
        values = dataclasses.asdict(self) | {"routing": routing, "impl": impl, "dispatch": dispatch}
        return {"id": self.id, **values}

    @property
    def useful_flops(self) -> int:
        """Flops of the routed experts' products: 6 * tokens * top_k * d_model * d_hidden forward, 14 times the
        rest for a train step.

        Three products forward; backward one for the hidden rows' gradient and three for the weights'. A step of
        the layer alone wants no gradient of x. Nothing for recomputation, the router, padding or Adam.
        """
        product = 2 * self.tokens * self.top_k * self.d_model * self.d_hidden
        return product * (3 if self.op == "forward" else 7)


_SUFFIXES = "".join(
    f"(?:-{before}(?P<{name}>{'[a-z]+' if name == 'lowering' else '[0-9]+'}))?"
    for name, before in TUNING.items()
)
_ID = re.compile(
    rf"(?:(?P<suite>{'|'.join(SUITES)})/)?(?P<impl>\w+:\w+:\w+)-(?P<dtype>\w+)"
    r"-t(?P<tokens>\d+)-e(?P<experts>\d+)-k(?P<top_k>\d+)-s(?P<skew>\d+\.\d+)"
    rf"-d(?P<d_model>\d+)-h(?P<d_hidden>\d+)-(?P<op>{'|'.join(OPS)})"
    rf"(?:-p(?P<param_dtype>{'|'.join(DTYPES)}))?{_SUFFIXES}"
)
_EXAMPLE = "dropless:chunked:sorted-float32-t1024-e8-k2-s0.0-d512-h1024-forward"


def one_of(name: str, value: str, known: Iterable[str]) -> str:
    """The value if it is known; otherwise a GridError that lists what is, and suggests the nearest."""
    known = tuple(known)
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise GridError(f"{name}={value!r} is unknown{hint} There are: {', '.join(known)}")
    return value
