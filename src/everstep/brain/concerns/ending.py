"""The end of the job: it is stopped, its scripts have ended, or training goes on behind that."""

from __future__ import annotations

from typing import cast

from everstep.brain.checkpoints import ends_with_checkpoint
from everstep.brain.concerns.concern import OK, Concern, Handlers, Inputs, Out
from everstep.brain.events import Event, FinishJob, InstructionType, Note, StopAsked
from everstep.brain.job import Phase
from everstep.model.decision import Decision
from everstep.model.member import Role
from everstep.model.reasons import CheckpointReason

RESULT_LOST = 5  # exit code of a job whose data is trained, and whose script did not get to its end
MAX_RERUNS = 3  # of a script that has ended, for shards that came back afterwards


class EndingConcern(Concern):
    """Ends the job, with a last checkpoint where it takes one."""

    __slots__ = ()

    def handlers(self) -> Handlers:
        return {
            StopAsked: self._stop_asked,
        }

    def settle(self, event: Event, out: Out) -> Out:
        """Go on from a last checkpoint that was given up in the midst of something else, as the loss of a ps."""
        checkpoints, job = self.checkpoints, self.job
        if job.over or not (checkpoints.stopping and checkpoints.stopped and job.rules.concludes):
            return []
        return self._stop_when_saved(event.at)

    def _stop_asked(self, e: StopAsked, event: Event) -> Out:
        if self.job.over:
            return [OK, FinishJob(cast(int, self.job.exit_code), self.job.error)]
        suspending, self.state.supervision.suspending = self.state.supervision.suspending, ""  # (to stop is more)
        if e.checkpoint and (suspending or ends_with_checkpoint(self.job.spec)) and self.concerns.training.unsaved():
            if self.checkpoints.stopping:
                return [OK]
            self.checkpoints.stopping = e.reason
            why = Decision("stop the job", f"{e.reason}: after a last checkpoint", {}, ("stop it at once",))
            return [OK, Note("", why), *self._rest(), *self._stop_when_saved(event.at)]
        why = Decision("stop the job", e.reason)
        return [OK, Note("", why), self.job.finish(Phase.STOPPED, 0, "")]

    def suspend(self, reason: str, at: float) -> Out:
        """Make the job's state safe, as a job does that stops, and end all of its processes."""
        writing = self.checkpoints.writing
        if writing is not None and writing.reason is CheckpointReason.FINAL:
            return self._cannot_suspend(at, "every script has ended, and the job is about to")
        if not self.concerns.training.can_be_saved():
            return self.suspended(at)
        self.checkpoints.stopping = reason
        why = Decision("suspend the job", f"{reason}: after a checkpoint")
        return [Note("", why), *self._rest(), *self._stop_when_saved(at)]

    def suspended(self, at: float) -> Out:
        """Nothing of the job has to run any more; or its state could not be made safe, and it goes on."""
        supervision, checkpoints = self.state.supervision, self.checkpoints
        saved, newest = bool(checkpoints.last), checkpoints.newest
        lost = self.concerns.training.lost_if_ended()
        if not saved and (self.concerns.training.can_be_saved() or (lost and newest is None)):
            return self._cannot_suspend(at, "no checkpoint could be written, so the job goes on")
        words = supervision.suspending
        if not saved and lost:
            since = f"checkpoint {newest.checkpoint}" if newest is not None else "its beginning"
            words += f"; nobody is left who could write a checkpoint: the job will go on from {since}"
        return self._finish_suspended(words)

    def _finish_suspended(self, words: str) -> Out:
        newest = self.checkpoints.newest
        self.state.supervision.suspensions += 1
        inputs: Inputs = {"checkpoint": newest.checkpoint if newest is not None else 0}
        return [Note("", Decision("suspended", words, inputs)), self.job.finish(Phase.SUSPENDED, 0, "")]

    def suspend_now(self, at: float) -> Out:
        """The time for a last checkpoint is over: suspend the job with the one before, if there is one."""
        supervision, checkpoints = self.state.supervision, self.checkpoints
        if not supervision.suspending or checkpoints.stopped:
            return []
        newest, lost = checkpoints.newest, self.concerns.training.lost_if_ended()
        if lost and newest is None:
            return self._cannot_suspend(at, "no checkpoint was written in time, and there is none before it")
        writing, out = checkpoints.writing, list[InstructionType]()
        if writing is not None:
            out += checkpoints.give_up(f"not written within the time that there was ({len(writing.snapshots)} images)")
        since = f"checkpoint {newest.checkpoint}" if newest is not None else "its beginning"
        words = f"{supervision.suspending}; its state was not written in time: the job will go on from {since}"
        return [*out, *self._finish_suspended(words)]

    def _cannot_suspend(self, at: float, why: str) -> Out:
        words = f"{self.state.supervision.suspending}; but {why}"
        self.concerns.supervisor.cannot_suspend(at)
        self.checkpoints.cannot_stop()
        for slot, record in self.members.workers.items():
            if slot < self.job.workers_wanted and not (record.running or record.finished or record.drained):
                record.waiting = True
        return [Note("", Decision("cannot suspend", words)), *self.concerns.processes.fill(at)]

    @property
    def rests(self) -> bool:
        """The job stops, and no worker is to train any more. (Brains of before this release let them train on, which
        ``settles`` tells: what their masters recorded is replayed in their way.)"""
        return self.concerns.training.rests and bool(self.checkpoints.stopping) and self.job.rules.settles

    def _rest(self) -> Out:
        """Each worker finishes its batch and leaves, if the last checkpoint is to wait for that."""
        why = Decision("stop", "the job ends with a checkpoint, and first the batch in hand is finished")
        records = [s for s in self.members.workers.values() if self.rests and s.running and not s.stopping]
        return [self.concerns.processes.send_away(record, why) for record in records]

    def _stop_when_saved(self, at: float) -> Out:
        """Go towards the end of a job that was asked to stop with a last checkpoint, committed or given up."""
        if self.rests and any(s.running for s in self.members.workers.values()):
            return []
        suspending = bool(self.state.supervision.suspending)
        if not self.checkpoints.stopped:
            if suspending and self.checkpoints.writing is None and not self.concerns.training.can_be_saved():
                return self.suspended(at)  # (there is nothing new, or nobody who could write it)
            # (nothing while another one is written)
            return self.checkpoints.begin(
                self.job, at, CheckpointReason.STOP, False, self.concerns.training.saved_words()
            )
        if suspending:
            return self.suspended(at)
        why = Decision("stop the job", self.checkpoints.stopping)
        return [Note("", why), self.job.finish(Phase.STOPPED, 0, "")]

    def _train_again(self, at: float) -> Out:
        """Shards came back after scripts had ended, as a ps was lost, or a worker that had not stepped with what was
        left: somebody must train them."""
        shards = self.shards
        left = ", ".join(shards.name(key) for key in sorted(shards.came_back)[:3])
        words = f"{len(shards.came_back)} shards came back after every script had ended ({left}, ...)"
        slot = min(slot for slot, record in self.members.workers.items() if record.finished)
        if self.checkpoints.reruns >= MAX_RERUNS:
            error = f"{words} and the script did not train them when it ran again; everstep resume goes on from here"
            return [self.fail(4, error)]
        if self.members.workers[slot].waiting:
            return []  # for a node with a place
        self.checkpoints.not_the_end()
        self.duty.undone()
        self.members.workers[slot].finished = False
        why = Decision("start", words, {"shards": len(shards.came_back)}, ("end the job: results would be wrong",))
        return self.concerns.processes.start(Role.WORKER, slot, at, why)

    def not_the_end(
        self,
        at: float,
        words: str = "its script had ended, and partitions went back to what is older than its result",
        what: str = "partitions were lost while scripts ended",
    ) -> Out:
        """Handle that partitions of a group's tables go back to what is older than the state that its scripts end with.
        Whose script had ended runs it again, once the others have ended too: from them it would copy what does not
        count."""
        out: Out = []
        ended = [record for record in self.members.workers.values() if record.finished]
        for record in ended:
            record.finished, record.waiting = False, True
            self.duty.undone()
            out.append(Note(str(record.member.key), Decision("not the end", words)))
        if ended:
            if self.checkpoints.reruns >= MAX_RERUNS:
                error = f"the result is lost: {what}, {MAX_RERUNS + 1} times; everstep resume goes on from here"
                return [*out, self.fail(RESULT_LOST, error)]
            self.checkpoints.not_the_end()
            for slot, record in self.members.workers.items():
                if slot < self.job.workers_wanted and not (record.running or record.drained):
                    record.waiting = True  # (lost at the end, and not started again: nothing was left to do)
        if not self.state.protection.gone:
            out += self.concerns.processes.fill(at)
        return out

    def finish_if_all_left(self, at: float) -> Out:
        """The job is done when every script ran to its end and nobody is left who could still train."""
        records = self.members.workers.values()
        training = self.concerns.training
        if self.checkpoints.stopping and not self.job.over and (training.can_save() or self.checkpoints.stopped):
            return self._stop_when_saved(at)
        if self.job.over or not any(s.finished for s in records) or any(s.running for s in records):
            return []
        if not any(dataset.epochs_known for dataset in self.shards.datasets):
            error = "the script ended without taking a batch from job.steps(...): nothing was trained"
            return [self.fail(1, error)]
        if self.shards.came_back:
            return self._train_again(at)
        self.duty.settle(self.members)
        if not self.duty.done:
            return self.concerns.chief.run_again(at)
        if training.lost_the_end():
            what = "every state was lost before what the job ends with was written"
            return self.not_the_end(at, f"its script had ended, and {what}", what)
        if (last := self.checkpoints.finish(self.job, at, training.can_save())) is not None:
            return last
        why = Decision("finish the job", "every worker's script ran to its end", {"samples": self.shards.samples_done})
        return [Note("", why), self.job.finish(Phase.DONE, 0, "")]
