"""Plants bugs of ps that keep mirrors on purpose, to see that the simulator finds them in its storms.

Each is what somebody could really get wrong: in the machine, in the store, in the shell, or in the brain. Not in the
list, because nothing is lost by them: a mirror that is made again without need, contents sent to who did not ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everstep.brain.concerns.leases import LeaseConcern
from everstep.brain.events import InstructionType
from everstep.brain.members import SlotRecord
from everstep.brain.shards import Dataset, Epoch, Shards
from everstep.ids import PartitionId, ShardKey
from everstep.model.placement import Mirror, Placement
from everstep.net.messages import Append, Appended, DataAnswer, FetchLog, LogFetched, Moved, Pushed, StreamEntry
from everstep.policies.placement_builder import PlacementBuilder
from everstep.protect.machine import Ask, Machine
from everstep.protect.replication import AppendCode, Blob, PeerKey, StreamKind
from everstep.sim.mutations import Mutation
from everstep.sim.scenario import storm_scenario
from everstep.sim.sim_server import MirrorPs, Opening, _Waiting
from everstep.sim.sim_store import Page, Partition, SimStore, _SimMember, plus, times
from everstep.sim.sim_store import SimBlob as SimBlob
from everstep.sim.simulation import Parts, SimOutcome, Simulation, simulate


def storm(seed: int, parts: Parts = Parts()) -> SimOutcome:
    """Return the run of ``seed`` in the mix with losses of ps."""
    return simulate(seed, storm_scenario(seed), parts)


# ---------------------------------------------------------------- the store


class DifferenceTwice(SimStore):
    """Applies again what is said again."""

    def mirror_apply(self, mirror: int, blob: SimBlob) -> int:
        who = self.mirrors[mirror].members.get(blob.partition)
        if who is not None and blob.kind is StreamKind.CHANGE and who.complete and blob.seq <= who.seq:
            m = self.mirrors[mirror]
            m.page = plus(m.page, times(blob.bits, who.weight))
            return AppendCode.APPLIED
        return super().mirror_apply(mirror, blob)


class HearsTwice(Machine):
    """It forgets how far it has come in a peer's stream."""

    def append(self, request: Append, blobs: Sequence[Blob]) -> Appended | Moved:
        sender = (request.sender, request.incarnation)
        stream, number = self._received.get(sender, (0, 0))
        if stream == request.stream and all(e.kind == StreamKind.CHANGE for e in request.entries):
            self._received[sender] = (stream, min(number, request.first))
        answer = super().append(request, blobs)
        stream, now = self._received.get(sender, (0, 0))
        self._received[sender] = (stream, max(number, now))
        return answer


class ChangesLostInSync(SimStore):
    """Drops a difference of what is swept already until the sweep has ended."""

    def mirror_apply(self, mirror: int, blob: SimBlob) -> int:
        who = self.mirrors[mirror].members.get(blob.partition)
        if who is not None and blob.kind is StreamKind.CHANGE and not who.complete:
            blob = blob._replace(bits=(0, 0))
        return super().mirror_apply(mirror, blob)


class ChangesTakenBeforeSync(SimStore):
    """A difference of what is still to be swept is applied, and comes with the contents once more."""

    def mirror_apply(self, mirror: int, blob: SimBlob) -> int:
        m = self.mirrors[mirror]
        who = m.members.get(blob.partition)
        if who is not None and blob.kind is StreamKind.CHANGE and not who.complete and blob.seq == who.seq + 1:
            m.page = plus(m.page, times((blob.bits[0] & ~who.covered, 0), who.weight))
        return super().mirror_apply(mirror, blob)


class FoldMissesChanges(SimStore):
    def mirror_apply(self, mirror: int, blob: SimBlob) -> int:
        m = self.mirrors[mirror]
        rest = m.rest
        code = super().mirror_apply(mirror, blob)
        m.rest = rest
        return code


class FencesForgotten(SimStore):
    """Takes watermarks, but no fences, from marks that come with a mirror."""

    def _rebuilt(self, who: _SimMember, page: Page) -> Partition:
        partition = super()._rebuilt(who, page)
        for mark in partition.ledger.shards.values():
            mark[1] = 0
        return partition


class MarksForgotten(SimStore):
    """Takes bytes from differences; the marks stay as the contents brought them."""

    def mirror_apply(self, mirror: int, blob: SimBlob) -> int:
        if blob.kind is StreamKind.CHANGE:
            blob = blob._replace(marks=None)
        return super().mirror_apply(mirror, blob)


