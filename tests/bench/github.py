"""What `gh api --paginate` prints: JSON lists one behind the other, a list for each page."""

import json
from typing import Any, TextIO

from .errors import BenchError


def read(stream: TextIO) -> list[dict[str, Any]]:
    """The objects of all pages; none for an empty stream. Raises BenchError where it is something else."""
    rest, decoder = stream.read().strip(), json.JSONDecoder()
    out: list[dict[str, Any]] = []
    while rest:
        try:
            page, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            raise BenchError(
                f"standard input is not what `gh api` prints ({error}); redirect it there"
            ) from error
        if not isinstance(page, list) or not all(isinstance(item, dict) for item in page):
            raise BenchError(
                f"standard input holds {rest[:40]!r}, no list of objects; give gh's whole answer"
            )
        out += page
        rest = rest[end:].lstrip()
    return out
