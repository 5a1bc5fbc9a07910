"""The suite run from outside, as its users run it, on a grid of a few tiny cells."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
BENCH = str(ROOT / "tests/bench")

# `-p tinygrid` adds grid `tiny`, four cells that are measured and one that a limit skips, and `single`. It wraps
# `start`, since the grid imports jax, which has to wait until the process is pinned.
TINY = """
import dataclasses

from tests.bench import plugin

whole = plugin.start

def start(cells):
    from tests.bench import grid

    shape = dict(tokens=(64,), experts=(4,), d_model=32, d_hidden=48)
    grid.GRIDS["tiny"] = (
        grid.Source(impls=(grid.DENSE, grid.CHUNKED), ops=("forward",), **shape),
        grid.Source(impls=(grid.CHUNKED,), ops=("train_step_donated",), **shape),
        grid.Source(impls=(grid.RAGGED,), ops=("forward",), ragged_limit=1, **shape),
        grid.Source(suites=("chunk",), impls=(grid.CHUNKED,), chunks=(16,), ops=("forward",), **shape),
    )
    grid.GRIDS["single"] = (grid.Source(impls=(grid.DENSE,), ops=("forward",), **shape),)
    # A tiny cell's rate moves with every noise, and trips the wire of stored time.
    if cells.config.getoption("gate_seconds") is None:
        cells.options = dataclasses.replace(cells.options, gate_seconds=0.3)
    whole(cells)

plugin.start = start
"""
ADDOPTS = "-p tinygrid -p tests.altered --bench-seconds 0.05"
"""PYTEST_ADDOPTS of the runs that a verb starts."""
SHAPE = "float32-t64-e4-k2-s0.0-d32-h48"
DENSE = f"dense:auto:sorted-{SHAPE}-forward"
CHUNKED = f"dropless:chunked:sorted-{SHAPE}-forward"
DONATED = f"dropless:chunked:sorted-{SHAPE}-train_step_donated"
SWEPT = f"chunk/dropless:chunked:sorted-{SHAPE}-forward-chunk16"
SKIPPED = f"dropless:ragged_dot:sorted-{SHAPE}-forward"

# Runs and verbs in one process, each asked for by a line: a verb's own run takes place there too.
SERVING = """
import contextlib, io, json, os, sys, types
from tests.bench import pin
pin.pin(None)
import jax, pytest
from tests.bench import recording
from tests.bench.__main__ import main

answers = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

def run(words):
    return int(pytest.main(words))

def verb_run(command, **_):
    return types.SimpleNamespace(returncode=run(command[3:]))

recording.subprocess = types.SimpleNamespace(run=verb_run)
for line in sys.stdin:
    kind, words, folder = json.loads(line)
    os.chdir(folder)
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = run(words) if kind == "pytest" else main(words)
    print(json.dumps([code, text.getvalue()]), file=answers, flush=True)
"""

# Many runs in one process, for those that measure little or nothing: importing jax takes most of such a run.
BATCH = """
import contextlib, io, json, os, pathlib, sys
from tests.bench import pin
pin.pin(None)
import jax, pytest
results = {}
for name, args, folder in json.load(sys.stdin):
    os.chdir(folder)
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = int(pytest.main(args))
    results[name] = code, text.getvalue()