class SecondRowUnweighted(SimStore):
    """Row 1 is the plain XOR again."""

    def mirror_make(self, mirror: int, members: Sequence[PartitionId], row: int) -> None:
        super().mirror_make(mirror, members, 0)


# ---------------------------------------------------------------- the machine


class NoLevelling(Machine):
    def _others(self, partition: PartitionId) -> list[tuple[int, PeerKey]]:
        return []


class FetchedLogDoesNotFence(Machine):
    def fetch_log(self, request: FetchLog) -> tuple[LogFetched | Moved, list[Blob]]:
        sources = dict(self._sources)
        answer = super().fetch_log(request)
        self._sources = sources
        return answer


class LogGoesAtOnce(Machine):
    def append(self, request: Append, blobs: Sequence[Blob]) -> Appended | Moved:
        answer = super().append(request, blobs)
        self._retained.clear()
        return answer


class CompleteTooEarly(Machine):
    """Counts a mirror as complete with the first member's contents."""

    def _take_contents(self, entry: StreamEntry, mirror: int, blob: Blob) -> AppendCode:
        code = super()._take_contents(entry, mirror, blob)
        held = self._mirrors.get(mirror)
        if held is not None and entry.kind == StreamKind.MARKS and not held.complete:
            held.complete = self.dirty = True
        return code


class NewMirrorAhead(Machine):
    """A new mirror is complete although an older one may lack what came before it."""

    def _sync_partition(self, partition: PartitionId) -> bool:
        for sync in self._syncs[partition]:
            sync.ticket = 0
        return super()._sync_partition(partition)


class WantsNothing(Machine):
    """Does not say again a wish that was not answered."""

    def asks(self) -> list[Ask]:
        out = super().asks()
        for ask in out:
            self.answered(ask, Moved(0))
        sent: set[tuple[Any, ...]] = self.__dict__.setdefault("_said", set())
        new = [a for a in out if (a.peer, repr(a.request)) not in sent]
        sent.update((a.peer, repr(a.request)) for a in new)
        return new


class SecondRowFirst(Machine):
    """Of two lost members the first is rebuilt as if it alone were lost."""

    def answered(self, ask: Ask, answer: DataAnswer, blobs: Sequence[Blob] = ()) -> None:
        super().answered(ask, answer, blobs)
        for held in self._mirrors.values():
            if held.recovery is not None and held.recovery.other is not None:
                held.recovery.other_done = True


class KeepsOldRoutes(Machine):
    """A new mirror of a partition gets its contents, and no differences."""

    def _route(self) -> None:
        before = dict(self.streams.routes)
        super()._route()
        for partition, peers in before.items():
            if peers and partition in self.streams.routes:
                self.streams.routes[partition] = tuple(p for p in peers if p in self.streams.routes[partition])

    def _keep_mirrors(self, placement: Placement) -> None:
        super()._keep_mirrors(placement)


# ---------------------------------------------------------------- the shell


class AckedAtOnce(MirrorPs):
    def confirmed(self, push: _Waiting) -> bool | None:
        return True


class RepeatAckedAtOnce(MirrorPs):
    """Does not wait for mirrors of a push that was applied before."""

    def confirmed(self, push: _Waiting) -> bool | None:
        return True if isinstance(push.answer, Pushed) and not push.answer.applied else super().confirmed(push)


class OpenedAtOnce(MirrorPs):
    """Watermarks are told before the mirrors have what is before them."""

    def confirmed(self, push: _Waiting) -> bool | None:
        return True if isinstance(push.answer, Opening) else super().confirmed(push)


class RefusalIgnored(MirrorPs):
    """Acknowledges although a mirror's ps refuses its differences."""

    def confirmed(self, push: _Waiting) -> bool | None:
        return None if (self.streams.done_ticket < push.after or self.streams.levelling) and self.acked else True


class ServesWhatIsFenced(MirrorPs):
    """Answers whoever asks, whatever the map says."""

    def on_push(
        self, worker: Any, token: Any, bitmap: bytes, skipped: bool, life: int, route: int, more: Any = ()
    ) -> None:
        for partition in self.store.fenced:
            self.store.ledger.partitions[partition] = self.store.partitions[partition].ledger
        super().on_push(worker, token, bitmap, skipped, life, self.route, more)


# ---------------------------------------------------------------- the brain


