"""Has the words of what code goes by: the one place that turns enums and numbers into what people read."""

from __future__ import annotations

from everstep.model.failure import Cause
from everstep.model.member import Role
from everstep.model.memory_limit import MemoryLimit, OutOfMemory
from everstep.model.reasons import CheckpointReason
from everstep.units import human_bytes

_CHECKPOINT = {CheckpointReason.LAST_REPLICA: "one healthy replica is left"}

_CAUSES: dict[Cause, str] = {
    "data": "what it reads may be there again",
    "memory": "memory may be free again in a new process",
    "device": "a new process, on another node if there is one, may not meet it",
    "node": "another node may have what is missing here",
}

_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    9: "SIGKILL",
    11: "SIGSEGV",
    15: "SIGTERM",
}


_LIMITS = {
    MemoryLimit.NONE: "a limit",
    MemoryLimit.STORE: "ps_limit_bytes",
    MemoryLimit.PROCESS: "the limit of its process",
    MemoryLimit.CONTAINER: "the limit of its container",
    MemoryLimit.MACHINE: "all memory of its machine",
}

_REMEDIES = {
    MemoryLimit.NONE: "give it more memory",
    MemoryLimit.STORE: "raise ps_limit_bytes",
    MemoryLimit.PROCESS: "raise it (--ps-memory, --worker-memory, everstep resize, ulimit -d, ulimit -v)",
    MemoryLimit.CONTAINER: "give the container more memory (memory of its pod, --mem of its Slurm job)",
    MemoryLimit.MACHINE: "have fewer processes on the machine",
}


def limit_words(died: OutOfMemory) -> str:
    """Return the limit that a process reached: ``the limit of its process (144.0 MiB)``."""
    return _LIMITS[died.limit] + (f" ({human_bytes(died.limit_bytes)})" if died.limit_bytes else "")


def limit_remedy(limit: MemoryLimit) -> str:
    """Return what raises a limit of memory."""
    return _REMEDIES[limit]


def memory_words(died: OutOfMemory, role: Role) -> str:
    """Return that a process died of its memory, and what a reader can do, in one line."""
    more = "have smaller batches" if role is Role.WORKER else "have more ps (everstep scale, --ps auto)"
    return f"out of memory: it reached {limit_words(died)}; {_REMEDIES[died.limit]}, or {more}"


def checkpoint_words(reason: CheckpointReason) -> str:
    """Return why a checkpoint is taken, in words."""
    return _CHECKPOINT.get(reason, reason.value)


def cause_words(cause: Cause) -> str:
    """Return why another try is made after a failure of this cause."""
    return _CAUSES[cause]


def exit_words(status: int) -> str:
    """An exit status in words; below 0: minus the signal's number."""
    if status >= 0:
        return f"it ended with exit status {status}"
    return f"it was killed by {_SIGNALS.get(-status, f'signal {-status}')}"
