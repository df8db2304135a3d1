"""Processes of ps: one is lost, gives everything away, or is scaled in."""

from __future__ import annotations

from collections import Counter

from everstep.brain.concerns.concern import Concern, Inputs, Out
from everstep.brain.concerns.placement import AWAITED_S
from everstep.brain.events import Event, Note, StopProcess
from everstep.brain.members import SlotRecord
from everstep.ids import Slot
from everstep.model.decision import Decision
from everstep.model.member import Member, MemberState, Role
from everstep.policies.node_selection import HOME_NODE
from everstep.policies.restarts import may_restart


class PsSlotConcern(Concern):
    """Decides what becomes of the slot of a ps that is no more, and how many there shall be."""

    __slots__ = ()

    def gone(self, record: SlotRecord, at: float, reason: str, inputs: Inputs, failed: str) -> Out:
        """Let others take over what it had; without protection its loss is the end, unless it held nothing. ``failed``:
        the error that it told of itself: a new one would tell the same."""
        job, member = self.job, record.member
        if record.stopping:
            return self._ps_stopped(record, at)
        late = self._not_emptied(member.slot)
        self.members.set_state(record, MemberState.LOST, at)
        job.failures.ps += 1
        record.losses += 1
        record.streak += 1
        out: Out = [*late, Note(str(member.key), Decision("lost", reason, inputs))]
        if self.state.placement is None:
            if not failed and may_restart(record.streak, min(3, job.spec.max_restarts)):
                why = Decision("restart", f"it was lost before it held anything: {reason}", inputs)
                return out + self.concerns.processes.start(Role.PS, member.slot, at, why, replaces=True)
            return [*out, self.fail(4, f"{member.key} does not start: {reason}; see logs/ps-{member.slot}.log")]
        once = job.rules.awaits and record.streak <= 1 and member.slot not in self.state.protection.leaving
        if once and member.slot < job.ps_wanted and may_restart(record.streak, job.spec.max_restarts):
            self.state.protection.awaited_until = at + AWAITED_S
        out += self.concerns.placement.settle_map(f"{member.key} was lost ({reason})")
        self._refill(member.slot)
        node = self.members.nodes.get(member.node)
        if job.rules.saves and node is not None and node.draining and member.slot in self.state.protection.leaving:
            self.state.protection.leaving.remove(member.slot)  # (it went before it was empty: another one is wanted)
        if job.over or member.slot in self.state.protection.leaving or member.slot >= job.ps_wanted:
            return out
        if not may_restart(record.streak, job.spec.max_restarts):
            if not any(other.running for other in self.members.servers.values()):
                error = (
                    f"no ps is left that could serve: {member.key} was lost {record.streak} times in a row (last: "
                    f"{reason}); gave up after max_restarts={job.spec.max_restarts}: see logs/ps-{member.slot}.log"
                )
                return [*out, self.fail(4, error)]
            words = f"it was lost {record.streak} times in a row (last: {reason}); the others go on without it"
            return [*out, Note(str(member.key), Decision("not started again", words, inputs))]
        why = Decision(
            "restart",
            f"it was lost: {reason}",
            {**inputs, "in_a_row": record.streak, "max_restarts": job.spec.max_restarts},
            ("go on without it: the others hold its partitions, with less protection and memory",),
        )
        return out + self.concerns.processes.start(Role.PS, member.slot, at, why, replaces=True)

    def _not_emptied(self, slot: Slot) -> Out:
        """Say what had not moved in time, if a ps that was to give everything away is gone before it had."""
        reader = self.concerns.placement.reader
        if not self.job.rules.ranks or slot not in self.state.protection.leaving or self.state.placement is None:
            return []
        left, exposed = len(self.state.placement.owned_by(slot)), reader.exposed({slot})
        if not left:
            return []
        words = f"{left} partitions had not moved in time; {exposed} of them have no complete copy elsewhere"
        return [Note(f"ps:{slot}", Decision("not emptied in time", words, {"partitions": left, "exposed": exposed}))]

    def _ps_stopped(self, record: SlotRecord, at: float) -> Out:
        """Handle that a ps which had given everything away has ended."""
        self.members.set_state(record, MemberState.LEFT, at)
        record.stopping, slot = False, record.member.slot
        out: Out = [Note(str(record.member.key), Decision("left", "others have all that it held"))]
        leaving, node = self.state.protection.leaving, self.members.nodes.get(record.member.node)
        self._refill(slot)
        if slot in leaving and (slot >= self.job.ps_wanted or (node is not None and node.draining)):
            leaving.remove(slot)
        if slot < self.job.ps_wanted and slot not in leaving:
            out += self.concerns.processes.start(
                Role.PS, slot, at, Decision("start", "the job wants this ps, here or elsewhere")
            )
        return out

    def _refill(self, slot: Slot) -> None:
        """It has ended: whether another one may be started there, although it was emptied."""
        protection = self.state.protection
        if slot in protection.refill:
            protection.refill.remove(slot)
            protection.leaving[:] = [other for other in protection.leaving if other != slot]

    def settle(self, event: Event, out: Out) -> Out:
        """A node has places for ps, and another machine has two more of them, or one that may be taken back where ps
        belong on machines that stay: one ps at a time goes there. It gives all that it has to others first, so the job
        must have one ps more than a stripe has units."""
        protection, job = self.state.protection, self.job
        if not protection.uneven:
            return []
        reader = self.concerns.placement.reader
        if job.over or not (reader.code.m or reader.ps_stay):
            protection.uneven = False
            return []
        starting = any(r.running and r.member.address is None for r in self.members.servers.values())
        if (starting and reader.ps_stay) or not reader.at_rest():
            return []
        servers = [m for m in reader.servers() if m.slot not in protection.leaving]
        used: dict[str, int] = {}
        for member in servers:
            machine = self.members.machine_of(member.node)
            used[machine] = used.get(machine, 0) + 1
        target = self.concerns.processes.ps_rooms().choose(None, None)
        risky = self._on_spot(servers) if target is not None and self.members.nodes[target].stays else {}
        if not risky and not reader.code.m:
            protection.uneven = False
            return []
        most = max(risky or used, key=lambda machine: (used[machine], machine), default="")
        least = self.members.machine_of(target) if target is not None else most
        from_home = most == self.members.machine_of(HOME_NODE)
        stays = from_home and used.get(most, 0) <= reader.ps_at_home()
        if target is None or ((stays or used.get(most, 0) - used.get(least, 0) < 2) and not risky):
            protection.uneven = False
            return []
        if event.at - self.members.nodes[target].since < job.spec.lost_after_s:
            return []  # it may go again at once
        member = max((m for m in servers if self.members.machine_of(m.node) == most), key=lambda m: m.slot)
        inputs: Inputs = {"from": member.node, "to": target}
        if len(servers) <= (reader.code.width if reader.code.m else 1):
            protection.uneven = False
            need = f"{reader.code} needs" if reader.code.m else "the job has"
            words = f"{target} has places for ps; none goes there, since {len(servers)} ps are what {need}"
            why = Decision("stay", f"{words}; everstep scale --ps {len(servers) + 1} starts one there", inputs)
            return [Note("", why)]
        words = f"{most} has {used[most]} ps and {least} {used.get(least, 0)}"
        if risky:
            words = f"{most} may be taken back, and {least} stays (reliable: ps)"
        words += f": it is emptied, and started on {target}"
        protection.leaving[:] = sorted({*protection.leaving, member.slot})
        protection.refill[:] = sorted({*protection.refill, member.slot})
        out = [Note(str(member.key), Decision("spread", words, inputs))]
        return out + self.concerns.placement.settle_map(f"{member.key} goes to {target}")

    def _on_spot(self, servers: list[Member]) -> dict[str, int]:
        """Return machines that may be taken back, with how many of these ps, where ps belong on others."""
        if not self.concerns.placement.reader.ps_stay:
            return {}
        nodes = self.members.nodes
        spot = [m for m in servers if (node := nodes.get(m.node)) is not None and not node.stays]
        return dict(Counter(self.members.machine_of(m.node) for m in spot))

    def refuse_scale(self, count: int) -> str:
        """Return one line if nobody could take what ps have that a scale to ``count`` ends, else ""."""
        leaving, servers = self.state.protection.leaving, self.members.servers
        ends = [slot for slot, record in servers.items() if slot >= count and record.running]
        stays = [
            slot
            for slot, record in servers.items()
            if slot < count and record.running and not (slot in leaving and self._is_drained(slot))
        ]
        if not ends or stays or not self.job.rules.refills:
            return ""
        ends_words = ", ".join(f"ps:{slot}" for slot in sorted(ends))
        return (
            f"{count} ps: not yet: all that would be left are emptied with their nodes or wait for a place, and "
            f"{ends_words} would have nobody to give the partitions to; try again when one of these serves elsewhere"
        )

    def _is_drained(self, slot: Slot) -> bool:
        """Return whether this ps gives everything away because its node is to be emptied."""
        node = self.members.nodes.get(self.members.servers[slot].member.node)
        return node is not None and node.alive and node.draining

    def scale(self, count: int, at: float) -> Out:
        """Scale: the highest slots give everything away and end; new ones get their share when they have joined."""
        job, servers, leaving = self.job, self.members.servers, self.state.protection.leaving
        old, job.ps_wanted = job.ps_wanted, count
        out: Out = []
        if count != old:
            inputs: Inputs = {"from": old, "to": count}
            out.append(Note("", Decision("scale ps", f"asked for {count} instead of {old}", inputs)))
        drained = {slot for slot in leaving if self.job.rules.refills and self._is_drained(slot)}
        leaving[:] = [
            slot for slot, record in sorted(servers.items()) if (slot >= count or slot in drained) and record.running
        ]
        for slot, record in servers.items():
            if slot >= count:
                record.waiting = False
                if record.member.state is MemberState.STARTING:  # it has nothing yet
                    record.stopping = True
                    m, why = record.member, Decision("stop", f"scaled in to {count} ps before it had joined")
                    out.append(StopProcess(m.node, m.role, m.slot, m.incarnation, 0.0, why))
        wave = []
        rooms = self.concerns.processes.ps_rooms()
        for slot in map(Slot, range(count)):
            known = servers.get(slot)
            if known is None or not known.running:
                why = Decision("start", f"scaled out to {count} ps", {"to": count})
                out += self.concerns.processes.start(Role.PS, slot, at, why, rooms)
                wave.append(slot)
        self.state.protection.wave = wave
        self.state.protection.uneven = any(n.ps_places > 0 and n.node != HOME_NODE for n in self.members.nodes.values())
        return out + self.concerns.placement.settle_map(f"scaled from {old} to {count} ps")
