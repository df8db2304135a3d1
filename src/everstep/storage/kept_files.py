"""Copies files of a run directory to a place and back; each has its size and digest."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from everstep.bounds import MALFORMED
from everstep.errors import ConfigError, PlatformError
from everstep.storage.atomic import private
from everstep.storage.places import StoragePlace

JOURNAL: Final = "journal.sqlite"
PIECE_BYTES: Final = 4 << 20
FILE_MAX_BYTES: Final = 64 << 30


class KeptFile(msgspec.Struct, frozen=True, array_like=True):
    """Is one file: its path in the run directory, its size, and the SHA-256 of its contents."""

    path: str
    size_bytes: int
    digest: str


class KeptIndex(Protocol):
    """Says what is kept: its version, how often it was kept, and the files."""

    @property
    def version(self) -> int: ...

    @property
    def number(self) -> int: ...

    @property
    def files(self) -> tuple[KeptFile, ...]: ...


_Index = TypeVar("_Index", bound=KeptIndex)


def read_index(
    place: StoragePlace,
    path: str,
    decoder: msgspec.json.Decoder[_Index],
    version: int,
    max_bytes: int,
    is_known: Callable[[str], bool],
) -> _Index | None:
    """Return the index at ``path`` of a place; None: there is none. ``is_known``: whether a file of this name may be in
    it. Raises ConfigError: it is damaged, or another version's; StorageError."""
    try:
        raw = place.read(path, max_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        index = decoder.decode(raw)
    except MALFORMED as error:
        raise ConfigError(f"{place.url}/{path} is damaged: {error}") from None
    if index.version != version:
        raise ConfigError(f"{place.url}/{path} is of version {index.version}; this everstep reads version {version}")
    names = [file.path for file in index.files]
    strange = [name for name in names if not is_known(name)]
    if strange or len(set(names)) < len(names) or index.number < 1:
        raise ConfigError(f"{place.url}/{path} is damaged: {strange[0] if strange else 'a file'} does not belong there")
    return index


def put_file(place: StoragePlace, run_dir: Path, name: str, to: str) -> KeptFile:
    """Copy a file of a run directory to a place; return what it was. Raises StorageError, PlatformError."""
    digest, size = hashlib.sha256(), 0
    with _readable(run_dir, name) as path:
        try:
            with path.open("rb") as source, place.create(to) as file:
                while piece := source.read(PIECE_BYTES):
                    file.write(piece)
                    digest.update(piece)
                    size += len(piece)
                file.commit()
        except OSError as error:
            raise PlatformError(f"cannot read {path}: {error.strerror or error}") from error
    return KeptFile(name, size, digest.hexdigest())


@contextlib.contextmanager
def _readable(run_dir: Path, name: str) -> Iterator[Path]:
    """Give the file to read: of a journal a copy that has its write-ahead log, too."""
    if name != JOURNAL:
        yield run_dir / name
        return
    with tempfile.TemporaryDirectory(prefix=".kept-", dir=run_dir) as folder:
        copy = Path(folder) / JOURNAL
        try:
            with (
                contextlib.closing(sqlite3.connect(f"{(run_dir / name).resolve().as_uri()}?mode=ro", uri=True)) as old,
                contextlib.closing(sqlite3.connect(copy)) as new,
            ):
                old.backup(new)
        except sqlite3.Error as error:
            raise PlatformError(f"cannot copy {run_dir / name}: {error}") from error
        yield copy


def fetch_file(place: StoragePlace, path: str, file: KeptFile, to: Path) -> None:
    """Copy a file of a place to a new file here. Raises PlatformError: it is gone or damaged, or the disk refuses;
    StorageError."""
    if not 0 <= file.size_bytes <= FILE_MAX_BYTES:
        raise PlatformError(f"{place.url}/{path}: its index says {file.size_bytes} bytes")
    digest, size = hashlib.sha256(), 0
    try:
        to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with place.open(path) as source, open(to, "xb", opener=private) as target:
            while piece := source.read(PIECE_BYTES):
                size += len(piece)
                if size > file.size_bytes:
                    break
                digest.update(piece)
                target.write(piece)
    except FileNotFoundError:
        raise PlatformError(f"{place.url}/{path} is gone; nothing was begun") from None
    except OSError as error:
        raise PlatformError(f"cannot copy {place.url}/{path} to {to}: {error.strerror or error}") from error
    if size != file.size_bytes or digest.hexdigest() != file.digest:
        raise PlatformError(f"{place.url}/{path} is damaged: it is not what its index says; nothing was begun")
