"""Handles checkpoints: asked for, written in parts, committed, and gone on from."""

from __future__ import annotations

from everstep.brain.concerns.concern import OK, Concern, Handlers, Out
from everstep.brain.events import (
    CheckpointAsked,
    CheckpointBegun,
    CheckpointCommitted,
    Event,
    Fenced,
    JobResumed,
    Refused,
    Reply,
    ShardsConfirmed,
    SnapshotsWritten,
)
from everstep.model.member import Role
from everstep.model.reasons import CheckpointReason


class SavingConcern(Concern):
    """Takes checkpoints. What is in one, ``brain.checkpoints`` says."""

    __slots__ = ()

    def handlers(self) -> Handlers:
        return {
            CheckpointAsked: self._checkpoint_asked,
            SnapshotsWritten: self._snapshots_written,
            CheckpointCommitted: self._checkpoint_committed,
            ShardsConfirmed: self._shards_confirmed,
            JobResumed: self._job_resumed,
        }

    def _checkpoint_asked(self, e: CheckpointAsked, event: Event) -> Out:
        job, checkpoints = self.job, self.checkpoints
        if job.over:
            return [Reply(Refused("the job is over"))]
        if nothing := self.concerns.training.nothing_to_save():
            return [Reply(Refused(nothing))]
        out, training = checkpoints.late(event.at), self.concerns.training
        if e.reason is not CheckpointReason.LATE:
            out += checkpoints.begin(job, event.at, e.reason, e.full or training.saves_all, training.saved_words())
        else:
            out += self.concerns.ending.finish_if_all_left(event.at)
        return [Reply(CheckpointBegun(checkpoints.numbers)), *out]

    def _snapshots_written(self, e: SnapshotsWritten, event: Event) -> Out:
        record = self.members.current(Role.PS, event.slot, event.incarnation)
        if record is None:
            return [Reply(Fenced(f"ps:{event.slot} #{event.incarnation} was replaced"))]
        if self.job.over:
            return [OK]
        writing = self.checkpoints.writing
        partial = writing.partial if writing is not None else None
        if partial is not None and partial.replica is not None and partial.replica.lineage != self.state.groups.lineage:
            return [
                OK,
                *self.checkpoints.give_up("every state was lost meanwhile; its replica is of steps that are void"),
            ]
        owned = set(self.state.placement.owned_by(event.slot)) if self.state.placement is not None else set()
        out: Out = [OK]
        if partial is not None or not self.concerns.training.saves_all:  # (else it may lack what the replica will have)
            out += self.checkpoints.take(
                self.job, self.shards, event.at, event.slot, e.checkpoint, e.snapshots, e.tables, e.error, owned
            )
        return out + self.concerns.ending.finish_if_all_left(event.at)

    def _checkpoint_committed(self, e: CheckpointCommitted, event: Event) -> Out:
        pinned = {number for _, number in self.state.placement.snapshots} if self.state.placement is not None else set()
        out = self.checkpoints.commit(self.job, self.shards, event.at, e.checkpoint, e.error, pinned)
        return out + self.concerns.ending.finish_if_all_left(event.at)

    def _shards_confirmed(self, e: ShardsConfirmed, event: Event) -> Out:
        return self.checkpoints.confirm(self.job, self.shards, e.before)

    def _job_resumed(self, e: JobResumed, event: Event) -> Out:
        return self.concerns.training.resume(e)

    def validate(self) -> None:
        self.checkpoints.validate(self.job)
