"""Reaches the places where checkpoints are kept: a local directory, or whatever fsspec reaches by a URL
(``s3://bucket/job``).

A file appears under its name completely or not at all, and is not changed afterwards but by an atomic replacement.
Paths are relative to the place, with ``/``. What goes wrong is a ``StorageError`` of one line; a file that is not there
is a ``FileNotFoundError``.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

from everstep.errors import ConfigError, StorageError, escaped
from everstep.storage.atomic import private

_HOPELESS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
}
"""Trying again does not help soon: a full disk, a limit, no permission."""

_BLOCK_BYTES = 8 << 20  # of an upload in parts: what is held in memory


class NewFile(abc.ABC):
    """A file that is being written: it exists once ``commit`` has returned, durably. As a context manager it is
    thrown away unless it was committed."""

    @abc.abstractmethod
    def write(self, data: bytes | memoryview) -> None: ...

    @abc.abstractmethod
    def commit(self) -> None: ...

    @abc.abstractmethod
    def abort(self) -> None:
        """Throws away what was written; harmless after ``commit`` and when repeated."""

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()


class StoragePlace(abc.ABC):
    """Is one directory or URL. Thread-safe, one file at a time per thread."""

    url: str

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @abc.abstractmethod
    def create(self, path: str) -> NewFile:
        """Return a new file; directories on the way are made. One that is there is replaced at ``commit``."""

    @abc.abstractmethod
    def open(self, path: str) -> BinaryIO:
        """Open a file for reading, from its beginning. Its reads raise OSError."""

    @abc.abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return all files of the place with their bytes, also what killed writers left under temporary names
        (``.*.tmp``); empty if the place does not exist."""

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Return the files directly in the place, not in folders of it."""

    @abc.abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file; harmless when it is not there."""

    def make_private(self, path: str) -> None:
        """Make a folder whose files only this user may read. (Object stores have rights of their own.)"""
        bare(path)

    def put(self, path: str, data: bytes) -> None:
        """Write a whole file at once, durable on return."""
        with self.create(path) as file:
            file.write(data)
            file.commit()

    def read(self, path: str, limit_bytes: int) -> bytes:
        """Return a whole file; StorageError if it is longer than ``limit_bytes``."""
        with self.open(path) as file, self._reading(path):
            data = file.read(limit_bytes + 1)
        if len(data) > limit_bytes:
            raise StorageError(f"{self.url}/{path} is longer than {limit_bytes} bytes", passing=False)
        return data

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot read {self.url}/{path}: {error.strerror or error}") from error


def bare(path: str) -> str:
    """Return ``path`` if it is below its place: relative, without ``..`` or control characters. Raises StorageError."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in path or not path.isprintable():
        raise StorageError(f"{escaped(path)!r} is no path within a place of checkpoints", passing=False)
    return path


def open_place(where: str | Path) -> StoragePlace:
    """Return the place at a directory (it need not exist) or URL. Raises ConfigError: no such protocol, or its package
    is not installed."""
    text = str(where)
    if text.startswith("file://"):
        text = text[len("file://") :]
    if "://" not in text:
        return LocalPlace(Path(text))
    return RemotePlace(text)


# ---------------------------------------------------------------- a local directory


class LocalPlace(StoragePlace):
    """Writes to a local directory: ``write``, ``fsync``, ``rename``, ``fsync`` of the directory. What is made in a
    directory of the user's alone is, too; elsewhere the user's umask says who may read it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def create(self, path: str) -> NewFile:
        return _LocalFile(self.root / bare(path))

    def make_private(self, path: str) -> None:
        folder = self.root / bare(path)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot make {folder}: {error.strerror}", passing=error.errno not in _HOPELESS
            ) from error

    def open(self, path: str) -> BinaryIO:
        try:
            return (self.root / bare(path)).open("rb")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(f"cannot read {self.url}/{path}: {error.strerror}") from error

    def sizes(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for folder, _, names in os.walk(self.root):
            at = os.path.relpath(folder, self.root)
            for name in names:
                path = name if at == "." else f"{at}/{name}"
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    out[path] = (Path(folder) / name).stat().st_size
        return out

    def names(self) -> list[str]:
        try:
            return sorted(e.name for e in os.scandir(self.root) if e.is_file() and not e.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageError(f"cannot list {self.url}: {error.strerror}") from error

    def delete(self, path: str) -> None:
        target = self.root / bare(path)
        try:
            target.unlink(missing_ok=True)
            if target.parent != self.root:
                with contextlib.suppress(OSError):  # other files are in it
                    target.parent.rmdir()
        except OSError as error:
            raise StorageError(f"cannot delete {target}: {error.strerror}") from error


class _LocalFile(NewFile):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
        self._file: io.FileIO | None = None
        with self._writing():
            missing = [p for p in (path.parent, *path.parent.parents) if not p.exists()]
            known = missing[-1].parent if missing else path.parent
            own = not known.stat().st_mode & 0o077  # (as a run directory is)
            for folder in reversed(missing):
                folder.mkdir(mode=0o700 if own else 0o777, exist_ok=True)
                _sync(folder.parent)
            self._file = open(self.temporary, "xb", buffering=0, opener=private if own else None)  # noqa: SIM115

    def write(self, data: bytes | memoryview) -> None:
        assert self._file is not None, "written after its end"
        left = memoryview(data).cast("B")
        with self._writing():
            while left:
                left = left[self._file.write(left) :]

    def commit(self) -> None:
        assert self._file is not None, "committed twice"
        with self._writing():
            os.fsync(self._file.fileno())
            self._file.close()
            self.temporary.replace(self.path)
            self._file = None
            _sync(self.path.parent)

    def abort(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                self.temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abort()
            text = f"cannot write {self.path}: {error.strerror}"
            raise StorageError(text, passing=error.errno not in _HOPELESS) from error


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---------------------------------------------------------------- fsspec


_OPTIONS: dict[str, dict[str, Any]] = {
    # An unreachable store is told within seconds; the writer tries again on its own.
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 2}}},
}


