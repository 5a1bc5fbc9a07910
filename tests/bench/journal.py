"""The journal: one JSON line for each measured cell of a run, on disk before the next one starts.

A run that was killed is resumed from it: a cell whose id, program, stored program and environment are equal is
replayed, every other one runs.
"""

import dataclasses
import datetime
import json
import os
from pathlib import Path
from typing import Any

from . import atomic

SCHEMA = 2  # 2: the evidence has its null control
KEPT = 5
"""Journals that stay in the folder; older ones go when a run starts."""


@dataclasses.dataclass(frozen=True)
class Line:
    """What a run leaves of one cell.

    Attributes:
      id: of the cell.
      digest: of its program; None where it cannot be stored (such a cell is never replayed).
      against: of the stored program it was held against, or None.
      environment: of the run (`environment.describe`), and its options that change figures.
      iterations: calls in one duration.
      durations: seconds per call, one for each round.
      extra_info: the record.
      evidence: `Evidence.to_json`, or None where nothing was compared.
    """

    id: str
    digest: str | None
    against: str | None
    environment: dict[str, Any]
    iterations: int
    durations: list[float]
    extra_info: dict[str, Any]
    evidence: dict[str, Any] | None

    @property
    def key(self) -> tuple[str, str | None, str | None, str]:
        """What has to be equal for a replay."""
        return (self.id, self.digest, self.against, json.dumps(self.environment, sort_keys=True))


class Journal:
    """The journal of this run; its folder also holds those of earlier ones.

    Attributes:
      path: of this one.
      resumed: path of the one that this run goes on from, or None.
      earlier: the lines of that one, by key.
    """

    def __init__(self, folder: Path, resume: bool = False) -> None:
        """Start a journal; with `resume` it begins with the newest one's lines, so that it replaces that one."""
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(folder.glob("*.jsonl"))
        self.resumed = found[-1] if found and resume else None
        self.earlier = read(self.resumed) if self.resumed else {}
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%f")
        self.path = folder / f"{now}-{os.getpid()}.jsonl"
        # It gets its name with all of them in it: a kill before that leaves the earlier one the newest.
        atomic.write(self.path, "".join(map(_text, self.earlier.values())).encode())
        for old in found[: -KEPT + 1]:
            old.unlink(missing_ok=True)  # Two runs may start at once.
        self._file = self.path.open("a", encoding="utf-8")

    def append(self, line: Line) -> None:
        """Write one line and force it to disk."""
        self._file.write(_text(line))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _text(line: Line) -> str:
    return json.dumps(dataclasses.asdict(line) | {"schema": SCHEMA}) + "\n"


def read(path: Path) -> dict[tuple[Any, ...], Line]:
    """The lines of a journal by key. A torn line, which a kill leaves, ends it."""
    found: dict[tuple[Any, ...], Line] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(text)
            if values.pop("schema") != SCHEMA:
                break
            line = Line(**values)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            break
        found[line.key] = line
    return found


def replay(line: Line, benchmark: Any) -> None:
    """Give pytest-benchmark's fixture the durations of an earlier run.

    Private to pytest-benchmark, which is why pyproject caps its version.
    """
    benchmark._mode = "benchmark.pedantic(...)"
    stats = benchmark._make_stats(line.iterations)
    for duration in line.durations:
        stats.update(duration * line.iterations)
    benchmark.extra_info.update(line.extra_info)
