"""States of a slot and of the group, each with the table of its transitions, from which the docs draw a diagram.

A state is read off :class:`State`, where it is told by what is known of the process, and what it was asked for. The
simulator and the tests of the brain look after every fact whether a change is a transition of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from everstep.brain.members import SlotRecord
from everstep.brain.supervision import JobStage
from everstep.ids import Incarnation, Slot
from everstep.model.member import MemberState, Role

if TYPE_CHECKING:
    from everstep.brain.brain import Brain


class SlotState(StrEnum):
    STARTING = "starting"  # a process was ordered, and has not said hello
    ALIVE = "alive"
    SUSPECT = "suspect"  # silent for a while; it keeps its leases
    LEAVING = "leaving"  # asked to end
    FINISHED = "finished"  # its script ran to its end
    LEFT = "left"  # it ended as it was asked to
    LOST = "lost"  # dead, or declared dead: fenced
    WAITING = "waiting"  # another process is wanted, and no node has a place


class GroupState(StrEnum):
    NONE = "none"  # no group has begun
    LOST = "lost"  # nobody has its state for certain; a new lineage begins, from a checkpoint or from nothing
    CHANGING = "changing"  # a generation was published, and its members have not met
    TRAINING = "training"
    HELD = "on_hold"  # too few members to train, or the job stops
    DONE = "done"  # all steps are committed


S, G, J = SlotState, GroupState, JobStage
Table = Mapping[Any, Mapping[Any, str]]

FIRST_OF_A_PROCESS: Final = {S.STARTING: "a process is ordered", S.ALIVE: "a later process than known says hello"}
"""In which state a process begins to fill a slot, whatever the state of the one before it."""

_ENDS: Final = {
    S.FINISHED: "its script ran to its end",
    S.LEFT: "it ended, and nothing is lost by it",
    S.LOST: "it ended, or was not heard",
    S.WAITING: "it ended, and no node has a place for another one",
}

SLOT_TRANSITIONS: Final[Mapping[SlotState, Mapping[SlotState, str]]] = {
    S.STARTING: {S.ALIVE: "it says hello", S.LEAVING: "it is asked to end", **_ENDS},
    S.ALIVE: {S.SUSPECT: "no heartbeat", S.LEAVING: "it is asked to end", **_ENDS},
    S.SUSPECT: {S.ALIVE: "it is heard again", S.LEAVING: "it is asked to end", **_ENDS},
    S.LEAVING: {S.ALIVE: "it stays, since it has the only state", S.SUSPECT: "it stays, and is silent", **_ENDS},
    S.FINISHED: {S.WAITING: "that was not the end, its script runs again"},
    S.LEFT: {S.WAITING: "the job wants a process there again"},
    S.LOST: {S.WAITING: "no node has a place for another one"},
    S.WAITING: {S.LEFT: "the job wants nobody there any more", S.LOST: "the job wants nobody there any more"},
}

_CHANGES: Final = {
    G.LOST: "nobody is left who has the state",
    G.DONE: "the last step is committed",
    G.HELD: "too few members are left, or the job stops",
}
_PUBLISHED: Final = "the next generation is published"

GROUP_TRANSITIONS: Final[Mapping[GroupState, Mapping[GroupState, str]]] = {
    G.NONE: {G.CHANGING: "enough workers are there", G.DONE: "the job goes on from its last step"},
    G.CHANGING: {G.TRAINING: "its members have met", **_CHANGES},
    G.TRAINING: {G.CHANGING: _PUBLISHED, **_CHANGES},
    G.HELD: {G.CHANGING: _PUBLISHED, G.LOST: _CHANGES[G.LOST], G.DONE: _CHANGES[G.DONE]},
    G.LOST: {
        G.CHANGING: "a new lineage begins",
        G.TRAINING: "tables need not go back after all",
        G.HELD: "a new lineage begins with too few",
        G.DONE: "a new lineage begins behind the last step",
    },
    G.DONE: {
        G.CHANGING: "the next loop begins in another generation",
        G.TRAINING: "the next loop begins",
        G.HELD: "the next loop begins with too few",
        G.LOST: "nobody is left who has the state",
    },
}


_JOB_ENDS: Final = {
    J.SUSPENDED: "it is asked to, or max_wait is over",
    J.DONE: "every script ran to its end",
    J.FAILED: "it cannot go on, or shall not",
    J.STOPPED: "it is asked to stop",
}

JOB_TRANSITIONS: Final[Mapping[JobStage, Mapping[JobStage, str]]] = {
    J.PENDING: {J.RUNNING: "enough members are there", **_JOB_ENDS},
    J.RUNNING: {J.WAITING: "too few members are left", **_JOB_ENDS},
    J.WAITING: {J.RUNNING: "enough members are there, or max_wait is over", **_JOB_ENDS},
    J.SUSPENDED: {J.PENDING: "it is asked to go on, or capacity is back"},
}


def slot_state(record: SlotRecord) -> SlotState:
    """Return the state of a slot that a process has filled."""
    if record.running:
        return S.LEAVING if record.stopping else S(record.member.state.value)
    if record.waiting:
        return S.WAITING
    if record.finished:
        return S.FINISHED
    return S.LOST if record.member.state is MemberState.LOST else S.LEFT


def group_state(brain: Brain) -> GroupState:
    """Return the state of the group of a job."""
    groups, reader = brain.state.groups, brain.groups
    if groups.group is None:
        return G.NONE
    if reader.view() is None:
        return G.LOST
    if reader.data_done():
        return G.DONE
    if groups.group.hold:
        return G.HELD
    return G.CHANGING if groups.confirmed < groups.group.generation else G.TRAINING


class StateCheck:
    """Asserts after each fact that every change since the last look is a transition of the tables. Of one brain."""

    __slots__ = ("_group", "_job", "_slots")

    def __init__(self) -> None:
        self._job: JobStage | None = None
        self._slots: dict[tuple[Role, Slot], tuple[Incarnation, SlotState]] | None = None
        self._group: GroupState | None = None

    def look(self, brain: Brain, what: object = "") -> None:
        """Check the transition. ``what``: the fact that was handled, for the message."""
        before = self._slots
        self._slots = {
            (s.member.role, s.member.slot): (s.member.incarnation, slot_state(s)) for s in brain.members.all()
        }
        for key, (life, now) in self._slots.items() if before is not None else ():
            life_before, state = before.get(key, (0, None)) if before is not None else (0, None)
            known = FIRST_OF_A_PROCESS if life != life_before or state is None else SLOT_TRANSITIONS[state]
            assert now in known or now is state, f"{key[0]}:{key[1]} #{life} went from {state} to {now}, by {what}"
        group, self._group = self._group, group_state(brain)
        known_next = {} if group is None else GROUP_TRANSITIONS[group]
        change = f"the group went from {group} to {self._group}, by {what}"
        assert group is None or self._group is group or self._group in known_next, change
        job, self._job = self._job, brain.state.supervision.stage
        known_job = {} if job is None else JOB_TRANSITIONS.get(job, {})
        assert job is None or self._job is job or self._job in known_job, f"job: {job} -> {self._job}, by {what}"


def diagram(table: Table, first: Mapping[Any, str]) -> str:
    """Return a table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    lines += [f"    [*] --> {state.value}: {label}" for state, label in first.items()]
    for state, moves in table.items():
        lines += [f"    {state.value} --> {after.value}: {label}" for after, label in moves.items()]
    return "\n".join(lines) + "\n"


DIAGRAMS: Final = {
    "slot": diagram(SLOT_TRANSITIONS, FIRST_OF_A_PROCESS),
    "job": diagram(JOB_TRANSITIONS, {J.PENDING: "the job begins"}),
    "group": diagram(GROUP_TRANSITIONS, {G.NONE: "the job begins"}),
}
