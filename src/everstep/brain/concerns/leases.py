"""Leases: shards are handed out, done, given back and taken back."""

from __future__ import annotations

from everstep.brain.concerns.concern import END, OK, Concern, Handlers, Inputs, Out
from everstep.brain.concerns.ending import MAX_RERUNS
from everstep.brain.events import (
    Event,
    Granted,
    LeaseExpired,
    Note,
    Refused,
    Reply,
    RevokeLease,
    ShardAsked,
    ShardDone,
    ShardReturned,
    Wait,
)
from everstep.brain.members import SlotRecord
from everstep.brain.shards import Dataset, Epoch, HeldLease, lease_words
from everstep.brain.supervision import least_workers
from everstep.ids import LeaseNo, ShardKey, Slot
from everstep.model.decision import Decision
from everstep.model.member import Role
from everstep.model.shard import LEASE_COUNTER_BITS, Lease, lease_no, split_key
from everstep.policies.restarts import is_poison

_WORKER = Role.WORKER
DONE_REMEMBERED = 32  # leases that counted, by worker: a repeated report is answered Ok again
WAIT_MIN_S = 0.05
WAIT_WORKERS_PER_S = 2000.0  # waiting workers together ask about so often a second


class LeaseConcern(Concern):
    """Decides who works on which shard, in jobs whose workers take shards; ``brain.brain`` has the rules of
    exactly-once."""

    __slots__ = ()

    def handlers(self) -> Handlers:
        return {
            ShardAsked: self._shard_asked,
            ShardDone: self._shard_done,
            ShardReturned: self._shard_returned,
            LeaseExpired: self._lease_expired,
        }

    def confirm(self, record: SlotRecord, lease: Lease) -> bool:
        """Whether this lease, which the worker says it holds, is its own (from now on)."""
        held = self.shards.leases.get(lease.shard)
        member = record.member
        if held is not None:
            return held.no == lease.no and held.worker == member.slot and held.incarnation == member.incarnation
        if member.role is not Role.WORKER or self.job.over or not self.shards.can_adopt(lease):
            return False
        master, counter = lease.no >> LEASE_COUNTER_BITS, lease.no & ((1 << LEASE_COUNTER_BITS) - 1)
        if master > self.job.master_incarnation:
            return False
        if master == self.job.master_incarnation:
            self.job.leases = max(self.job.leases, counter)
        self.shards.adopt(lease, member.slot, member.incarnation)
        record.held.append(lease.shard)
        return True

    def drop_leases(self, record: SlotRecord, reason: str) -> Out:
        """Put every shard of this worker back to the head of TODO, oldest lease first. ``reason`` "": say nothing."""
        positions: dict[int, int] = {}
        returned: list[HeldLease] = []
        for key in record.held:
            number = split_key(key)[0]
            position = positions.get(number, 0)
            positions[number] = position + 1
            returned.append(self.shards.take_back(key, position))
        record.held = []
        record.granted = {}
        if not returned or not reason:
            return []
        if len(returned) == 1:
            return [self._returned_note(record, returned[0], reason)]
        names = ", ".join(self.shards.name(held.shard) for held in returned)
        inputs: Inputs = {
            "shards": len(returned),
            "leases": ", ".join(lease_words(held.no) for held in returned),
        }
        return [Note(str(record.member.key), Decision("shards returned", f"{names}: {reason}", inputs))]

    def _returned_note(self, record: SlotRecord, held: HeldLease, reason: str) -> Note:
        inputs: Inputs = {
            "shard": self.shards.name(held.shard),
            "lease": lease_words(held.no),
            "start": held.start,
            "stop": held.stop,
        }
        return Note(
            str(record.member.key), Decision("shard returned", f"{self.shards.name(held.shard)}: {reason}", inputs)
        )

    def _blame(self, key: ShardKey, position: int, member: object) -> Out:
        """A worker was lost while it worked on this shard: count, and set the shard aside at the limit."""
        shards, spec = self.shards, self.job.spec
        count = shards.blame(key, position)
        if not is_poison(count, spec.quarantine_after):
            return []
        number, _, index = split_key(key)
        start, stop = shards.datasets[number].plan.bounds(index)
        name = shards.name(key)
        words = (
            f"{name} (samples {start}..{stop - 1} of the epoch's order) cost {count} workers in a row, last {member}"
        )
        finished = shards.quarantine(key, words)
        why = Decision(
            "set the shard aside",
            words,
            {"shard": name, "start": start, "stop": stop, "workers_lost": count},
            ("hand it out again: the next worker would most likely be lost too",),
        )
        out: Out = [Note("", why)]
        if not spec.skip_quarantined:
            error = f"{words}; look at these rows, or allow to skip them with skip_quarantined: true"
            return [*out, self.fail(1, error)]
        return out + (self.concerns.datasets.epoch_finished(key) if finished else [])

    def _shard_asked(self, e: ShardAsked, event: Event) -> Out:
        by = event.sender
        record = self.members.current(_WORKER, by.slot, by.incarnation)
        if record is None:
            return [self.fence_worker(by.slot, by.incarnation)]
        shards = self.shards
        number = e.dataset
        if not 0 <= number < len(shards.datasets):
            return [Reply(Refused(f"dataset {number} is not registered"))]
        granted = record.granted.get(number)
        if granted is not None and (key := granted.get(e.ask)) is not None:
            return [Reply(Granted(shards.leases[key].lease))]
        newest = record.asked.get(number, -1)
        if e.ask < newest or record.answered.get(number) == e.ask:
            return [self._wait()]  # an old copy of a request whose answer has arrived: nobody listens
        record.asked[number] = e.ask
        dataset = shards.datasets[number]
        dataset.epochs_known = max(dataset.epochs_known, e.until_epoch)
        for key in record.held:  # not of those that the worker has not heard of
            if (held := shards.leases[key]).dataset == number:
                held.pending = held.no in e.pending
        if shards.over(dataset, e.until_epoch):
            shards.tell_end(dataset, e.until_epoch)
            return [END]
        if record.stopping or self.job.over or self._too_few():
            return [self._wait()]
        index = None
        for epoch in dataset.open_epochs(e.until_epoch):
            if 0 < (loop := dataset.loop_of(epoch.number)) < record.loop:
                index = shards.next_carried(dataset, epoch)
                if index is None and epoch.returned and (sent := self._back_to(loop, record, dataset, epoch)):
                    return [self._wait(), *sent]
            else:
                index = shards.next_index(epoch)
            if index is not None:
                break
        if index is None:
            begun = shards.begin_next(dataset, e.until_epoch)
            index = shards.next_index(begun) if begun is not None else None
            if begun is None or index is None:
                return [self._wait()]
            epoch = begun
        self.job.leases += 1
        no = lease_no(self.job.master_incarnation, self.job.leases)
        held = shards.grant(dataset, epoch, index, no, by.slot, by.incarnation, e.ask)
        record.held.append(held.shard)
        if granted is None:
            record.granted[number] = {e.ask: held.shard}
        else:
            granted[e.ask] = held.shard
        return [Reply(Granted(held.lease))]

    def _back_to(self, loop: int, asker: SlotRecord, dataset: Dataset, epoch: Epoch) -> Out:
        """Shards of this loop are to do again, and ``asker`` is in a later one. They belong to the loop that asked for
        them: unless some worker will come by there, this one begins its script anew. Where all workers make their steps
        together (sync), all do."""
        workers = self.members.workers.values()
        behind = [s for s in workers if s.running and not s.stopping and s.loop > loop]
        if any(s.running and s.loop <= loop for s in workers) or any(map(self._comes_again, workers)):
            return []
        words = (
            f"shards of '{dataset.plan.name}' e{epoch.number} came back, and every worker has passed loop {loop} of "
            "the script, which they belong to: it begins its script anew, to train them there"
        )
        if dataset.sent_back >= MAX_RERUNS:
            error = (
                f"{len(epoch.returned)} shards of '{dataset.plan.name}' e{epoch.number} came back, which belong to loop"
                f" {loop} of the script, and it did not train them when it ran again; everstep resume goes on from here"
            )
            return [self.fail(4, error)]
        dataset.sent_back += 1
        inputs: Inputs = {"loop": loop, "shards": len(epoch.returned)}
        why = Decision("stop", words, inputs, ("train them in a later loop: results would be others",))
        together = self.job.spec.consistency.startswith("sync")
        return [self.concerns.processes.send_away(record, why) for record in (behind if together else [asker])]

    def _comes_again(self, record: SlotRecord) -> bool:
        """Return, of a worker that is being ended, whether another process begins in its slot."""
        return (
            record.running and record.stopping and not record.drained and record.member.slot < self.job.workers_wanted
        )

    def _keep_in_its_loop(self, record: SlotRecord, key: ShardKey) -> None:
        """This worker had the shard. It may have taken samples of it into a later loop, for a step of that one."""
        number, epoch, _ = split_key(key)
        if 0 < self.shards.datasets[number].loop_of(epoch) < record.loop and not record.stopping:
            self.shards.carried.add(key)

    def _too_few(self) -> bool:
        """Return whether nobody trains until more workers are there."""
        return bool(self.state.supervision.lack) and least_workers(self.job, self.members) > 1

    def _wait(self) -> Reply:
        return Reply(Wait(max(WAIT_MIN_S, len(self.members.workers) / WAIT_WORKERS_PER_S)))

    def _held_by(self, record: SlotRecord, key: ShardKey, lease: int) -> HeldLease | None:
        held = self.shards.leases.get(key)
        if held is None or held.no != lease or held.worker != record.member.slot:
            return None
        return held

    def _release_hold(self, record: SlotRecord, held: HeldLease, answered: bool) -> None:
        """Take the lease out of the worker's record. ``answered``: by the worker itself, so it had the answer."""
        record.held.remove(held.shard)
        granted = record.granted.get(held.dataset)
        if granted is not None:
            granted.pop(held.ask, None)
        if answered and held.ask >= 0:
            record.answered[held.dataset] = max(held.ask, record.answered.get(held.dataset, -1))

    def _shard_done(self, e: ShardDone, event: Event) -> Out:
        by = event.sender
        record = self.members.current(_WORKER, by.slot, by.incarnation)
        if record is None:
            return [self.fence_worker(by.slot, by.incarnation)]
        held = self._held_by(record, e.shard, e.lease)
        if held is None:
            if e.lease in record.done:
                return [OK]
            return [Reply(Refused(f"lease {lease_words(e.lease)} of {self.shards.name(e.shard)} is not current"))]
        dead = self.concerns.placement.reader.unacknowledged(e.servers, e.route)
        if dead:
            self._release_hold(record, held, answered=True)
            self.shards.take_back(e.shard, 0)
            return [Reply(Refused(f"reopened: {dead}")), self._returned_note(record, held, dead)]
        self._release_hold(record, held, answered=True)
        record.done.append(held.no)
        if len(record.done) > DONE_REMEMBERED:
            del record.done[0]
        record.streak, record.failures = 0, 0
        skipped = sum(hi - lo for lo, hi in e.skipped)
        finished = self.shards.done(e.shard, skipped, event.at)
        out: Out = [OK]
        if skipped:
            ranges = ", ".join(f"{lo}..{hi - 1}" for lo, hi in e.skipped)
            words = f"{self.shards.name(e.shard)}: samples {ranges} gave gradients that are not finite"
            why = Decision("samples skipped", words, {"samples": skipped, "policy": self.job.spec.nonfinite})
            out.append(Note(str(record.member.key), why))
        if finished:
            out += self.concerns.datasets.epoch_finished(e.shard)
        else:
            out += self.checkpoints.release_due(self.job, self.shards, finished=False)
        return out

    def _shard_returned(self, e: ShardReturned, event: Event) -> Out:
        record = self.members.current(_WORKER, event.slot, event.incarnation)
        if record is None:
            return [self.fence_worker(event.slot, event.incarnation)]
        held = self._held_by(record, e.shard, e.lease)
        if held is None:
            return [OK]
        self._release_hold(record, held, answered=True)
        self.shards.take_back(e.shard, 0)
        self._keep_in_its_loop(record, e.shard)
        return [OK] if e.late else [OK, self._returned_note(record, held, e.reason or "given back")]

    def _lease_expired(self, e: LeaseExpired, event: Event) -> Out:
        held = self.shards.leases.get(e.shard)
        if held is None or held.no != e.lease or self.job.over:
            return []
        record = self.members.workers[held.worker]
        self._release_hold(record, held, answered=False)
        self.shards.take_back(e.shard, 0)
        self._keep_in_its_loop(record, e.shard)
        why = Decision(
            "revoke the lease",
            f"no progress on {self.shards.name(e.shard)} for {e.idle_s:.0f} s",
            {"idle_s": round(e.idle_s, 3), "lease_s": self.job.spec.lease_s, "lease": lease_words(held.no)},
            ("replace the worker: it still sends heartbeats",),
        )
        return [
            RevokeLease(record.member.key, held.no, why),
            self._returned_note(record, held, f"no progress for {e.idle_s:.0f} s"),
        ]

    def lost(self, record: SlotRecord, first: HeldLease | None, progress: tuple[tuple[LeaseNo, int], ...]) -> Out:
        """Take the leases of a lost worker back. ``first``: what it worked on, if that may be why."""
        out = self.drop_leases(record, f"{record.member.key} was lost")
        if first is not None:
            position = max((found for no, found in progress if no == first.no), default=first.start)
            if position > self.shards.kills_at.get(first.shard, first.start):
                record.streak = 1  # it got on; only those that get nowhere use up the restarts
            out += self._blame(first.shard, position, record.member.key)
        return out

    def validate(self) -> None:
        by_worker: dict[Slot, list[ShardKey]] = {}
        for held in self.shards.leases.values():
            by_worker.setdefault(held.worker, []).append(held.shard)
            record = self.members.workers.get(held.worker)
            assert record is not None, f"lease of worker:{held.worker}, who is nobody"
            assert record.member.incarnation == held.incarnation, f"lease {held.no} of a fenced process of {record!r}"
            assert record.running, f"lease {held.no} of {record!r}"
            assert held.no >> LEASE_COUNTER_BITS <= self.job.master_incarnation, f"lease {held.no} of a later master"
        for slot, record in self.members.workers.items():
            assert sorted(record.held) == sorted(by_worker.get(slot, [])), f"{record!r} and the leases disagree"
