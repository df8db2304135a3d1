"""Writes a file of JSON lines that never grows beyond a bound: what is older is in ``FILE.1``, and before that
forgotten."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from everstep.storage.atomic import private

logger = logging.getLogger("everstep.monitor")


class RotatedFile:
    """Keeps at most ``2 * max_bytes`` on disk. A full disk costs lines, never the job."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max = path, max_bytes
        self._failed = False
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        return open(self._path, "ab", opener=private)

    def __repr__(self) -> str:
        return f"<{self._path.name} of at most {self._max} bytes>"

    def write(self, lines: Sequence[bytes]) -> None:
        """Append ``lines`` (without their newlines)."""
        if not lines:
            return
        try:
            if self._file.tell() >= self._max:
                self._file.close()
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file = self._open()
            self._file.write(b"\n".join(lines) + b"\n")
            self._file.flush()
            self._failed = False
        except (OSError, ValueError) as error:  # (ValueError: it could not be opened again)
            if not self._failed:
                logger.warning("cannot write %s: %s", self._path, error)
            self._failed = True
            if self._file.closed:
                with contextlib.suppress(OSError):
                    self._file = self._open()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
