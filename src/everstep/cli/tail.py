"""Follow a file that others append to."""

from __future__ import annotations

from pathlib import Path

_PIECE_BYTES = 1 << 20


class LogTail:
    """``lines`` gives the whole lines written since the last call; a line without its end waits for it, or for
    ``last``: nobody will write any more."""

    def __init__(self, path: Path, at_end: bool = False) -> None:
        self._path = path
        self._rest = b""
        self._offset = 0
        if at_end and path.exists():
            self._offset = path.stat().st_size

    def lines(self, last: bool = False) -> list[str]:
        try:
            with self._path.open("rb") as stream:
                stream.seek(0, 2)
                if stream.tell() < self._offset:  # truncated: begin anew
                    self._offset, self._rest = 0, b""
                stream.seek(self._offset)
                data = stream.read(_PIECE_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _PIECE_BYTES or (last and self._rest):
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace").rstrip("\r") for line in whole]
