"""The store of baselines: which file a run is compared with, whether it is sound, how a new one is saved.

Layout: `<root>/<backend>-jax<version>/NNNN_<grid>.json`, pytest-benchmark's own format and naming, so that
its `list` and `compare` read the store (`pytest-benchmark --storage baselines list`). Beside the stock fields
each file has a `moe_bench` block (schema, grid, options, environment, skipped cells), and each entry its cell
id in `extra_info`.

Closed on failure: what is damaged is an error with its own message, never a reason to compare with an older
file.
"""

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import environment as environments
from .errors import BaselineError, NoBaseline

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[2] / "baselines"
COMPARED_WITH = {"smoke": "default"}
"""A grid that is a subset of another is compared with that one's file, and has no file of its own."""

RECORD = "record one with: tox run -e baseline"
STATISTICS = ("min", "max", "mean", "stddev", "median", "iqr", "q1", "q3", "rounds", "iterations")
"""What every stored entry must hold, as finite numbers."""

_FILE_NAME = re.compile(r"(\d{4,})_([A-Za-z0-9_-]+)\.json")
_GRID_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Baseline:
    """A stored file that has passed every check.

    Attributes:
      path: the file.
      environment: where it was recorded (`environment.describe`).
      records: cell id -> the stock pytest-benchmark entry (stats in seconds, extra_info).
      skipped: cell id -> why the recorded run skipped it.
    """

    path: Path
    environment: dict[str, Any]
    records: dict[str, dict[str, Any]]
    skipped: dict[str, str]


def find(root: Path, environment: dict[str, Any], grid: str) -> Baseline:
    """Loads the newest baseline of this grid for this backend and JAX, whatever the Python version.

    Raises:
      NoBaseline: this backend and JAX have no baseline at all.
      BaselineError: they have, but not of this grid, or its newest file cannot be trusted.
    """
    name = environments.key(environment)
    stored = _numbered(root / name)
    if not stored:
        raise NoBaseline(f"no baseline for {name} in {root}: there is {_existing(root)}; {RECORD}")
    wanted = COMPARED_WITH.get(grid, grid)
    of_grid = [path for _, its_grid, path in stored if its_grid == wanted]
    if not of_grid:
        others = ", ".join(sorted({its_grid for _, its_grid, _ in stored}))
        raise BaselineError(f"no baseline of grid {wanted} in {root / name}: there is {others}; {RECORD}")
    baseline = load(of_grid[-1])
    its_name = environments.key(baseline.environment)
    if its_name != name:
        raise BaselineError(
            f"{baseline.path} is for another backend or JAX, {its_name}; move it there and {RECORD}"
        )
    return baseline


def load(path: Path, way_out: str = RECORD) -> Baseline:
    """Reads and checks one file; `way_out` ends each error's message.

    Raises:
      BaselineError: the file cannot be read, is truncated or not JSON, or fails `parse`.
    """
    return parse(read(path, way_out), path, way_out)


def read(path: Path, way_out: str = RECORD) -> dict[str, Any]:
    """Reads one JSON file whose top level is an object. Raises BaselineError where that fails."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaselineError(f"{path} cannot be read ({error.strerror or error}); {way_out}") from error
    except (ValueError, RecursionError) as error:
        raise BaselineError(f"{path} is truncated or not JSON ({error}); {way_out}") from error
    if not isinstance(document, dict):
        raise BaselineError(f"{path} holds a JSON {type(document).__name__}, not a benchmark file; {way_out}")
    return document


def parse(document: dict[str, Any], path: Path, way_out: str = RECORD) -> Baseline:
    """Checks a document in pytest-benchmark's format with a `moe_bench` block; `path` is for messages.

    Raises:
      BaselineError: no `moe_bench` block, another schema, no environment, an empty list, an entry without id
        or statistics, a duplicate id, or a number that is not finite.
    """
    try:
        environment = _checked_environment(document.get("moe_bench"))
        records, skipped = _checked_records(document)
    except BaselineError as fault:
        raise BaselineError(f"{path} {fault}; {way_out}") from None
    return Baseline(path, environment, records, skipped)


def check_writable(root: Path, environment: dict[str, Any]) -> Path:
    """Makes sure, before any work, that a baseline can be saved; leaves only the folder behind.

    Returns the folder. Raises BaselineError when it cannot be made or written to.
    """
    folder = root / environments.key(environment)
    probe = folder / f".{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permission bits do not tell: a read-only mount has them all, and root passes them all.
        probe.write_bytes(b"probe")
        probe.unlink()
    except OSError as error:
        if folder.is_dir():
            probe.unlink(missing_ok=True)
        raise _unwritable(folder, error) from error
    return folder


def save(root: Path, document: dict[str, Any], grid: str) -> Path:
    """Stores a run as the next baseline of its backend and JAX. All or nothing, also when two save at once.

    Raw rounds (`stats.data`) are left out: they are most of the bytes, and the quartiles are kept. The
    document that was passed stays as it is.

    Raises:
      BaselineError: the document fails `parse` or holds what JSON cannot, the grid has no file of its own,
        the folder cannot be written to, or the disk is full. What was stored is then whole, and nothing is
        left over.
    """
    if not _GRID_NAME.fullmatch(grid):
        raise BaselineError(f"grid={grid!r} cannot be part of a file name; use letters, digits, _ and -")
    if grid in COMPARED_WITH:
        raise BaselineError(
            f"grid={grid!r} is compared with the file of {COMPARED_WITH[grid]}; record that one"
        )
    baseline = parse(document, Path(f"the run of grid {grid}"))
    folder = check_writable(root, baseline.environment)
    text = dumps(document | {"benchmarks": [_without_data(entry) for entry in document["benchmarks"]]})
    number = max((number for number, _, _ in _numbered(folder)), default=0)
    while True:
        number += 1
        # The temporary file is the lock too: whoever creates it owns the number until the rename.
        temporary = folder / f".{number:04}.tmp"
        try:
            file = temporary.open("x", encoding="utf-8", newline="\n")
        except FileExistsError:
            continue  # Another process is saving under this number (or was killed while it did).
        except OSError as error:
            raise _unwritable(folder, error) from error
        with file:
            # Between our look at the folder and the lock another process may have finished with this number.
            taken = any(its_number == number for its_number, _, _ in _numbered(folder))
            target = folder / f"{number:04}_{grid}.json"
            if not taken:
                _finish(file, text, temporary, target)
                return target
        temporary.unlink()


def write(path: Path, document: dict[str, Any]) -> None:
    """Writes one document under a given name, atomically: readers see the old file or the new one, whole.

    Raises BaselineError when it cannot; the old file, if any, is then as it was.
    """
    text = dumps(document)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = temporary.open("w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    with file:
        _finish(file, text, temporary, path)


def dumps(document: dict[str, Any]) -> str:
    """The document as it is stored: a line a figure, so that a diff shows which changed."""
    try:
        return json.dumps(document, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise BaselineError(
            f"the run holds a value that JSON cannot ({error}); store plain finite numbers and text"
        ) from error


def _finish(file: Any, text: str, temporary: Path, target: Path) -> None:
    """Fills the open temporary file, forces it to disk and gives it its name; on failure removes it."""
    try:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        file.close()  # Windows does not rename an open file.
        temporary.replace(target)
    except BaseException as error:  # An interrupt must not leave the lock behind either.
        with contextlib.suppress(OSError):
            file.close()  # Flushes what is left, and so fails again on a full disk.
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unwritable(target.parent, error) from error
        raise
    if os.name == "posix":  # The name itself is data of the folder.
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unwritable(folder: Path, error: OSError) -> BaselineError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BaselineError(
            f"no space left in {folder}; free some, and save again (what is stored there is as it was)"
        )
    return BaselineError(
        f"cannot write to {folder} ({error.strerror or error}); make it writable or choose another root"
    )


def _numbered(folder: Path) -> list[tuple[int, str, Path]]:
    """(number, grid, path) of each baseline in a folder, oldest first; empty when there is no such folder."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _FILE_NAME.fullmatch(path.name))]
    return sorted((int(match[1]), match[2], path) for match, path in found)


