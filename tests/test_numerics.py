"""Every published shape up to 4096 tokens: each implementation and tuning value against dense.

The shapes that only grid default holds are asserted where they are measured, in tests/bench. Dense in float32 is
the reference itself; the oracle is what it is held against (tests/test_gradients.py). Of the rejected variant,
which no user runs, the first and the last chunk stand for the four. Chunked is held in both its forms, in its sweep
in the one that keeps nothing.
"""

import pytest

from tests.bench import baseline, grid, numerics, published_import, rejected

MOST_TOKENS = 4096


def shapes():
    """One cell for each implementation, tuning and shape; forward and train step share their numerics."""
    published = baseline.load(baseline.ROOT / published_import.FILE).records
    cells = {
        entry.cell.numerics: entry.cell
        for entry in grid.build("published")
        if entry.cell.id in published
        and entry.cell.tokens <= MOST_TOKENS
        and (entry.cell.impl, entry.cell.dtype) != (grid.DENSE, "float32")
        and (entry.cell.impl, entry.cell.suite, entry.cell.keep_elems) != (grid.CHUNKED, "chunk", None)
        and (entry.cell.impl, entry.cell.chunk) not in ((rejected.ID, 256), (rejected.ID, 512))
    }
    return sorted(cells.values(), key=lambda cell: (*map(str, cell.inputs), cell.impl.startswith("capacity")))


@pytest.mark.parametrize(
    "cell",
    [
        # One group a reference: xdist keeps it in one worker, which computes it once.
        pytest.param(cell, id=cell.id, marks=pytest.mark.xdist_group(str(cell.inputs)))
        for cell in shapes()
    ],
)
def test_equals_dense(cell):
    checked = numerics.check(cell)
    assert checked.empty_experts == 0
    assert checked.rel_err_out <= numerics.tolerance(cell).out
