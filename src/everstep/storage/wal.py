"""Tells a damaged write-ahead log of SQLite from one whose writer was killed.

SQLite takes a log up to its first frame whose checksum is wrong and is silent about what follows. After a crash that is
right: the end may be torn. But every commit of the journal is synced before the next one begins, so two commits behind
a wrong frame mean that a frame was changed which had been durable. Damage within the last commit cannot be told from a
torn end. Format: https://sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import sqlite3
import struct
from pathlib import Path

from everstep.errors import PlatformError

_HEADER_BYTES, _FRAME_BYTES = 32, 24
_MAGIC = (0x377F0682, 0x377F0683)


class WalFile:
    """Knows what lies in the ``-wal`` beside ``path``, read before SQLite opens the database."""

    def __init__(self, path: Path) -> None:
        """Raises PlatformError: the log's header was changed."""
        self.path = path
        self._file = path.with_name(path.name + "-wal")
        self._header = b""
        self._commits: list[int] = []  # numbers of the frames that end a transaction of this log
        try:
            with self._file.open("rb") as file:
                size = self._file.stat().st_size
                header = file.read(_HEADER_BYTES)
                if len(header) < _HEADER_BYTES or size < _HEADER_BYTES + _FRAME_BYTES:
                    return
                if not _sound(header):  # (or it was being written just now)
                    file.seek(0)
                    header = file.read(_HEADER_BYTES)
                if not _sound(header):
                    raise PlatformError(f"{path} is damaged: the header of its -wal file was changed")
                self._header = header
                page_bytes = struct.unpack_from(">I", header, 8)[0]
                salts = header[16:24]
                n = (size - _HEADER_BYTES) // (_FRAME_BYTES + page_bytes)
                for i in range(n):
                    file.seek(_HEADER_BYTES + i * (_FRAME_BYTES + page_bytes))
                    frame = file.read(_FRAME_BYTES)
                    if len(frame) == _FRAME_BYTES and frame[8:16] == salts and frame[4:8] != bytes(4):
                        self._commits.append(i + 1)
        except FileNotFoundError:
            return
        except OSError as error:
            raise PlatformError(f"cannot read {self._file}: {error.strerror}") from error

    def check(self, db: sqlite3.Connection) -> None:
        """Compares with the frames that SQLite took. Raises PlatformError: it left out commits that were durable;
        sqlite3.Error."""
        if not self._commits:
            return
        _, frames, _ = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        try:
            with self._file.open("rb") as file:
                same = file.read(_HEADER_BYTES) == self._header
        except FileNotFoundError:
            same = False
        if not same or frames < 0:
            return  # another master's writer began the log anew, or is moving it into the database: it has read it all
        lost = [end for end in self._commits if end > frames]
        if len(lost) > 1:
            raise PlatformError(
                f"{self.path} is damaged: its -wal file was changed behind frame {frames}; "
                f"{len(lost)} transactions are lost"
            )


def _sound(header: bytes) -> bool:
    magic = struct.unpack_from(">I", header)[0]
    if magic not in _MAGIC:
        return False
    words = struct.unpack_from(">6I" if magic & 1 else "<6I", header)
    a = b = 0
    for x, y in zip(words[::2], words[1::2], strict=True):
        a = (a + x + b) & 0xFFFFFFFF
        b = (b + y + a) & 0xFFFFFFFF
    return (a, b) == struct.unpack_from(">2I", header, 24)
