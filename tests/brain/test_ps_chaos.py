"""Parameter servers die, come, leave and tell late or twice: no partition is ever given to one that cannot have it.

The world below knows what each ps really holds, and what it could get hold of, apart from the brain's state. One run
again: ``EVERSTEP_SEED=17 pytest tests/brain/test_ps_chaos.py``.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from everstep.brain.brain import Brain
from everstep.brain.events import (
    DrainAsked,
    Event,
    FinishJob,
    MasterStarted,
    MemberJoined,
    MirrorsReady,
    NodeJoined,
    PartitionsReady,
    ProcessExited,
    PublishPlacement,
    ScaleAsked,
    StartProcess,
    StopProcess,
    by_ps,
)
from everstep.config.parity import parse_code
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.model.member import Address, Role
from everstep.model.placement import Mirror, Placement
from everstep.model.reasons import Arrival
from everstep.model.snapshot import Holdings
from seeds import seeds

NODE = NodeId("node0")
CODES = ["1+1", "4+1", "4+2", "2+2", "3+1", "0", "1+2"]


class Ps(msgspec.Struct):
    """One process. ``has``: partitions that it "serves", or has "kept" since they went elsewhere; ``whole``: mirrors
    that are complete; ``came``: how and by which placement it got a partition."""

    slot: Slot
    incarnation: Incarnation
    joined: bool = False
    ended: bool = False
    version: int = 0
    has: dict[int, str] = {}
    whole: set[int] = set()
    inconsistent: set[int] = set()
    came: dict[int, tuple[int, str]] = {}


class World:
    def __init__(self, seed: int, parity: str, ps: int) -> None:
        self.rng = random.Random(seed)
        self.code = parse_code(parity)
        self.spec = JobSpec(
            workers=1, ps=ps, parity=parity, partitions=self.rng.choice((12, 17, 24)), max_restarts=10**6
        )
        self.brain = Brain()
        self.steady = Brain()  # the same events, never restored
        self.at = 0.0
        self.master = 1
        self.ps: dict[Slot, Ps] = {}
        self.starting: list[Ps] = []
        self.placement: Placement | None = None
        self.finish: FinishJob | None = None
        self.kills = self.tears = 0
        self.first: dict[PartitionId, tuple[Slot, Incarnation]] = {}
        self.said: list[Event] = []

    def say(self, event: Event) -> None:
        self.said.append(event)
        instructions = self.brain.handle(event)
        assert instructions == self.steady.handle(event), "the restored brain wants something else"
        for instruction in instructions:
            match instruction:
                case StartProcess(_, Role.PS, slot, incarnation):
                    self.starting.append(Ps(slot, incarnation))
                case StopProcess(_, Role.PS, slot, incarnation):
                    self.stopped(slot, incarnation)
                case PublishPlacement(placement):
                    self.published(placement)
                case FinishJob():
                    self.finish = instruction
        self.brain.validate()

    # ------------------------------------------------------------ what is true

    def published(self, placement: Placement) -> None:
        old = self.placement
        assert placement.version == (old.version if old else 0) + 1
        changed = old is None or placement.owner != old.owner or placement.servers != old.servers
        assert placement.route == (placement.version if changed else (old.route if old else 0))
        self.placement = placement
        for place in placement.servers:
            ps = self.ps.get(place.slot)
            assert ps is not None and ps.incarnation == place.incarnation, "a ps in the map that is not there"
        for partition in range(placement.partitions):
            self.can_have(placement, PartitionId(partition))

    def owner(self, partition: int) -> Ps | None:
        assert self.placement is not None
        return self.ps.get(self.placement.owner[partition])

    def held(self, partition: int) -> bool:
        """By its owner."""
        ps = self.owner(partition)
        return ps is not None and ps.has.get(partition) == "serves"

    def can_have(self, placement: Placement, partition: PartitionId) -> None:
        """The owner holds it, or has a way to get it."""
        if self.held(partition):
            return
        ps = self.owner(partition)
        assert ps is not None, f"partition {partition} is given to one that is not there"
        if ps.has.get(partition) == "kept":
            return
        if (partition, 0) in placement.snapshots:  # it begins empty: only ever with whom it was given to first
            assert self.first.setdefault(partition, (ps.slot, ps.incarnation)) == (ps.slot, ps.incarnation)
            return
        mirrors = [m for m in placement.mirrors_of(partition) if m.at == ps.slot and m.id in ps.whole]
        assert mirrors, f"partition {partition} is given to ps:{ps.slot}, which has no complete mirror of it"
        if any(len(m.members) == 1 for m in mirrors):
            return
        mirror = mirrors[0]
        lost = [b for b in mirror.members if not self.held(b) and not self.single(placement, b)]
        rows = {m.row for m in placement.mirrors if m.members == mirror.members and self.complete(m)}
        assert len(lost) <= len(rows), f"members {lost} of a stripe are lost, rows {rows} are left"

    def single(self, placement: Placement, partition: int) -> bool:
        ps = self.owner(partition)
        mirrors = placement.mirrors_of(PartitionId(partition))
        return any(len(m.members) == 1 and ps is not None and m.at == ps.slot and self.complete(m) for m in mirrors)

    def complete(self, mirror: Mirror) -> bool:
        ps = self.ps.get(mirror.at)
        return ps is not None and mirror.id in ps.whole

    # ------------------------------------------------------------ what happens

    def stopped(self, slot: Slot, incarnation: Incarnation) -> None:
        for ps in self.starting:
            ps.ended = ps.ended or (ps.slot, ps.incarnation) == (slot, incarnation)
        there = self.ps.get(slot)
        if there is not None and there.incarnation == incarnation:
            placement = self.placement
            assert placement is not None
            assert slot not in placement.owner and not placement.mirrors_at(slot), "stopped while it holds something"
            there.ended = True

    def hello(self, ps: Ps) -> None:
        holds = Holdings(
            partitions=tuple(PartitionId(b) for b, how in ps.has.items() if how == "serves"),
            mirrors=tuple(ps.whole),
            placement=ps.version,
            incarnation=ps.incarnation,
            slot=ps.slot,
        )
        address = Address(NODE, f"ps{ps.slot}.{ps.incarnation}")
        ps.joined = True
        self.ps[ps.slot] = ps
        self.say(Event(self.at, MemberJoined(Role.PS, ps.slot, ps.incarnation, NODE, 1, address, (), holds)))

    def work(self, ps: Ps) -> None:
        """It sees the newest map and does one thing that it can do now."""
        placement = self.placement
        if placement is None or not ps.joined:
            return
        if all((p.slot, p.incarnation) != (ps.slot, ps.incarnation) for p in placement.servers):
            return
        mine = set(placement.owned_by(ps.slot))
        if placement.version > ps.version + 1:  # a partition may have gone and come back in between
            ps.came.update({b: (placement.version, "kept") for b, how in ps.has.items() if how == "serves"})
        ps.version = placement.version
        for partition in [b for b, how in ps.has.items() if how == "serves" and b not in mine]:
            ps.has[partition] = "kept"
            ps.came.pop(partition, None)
        here = {m.id: m for m in placement.mirrors_at(ps.slot)}
        ps.whole &= set(here)
        todo: list[int | Mirror] = [b for b in mine if ps.has.get(b) != "serves"]
        made = ps.whole | ps.inconsistent
        todo += [m for m in here.values() if m.id not in made and all(self.held(b) for b in m.members)]
        if not todo:
            return
        item = self.rng.choice(todo)
        if isinstance(item, Mirror):
            ps.whole.add(item.id)
            return
        if (PartitionId(item), 0) in placement.snapshots:
            ps.has[item] = "serves"
            return
        mirrors = [m for m in here.values() if item in m.members and m.id in ps.whole]
        single = next((m for m in mirrors if len(m.members) == 1), None)
        if ps.has.get(item) == "kept" and single is None:
            how = Arrival.RESUMED
        elif single is not None:
            ps.whole.discard(single.id)
            how = Arrival.PROMOTED
        else:
            others = [b for b in mirrors[0].members if b != item]
            gone = [b for b in others if not self.held(b)]
            if any(b not in mine for b in gone):
                return  # that one is on its way elsewhere
            how = Arrival.REBUILT
        ps.has[item] = "serves"
        ps.came[item] = (placement.version, how)
        for other in self.ps.values():  # it says goodbye
            if other is not ps and other.has.get(item) == "kept":
                del other.has[item]

    def tell(self, ps: Ps) -> None:
        if not ps.joined:
            return
        if ps.whole:
            self.say(Event(self.at, MirrorsReady(tuple(ps.whole)), by_ps(ps.slot, ps.incarnation)))
        for partition, (version, how) in list(ps.came.items()):
            self.say(
                Event(self.at, PartitionsReady(version, (PartitionId(partition),), how), by_ps(ps.slot, ps.incarnation))
            )

    def tear(self, ps: Ps) -> None:
        """One of its mirrors lacks something: it is worth nothing from now on."""
        mirror = self.rng.choice(sorted(ps.whole))
        ps.whole.discard(mirror)
        ps.inconsistent.add(mirror)
        before = self.brain.partitions.levels()["full"]
        self.say(Event(self.at, MirrorsReady((), (mirror,)), by_ps(ps.slot, ps.incarnation)))
        self.tears += 1
        assert self.placement is not None and self.brain.partitions.levels()["full"] <= before
        assert all(m.id != mirror for m in self.placement.mirrors) or self.brain.state.protection.inconsistent

    def kill(self, ps: Ps) -> None:
        del self.ps[ps.slot]
        self.say(Event(self.at, ProcessExited(Role.PS, ps.slot, ps.incarnation, -9)))

    def expendable(self) -> bool:
        """Whether the brain holds that any one ps may be lost now."""
        levels = self.brain.partitions.levels()
        return bool(levels) and levels["none"] == 0 and not self.starting

    def step(self, calm: bool = False) -> None:
        self.at += 0.1
        rng = self.rng
        if self.starting and rng.random() < 0.5:
            self.hello(self.starting.pop(0))
            return
        if not self.ps:
            return
        for gone in [p for p in self.ps.values() if p.ended]:
            del self.ps[gone.slot]
            self.say(Event(self.at, ProcessExited(Role.PS, gone.slot, gone.incarnation, 0)))
            return
        ps = rng.choice(list(self.ps.values()))
        what = rng.random()
        if what < 0.55:
            self.work(ps)
        elif what < 0.8 or calm:
            self.tell(ps)
        elif what < 0.84 and self.said:
            self.said = self.said[-60:]
            self.say(rng.choice(self.said))  # said again, late
        elif what < 0.87:
            self.hello(ps)
        elif what < 0.9:
            self.master += 1
            self.say(Event(self.at, MasterStarted(Incarnation(self.master), self.spec, True)))
        elif what < 0.93:
            self.brain = Brain.restore(self.brain.snapshot())
        elif what < 0.95:
            self.say(Event(self.at, ScaleAsked(Role.PS, self.code.width + rng.randrange(5))))
        elif what < 0.955 and len(self.ps) > self.code.width + 1:
            self.say(Event(self.at, DrainAsked(f"ps:{ps.slot}", 10.0)))
        elif what < 0.965 and ps.whole and self.expendable():
            self.tear(ps)
        elif self.expendable():
            full = self.brain.partitions.levels()["full"] == self.spec.partitions
            self.kill(ps)
            self.kills += 1
            if self.code.m == 2 and full and rng.random() < 0.5:
                self.kill(rng.choice(list(self.ps.values())))

    # ------------------------------------------------------------ the end

    def heal(self) -> None:
        """No more trouble: all that was begun comes to its end, and the protection is as promised."""
        self.say(Event(self.at, ScaleAsked(Role.PS, self.code.width + 2)))
        for _ in range(4000):
            self.step(calm=True)
            if self.at_rest():
                return
        raise AssertionError(f"not at rest: {self.brain.state.protection!r} {self.placement}")

    def at_rest(self) -> bool:
        placement, brain = self.placement, self.brain
        assert placement is not None
        if self.starting or len(placement.servers) != self.code.width + 2 or brain.partitions.protection.missing:
            return False
        layout = brain.partitions.protection.layout
        assert layout is not None
        full = not self.code.m or brain.partitions.levels() == {"full": placement.partitions, "less": 0, "none": 0}
        sites = sorted((m.members[0] // self.code.k, m.row, m.at) for m in placement.mirrors)
        wanted = sorted((j, r, s) for j, row in enumerate(layout.sites) for r, s in enumerate(row))
        return full and placement.owner == layout.owner and sites == wanted


@pytest.mark.parametrize("parity", CODES)
@pytest.mark.parametrize("seed", seeds(8, 40))
def test_ps_chaos(seed: int, parity: str) -> None:
    world = World(seed, parity, parse_code(parity).width + seed % 3)
    world.say(Event(0.0, MasterStarted(Incarnation(1), world.spec)))
    world.say(Event(0.0, NodeJoined(NODE, "", 0, 0)))
    for _ in range(400):
        world.step()
        assert world.finish is None, world.finish
    world.heal()
    placement = world.placement
    assert placement is not None
    assert all(world.held(b) for b in range(placement.partitions))
