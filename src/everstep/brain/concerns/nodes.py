"""Nodes: their agents say hello with what they run, are lost, and are heard again."""

from __future__ import annotations

from typing import cast

import msgspec

from everstep.bounds import PLACES_MAX
from everstep.brain.concerns.concern import OK, Concern, Handlers, Inputs, Out
from everstep.brain.concerns.processes import STOP_GRACE_S
from everstep.brain.events import (
    CapacityChanged,
    Event,
    FinishJob,
    NodeHeard,
    NodeJoined,
    NodeLost,
    NodesDue,
    Note,
    StartProcess,
    StopProcess,
)
from everstep.brain.members import Node, Rooms
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.capacity import RETURNS_A_LIFE, CapacityStep, Offer, offer_words
from everstep.model.decision import Decision
from everstep.model.member import MemberState, Role
from everstep.policies.node_selection import HOME_NODE


class NodeConcern(Concern):
    """Which nodes the job has, and what becomes of the processes on one that comes, goes or comes back."""

    __slots__ = ()

    def handlers(self) -> Handlers:
        return {
            NodeJoined: self._node_joined,
            NodeLost: self._node_lost,
            NodeHeard: self.node_heard,
            NodesDue: self._nodes_due,
            CapacityChanged: self._capacity_changed,
        }

    def validate(self) -> None:
        self.members.validate()

    def _capacity_changed(self, e: CapacityChanged, event: Event) -> Out:
        inputs: Inputs = {} if e.recorded_s is None else {"recorded_s": round(e.recorded_s, 1)}
        words = offer_words(Offer(e.hardware, e.zone, e.market, e.price))
        out: Out = [OK, Note(e.node, Decision(e.step.value, words, inputs))]
        node = self.members.nodes.get(e.node)
        gone = e.step in (CapacityStep.TAKEN_BACK, CapacityStep.GIVEN_BACK)
        if gone and node is not None and node.returns < (e.life + 1) * RETURNS_A_LIFE:
            # (else the word is late: a later machine of that name has said hello already)
            out += self._node_lost(NodeLost(e.node, f"its machine was {e.step.value}"), event)
        return out

    def _node_joined(self, e: NodeJoined, event: Event) -> Out:
        job, members = self.job, self.members
        node = members.nodes.get(e.node)
        out: Out = [OK]
        if node is None:
            node = Node(e.node, e.host, e.worker_places, e.ps_places)
            node.returns, node.since, node.counted = e.returns, event.at, job.spec.master_alone
            if e.node != HOME_NODE and e.worker_places > 0 and not job.over and not node.counted:
                most = job.spec.max_workers
                room = max(0, most - job.workers_wanted) if most else e.worker_places
                node.brought = min(e.worker_places, room)
                for slot in range(job.workers_wanted, job.workers_wanted + node.brought):
                    members.homes[Slot(slot)] = e.node
                job.workers_wanted += node.brought
            places = e.worker_places if e.worker_places or node.counted else "any number of"
            words = f"it has {places} places for workers"
            words += f", {e.ps_places if e.ps_places < PLACES_MAX else 'any number of'} for ps" if e.ps_places else ""
            out.append(Note(e.node, Decision("node joined", words, {"host": e.host})))
        else:
            if e.returns > node.returns:
                node.draining, node.returns = False, e.returns  # what it was to be emptied for is over
            if not node.alive:
                out.append(Note(e.node, Decision("node back", "its agent said hello again", {"host": e.host})))
                node.since = event.at
            node.host, node.worker_places, node.ps_places, node.alive = e.host, e.worker_places, e.ps_places, True
        members.joined(node)
        node.quiet_since = 0.0
        node.machine, node.zone, node.market, node.copies = e.machine, e.zone, e.market, e.copies
        node.memory_bytes, node.memory_limit = e.memory_bytes, e.memory_limit
        out += self._gather(event.at)
        if e.node != HOME_NODE and e.ps_places > 0 and self.state.placement is not None:
            self.state.protection.uneven = True
        runs: set[tuple[Role, Slot, Incarnation]] = set()
        for role, slot, incarnation, pid in e.running:
            record = members.of(role).get(slot)
            if record is not None and incarnation > record.member.incarnation:
                out += self.concerns.training.take_back(record, "its place was taken by a later process")
                self.concerns.training.ended(record, clean=False)
                record = members.adopt(role, slot, incarnation, e.node, event.at)
            if (
                job.over
                or record is None
                or incarnation < record.member.incarnation
                or not record.running
                or record.member.node != e.node
            ):
                now = f"#{record.member.incarnation} {record.member.state}" if record is not None else "nobody's"
                why = Decision("stop", "the job is over" if job.over else f"it was replaced: the slot is {now}")
                out.append(StopProcess(e.node, role, slot, incarnation, 0.0, why))
                continue
            runs.add((role, slot, incarnation))
            record.member.pid = pid or record.member.pid
            if record.stopping and not self.concerns.training.in_step(record):
                why = Decision("stop", "it was asked to leave; its agent may not have heard")
                out.append(StopProcess(e.node, role, slot, incarnation, STOP_GRACE_S, why))
        if job.over:
            out.append(FinishJob(cast(int, job.exit_code), job.error))
            return out
        for record in members.on(e.node):
            member = record.member
            if not record.running or (member.role, member.slot, member.incarnation) in runs:
                continue
            if member.state is MemberState.STARTING and not record.stopping:
                why = Decision("start", "it was ordered before, and its agent does not run it")
                again = StartProcess(e.node, member.role, member.slot, member.incarnation, why)
                out.append(msgspec.structs.replace(again, size=self.concerns.sizes.of(member.role)))
            elif member.role is Role.PS and not (member.state is MemberState.STARTING and job.rules.concludes):
                # Its loss is final, and this word may be an old one: let its own silence prove it. (One that was told
                # to end before it said hello has nothing to lose, and nobody else would ever say that it is not there.)
                if member.state is MemberState.ALIVE:
                    self.members.set_state(record, MemberState.SUSPECT, event.at)
                    why = Decision("suspect", f"the agent of {e.node} does not list it")
                    out.append(Note(str(member.key), why))
            else:
                out += self.concerns.losses.gone(record, event.at, "its agent no longer runs it", {"node": e.node})
                if job.over:
                    return out
        return out + self.concerns.processes.fill(event.at)

    def _gather(self, at: float) -> Out:
        """A node has joined: whether the job waits for more before it begins."""
        job, wanted = self.job, self.job.spec.nodes
        if not job.waits_for_nodes:
            return []
        there = sum(node.alive for node in self.members.nodes.values())
        if there >= wanted:
            job.gathered = True
            return [Note("", Decision("begin", f"{there} nodes have joined"))]
        if job.nodes_due_at:
            return []
        job.nodes_due_at = at + job.spec.nodes_wait_s
        words = f"for {wanted} nodes, {job.spec.nodes_wait_s:g} s at most; {there} is there"
        return [Note("", Decision("wait", words, {"nodes": wanted, "nodes_wait_s": job.spec.nodes_wait_s}))]

    def _nodes_due(self, e: NodesDue, event: Event) -> Out:
        job = self.job
        if not job.waits_for_nodes or job.over:
            return []
        job.gathered = True
        there = sum(node.alive for node in self.members.nodes.values())
        words = f"{there} of {job.spec.nodes} nodes have joined within {job.spec.nodes_wait_s:g} s: with what there is"
        return [Note("", Decision("begin", words)), *self.concerns.processes.fill(event.at)]

    def _node_lost(self, e: NodeLost, event: Event) -> Out:
        node = self.members.nodes.get(e.node)
        if node is None or not node.alive:
            return []
        node.alive, node.quiet_since = False, 0.0
        if self.job.over:
            return []
        self.job.failures.node += 1
        records = [record for record in self.members.on(e.node) if record.running]
        for record in records:  # all at once: none of them is to take over from another one
            if record.member.role is Role.PS and not record.stopping:
                self.members.set_state(record, MemberState.LOST, event.at)
        out: Out = [
            Note(e.node, Decision("node lost", e.reason, {"members": ", ".join(str(s.member.key) for s in records)}))
        ]
        rooms, why = Rooms(self.members, Role.WORKER), f"its node {e.node} was lost: {e.reason}"
        for record in records:
            out += self.concerns.losses.gone(record, event.at, why, {"node": e.node}, node_lost=True, counted=rooms)
            if self.job.over:
                return out
        return out + self.concerns.processes.fill(event.at)

    def await_word(self, node: NodeId, at: float) -> None:
        """A process of this node was silent for too long: it alone, or a node that is cut off. One that is started
        there now would be lost with the node, a second time."""
        if (known := self.members.nodes.get(node)) is not None:
            known.quiet_since = at

    def node_heard(self, e: NodeHeard, event: Event) -> Out:
        node = self.members.nodes.get(e.node)
        if node is None or not node.quiet_since:
            return []
        node.quiet_since = 0.0
        return self.concerns.processes.fill(event.at)
