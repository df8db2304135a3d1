"""Where partitions and mirrors are: ps say what they have, and the next map follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.brain.brain_state import State
from everstep.brain.concerns.concern import OK, Concern, Handlers, Inputs, Out
from everstep.brain.concerns.partition_maps import PartitionMaps
from everstep.brain.concerns.partition_reader import PartitionReader
from everstep.brain.concerns.partition_reports import PartitionReports
from everstep.brain.events import Event, Fenced, HotPartitions, LoadFailed, MirrorsReady, Note, PartitionsReady, Reply
from everstep.brain.job import Phase
from everstep.brain.members import SlotRecord
from everstep.ids import Slot
from everstep.model.decision import Decision
from everstep.model.member import Role
from everstep.model.plan import MovePartitions
from everstep.model.reasons import Arrival
from everstep.model.snapshot import Holdings
from everstep.policies.hot import AlonePartition
from everstep.units import human_bytes

if TYPE_CHECKING:
    from everstep.brain.concerns.composition import Concerns


END_GRACE_S = 0.1  # one whose work is void
AWAITED_S = 3.0  # so long partitions stay where they were rebuilt, for the ps in the place of the lost one to come
_CRASHES = frozenset({-4, -6, -7, -8, -11})  # ILL, ABRT, BUS, FPE, SEGV: of its own doing


class PlacementConcern(Concern):
    """Keeps the map of partitions. ``reader``: what follows from it."""

    __slots__ = ("_maps", "reader", "reports")

    def __init__(self, state: State, concerns: Concerns, ahead: bool) -> None:
        """``ahead``: workers have a state of their own, which must not be newer than the tables on the ps."""
        super().__init__(state, concerns)
        self.reader = PartitionReader(state)
        self.reports = PartitionReports(self.reader)
        self._maps = PartitionMaps(self.reader, ahead)

    def handlers(self) -> Handlers:
        return {
            MirrorsReady: self._ps_reported,
            PartitionsReady: self._ps_reported,
            LoadFailed: self._load_failed,
            HotPartitions: self._hot_partitions,
        }

    def before(self, event: Event) -> None:
        self.state.protection.went_back = False

    def settle(self, event: Event, out: Out) -> Out:
        """Have partitions wait for workers to end, before they go back to something older, and for the ps in the place
        of a lost one."""
        protection = self.state.protection
        if protection.awaited_until and not self.reader.awaits_ps(event.at):
            protection.awaited_until = 0.0
            return self.settle_map()
        return self.settle_map() if protection.gone and not self.job.over else []

    def validate(self) -> None:
        self._maps.validate()

    def place(self, record: SlotRecord, changed: bool, holds: Holdings | None, at: float) -> Out:
        """A ps said hello: make the first map once all have, or take up what it tells."""
        member = record.member
        if not self.reader.awaits_ps(at):
            self.state.protection.awaited_until = 0.0
        old = self.state.placement
        if old is None:
            servers = self.members.servers
            missing = [
                slot
                for slot in map(Slot, range(self.job.ps_wanted))
                if (s := servers.get(slot)) is None or not s.running or s.member.address is None
            ]
            if missing:
                return []
            if self.job.phase is Phase.STARTING:
                self.job.phase = Phase.TRAINING
            return self._maps.first()
        known = next((p for p in old.servers if p.slot == member.slot), None)
        trusted = False
        if known is None:
            why = f"{member.key} joined"
        else:
            why = f"{member.key} is at a new address or in a new life" if changed else f"{member.key} said hello"
            trusted = known.incarnation != member.incarnation and holds is None
        if holds is not None:
            self.reports.holds(member.slot, holds)
        return self.settle_map(why, trusted)

    def settle_map(self, why: str = "", trusted: bool = False) -> Out:
        """Return the next map, if anything calls for one; the end of the job, if something is lost for good; the end of
        ps that have given everything away."""
        out = self._maps.settle(why, trusted)
        if self.state.protection.lost and not self.job.over:
            spec, lost = self.job.spec, len(self.state.protection.lost)
            what = (
                "which nothing protects" if spec.parity in ("", "0") else f"more than parity {spec.parity} can rebuild"
            )
            error = (
                f"{why} and with it {lost} of {spec.partitions} partitions, {what}; "
                "trust nothing of the run directory beyond the last export"
            )
            rejected = ("go on without its rows: results would be wrong",)
            out.append(Note("", Decision("fail the job", error, {"partitions_lost": lost}, rejected)))
            return [*out, self.fail(4, error)]
        for slot, incarnation in self.state.protection.ending:
            worker = self.members.current(Role.WORKER, slot, incarnation)
            if worker is not None and not worker.stopping:
                words = self.concerns.training.why_ends(len(self.state.protection.gone))
                out.append(self.concerns.processes.send_away(worker, Decision("stop", words), END_GRACE_S))
        for slot in self.state.protection.leaving:
            record = self.members.servers.get(slot)
            if record is not None and record.running and not record.stopping and self.reader.empty(slot):
                out.append(self.concerns.processes.send_away(record, Decision("stop", "others have all that it held")))
        return out + self.reports.covers()

    def _ps_reported(self, e: MirrorsReady | PartitionsReady, event: Event) -> Out:
        record = self.members.current(Role.PS, event.slot, event.incarnation)
        if record is None:
            return [Reply(Fenced(f"ps:{event.slot} #{event.incarnation} was replaced"))]
        if self.job.over:
            return [OK]
        out = self.reports.reported(event.slot, e)
        if isinstance(e, PartitionsReady) and e.how is Arrival.STUCK:
            return [OK, *out, *self.settle_map(f"ps:{event.slot} cannot get what it was given")]
        record.streak = 0  # it got somewhere
        return [OK, *out, *self.settle_map()]

    def _load_failed(self, e: LoadFailed, event: Event) -> Out:
        record = self.members.current(Role.PS, event.slot, event.incarnation)
        if record is None:
            return [Reply(Fenced(f"ps:{event.slot} #{event.incarnation} was replaced"))]
        if self.job.over:
            return [OK]
        out = self.reports.load_failed(event.slot, e)
        if self.checkpoints.aside:
            return [OK, *out, self.fail(4, self.checkpoints.aside_words)]
        return [OK, *out, *self.settle_map(f"ps:{event.slot} cannot load partition {e.partition}")]

    def died_loading(self, record: SlotRecord, reason: str, status: int) -> Out:
        """Handle that a ps crashed: if it was loading, that may have been why."""
        if status not in _CRASHES:
            return []
        slot = record.member.slot
        out: Out = []
        for checkpoint in sorted({c for _, c in self.reader.loading(slot)}):
            out += self.checkpoints.load_failed(checkpoint, f"ps:{slot}", f"{reason} while it loaded it")
        return out

    def _hot_partitions(self, e: HotPartitions, event: Event) -> Out:
        """Move them, if nothing else is on its way and no policy divides them: it goes by time where this goes by rows,
        so one would take back what the other gives."""
        notes: Out = [] if self.job.over else [_alone(one) for one in e.alone]
        plan = self.state.control.plan
        if plan is not None and any(isinstance(action, MovePartitions) for action in plan.actions):
            return notes
        if self.job.over or not self.reader.at_rest():
            return notes
        moved = self.reports.spread(e.moves)
        if not moved:
            return notes
        loads = ", ".join(f"ps:{slot} {rows}" for slot, rows in e.loads)
        words = f"ps:{moved[0].source} has too much to do ({loads} rows a second)"
        inputs: Inputs = {f"partition {m.partition}": f"to ps:{m.target}" for m in moved}
        if e.sent_bytes:
            words += f"; {human_bytes(e.sent_bytes)} are sent"
            inputs["sent_bytes"] = e.sent_bytes
        rejected = ("leave them: the slowest ps sets everybody's pace", "move all: each move costs contents once")
        return [
            *notes,
            Note("", Decision("move hot partitions", words, inputs, rejected)),
            *self.settle_map("partitions are hot"),
        ]


def _alone(one: AlonePartition) -> Note:
    """Say that no placement helps against one partition, and which keys it is."""
    words = f"partition {one.partition} is asked for {one.rows_per_s:,.0f} rows a second, {one.times:.1f} times"
    words += " the mean of a ps: no placement is even, because a partition is never divided"
    if one.keys:
        keys = ", ".join(f"{key} of {table} ({100 * share:.0f} % of its requests)" for table, key, share in one.keys)
        words += f"; its hottest keys: {keys}"
    inputs: Inputs = {"partition": one.partition, "rows_per_s": round(one.rows_per_s), "times": round(one.times, 2)}
    rejected = ("divide it: where a key is would no longer follow from the key alone",)
    return Note(f"ps:{one.ps}", Decision("hot partition", words, inputs, rejected))
