"""Committing to the store of baselines, and checking all of it.

An update writes what is new beside what is there, the manifest last: until then a reader sees the old baseline,
and after a kill the next update removes what the manifest does not list.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import atomic, baseline, history
from . import environment as environments
from . import manifest as manifests
from .errors import BaselineError
from .manifest import Grid, Manifest, program_name, sha256

UNMANAGED = "published"
"""The folder of the imported results: remade from their source, so it has no manifest."""

_GRID_NAME = re.compile(r"[A-Za-z0-9_-]+")


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
        probe.unlink(missing_ok=True)  # Another process's update may have removed it as a leftover.
    except OSError as error:
        if folder.is_dir():
            probe.unlink(missing_ok=True)
        raise atomic.unwritable(folder, error) from error
    return folder


def save(
    root: Path, document: dict[str, Any], grid: str, programs: Mapping[str, bytes], entry: dict[str, Any]
) -> Path:
    """Stores a run as the next baseline of its backend and JAX: all or nothing, and one update at a time.

    Raw rounds (`stats.data`) are left out: they are most of the bytes, and the quartiles are kept. The
    document that was passed stays as it is.

    Args:
      root: the folder of the backends' folders.
      document: the run, in pytest-benchmark's format.
      grid: which grid it ran.
      programs: digest -> program. Of those that the records name, the ones already stored may be left out.
      entry: what the history tells of this update; the file's name is added as `file`.

    Returns the new file. Raises:
      BaselineError: the document fails `baseline.parse` or holds what JSON cannot, the grid has no file of its
        own, a named program is not at hand, what is stored is damaged, the folder cannot be written to, or the
        disk is full. What was stored is then whole.
    """
    if not _GRID_NAME.fullmatch(grid):
        raise BaselineError(f"grid={grid!r} cannot be part of a file name; use letters, digits, _ and -")
    if grid in baseline.COMPARED_WITH:
        raise BaselineError(
            f"grid={grid!r} is compared with the file of {baseline.COMPARED_WITH[grid]}; record that one"
        )
    run = baseline.parse(document, Path(f"the run of grid {grid}"))
    without_data = [_without_data(benchmark) for benchmark in document["benchmarks"]]
    record = baseline.dumps(document | {"benchmarks": without_data}).encode()
    folder = check_writable(root, run.environment)
    with atomic.lock(folder):
        # All of it is computed before any of it is written.
        first = manifests.absent(folder)
        old = Manifest(folder) if first else manifests.read(folder)
        name = f"{_next_number(folder):04}_{grid}.json"
        new = _new_programs(old, run, programs) | {name: record}
        lines = history.appended(old, entry | {"file": name})
        manifest = Manifest(
            folder,
            old.grids | {grid: Grid(name, tuple(run.records), tuple(run.skipped))},
            old.files | {its_name: sha256(data) for its_name, data in new.items()},
            len(lines),
            sha256(lines),
        )
        if first:  # Else one that is killed would look like a manifest that was lost.
            atomic.write(folder / manifests.FILE, manifests.render(old))
        try:
            for its_name, data in new.items():
                if not _holds(folder / its_name, data):
                    atomic.write(folder / its_name, data)
            atomic.write(folder / history.FILE, lines)
            atomic.write(folder / manifests.FILE, manifests.render(manifest))
        finally:
            _remove_leftovers(folder)
    return folder / name


def verify(root: Path) -> tuple[list[str], list[str]]:
    """Checks every file of every folder. Returns (faults, notes): what is damaged, and what is left over."""
    if not root.is_dir():
        return [f"{root} is not a folder; pass the folder of the baselines"], []
    faults: list[str] = []
    notes: list[str] = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if folder.name == UNMANAGED:
            checks = [(baseline.load, path) for path in sorted(folder.glob("*.json"))]
            faults += _faults(checks)
            continue
        manifest = Manifest(folder)
        if not manifests.absent(folder):
            try:
                manifest = manifests.read(folder)
            except BaselineError as fault:
                faults.append(str(fault))
                continue
        faults += _faults(_checks(manifest))
        notes += _notes(manifest)
    return faults, notes


def _next_number(folder: Path) -> int:
    """After all that are there, also one that the manifest does not list."""
    names = (manifests.RECORD_NAME.fullmatch(path.name) for path in folder.iterdir())
    return max((int(name[1]) for name in names if name), default=0) + 1


def _new_programs(old: Manifest, run: baseline.Baseline, programs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Name -> bytes of those that are not stored yet, or no longer sound. Raises where a named one is neither."""
    unsound = {name for name in map(program_name, run.programs | set(programs)) if not _is_sound(old, name)}
    new = {program_name(digest): data for digest, data in programs.items()}
    for name in new:
        if not manifests.PROGRAM_NAME.fullmatch(name):
            raise BaselineError(f"{name} is no program's name; name a program by its digest, 64 hex digits")
    if lacking := sorted(unsound - set(new)):
        raise BaselineError(
            f"the run names {', '.join(lacking)}, which is neither passed nor stored soundly; pass its program"
        )
    return {name: new[name] for name in sorted(unsound)}


def _is_sound(manifest: Manifest, name: str) -> bool:
    try:
        manifest.content(name)
    except BaselineError:
        return False
    return True


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data


def _remove_leftovers(folder: Path) -> None:
    """Removes temporary files, records and programs that the manifest on disk does not list."""
    files = manifests.read(folder).files
    for name, path in _inside(folder):
        ours = manifests.RECORD_NAME.fullmatch(name) or manifests.PROGRAM_NAME.fullmatch(name)
        temporary = path.name.startswith(".") and path.suffix == ".tmp"
        if temporary or (ours and name not in files):
            with contextlib.suppress(OSError):  # It stays a leftover: no reason to fail.
                path.unlink()


def _inside(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name with slashes, path) of each file in a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _checks(manifest: Manifest) -> Iterator[tuple[Any, ...]]:
    """(function, arguments) of each check of a folder whose manifest is sound."""
    for name in sorted(manifest.files):
        is_record = manifests.RECORD_NAME.fullmatch(name)
        yield (baseline.listed, manifest, name) if is_record else (manifest.content, name)
    for grid in sorted(manifest.grids):
        yield baseline.declared, manifest, grid
    yield history.read, manifest


def _faults(checks: Iterable[tuple[Any, ...]]) -> list[str]:
    """The messages of the checks that fail, each once: a program may be named by many records."""
    messages: dict[str, None] = {}
    for check, *arguments in checks:
        try:
            check(*arguments)
        except BaselineError as fault:
            messages[str(fault)] = None
    return list(messages)


def _notes(manifest: Manifest) -> list[str]:
    known = {*manifest.files, manifests.FILE, history.FILE, atomic.LOCK}
    notes = [
        f"{path} is not in {manifests.FILE}: left by an interrupted update, or not the suite's"
        for name, path in _inside(manifest.folder)
        if name not in known
    ]
    path = manifest.folder / history.FILE
    if path.is_file() and path.stat().st_size > manifest.history_bytes:
        notes.append(f"{path} goes on after byte {manifest.history_bytes}: left by an interrupted update")
    return notes


def _without_data(benchmark: dict[str, Any]) -> dict[str, Any]:
    return benchmark | {
        "stats": {name: value for name, value in benchmark["stats"].items() if name != "data"}
    }
