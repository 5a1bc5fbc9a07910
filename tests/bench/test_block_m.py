"""Suite block_m: `--block-ms` on blocked."""

SUITE = "block_m"


def test_block_m(entry, cells, benchmark):
    cells.run(entry, benchmark)