_STORES = ("s3", "gs", "az", "oss")
_NOT_AT_ONCE = frozenset(
    {"ftp", "sftp", "ssh", "smb", "http", "https", "webhdfs", "zip", "tar", "git", "github", "data"}
)


class RemotePlace(StoragePlace):
    """An object store: a put under a name is atomic there. Credentials and endpoints come from the environment, as
    the protocol's package reads them (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``, ...)."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        protocol = url.partition("://")[0]
        if protocol in _NOT_AT_ONCE:
            raise ConfigError(
                f"{url}: {protocol}:// has no way to make a file appear completely or not at all; use a directory "
                "(also "
                f"file://), or an object store: {', '.join(f'{name}://' for name in _STORES)}"
            )
        try:
            kind = fsspec.get_filesystem_class(protocol)
            options = {**_OPTIONS.get(protocol, {}), "use_listings_cache": False}
            self._fs = kind(**options)
            self._root = str(kind._strip_protocol(self.url)).rstrip("/")
        except ImportError as error:
            raise ConfigError(f"{url}: {' '.join(str(error).split())} (pip install 'everstep[s3]' for s3://)") from None
        except ValueError as error:
            known = ", ".join(f"{name}://" for name in ("file", *_STORES))
            raise ConfigError(f"{url}: {' '.join(str(error).split())}; these work: {known}") from None

    def create(self, path: str) -> NewFile:
        with self._asking("write", path):
            file = self._fs.open(f"{self._root}/{bare(path)}", "wb", block_size=_BLOCK_BYTES)
        return _RemoteFile(self, path, file)

    def put(self, path: str, data: bytes) -> None:
        with self._asking("write", path):
            self._fs.pipe_file(f"{self._root}/{bare(path)}", data)

    def open(self, path: str) -> BinaryIO:
        with self._asking("read", path):
            file = self._fs.open(f"{self._root}/{bare(path)}", "rb", block_size=_BLOCK_BYTES, cache_type="readahead")
        return cast(BinaryIO, io.BufferedReader(_Raising(self, path, file), 1 << 20))

    def sizes(self) -> dict[str, int]:
        try:
            with self._asking("list", ""):
                found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {self._relative(name): int(info["size"]) for name, info in found.items()}

    def names(self) -> list[str]:
        try:
            with self._asking("list", ""):
                found = self._fs.ls(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(self._relative(info["name"]) for info in found if info["type"] == "file")

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._asking("delete", path):
            self._fs.rm_file(f"{self._root}/{bare(path)}")

    def _relative(self, name: str) -> str:
        return str(name).removeprefix(self._root).lstrip("/")

    @contextlib.contextmanager
    def _asking(self, verb: str, path: str) -> Iterator[None]:
        """Turn whatever a protocol's package raises into StorageError; the packages have no common base."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise
        except Exception as error:
            where = f"{self.url}/{path}" if path else self.url
            why = " ".join(str(error).split()) or type(error).__name__
            hopeless = isinstance(error, PermissionError)
            raise StorageError(f"cannot {verb} {where}: {why[:300]}", passing=not hopeless) from error


class _RemoteFile(NewFile):
    def __init__(self, place: RemotePlace, path: str, file: Any) -> None:
        self._place, self._path = place, path
        self._file: Any = file

    def write(self, data: bytes | memoryview) -> None:
        with self._writing():
            self._file.write(bytes(data))

    def commit(self) -> None:
        with self._writing():
            self._file.close()  # until here there are parts at most, under no name
        self._file = None

    def abort(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True  # its destructor would write the rest

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with self._place._asking("write", self._path):
                yield
        except FileNotFoundError as error:  # the bucket does not exist
            raise StorageError(f"cannot write {self._place.url}/{self._path}: {error}", passing=False) from error


class _Raising(io.RawIOBase):
    """Is a file of fsspec whose reads raise OSError only."""

    def __init__(self, place: RemotePlace, path: str, file: Any) -> None:
        self._place, self._path, self._file = place, path, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except Exception as error:
            raise OSError(errno.EIO, " ".join(str(error).split())[:300]) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
