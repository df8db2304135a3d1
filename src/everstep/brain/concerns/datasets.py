"""Datasets: workers register them, and epochs of them are finished."""

from __future__ import annotations

from everstep.brain.concerns.concern import Concern, Handlers, Inputs, Out
from everstep.brain.events import Event, Note, PlanRegistered, Refused, Registered, Reply
from everstep.brain.shards import Dataset, Epoch
from everstep.ids import ShardKey
from everstep.model.decision import Decision
from everstep.model.member import Role
from everstep.model.shard import split_key


class DatasetConcern(Concern):
    """Decides which data the job trains on: the same for all workers."""

    __slots__ = ()

    def handlers(self) -> Handlers:
        return {
            PlanRegistered: self._plan_registered,
        }

    def validate(self) -> None:
        self.shards.validate()

    def _plan_registered(self, e: PlanRegistered, event: Event) -> Out:
        record = self.members.current(Role.WORKER, event.slot, event.incarnation)
        if record is None:
            return [self.fence_worker(event.slot, event.incarnation)]
        plan, shards = e.plan, self.shards
        known = shards.find(plan.name)
        if known is not None:
            for field in ("samples", "shard_samples", "seed", "fingerprint"):
                ours, its = getattr(known.plan, field), getattr(plan, field)
                if ours != its:
                    where = "checkpoint that it goes on from" if known.number < self.checkpoints.datasets else "job"
                    error = (
                        f"dataset '{plan.name}': {field} is {its!r} in worker:{event.slot}, but {ours!r} in the {where}"
                    )
                    way = "every worker must read the same data, and other data need another name: job.loader(name=)"
                    return [Reply(Refused(f"{error}; {way}"))]
            self.concerns.training.loop_begins(record, known, e)
            return [Reply(Registered(known.number))]
        if plan.samples <= 0 or plan.shard_samples <= 0:
            return [
                Reply(Refused(f"dataset '{plan.name}' has {plan.samples} samples in shards of {plan.shard_samples}"))
            ]
        if plan.shards >= 1 << 32 or len(shards.datasets) >= (1 << 10) - 1:
            return [Reply(Refused(f"dataset '{plan.name}': {plan.shards} shards, or too many datasets (1023 a job)"))]
        dataset = shards.register(plan)
        self.concerns.training.loop_begins(record, dataset, e)
        inputs: Inputs = {"samples": plan.samples, "shard_samples": plan.shard_samples}
        why = Decision("dataset registered", f"'{plan.name}': {plan.samples} samples in {plan.shards} shards", inputs)
        return [Reply(Registered(dataset.number)), Note(f"worker:{event.slot}", why)]

    def epoch_finished(self, key: ShardKey) -> Out:
        out = self.checkpoints.release_due(self.job, self.shards, finished=True)
        number, number_epoch, _ = split_key(key)
        dataset: Dataset = self.shards.datasets[number]
        epoch: Epoch = dataset.epochs[number_epoch]
        words = f"'{dataset.plan.name}' epoch {number_epoch}: all {epoch.shards} shards are done"
        if epoch.quarantined:
            aside = len(epoch.quarantined)
            words = f"'{dataset.plan.name}' epoch {number_epoch}: {epoch.done} shards done, {aside} set aside"
        inputs: Inputs = {"samples": epoch.samples_done, "shards": epoch.done}
        out.append(Note("", Decision("epoch finished", words, inputs)))
        return out
