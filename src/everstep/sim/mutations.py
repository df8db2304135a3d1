"""Plants protocol bugs one at a time. The simulator is worth what it catches: every one of these must be found.

Each mutation replaces a part by a subclass, or patches one function for the time of a run. What is *not* here was
tried and found harmless, because another rule makes up for it: a ragged interval pushed to all partitions (those ahead
answer "repeat"), batches that are not cut at watermarks (gap after gap, but the shard's end brings all together), a
fenced push taken for acknowledged ("done" is then refused), an end of data said while others still work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from everstep.brain.brain import Brain
from everstep.brain.concerns import leases as leases_module
from everstep.brain.concerns.leases import LeaseConcern
from everstep.brain.events import (
    Event,
    InstructionType,
    LeaseExpired,
    MemberHeard,
    Ok,
    ReleaseShards,
    Reply,
    ShardAsked,
    ShardDone,
)
from everstep.brain.members import Members, SlotRecord
from everstep.brain.shards import Dataset, Epoch, Shards
from everstep.brain.watch import HeartbeatWatch, WatchEvent
from everstep.errors import EverstepError
from everstep.ids import Incarnation, LeaseNo, ShardKey, Slot
from everstep.model.member import Role
from everstep.model.placement import Placement
from everstep.model.shard import Lease, Token, shard_key, split_key
from everstep.native.ledger import PushLedger, PushResult, SpanTuple
from everstep.net.messages import Pushed
from everstep.sim.cluster import Disk, SimMaster
from everstep.sim.kernel import Violation
from everstep.sim.simulation import Parts, simulate
from everstep.tables.worker_protocol import AskShard, WorkerAction, WorkerProtocol, _HeldLease, _State

# ---------------------------------------------------------------- the ledger of a ps


class NoFenceOnOpen(PushLedger):
    def open(self, shard: int, start: int, lease: int) -> tuple[list[int], list[int]] | None:
        fences = {b: k.shards[shard][1] for b, k in self.partitions.items() if shard in k.shards}
        answer = super().open(shard, start, lease)
        if answer is not None:
            for b, fence in fences.items():
                self.partitions[b].shards[shard][1] = fence
        return answer


class FenceOnePartition(PushLedger):
    def open(self, shard: int, start: int, lease: int) -> tuple[list[int], list[int]] | None:
        fences = {b: k.shards[shard][1] for b, k in list(self.partitions.items())[1:] if shard in k.shards}
        answer = super().open(shard, start, lease)
        if answer is not None:
            for b, fence in fences.items():
                self.partitions[b].shards[shard][1] = fence
        return answer


class PushIgnoresFence(PushLedger):
    def push(
        self,
        shard: int,
        lo: int,
        hi: int,
        lease: int,
        partitions: bytes = b"",
        skipped: bool = False,
        more: Sequence[SpanTuple] = (),
    ) -> PushResult:
        entries = [k.shards[shard] for k in self.partitions.values() if shard in k.shards]
        fences = [entry[1] for entry in entries]
        for entry in entries:
            entry[1] = min(entry[1], lease)
        result = super().push(shard, lo, hi, lease, partitions, skipped, more)
        for entry, fence in zip(entries, fences, strict=True):
            entry[1] = fence
        return result


class OpenIgnoresFence(PushLedger):
    def open(self, shard: int, start: int, lease: int) -> tuple[list[int], list[int]] | None:
        for entry in self.partitions.values():
            if shard in entry.shards:
                entry.shards[shard][1] = min(entry.shards[shard][1], lease)
        return super().open(shard, start, lease)


class OpenStartsOver(PushLedger):
    def open(self, shard: int, start: int, lease: int) -> tuple[list[int], list[int]] | None:
        for entry in self.partitions.values():
            if shard in entry.shards and entry.shards[shard][1] < lease:
                entry.shards[shard][0] = start
        return super().open(shard, start, lease)


class GapMovesWatermark(PushLedger):
    def push(
        self,
        shard: int,
        lo: int,
        hi: int,
        lease: int,
        partitions: bytes = b"",
        skipped: bool = False,
        more: Sequence[SpanTuple] = (),
    ) -> PushResult:
        result = super().push(shard, lo, hi, lease, partitions, skipped, more)
        if result.gap >= 0:
            for entry in self.partitions.values():
                if shard in entry.shards and entry.shards[shard][0] < lo:
                    entry.shards[shard][0] = hi
        return result


class GapAcknowledged(PushLedger):
    def push(
        self,
        shard: int,
        lo: int,
        hi: int,
        lease: int,
        partitions: bytes = b"",
        skipped: bool = False,
        more: Sequence[SpanTuple] = (),
    ) -> PushResult:
        return super().push(shard, lo, hi, lease, partitions, skipped, more)._replace(gap=-1)


class RepeatApplied(PushLedger):
    def push(
        self,
        shard: int,
        lo: int,
        hi: int,
        lease: int,
        partitions: bytes = b"",
        skipped: bool = False,
        more: Sequence[SpanTuple] = (),
    ) -> PushResult:
        for b in self.check_push(shard, lo, hi, lease, partitions):
            mark = self.partitions[b].shards.get(shard)
            if mark is not None and mark[0] == hi and mark[1] <= lease:
                mark[0] = lo
        return super().push(shard, lo, hi, lease, partitions, skipped, more)


class OverlapApplied(PushLedger):
    def push(
        self,
        shard: int,
        lo: int,
        hi: int,
        lease: int,
        partitions: bytes = b"",
        skipped: bool = False,
        more: Sequence[SpanTuple] = (),
    ) -> PushResult:
        for b in self.check_push(shard, lo, hi, lease, partitions):
            mark = self.partitions[b].shards.get(shard)
            if mark is not None and lo < mark[0] < hi and mark[1] <= lease:
                mark[0] = lo
        return super().push(shard, lo, hi, lease, partitions, skipped, more)


class ForgetsReleased(PushLedger):
    def release(self, shards: Sequence[int]) -> None:
        super().release(shards)
        self.released.clear()


# ---------------------------------------------------------------- the brain


_shard_asked, _shard_done = LeaseConcern._shard_asked, LeaseConcern._shard_done
_lease_expired, _drop_leases = LeaseConcern._lease_expired, LeaseConcern.drop_leases
_confirm = LeaseConcern.confirm


def _done_of_dead_ps(self: LeaseConcern, e: ShardDone, event: Event) -> list[InstructionType]:
    placement = self.state.placement
    if placement is not None:
        now = tuple((p.slot, p.incarnation) for p in placement.servers)
        e = ShardDone(e.shard, e.lease, now, e.skipped)  # nor by which map
    return _shard_done(self, e, event)


def _lose(self: LeaseConcern, key: ShardKey, really: bool) -> None:
    epoch = self.shards.epoch_of(key)
    if really and epoch is not None:
        epoch.returned.remove(split_key(key)[2])


def _expired_to_no_place(self: LeaseConcern, e: LeaseExpired, event: Event) -> list[InstructionType]:
    out = _lease_expired(self, e, event)
    _lose(self, e.shard, bool(out))
    return out


def _dropped_to_no_place(self: LeaseConcern, record: SlotRecord, reason: str) -> list[InstructionType]:
    held = list(record.held)
    out = _drop_leases(self, record, reason)
    for key in held:
        _lose(self, key, True)
    return out


def _grants_twice(self: LeaseConcern, e: ShardAsked, event: Event) -> list[InstructionType]:
    record = self.members.workers.get(event.slot)
    if record is not None and record.member.incarnation == event.incarnation and e.dataset in record.granted:
        record.granted[e.dataset].pop(e.ask, None)
    return _shard_asked(self, e, event)


def _releases_too_much(self: LeaseConcern, e: ShardDone, event: Event) -> list[InstructionType]:
    out = _shard_done(self, e, event)
    if out and type(out[0]) is Reply and type(out[0].answer) is Ok:
        dataset, epoch, index = split_key(e.shard)
        out.append(ReleaseShards(tuple(shard_key(dataset, epoch, i) for i in range(index + 1))))
    return out


def _releases_at_return(self: LeaseConcern, record: SlotRecord, reason: str) -> list[InstructionType]:
    held = tuple(record.held)
    out = _drop_leases(self, record, reason)
    return [*out, ReleaseShards(held)] if held else out


def _adopts_fenced_lease(self: LeaseConcern, record: SlotRecord, lease: Lease) -> bool:
    held = self.shards.leases.get(lease.shard)
    if held is None or held.no <= lease.no:
        return _confirm(self, record, lease)
    self._release_hold(self.members.workers[held.worker], held, answered=False)
    self.shards.take_back(lease.shard, 0)
    self.shards.adopt(lease, record.member.slot, record.member.incarnation)
    record.held.append(lease.shard)
    return True


# ---------------------------------------------------------------- the worker's protocol


class NoReconcile(WorkerProtocol):
    def _reconcile(self, held: _HeldLease) -> None:
        super()._reconcile(held)
        held.ragged = []


class RaggedToOnePs(WorkerProtocol):
    def _reconcile(self, held: _HeldLease) -> None:
        super()._reconcile(held)
        held.ragged = [(lo, hi, dict(list(who.items())[:1])) for lo, hi, who in held.ragged]


class DoneBeforeLastAck(WorkerProtocol):
    def computed(self, work: Any, skipped: bool = False) -> list[WorkerAction]:
        out = super().computed(work, skipped)
        held = self._held.get(work.lease.no)
        if held is not None and held.position >= held.lease.stop and not held.ragged and not held.handed:
            held.state = _State.REPORTED
            out.append(self._done(held))
        return out


class WorksBeforeAllOpened(WorkerProtocol):
    def opened(
        self, ps: Slot, lease: LeaseNo, incarnation: Incarnation, partitions: Sequence[int], watermarks: Sequence[int]
    ) -> list[WorkerAction]:
        servers, self._servers = self._servers, {ps: self._servers.get(ps, Incarnation(0))}
        try:
            return super().opened(ps, lease, incarnation, partitions, watermarks)
        finally:
            self._servers = servers


class GapTakenForAck(WorkerProtocol):
    def pushed(self, ps: Slot, token: Token, answer: Pushed, life: int = -1) -> list[WorkerAction]:
        if answer.gap >= 0:
            answer = Pushed(answer.applied, answer.repeats)
        return super().pushed(ps, token, answer, life)


class NeverPushesAgain(WorkerProtocol):
    def lost(self, ps: Slot) -> list[WorkerAction]:
        return []


class NeverAsksAgain(WorkerProtocol):
    def master_lost(self) -> list[WorkerAction]:
        return [a for a in super().master_lost() if not isinstance(a, AskShard)]


class OldLifeCounts(WorkerProtocol):
    def placement(self, placement: Placement) -> list[WorkerAction]:
        if self._servers:
            self._servers = {s.slot: s.incarnation for s in placement.servers}
            return []
        return super().placement(placement)

    def _done(self, held: _HeldLease) -> Any:
        held.opened = {ps: (self._servers[ps], b, w) for ps, (_, b, w) in held.opened.items()}
        return super()._done(held)


# ---------------------------------------------------------------- the watch


class NeverLost(HeartbeatWatch):
    def tick(self, at: float) -> list[WatchEvent]:
        return [e for e in super().tick(at) if isinstance(e, LeaseExpired | MemberHeard)]


class NoGrace(HeartbeatWatch):
    def look(self, brain: Brain, at: float) -> None:
        super().look(brain, at - 10.0 if self._ticked is None else at)

    def _forgive(self, at: float, lost_s: float | None = None) -> None:
        pass


# ---------------------------------------------------------------- all of them


class StepInPart(PushLedger):
    """Takes what fits of a step of several shards that does not fit as a whole."""

    def push(
        self,
        shard: int,
        lo: int,
        hi: int,
        lease: int,
        partitions: bytes = b"",
        skipped: bool = False,
        more: Sequence[SpanTuple] = (),
    ) -> PushResult:
        result = super().push(shard, lo, hi, lease, partitions, skipped, more)
        if result.gap >= 0:
            for of, first, last, no, _ in more:
                super().push(of, first, last, no, partitions, skipped=True)
        return result


class PendingIsDone(WorkerProtocol):
    """ "done" is said of a shard whose rest is held back."""

    def _report(self, held: _HeldLease, out: list[WorkerAction]) -> None:
        handed = held.handed
        if all(batch.held_back for batch in handed):
            held.handed = []
        super()._report(held, out)
        held.handed = handed


class PendingClaimsTooMuch(WorkerProtocol):
    """What is handed out, and still to be computed, is said to be held back."""

    def _ask(self) -> AskShard:
        pending = tuple(no for no, h in self._held.items() if h.state is _State.ACTIVE and not h.left() and not h.sent)
        return AskShard(self._dataset, self._until, self._asked, pending)


def _pending_of_all(self: LeaseConcern, e: ShardAsked, event: Event) -> list[InstructionType]:
    """Take a worker that names one lease as pending to mean all that it was granted."""
    record = self.members.current(Role.WORKER, event.slot, event.incarnation)
    if record is not None and e.pending:
        e = msgspec.structs.replace(e, pending=tuple(self.shards.leases[key].no for key in record.held))
    return _shard_asked(self, e, event)


def _forgets_what_was_announced(self: Shards, dataset: Dataset, until_epoch: int) -> None:
    """Forget who was told that the data is at its end is not needed any more, whatever becomes of what was pending."""


class Mutation(NamedTuple):
    """``catches``: a seed known to catch it, found by ``python -m everstep.sim --mutations``."""

    name: str
    what: str
    parts: Parts
    patches: tuple[tuple[Any, str, Any], ...] = ()


def _forget_incarnation(_: Members, role: Role, slot: Slot, incarnation: Incarnation) -> SlotRecord | None:
    return _.of(role).get(slot)


def _one_number_line(master_incarnation: int, counter: int) -> LeaseNo:
    return LeaseNo(1 << 40 | counter)


def _early_epoch(self: Epoch) -> bool:
    return self.done + self.doing + len(self.quarantined) == self.shards


def _keep_snapshots(self: Disk) -> None:
    del self.log[self.durable :]


def _never_outdated(self: SimMaster) -> bool:
    return False


def _never_validate(self: Brain) -> None:
    """Blind: the simulator must find it by itself."""


_BLIND = (Brain, "validate", _never_validate)

MUTATIONS: tuple[Mutation, ...] = (
    Mutation("no-fence-on-open", "opening does not fence older leases", Parts(ledger=NoFenceOnOpen)),
    Mutation("fence-one-partition", "opening fences only the first partition of a ps", Parts(ledger=FenceOnePartition)),
    Mutation("push-ignores-fence", "a fenced push is applied", Parts(ledger=PushIgnoresFence)),
    Mutation("open-ignores-fence", "an older lease may open after a later one", Parts(ledger=OpenIgnoresFence)),
    Mutation("open-starts-over", "opening resets the watermarks", Parts(ledger=OpenStartsOver)),
    Mutation("gap-moves-watermark", "a push behind a gap moves the watermark", Parts(ledger=GapMovesWatermark)),
    Mutation("ack-before-apply", "a push that was not applied is acknowledged", Parts(ledger=GapAcknowledged)),
    Mutation("repeat-applied", "a push sent again is applied again", Parts(ledger=RepeatApplied)),
    Mutation("overlap-applied", "a push that overlaps the watermark is applied whole", Parts(ledger=OverlapApplied)),
    Mutation("forgets-released", "a released shard may be opened again", Parts(ledger=ForgetsReleased)),
    Mutation(
        "done-of-dead-ps",
        "acknowledgements of a dead ps count",
        Parts(),
        ((LeaseConcern, "_shard_done", _done_of_dead_ps),),
    ),
    Mutation(
        "returned-to-no-place",
        "a returned shard is not to do again",
        Parts(),
        (
            (LeaseConcern, "_lease_expired", _expired_to_no_place),
            (LeaseConcern, "drop_leases", _dropped_to_no_place),
            _BLIND,
        ),
    ),
    Mutation(
        "duplicate-grant", "one ask is granted two shards", Parts(), ((LeaseConcern, "_shard_asked", _grants_twice),)
    ),
    Mutation(
        "releases-too-much",
        "shards are released with a later one that is done",
        Parts(),
        ((LeaseConcern, "_shard_done", _releases_too_much),),
    ),
    Mutation(
        "releases-at-return",
        "shards are released when their worker is lost",
        Parts(),
        ((LeaseConcern, "drop_leases", _releases_at_return),),
    ),
    Mutation(
        "zombies-welcome",
        "what an older incarnation says counts",
        Parts(),
        ((Members, "current", _forget_incarnation), _BLIND),
    ),
    Mutation(
        "lease-numbers-reused",
        "lease numbers start over with each master",
        Parts(),
        ((leases_module, "lease_no", _one_number_line), _BLIND),
    ),
    Mutation(
        "early-epoch",
        "an epoch begins while shards of the last one are worked on",
        Parts(),
        ((Epoch, "finished", property(_early_epoch)), _BLIND),
    ),
    Mutation(
        "adopts-fenced-lease",
        "a lease that was taken back is adopted again",
        Parts(),
        ((LeaseConcern, "confirm", _adopts_fenced_lease),),
    ),
    Mutation("early-replies", "the master answers before the event is durable", Parts(early_replies=True)),
    Mutation("snapshot-ahead", "a snapshot of unsynced events is used", Parts(), ((Disk, "crash", _keep_snapshots),)),
    Mutation(
        "two-masters",
        "the journal takes an older master's events",
        Parts(),
        ((SimMaster, "outdated", _never_outdated),),
    ),
    Mutation("no-reconcile", "a new owner goes on from the highest watermark", Parts(protocol=NoReconcile)),
    Mutation("ragged-to-one-ps", "a ragged interval goes to one ps only", Parts(protocol=RaggedToOnePs)),
    Mutation("done-before-last-ack", "done is said with the last push", Parts(protocol=DoneBeforeLastAck)),
    Mutation("works-before-opened", "work begins at the first ps that opened", Parts(protocol=WorksBeforeAllOpened)),
    Mutation("gap-taken-for-ack", "the answer gap counts as acknowledged", Parts(protocol=GapTakenForAck)),
    Mutation("never-pushes-again", "a lost push is not sent again", Parts(protocol=NeverPushesAgain)),
    Mutation("never-asks-again", "a lost ask is not sent again", Parts(protocol=NeverAsksAgain)),
    Mutation("old-life-counts", "a ps in a new life is not opened again", Parts(protocol=OldLifeCounts)),
    Mutation("step-in-part", "a partition takes some of a step of several shards", Parts(ledger=StepInPart)),
    Mutation("pending-is-done", "done is said of what is held back", Parts(protocol=PendingIsDone)),
    Mutation("pending-too-early", "what is not computed is said to be pending", Parts(protocol=PendingClaimsTooMuch)),
    Mutation(
        "pending-of-all",
        "leases that a worker never heard of count as pending",
        Parts(),
        ((LeaseConcern, "_shard_asked", _pending_of_all),),
    ),
    Mutation(
        "end-was-told",
        "pending shards that are lost after the end was told are nobody's",
        Parts(),
        ((Shards, "tell_end", _forgets_what_was_announced),),
    ),
    Mutation("never-lost", "silence is never told", Parts(watch=NeverLost)),
    Mutation("no-grace", "a new master takes the silence before it for theirs", Parts(watch=NoGrace)),
)


@contextmanager
def planted(mutation: Mutation) -> Iterator[Parts]:
    """The mutation's patches are in force inside the with-block (this process only)."""
    saved: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in mutation.patches:
            saved.append((owner, name, owner.__dict__[name]))
            setattr(owner, name, value)
        yield mutation.parts
    finally:
        for owner, name, value in reversed(saved):
            setattr(owner, name, value)


def catch(mutation: Mutation, seeds: range, run: Callable[..., object] = simulate) -> tuple[int, str] | None:
    """Return the first seed whose run finds the bug, and how; None if none does."""
    with planted(mutation) as parts:
        for seed in seeds:
            try:
                run(seed, parts=parts)
            except (Violation, AssertionError, KeyError, ValueError, IndexError, EverstepError) as error:
                return seed, f"{type(error).__name__}: {error}"
    return None
