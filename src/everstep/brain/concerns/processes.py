"""Which processes shall run: slots are filled, scaled, and emptied before their node or place goes."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.brain.checkpoints import has_checkpoints
from everstep.brain.concerns.concern import OK, Concern, Handlers, Inputs, Out
from everstep.brain.events import DrainAsked, Event, Note, Refused, Reply, ScaleAsked, StartProcess, StopProcess
from everstep.brain.members import Rooms, SlotRecord
from everstep.ids import NodeId, Slot
from everstep.model.capacity import Market
from everstep.model.decision import Decision
from everstep.model.failure import pause_s
from everstep.model.member import Role
from everstep.policies.node_selection import HOME_NODE
from everstep.policies.scaling import after_drain, refuse_ps, refuse_workers
from everstep.policies.waits import refuse_count

STOP_GRACE_S = 10.0  # a worker asked to leave finishes its batch and gives its shards back


class ProcessConcern(Concern):
    """Starts a process in each slot that wants one, and asks processes to leave."""

    __slots__ = ()

    def handlers(self) -> Handlers:
        return {
            ScaleAsked: self._scale_asked,
            DrainAsked: self.drain,
        }

    def settle(self, event: Event, out: Out) -> Out:
        """A process has left its place: another one may wait for it."""
        if not self.members.index.vacated:
            return []
        self.members.index.vacated = False
        if not self.job.rules.refills or self.job.over or self.job.waits_for_nodes:
            return []
        more = self._fill_ps(event.at)
        ends = self.state.protection.gone or self.concerns.training.nothing_left()
        if not ends and not any(record.finished for record in self.members.workers.values()):
            more += self._fill_workers(event.at)
        return more

    def fill(self, at: float) -> Out:
        """Start a process in every slot that wants one and finds a place."""
        if self.job.over or self.job.waits_for_nodes:
            return []
        self.members.index.vacated = False
        return [*self._fill_ps(at), *self._fill_workers(at)]

    def _fill_ps(self, at: float) -> Out:
        out: Out = []
        servers, leaving = self.members.servers, self.state.protection.leaving
        empty = [s for s in range(self.job.ps_wanted) if (record := servers.get(Slot(s))) is None or record.waiting]
        rooms = self.ps_rooms() if empty else None
        for slot in map(Slot, empty):
            if slot not in leaving:
                out += self.start(Role.PS, slot, at, Decision("start", "the job wants this ps"), rooms)
        return out

    def _fill_workers(self, at: float) -> Out:
        out: Out = []
        workers = self.members.workers
        empty = [
            s for s in range(self.job.workers_wanted) if (record := workers.get(Slot(s))) is None or record.waiting
        ]
        rooms = Rooms(self.members, Role.WORKER)
        for slot in map(Slot, empty):
            if rooms.full():
                break  # (thousands of slots may wait, and each node that joins takes a few of them)
            out += self.start(Role.WORKER, slot, at, Decision("start", "the job wants this worker"), rooms)
        return out

    def ps_rooms(self) -> Rooms:
        """Return what nodes can take of ps."""
        reader = self.concerns.placement.reader
        return Rooms(self.members, Role.PS, reader.ps_at_home(), reader.ps_stay)

    def start(
        self,
        role: Role,
        slot: Slot,
        at: float,
        why: Decision,
        counted: Rooms | None = None,
        replaces: bool = False,
    ) -> Out:
        """Start a new process in this slot, or let the slot wait for a node with a place. ``counted``: what nodes can
        take, where many slots are started at once. ``replaces``: a process that was lost; if its script failed, the new
        one comes a little later."""
        if self.job.waits_for_nodes or (role is Role.WORKER and self.concerns.ending.rests):
            return []
        members = self.members
        home = members.homes.get(slot) if role is Role.WORKER else None
        record = members.of(role).get(slot)
        rooms = counted or (self.ps_rooms() if role is Role.PS else Rooms(members, role))
        node = rooms.choose(home, record.avoid if record is not None else None)
        quiet = node is not None and bool(members.nodes[node].quiet_since)
        if node is None or quiet:
            if record is None or record.waiting:
                return []
            record.waiting = True
            words = "no node has a free place for it"
            if quiet:
                words = f"{node} may be cut off: its agent has to be heard first"
            return [Note(str(record.member.key), Decision("waiting", words, {"slot": slot}))]
        if role is Role.PS and not members.nodes[node].stays and self.concerns.placement.reader.ps_stay:
            words = f"{why.reason}; on a spot machine, since none that stays has a place for it"
            why = Decision(why.action, words, {**why.inputs, "market": Market.SPOT.value}, why.rejected)
        record = members.fill(role, slot, node, at)
        record.avoid = None
        if counted is not None:
            counted.taken(node)
        after_s = pause_s(record.failures) if replaces else 0.0
        size = self.concerns.sizes.of(role)
        return [StartProcess(node, role, slot, record.member.incarnation, why, after_s, size)]

    def send_away(self, record: SlotRecord, why: Decision, grace_s: float = STOP_GRACE_S) -> StopProcess | Note:
        """Send a process away. ``grace_s`` 0: as long as it takes."""
        record.stopping = True
        m = record.member
        if not grace_s and self.concerns.training.leaves_first(record):
            # told to end when the group has changed over to one without it: a step may take longer than any grace
            return Note(str(m.key), Decision("leave", f"{why.reason}; it leaves the group first", why.inputs))
        grace_s = grace_s or STOP_GRACE_S
        return StopProcess(m.node, m.role, m.slot, m.incarnation, grace_s, why)

    def _scale_asked(self, e: ScaleAsked, event: Event) -> Out:
        """All or nothing: a plan for both roles is refused as a whole."""
        if self.job.over:
            return [Reply(Refused("the job is over"))]
        wanted = {e.role: e.count, **dict(e.also)}
        if error := self.refuse_scale(wanted):
            return [Reply(Refused(error))]
        return [OK, *self.scale(wanted, event.at)]

    def refuse_scale(self, wanted: Mapping[Role, int]) -> str:
        """Return one line if the job cannot have so many members of each role, else ""."""
        job = self.job
        for role, count in wanted.items():
            error = f"the number of {role}s cannot be changed"
            bounds = refuse_count(job.spec, "workers" if role is Role.WORKER else "ps", count)
            if role is Role.WORKER:
                error = refuse_workers(count)
            elif role is Role.PS and not job.spec.ps:
                error = "this job of mode allreduce has no ps: every worker has the whole model"
            elif role is Role.PS:
                error = refuse_ps(count, self.concerns.placement.reader.code, job.spec.partitions)
                if not error and self.state.placement is None:
                    error = "not yet: not every ps has joined"
                error = error or self.concerns.ps_slots.refuse_scale(count)
            error = error or bounds
            if error:
                return error
        return ""

    def scale(self, wanted: Mapping[Role, int], at: float) -> Out:
        """Have so many members of each role, of which nothing is refused (``refuse_scale``)."""
        out: Out = []
        if Role.PS in wanted:  # first: where there are more of both, the rows have a place when the workers come
            out += self.concerns.ps_slots.scale(wanted[Role.PS], at)
        if Role.WORKER in wanted:
            out += self.scale_workers(wanted[Role.WORKER], at)
        return out

    def scale_workers(self, count: int, at: float) -> Out:
        job, workers = self.job, self.members.workers
        old, job.workers_wanted, job.workers_asked = job.workers_wanted, count, count
        out: Out = []
        if count != old:
            inputs: Inputs = {"from": old, "to": count}
            out.append(Note("", Decision("scale workers", f"asked for {count} instead of {old}", inputs)))
        for slot in map(Slot, range(count, old)):
            record = workers.get(slot)
            if record is None:
                continue
            record.waiting = False
            if not record.running or record.stopping:
                continue
            why = Decision("stop", f"scaled in to {count} workers; the highest slots leave", {"to": count})
            out.append(self.send_away(record, why, 0.0))
        drained = [slot for slot, record in workers.items() if record.drained and slot < old]
        rooms = Rooms(self.members, Role.WORKER)
        for slot in sorted({*map(Slot, range(old, count)), *drained} & set(map(Slot, range(count)))):
            record = workers.get(slot)
            if record is not None:
                record.drained = False
            if record is None or (not record.running and not record.finished):
                if record is not None:
                    record.waiting = True
                why = Decision("start", f"scaled out to {count} workers", {"to": count})
                out += self.start(Role.WORKER, slot, at, why, rooms)
        return out

    def drain(self, e: DrainAsked, event: Event) -> Out:
        """Empty a member, or all members of a node, so that nothing is lost when it goes."""
        if self.job.over:
            return [Reply(Refused("the job is over"))]
        members = self.members
        node = members.nodes.get(NodeId(e.target))
        if node is not None:
            if node.node == HOME_NODE:
                return [Reply(Refused(f"{e.target} has the job's master: everstep stop ends the job"))]
            records = [record for record in members.on(node.node) if record.running]
        else:
            role, _, number = e.target.partition(":")
            record = None
            if role in (Role.WORKER, Role.PS) and number.isascii() and number.isdigit():
                record = members.of(Role(role)).get(Slot(int(number)))
            if record is None or not record.running:
                return [Reply(Refused(f"{e.target!r} is no node, and no running worker or ps such as ps:1"))]
            records = [record]
        servers = [record.member.slot for record in records if record.member.role is Role.PS and not record.stopping]
        leaving = self.state.protection.leaving
        left = [
            m.slot for m in self.concerns.placement.reader.servers() if m.slot not in leaving and m.slot not in servers
        ]
        if servers and self.state.placement is None:
            return [Reply(Refused(f"{e.target}: not yet: not every ps has joined"))]
        saves = self.job.rules.saves and e.deadline_s > 0 and has_checkpoints(self.job.spec)
        if servers and not left and not saves:
            return [Reply(Refused(f"{e.target}: no other ps could take its partitions; first: everstep scale --ps N"))]
        if node is not None:
            node.draining = True
        out: Out = [OK]
        words = f"empty it within {e.deadline_s:g} s" if e.deadline_s else "empty it"
        words += f": {', '.join(str(record.member.key) for record in records) or 'nothing'}"
        words += ", and start another process in its place" if e.again else ""
        less = after_drain(self.concerns.placement.reader.code, len(left)) if servers else ""
        words += f"; {less}" if less else ""
        inputs: Inputs = {"deadline_s": e.deadline_s, "partitions": 0}
        inputs["partitions"] = sum(self.concerns.placement.reader.left_at(slot) for slot in servers)
        exposed = 0
        if servers and self.job.rules.ranks:
            exposed = self.concerns.placement.reader.exposed(servers)
            inputs["exposed"] = exposed
            move = "and move first" if left else "and no other ps could take them"
            words += f"; {exposed} of its partitions have no complete copy elsewhere, {move}" if exposed else ""
            words += ": a checkpoint is taken" if exposed and saves else ""
        out.append(Note(e.target, Decision("drain", words, inputs)))
        for record in records:
            if record.member.role is Role.WORKER and not record.stopping:
                record.drained = node is None
                why = Decision("stop", f"{e.target} is to be emptied")
                grace_s = self.concerns.training.grace_s(e.deadline_s)
                out.append(self.send_away(record, why, grace_s))
        leaving[:] = sorted({*leaving, *servers})
        if e.again:
            self.state.protection.refill = sorted({*self.state.protection.refill, *servers})
        out += self.concerns.placement.settle_map(f"{e.target} is to be emptied")
        if exposed and saves:
            out += self.concerns.training.save_for_notice(event.at)
        return out