def _existing(root: Path) -> str:
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    # The imported results have no backend's folder: nothing is compared with them cell by cell.
    return ", ".join(f.name for f in folders if f.name != "published" and _numbered(f)) or "none at all"


def _checked_environment(block: Any) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise BaselineError("has no moe_bench block, so this suite did not write it")
    if block.get("schema") != SCHEMA:
        raise BaselineError(f"is of schema {block.get('schema')!r}, this suite reads {SCHEMA}")
    environment = block.get("environment")
    if not isinstance(environment, dict) or not all(
        isinstance(environment.get(f), str) for f in ("backend", "jax")
    ):
        raise BaselineError("does not say on which backend and JAX it was recorded")
    return environment


def _checked_records(document: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Entries and skip reasons by cell id; a cell may be there once, as the one or the other."""
    benchmarks = document.get("benchmarks")
    if not isinstance(benchmarks, list) or not benchmarks:
        raise BaselineError("holds no benchmarks")
    records: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    for position, entry in enumerate(benchmarks):
        extra_info = entry.get("extra_info") if isinstance(entry, dict) else None
        identity = _identity(extra_info, f"benchmarks[{position}]")
        if identity in records:
            raise BaselineError(f"holds the cell {identity} twice")
        _check_entry(entry, identity)
        records[identity] = entry
    for position, entry in enumerate(document["moe_bench"].get("skipped") or []):
        identity = _identity(entry, f"skipped[{position}]")
        if identity in records or identity in skipped:
            raise BaselineError(f"holds the cell {identity} twice")
        skipped[identity] = str(entry.get("reason"))
    return records, skipped


def _identity(extra_info: Any, where: str) -> str:
    identity = extra_info.get("id") if isinstance(extra_info, dict) else None
    if not isinstance(identity, str) or not identity:
        raise BaselineError(f"has no cell id in {where}")
    return identity


def _check_entry(entry: dict[str, Any], identity: str) -> None:
    stats = entry.get("stats")
    if not isinstance(stats, dict):
        raise BaselineError(f"holds no statistics of {identity}")
    # The imported results keep their own fields and no others, so the file's schema stands for theirs.
    if entry["extra_info"].get("schema", SCHEMA) != SCHEMA:
        raise BaselineError(
            f"holds {identity} in schema {entry['extra_info']['schema']!r}, this suite reads {SCHEMA}"
        )
    for name in STATISTICS:
        if isinstance(stats.get(name), bool) or not isinstance(stats.get(name), int | float):
            raise BaselineError(f"has {name}={stats.get(name)!r} for {identity}, not a number")
    for block in ("stats", "extra_info"):
        for name, value in _numbers(entry[block], block):
            if not math.isfinite(value):
                raise BaselineError(f"has {name}={value} for {identity}, not finite")


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}")
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _numbers(item, f"{name}[{position}]")


def _without_data(entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"stats": {name: value for name, value in entry["stats"].items() if name != "data"}}
