"""What the stored baselines of one backend and JAX tell of their cells: figures at each update, and its reason."""

import dataclasses
from pathlib import Path
from typing import Any

from . import baseline, history
from . import manifest as manifests
from .errors import BaselineError


@dataclasses.dataclass(frozen=True)
class Update:
    """One update of the baseline.

    Attributes:
      number: of its file.
      file: that it wrote.
      date: ISO, to the second.
      by, revision: who recorded it, from which source.
      reason: why; `accept_slower`, why worse cells were taken, is empty where none were.
      only: the cells that it was narrowed to; empty where it was not.
      changed: id -> verdict, of the cells that had moved.
      records: id -> the record as it then stood; None where the file is no longer sound.
    """

    number: int
    file: str
    date: str
    by: str
    revision: str
    reason: str
    accept_slower: str
    only: str
    changed: dict[str, str]
    records: dict[str, dict[str, Any]] | None


def updates(folder: Path, grid: str | None = None) -> tuple[Update, ...]:
    """The updates of a folder, oldest first; of one grid, or of all.

    Raises BaselineError where the manifest or the history cannot be trusted.
    """
    if manifests.absent(folder):
        return ()
    manifest = manifests.read(folder)
    entries = history.read(manifest)
    return tuple(_update(manifest, entry) for entry in entries if grid in (None, entry.get("grid")))


def _update(manifest: manifests.Manifest, entry: dict[str, Any]) -> Update:
    def text(name: str) -> str:
        return str(entry.get(name) or "")

    file = text("file")
    name = manifests.RECORD_NAME.fullmatch(file)
    changes = entry.get("changes")
    changed = [its for its in changes if isinstance(its, dict)] if isinstance(changes, list) else []
    return Update(
        int(name[1]) if name else 0,
        file,
        text("date"),
        text("by"),
        text("revision"),
        text("reason"),
        text("accept_slower"),
        text("only"),
        {str(its.get("id")): str(its.get("status")) for its in changed},
        _records(manifest, file),
    )


def _records(manifest: manifests.Manifest, file: str) -> dict[str, dict[str, Any]] | None:
    try:
        # Their programs are not looked at: nothing here runs them.
        found = baseline.parse(baseline.decoded(manifest, file), manifest.folder / file)
    except BaselineError:
        return None  # An old file that was lost takes its figures with it, not the page.
    return {identity: entry["extra_info"] for identity, entry in found.records.items()}
