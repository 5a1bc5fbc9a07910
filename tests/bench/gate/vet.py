"""Reads stored programs in a child process first: what is malformed may crash the reader, or never end.

Run as a module it is that child: a path a line on standard input, one JSON line each as answer.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from .. import home
from ..errors import BaselineError, BenchError

LIMIT_S = 60.0
"""For one program, the child's start included."""


class Vetter:
    """A child that reads programs; started when it is first needed, and again after it is gone."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Vetter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def check(self, path: Path) -> None:
        """Raises BaselineError where the program at `path` cannot be read, crashes its reader or takes too long."""
        child = self._child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()  # First: the answer ends with the child.
            child.kill()

        timer = threading.Timer(self._limit_s, end)
        timer.start()
        try:
            # The child has a working directory of its own.
            child.stdin.write(json.dumps(str(path.resolve())) + "\n")
            child.stdin.flush()
            fault = json.loads(child.stdout.readline())
        except (OSError, ValueError) as error:  # No answer, or half of one.
            self.__exit__()
            how = (
                f"is not read within {self._limit_s:g} s"
                if late.is_set()
                else "crashes the process that reads it"
            )
            raise BaselineError(f"{path} {how}; restore it from version control or record again") from error
        finally:
            timer.cancel()
        if fault is not None:
            raise BaselineError(fault)

    @staticmethod
    def _start() -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        # Reading needs no device, and an accelerator has one owner.
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        return subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=home.ROOT,
            env=environment,
        )


def main() -> None:
    """Answer each path on standard input with null, or with what is wrong with its program."""
    from .. import stored_program

    for line in sys.stdin:
        path = Path(json.loads(line))
        fault = None
        try:
            stored_program.read(stored_program.unpack(path.read_bytes(), str(path)), str(path))
        except (BenchError, OSError) as error:
            fault = str(error)
        print(json.dumps(fault), flush=True)


if __name__ == "__main__":
    main()
