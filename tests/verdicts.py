"""Records and verdicts written by hand."""

from tests.bench.gate.verdict import CellVerdict, Verdict

FIGURES = {
    "temp_bytes": 10_000_000,
    "argument_bytes": 50_000_000,
    "output_bytes": 2_000_000,
    "alias_bytes": 1_000_000,
    "flops": 5_000_000.0,
}


def record(**changes):
    cell = {
        "suite": "layer",
        "routing": "dropless",
        "impl": "chunked",
        "dispatch": "sorted",
        "dtype": "float32",
    }
    shape = {"tokens": 1024, "experts": 8, "top_k": 2, "skew": 0.0, "op": "forward"}
    return cell | shape | {"xla_temp_mb": 9.5, "median_ms": 30.0, "gemm_fraction": 0.8} | FIGURES | changes


def cell(identity, status, *reasons, was=None, now=None, timing=None, **changes):
    """A cell with a record on both sides, both changed alike, then each by what `was` and `now` say."""
    stored, today = record(**changes, **(was or {})), record(**changes, **(now or {}))
    return CellVerdict(identity, status, reasons, stored, today, timing)


def verdict_of(*found, partial=False, faults=(), **more):
    """A verdict of cells, or of statuses for cells without a record."""
    cells = tuple(
        CellVerdict(f"cell{number}", given) if isinstance(given, str) else given
        for number, given in enumerate(found)
    )
    return Verdict(cells, "baselines/cpu-jax0/0001_default.json", partial, faults, **more)
