"""The run directory of one agent: made, locked, and cleaned of sockets."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Self

from everstep.errors import ConfigError, PlatformError, escaped

FOLDERS = ("logs", "sock", "audit")


class RunDirLock:
    """The run directory, held by this process until ``close`` or its end (flock: nothing stale can stay)."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def take(cls, path: Path) -> Self:
        """Make the directory and its folders and lock it.

        Raises ConfigError when another everstep holds it, PlatformError when it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            _check_own(path)
            fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            raise ConfigError(f"run directory {path}: is a file; name a directory") from None
        except OSError as error:
            raise disk_error(path, error) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(fd, 32).decode(errors="replace").strip()
            os.close(fd)
            who = f" (pid {holder})" if holder else ""
            raise ConfigError(
                f"run directory {path}: in use by another everstep{who}; stop that job or choose another --run-dir"
            ) from None
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            for name in FOLDERS:
                (path / name).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            os.close(fd)
            raise disk_error(path, error) from None
        return cls(path, fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_own(path: Path) -> None:
    """Raise ConfigError for a directory in which another user can make us write elsewhere: another user's, or with
    links."""
    owner = path.stat().st_uid
    if owner != os.geteuid() and os.geteuid() != 0:  # (root may be given a directory of its user, in a container)
        raise ConfigError(f"run directory {path}: belongs to another user (uid {owner}); choose another --run-dir")
    for folder in (path, *(path / name for name in (*FOLDERS, "checkpoints"))):
        if folder.is_symlink() or not folder.is_dir():
            continue  # (a link is told with the entries of the run directory, which come first)
        for entry in folder.iterdir():
            if entry.is_symlink():
                raise ConfigError(
                    f"run directory {path}: {escaped(str(entry.relative_to(path)))} in it is a link, which everstep "
                    "does not follow; remove it or choose another --run-dir"
                )


def in_use(path: Path) -> bool:
    """Return whether a living agent holds the run directory."""
    try:
        fd = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def disk_error(path: Path, error: OSError) -> PlatformError:
    """Return the error, in one line, for what the disk refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PlatformError(f"run directory {path}: no space left on the disk; free some or choose another --run-dir")
    return PlatformError(f"run directory {path}: {error.strerror or error}; choose another --run-dir")


def remove_sockets(path: Path) -> None:
    """Remove the socket files of processes that are gone. Only while holding the lock, with no process running."""
    folder = path / "sock"
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.is_socket():
                entry.unlink(missing_ok=True)
