"""Events of a small job."""

from __future__ import annotations

from everstep.brain.events import (
    BrainEvent,
    MasterStarted,
    MemberJoined,
    NodeJoined,
    PlanRegistered,
    ShardAsked,
    ShardDone,
)
from everstep.config.spec import JobSpec
from everstep.ids import Incarnation, NodeId, Slot
from everstep.model.member import Address, Role
from everstep.model.shard import Plan, lease_no, shard_key

ONE = Incarnation(1)
NODE = NodeId("node0")


def story(shards: int) -> list[BrainEvent]:
    out: list[BrainEvent] = [
        MasterStarted(1.0, ONE, JobSpec(workers=1, ps=1, buckets=4)),
        NodeJoined(2.0, NODE, "", 0, 0),
        MemberJoined(3.0, Role.PS, Slot(0), ONE, NODE, 1, Address(NODE, "x")),
        MemberJoined(4.0, Role.WORKER, Slot(0), ONE, NODE, 2),
        PlanRegistered(5.0, Slot(0), ONE, Plan(name="d", samples=10 * shards, shard_samples=10, seed=0)),
    ]
    for n in range(shards):
        lease = lease_no(1, n + 1)
        out.append(ShardAsked(6.0 + n, Slot(0), ONE, 0, 1, n + 1))
        out.append(ShardDone(6.5 + n, Slot(0), ONE, shard_key(0, 0, n), lease, ((Slot(0), ONE),)))
    return out
