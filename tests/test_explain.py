"""`explain CELL`: all that is known of a cell, and a near id for one that is none."""

import shlex

import pytest

from tests.bench.__main__ import main
from tests.bench.grid import build

CELL = "dropless:chunked:sorted-float32-t1024-e8-k2-s0.0-d512-h1024-forward"


def explained(capsys, *words):
    code = main(["explain", *words])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_it_tells_shapes_sizes_history_and_limits(capsys):
    code, out, _ = explained(capsys, CELL)
    assert code == 0
    assert out.startswith(CELL)
    for words in (
        "(1024, 512) float32, 2.00 MiB each",
        "(8, 512, 1024) float32",
        "2,048 (tokens x top_k), 256 an expert",
        "6.44 Gflop: the routed experts' three products",
        "chunk",
        "baseline cpu-jax0.10.2",
        "baseline cpu-jax0.12.0.1",
        "published",
        "limits of the gate",
    ):
        assert words in out, words


def test_its_command_collects_this_cell_alone(capsys, request):
    _, out, _ = explained(capsys, CELL)
    command = shlex.split(out.strip().splitlines()[-1])
    assert command[0] == "pytest"
    assert command[1].endswith(f"test_layer.py::test_layer[{CELL}]")
    assert command[-1] == "--benchmark-compare"


def test_an_unknown_id_names_the_nearest(capsys):
    code, out, err = explained(capsys, CELL.replace("t1024", "t1025"))
    assert code == 2
    assert out == ""
    assert f"did you mean {CELL}?" in err


@pytest.mark.parametrize("grid", ["smoke", "default"])
def test_every_cell_of_a_grid_can_be_explained(capsys, grid):
    for entry in build(grid)[::7]:
        code, out, err = explained(capsys, entry.cell.id)
        assert code == 0, err
        assert out.startswith(entry.cell.id)


def test_what_was_published_of_the_rejected_variant_is_known(capsys):
    from tests.bench import baseline
    from tests.bench.published_import import FILE

    rejected = [i for i in baseline.load(baseline.ROOT / FILE).records if "concatenated" in i]
    code, out, err = explained(capsys, rejected[0])
    assert code == 0, err
    assert "theirs" in out
