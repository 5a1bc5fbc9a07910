"""The faults that `power` injects are really there: one that the compiler folds away proves nothing."""

import pytest

from moe.registry import IMPLEMENTATIONS
from tests.bench import faults, program
from tests.bench.cell import Cell
from tests.bench.grid import CAPACITY, CHUNKED


def temp_bytes(monkeypatch, cell, fault):
    """Of a cell's program as it is, and with this fault in it."""
    before = program.flat(cell).compile().bytes.temp
    changed = faults._changed(program.implementation, faults.LAYERS[fault])
    monkeypatch.setattr(program, "implementation", changed)
    return before, program.flat(cell).compile().bytes.temp


@pytest.mark.parametrize("impl", [CHUNKED, CAPACITY])
def test_more_temp_bytes_outlive_the_compiler(monkeypatch, impl):
    cell = Cell("layer", impl, "float32", 64, 4, 2, "forward", d_model=32, d_hidden=48)
    before, after = temp_bytes(monkeypatch, cell, "temp+2%")
    assert after >= before + faults.MORE_TEMP // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_copy_outlives_the_compiler(monkeypatch, impl, dtype):
    cell = Cell("layer", impl, dtype, 256, 4, 2, "forward", d_model=64, d_hidden=48)
    before, after = temp_bytes(monkeypatch, cell, "copy")
    assert after >= before + 256 * 64 * (4 if dtype == "float32" else 2)
