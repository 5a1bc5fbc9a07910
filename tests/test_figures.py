"""What the verbs found, drawn; and the sweep of sizes, whose figures are only drawn or printed."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from tests.bench import __main__ as verbs
from tests.bench import figures, growth, roofline, sizes, turns
from tests.bench.cell import Cell
from tests.bench.grid import CHUNKED

CELL = Cell("layer", CHUNKED, "float32", 32, 4, 2, "forward", d_model=16, d_hidden=24)


def size(chunk, cost, low, high, temp=2**20, frontier=False):
    return sizes.Size(
        f"it-c{chunk}", CELL.id, chunk, None, 10 / cost, 9 / cost, cost, low, high, temp, frontier, 15
    )


def reached(cell, over=1.2):
    parts = {"routing": 1.0, "gather and scatter": 2.0, "activation": 3.0}
    return roofline.Reached(cell, over * 10, 10.0, over, over, 256, 0.7, parts, 15)


def points(op, dtype="float32"):
    cells = [dataclasses.replace(CELL, tokens=tokens, op=op, dtype=dtype) for tokens in (64, 128)]
    return [growth.Point(c.id, c.tokens, c.tokens / 8, 1.0, 1.0, 1.0, c.tokens * 99, 15) for c in cells]


DRAWN = {
    "roofline": (figures.roofline, [reached(CELL.id), reached(dataclasses.replace(CELL, experts=8).id, 0.9)]),
    "growth": (figures.growth, [*points("forward"), *points("train_step_donated"), *points("forward", "bfloat16")]),
    "sizes": (figures.sizes, [size(None, 1, 1, 1, frontier=True), size(64, 1.1, 1, 1.2), size(256, 1, 1, 1)]),
}  # fmt: skip
SAID = {
    "roofline": ["float32, 32 x 4, top_k 2, hidden 24, forward", "gather and scatter", "rest", "ours"],
    "growth": ["bfloat16, 4 experts, top_k 2, hidden 24, forward", "train step", "temp MiB", "128"],
    "sizes": [" 64", " 256", "float32, 32 x 4"],
}


@pytest.mark.parametrize("name", DRAWN)
def test_figure_is_a_picture_with_its_words(name):
    draw, found = DRAWN[name]
    text = figures.svg(draw(found)).decode()
    ET.fromstring(text)
    words = " ".join(re.findall(r"<!-- (.*?) -->", text))
    for word in SAID[name]:
        assert word in words
    assert figures.svg(draw(found)).decode() == text


def test_without_matplotlib_a_verb_says_so_before_it_measures(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(turns.pin, "pin", lambda cores: pytest.fail("measured"))
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)
    assert verbs.main(["growth", "--reports", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "error: drawing needs matplotlib: pip install matplotlib, or give --no-draw\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_choices_are_what_the_cell_can_hold():
    its = [
        (choice.chunk, choice.slab_elems) for choice in sizes.choices(dataclasses.replace(CELL, tokens=64))
    ]
    assert its == [(None, None), (64, None), (128, None)]
    large = sizes.choices(Cell("layer", CHUNKED, "float32", 4096, 8, 2, "forward"))
    assert [c.chunk for c in large[1:6]] == list(sizes.CHUNKS)
    assert [c.slab_elems for c in large[6:]] == list(sizes.SLABS)


def test_cells_of_the_sweep():
    assert len({cell.id for cell in sizes.cells()}) == len(sizes.cells()) == 6 * 2 * 2


@pytest.mark.parametrize(
    ("bounds", "said"), [((1.0, 1.04), "within"), ((1.06, 1.2), "over"), ((1.0, 1.2), "perhaps over")]
)
def test_the_best_fixed_chunk_is_named_with_what_the_automatic_choice_costs(bounds, said):
    found = [size(None, 1, 1, 1), size(64, 0.9, 0.8, 1.0), size(128, np.mean(bounds), *bounds)]
    last = sizes.table(found)[-1]
    assert f"auto is {said} 5% of chunk 128, the best fixed one" in last


def test_sizes_are_measured_written_and_drawn(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(turns.pin, "pin", lambda cores: None)
    monkeypatch.setattr(sizes, "cells", lambda: [dataclasses.replace(CELL, tokens=64)])
    assert verbs.main(["sizes", "--rounds", "6", "--reports", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "sizes.json").read_text("utf-8"))["cells"]
    assert [its["chunk"] for its in found] == [None, 64, 128]
    assert found[0]["cost"] == found[0]["low"] == found[0]["high"] == 1
    assert any(its["frontier"] for its in found)
    assert all(its["low"] <= its["cost"] <= its["high"] for its in found)
    assert (tmp_path / "sizes.svg").exists()
    assert "auto is" in capsys.readouterr().out


def test_a_train_step_is_named_by_its_tokens():
    shown = figures._short("dropless:chunked:sorted-float32-t4096-e8-k2-s0.0-d512-h1024-train_step_donated")
    assert shown == "float32, 4096 x 8, train step"
