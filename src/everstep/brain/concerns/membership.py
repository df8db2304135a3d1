"""Processes: each says hello, falls silent, is heard again, and ends."""

from __future__ import annotations

from everstep.brain.concerns.concern import OK, Concern, Handlers, Inputs, Out, fenced
from everstep.brain.events import (
    Event,
    Fenced,
    MemberHeard,
    MemberJoined,
    MemberSilent,
    NodeHeard,
    Note,
    ProcessExited,
    ReleaseShards,
    Reply,
    StopProcess,
    Welcome,
)
from everstep.brain.failures import judge
from everstep.brain.members import SlotRecord
from everstep.model.decision import Decision
from everstep.model.member import MemberState, Role
from everstep.model.placement import Placement
from everstep.model.words import cause_words, exit_words, memory_words

_NO_PS = Placement(1, (), ())  # of a job whose parameters are all on its workers


class MemberConcern(Concern):
    """Decides which processes are members, and what the end of one means."""

    __slots__ = ()

    def handlers(self) -> Handlers:
        return {
            MemberJoined: self._member_joined,
            MemberSilent: self._member_silent,
            MemberHeard: self._member_heard,
            ProcessExited: self._process_exited,
        }

    def _member_joined(self, e: MemberJoined, event: Event) -> Out:
        members, job = self.members, self.job
        record = members.of(e.role).get(e.slot)
        if record is None:
            return [Reply(Fenced(f"{e.role}:{e.slot} is not a member of this job"))]
        out: Out = []
        if e.incarnation > record.member.incarnation:
            out += self.concerns.training.take_back(record, "its place was taken by a later process")
            self.concerns.training.ended(record, clean=False)
            record = members.adopt(e.role, e.slot, e.incarnation, e.node, event.at)
        member = record.member
        if e.incarnation < member.incarnation or not record.running:
            return [fenced(e.role, e.slot, e.incarnation, record)]
        new = member.state is MemberState.STARTING
        self.members.set_state(record, MemberState.ALIVE, event.at)
        member.pid = e.pid
        members.stands_on(record, e.node)
        moved = e.address is not None and e.address != member.address
        member.address = e.address if e.address is not None else member.address
        if new:
            inputs: Inputs = {"pid": e.pid, "incarnation": e.incarnation}
            out.append(Note(str(member.key), Decision("joined", f"process {e.pid} on {e.node}", inputs)))
        if e.role is Role.PS:
            out += self.concerns.placement.place(record, moved or new, e.holds, event.at)
        revoked = tuple(lease.no for lease in e.leases if not self.concerns.training.confirm(record, lease))
        placement = self.state.placement if job.spec.ps else _NO_PS
        welcome: Out = [Reply(Welcome(job.master_incarnation, placement, revoked))]
        if e.role is Role.PS and self.shards.released:
            out.append(ReleaseShards(tuple(self.shards.released)))
        return welcome + out

    def _member_silent(self, e: MemberSilent, event: Event) -> Out:
        record = self.members.current(e.role, e.slot, e.incarnation)
        if record is None or self.job.over:
            return []
        if not e.lost:
            if record.member.state is not MemberState.ALIVE:
                return []
            self.members.set_state(record, MemberState.SUSPECT, event.at)
            reason = f"no heartbeat for {e.silent_s:.1f} s"
            inputs: Inputs = {"silent_s": round(e.silent_s, 3)}
            rejected = (f"replace it now: it may only be slow (lost after {self.job.spec.lost_after_s:g} s)",)
            return [Note(str(record.member.key), Decision("suspect", reason, inputs, rejected))]
        member = record.member
        starting = member.state is MemberState.STARTING
        reason = f"no hello for {e.silent_s:.0f} s" if starting else f"no heartbeat for {e.silent_s:.1f} s"
        reason = e.why or reason
        stop = StopProcess(
            member.node,
            member.role,
            member.slot,
            member.incarnation,
            0.0,
            Decision("stop", f"it was declared lost ({reason}); it must not come back to life"),
        )
        if not e.why:  # (else its node is heard)
            self.concerns.nodes.await_word(member.node, event.at)
        return [
            stop,
            *self.concerns.losses.gone(
                record, event.at, reason, {"silent_s": round(e.silent_s, 3)}, progress=e.progress
            ),
        ]

    def _member_heard(self, e: MemberHeard, event: Event) -> Out:
        record = self.members.current(e.role, e.slot, e.incarnation)
        if record is None or record.member.state is not MemberState.SUSPECT:
            return []
        silent_s = event.at - record.member.since
        self.members.set_state(record, MemberState.ALIVE, event.at)
        return [Note(str(record.member.key), Decision("heard again", f"{silent_s:.1f} s after it was suspected"))]

    def _process_exited(self, e: ProcessExited, event: Event) -> Out:
        record = self.members.current(e.role, e.slot, e.incarnation)
        if record is None:  # an older life, or said before: its end is known
            ended = self.members.of(e.role).get(e.slot)
            if ended is None or ended.member.incarnation != e.incarnation:
                return [OK]
            return [OK, *self.concerns.nodes.node_heard(NodeHeard(ended.member.node), event)]
        finished = self.concerns.training.exited(record, e)
        if self.job.over:
            self.members.set_state(record, MemberState.LEFT, event.at)
            return [OK, *self.concerns.training.take_back(record, "")]
        reason = exit_words(e.status)
        inputs: Inputs = {"exit_status": e.status}
        more: Out = []
        if e.memory is not None and not record.stopping:
            self.job.failures.memory += 1
            reason = memory_words(e.memory, e.role)
            inputs |= {"out_of_memory": e.memory.limit.value, "limit_bytes": e.memory.limit_bytes}
            more = self.concerns.sizes.after_death(record, e.memory)
        if e.error:
            inputs["error"] = e.error
        if e.role is Role.PS:
            refused = self.concerns.placement.died_loading(record, reason, e.status)
            if self.checkpoints.aside:
                self.members.set_state(record, MemberState.LOST, event.at)
                return [OK, *refused, self.fail(4, self.checkpoints.aside_words)]
            return [
                OK,
                *more,
                *refused,
                *self.concerns.losses.gone(
                    record, event.at, reason + (f" ({e.error})" if e.error else ""), inputs, error=e.error
                ),
            ]
        if finished:
            out: Out = [OK, *self.concerns.training.take_back(record, "its script ended")]
            self.members.set_state(record, MemberState.LEFT, event.at)
            record.finished, record.streak, record.failures = True, 0, 0
            self.duty.ended_well(self.members, record)
            out.append(Note(str(record.member.key), Decision("left", "its script ran to the end", inputs)))
            return out + self.concerns.ending.finish_if_all_left(event.at)
        if e.too_large and not record.stopping:
            most = self.state.control.too_large(e.slot, e.too_large)
            reason = (
                f"its memory was too small for {e.too_large} samples at once: no plan gives it more than {most} now"
            )
            return [
                OK,
                *self.concerns.losses.gone(
                    record, event.at, reason, {**inputs, "samples": e.too_large}, progress=e.progress
                ),
            ]
        if e.error and not record.stopping:
            why_not = judge(
                e.failure, record, self.members, self.job.spec.script_retries, self.concerns.training.progress()
            )
            if not why_not:
                return [OK, *more, *self._try_again(record, e, event, inputs)]
            self.members.set_state(record, MemberState.LEFT, event.at)
            out = [OK, *self.concerns.training.take_back(record, "its script failed")]
            why = Decision("fail the job", "the script raised an error", inputs, (f"restart it: {why_not}",))
            out.append(Note(str(record.member.key), why))
            no = f"; {why_not}" if e.failure is not None and e.failure.cause != "script" else ""
            exit_code = e.failure.exit_code if e.failure is not None else 1
            return [*out, self.fail(exit_code or 1, f"the script failed in {record.member.key}: {e.error}{no}")]
        return [OK, *more, *self.concerns.losses.gone(record, event.at, reason, inputs, progress=e.progress)]

    def _try_again(self, record: SlotRecord, e: ProcessExited, event: Event, inputs: Inputs) -> Out:
        """Its script raised what may pass: as a loss, but the next process comes a little later."""
        assert e.failure is not None
        retries = self.job.spec.script_retries
        words = f"{cause_words(e.failure.cause)}; try {record.failures} of {retries} without a step between"
        why = Decision("try again", f"its script raised {e.error}: {words}", {**inputs, "cause": e.failure.cause})
        return [
            Note(str(record.member.key), why),
            *self.concerns.losses.gone(record, event.at, f"its script raised {e.error}", inputs, progress=e.progress),
        ]
