"""Finds which event led to which: what the master wanted done, and what members tell of it later.

A fold of events and their instructions, as the brain is; it decides nothing. A ps that says that its partitions are
whole speaks of a placement, so the event that published the placement is the cause; a process that joins was started;
and so on. Where no instruction led to a fact (a process was killed, a command was given), there is no cause: it is the
first of a chain. What workers do with shards is routine, and has none either.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

from everstep.brain.events import (
    CheckpointCommitted,
    CommitManifest,
    Event,
    FactType,
    GroupSynced,
    InstructionType,
    LoadFailed,
    MemberJoined,
    MemberSilent,
    MirrorsReady,
    OrderSnapshots,
    PartitionsReady,
    ProcessExited,
    PublishGroup,
    PublishPlacement,
    ReplicaWritten,
    SnapshotsWritten,
    StartProcess,
    StepsCommitted,
    StopProcess,
)

KEPT: Final = 1 << 16  # instructions that are remembered; older ones are forgotten first

_PLACEMENT: Final = "placement"

# What a fact speaks of, and what an instruction is about: the same key.
_SPEAKS_OF: Final[dict[type, Callable[[Any], Hashable]]] = {
    MemberJoined: lambda f: ("start", f.role, f.slot, f.incarnation),
    ProcessExited: lambda f: ("stop", f.role, f.slot, f.incarnation),
    MemberSilent: lambda f: ("stop", f.role, f.slot, f.incarnation),
    PartitionsReady: lambda f: (_PLACEMENT, f.placement),
    LoadFailed: lambda f: (_PLACEMENT, f.placement),
    MirrorsReady: lambda f: _PLACEMENT,
    GroupSynced: lambda f: ("group", f.generation),
    StepsCommitted: lambda f: ("group", f.steps[-1].generation) if f.steps else None,
    SnapshotsWritten: lambda f: ("checkpoint", f.checkpoint),
    ReplicaWritten: lambda f: ("checkpoint", f.checkpoint),
    CheckpointCommitted: lambda f: ("manifest", f.checkpoint),
}


_ABOUT: Final[dict[type, Callable[[Any], tuple[Hashable, ...]]]] = {
    StartProcess: lambda i: (("start", i.role, i.slot, i.incarnation),),
    StopProcess: lambda i: (("stop", i.role, i.slot, i.incarnation),),
    PublishPlacement: lambda i: ((_PLACEMENT, i.placement.version), _PLACEMENT),
    PublishGroup: lambda i: (("group", i.group.generation),),
    OrderSnapshots: lambda i: (("checkpoint", i.checkpoint),),
    CommitManifest: lambda i: (("manifest", i.manifest.checkpoint),),
}


class Causes:
    """Knows the numbers of events by what they wanted done."""

    def __init__(self) -> None:
        self._by: dict[Hashable, int] = {}

    def __repr__(self) -> str:
        return f"<causes: {len(self._by)} instructions>"

    def of(self, fact: FactType) -> int:
        """Return the number of the event behind a fact; 0: none is known."""
        speaks_of = _SPEAKS_OF.get(type(fact))
        return self._by.get(speaks_of(fact), 0) if speaks_of is not None else 0

    def note(self, seq: int, event: Event, instructions: Sequence[InstructionType]) -> None:
        """Event ``seq`` gave these instructions."""
        for instruction in instructions:
            about = _ABOUT.get(type(instruction))
            if about is not None:
                for key in about(instruction):
                    self._by[key] = seq
        while len(self._by) > KEPT:
            del self._by[next(iter(self._by))]