def _ready_or_not(self: PlacementBuilder, partition: PartitionId) -> list[Mirror]:
    return [m for m in self.mirrors if m.members == (partition,) and m.at in self.living]


def _reopens_nothing(self: Shards, keys: Sequence[ShardKey]) -> int:
    return 0


def _oldest_snapshot(self: Simulation, checkpoint: int, partition: PartitionId) -> Partition:
    return self.files[self.manifests[min(self.manifests)].snapshots[partition].files[0].path]


def _no_loop(self: Dataset, epoch: int) -> int:
    return 0


def _nobody_goes_back(
    self: LeaseConcern, loop: int, asker: SlotRecord, dataset: Dataset, epoch: Epoch
) -> list[InstructionType]:
    return []


PS_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "difference-twice",
        "a difference that is sent again is applied again",
        Parts(store=DifferenceTwice, machine=HearsTwice),
    ),
    Mutation("changes-lost-in-sweep", "differences of swept rows are dropped", Parts(store=ChangesLostInSync)),
    Mutation("changes-before-sweep", "differences of unswept rows are applied", Parts(store=ChangesTakenBeforeSync)),
    Mutation("fold-misses-changes", "what changes while it is folded is not folded", Parts(store=FoldMissesChanges)),
    Mutation("fences-forgotten", "mirrors know no fences", Parts(store=FencesForgotten)),
    Mutation("marks-forgotten", "differences do not bring marks", Parts(store=MarksForgotten)),
    Mutation("rows-alike", "the second row of parity is like the first", Parts(store=SecondRowUnweighted)),
    Mutation("no-levelling", "a new owner does not ask the other mirrors", Parts(machine=NoLevelling)),
    Mutation(
        "tail-does-not-fence", "an owner that was replaced still reaches mirrors", Parts(machine=FetchedLogDoesNotFence)
    ),
    Mutation("tails-go-at-once", "no mirror keeps differences for the others", Parts(machine=LogGoesAtOnce)),
    Mutation("complete-too-early", "a mirror is complete with its first member", Parts(machine=CompleteTooEarly)),
    Mutation("wants-once", "what was asked of a ps is not asked again", Parts(machine=WantsNothing)),
    Mutation("one-row-for-two", "two lost members are rebuilt without the other row", Parts(machine=SecondRowFirst)),
    Mutation("acked-at-once", "a push is acknowledged before its mirrors have it", Parts(ps=AckedAtOnce)),
    Mutation("repeat-acked-at-once", "a repeat is acknowledged without the mirrors", Parts(ps=RepeatAckedAtOnce)),
    Mutation("opened-at-once", "watermarks are told before the mirrors have them", Parts(ps=OpenedAtOnce)),
    Mutation("refusal-ignored", "a push whose difference was refused is acknowledged", Parts(ps=RefusalIgnored)),
    Mutation("serves-what-is-fenced", "a ps serves partitions that it gave away", Parts(ps=ServesWhatIsFenced)),
    Mutation(
        "unready-promoted",
        "the brain promotes mirrors that are being built",
        Parts(),
        ((PlacementBuilder, "copies", _ready_or_not),),
    ),
    Mutation(
        "any-loop-will-do",
        "what comes back is trained in whatever loop of the script a worker is in",
        Parts(),
        ((Dataset, "loop_of", _no_loop),),
    ),
    Mutation(
        "nobody-goes-back",
        "workers wait for somebody who trains what belongs to a loop that all have passed",
        Parts(),
        ((LeaseConcern, "_back_to", _nobody_goes_back),),
    ),
    Mutation(
        "reopens-nothing",
        "what a loss cost is not trained again",
        Parts(),
        ((Shards, "reopen_done", _reopens_nothing),),
    ),
    Mutation(
        "oldest-image",
        "an older image than the newest is loaded",
        Parts(),
        ((Simulation, "snapshot_of", _oldest_snapshot),),
    ),
)

PS_MISSED: tuple[Mutation, ...] = (
    Mutation("new-mirror-ahead", "a new mirror does not wait for the old ones", Parts(machine=NewMirrorAhead)),
    Mutation("no-differences-to-new", "a new mirror gets contents only", Parts(machine=KeepsOldRoutes)),
)
"""Bugs that 3,000 storms (the first) and 2,060 (the second) do not show any more, since a ps that cannot get or level a
partition says so and the master finds another way. They wait for a harsher storm."""
