"""Makes the map of partitions: the first one, and each next one, after losses, moves, and ps that come and leave."""

from __future__ import annotations

import msgspec

from everstep.brain.concerns.partition_reader import PartitionPart, PartitionReader
from everstep.brain.events import InstructionType, Note, PublishPlacement
from everstep.brain.placement import Acks, places_of
from everstep.brain.protection import Inputs
from everstep.ids import Incarnation, PartitionId, ShardKey
from everstep.model.decision import Decision
from everstep.model.member import MemberState
from everstep.model.placement import Placement
from everstep.policies.domains import layout_words
from everstep.policies.moves import MoveSteps, advance, under_way
from everstep.policies.placement_builder import How, Pending, PlacementBuilder
from everstep.policies.recovery import Recovered, begin_again, recover
from everstep.policies.stripes import StripeLayout, arrange

MAPS_REMEMBERED = 16


class PartitionMaps(PartitionPart):
    """Makes the next placement out of what is known."""

    __slots__ = ("_ahead",)

    def __init__(self, reader: PartitionReader, ahead: bool) -> None:
        """``ahead``: workers have a state of their own, which must not be newer than the partitions."""
        super().__init__(reader)
        self._ahead = ahead

    def first(self) -> list[InstructionType]:
        """All ps have joined: place partitions and mirrors."""
        protection, code, partitions = self.protection, self.reader.code, self.job.spec.partitions
        places = places_of(self.reader.servers())
        slots = [p.slot for p in places]
        protection.sites = self.reader.sites(slots)
        layout = arrange(code, partitions, slots, limits=self.reader.limits())
        snapshots = self.checkpoints.first_snapshots(partitions)
        builder = PlacementBuilder(
            code=code,
            version=1,
            routing=1,
            living=set(slots),
            owner=list(layout.owner),
            mirrors=[],
            ready=set(),
            missing={b: Pending(1, How.LOAD) for b, _ in snapshots},
            snapshots=dict(snapshots) or {PartitionId(b): 0 for b in range(partitions)},
            next_id=1,
        )
        advance(builder, layout, first=True)
        if builder.missing:  # of a resumed job the mirrors follow when the partitions are loaded
            protection.missing = builder.missing
        protection.layout, protection.over = layout, tuple(slots)
        protection.mirrors = builder.next_id - 1
        placement = Placement(
            1, tuple(builder.owner), places, 1, tuple(builder.mirrors), tuple(sorted(builder.snapshots.items()))
        )
        protection.placement = placement
        self.checkpoints.covered = not code.m
        self._remember_map()
        words = f"all {len(slots)} ps have joined; partition b goes to ps b mod {len(slots)}"
        if code.m:
            stripes = code.stripes(partitions)
            words = f"all {len(slots)} ps have joined; {partitions} partitions in {stripes} stripes of {code}"
        return [PublishPlacement(placement, Decision("place partitions", words)), *self._say_cover()]

    def _say_cover(self) -> list[InstructionType]:
        """What the wanted layout covers, where other machines have ps, or nodes were waited for."""
        sites = self.protection.sites
        if self.job.spec.nodes == 1 and all(site.home for site in sites):
            return []
        inputs: Inputs = {f"ps:{site.slot}": site.machine for site in sites}
        return [Note("", Decision("spread", layout_words(self.reader.code, sites), inputs))]

    def settle(self, why: str = "", trusted: bool = False) -> list[InstructionType]:
        """Make the next placement out of what is known now; nothing if it would be the same.

        ``why``: what happened, for people. ``trusted``: a ps in a new life says nothing of what it holds; what the map
        says it has, it has, but not necessarily all that its old life acknowledged. If something is lost for good,
        nothing is changed and ``lost`` says what.
        """
        protection, placement = self.protection, self.protection.placement
        protection.lost = []
        if placement is None or self.job.over:
            return []
        joined = {(m.slot, m.incarnation) for m in self.reader.servers()}
        dead = {p.slot for p in placement.servers if (p.slot, p.incarnation) not in joined}
        if trusted and dead & {slot for slot, _ in joined}:
            self._cost()  # also where the map itself has to wait for somebody
        if any(self.reader.on_its_way_back(p) for p in placement.servers):
            return []
        builder = self.reader.builder()
        if trusted:
            dead -= builder.living
        reborn = dead & builder.living
        builder.living -= reborn  # what they had is gone; first everybody else is asked for it
        cut_off = any(p.how is How.HAND_OVER and p.source in dead for p in builder.missing.values())
        recovered = recover(builder, self.reader.snapshot_of)
        stuck, protection.stuck = protection.stuck, []
        protection.went_back |= bool(recovered.lost or recovered.behind)
        if recovered.lost:
            if not self.reader.may_begin_again():
                protection.lost = recovered.lost
                return []
            if self._workers_end(recovered.lost):
                self._recall(stuck)
                return []
            begin_again(builder, recovered)
        elif self._ahead and recovered.behind and self._workers_end(recovered.behind):
            self._recall(stuck)
            return []  # nobody has the gradients of what they lack: all go back to the newest checkpoint
        protection.gone, protection.ending = [], []
        builder.living |= reborn
        out = self._losses(recovered) if recovered.partitions or cut_off else []
        steps = MoveSteps()
        if builder.living:
            protection.layout = self._layout(builder, recovered, out)
            steps = advance(builder, protection.layout)
        self._publish(builder, recovered, steps, why, out)
        return out

    def _workers_end(self, lost: list[PartitionId]) -> bool:
        """Return whether workers must end before the partitions ``lost`` begin empty: all that were there when they
        were lost."""
        protection, workers = self.protection, self.members.workers
        if not set(lost) <= set(protection.gone):
            there = [s.member for s in workers.values() if s.running and s.member.state is not MemberState.STARTING]
            protection.gone = sorted(lost)
            protection.ending = sorted({*protection.ending, *((m.slot, m.incarnation) for m in there)})
        protection.ending = [
            (slot, incarnation)
            for slot, incarnation in protection.ending
            if (record := workers.get(slot)) is not None and record.running and record.member.incarnation == incarnation
        ]
        return bool(protection.ending)

    def _recall(self, stuck: list[PartitionId]) -> None:
        """Remember until the next map what ps have no way to get."""
        if self.job.rules.recalls:
            self.protection.stuck = stuck

    def _cost(self) -> None:
        """Note that a loss cost something: no acknowledgement by a map from before it counts, whoever gave it. (A
        partition may have been where it is now, and back, and lack what it had then.)"""
        assert self.protection.placement is not None
        self.protection.maps.clear()
        self.protection.counts_from = self.protection.placement.version + 1

    def _layout(self, builder: PlacementBuilder, recovered: Recovered, out: list[InstructionType]) -> StripeLayout:
        """The wanted layout: the one before, unless ps came, left or died, are elsewhere now, or partitions are."""
        protection = self.protection
        assert protection.layout is not None
        staying = builder.living - set(protection.leaving) - self.reader.early() or builder.living
        sites = self.reader.sites(staying)
        known = protection.sites or sites  # (an older journal has none)
        same = tuple(sorted(staying)) == protection.over and sites == known
        apart = {(s.machine, s.zone) for s in sites} != {(s.machine, s.zone) for s in known}
        protection.sites = sites
        if same and not recovered.partitions:
            return protection.layout
        before = self._kept(builder) if builder.awaits else protection.layout
        owner = list(before.owner)
        for partition in recovered.partitions:
            owner[partition] = builder.owner[partition]
        protection.over = tuple(sorted(staying))
        if apart:
            out += self._say_cover()
        old = StripeLayout(tuple(owner), before.sites)
        return arrange(builder.code, len(owner), protection.over, old, self.reader.limits())

    def _kept(self, builder: PlacementBuilder) -> StripeLayout:
        """Return where all is, or is on its way to: what the wanted layout had beside that was not begun."""
        layout = self.protection.layout
        assert layout is not None
        owner, sites = list(builder.owner), [list(row) for row in layout.sites]
        for mirror in under_way(builder):
            owner[mirror.members[0]] = mirror.at
        for (stripe, row), mirrors in builder.rows().items():
            if all(m.at != sites[stripe][row] for m in mirrors):
                sites[stripe][row] = min(mirrors, key=lambda m: (m.id not in builder.ready, m.id)).at
        return StripeLayout(tuple(owner), tuple(map(tuple, sites)))

    def _losses(self, recovered: Recovered) -> list[InstructionType]:
        """Reopen the done shards that some partition may lack."""
        behind = self.job.spec.protect != "acked"  # mirrors may have been so
        keys: list[ShardKey] = []
        if recovered.taken_back or recovered.begun or behind:
            keys = list(self.shards.releasing)
        elif recovered.loaded and (newest := self.checkpoints.newest) is not None:
            snapshots = [snapshot for snapshot in newest.snapshots if snapshot.partition in set(recovered.loaded)]
            keys = list(self.shards.lacking(snapshots))
        if not (recovered.behind or behind):
            return []
        self._cost()
        if self.job.spec.protect == "lag":
            self.checkpoints.reruns = 0  # shards come back by this loss, whatever a script did that ran again
        samples = self.shards.reopen_done(keys)
        out = self.checkpoints.disown(recovered.partitions if behind else recovered.behind)
        inputs: Inputs = {"partitions": len(recovered.behind), "shards": len(keys), "samples": samples}
        what = f"{len(keys)} done shards ({samples} samples) are opened again"
        if recovered.begun:
            words = (
                f"{len(recovered.begun)} partitions were lost before anything could bring them back, and begin empty "
                f"again: {what}, and trained again for these partitions alone; every worker begins anew"
            )
            return [*out, Note("", Decision("begin partitions again", words, inputs))]
        if recovered.loaded:
            newest = self.checkpoints.newest
            snapshot = newest.checkpoint if newest is not None else 0
            inputs["checkpoint"] = snapshot
            words = (
                f"{len(recovered.loaded)} partitions were lost beyond their protection and go back to checkpoint "
                f"{snapshot}: {what}, and trained again for these partitions alone"
            )
            return [*out, Note("", Decision("fall back to images", words, inputs))]
        words = f"pushes that were acknowledged may not have reached every mirror: {what} and checked"
        return [*out, Note("", Decision("reopen shards", words, inputs))]

    def _publish(
        self, builder: PlacementBuilder, recovered: Recovered, steps: MoveSteps, why: str, out: list[InstructionType]
    ) -> None:
        old, protection = self.protection.placement, self.protection
        assert old is not None
        still = {*builder.owner, *(m.at for m in builder.mirrors), *(p.source for p in builder.missing.values())}
        away = {*protection.leaving, *self.reader.early()}
        places = places_of(m for m in self.reader.servers() if m.slot not in away or m.slot in still)
        snapshots = {
            b: c for b, c in builder.snapshots.items() if c == 0 or builder.missing
        }  # all of them in one placement
        protection.missing, protection.ready = builder.missing, sorted(builder.ready)
        protection.mirrors = builder.next_id - 1
        protection.inconsistent = []
        same_route = tuple(builder.owner) == old.owner and places == old.servers and not recovered.behind
        new = Placement(
            builder.version,
            tuple(builder.owner),
            places,
            old.route if same_route else builder.version,
            tuple(builder.mirrors),
            tuple(sorted(snapshots.items())),
            tuple(sorted({p.slot for p in places} & {*protection.leaving})),
        )
        same = msgspec.structs.replace(old, routing=old.route, emptied=new.emptied)
        if msgspec.structs.replace(new, version=old.version) == same:
            return
        protection.placement = new
        self._remember_map()
        action = "publish the map again"
        if recovered.partitions:
            action = "recover partitions"
        elif steps.switched:
            action = "switch partitions"
        elif steps.begun:
            action = "move partitions"
        elif steps.built:
            action = "make mirrors"
        left = [f"ps:{p.slot}" for p in old.servers if p.slot not in {s.slot for s in places}]
        gone = f"{', '.join(left)} is in the map no more" if left and not why else ""
        words = "; ".join(part for part in (why, recovered.words(), steps.words(), gone) if part)
        inputs: Inputs = {"partitions_missing": len(builder.missing), "moving": len(under_way(builder))}
        out.append(PublishPlacement(new, Decision(action, words or "what was needed for a step is there", inputs)))

    def _remember_map(self) -> None:
        placement, maps = self.protection.placement, self.protection.maps
        assert placement is not None
        life = {p.slot: p.incarnation for p in placement.servers}
        owners = tuple(sorted((s, life.get(s, Incarnation(0))) for s in set(placement.owner)))
        acks = Acks(owners, tuple((p.slot, p.incarnation) for p in placement.servers))
        if not maps or maps[-1] != acks:
            maps.append(acks)
            del maps[:-MAPS_REMEMBERED]

    def validate(self) -> None:
        """Assert what must always hold while the job is not over."""
        protection, placement = self.protection, self.protection.placement
        if placement is None:
            return
        spec, code = self.job.spec, self.reader.code
        assert len(placement.owner) == spec.partitions
        serving = {p.slot for p in placement.servers}
        if not self.job.over:
            for partition, slot in enumerate(placement.owner):
                assert slot in serving or PartitionId(partition) in protection.missing, (
                    f"partition {partition}: ps:{slot} is not there"
                )
        ids = [m.id for m in placement.mirrors]
        assert len(ids) == len(set(ids)) and all(0 < i <= protection.mirrors for i in ids), "a mirror id is used twice"
        assert set(protection.ready) <= set(ids), "a mirror that is gone is ready"
        assert set(protection.inconsistent) <= set(ids), "a mirror that is gone is torn"
        assert all(m.at in serving for m in placement.mirrors), "a mirror at a ps that is not there"
        snapshots = dict(placement.snapshots)
        for partition, pending in protection.missing.items():
            slot = placement.owner[partition]
            here = [m for m in placement.mirrors_of(partition) if m.at == slot and m.id in protection.ready]
            if pending.how is How.RECONSTRUCT:
                assert here, f"partition {partition} is to be folded at ps:{slot}, which has no complete mirror of it"
            elif pending.how in (How.PROMOTE, How.HAND_OVER):
                assert any(m.members == (partition,) for m in here), f"partition {partition} has no mirror at ps:{slot}"
            elif pending.how is How.BEGIN:
                assert snapshots.get(partition) == 0, (
                    f"partition {partition} is to begin empty, and the map does not say so"
                )
            elif pending.how is How.LOAD:
                assert snapshots.get(partition), f"partition {partition} is to be loaded, from nothing"
        layout = protection.layout
        assert layout is not None
        if len(protection.over) >= code.width and not protection.leaving:
            assert layout.shared(code) == 0, "units of a stripe share a ps in the wanted layout"
            limits = self.reader.limits()
            assert not limits or layout.crowded(code, limits) == 0, "too many units of a stripe share a machine"
