"""One file, whole: a reader, a kill or a full disk finds the old one or the new one. And one update at a time."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import BaselineError

LIMIT_BYTES = 64 * 2**20
"""No file of the store is near it: a larger one is damage, and reading it could take all memory."""
LOCK = ".lock"


def read(path: Path, way_out: str) -> bytes:
    """All bytes of a file. Raises BaselineError, ended by `way_out`, where it cannot be read or is too large."""
    try:
        size = path.stat().st_size
        if size > LIMIT_BYTES:
            raise BaselineError(f"{path} holds {size} bytes, over the limit of {LIMIT_BYTES}; {way_out}")
        return path.read_bytes()
    except OSError as error:
        raise BaselineError(f"{path} cannot be read ({error.strerror or error}); {way_out}") from error


def write(path: Path, data: bytes) -> None:
    """Writes one file under a temporary name, forces it to disk and gives it its name; makes its folder.

    Raises BaselineError when it cannot: the old file, if any, is then as it was, or the new one is there whole
    and only its name may not have reached the disk.
    """
    if len(data) > LIMIT_BYTES:
        raise BaselineError(
            f"{path} would hold {len(data)} bytes, over the limit of {LIMIT_BYTES}; store less"
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)  # Closed by now: Windows does not rename an open file.
        finally:  # Also where the user interrupts.
            temporary.unlink(missing_ok=True)
        if os.name == "posix":  # The name itself is data of the folder.
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise unwritable(path.parent, error) from error


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Keeps other processes' updates of a folder out; waits for theirs, and says so once on standard error.

    The system releases the lock of a process that dies. Who holds it may take it again. Makes the folder, and
    leaves the lock's file there: to remove it would let a third process lock another file of that name.

    Raises BaselineError when the folder cannot be made or written to, or its file system has no locks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One object for all of this process: only the same one can be taken again.
        held = FileLock(folder.resolve() / LOCK, is_singleton=True)
        try:
            held.acquire(blocking=False)
        except Timeout:
            print(f"waiting for another update of {folder}", file=sys.stderr, flush=True)
            held.acquire()
    except (OSError, NotImplementedError) as error:
        raise unwritable(folder, error) from error
    try:
        yield
    finally:
        held.release()


def unwritable(folder: Path, error: Exception) -> BaselineError:
    """The error to raise where writing to a folder failed."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return BaselineError(
            f"no space left in {folder}; free some, and save again (what is stored there is whole)"
        )
    reason = getattr(error, "strerror", None) or error
    return BaselineError(f"cannot write to {folder} ({reason}); make it writable or choose another root")
