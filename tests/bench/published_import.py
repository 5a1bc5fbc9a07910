"""The published results as a file of the store: nothing lost, and readable like any other run.

Each record stays verbatim in its entry's `extra_info` (with `id` added), the file's `device` and `config` in
`moe_bench.published`. Of an entry's statistics (seconds) median, q1 and q3 are the published ones, iqr is q3
- q1 and iterations is `inner`. The others were not published and stand in for pytest-benchmark's sake
(`FILLED`, also in the file): mean = median, min = ld15iqr = q1, max = hd15iqr = q3, stddev and outliers 0,
rounds 1, total = median, ops = 1 / median.
"""

import hashlib
from pathlib import Path
from typing import Any

from . import atomic, baseline
from .cell import Cell
from .errors import BaselineError, GridError

FILE = Path("published", "0001_published.json")
REJECTED = "concatenated"
"""Our implementation of what was published as code `rejected`: gate and up side by side in one matrix."""
FILLED = (
    *("min", "max", "mean", "stddev", "rounds", "iqr_outliers", "stddev_outliers", "outliers"),
    *("ld15iqr", "hd15iqr", "ops", "total"),
)
FIELDS = (
    *(
        "code",
        "run",
        "suite",
        "routing",
        "impl",
        "dispatch",
        "dtype",
        "tokens",
        "d_model",
        "d_hidden",
        "experts",
    ),
    *(
        "top_k",
        "op",
        "xla_temp_mb",
        "xla_arg_mb",
        "xla_out_mb",
        "compile_s",
        "inner",
        "median_ms",
        "q1_ms",
        "q3_ms",
    ),
)
"""Fields without which a published record cannot be imported; every further one is kept too."""

Record = dict[str, Any]


def import_published(source: Path, root: Path) -> Path:
    """Converts the published file into `<root>/published/0001_published.json`: same source, same bytes.

    Raises:
      BaselineError: the source is not such a file, two of its records are the same cell, a number is not
        finite, or the result cannot be written.
    """
    way_out = "pass the published results file: a JSON object with device, config and results"
    published = baseline.read(source, way_out)
    kinds = {"device": dict, "config": dict, "results": list}
    if not all(isinstance(published.get(name), kind) for name, kind in kinds.items()):
        raise BaselineError(f"{source} is not a published results file; {way_out}")
    document = convert(published, hashlib.sha256(source.read_bytes()).hexdigest())
    baseline.parse(document, source, way_out)
    atomic.write(root / FILE, baseline.dumps(document).encode())
    return root / FILE


def convert(published: dict[str, Any], sha256: str) -> dict[str, Any]:
    """The published file as a pytest-benchmark document; `reconstruct` is its inverse."""
    device = published["device"]
    return {
        "machine_info": {"python_version": device.get("python"), "cpu": {}},
        "commit_info": {
            "id": "unversioned",
            "time": None,
            "dirty": False,
            "project": "published",
            "branch": "(unknown)",
        },
        "benchmarks": [_entry(record, number) for number, record in enumerate(published["results"])],
        "datetime": None,
        "version": "5.3.1",
        "moe_bench": {
            "schema": baseline.SCHEMA,
            "grid": "published",
            "options": {},
            "environment": device
            | dict.fromkeys(("jaxlib", "cpu", "cores", "xla_flags", "x64", "matmul_precision")),
            "skipped": [],
            "published": {
                "device": device,
                "config": published["config"],
                "filled": list(FILLED),
                "source_sha256": sha256,
            },
        },
    }


def reconstruct(document: dict[str, Any]) -> dict[str, Any]:
    """The published file that an imported document was made from."""
    entries = [entry["extra_info"] for entry in document["benchmarks"]]
    block = document["moe_bench"]["published"]
    records = [{name: value for name, value in entry.items() if name != "id"} for entry in entries]
    return {"device": block["device"], "config": block["config"], "results": records}


def cell_of(record: Record) -> Cell:
    """The cell as the grid runs it; the chunk sweeps, published without a skew, have 0. Train steps recompute."""
    impl = REJECTED if record["code"] == "rejected" else record["impl"]
    return Cell(
        *(record["suite"], f"{record['routing']}:{impl}:{record['dispatch']}", record["dtype"]),
        *(record["tokens"], record["experts"], record["top_k"], record["op"]),
        *(float(record.get("skew", 0.0)), record["d_model"], record["d_hidden"]),
        chunk=record.get("chunk"),
        keep_elems=0 if impl == "chunked" and record["op"] != "forward" else None,
    )


def _entry(record: Record, number: int) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise BaselineError(f"results[{number}] is not a record; pass the published file as it is")
    missing = [field for field in FIELDS if field not in record]
    if missing:
        raise BaselineError(f"results[{number}] lacks {', '.join(missing)}; pass the published file as it is")
    for field in ("median_ms", "q1_ms", "q3_ms", "inner"):
        if not isinstance(record[field], int | float) or not record[field] > 0:
            raise BaselineError(
                f"results[{number}] has {field}={record[field]!r}; it must be a positive number"
            )
    try:
        cell = cell_of(record)
    except GridError as fault:
        raise BaselineError(f"results[{number}] is no cell: {fault}") from fault
    median, q1, q3 = (record[field] / 1000 for field in ("median_ms", "q1_ms", "q3_ms"))
    return {
        "group": cell.group,
        "name": f"test_{cell.suite}[{cell.id}]",
        "fullname": f"tests/bench/test_{cell.suite}.py::test_{cell.suite}[{cell.id}]",
        "params": {"cell": cell.id},
        "param": cell.id,
        "extra_info": {"id": cell.id} | record,
        "options": {},
        "stats": {
            "min": q1,
            "max": q3,
            "mean": median,
            "stddev": 0.0,
            "rounds": 1,
            "median": median,
            "iqr": q3 - q1,
            "q1": q1,
            "q3": q3,
            "iqr_outliers": 0,
            "stddev_outliers": 0,
            "outliers": "0;0",
            "ld15iqr": q1,
            "hd15iqr": q3,
            "ops": 1 / median,
            "total": median,
            "iterations": record["inner"],
        },
    }
