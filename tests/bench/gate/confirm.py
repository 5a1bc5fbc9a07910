"""Confirms a suspect in a fresh process, with the arms swapped.

Run as a module it is that process: a request (JSON) on standard input, the pairs (JSON) as answer. It needs the
two programs and the cell's inputs, and nothing of the measured source.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .. import home, pin
from ..errors import BenchError
from ..stored_program import StoredProgram
from .paired import Pairs

SPARE_S = 180.0
"""For the process to start, make its inputs and compile, over the budget of the pairs."""
BESIDE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""On a GPU this run holds most of the memory already: the child takes what it needs of the rest."""
LOOKS = 10
"""The level of each look is that of so many cells tested: seven looks together stay under ALPHA."""


class NotConfirmed(BenchError):
    """The fresh process gave no answer."""


def confirm(
    cell: dict[str, Any],
    today: StoredProgram,
    stored: Path,
    *,
    cores: list[int] | None,
    budget_s: float,
    limit: float,
) -> Pairs:
    """Race today's program against the stored one in a fresh process.

    Args:
      cell: the fields of the cell.
      today: this run's program.
      stored: file of the stored one.
      cores: logical cores to pin to, or None.
      budget_s: seconds for the pairs.
      limit: ratio that is too slow.

    Raises:
      NotConfirmed: the process failed, or gave no answer in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "today.bin"
        path.write_bytes(today.pack())
        request = {
            "cell": cell,
            "today": str(path),
            "stored": str(stored.resolve()),
            "cores": cores,
            "budget_s": budget_s,
            "limit": limit,
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__],
                input=json.dumps(request),
                capture_output=True,
                text=True,
                cwd=home.ROOT,
                env=os.environ | BESIDE,
                timeout=SPARE_S + 2 * budget_s,
                check=True,
            )
            answer = json.loads(done.stdout.splitlines()[-1])
        except subprocess.CalledProcessError as error:
            last = error.stderr.strip().splitlines()[-1:] or ["it said nothing"]
            raise NotConfirmed(f"the confirming process ended with {error.returncode}: {last[0]}") from error
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            raise NotConfirmed(f"the confirming process gave no answer ({error})") from error
    return Pairs.from_json(answer)


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    if request["cores"] is not None:
        pin.restrict(request["cores"])
    import functools

    import numpy as np

    from .. import stored_program
    from ..cell import Cell
    from ..program import arguments_of
    from .paired import race

    arguments = arguments_of(Cell(**request["cell"]))
    # Swapped: the stored program is compiled, warmed and counted as the one that may be slower.
    calls = {}
    for name in ("stored", "today"):
        path = Path(request[name])
        program = stored_program.unpack(path.read_bytes(), str(path))
        compiled = stored_program.compile_stored(program, str(path))
        calls[name] = functools.partial(arguments.run, compiled.run)
    pairs = race(
        calls["stored"],
        calls["today"],
        budget_s=request["budget_s"],
        cells=LOOKS,
        limit=request["limit"],
        rng=np.random.default_rng(),
    )
    print(json.dumps(dataclasses.asdict(pairs.swapped)))


if __name__ == "__main__":
    main()
