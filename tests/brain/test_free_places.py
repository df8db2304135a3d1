"""A place that becomes free goes to what waits for one; what is emptied ends empty, whatever happens meanwhile."""

from __future__ import annotations

import random
from typing import Any

import pytest
from test_machines_of_ps import Job

from everstep.brain import events as said
from everstep.brain.events import Event, NodeJoined, NodeLost, Refused, Reply, by_ps, by_worker
from everstep.ids import Incarnation, NodeId, PartitionId, Slot
from everstep.model.member import Role
from everstep.model.reasons import Arrival, CheckpointReason
from everstep.model.shard import ShardSchedule
from everstep.model.snapshot import CheckpointFile, PartitionSnapshot
from everstep.policies.node_selection import HOME_NODE
from seeds import seeds

COMMAND = said.Sender("command")


def alone(ps: int, parity: str, places: int = 1, refills: bool = True, **more: Any) -> Job:
    """Return a job whose first node has the master only, on as many others as it has ps."""
    job = Job(ps=ps, parity=parity, nodes=ps + 1, master_alone=True, refills=refills, **more)
    job.tell(NodeJoined(HOME_NODE, "", 0, 0, machine="home"))
    for number in range(ps):
        job.tell(NodeJoined(NodeId(f"n{number}"), "", 1, places, machine=f"m{number}"))
    job.settle()
    return job


def end_stopped(job: Job) -> None:
    stop = job.stopping.pop(0)
    job.tell(said.ProcessExited(stop.role, stop.slot, stop.incarnation, 0))


def settle_but_ends(job: Job) -> None:
    """All that the map asks for is there, and the ps that are told to end have not ended yet."""
    placement = job.brain.placement
    assert placement is not None
    while job.work(placement):
        placement = job.brain.placement
        assert placement is not None


@pytest.mark.parametrize("refills", [True, False])
def test_a_drained_ps_that_found_no_place_is_started_where_one_becomes_free(refills: bool) -> None:
    """Scaled in by one while a node is emptied: the place of the one that leaves is the place of the other."""
    job = alone(3, "0", refills=refills)
    job.tell(said.ScaleAsked(Role.PS, 2), COMMAND)
    settle_but_ends(job)
    job.tell(said.DrainAsked("n1", 0.0))
    settle_but_ends(job)
    assert [stop.slot for stop in job.stopping] == [2, 1]
    job.stopping.reverse()
    end_stopped(job)
    assert job.notes[-1] == "ps:1 waiting: no node has a free place for it" and not job.starting
    end_stopped(job)
    # (masters of before this rule waited until the next node joined; their journals are replayed so)
    assert [(order.slot, order.node) for order in job.starting] == ([(1, "n2")] if refills else [])
    job.settle()
    assert job.nodes == ({0: "n0", 1: "n2"} if refills else {0: "n0"})


@pytest.mark.parametrize("refills", [True, False])
def test_a_job_that_is_scaled_goes_on_emptying_a_node(refills: bool) -> None:
    job = alone(3, "1+1", places=2, refills=refills)
    job.tell(said.DrainAsked("n1", 0.0))
    job.tell(said.ScaleAsked(Role.PS, 2), COMMAND)
    job.settle()
    assert ("n1" in job.nodes.values()) is not refills, "before this rule the scale forgot what was to be emptied"
    assert not refills or sorted(job.nodes) == [0, 1]


def test_a_worker_that_waits_takes_the_place_of_one_that_leaves() -> None:
    job = Job(workers=2, ps=1, parity="0", nodes=3, master_alone=True)
    for node, places in ((HOME_NODE, 0), (NodeId("a"), 1), (NodeId("b"), 1)):
        job.tell(NodeJoined(node, "", places, places, machine=str(node)))
    job.settle()
    workers = job.brain.members.workers
    assert [workers[Slot(slot)].member.node for slot in (0, 1)] == ["a", "b"]
    job.tell(said.ScaleAsked(Role.WORKER, 3), COMMAND)
    assert Slot(2) not in workers, "both nodes are full"
    job.tell(said.DrainAsked("worker:1", 0.0))
    job.tell(said.ProcessExited(Role.WORKER, Slot(1), workers[Slot(1)].member.incarnation, 0))
    assert workers[Slot(2)].running and workers[Slot(2)].member.node == "b" and not workers[Slot(1)].running


