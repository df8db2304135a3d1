"""Events of a small job."""

from __future__ import annotations

from everstep.brain.events import (
    Event,
    MasterStarted,
    MemberJoined,
    NodeJoined,
    PlanRegistered,
    ShardAsked,
    ShardDone,
    by_worker,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.member import Address, Role
from everstep.model.shard import ShardSchedule, lease_no, shard_key

ONE = Incarnation(1)
NODE = NodeId("node0")


def story(shards: int) -> list[Event]:
    out: list[Event] = [
        Event(1.0, MasterStarted(ONE, JobSpec(workers=1, ps=1, partitions=4))),
        Event(2.0, NodeJoined(NODE, "", 0, 0)),
        Event(3.0, MemberJoined(Role.PS, Slot(0), ONE, NODE, 1, Address(NODE, "x"))),
        Event(4.0, MemberJoined(Role.WORKER, Slot(0), ONE, NODE, 2)),
        Event(
            5.0,
            PlanRegistered(ShardSchedule(name="d", samples=10 * shards, shard_samples=10, seed=0)),
            by_worker(Slot(0), ONE),
        ),
    ]
    for n in range(shards):
        lease = lease_no(1, n + 1)
        out.append(Event(6.0 + n, ShardAsked(0, 1, n + 1), by_worker(Slot(0), ONE)))
        out.append(Event(6.5 + n, ShardDone(shard_key(0, 0, n), lease, ((Slot(0), ONE),)), by_worker(Slot(0), ONE)))
    return out
