"""The faults that `power` injects are really there: one that the compiler folds away proves nothing."""

import pytest

from tests.bench import faults, program
from tests.bench.cell import Cell
from tests.bench.grid import CAPACITY, CHUNKED


@pytest.mark.parametrize("impl", [CHUNKED, CAPACITY])
def test_more_temp_bytes_outlive_the_compiler(monkeypatch, impl):
    cell = Cell("layer", impl, "float32", 64, 4, 2, "forward", d_model=32, d_hidden=48)
    before = program.flat(cell).compile().bytes.temp
    monkeypatch.setattr(
        program, "implementation", faults._changed(program.implementation, faults.LAYERS["temp+2%"])
    )
    assert program.flat(cell).compile().bytes.temp >= before + faults.MORE_TEMP // 2
