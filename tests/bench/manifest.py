"""The manifest of one backend's folder: which file each grid is compared with, and every file's checksum.

It is written last, so it is the commit point of an update: a file that it does not list is not there yet. Its
own checksum, over all that comes after the third line, tells a manifest edited by hand or cut short.
"""

import hashlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import atomic, home
from .errors import BaselineError

FILE = "manifest.toml"
SCHEMA = 1
RECORD_NAME = re.compile(r"(\d{4,})_([A-Za-z0-9_-]+)\.json")
PROGRAM_NAME = re.compile(r"programs/[0-9a-f]{64}\.bin")

_HEAD = f"# Written by `tox run -e baseline`. Each line is checked: do not edit.\nschema = {SCHEMA}\n"
_DIGEST = re.compile(rb'digest = "([0-9a-f]{64})"\n')
_SCHEMA = re.compile(rb"^schema = (\d+)\n", re.MULTILINE)


@dataclass(frozen=True)
class Grid:
    """What the baseline of one grid consists of: the file's name and, in its order, the ids in it."""

    file: str
    cells: tuple[str, ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """What a folder holds; without further arguments, nothing.

    Attributes:
      folder: the backend's folder.
      grids: grid -> what it is compared with.
      files: name inside the folder, with slashes -> sha256.
      history_bytes: how many bytes of the history count; more may follow, left by an interrupted update.
      history_sha256: of those.
    """

    folder: Path
    grids: dict[str, Grid] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    history_bytes: int = 0
    history_sha256: str = hashlib.sha256().hexdigest()

    @property
    def way_out(self) -> str:
        return way_out(self.folder)

    def content(self, name: str) -> bytes:
        """The bytes of a listed file. Raises BaselineError where it is not listed, missing or changed."""
        path = self.folder / name
        if name not in self.files:
            raise BaselineError(f"{path} is not listed in {FILE}; {self.way_out}")
        data = atomic.read(path, self.way_out)
        if sha256(data) != self.files[name]:
            raise BaselineError(
                f"{path} was changed or damaged: its checksum differs from the one in {FILE}; {self.way_out}"
            )
        return data


def program_name(digest: str) -> str:
    """A program's name inside its backend's folder."""
    return f"programs/{digest}.bin"


def sha256(data: bytes) -> str:
    """The checksum that a manifest holds."""
    return hashlib.sha256(data).hexdigest()


def way_out(folder: Path) -> str:
    """How to get a sound folder again: the end of each message about a damaged one."""
    return (
        f"restore it from version control (git checkout -- {shlex.quote(str(folder))}), "
        f"or move the folder away and record again: {home.BASELINE.removesuffix(' --')}"
    )


def absent(folder: Path) -> bool:
    """Whether nothing was ever stored in a folder: a lost manifest, with other files still there, is damage."""
    return not folder.is_dir() or all(path.name.startswith(".") for path in folder.iterdir())


def read(folder: Path) -> Manifest:
    """Reads and checks a folder's manifest; the files that it lists are checked when they are read.

    Raises:
      BaselineError: it is missing, of another schema, cut short or edited, or lists what no update writes.
    """
    path = folder / FILE
    data = atomic.read(path, way_out(folder))
    try:
        return _parse(folder, data)
    except BaselineError as fault:
        raise BaselineError(f"{path} {fault}; {way_out(folder)}") from None


def render(manifest: Manifest) -> bytes:
    """The manifest as it is stored: equal contents give equal bytes, and a changed cell a changed line."""
    lines = []
    for name, grid in sorted(manifest.grids.items()):
        lines += [f"[grids.{name}]", f"file = {_quoted(grid.file)}"]
        lines += [f"cells = {_array(grid.cells)}", f"skipped = {_array(grid.skipped)}", ""]
    lines += ["[history]", f"bytes = {manifest.history_bytes}", f'sha256 = "{manifest.history_sha256}"', ""]
    lines += [
        "[files]",
        *(f'{_quoted(name)} = "{digest}"' for name, digest in sorted(manifest.files.items())),
    ]
    body = ("\n".join(lines) + "\n").encode()
    return f'{_HEAD}digest = "{sha256(body)}"\n'.encode() + body


def _parse(folder: Path, data: bytes) -> Manifest:
    schema = _SCHEMA.search(data)
    if schema and int(schema[1]) != SCHEMA:
        raise BaselineError(f"is of schema {int(schema[1])}, this suite reads {SCHEMA}")
    digest = _DIGEST.match(data, len(_HEAD))
    if (
        not data.startswith(_HEAD.encode())
        or not digest
        or sha256(data[digest.end() :]) != digest[1].decode()
    ):
        raise BaselineError("is truncated or was edited by hand: it does not fit its own checksum")
    try:
        content = tomllib.loads(data.decode())
        grids = {
            name: Grid(str(grid["file"]), tuple(map(str, grid["cells"])), tuple(map(str, grid["skipped"])))
            for name, grid in content.get("grids", {}).items()
        }
        manifest = Manifest(
            folder, grids, content["files"], content["history"]["bytes"], content["history"]["sha256"]
        )
        for name in manifest.files:
            # The pattern keeps a name inside the folder.
            if not RECORD_NAME.fullmatch(name) and not PROGRAM_NAME.fullmatch(name):
                raise BaselineError(f"lists {name!r}, neither a record nor a program")
        if manifest.history_bytes < 0:
            raise BaselineError(f"has history.bytes={manifest.history_bytes}; it cannot be negative")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BaselineError(f"lacks a field or garbles it ({error!r})") from error
    return manifest


def _array(texts: Iterable[str]) -> str:
    """A text a line."""
    lines = [f"    {_quoted(text)},\n" for text in texts]
    return f"[\n{''.join(lines)}]" if lines else "[]"


def _quoted(text: Any) -> str:
    """A basic string of TOML; JSON's is one, but that TOML knows no surrogates and wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
