"""Writes files that are there completely or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from everstep.errors import PlatformError


def private(path: str, flags: int) -> int:
    """For ``open(..., opener=private)``: a new file is the user's alone, and a link is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Put ``data`` at ``path``: a reader sees the old file or the new one, whatever dies when.

    Durable on return (file and directory are synced). Raises ``PlatformError``; the old file is intact then.
    """
    temporary = ""
    try:
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
        temporary = ""
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise PlatformError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
