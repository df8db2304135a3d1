"""Chooses the size of processes that start next: what a job asks for, what is refused, and more memory after a death.

Pure. A size is threads and private writable memory of each process of a role (``model.process_size``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from everstep.config.memory_settings import LEAST_BYTES, MOST_BYTES
from everstep.config.spec import JobSpec
from everstep.model.member import Role
from everstep.model.memory_limit import MemoryLimit
from everstep.model.plan import Action, Resize
from everstep.model.process_size import ProcessSize
from everstep.units import human_bytes, size_bytes

MAX_THREADS: Final = 1024
RAISED: Final = 2.0
"""Times the limit that a process died of: what the next ones get."""
WORTH: Final = 1.1
"""Less than so many times as much memory would be no help."""

SIZED_ROLES: Final = (Role.WORKER, Role.PS)
_WORDS: Final = {Role.WORKER: "workers", Role.PS: "ps"}
_WHOSE: Final = {
    MemoryLimit.NONE: "its node has no more",
    MemoryLimit.STORE: "its node has no more",
    MemoryLimit.PROCESS: "its user's limit is no higher: raise it (ulimit -Hd, ulimit -Hv)",
    MemoryLimit.CONTAINER: "its container has no more: give it more (resources of its pod, --mem of its Slurm job)",
    MemoryLimit.MACHINE: "its machine has no more: have fewer processes on it, or larger machines",
}


class NodeMemory(NamedTuple):
    """Says how much memory one process may have on a node, and who says so. ``bytes`` 0: not told."""

    node: str
    bytes: int = 0
    limit: MemoryLimit = MemoryLimit.NONE


class Raise(NamedTuple):
    """Says how much memory the next processes of a role get. ``memory_bytes`` 0: no more, for the reason ``why``."""

    memory_bytes: int
    why: str


def asked_sizes(spec: JobSpec) -> dict[Role, ProcessSize]:
    """Return the sizes that a job's settings name, by role; roles of which they name nothing are left out."""
    asked = {
        Role.WORKER: ProcessSize(spec.threads_per_worker, memory_setting(spec.worker_memory)),
        Role.PS: ProcessSize(spec.ps_threads, memory_setting(spec.ps_memory)),
    }
    return {role: size for role, size in asked.items() if size != ProcessSize()}


def memory_setting(text: str) -> int:
    """Return the bytes of a setting such as ``2GB``; 0: it is empty. Raises ConfigError."""
    return size_bytes(text) if text else 0


def wishes(actions: Iterable[Action]) -> dict[Role, ProcessSize]:
    """Return what the actions of a plan wish for, by role."""
    return {a.role: ProcessSize(a.threads, a.memory_bytes) for a in actions if isinstance(a, Resize)}


def refuse_wish(role: Role, threads: int, memory_bytes: int) -> str:
    """Return what is wrong with a wish for a role in itself, in one line; "": nothing."""
    if role not in SIZED_ROLES:
        return f"{role}: workers and ps have a size, nobody else"
    if not threads and not memory_bytes:
        return f"nothing named for {role}: threads, memory or both"
    if not 0 <= threads <= MAX_THREADS:
        return f"{threads} threads for {role}: must be from 1 to {MAX_THREADS}"
    least = LEAST_BYTES[role]
    if memory_bytes and not least <= memory_bytes <= MOST_BYTES:
        had = human_bytes(memory_bytes)
        return f"{had} for {role}: a {role} needs at least {human_bytes(least)} before it has {_FIRST[role]}"
    return ""


_FIRST: Final = {Role.WORKER: "a batch", Role.PS: "a row"}


def refuse_sizes(
    spec: JobSpec,
    sizes: Mapping[Role, ProcessSize],
    wanted: Mapping[Role, int],
    nodes: Iterable[NodeMemory],
) -> str:
    """Return why processes cannot have these sizes, in one line; "": they can. ``sizes``: with the wish in them;
    ``wanted``: how many processes of each role the job wants; ``nodes``: those that are there."""
    most = memory_setting(spec.max_memory)
    needs = {role: wanted[role] * size.memory_bytes for role, size in sizes.items() if size.memory_bytes}
    if most and sum(needs.values()) > most:
        parts = [f"{wanted[r]} {_WORDS[r]} of {human_bytes(sizes[r].memory_bytes)}" for r in needs]
        return f"{' and '.join(parts)} are more than max_memory {spec.max_memory}: they exclude each other"
    reported = [node for node in nodes if node.bytes]
    if not reported:
        return ""
    largest = max(reported, key=lambda node: node.bytes)
    for role, size in sizes.items():
        if size.memory_bytes > largest.bytes:
            has = f"{largest.node} has {human_bytes(largest.bytes)}"
            if len(reported) > 1:
                has = f"no node has so much, {largest.node} has most, {human_bytes(largest.bytes)}"
            return f"{human_bytes(size.memory_bytes)} for each {role}: {has}; {_WHOSE[largest.limit]}"
    return ""


def raised_memory(spec: JobSpec, role: Role, died_at: int, others_bytes: int, count: int, node: NodeMemory) -> Raise:
    """Return the memory of the next processes of a role of which one died of ``died_at`` bytes. ``others_bytes``: that
    the processes of other roles have by their sizes; ``count``: processes of this role; ``node``: where it died."""
    wanted, why = round(RAISED * died_at), f"{RAISED:g} times as much"
    if wanted < LEAST_BYTES[role]:
        wanted, why = LEAST_BYTES[role], f"the least with which a {role} comes up"
    if node.bytes and wanted > node.bytes:
        wanted, why = node.bytes, _WHOSE[node.limit]
    if spec.max_memory:
        share = (size_bytes(spec.max_memory) - others_bytes) // max(1, count)
        if wanted > share:
            wanted, why = share, f"max_memory {spec.max_memory} leaves each no more: raise it"
    return Raise(wanted if wanted >= WORTH * died_at else 0, why)


def size_words(size: ProcessSize) -> str:
    """Return ``2.0 GiB, 4 threads``; "": nothing is named."""
    parts = [human_bytes(size.memory_bytes)] if size.memory_bytes else []
    parts += [f"{size.threads} thread{'s' if size.threads > 1 else ''}"] if size.threads else []
    return ", ".join(parts)