def test_a_scale_that_leaves_only_ps_without_a_place_is_refused() -> None:
    job = alone(2, "0")
    job.tell(said.DrainAsked("n0", 0.0))
    job.settle()
    assert job.nodes == {1: "n1"} and "no node has a free place" in job.notes[-1]
    asked = Event(job.at + 1.0, said.ScaleAsked(Role.PS, 1), COMMAND)
    (answer,) = job.brain.handle(asked)
    assert isinstance(answer, Reply) and isinstance(answer.answer, Refused)
    assert answer.answer.error.startswith("1 ps: not yet: all that would be left are emptied with their nodes or wait")
    job.join(NodeId("n2"), "m2", ps=1)
    assert job.nodes == {0: "n2", 1: "n1"}
    job.tell(said.ScaleAsked(Role.PS, 1), COMMAND)
    job.settle()
    assert job.nodes == {0: "n2"}


@pytest.mark.parametrize("saves", [True, False])
def test_a_node_that_goes_before_it_is_empty_leaves_no_hole(saves: bool) -> None:
    """Its ps is wanted elsewhere: on a node that has a place, or on the next one that comes."""
    for places in (2, 1):
        job = alone(3, "1+1", places=places, saves=saves)
        job.tell(said.DrainAsked("n1", 12.0))
        job.tell(NodeLost(NodeId("n1"), "gone"))
        assert any("ps:1 not emptied in time" in note for note in job.notes)
        job.settle()
        assert sorted(job.nodes) == ([0, 1, 2] if saves and places == 2 else [0, 2])
        job.join(NodeId("n9"), "m9", ps=1)
        assert sorted(job.nodes) == ([0, 1, 2] if saves else [0, 2]), "masters of before never started it again"
        assert not saves or job.brain.state.protection.leaving == []


# ------------------------------------------------------------ a checkpoint on notice


def trains(job: Job) -> None:
    """A worker is there and has begun with the data, so that there is something to lose."""
    worker = by_worker(Slot(0), Incarnation(1))
    job.tell(said.MemberJoined(Role.WORKER, Slot(0), Incarnation(1), job.brain.members.workers[Slot(0)].member.node, 1))
    job.tell(said.PlanRegistered(ShardSchedule(name="d", samples=90, shard_samples=30, seed=0)), worker)
    job.tell(said.ShardAsked(0, 1, 1), worker)


def writing(job: Job) -> CheckpointReason | None:
    found = job.brain.checkpoints.writing
    return found.reason if found is not None else None


def test_a_notice_of_the_only_ps_takes_a_checkpoint_and_the_next_one_loads_it() -> None:
    job = alone(1, "0", workers=1, checkpoint_every="1h")
    trains(job)
    job.tell(said.DrainAsked("n0", 0.0))
    assert writing(job) is None and not job.brain.members.nodes[NodeId("n0")].draining, "by hand it is refused"
    job.tell(said.DrainAsked("n0", 12.0))
    assert writing(job) is CheckpointReason.RECLAIM
    assert any("and no other ps could take them: a checkpoint is taken" in note for note in job.notes), job.notes
    number = job.brain.checkpoints.numbers
    job.tell(said.SnapshotsWritten(number, whole(job)), by_ps(Slot(0), Incarnation(1)))
    job.tell(said.CheckpointCommitted(number))
    job.tell(NodeLost(NodeId("n0"), "gone"))
    assert not job.brain.job.over, "its rows are in the checkpoint"
    job.join(NodeId("n9"), "m9", ps=1)
    assert job.nodes == {0: "n9"}
    assert any("go back to checkpoint 1" in note or "fall back to images" in note for note in job.notes)


def whole(job: Job) -> tuple[PartitionSnapshot, ...]:
    number = job.brain.checkpoints.numbers
    file = CheckpointFile(f"images/{number:06d}/bucket-0.img", 10, "")
    seq = {"seq": number, "fingerprint": 0, "watermarks": (), "files": (file,), "bytes_written": 10}
    return tuple(PartitionSnapshot(partition=PartitionId(b), **seq) for b in range(job.spec.partitions))


