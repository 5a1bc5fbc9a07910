"""Suite layer: the implementations side by side."""

SUITE = "layer"


def test_layer(entry, cells, benchmark):
    cells.run(entry, benchmark)
