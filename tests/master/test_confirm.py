"""With eager parity a done shard is released when the ps' heartbeats say that all mirrors have it."""

from __future__ import annotations

from everstep.brain.brain import Brain
from everstep.brain.events import (
    Event,
    FactType,
    InstructionType,
    MasterStarted,
    MemberJoined,
    MirrorsReady,
    NodeJoined,
    PlanRegistered,
    ReleaseShards,
    ShardAsked,
    ShardDone,
    by_ps,
    by_worker,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, LeaseNo, NodeId, Slot
from everstep.master.confirm import SLACK_S, Confirmations
from everstep.model.member import Address, Role
from everstep.model.shard import ShardSchedule, lease_no, shard_key

ONE = Incarnation(1)
NODE = NodeId("node0")


class Shell:
    def __init__(self, spec: JobSpec) -> None:
        self.brain = Brain()
        self.out: list[InstructionType] = []
        self.confirmations = Confirmations(self.brain, spec, self.tell)
        self.tell(Event(0.0, MasterStarted(ONE, spec)))
        self.tell(Event(0.0, NodeJoined(NODE, "", 0, 0)))
        for slot in range(spec.ps):
            where = Address(NODE, f"sock/ps-{slot}.sock")
            self.tell(Event(0.0, MemberJoined(Role.PS, Slot(slot), ONE, NODE, 1, where)))
        self.tell(Event(0.0, MemberJoined(Role.WORKER, Slot(0), ONE, NODE, 2)))
        placement = self.brain.placement
        assert placement is not None
        for mirror in placement.mirrors:  # before each was whole once, nothing is released
            self.tell(Event(0.0, MirrorsReady((mirror.id,)), by_ps(mirror.at, ONE)))
        self.tell(
            Event(
                0.0,
                PlanRegistered(ShardSchedule(name="d", samples=40, shard_samples=10, seed=0)),
                by_worker(Slot(0), ONE),
            )
        )

    def tell(self, said: Event | FactType) -> None:
        self.out = self.brain.handle(said if isinstance(said, Event) else Event(0.0, said))

    def done(self, at: float, index: int, ps: int) -> None:
        self.tell(Event(at, ShardAsked(0, 1, index + 1), by_worker(Slot(0), ONE)))
        servers = tuple((Slot(s), ONE) for s in range(ps))
        lease = LeaseNo(lease_no(1, index + 1))
        self.tell(Event(at, ShardDone(shard_key(0, 0, index), lease, servers), by_worker(Slot(0), ONE)))

    def beats(self, at: float, *tickets: tuple[int, int]) -> list[InstructionType]:
        """One beat of every ps: (made, confirmed); what the tick after it gave."""
        self.out = []
        for slot, (made, confirmed) in enumerate(tickets):
            readings = {"outbox_ticket": float(made), "outbox_done": float(confirmed)}
            self.confirmations.beat(Slot(slot), ONE, readings, at)
        self.confirmations.tick(at)
        return self.out


def test_released_when_every_ps_has_confirmed() -> None:
    shell = Shell(JobSpec(ps=2, partitions=2, parity="1+1", protect="eager"))
    shell.beats(100.0, (0, 0), (0, 0))
    shell.done(100.5, 0, 2)
    assert not any(isinstance(i, ReleaseShards) for i in shell.out)
    shell.beats(101.0, (7, 3), (9, 9))
    for second in range(102, 200):  # ps 0's mirrors lag for good: nothing is released, however long it takes
        assert shell.beats(float(second), (7 + second, 6), (9, 9)) == []
    assert shell.beats(200.0, (400, 320), (9, 9)) != [], "320 was made at 170 or later"
    assert not shell.brain.shards.releasing and shell.brain.checkpoints.confirmed <= 200.0 - SLACK_S


def test_a_new_life_begins_anew() -> None:
    shell = Shell(JobSpec(ps=2, partitions=2, parity="1+1", protect="eager"))
    shell.done(100.5, 0, 2)
    for second in range(101, 131):
        assert shell.beats(float(second), (7, 7), (9, 9)) == []
    shell.confirmations.beat(Slot(0), Incarnation(2), {"outbox_ticket": 1.0, "outbox_done": 1.0}, 131.0)
    for second in range(132, 200):
        shell.confirmations.beat(Slot(1), ONE, {"outbox_ticket": 9.0, "outbox_done": 9.0}, float(second))
        shell.out = []
        shell.confirmations.tick(float(second))
        assert shell.out == [], "that life is not the one in the map"


def test_without_eager_parity_nobody_waits() -> None:
    shell = Shell(JobSpec(ps=2, partitions=2))
    for index in range(4):
        shell.done(1.0 + index, index, 2)
    assert not shell.brain.shards.releasing
    assert shell.beats(1000.0, (7, 7), (9, 9)) == []
