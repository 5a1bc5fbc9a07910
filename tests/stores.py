"""A store of baselines as a test wants it: runs to save, any file put there, and a manifest that fits."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench import baseline, history, manifest, store
from tests.bench.errors import BaselineError

HERE = {"backend": "cpu", "jax": "0.10.2", "python": "3.11.7"}
NAME = "cpu-jax0.10.2"
STATS = {
    "min": 0.009,
    "max": 0.012,
    "mean": 0.01,
    "stddev": 0.001,
    "rounds": 5,
    "median": 0.01,
    "iqr": 0.001,
    "q1": 0.0095,
    "q3": 0.0105,
    "iqr_outliers": 0,
    "stddev_outliers": 1,
    "outliers": "1;0",
    "ld15iqr": 0.009,
    "hd15iqr": 0.012,
    "ops": 100.0,
    "total": 0.05,
    "iterations": 1,
}


def entry(identity: str, **extra_info: Any) -> dict[str, Any]:
    """A measured cell."""
    return {
        "group": "shape",
        "name": f"test_layer[{identity}]",
        "fullname": f"tests/bench/test_layer.py::test_layer[{identity}]",
        "params": None,
        "param": identity,
        "extra_info": {"id": identity, "schema": 1, "temp_bytes": 1024, "rel_err_out": 1e-8} | extra_info,
        "options": {},
        "stats": STATS | {"data": [0.01] * 5},
    }


def document(*identities: str, grid: str = "default", where: dict[str, Any] = HERE) -> dict[str, Any]:
    """A run of these cells; one further cell was skipped."""
    return {
        "machine_info": {},
        "commit_info": {},
        "benchmarks": [entry(identity) for identity in identities or ("a", "b")],
        "datetime": "2026-01-01T00:00:00",
        "version": "5.3.1",
        "moe_bench": {
            "schema": 1,
            "grid": grid,
            "options": {},
            "environment": where,
            "skipped": [{"id": "c", "reason": "tokens x experts is over dense_limit"}],
        },
    }


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """A document after `change(document)`."""
    made = document()
    change(made)
    return made


def save(root: Path, made: dict[str, Any], grid: str = "default", reason: str = "a test") -> Path:
    """Save a run of cells that name no program."""
    return store.save(root, made, grid, {}, {"reason": reason})


def files(folder: Path) -> list[str]:
    """All files but the manifest, the history and the lock."""
    own = {manifest.FILE, history.FILE, ".lock"}
    found = (path for path in folder.rglob("*") if path.is_file() and path.name not in own)
    return sorted(path.relative_to(folder).as_posix() for path in found)


def put(root: Path, name: str, content: Any, folder: str = NAME) -> Path:
    """Put a file there, as text or as JSON, sound or not."""
    path = root / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def seal(folder: Path) -> None:
    """Write a manifest that fits what is there: what is wrong with a file is then left to other checks."""
    checksums, grids = {}, {}
    paths = [*folder.glob("*.json"), *folder.glob("programs/*.bin")]
    for path in sorted(paths, key=lambda path: (len(path.name), path.name)):
        name = path.relative_to(folder).as_posix()
        checksums[name] = manifest.sha256(path.read_bytes()) if path.is_file() else "0" * 64
        if match := manifest.RECORD_NAME.fullmatch(name):
            grids[match[2]] = manifest.Grid(name, (), ())
            with contextlib.suppress(BaselineError):
                found = baseline.load(path)
                grids[match[2]] = manifest.Grid(name, tuple(found.records), tuple(found.skipped))
    lines = (folder / history.FILE).read_bytes() if (folder / history.FILE).exists() else b""
    made = manifest.Manifest(folder, grids, checksums, len(lines), manifest.sha256(lines))
    (folder / manifest.FILE).write_bytes(manifest.render(made))
