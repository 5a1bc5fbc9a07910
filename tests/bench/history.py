"""The history of one backend's folder: a JSON line for each update, never changed once it is there.

The manifest holds length and checksum of what counts, so an interrupted update leaves at most further bytes,
which the next one drops.
"""

import json
from typing import Any

from . import atomic
from .errors import BaselineError
from .manifest import Manifest, sha256

FILE = "history.jsonl"


def read(manifest: Manifest) -> tuple[dict[str, Any], ...]:
    """The entries, oldest first. Raises BaselineError where `sound` does, or a line is no JSON object."""
    path = manifest.folder / FILE
    try:
        entries = tuple(json.loads(line) for line in sound(manifest).decode().splitlines())
    except (ValueError, RecursionError) as error:
        raise BaselineError(f"{path} holds a line that is not JSON ({error}); {manifest.way_out}") from error
    if not all(isinstance(entry, dict) for entry in entries):
        raise BaselineError(f"{path} holds a line that is no JSON object; {manifest.way_out}")
    return entries


def sound(manifest: Manifest) -> bytes:
    """The bytes that count. Raises BaselineError where they are missing or changed."""
    if not manifest.history_bytes:
        return b""
    path = manifest.folder / FILE
    data = atomic.read(path, manifest.way_out)[: manifest.history_bytes]
    if len(data) != manifest.history_bytes or sha256(data) != manifest.history_sha256:
        raise BaselineError(
            f"{path} was changed or damaged: its checksum differs from the manifest's; {manifest.way_out}"
        )
    return data


def appended(manifest: Manifest, entry: dict[str, Any]) -> bytes:
    """The bytes that count, and one more entry. Raises BaselineError for an entry that JSON cannot hold."""
    try:
        line = json.dumps(entry, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise BaselineError(
            f"entry={entry!r} cannot be stored ({error}); give plain figures and text"
        ) from error
    return sound(manifest) + line.encode()
