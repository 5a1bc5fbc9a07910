"""The limits: how much worse a metric may get. Defaults for every cell, and what pyproject.toml says for some.

[[tool.moe-bench.limits]]
cells = "*ragged_dot*"      # fnmatch on the cell id
metric = "temp_bytes"       # a key of DEFAULTS
share = 0.10                # of the stored figure; more than this is a regression
least = 65536               # bytes metrics only, optional: bytes that must be exceeded too
reason = "..."              # required
"""

import dataclasses
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..errors import BenchError

LARGEST_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Limit:
    """A metric that changed by more than both `share` of the stored figure and `least` (bytes) has moved.

    `cells` is an fnmatch pattern on the cell id; `reason` is empty for a default.
    """

    cells: str
    metric: str
    share: float
    least: int = 0
    reason: str = ""

    def exceeded(self, change: float, stored: float) -> bool:
        """Whether a change from the stored figure, in either direction, is over the limit."""
        return abs(change) > self.least and abs(change) > self.share * stored

    def __str__(self) -> str:
        return f"{self.share * 100:.3g}% and {self.least}"


DEFAULTS = {
    limit.metric: limit
    for limit in (
        Limit("*", "time", 0.05),
        Limit("*", "temp_bytes", 0.01, 4096),
        Limit("*", "argument_bytes", 0.01, 4096),
        Limit("*", "output_bytes", 0.01, 4096),
        Limit("*", "alias_bytes", 0.01, 4096),
        Limit("*", "flops", 0.01),
    )
}


def read(path: Path | None) -> tuple[Limit, ...]:
    """The limits of a pyproject.toml, in its order; none where it has no such tables, or there is no file.

    Raises:
      BenchError: the file cannot be read or is not TOML, or an entry is not as the module describes.
    """
    if path is None:
        return ()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(
            f"the limits in {path} cannot be read ({error.strerror or error}); restore the file"
        ) from error
    except ValueError as error:  # Not TOML, or not UTF-8.
        raise BenchError(f"{path} is not TOML ({error}); correct it") from error
    table = document.get("tool", {}).get("moe-bench", {})
    unknown = sorted(table.keys() - {"grids", "limits"}) if isinstance(table, dict) else []
    if unknown:
        raise BenchError(f"{path}: [tool.moe-bench] has the key {unknown[0]!r}; there are: grids, limits")
    entries = table.get("limits", []) if isinstance(table, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BenchError(
            f"{path}: tool.moe-bench.limits is no list of tables; write [[tool.moe-bench.limits]]"
        )
    return tuple(
        _parse(entry, f"{path}: [[tool.moe-bench.limits]] number {number}")
        for number, entry in enumerate(entries, 1)
    )


def of(limits: Sequence[Limit], cell_id: str, metric: str) -> Limit:
    """The limit in force: the last that names the metric and matches the cell, else the default."""
    for limit in reversed(limits):
        if limit.metric == metric and fnmatchcase(cell_id, limit.cells):
            return limit
    return DEFAULTS[metric]


def slowest(limits: Sequence[Limit], cell_id: str) -> float:
    """The ratio of times over which a cell is too slow."""
    return 1 + of(limits, cell_id, "time").share


def _parse(entry: dict[str, Any], where: str) -> Limit:
    """One table as a Limit; `where` starts each error's message."""
    names = [field.name for field in dataclasses.fields(Limit)]
    for name in entry:
        if name not in names:
            raise BenchError(f"{where} has the key {name!r}; there are: {', '.join(names)}")
    for name in ("cells", "metric", "reason"):
        value = entry.get(name)
        if not isinstance(value, str) or not value.strip():
            raise BenchError(f"{where}: {name}={value!r} must be text that is not empty")
    metric: str = entry["metric"]
    share: Any = entry.get("share")
    if metric not in DEFAULTS:
        raise BenchError(f"{where}: metric={metric!r} is unknown; there are: {', '.join(DEFAULTS)}")
    if not isinstance(share, int | float) or not 0 < share <= LARGEST_SHARE:
        raise BenchError(
            f"{where}: share={share!r} must be a number over 0 and at most {LARGEST_SHARE}: a gate that lets "
            "more through is none; write 0.10 for 10 %"
        )
    least = entry.get("least", DEFAULTS[metric].least)
    if "least" in entry and not metric.endswith("_bytes"):
        raise BenchError(f"{where}: least={least!r} holds for bytes; leave it out for {metric}")
    if not isinstance(least, int) or isinstance(least, bool) or least < 0:
        raise BenchError(f"{where}: least={least!r} must be a whole number of bytes, 0 or more")
    return Limit(entry["cells"], metric, float(share), least, entry["reason"].strip())
