"""Which revision of the source a run measures, where git knows."""

import dataclasses
import getpass
import subprocess
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Revision:
    """`id` is None without git or outside a checkout; `changed` is not committed yet; `author` runs it."""

    id: str | None
    changed: tuple[str, ...]
    author: str


def describe(root: Path) -> Revision:
    """The revision of the checkout that holds `root`."""
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return Revision(None, (), _user())
    status = _git(root, "status", "--porcelain", "--untracked-files=no") or ""
    author = _git(root, "config", "user.name") or _user()
    return Revision(head, tuple(line[3:] for line in status.splitlines()), author)


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.rstrip("\n")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # A container's user may have no name.
        return "unknown"
