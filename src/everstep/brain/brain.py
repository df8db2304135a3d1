"""Is the master's pure core: ``handle(event) -> list[Instruction]``.

Theory. The state is the fold of the events; nothing here reads a clock, draws a number or waits. Three rules carry
the exactly-once protocol:

1. *Fencing.* A slot's incarnation grows with every process started for it. Whatever an older one says is answered
   with ``Fenced`` and changes nothing. A shard's lease number grows with every grant; ``done`` counts only for the
   current lease, and only if every ps acknowledged in its present life.
2. *Nothing is lost.* A lease ends in exactly one of: done, returned, its worker lost, expired, or reopened because a
   ps that acknowledged is dead. All but the first put the shard back at the head of TODO. An epoch begins only when
   every shard of the one before is done (or set aside, named).
3. *Everything may be said twice.* Members repeat themselves after each reconnect; a restart of the master changes
   no member and no lease.

The shell journals an event, calls ``handle``, waits until the event is durable, and only then lets anyone see an
instruction. Instructions that matter carry the ``Decision`` behind them.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.brain.brain_state import State, decode_state, encode_state
from everstep.brain.checkpoints import Checkpoints
from everstep.brain.concerns.composition import Concerns
from everstep.brain.concerns.group_reader import GroupReader
from everstep.brain.concerns.partition_reader import PartitionReader
from everstep.brain.duty import Duty
from everstep.brain.events import Event, InstructionType, Refused, Reply, Reported
from everstep.brain.job import JobState
from everstep.brain.members import Members
from everstep.brain.shards import HeldLease, Shards
from everstep.ids import Incarnation, ShardKey, Slot
from everstep.model.member import Role
from everstep.model.placement import Placement

MAX_PASSES = 16  # of all concerns, until none of them has anything to add


class Brain:
    """Hands each fact to the concern that handles it, then lets all concerns settle (see the top of this file).
    ``state`` is for reading; only ``handle`` changes it."""

    __slots__ = ("concerns", "state")

    def __init__(self, state: State | None = None) -> None:
        self.state = state if state is not None else State()
        self.concerns = Concerns(self.state)

    def __repr__(self) -> str:
        s = self.shards
        return (
            f"<brain {self.job!r} {len(self.members.workers)} workers, {len(s.leases)} leases, {s.samples_done} done>"
        )

    # ------------------------------------------------------------ the contract

    def handle(self, event: Event) -> list[InstructionType]:
        """Take one event in; return what to do, a ``Reply`` (if any) first."""
        for look in self.concerns.looking:
            look(event)
        handler = self.concerns.handlers.get(type(event.fact))
        if handler is None:
            kind = event.fact.__struct_config__.tag
            words = f"{kind}: no worker of this job says that, it is of another mode"
            return [Reply(Refused(words))] if isinstance(event.fact, Reported) else []
        out = handler(event.fact, event)
        self._settle(event, out)
        return out

    def _settle(self, event: Event, out: list[InstructionType]) -> None:
        """Ask all concerns what follows, until none of them has anything to add."""
        settling = self.concerns.settling
        for _ in range(MAX_PASSES):
            before = len(out)
            for settle in settling:
                if more := settle(event, out):
                    out += more
            if len(out) == before or not self.state.job.rules.settles:
                return
        kind, last = type(event.fact).__name__, out[-1]
        raise RuntimeError(f"bug in everstep: after {kind} the brain does not settle in {MAX_PASSES} passes: {last}")

    def snapshot(self) -> bytes:
        return encode_state(self.state)

    @classmethod
    def restore(cls, snapshot: bytes) -> Brain:
        """Return the brain of ``snapshot()``. Raises ``msgspec.ValidationError`` on bytes that are none (of this
        version)."""
        return cls(decode_state(snapshot))

    def become(self, other: Brain) -> None:
        """Take over the state of ``other``, which is not used any more. For whoever holds this one."""
        Brain.__init__(self, other.state)

    def validate(self) -> None:
        """Assert the invariants. One pass over everything: for tests, the simulator, and after a restart."""
        for concern in self.concerns.all:
            concern.validate()

    # ------------------------------------------------------------ for reading

    @property
    def job(self) -> JobState:
        return self.state.job

    @property
    def members(self) -> Members:
        return self.state.members

    @property
    def shards(self) -> Shards:
        return self.state.shards

    @property
    def checkpoints(self) -> Checkpoints:
        return self.state.checkpoints

    @property
    def duty(self) -> Duty:
        return self.state.duty

    @property
    def placement(self) -> Placement | None:
        return self.state.placement

    @property
    def leases(self) -> dict[ShardKey, HeldLease]:
        """Return current leases by shard."""
        return self.shards.leases

    @property
    def partitions(self) -> PartitionReader:
        return self.concerns.placement.reader

    @property
    def groups(self) -> GroupReader:
        return self.concerns.groups

    def takes(self, kind: type) -> bool:
        """Return whether some concern of this job handles facts of this kind: whether its workers train by leases
        (``ShardAsked``), or in a group (``StepsCommitted``)."""
        return kind in self.concerns.handlers

    def doing(self) -> Iterator[HeldLease]:
        """Yield current leases, for a display."""
        yield from self.leases.values()

    def may_end(self, slot: Slot, incarnation: Incarnation) -> bool:
        """Whether a worker whose script has ended may go: nobody will need its state any more."""
        record = self.members.current(Role.WORKER, slot, incarnation)
        if record is None or record.stopping or self.job.over:
            return True
        return self.concerns.training.may_end(record)


__all__ = ["Brain", "State"]
