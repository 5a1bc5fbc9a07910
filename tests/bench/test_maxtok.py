"""Suite maxtok: the most tokens that fit in memory, and what they cost."""

SUITE = "maxtok"


def test_maxtok(entry, cells, benchmark):
    cells.run(entry, benchmark)
