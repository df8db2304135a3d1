"""A full disk is waited for, within a limit: whoever frees some space saves the job."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

RETRY_S: Final = 0.25
RESERVE_BYTES: Final = 64 * 1024
_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT)


class _Patience:
    """Says how long this process's writers wait. 0.0, until ``be_patient``: not at all."""

    wait_s = 0.0


def be_patient(wait_s: float) -> None:
    """Have this process's writers wait for ``disk_full_s``; to be called once in a process of a job."""
    _Patience.wait_s = wait_s


def is_full(error: BaseException) -> bool:
    """Return whether this error, or the one that it was raised from, says that the disk is full."""
    cause = error.__cause__
    return (isinstance(error, OSError) and error.errno in _ERRORS) or (cause is not None and is_full(cause))


def disk_is_full(path: Path) -> bool:
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < RESERVE_BYTES


T = TypeVar("T")


def with_space(write: Callable[[], T], full: Callable[[BaseException], bool] = is_full) -> T:
    """Call ``write()`` again and again while it fails for a full disk and this process's patience lasts. Each try must
    begin from where the one before began."""
    end = time.monotonic() + _Patience.wait_s
    while True:
        try:
            return write()
        except Exception as error:
            if not full(error) or time.monotonic() >= end:
                raise
        time.sleep(RETRY_S)