@pytest.mark.parametrize(
    ("more", "takes"),
    [
        ({"parity": "0", "checkpoint_every": "1h"}, True),
        ({"parity": "1+1", "checkpoint_every": "1h"}, False),
        ({"parity": "0"}, False),
        ({"parity": "0", "checkpoint_every": "1h", "saves": False}, False),
    ],
)
def test_a_notice_takes_a_checkpoint_where_only_that_node_has_rows(more: dict[str, Any], takes: bool) -> None:
    job = alone(3, **{"workers": 1, "places": 2, **more})
    trains(job)
    job.tell(said.DrainAsked("n1", 12.0))
    assert (writing(job) is CheckpointReason.RECLAIM) is takes
    assert job.brain.members.nodes[NodeId("n1")].draining
    job.tell(said.DrainAsked("n2", 12.0))
    both = takes or more["parity"] == "1+1"  # (a partition and its mirror may be on the two)
    assert (writing(job) is CheckpointReason.RECLAIM) is both and job.brain.checkpoints.numbers == both
    job.settle()
    assert set(job.nodes.values()) == {"n0"}


def _step(job: Job, draw: random.Random) -> None:
    """Do one thing of those that are under way."""
    kind = draw.choice(["start"] * bool(job.starting) + ["stop"] * bool(job.stopping) + ["work"])
    placement = job.brain.placement
    if kind == "start":
        job.starting.insert(0, job.starting.pop(draw.randrange(len(job.starting))))
        job.say_hello()
    elif kind == "stop":
        job.stopping.insert(0, job.stopping.pop(draw.randrange(len(job.stopping))))
        end_stopped(job)
    elif placement is not None:
        place = draw.choice(placement.servers)
        by = by_ps(place.slot, place.incarnation)
        if draw.random() < 0.5:
            job.tell(said.MirrorsReady(tuple(m.id for m in placement.mirrors_at(place.slot))), by)
        else:
            job.tell(
                said.PartitionsReady(placement.version, tuple(placement.owned_by(place.slot)), Arrival.REBUILT), by
            )


@pytest.mark.parametrize("seed", seeds(40, 1500))
def test_at_rest_nobody_waits_beside_a_free_place_and_drained_nodes_are_empty(seed: int) -> None:
    draw = random.Random(seed)
    parity, width = draw.choice([("0", 2), ("1+1", 2), ("2+1", 3)])
    ps = draw.randint(width, width + 2)
    job = alone(ps, parity, draw.choice([1, 1, 2]))
    nodes = [NodeId(f"n{number}") for number in range(ps)]
    for _ in range(draw.randint(1, 6)):
        open_ = [node for node in nodes if not job.brain.members.nodes[node].draining]
        match draw.choice(["drain", "drain", "scale", "join", "restart"] + ["lose"] * (parity != "0")):
            case "drain" if open_:
                job.tell(said.DrainAsked(draw.choice(open_), 0.0))
            case "scale":
                job.tell(said.ScaleAsked(Role.PS, draw.randint(width, width + 3)), COMMAND)
            case "join":
                nodes.append(NodeId(f"n{len(nodes)}"))
                job.tell(NodeJoined(nodes[-1], "", 1, 1, machine=f"m{len(nodes) - 1}"))
            case "lose" if len(open_) > width:  # (no more than parity can rebuild, one at a time)
                job.settle()
                drained = [node for node in nodes if job.brain.members.nodes[node].draining]
                job.tell(NodeLost(draw.choice(drained or open_), "it is gone"))
            case "restart":
                job.tell(said.DrainAsked(f"ps:{draw.randrange(ps)}", 0.0, again=draw.random() < 0.5))
        for _ in range(draw.randint(0, 12)):
            _step(job, draw)
    job.settle()
    brain, members = job.brain, job.brain.members
    waiting = [slot for slot, record in members.servers.items() if record.waiting and slot < brain.job.ps_wanted]
    assert not waiting or brain.concerns.processes.ps_rooms().choose(None, None) is None, job.notes[-8:]
    left = [slot for slot, node in job.nodes.items() if members.nodes[NodeId(node)].draining]
    assert not left, (left, job.notes[-8:])
    assert not [slot for slot in brain.state.protection.leaving if members.servers[slot].running], job.notes[-8:]
