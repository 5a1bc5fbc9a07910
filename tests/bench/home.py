"""Where the suite is at home: in its own repository as `tests.bench`, or installed from the wheel as `moe_bench`.

Every path and command that differs between the two is decided here. Imports nothing that imports jax.
"""

import os
import sys
from pathlib import Path

from .errors import EnvironmentFault

INSTALLED_AS = "moe_bench"
"""The wheel's import name: never a top-level `tests`, which would collide with the user's own."""
PACKAGE = __package__ or INSTALLED_AS
INSTALLED = PACKAGE == INSTALLED_AS
FOLDER = Path(__file__).resolve().parent
SOURCES = FOLDER.parents[PACKAGE.count(".")]
"""The folder that both this package and `moe` are imported from."""
SETTINGS = "pyproject.toml"


def project(start: Path) -> Path:
    """The nearest folder at or above `start` that holds a pyproject.toml; `start` where there is none."""
    return next((folder for folder in (start, *start.parents) if (folder / SETTINGS).is_file()), start)


ROOT = project(Path.cwd().resolve()) if INSTALLED else SOURCES
"""The project that is measured: its settings, baselines and reports are here, and children start here."""
SHOWN = INSTALLED_AS if INSTALLED else "tests/bench"
"""The suite in reports: the folder of the repository, or the package."""
ARGUMENTS = ("-p", INSTALLED_AS, "--pyargs", INSTALLED_AS) if INSTALLED else (str(FOLDER),)
"""What pytest is told to run the suite."""
RUN = " ".join(("pytest", *(ARGUMENTS if INSTALLED else ("tests/bench",))))
"""The command that runs the suite; its options follow."""
BASELINE = f"python -m {INSTALLED_AS} baseline" if INSTALLED else "tox run -e baseline --"
"""The command that records a baseline; its options follow."""
REPOSITORY_ONLY = frozenset({"ab", "upgrade", "peers", "aa", "power", "published", "import-published"})
"""Verbs that work on the suite's own sources, history or published results."""


def settings(root: Path) -> Path | None:
    """The pyproject.toml of a project; a user's may have none, this repository's is an error where it is lost."""
    path = root / SETTINGS
    return None if INSTALLED and not path.is_file() else path


def named(argument: str) -> bool:
    """Whether an argument of pytest names the installed suite (`--pyargs moe_bench`), or a module of it."""
    return INSTALLED and argument.split("::")[0].split(".")[0] == INSTALLED_AS


def refuse_own_repository() -> None:
    """Raises EnvironmentFault where the installed suite is loaded in its own repository, beside that one's."""
    if INSTALLED and (ROOT / "tests/bench/home.py").is_file() and (ROOT / "moe/__init__.py").is_file():
        raise EnvironmentFault(
            f"-p {INSTALLED_AS} loads the installed suite, and {ROOT} is its own repository, whose conftest.py "
            "loads the one of the working tree; leave -p out: pytest tests/bench"
        )


def for_child() -> dict[str, str]:
    """The environment of a child that imports what this process can: pytest's `pythonpath`, say."""
    paths = [os.path.abspath(path or ".") for path in importable()]  # noqa: PTH100 (a zip is no folder)
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def importable() -> list[str]:
    """`sys.path`, with the project itself last: bare `pytest` leaves the working directory out."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return sys.path
