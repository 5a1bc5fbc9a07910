"""Reading the store of baselines: which file a run is compared with, and whether all of it is sound.

Layout of `<root>/<backend>-jax<version>/`: `NNNN_<grid>.json`, pytest-benchmark's own format and naming, so that
its `list` and `compare` read the store (`pytest-benchmark --storage baselines list`); the programs that the
records name, `programs/<digest>.bin`; `history.jsonl`; and `manifest.toml`, which says what of it counts. Beside
the stock fields each record file has a `moe_bench` block (schema, grid, options, environment, skipped cells),
and each entry its cell id in `extra_info`.

Closed on failure: what is damaged is an error with its own message, never a reason to compare with an older
file.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import atomic, history, home
from . import environment as environments
from . import manifest as manifests
from .errors import BaselineError, NoBaseline, NoGrid

SCHEMA = 1
ROOT = home.ROOT / "baselines"
COMPARED_WITH = {"smoke": "default"}
"""A grid that is a subset of another is compared with that one's file, and has no file of its own."""

RECORD = f'record one with: {home.BASELINE} --reason "..."'
STATISTICS = ("min", "max", "mean", "stddev", "median", "iqr", "q1", "q3", "rounds", "iterations")
"""What every stored entry must hold, as finite numbers."""
PROGRAMS = ("program", "accepted")
"""The fields of `extra_info` that name a stored program by its digest, or hold None."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Baseline:
    """A stored file that has passed every check.

    Attributes:
      path: the file.
      environment: where it was recorded (`environment.describe`).
      records: cell id -> the stock pytest-benchmark entry (stats in seconds, extra_info).
      skipped: cell id -> why the recorded run skipped it.
      history: the folder's updates, oldest first; empty for a file that was read alone.
    """

    path: Path
    environment: dict[str, Any]
    records: dict[str, dict[str, Any]]
    skipped: dict[str, str]
    history: tuple[dict[str, Any], ...] = ()

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def programs(self) -> set[str]:
        """The digests of all programs that the records name."""
        named = {entry["extra_info"].get(name) for entry in self.records.values() for name in PROGRAMS}
        return named - {None}

    def program_path(self, digest: str) -> Path:
        return self.folder / manifests.program_name(digest)


def find(root: Path, environment: dict[str, Any], grid: str) -> Baseline:
    """Loads the baseline of this grid for this backend and JAX, whatever the Python version.

    Raises:
      NoBaseline: this backend and JAX have no baseline at all.
      NoGrid: they have, but not of this grid.
      BaselineError: it cannot be trusted.
    """
    name = environments.key(environment)
    folder = root / name
    manifest = manifests.Manifest(folder) if manifests.absent(folder) else manifests.read(folder)
    if not manifest.grids:
        raise NoBaseline(f"no baseline for {name} in {root}: there is {_others(root, name)}; {RECORD}")
    wanted = COMPARED_WITH.get(grid, grid)
    if wanted not in manifest.grids:
        others = ", ".join(sorted(manifest.grids))
        raise NoGrid(f"no baseline of grid {wanted} in {folder}: there is {others}; {RECORD}")
    return declared(manifest, wanted)


def declared(manifest: manifests.Manifest, grid: str) -> Baseline:
    """The file that the manifest declares for a grid, with the history.

    Raises:
      BaselineError: `listed` does, the file holds other cells than are declared, or the history is damaged.
    """
    wanted = manifest.grids[grid]
    found = listed(manifest, wanted.file)
    for kind, ids, its_ids in (
        ("cells", wanted.cells, tuple(found.records)),
        ("skipped", wanted.skipped, tuple(found.skipped)),
    ):
        if ids != its_ids:
            differing = ", ".join(sorted(set(ids) ^ set(its_ids))) or "their order"
            raise BaselineError(
                f"{manifest.folder / manifests.FILE} has {len(ids)} {kind} of grid {grid}, {found.path.name} "
                f"{len(its_ids)}; they differ in {differing}; {manifest.way_out}"
            )
    return dataclasses.replace(found, history=history.read(manifest))


def listed(manifest: manifests.Manifest, name: str) -> Baseline:
    """One record file that the manifest lists, after a look at every program that it names.

    Raises:
      BaselineError: the file or a program is not listed, is missing or was changed, the file fails `parse`, or
        it was recorded on another backend or JAX.
    """
    path = manifest.folder / name
    found = parse(decoded(manifest, name), path, manifest.way_out)
    its_name = environments.key(found.environment)
    if its_name != manifest.folder.name:
        raise BaselineError(f"{path} is for another backend or JAX, {its_name}; {manifest.way_out}")
    for digest in sorted(found.programs):
        manifest.content(manifests.program_name(digest))
    return found


def decoded(manifest: manifests.Manifest, name: str) -> dict[str, Any]:
    """The JSON object of a record file that the manifest lists; `parse` checks what is in it.

    Raises BaselineError where it is not listed, is missing, was changed, or is no JSON object.
    """
    return _decoded(manifest.content(name), manifest.folder / name, manifest.way_out)


def load(path: Path, way_out: str = RECORD) -> Baseline:
    """Reads and checks one file alone; `way_out` ends each error's message.

    Raises:
      BaselineError: the file cannot be read, is truncated or not JSON, or fails `parse`.
    """
    return parse(read(path, way_out), path, way_out)


def read(path: Path, way_out: str = RECORD) -> dict[str, Any]:
    """Reads one JSON file whose top level is an object. Raises BaselineError where that fails."""
    return _decoded(atomic.read(path, way_out), path, way_out)


def parse(document: dict[str, Any], path: Path, way_out: str = RECORD) -> Baseline:
    """Checks a document in pytest-benchmark's format with a `moe_bench` block; `path` is for messages.

    Raises:
      BaselineError: no `moe_bench` block, another schema, no environment, an empty list, an entry without id
        or statistics, a duplicate id, a program that is no digest, or a number that is not finite.
    """
    try:
        environment = _checked_environment(document.get("moe_bench"))
        records, skipped = _checked_records(document)
    except BaselineError as fault:
        raise BaselineError(f"{path} {fault}; {way_out}") from None
    return Baseline(path, environment, records, skipped)


def dumps(document: dict[str, Any]) -> str:
    """The document as it is stored: a line a figure, so that a diff shows which changed."""
    try:
        return json.dumps(document, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise BaselineError(
            f"the run holds a value that JSON cannot ({error}); store plain finite numbers and text"
        ) from error


def _decoded(data: bytes, path: Path, way_out: str) -> dict[str, Any]:
    try:
        document = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise BaselineError(f"{path} is truncated or not JSON ({error}); {way_out}") from error
    if not isinstance(document, dict):
        raise BaselineError(f"{path} holds a JSON {type(document).__name__}, not a benchmark file; {way_out}")
    return document


def _others(root: Path, name: str) -> str:
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    # The imported results have no backend's folder: nothing is compared with them cell by cell.
    named = [folder.name for folder in folders if (folder / manifests.FILE).exists() and folder.name != name]
    return ", ".join(named) or "none at all"


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
    for name in PROGRAMS:
        digest = entry["extra_info"].get(name)
        if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            raise BaselineError(f"has {name}={digest!r} for {identity}, not a digest of 64 hex digits")
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
