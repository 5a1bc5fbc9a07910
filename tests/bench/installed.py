"""Environments with another JAX or Python: made with venv and pip beside the source, kept, and used again."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import atomic, home
from .errors import EnvironmentFault

FOLDER = home.ROOT / ".upgrade"
ASKED = "asked.json"
"""What an environment holds; written last, so that a half one is made anew."""
BESIDE = ("filelock", "flatbuffers")
"""Packages of the extra `bench` that the suite needs to lower and compile a cell."""
VERSION = "import sys; print('%d.%d.%d' % sys.version_info[:3])"


def interpreter(spec: Sequence[str], python: str) -> Path:
    """The interpreter of an environment with these requirements and the project's own; made if there is none.

    Args:
      spec: requirements, such as `jax==0.12.0.1`.
      python: the interpreter to make it with.

    Raises:
      EnvironmentFault: there is no such interpreter, or pip cannot install this.
    """
    number = _version(python)
    asked: dict[str, Any] = {"spec": list(spec), "python": number, "project": _dependencies()}
    name = re.sub(r"[^\w.=+-]+", "_", "_".join(spec))
    folder = FOLDER / f"{name}-py{number}"
    made = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if _holds(folder, asked) and made.exists():
        return made
    try:
        _install(folder, made, asked, python)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    atomic.write(folder / ASKED, json.dumps(asked, indent=1).encode())
    return made


def version(package: str) -> str:
    """Of a package at hand."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise EnvironmentFault(f"{package} is not installed here; give both sides as requirements") from error


def _install(folder: Path, made: Path, asked: dict[str, Any], python: str) -> None:
    said = " ".join(asked["spec"])
    print(f"installing {said} for Python {asked['python']} in {folder}", flush=True)
    _run([python, "-m", "venv", "--clear", str(folder)], f"no environment can be made with {python}")
    pip = [str(made), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]
    # A version that does not exist would be called a conflict with the project's own requirement.
    named = {_name(word) for word in asked["spec"]}
    others = [line for line in asked["project"] if _name(line) not in named]
    _run([*pip, *others, *asked["spec"]], f"{said} cannot be installed for Python {asked['python']}")


def _holds(folder: Path, asked: dict[str, Any]) -> bool:
    try:
        return bool(json.loads((folder / ASKED).read_text("utf-8")) == asked)
    except (OSError, ValueError):
        return False


def _version(python: str) -> str:
    try:
        return subprocess.run(
            [python, "-c", VERSION], capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentFault(f"{python} is no Python that runs ({error}); give the path of one") from error


def _dependencies() -> list[str]:
    """The project's own requirements, and BESIDE."""
    path = home.ROOT / home.SETTINGS
    try:
        document = tomllib.loads(path.read_text("utf-8"))
        beside = [
            line for line in document["project"]["optional-dependencies"]["bench"] if _name(line) in BESIDE
        ]
        return [*document["project"]["dependencies"], *beside]
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentFault(
            f"the requirements in {path} cannot be read ({error}); run it in a checkout of the source"
        ) from error


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0]


def _run(command: list[str], otherwise: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=home.ROOT)
    if done.returncode:
        raise EnvironmentFault(f"{otherwise}: {last_useful(done.stdout)}")


def last_useful(output: str) -> str:
    """The last line that says what went wrong: an ERROR of pip's, else the last that is no notice."""
    useless = ("[notice]", "ResolutionImpossible")
    lines = [
        line.strip()
        for line in output.splitlines()
        if line.strip() and not any(word in line for word in useless)
    ]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR:").strip()