pathlib.Path(sys.argv[1]).write_text(json.dumps(results))
"""


class Ended(NamedTuple):
    """How a run ended: exit code, and all that it printed."""

    code: int
    text: str


class Runner:
    """Runs pytest in processes of their own, with `folder` as working directory and for all that they write."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        """`root` is the tree that is run: this one, or a copy of it."""
        self.folder, self.root = folder, root
        self.store = folder / "store"
        plugins = folder / "plugins"
        plugins.mkdir(parents=True)
        (plugins / "tinygrid.py").write_text(TINY)
        # What a pytest or an xdist worker around this one tells its children is not meant for a run of its own.
        others = ("PYTEST_", "COV_", "GITHUB_", "CI")
        env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        self.env = env | {
            "PYTHONPATH": os.pathsep.join(map(str, (plugins, root))),
            "JAX_PLATFORMS": "cpu",
            # Programs compiled by an earlier run are read again: most of the time of a tiny cell.
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def plugin(self, name: str, text: str) -> str:
        """Write a plugin; returns the words that load it after `tinygrid`."""
        (self.folder / "plugins" / f"{name}.py").write_text(text)
        return name

    def options(self, path: str | None = None, grid: str | None = "tiny") -> list[str]:
        """The words of each run: the path first, and nothing written outside `folder`."""
        words = [
            path or str(self.root / "tests/bench"),
            "-p",
            "tinygrid",
            "-o",
            f"cache_dir={self.folder / 'cache'}",
            f"--reports={self.folder / 'reports'}",
            "--bench-seconds",
            "0.05",
        ]
        return words + (["--grid", grid] if grid else [])

    def pytest(
        self,
        *args: str,
        path: str | None = None,
        cwd: Path | None = None,
        grid: str | None = "tiny",
        **env: str,
    ) -> Ended:
        """`python -m pytest` with these further arguments."""
        return self.python("-m", "pytest", *self.options(path, grid), *args, cwd=cwd, **env)

    def python(self, *args: str, cwd: Path | None = None, text: str | None = None, **env: str) -> Ended:
        """`python` with these arguments, standard output and error in one text."""
        done = subprocess.run(
            [sys.executable, *args],
            cwd=cwd or self.folder,
            env=self.env | env,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        return Ended(done.returncode, done.stdout)

    def batch(self, runs: dict[str, list[str]], cwd: dict[str, Path] | None = None) -> dict[str, Ended]:
        """Many runs of pytest, one after the other in one process; the arguments of each are complete."""
        wanted = [(name, args, str((cwd or {}).get(name, self.folder))) for name, args in runs.items()]
        answer = self.folder / "batch.json"
        done = self.python("-c", BATCH, str(answer), text=json.dumps(wanted))
        assert done.code == 0, done.text
        return {name: Ended(*result) for name, result in json.loads(answer.read_text()).items()}


class Serving:
    """One process that runs pytest and the verbs for a `Runner`, as often as it is asked; close it with `with`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._log = runner.folder / "serving.log"
        cache = shlex.quote(f"cache_dir={runner.folder / 'cache'}")
        # What pytest would rewrite was imported by an earlier run, or by a verb.
        quiet = "-W ignore::pytest.PytestAssertRewriteWarning"
        addopts = f"{ADDOPTS} {quiet} -o {cache}"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVING],
                cwd=runner.folder,
                env=runner.env | {"PYTEST_ADDOPTS": addopts},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def pytest(self, *words: str, cwd: Path | None = None) -> Ended:
        """A run of grid `tiny`, or of the one that the words name."""
        grid = () if "--grid" in words else ("--grid", "tiny")
        reports = () if "--reports" in words else ("--reports", str(self._runner.folder / "reports"))
        return self._ask("pytest", [str(self._runner.root / "tests/bench"), *grid, *reports, *words], cwd)

    def bare(self, *words: str, cwd: Path | None = None) -> Ended:
        """A run with these words alone."""
        return self._ask("pytest", list(words), cwd)

    def verb(self, *words: str) -> Ended:
        """A verb of `python -m tests.bench`."""
        return self._ask("verb", list(words), None)

    def _ask(self, kind: str, words: list[str], cwd: Path | None) -> Ended:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([kind, words, str(cwd or self._runner.folder)]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._log.read_text()
        return Ended(*json.loads(answer))


def cases(junit: Path) -> dict[str, list[str]]:
    """Test name -> what JUnit says of it (failure, skipped, error), one list entry for each; each name once."""
    found = list(ElementTree.parse(junit).iter("testcase"))
    names = [case.get("name", "") for case in found]
    assert len(set(names)) == len(names), f"doubled cases in {names}"
    return {name: [child.tag for child in case] for name, case in zip(names, found, strict=True)}
