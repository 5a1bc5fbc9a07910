"""What `aa` and `power` share: a store of their own, one real gate run over it, and competing load."""

import argparse
import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import baseline, environment, home
from .errors import BaselineError

WORK = home.ROOT / "reports" / "proof"
BUSY = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(sys.argv[1])})
while True:
    pass
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of both verbs."""
    parser.add_argument("--runs", type=int, default=1, help="fresh processes for each row (default: 1)")
    parser.add_argument("--load", action="store_true", help="with a busy process on each core")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of its store, journal and reports")


def record(work: Path, grid: str) -> Path:
    """A store in `work` with a baseline of this grid, recorded once for each source. Returns its root.

    Raises BaselineError where recording failed.
    """
    root = work / f"baselines-{source()[:12]}"
    with contextlib.suppress(BaselineError):
        baseline.find(root, environment.describe(), grid)
        return root
    code = subprocess.run(
        [
            *(sys.executable, "-m", __package__, "baseline", "--reason", "compared with itself"),
            *("--grid", grid, "--baselines", str(root), "--allow-dirty"),
        ],
        env=_environment(work),
    ).returncode
    if code:
        raise BaselineError(f"recording the grid {grid} of {root} ended with {code}; see above")
    return root


def gate(work: Path, root: Path, grid: str, *options: str) -> tuple[int, dict[str, Any]]:
    """One gate run in a fresh process: its exit code and its verdict (empty where none was written)."""
    reports = work / "reports"
    (reports / "verdict.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *home.ARGUMENTS, "-q", "--grid", grid, f"--baselines={root}"]
    command += [f"--reports={reports}", *options, "--benchmark-compare"]
    done = subprocess.run(
        command, env=_environment(work), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    (reports / "output.txt").write_text(done.stdout, encoding="utf-8")
    try:
        return done.returncode, json.loads((reports / "verdict.json").read_text("utf-8"))
    except OSError:
        return done.returncode, {}


def source() -> str:
    """Digest of the measured and of the measuring source."""
    files = sorted((*home.SOURCES.glob("moe/**/*.py"), *home.FOLDER.glob("**/*.py")))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@contextlib.contextmanager
def load(wanted: bool) -> Iterator[None]:
    """Competing load: a process that never waits on each core, where wanted."""
    cores = (
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    busy = [subprocess.Popen([sys.executable, "-c", BUSY, str(core)]) for core in cores if wanted]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def interval(hits: int, trials: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    if not trials:
        return 0.0, 1.0
    z, share = 1.96, hits / trials
    middle = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, (middle - half) / (1 + z * z / trials)), min(1.0, (middle + half) / (1 + z * z / trials))


class Log:
    """What the runs of a verb found, a JSON line each; it adds up over calls for one source and machine."""

    def __init__(self, path: Path) -> None:
        described = environment.describe()
        self._key = {
            "source": source(),
            **{name: described[name] for name in ("jax", "cpu", "cores")},
        }
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def machine(self) -> str:
        return f"JAX {self._key['jax']}, {self._key['cores']} cores of {self._key['cpu']}"

    def append(self, **values: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self._key | values) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """The lines of this source and machine."""
        try:
            lines = [json.loads(line) for line in self._path.read_text("utf-8").splitlines()]
        except OSError:
            return []
        return [line for line in lines if self._key.items() <= line.items()]


def _environment(work: Path) -> dict[str, str]:
    """Programs that an earlier process compiled are read again: compiling is most of a small cell's time."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(work / "compiled")}
    return os.environ | cache | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
