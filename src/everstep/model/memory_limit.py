"""Says which limit of memory a process has, and that it died of it."""

from __future__ import annotations

from typing import Final

import msgspec

from everstep.bounds import Whole
from everstep.model.reasons import Reason

MEMORY_STATUS: Final = 12
"""Exit status of a ps that gets no memory any more. (It is ENOMEM's number.)"""
OUT_OF_MEMORY: Final = "out_of_memory"
"""Name under which failures of this kind are counted, beside those of each role."""


class MemoryLimit(Reason):
    """Says who set a limit of memory."""

    NONE = ""
    STORE = "store"
    """Everstep's setting ``ps_limit_bytes``: the rows of one ps."""
    PROCESS = "process"
    """The system's limit of one process (``ulimit -d``, ``ulimit -v``)."""
    CONTAINER = "container"
    """The limit of a cgroup, which all processes in it share."""
    MACHINE = "machine"
    """The memory of the machine."""


LIMITS: Final = tuple(MemoryLimit)
"""Readings have the number of a limit in this order; new ones come at the end."""


class OutOfMemory(msgspec.Struct, frozen=True, array_like=True):
    """Says that a process died because there was no memory. Bytes: 0 if nobody knows."""

    limit: MemoryLimit
    limit_bytes: Whole = 0
