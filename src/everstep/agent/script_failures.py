"""Finds what an exception of a script may come from: by its type, its bases, its words and its causes."""

from __future__ import annotations

import errno
from typing import Final

from everstep.model.failure import Cause

_MEMORY: Final = ("can't allocate memory", "out of memory", "alloc_failed")
_DEVICE: Final = ("cuda error", "hip error", "cublas_status_", "cudnn_status_", "nccl error", "cusolver_status_")
_SCRIPTS_OWN: Final = ("device-side assert",)  # an index out of range, as a rule
_GONE_PROCESS: Final = "dataloader worker (pid"
_NAMES: Final = (
    "timeout", "timedout", "connection", "throttl", "serviceunavailable", "slowdown", "toomanyrequests",
    "incompleteread", "disconnected", "temporar",
)  # fmt: skip
_NODES_OWN: Final = (FileNotFoundError, PermissionError, ImportError)
_MISTAKES: Final = (IsADirectoryError, NotADirectoryError, FileExistsError)
_FULL: Final = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
_DEPTH: Final = 5


def cause_of(error: BaseException) -> Cause:
    """See ``model.failure.Cause``. What was raised ``from`` another error may come from that."""
    found: Cause = "script"
    at: BaseException | None = error
    for _ in range(_DEPTH):
        if at is None:
            break
        found = _own(at)
        if found != "script":
            break
        at = at.__cause__
    return found


def _own(error: BaseException) -> Cause:
    names = [kind.__name__.lower() for kind in type(error).__mro__]
    words = str(error).lower()
    if isinstance(error, MemoryError) or "outofmemoryerror" in names:
        return "memory"
    if isinstance(error, RuntimeError):
        if any(word in words for word in _MEMORY):
            return "memory"
        if any(word in words for word in _DEVICE):
            return "script" if any(word in words for word in _SCRIPTS_OWN) else "device"
        if words.startswith(_GONE_PROCESS):
            return "data"
    if isinstance(error, _NODES_OWN) or (isinstance(error, OSError) and error.errno in _FULL):
        return "node"
    if isinstance(error, _MISTAKES):
        return "script"
    if isinstance(error, OSError | EOFError):
        return "data"
    if any(part in name for name in names[:-1] for part in _NAMES):  # of libraries that have errors of their own
        return "data"
    return "script"
