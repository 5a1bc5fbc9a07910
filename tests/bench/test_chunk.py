"""Suite chunk: `--chunks` on chunked, beside the rejected variant in grid `published`."""

SUITE = "chunk"


def test_chunk(entry, cells, benchmark):
    cells.run(entry, benchmark)
