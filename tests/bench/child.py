"""The conversation with a worker process: JSON lines [verb, argument, ...] in, the answer out. Both ends of it.

Nothing here imports jax: a worker pins itself first.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from . import home
from .errors import BenchError


class ChildFailed(BenchError):
    """A worker answers a request with an error, or is gone."""


class Child:
    """A worker process; use it with `with`.

    Args:
      name: what messages call it.
      module: run with -m; it calls `serve`.
      words: its arguments.
      python: the interpreter.
      environment: its environment variables.
    """

    def __init__(
        self,
        name: str,
        module: str,
        words: Sequence[str],
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [python, "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=home.ROOT,
            env=environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def ask(self, *request: Any) -> Any:
        """The answer to one request. Raises ChildFailed where it is an error, or the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ChildFailed(f"the {self._name} worker ended with {self._process.wait()}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise ChildFailed(answer["error"])
        return answer


def serve(answer: Callable[..., Any]) -> None:
    """Answer each request on standard input by `answer(verb, *arguments)`; an exception is an answer too."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What a library prints is no answer.
    for line in sys.stdin:
        try:
            found = answer(*json.loads(line))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=out, flush=True)
