"""Grids of a project's own, in its pyproject.toml:

[[tool.moe-bench.grids]]
name = "mine"                       # several tables of one name are blocks of one grid
impls = ["mypkg.mymoe:layer"]       # any option of a grid, named with underscores; a list where it takes many
tokens = [256, 1024]
"""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

from .errors import GridError
from .grid import GRIDS, PLURAL, Source, checked, whole_id

NAME = re.compile(r"[A-Za-z0-9_-]+")
NOT_OPTIONS = ("but", "rejected")
"""Fields of Source that only the suite's own grids use."""
TEXTS = ("suites", "dtypes", "impls", "ops", "lowering")
OPTIONS = tuple(field.name for field in dataclasses.fields(Source) if field.name not in NOT_OPTIONS)


def read(path: Path | None) -> dict[str, tuple[Source, ...]]:
    """The suite's grids and those of a pyproject.toml that `gate.limits` has read.

    Raises GridError naming the table, the key and what is accepted.
    """
    grids = dict(GRIDS)
    if path is None:
        return grids
    entries = (
        tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("moe-bench", {}).get("grids", [])
    )
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise GridError(f"{path}: tool.moe-bench.grids is no list of tables; write [[tool.moe-bench.grids]]")
    for number, entry in enumerate(entries, 1):
        where = f"{path}: [[tool.moe-bench.grids]] number {number}"
        name = entry.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name) or name in GRIDS:
            raise GridError(
                f"{where}: name={name!r} must be letters, digits, _ and -, and none of {', '.join(GRIDS)}"
            )
        grids[name] = (*grids.get(name, ()), _source(entry, where))
    return grids


def _source(entry: dict[str, Any], where: str) -> Source:
    values = {}
    for key, value in entry.items():
        if key == "name":
            continue
        if key not in OPTIONS:
            raise GridError(f"{where} has the key {key!r}; there are: name, {', '.join(OPTIONS)}")
        many = key in PLURAL
        items = value if many and isinstance(value, list) else [value]
        kinds = (str,) if key in TEXTS else (int, float) if key == "skew" else (int,)
        if (many and not (isinstance(value, list) and value)) or not all(
            isinstance(item, kinds) and not isinstance(item, bool) for item in items
        ):
            what = "text" if key in TEXTS else "numbers" if key == "skew" else "integers"
            raise GridError(f"{where}: {key}={value!r} must be {'a list of ' if many else ''}{what}")
        values[key] = tuple(items) if many else value
    if "impls" in values:
        values["impls"] = tuple(map(whole_id, values["impls"]))
    try:
        return dataclasses.replace(Source(), **checked(values, Source()))
    except GridError as fault:
        raise GridError(f"{where}: {fault}") from None
