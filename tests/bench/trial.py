"""The trial of a user's function: each of its cells runs once in a child process, which can be killed.

A function that raises, returns something else, prints, is traced anew for each call or never returns fails its cell
with the reason, and the run goes on. Run as a module it is that child: a JSON line a cell on standard input, one as
answer.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import IO, Any

from . import home
from .cell import Cell
from .errors import BenchError
from .gate.confirm import BESIDE

START_S = 300.0
"""For the child to start, which imports jax: not the cell's fault."""
MOST = 200
"""Characters of what a function printed, in the reason."""
SMALL = 1024
"""Tokens of the trial of suite maxtok, whose cells are as large as memory allows."""


class Failed(BenchError):
    """A cell's trial failed: the reason."""


class Trial:
    """A child that tries cells; started when it is first needed, and again after it is gone.

    Args:
      limit_s: seconds for one cell: numerics, compiling and one call.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._child: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def close(self) -> None:
        """End the child process, if there is one."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def check(self, cell: Cell, *, numerics: bool, timed: bool) -> dict[str, Any] | None:
        """Try a cell; returns its numerics as a dictionary where they were asked for.

        Raises Failed with the reason.
        """
        its = dataclasses.replace(cell, suite="layer", tokens=min(SMALL, cell.tokens))
        its = its if cell.suite == "maxtok" else cell
        if self._child is None:
            fault = self._start()
            if fault is not None:
                raise Failed(f"{cell.id}: the process that tries own implementations does not start: {fault}")
        words = {"cell": dataclasses.asdict(its), "numerics": numerics, "timed": timed}
        answer = self._ask(json.dumps(words), self._limit_s)
        if answer is None:
            raise Failed(
                f"{cell.id}: did not return within --cell-limit={self._limit_s:g} seconds and was stopped; raise "
                "the limit if it only needs longer"
            )
        if answer.get("fault"):
            raise Failed(f"{cell.id}: {answer['fault']}")
        return answer["numerics"] if cell.suite != "maxtok" else None

    def _start(self) -> str | None:
        """Start the child; returns why it does not, or None."""
        pipe = subprocess.PIPE
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (see close)
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=pipe,
            stdout=pipe,
            stderr=self._errors,
            text=True,
            cwd=home.ROOT,
            env=home.for_child() | BESIDE,
        )
        answer = self._ask("", START_S)
        return f"not within {START_S:g} s" if answer is None else answer.get("fault")

    def _ask(self, words: str, limit_s: float) -> dict[str, Any] | None:
        """One answer; None where it did not come in time, a fault where the child is gone."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()  # First: the answer ends with the child.
            child.kill()

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            child.stdin.write(words + "\n")
            child.stdin.flush()
            answer: dict[str, Any] = json.loads(child.stdout.readline())
            return answer
        except (OSError, ValueError):  # No answer, or half of one.
            code, said = child.wait(), self._last_words()
            self.close()
            return None if late.is_set() else {"fault": f"its process ended with {code}{said}"}
        finally:
            timer.cancel()
            timer.join()
            if late.is_set():  # Also where the answer came just before: that child serves no other cell.
                self.close()

    def _last_words(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return f": {lines[-1][:MOST]}" if lines else ""


def main() -> None:
    """Answer one cell after the other; the function's own output is caught, and is a fault."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        os.dup2(printed.fileno(), 1)
        for line in sys.stdin:
            answer = _tried(json.loads(line)) if line.strip() else {}
            sys.stdout.flush()
            printed.seek(0)
            text = printed.read().strip()
            printed.seek(0)
            printed.truncate()
            if text and not answer.get("fault"):
                answer = {"fault": f"prints {text[:MOST]!r}; take print and jax.debug.print out of the layer"}
            print(json.dumps(answer), file=answers, flush=True)


def _tried(words: dict[str, Any]) -> dict[str, Any]:
    """`numerics` of a cell (None if not asked for), or the `fault` that ends it."""
    import jax

    from . import numerics, program

    cell, found = Cell(**words["cell"]), None
    try:
        if words["numerics"]:
            found = dataclasses.asdict(numerics.check(cell))
        if words["timed"]:
            program.program(cell).call()
        jax.effects_barrier()  # What jax.debug.print prints is here by now.
    except (BenchError, numerics.WrongNumerics) as fault:
        return {"fault": str(fault).removeprefix(cell.id).lstrip(": ")}
    except BaseException as error:  # Also SystemExit: the function's, not the run's.
        first = str(error).partition("\n")[0]
        return {"fault": f"raises {type(error).__name__}: {first}{_where(error)}"}
    return {"numerics": found}


def _where(error: BaseException) -> str:
    """The innermost line that is neither JAX's nor the suite's."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).resolve().is_relative_to(home.FOLDER)
        and not {"jax", "jaxlib", "moe"} & set(Path(frame.filename).parts)
    ]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


if __name__ == "__main__":
    main()
