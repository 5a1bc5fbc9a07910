"""What a token costs as tokens grow: the series, the ratios, the table."""

import json

import numpy as np
import pytest

from tests.bench import __main__ as verbs
from tests.bench import growth, turns
from tests.bench.cell import Cell
from tests.bench.grid import CHUNKED


def point(tokens, ms, over, temp):
    return growth.Point(f"t{tokens}", tokens, ms, ms, over, over, temp, 15)


def test_series_cover_both_dtypes_and_both_ways():
    cells = growth.cells()
    assert len({cell.id for cell in cells}) == len(cells) == 4 * len(growth.TOKENS)
    assert {(cell.dtype, cell.op) for cell in cells} == {
        (dtype, op) for dtype in ("float32", "bfloat16") for op in ("forward", "train_step_donated")
    }
    assert (growth.TOKENS[0], growth.TOKENS[-1]) == (4096, 65536)


def test_a_series_is_over_its_first_point():
    shape = {"d_model": 32, "d_hidden": 48}
    series = [Cell("layer", CHUNKED, "float32", tokens, 4, 2, "forward", **shape) for tokens in (64, 256)]
    first, second = growth.measure(series, 3, np.random.default_rng(0))
    assert (first.over, first.least_over) == (1, 1)
    assert second.over == pytest.approx(second.ms / first.ms / 4)
    assert second.least_over == pytest.approx(second.least_ms / first.least_ms / 4)
    assert second.temp_bytes > first.temp_bytes > 0


def test_table_says_what_a_further_token_adds():
    rows = growth.table([point(4096, 100.0, 1.0, 2**20), point(8192, 210.0, 1.05, 2**20 + 4096 * 24)])
    assert rows[0] == "t4096"
    assert rows[2].split() == ["4096", "100.0", "x1.000", "(1.000)", "1.00", "0.0"]
    assert rows[3].split() == ["8192", "210.0", "x1.050", "(1.050)", "1.09", "24.0"]


def test_the_verb_writes_its_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(growth, "TOKENS", (64, 128))
    only = ["--only", "float32*-forward", "--rounds", "1", "--reports", str(tmp_path)]
    monkeypatch.setattr(turns.pin, "pin", lambda cores: None)
    assert verbs.main(["growth", *only]) == 0
    document = json.loads((tmp_path / "growth.json").read_text("utf-8"))
    assert [its["tokens"] for its in document["cells"]] == [64, 128]
    assert "a token (min)" in capsys.readouterr().out
    assert verbs.main(["growth", "--only", "nothing"]) == 2
