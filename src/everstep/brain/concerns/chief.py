"""Appoints the chief: who evaluates and saves, and what the job does once."""

from __future__ import annotations

from everstep.brain.concerns.concern import Concern, Handlers, Out
from everstep.brain.concerns.ending import RESULT_LOST
from everstep.brain.duty import CHIEF, ONCE_KEYS
from everstep.brain.duty import MAX_RERUNS as MAX_CHIEF_RERUNS
from everstep.brain.events import ChiefAsked, Event, Note, OnceAsked, Refused, Reply, Yes
from everstep.ids import Slot
from everstep.model.decision import Decision
from everstep.model.member import Role


class ChiefConcern(Concern):
    """Answers who the chief is. See ``brain.duty``."""

    __slots__ = ()

    def handlers(self) -> Handlers:
        return {
            ChiefAsked: self._chief_asked,
            OnceAsked: self._once_asked,
        }

    def _chief_asked(self, e: ChiefAsked, event: Event) -> Out:
        record = self.members.current(Role.WORKER, event.slot, event.incarnation)
        if record is None:
            return [self.fence_worker(event.slot, event.incarnation)]
        if 0 < e.ask <= record.chief_asks:  # (its script went on by the answer of then)
            return [Reply(Yes(record.chief == CHIEF))]
        record.chief_asks = max(e.ask, record.chief_asks)
        before = self.duty.slot
        yes = self.duty.ask(
            self.members, record, self.concerns.training.with_the_end(), self.concerns.training.all_trained()
        )
        out: Out = [Reply(Yes(yes))]
        if before >= 0 and before != self.duty.slot:
            words = f"worker:{before} is lost, late or about to leave"
            out.append(Note(str(record.member.key), Decision("chief", words, {"instead_of": before})))
        return out

    def _once_asked(self, e: OnceAsked, event: Event) -> Out:
        record = self.members.current(Role.WORKER, event.slot, event.incarnation)
        if record is None:
            return [self.fence_worker(event.slot, event.incarnation)]
        if not e.done:
            if e.key not in self.duty.once and len(self.duty.once) >= ONCE_KEYS:
                return [Reply(Refused(f"job.once({e.key!r}): the job has {ONCE_KEYS} keys already"))]
            return [Reply(Yes(self.duty.claim(self.members, e.key, record)))]
        self.duty.did(e.key, record)
        return [Reply(Yes(True)), Note(str(record.member.key), Decision("done once", repr(e.key)))]

    def run_again(self, at: float) -> Out:
        duty, workers = self.duty, self.members.workers
        if duty.reruns >= MAX_CHIEF_RERUNS:
            error = (
                f"the result is lost: all data is trained, and in {duty.reruns + 1} runs no worker that job.chief "
                "named came to the end of the script; see logs/"
            )
            return [self.fail(RESULT_LOST, error)]
        free = [slot for slot in map(Slot, range(len(workers) + 1)) if slot not in workers or not workers[slot].running]
        slot = free[0]
        duty.reruns += 1
        duty.slot = slot
        if slot in workers:
            workers[slot].drained = workers[slot].finished = False
        why = Decision(
            "start",
            "scripts have ended, and none of them was told to be the chief: nobody may have saved the result",
            {"reruns": duty.reruns},
            ("end the job: there may be no result",),
        )
        return self.concerns.processes.start(Role.WORKER, slot, at, why)
