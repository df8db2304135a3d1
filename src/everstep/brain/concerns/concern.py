"""Is what every concern of the brain has: the state, the other concerns, handlers by fact, what it settles and
asserts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from everstep.brain.brain_state import State
from everstep.brain.events import EndOfData, Event, Fenced, FinishJob, InstructionType, Ok, Reply
from everstep.brain.job import Phase
from everstep.brain.members import SlotRecord
from everstep.ids import Incarnation, Slot
from everstep.model.member import Role

if TYPE_CHECKING:
    from everstep.brain.concerns.composition import Concerns

Inputs = dict[str, str | int | float | bool]
Out = list[InstructionType]
Handlers = dict[type, Callable[[Any, Event], Out]]

OK = Reply(Ok())
END = Reply(EndOfData())


class Concern:
    """Is the base of a concern. Its state is a part of :class:`State`, which all concerns read; it keeps nothing else
    between two events. ``concerns``: the others of this job."""

    __slots__ = ("checkpoints", "concerns", "duty", "job", "members", "shards", "state")

    def __init__(self, state: State, concerns: Concerns) -> None:
        self.state, self.concerns = state, concerns
        self.job, self.members, self.shards = state.job, state.members, state.shards
        self.checkpoints, self.duty = state.checkpoints, state.duty

    def handlers(self) -> Handlers:
        """Return what this concern does about which facts. Each kind of fact has one handler in a job."""
        return {}

    def before(self, event: Event) -> None:
        """Look at the state in front of ``event``, for :meth:`settle`."""

    def settle(self, event: Event, out: Out) -> Out:
        """Return what follows from the state now. ``out``: what was ordered since ``event``. Asked again until no
        concern has anything to add."""
        return []

    def validate(self) -> None:
        """Assert what must always hold."""

    def fail(self, exit_code: int, error: str) -> FinishJob:
        """End the job with an error, one line."""
        return self.job.finish(Phase.FAILED, exit_code, error)

    def fence_worker(self, slot: Slot, incarnation: Incarnation) -> Reply:
        """Return the answer to a process that does not fill the slot of this worker any more."""
        record = self.members.workers.get(slot)
        if record is None:
            return Reply(Fenced(f"worker:{slot} is not a member of this job"))
        return fenced(Role.WORKER, slot, incarnation, record)


def fenced(role: Role, slot: Slot, incarnation: Incarnation, record: SlotRecord) -> Reply:
    """Return the answer to a process that was replaced in its slot."""
    now = record.member
    return Reply(Fenced(f"{role}:{slot} #{incarnation} was replaced (the slot is #{now.incarnation}, {now.state})"))
